"""The scenario whose workers are measured: PPO on all cores; its workload is never drawn."""

from __future__ import annotations

import json

from executor.measure.grids import LONGEST, MICROBATCH_TOKENS, MINIBATCH
from lab.scenario import Scenario

ADAPTERS = {"rank": 8}


def scenario(arch: str, ranks: int = 1, zero_stages: tuple[int, int] = (0, 0), *, adapters: bool = False) -> Scenario:
    """`ranks` of the actor's training; ZeRO stages of the actor's and of the critic's; whether adapters of the actor
    are trained instead of its weights."""
    model = {"like": "actor", "dtype": "float32"}
    data = {
        "name": f"measure-{arch}",
        "cluster": "local",
        "models": {
            "actor": {"arch": arch, "dtype": "float32", "lora": ADAPTERS if adapters else None},
            "critic": model,
            "reference": model,
        },
        "algorithm": {"name": "ppo", "kl_coef": 0.01},
        "pools": {"all": "local"},
        "sharing": {"all": {"how": "resident"}},
        "place": {
            "actor.generate": [{"pool": "all"}],
            "actor.train": {"pool": "all", "data_parallel": ranks, "zero_stage": zero_stages[0]},
            "critic.train": {"pool": "all", "zero_stage": zero_stages[1]},
            "reference.score": {"pool": "all", "max_batch_samples": 32},
            "reward.score": {"pool": "all", "kind": "function", "function": "task"},
        },
        "workload": {
            "prompts_per_step": 2 * MINIBATCH,
            "prompt_tokens": {"dist": "fixed", "value": LONGEST // 2},
            "response_tokens": {"dist": "fixed", "value": LONGEST // 2},
        },
        "rollout": {"kv_bytes": "128 MiB", "block_tokens": 32, "max_num_seqs": 64},
        "update": {"minibatch_samples": MINIBATCH, "microbatch_tokens": MICROBATCH_TOKENS},
        "optimizer": {"lr": 1e-6},
        "num_steps": 1,
    }
    return Scenario.model_validate_json(json.dumps(data))
