"""A case for every key of a scenario: what is changed, and what is set before so that it matters."""

from tests import data_keys
from tests import learning_keys as learning
from tests.keys import BIG, DPO, JUDGED, LENGTHS, QUICK, SHIPPED, TINY, Case, Edits, like

TWO_MACHINES: Edits = {
    "cluster": {
        "sites": [{"nodes": [{"name": "n", "count": 2, "device": "cpu-core", "devices": 1, "intra": "shared-memory"}]}]
    },
    "pools": {"all": "n[0]", "other": "n[1]"},
    "sharing": {"all": {"how": "resident"}, "other": {"how": "resident"}},
}
SECOND = {"place/actor.generate/0/pool": "other"}
ROOM = {
    "pools": {
        "actors": "train[0:6]",
        "critic": "train[6:8]",
        "spare": "train[8:12]",
        "reference": "serve[0]",
        "reward": "serve[1]",
        "rollout": "serve[2:4]",
    }
}
WIDE = {
    "pools": {
        "actors": "train[0:6]",
        "critic": "train[6]",
        "reference": "train[8:10]",
        "reward": "serve[0:2]",
        "rollout": "serve[2:4]",
    }
}
HEAD: Edits = {
    "models/reward": {"arch": None, "like": "reference", "dtype": "bfloat16", "weights": "random"},
    "place/reward.score/pool": "reference",
    "pools/reference": "serve[0:2]",
    "pools/reward": "train[8]",
    "pools/spare": "train[9:12]",
}
JUDGE: Edits = {
    "place/reward.score/kind": "remote",
    "place/reward.score/max_batch_samples": 1,
    "place/reward.score/remote": {
        "latency": 10.0, "latency_p95": 20.0, "timeout": 15.0, "failure_share": 0.1, "retries": 2, "concurrency": 8,
    },
}  # fmt: skip
"""a reward that takes longer than everything beside it"""
REMOTE_CHANGES: Edits = {
    "latency": 12.0, "latency_p95": 15.0, "timeout": 30.0, "failure_share": 0.5, "retries": 0, "concurrency": 64,
}  # fmt: skip
TIGHT: Edits = {
    "rollout/kv_bytes": 3e5,
    "rollout/block_tokens": 4,
    "rollout/max_num_batched_tokens": 24,
    "workload/prompt_tokens": {"dist": "fixed", "value": 30},
}
"""few KV blocks, and prompts longer than the budget: requests wait, are preempted, and find their blocks again"""
MOE: Edits = {"models/actor/arch": "qwen3-30b-a3b", "place/actor.generate/0/engines": 1}
SITES: Edits = {
    "cluster": {
        "sites": [
            {"name": "a", "nodes": [SHIPPED[BIG]["cluster"]["sites"][0]["nodes"][0]], "fabric": {"link": "ib-hdr200"}},
            {"name": "b", "nodes": [SHIPPED[BIG]["cluster"]["sites"][0]["nodes"][1]], "fabric": {"link": "ib-hdr200"}},
            {"name": "c", "nodes": [SHIPPED[BIG]["cluster"]["sites"][0]["nodes"][1] | {"name": "idle"}]},
        ],
        "wan": [{"between": ["a", "b"], "link": "wan-10"}, {"between": ["b", "c"], "bandwidth": 2e8, "latency": 0.1}],
    }
}
"""the trainers on one site, everything else on the second"""
SENT: Edits = {"experience": {"transport": "rpc"}}
CONTINUOUS: Edits = {"schedule/mode": "asynchronous"}
PLAIN: Edits = {"place/actor.train/tensor_parallel": 1, "place/actor.train/zero_stage": 0}
TWO_ENGINES: Edits = {"place/actor.generate": [{"pool": "all"}, {"pool": "all", "speed": 2.0}]}
LOST: Edits = {
    "checkpoint/every_steps": 1,
    "faults": [{"kind": "trainer_lost", "at": 300.0, "target": "actor.train[0]"}],
}
GONE: Edits = {"faults": [{"kind": "worker_lost", "at": 20.0, "target": "actor.generate[0]"}]}
MORE_ENGINES: Edits = {
    "pools/rollout": "serve[1:4]", "pools/reward": "train[8]", "pools/spare": "train[9:12]",
    "place/actor.generate/0/engines": 3,
}  # fmt: skip
SCALED: Edits = {
    "scaling": {"actor.generate": {"min": 1, "max": 2, "start": 5.0, "drain": 40.0, "hold": 1.0, "look": 1.0}},
    "rollout/max_num_seqs": 16,
}
SLOWED: Edits = {"faults": [{"kind": "straggler", "at": 5.0, "target": "actor.generate[0]", "factor": 0.5}]}
SLICED: Edits = {"sharing/all": {"how": "time_sliced", "switch": "offload"}, "schedule/mode": "synchronous"}
PHASES = [["actor.generate"], ["reference.score", "critic.train", "actor.train"]]
SMALL: Edits = {"arch": "small-llama", "like": None, "dtype": "float32", "weights": "random"}


FREE: Edits = CONTINUOUS | {
    "num_steps": 3,
    "workload/prompts_per_step": 32,
    "workload/samples_per_prompt": 2,
    "update/minibatch_samples": 16,
    "place/actor.train/data_parallel": 2,
    "rollout/max_num_seqs": 8,
    "checkpoint/every_steps": None,
}
LATE = FREE | {"schedule/staleness": {"bound": 2, "at_bound": "down_weight"}, "buffer/capacity_samples": 160}
"""without a barrier, and with room for samples of any age"""

CHANGES: dict[str, Case] = {
    "schedule/trigger_samples": Case(BIG, {"schedule/trigger_samples": 32}, FREE),
    "schedule/staleness/unit": Case(
        BIG, {"schedule/staleness/unit": "batches"}, FREE | {"schedule/trigger_samples": 32}
    ),
    "schedule/staleness/bound": Case(BIG, {"schedule/staleness/bound": 0}, FREE),
    "schedule/staleness/at_bound": Case(
        BIG, {"schedule/staleness/at_bound": "drop"}, FREE | {"schedule/staleness": {"bound": 0}}
    ),
    "buffer/capacity_samples": Case(BIG, {"buffer/capacity_samples": 64}, FREE),
    "buffer/high_watermark": Case(BIG, {"buffer/high_watermark": 0.6}, LATE),
    "buffer/low_watermark": Case(
        BIG, {"buffer/low_watermark": 0.2}, LATE | {"buffer/capacity_samples": 64, "schedule/trigger_samples": 16}
    ),
    "buffer/at_high": Case(BIG, {"buffer/at_high": "throttle"}, LATE),
    "seed": Case(QUICK, {"seed": 8}),
    "num_steps": Case(QUICK, {"num_steps": 3}),
    "pools": Case(TINY, {"pools/other": "n[2]"}, TWO_MACHINES | SECOND | {"cluster/sites/0/nodes/0/devices": 2}),
    "sharing/how": Case(TINY, {"sharing/all/how": "exclusive"}),
    "sharing/switch": Case(TINY, {"sharing/all/switch": "sleep"}, SLICED),
    "sharing/slices": Case(TINY, {"sharing/all/slices": PHASES}, SLICED),
    "schedule/mode": Case(TINY, {"schedule/mode": "synchronous"}),
    "checkpoint/every_steps": Case(QUICK, {"checkpoint/every_steps": 1}),
    "checkpoint/blocking": Case(QUICK, {"checkpoint/blocking": False}, {"checkpoint/every_steps": 1}),
    "faults/kind": Case(BIG, {"faults/0/kind": "straggler"}, LOST | {"faults/0/target": "actor.train[0]"}),
    "faults/at": Case(BIG, {"faults/0/at": 250.0}, LOST),
    "faults/mtbf": Case(BIG, {"faults/0/mtbf": 500.0}, LOST | {"faults/0/at": None, "faults/0/mtbf": 400.0}),
    "faults/target": Case(BIG, {"faults/0/target": "actor.generate[1]"}, SLOWED),
    "faults/duration": Case(BIG, {"faults/0/duration": 50.0}, SLOWED),
    "faults/factor": Case(BIG, {"faults/0/factor": 0.25}, SLOWED),
    "faults/notice": Case(
        BIG, {"faults/0/notice": 30.0}, LOST | {"faults/0/kind": "preempted", "faults/0/duration": 9.0}
    ),
    "faults/recovery": Case(BIG, {"faults/0/recovery": "restart"}, GONE),
    "faults/spare": Case(
        BIG,
        {"faults/0/spare": "actor.generate[2]"},
        GONE | MORE_ENGINES | {"faults/0/recovery": "redundant", "faults/0/spare": "actor.generate[1]"},
    ),
    "faults/detect": Case(BIG, {"faults/0/detect": 10.0}, LOST),
    "faults/start": Case(BIG, {"faults/0/start": 10.0}, LOST),
    "cluster/sites/nodes/count": Case(TINY, {"cluster/sites/0/nodes/0/count": 1}, TWO_MACHINES),
    "cluster/sites/nodes/device": Case(BIG, {"cluster/sites/0/nodes/1/device": "h100-80g-sxm"}),
    "cluster/sites/nodes/devices": Case(TINY, {"cluster/sites/0/nodes/0/devices": 2}, TWO_MACHINES | SECOND),
    "cluster/sites/nodes/intra": Case(BIG, {"cluster/sites/0/nodes/0/intra": "pcie4"}),
    "cluster/sites/fabric/link": Case(BIG, {"cluster/sites/0/fabric/link": "loopback"}),
    "cluster/sites/fabric/oversubscription": Case(BIG, {"cluster/sites/0/fabric/oversubscription": 2.0}),
    "cluster/sites/storage/tier": Case(
        BIG, {"cluster/sites/0/storage": {"tier": "hdd"}}, {"checkpoint/every_steps": 1}
    ),
    "cluster/sites/fabric/rails": Case(
        BIG, {"cluster/sites/0/fabric/rails": True}, {"cluster/sites/0/fabric/oversubscription": 4.0}
    ),
    "cluster/sites/nodes/nics": Case(BIG, {"cluster/sites/0/nodes/0/nics": 2}),
    "cluster/sites/storage/total": Case(BIG, {"cluster/sites/0/storage/total": 1e9}, {"checkpoint/every_steps": 1}),
    "cluster/wan/between": Case(BIG, {"cluster/wan/0/between": ["a", "c"]}, SITES),
    "cluster/wan/link": Case(BIG, {"cluster/wan/0/link": "wan-1"}, SITES),
    "cluster/wan/bandwidth": Case(BIG, {"cluster/wan/0/bandwidth": 1e8}, SITES),
    "cluster/wan/latency": Case(BIG, {"cluster/wan/0/latency": 0.5}, SITES),
    "weight_sync/topology": Case(BIG, {"weight_sync/topology": "flat"}),
    "weight_sync/trigger": Case(BIG, {"weight_sync/trigger": "event"}),
    "weight_sync/every": Case(
        BIG, {"weight_sync/every": 70.0}, {"weight_sync/trigger": "pull", "weight_sync/every": 50.0}
    ),
    "weight_sync/transport": Case(BIG, {"weight_sync/transport": "store"}, {"weight_sync/trigger": "event"}),
    "weight_sync/payload": Case(BIG, {"weight_sync/payload": "int8"}),
    "weight_sync/delta_share": Case(
        BIG, {"weight_sync/delta_share": 0.2}, {"weight_sync/payload": "delta", "weight_sync/delta_share": 0.1}
    ),
    "experience/transport": Case(BIG, {"experience/transport": "rdma"}, SENT),
    "experience/compression": Case(BIG, {"experience/compression": "lz4"}, SENT),
    "experience/logprobs": Case(BIG, {"experience/logprobs": "full"}, SENT),
    "experience/top_k": Case(
        BIG, {"experience/top_k": 40}, SENT | {"experience/logprobs": "top_k", "experience/top_k": 20}
    ),
    "experience/batch_samples": Case(BIG, {"experience/batch_samples": 8}, SENT),
    "experience/prefetch": Case(BIG, {"experience/prefetch": True}, SENT),
    "experience/prescreen/share": Case(
        BIG, {"experience/prescreen/share": 0.9}, SENT | {"experience/prescreen": {"share": 0.5, "per_sample": 0.01}}
    ),
    "experience/prescreen/per_sample": Case(
        BIG,
        {"experience/prescreen/per_sample": 0.02},
        SENT | {"experience/prescreen": {"share": 0.5, "per_sample": 0.01}},
    ),
    "weight_sync/in_flight": Case(BIG, {"weight_sync/in_flight": "mix"}, CONTINUOUS),
    "weight_sync/kv": Case(BIG, {"weight_sync/kv": "keep"}, CONTINUOUS | {"weight_sync/in_flight": "mix"}),
    "weight_sync/barrier_timeout": Case(
        BIG,
        {"weight_sync/barrier_timeout": 1.0},
        {"weight_sync/trigger": "event", "place/actor.generate/0/engines": 2},
    ),
    "cluster/sites/storage/write": Case(BIG, {"cluster/sites/0/storage/write": 1e9}, {"checkpoint/every_steps": 1}),
    "models/actor/arch": Case(TINY, {"models/actor/arch": "small-llama"}),
    "models/actor/like": Case(TINY, {"models/actor": like("critic")}, {"models/critic": SMALL}),
    "models/actor/dtype": Case(BIG, {"models/actor/dtype": "float32"}),
    "models/actor/lora/rank": Case(BIG, {"models/actor/lora/rank": 64}, {"models/actor/lora": {"rank": 8}}),
    "models/critic/lora/rank": Case(BIG, {"models/critic/lora/rank": 64}, {"models/critic/lora": {"rank": 8}}),
    "models/critic/arch": Case(TINY, {"models/critic": SMALL}),
    "models/critic/like": Case(TINY, {"models/critic/like": "reference"}, {"models/reference": SMALL}),
    "models/critic/dtype": Case(BIG, {"models/critic/dtype": "float32"}),
    "models/reference/arch": Case(TINY, {"models/reference": SMALL}),
    "models/reference/like": Case(TINY, {"models/reference/like": "critic"}, {"models/critic": SMALL}),
    "models/reference/dtype": Case(BIG, {"models/reference/dtype": "int8"}),
    "models/reward/arch": Case(BIG, {"models/reward/arch": "small-llama"}),
    "models/reward/like": Case(BIG, {"models/reward": like("reference")}, {"models/reference": SMALL}),
    "models/reward/dtype": Case(BIG, {"models/reward/dtype": "int8"}),
    "algorithm/name": Case(TINY, {"algorithm": {"name": "grpo", "ppo_epochs": 2, "kl_coef": 0.01, "clip": 0.2}}),
    "algorithm/ppo_epochs": Case(QUICK, {"algorithm/ppo_epochs": 2}),
    "algorithm/kl_coef": Case(QUICK, {"algorithm/kl_coef": 0.0}),
    "place/actor.generate/pool": Case(TINY, {"place/actor.generate/0/pool": "other"}, TWO_MACHINES),
    "place/actor.generate/engines": Case(QUICK, {"place/actor.generate/0/engines": 2}),
    "place/actor.generate/tensor_parallel": Case(
        BIG, {"place/actor.generate/0/tensor_parallel": 2}, {"place/actor.generate/0/engines": 1}
    ),
    "place/actor.generate/pipeline_parallel": Case(
        BIG, {"place/actor.generate/0/pipeline_parallel": 2}, {"place/actor.generate/0/engines": 1}
    ),
    "place/actor.generate/data_parallel": Case(BIG, {"place/actor.generate/0/data_parallel": 2}, MOE),
    "place/actor.generate/expert_parallel": Case(
        BIG, {"place/actor.generate/0/expert_parallel": 2}, MOE | {"place/actor.generate/0/data_parallel": 2}
    ),
    "place/actor.generate/dtype": Case(BIG, {"place/actor.generate/0/dtype": "int8"}),
    "place/actor.generate/kv_dtype": Case(BIG, {"place/actor.generate/0/kv_dtype": "fp8"}),
    "place/actor.generate/speed": Case(
        QUICK, {"place/actor.generate/1/speed": 5.0}, TWO_ENGINES | {"rollout/dispatch": "weighted"}
    ),
    "place/actor.generate/threads": Case(QUICK, {"place/actor.generate/0/threads": 2}),
    "place/actor.train/pool": Case(TINY, {"place/actor.train/pool": "other"}, TWO_MACHINES),
    "place/actor.train/data_parallel": Case(BIG, {"place/actor.train/data_parallel": 2}),
    "place/actor.train/tensor_parallel": Case(BIG, {"place/actor.train/tensor_parallel": 1}),
    "place/actor.train/pipeline_parallel": Case(BIG, {"place/actor.train/pipeline_parallel": 2}, PLAIN),
    "place/actor.train/context_parallel": Case(BIG, {"place/actor.train/context_parallel": 2}, PLAIN),
    "place/actor.train/expert_parallel": Case(
        BIG, {"place/actor.train/expert_parallel": 2}, MOE | {"place/actor.train/data_parallel": 2}
    ),
    "place/actor.train/zero_stage": Case(BIG, {"place/actor.train/zero_stage": 3}),
    "place/actor.train/offload": Case(BIG, {"place/actor.train/offload": "optimizer"}),
    "place/actor.train/threads": Case(QUICK, {"place/actor.train/threads": 2}),
    "place/critic.train/pool": Case(TINY, {"place/critic.train/pool": "other"}, TWO_MACHINES),
    "place/critic.train/data_parallel": Case(BIG, {"place/critic.train/data_parallel": 2}, ROOM),
    "place/critic.train/tensor_parallel": Case(BIG, {"place/critic.train/tensor_parallel": 2}, ROOM),
    "place/critic.train/pipeline_parallel": Case(
        BIG, {"place/critic.train/pipeline_parallel": 2}, ROOM | {"place/critic.train/zero_stage": 0}
    ),
    "place/critic.train/context_parallel": Case(BIG, {"place/critic.train/context_parallel": 2}, ROOM),
    "place/critic.train/expert_parallel": Case(
        BIG, {"place/critic.train/expert_parallel": 2}, MOE | ROOM | {"place/critic.train/data_parallel": 2}
    ),
    "place/critic.train/zero_stage": Case(
        BIG, {"place/critic.train/zero_stage": 3}, ROOM | {"place/critic.train/data_parallel": 2}
    ),
    "place/critic.train/offload": Case(BIG, {"place/critic.train/offload": "none"}),
    "place/critic.train/threads": Case(TINY, {"place/critic.train/threads": 2}),
    "place/reference.score/pool": Case(TINY, {"place/reference.score/pool": "other"}, TWO_MACHINES),
    "place/reference.score/tensor_parallel": Case(BIG, {"place/reference.score/tensor_parallel": 2}, WIDE),
    "place/reference.score/dtype": Case(BIG, {"place/reference.score/dtype": "int8"}),
    "place/reference.score/max_batch_samples": Case(QUICK, {"place/reference.score/max_batch_samples": 4}),
    "place/reference.score/threads": Case(QUICK, {"place/reference.score/threads": 2}),
    "place/reward.score/pool": Case(TINY, {"place/reward.score/pool": "other"}, TWO_MACHINES),
    "place/reward.score/tensor_parallel": Case(BIG, {"place/reward.score/tensor_parallel": 2}, WIDE),
    "place/reward.score/dtype": Case(BIG, {"place/reward.score/dtype": "int8"}),
    "place/reward.score/max_batch_samples": Case(BIG, {"place/reward.score/max_batch_samples": 4}),
    "place/reward.score/threads": Case(TINY, {"place/reward.score/threads": 2}),
    "place/reward.score/kind": Case(
        BIG, {"place/reward.score": {"pool": "reward", "kind": "function", "function": "task"}}
    ),
    "place/reward.score/shares_trunk": Case(BIG, {"place/reward.score/shares_trunk": True}, HEAD),
    "place/reward.score/cache/hit_share": Case(
        BIG, {"place/reward.score/cache/hit_share": 0.9}, {"place/reward.score/cache": {"hit_share": 0.3}}
    ),
    "place/reward.score/cache/version_steps": Case(
        BIG, {"place/reward.score/cache/version_steps": 1}, {"place/reward.score/cache": {"hit_share": 0.3}}
    ),
    **{
        f"place/reward.score/remote/{name}": Case(BIG, {f"place/reward.score/remote/{name}": value}, JUDGE)
        for name, value in REMOTE_CHANGES.items()
    },
    **{
        f"place/{role}.score/replicas": Case(BIG, {f"place/{role}.score/replicas": 2}, WIDE)
        for role in ("reference", "reward")
    },
    **{
        f"place/{role}.score/max_wait": Case(BIG, {f"place/{role}.score/max_wait": 5.0}, {"schedule/scoring": "sample"})
        for role in ("reference", "reward")
    },
    "schedule/scoring": Case(BIG, {"schedule/scoring": "sample"}),
    "algorithm/old_logprob": Case(BIG, {"algorithm/old_logprob": "recompute"}),
    "workload/prompts_per_step": Case(QUICK, {"workload/prompts_per_step": 16}),
    "workload/samples_per_prompt": Case(QUICK, {"workload/samples_per_prompt": 8}),
    "rollout/max_num_seqs": Case(QUICK, {"rollout/max_num_seqs": 4}),
    "rollout/max_num_batched_tokens": Case(QUICK, {"rollout/max_num_batched_tokens": 64}),
    "rollout/kv_memory_fraction": Case(BIG, {"rollout/kv_memory_fraction": 0.22}),
    "rollout/kv_bytes": Case(QUICK, {"rollout/kv_bytes": 1e6}),
    "rollout/block_tokens": Case(QUICK, {"rollout/block_tokens": 4}),
    "rollout/prefix_caching": Case(QUICK, {"rollout/prefix_caching": False}, {"rollout/block_tokens": 4}),
    "rollout/async_scheduling": Case(QUICK, {"rollout/async_scheduling": True}),
    "rollout/reserve_full_isl": Case(QUICK, {"rollout/reserve_full_isl": False}, TIGHT),
    "rollout/reuse_uncached_first": Case(QUICK, {"rollout/reuse_uncached_first": False}, TIGHT),
    "rollout/watermark": Case(QUICK, {"rollout/watermark": 0.3}, TIGHT),
    "rollout/batching": Case(QUICK, {"rollout/batching": "static"}, {"rollout/max_num_seqs": 8}),
    "rollout/kv_layout": Case(QUICK, {"rollout/kv_layout": "contiguous"}, {"rollout/kv_bytes": 1e6}),
    "place/actor.generate/backend": Case(
        QUICK, {"place/actor.generate/0/backend": "transformers"}, {"rollout/max_num_seqs": 8}
    ),
    "rollout/dispatch": Case(QUICK, {"rollout/dispatch": "weighted"}, TWO_ENGINES),
    "rollout/over_issue": Case(QUICK, {"rollout/over_issue": 0.5}),
    "rollout/stealing": Case(QUICK, {"rollout/stealing": True}, TWO_ENGINES | {"rollout/max_num_seqs": 2}),
    "scaling/min": Case(BIG, {"scaling/actor.generate/min": 2}, SCALED),
    "scaling/max": Case(BIG, {"scaling/actor.generate/max": 1}, SCALED),
    "scaling/start": Case(BIG, {"scaling/actor.generate/start": 7.0}, SCALED),
    "scaling/drain": Case(BIG, {"scaling/actor.generate/drain": 1000.0}, SCALED),
    "scaling/hold": Case(BIG, {"scaling/actor.generate/hold": 1000.0}, SCALED),
    "scaling/look": Case(BIG, {"scaling/actor.generate/look": 3.0}, SCALED),
    "update/minibatch_samples": Case(QUICK, {"update/minibatch_samples": 8}),
    "update/microbatch_tokens": Case(QUICK, {"update/microbatch_tokens": 256}),
    "update/recompute": Case(QUICK, {"update/recompute": "full"}),
}
for _what in ("prompt", "response"):
    _key = f"workload/{_what}_tokens"
    CHANGES |= {
        f"{_key}/dist": Case(QUICK, {_key: {"dist": "fixed", "value": 30}}),
        f"{_key}/value": Case(QUICK, {f"{_key}/value": 30}, {_key: {"dist": "fixed", "value": 12}}),
        f"{_key}/mean": Case(QUICK, {f"{_key}/mean": 30}, {_key: LENGTHS}),
        f"{_key}/p95": Case(QUICK, {f"{_key}/p95": 30}, {_key: LENGTHS}),
        f"{_key}/max": Case(QUICK, {f"{_key}/max": 24}, {_key: LENGTHS}),
        f"{_key}/values": Case(QUICK, {f"{_key}/values": [9, 40]}, {_key: {"dist": "empirical", "values": [9, 30]}}),
    }

CHANGES |= learning.CHANGES | data_keys.CHANGES
KEPT: Edits = {"checkpoint/every_steps": 1, "checkpoint/keep": {"latest": 1}}
MARKED: dict[str, Case] = (
    {
        "schedule/staleness/weight": Case(BIG, {"schedule/staleness/weight": "reciprocal"}, LATE),
        "checkpoint/keep/latest": Case(QUICK, {"checkpoint/keep/latest": 2}, KEPT),
        "checkpoint/keep/best": Case(QUICK, {"checkpoint/keep/best": 1}, KEPT),
        "checkpoint/keep/milestone_every": Case(QUICK, {"checkpoint/keep/milestone_every": 2}, KEPT),
        "checkpoint/keep/recovery": Case(QUICK, {"checkpoint/keep/recovery": False}, KEPT),
        "name": Case(QUICK, {"name": "other"}),
        "cluster/sites/name": Case(BIG, {"cluster/sites/0/name": "b"}),
        "cluster/sites/storage/read": Case(BIG, {"cluster/sites/0/storage/read": 1e8}),
        "cluster/sites/nodes/name": Case(
            TINY, {"cluster/sites/0/nodes/0/name": "m", "pools": {"all": "m[0]", "other": "m[1]"}}, TWO_MACHINES
        ),
        "algorithm/clip": Case(QUICK, {"algorithm/clip": 0.1}),
        "algorithm/importance_cap": Case(QUICK, {"algorithm/importance_cap": 5.0}),
        "algorithm/beta": Case(DPO, {"algorithm/beta": 0.3}),
        "algorithm/gamma": Case(TINY, {"algorithm/gamma": 0.9}),
        "algorithm/lam": Case(TINY, {"algorithm/lam": 0.5}),
        "algorithm/value_clip": Case(TINY, {"algorithm/value_clip": 0.5}),
        "place/reward.score/function": Case(QUICK, {"place/reward.score/function": "mine:reward"}),
        "place/reward.score/arguments": Case(
            QUICK, {"place/reward.score/arguments": {"target": 30}}, {"place/reward.score/function": "length"}
        ),
        "place/reward.score/remote/url": Case(
            BIG, {"place/reward.score/remote/url": "http://localhost:8000/score"}, JUDGE
        ),
        "optimizer/lr": Case(QUICK, {"optimizer/lr": 0.1}),
        "evaluate/temperature": Case(QUICK, {"evaluate/temperature": 0.7}, {"evaluate/every_steps": 1}),
        "optimizer/critic_lr": Case(TINY, {"optimizer/critic_lr": 0.1}),
        "optimizer/grad_clip": Case(QUICK, {"optimizer/grad_clip": 9.0}),
        "optimizer/schedule": Case(QUICK, {"optimizer/schedule": "cosine"}),
        "optimizer/warmup_steps": Case(QUICK, {"optimizer/warmup_steps": 2}),
    }
    | {
        f"models/{role}/lora/alpha": Case(BIG, {f"models/{role}/lora/alpha": 2.0}, {f"models/{role}/lora": {"rank": 8}})
        for role in ("actor", "critic")
    }
    | {"models/reward/lora/alpha": Case(JUDGED, {"models/reward/lora/alpha": 2.0}, {"models/reward/lora": {"rank": 8}})}
    | learning.MARKED
    | data_keys.MARKED
    | {
        f"models/{role}/weights": Case(BIG, {f"models/{role}/weights": "folder"})
        for role in ("actor", "critic", "reference", "reward")
    }
)
