import os
from collections.abc import Callable
from typing import Any

import pytest

from executor.limits import refuse
from executor.workers import cpu_shares
from lab.errors import InputError
from lab.scenario import Scenario

Make = Callable[..., Scenario]
NODE = {"name": "local", "count": 1, "device": "cpu-core", "devices": 2, "intra": "shared-memory"}
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", ["quickstart", "ppo-tiny", "grpo-learns"])
def test_shipped_scenarios_are_accepted_on_two_cores(scenario: Make, name: str) -> None:
    if CORES < 2:
        pytest.skip("one core")
    refuse(scenario(name))


def cluster(**node: Any) -> dict[str, Any]:
    return {"sites": [{"nodes": [NODE | node]}]}


REFUSED: dict[str, dict[str, Any]] = {
    "models.actor.dtype": {"models": {"actor": {"arch": "tiny-llama", "dtype": "bfloat16"}}},
    "models.actor.arch": {"models": {"actor": {"arch": "qwen3-0.6b", "dtype": "float32"}}},
    "models.reference.dtype": {"models": {"reference": {"like": "actor", "dtype": "bfloat16"}}},
    "models.actor.weights": {"models": {"actor": {"arch": "tiny-llama", "dtype": "float32", "weights": "/nowhere"}}},
    "place.actor.train.offload": {"place": {"actor.train": {"pool": "all", "offload": "optimizer"}}},
    "place.actor.train.tensor_parallel": {"place": {"actor.train": {"pool": "all", "tensor_parallel": 2}}},
    "place.actor.generate[0].tensor_parallel": {
        "place": {"actor.generate": [{"pool": "all", "tensor_parallel": 2, "backend": "transformers"}]}
    },
    "place.actor.generate[0].backend": {"place": {"actor.generate": [{"pool": "all", "backend": "trtllm"}]}},
    "sampling.temperature": {"sampling": {"temperature": {"start": 1.0, "end": 0.005}}},
    "evaluate.temperature": {"evaluate": {"every_steps": 1, "temperature": 0.005}},
    "sampling.top_p": {"sampling": {"top_p": 0.9}},
    "sampling.repetition_penalty": {"sampling": {"repetition_penalty": 1.2}},
    "rollout.batching": {"rollout": {"batching": "static"}},
    "models.actor.arch ": {"models": {"actor": {"arch": "opt-125m", "dtype": "float32"}}},
    "place.actor.train.pipeline_parallel": {"place": {"actor.train": {"pool": "all", "pipeline_parallel": 2}}},
    "place.actor.train.context_parallel": {"place": {"actor.train": {"pool": "all", "context_parallel": 2}}},
    "place.actor.generate[0].pipeline_parallel": {
        "place": {"actor.generate": [{"pool": "all", "pipeline_parallel": 2}]}
    },
    "place.actor.generate[0].dtype": {"place": {"actor.generate": [{"pool": "all", "dtype": "fp8"}]}},
    "place.actor.generate[0].kv_dtype": {"place": {"actor.generate": [{"pool": "all", "kv_dtype": "fp8"}]}},
    "place.reference.score.dtype": {"place": {"reference.score": {"pool": "all", "dtype": "bfloat16"}}},
    "place.reward.score.function": {
        "place": {"reward.score": {"pool": "all", "kind": "function", "function": "operator:no_such_name"}}
    },
    "rollout.block_tokens": {"rollout": {"block_tokens": 16}},
    "rollout.kv_bytes": {"rollout": {"kv_bytes": None}},
    "rollout.kv_bytes ": {"rollout": {"kv_bytes": 100_000.0}},
    "rollout.max_num_batched_tokens": {"rollout": {"max_num_batched_tokens": 8}},
    "cluster.sites": {
        "cluster": {
            "sites": [*cluster()["sites"], {"name": "b", "nodes": [NODE | {"name": "far"}]}],
            "wan": [{"between": ["local", "b"], "link": "wan-10"}],
        }
    },
    "cluster.sites[0].nodes[0].nics": {"cluster": cluster(nics=2)},
    "cluster.sites[0].fabric.rails": {"cluster": {"sites": [{"nodes": [NODE], "fabric": {"rails": True}}]}},
    "experience.transport": {"experience": {"transport": "rdma"}},
    "experience.logprobs": {"experience": {"logprobs": "full"}},
    "experience.prescreen": {
        "experience": {"prescreen": {"share": 0.5, "per_sample": 0.01}},
        "place": {"reward.score": {"pool": "all", "kind": "model"}},
        "models": {"reward": {"like": "actor", "dtype": "float32"}},
    },
    "experience": {
        "experience": {},
        "place": {"actor.generate": [{"pool": "all", "engines": 2}]},
        "faults": [{"kind": "worker_lost", "at": 1.0, "target": "actor.generate[0]"}],
    },
    "rollout.stealing": {"rollout": {"stealing": True}, "sampling": {"beams": 4}},
    "rollout.over_issue": {
        "rollout": {"over_issue": 0.5},
        "sampling": {"mixture": [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.0, "share": 0.5}]},
    },
    "pools.all": {"cluster": cluster(device="a100-80g-sxm", intra="nvlink3")},
    "pools": {"cluster": cluster(count=2, devices=1)},
    "pools ": {"cluster": cluster(devices=CORES + 1), "pools": {"all": f"local[0:{CORES + 1}]"}},
}


@pytest.mark.parametrize(("key", "changes"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(scenario: Make, key: str, changes: dict[str, Any]) -> None:
    chosen = scenario("quickstart", **changes)
    with pytest.raises(InputError) as caught:
        refuse(chosen)
    assert caught.value.key == key.strip()
    assert caught.value.remedy


def test_workers_of_a_resident_pool_never_claim_more_than_it_has(scenario: Make) -> None:
    for engines in range(1, 8):
        generate = [{"pool": "all", "engines": engines}]
        shares = cpu_shares(scenario("quickstart", place={"actor.generate": generate}))
        assert len(shares) == engines + 3
        assert 2 - 0.001 * len(shares) <= sum(shares.values()) <= 2 or max(shares.values()) == 1


def test_workers_of_an_exclusive_pool_claim_their_own_devices(scenario: Make) -> None:
    apart = scenario(
        "quickstart",
        cluster=cluster(devices=4),
        pools={"all": "local[0:2]", "a": "local[2]", "b": "local[3]"},
        place={"actor.generate": [{"pool": "a"}], "actor.train": {"pool": "b"}},
    )
    shares = cpu_shares(apart.replace({"sharing": {}}))
    assert set(shares.values()) == {1.0}


def test_the_cuda_build_of_the_engine_is_refused_with_what_to_install(
    scenario: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.limits.installed", lambda name: name == "vllm")
    with pytest.raises(InputError, match="ACCELERATOR=cpu"):
        refuse(scenario("quickstart"))


def test_what_a_backend_has_is_accepted(scenario: Make) -> None:
    """Another backend has other rules, and a trainer that reads log-probs anew takes any sampling."""
    plain = [{"pool": "all", "backend": "transformers"}]
    refuse(scenario("quickstart", place={"actor.generate": plain}, rollout={"batching": "static", "block_tokens": 16}))
    if CORES >= 2:
        refuse(scenario("quickstart", place={"actor.generate": [{"pool": "all", "tensor_parallel": 2}]}))
    refuse(scenario("quickstart", sampling={"top_p": 0.9}, algorithm={"old_logprob": "recompute"}))
