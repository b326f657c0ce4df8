"""Keys of algorithms, sampling, evaluation and updates: what of each must show (see `tests/simulator/test_keys.py`)."""

from tests.keys import DPO, JUDGED, KTO, LENGTHS, QUICK, SHIPPED, Case, Edits, like

HOT: Edits = {"sampling/temperature": 1.5, "sampling/top_p": 0.9, "sampling/repetition_penalty": 1.1}
SLOPES: Edits = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "measured": []}
STRETCHED: Edits = HOT | {"sampling/lengths": SLOPES}
MOVING: Edits = STRETCHED | {"sampling/temperature": {"start": 1.2, "end": 0.8, "schedule": "linear"}}
MEASURED: Edits = HOT | {
    "sampling/lengths": SLOPES | {"temperature": 0.0, "measured": [{"temperature": 1.4, "factor": 2.0}]}
}
MIXED: Edits = STRETCHED | {
    "sampling/temperature": 1.0,
    "sampling/mixture": [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.3, "share": 0.5}],
}
CHANGES: dict[str, Case] = {
    "sampling/temperature/start": Case(QUICK, {"sampling/temperature/start": 1.6}, MOVING),
    "sampling/temperature/end": Case(QUICK, {"sampling/temperature/end": 0.4}, MOVING),
    "sampling/temperature/schedule": Case(
        QUICK, {"sampling/temperature/schedule": "cosine"}, MOVING | {"num_steps": 5}
    ),
    "sampling/mixture/temperature": Case(QUICK, {"sampling/mixture/0/temperature": 0.3}, MIXED),
    "sampling/mixture/share": Case(
        QUICK, {"sampling/mixture/0/share": 0.25, "sampling/mixture/1/share": 0.75}, MIXED
    ),
    "sampling/top_p": Case(QUICK, {"sampling/top_p": 0.5}, STRETCHED),
    "sampling/repetition_penalty": Case(QUICK, {"sampling/repetition_penalty": 1.5}, STRETCHED),
    "sampling/best_of": Case(QUICK, {"sampling/best_of": 2}),
    "sampling/beams": Case(QUICK, {"sampling/beams": 8}),
    "sampling/lengths/temperature": Case(QUICK, {"sampling/lengths/temperature": 2.0}, STRETCHED),
    "sampling/lengths/top_p": Case(QUICK, {"sampling/lengths/top_p": 4.0}, STRETCHED),
    "sampling/lengths/repetition_penalty": Case(QUICK, {"sampling/lengths/repetition_penalty": 5.0}, STRETCHED),
    "sampling/lengths/measured/temperature": Case(
        QUICK,
        {"sampling/lengths/measured": [{"temperature": 1.0, "factor": 1.0}, {"temperature": 9.0, "factor": 2.0}]},
        MEASURED | {
            "sampling/lengths": SLOPES | {
                "temperature": 0.0,
                "measured": [{"temperature": 1.0, "factor": 1.0}, {"temperature": 2.0, "factor": 2.0}],
            }
        },
    ),
    "sampling/lengths/measured/factor": Case(QUICK, {"sampling/lengths/measured/0/factor": 3.0}, MEASURED),
    "evaluate/every_steps": Case(QUICK, {"evaluate/every_steps": 1}),
    "evaluate/prompts": Case(QUICK, {"evaluate/prompts": 8}, {"evaluate/every_steps": 1}),
    "evaluate/samples_per_prompt": Case(QUICK, {"evaluate/samples_per_prompt": 3}, {"evaluate/every_steps": 1}),
    "update/microbatch_samples": Case(QUICK, {"update/microbatch_samples": 2}),
    "update/pack": Case(QUICK, {"update/pack": "packed"}),
    "algorithm/online": Case(DPO, {"algorithm/online": True}, {
        "pools": {"train": "gpu[0:6]", "frozen": "gpu[6]", "rest": "gpu[7]"},
        "sharing": {"frozen": {"how": "resident"}},
        "models/reward": {"arch": "small-llama"},
        "place/reference.score/replicas": 1,
        "place/reward.score": {"pool": "frozen"},
        "place/actor.generate": [{"pool": "rest"}],
        "workload/response_tokens": {"dist": "fixed", "value": 100},
    }),
    "algorithm/kl": Case(KTO, {"algorithm/kl": "none"}),
    "models/reward/lora/rank": Case(JUDGED, {"models/reward/lora/rank": 64}, {"models/reward/lora": {"rank": 8}}),
}  # fmt: skip
_arms = [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.3, "share": 0.5}]
_chosen: Edits = {"sampling/mixture": _arms, "sampling/bandit": {}}
MARKED: dict[str, Case] = {
    f"sampling/bandit/{name}": Case(QUICK, {f"sampling/bandit/{name}": value}, _chosen)
    for name, value in (("rule", "ucb"), ("floor", 0.3), ("discount", 0.5))
} | {
    f"sampling/entropy/{name}": Case(QUICK, {f"sampling/entropy/{name}": value}, {"sampling/entropy": {}})
    for name, value in (("low", 1.0), ("high", 2.0), ("step", 0.2), ("most", 0.1))
} | {"workload/end": Case(QUICK, {"workload/end": "eos"})}  # fmt: skip
"""what changes no span: it moves temperatures, or says who ends responses in execution"""
_lengths = {"dist": "fixed", "value": 30}
_node = SHIPPED[JUDGED]["cluster"]["sites"][0]["nodes"][0]
_kinds = [_node, _node | {"name": "new", "device": "h100-80g-sxm", "intra": "nvlink4"}]
_judged: Edits = {"place/reward.train/zero_stage": 0, "place/reward.train/data_parallel": 4}
CHANGES |= {
    f"evaluate/response_tokens/{name}": Case(
        QUICK, {"evaluate/response_tokens": edit}, {"evaluate/every_steps": 1, "evaluate/response_tokens": before}
    )
    for name, before, edit in (
        ("dist", LENGTHS, _lengths),
        ("value", _lengths, _lengths | {"value": 12}),
        ("mean", LENGTHS, LENGTHS | {"mean": 30}),
        ("p95", LENGTHS, LENGTHS | {"p95": 30}),
        ("max", LENGTHS, LENGTHS | {"max": 24}),
        ("values", {"dist": "empirical", "values": [9, 30]}, {"dist": "empirical", "values": [9, 40]}),
    )
}
CHANGES |= {
    f"place/reward.train/{name}": Case(JUDGED, {f"place/reward.train/{name}": value}, _judged | before)
    for name, value, before in (
        ("pool", "other", {"cluster/sites/0/nodes": _kinds, "pools": {"train": "gpu[0:8]", "other": "new[0:8]"}}),
        ("data_parallel", 2, {}),
        ("tensor_parallel", 2, {}),
        ("pipeline_parallel", 2, {}),
        ("context_parallel", 2, {}),
        ("expert_parallel", 2, {"models/reward/arch": "qwen3-30b-a3b"}),
        ("zero_stage", 3, {}),
        ("offload", "optimizer", {}),
    )
}
CHANGES["place/reward.train/threads"] = Case(QUICK, {"place/reward.train/threads": 2}, {
    "algorithm": {"name": "reward_model"},
    "models/reward": like("actor"),
    "place/reward.train": {"pool": "all"},
})  # fmt: skip
