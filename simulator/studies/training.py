"""The training and scoring stages of one published configuration, priced op by op."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lab.library import device as library_device
from lab.measurement import pass_quantities
from lab.policies.microbatch import pack
from lab.scenario import Scenario
from profiles.cost import CostModel
from profiles.profile import datasheet, find

MACHINE = 8
"""devices of one machine, as every published configuration has them"""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """How one model is trained and scored: its shape, its ranks, and what one pass holds.

    Attributes:
        arch: in the model library; `device`: in the device library.
        ranks: data-parallel ranks of `tensor` devices each.
        pass_tokens, pass_samples: the most that one forward and backward pass of one rank takes.
        lora_rank: 0 where all weights are trained.
    """

    arch: str
    device: str
    ranks: int
    tensor: int = 1
    zero_stage: int = 3
    offload: bool = False
    recompute: bool = True
    lora_rank: int = 0
    role: str = "actor"
    pass_tokens: int = 1 << 24
    pass_samples: int | None = None

    @cached_property
    def scenario(self) -> Scenario:
        """The trainer on machines of its own; one engine and a rule stand beside it, as a scenario must have them."""
        width = self.ranks * self.tensor
        intra = library_device(self.device).default_link
        trainer = {
            "pool": "train", "data_parallel": self.ranks, "tensor_parallel": self.tensor,
            "zero_stage": self.zero_stage, "offload": "optimizer" if self.offload else "none",
        }  # fmt: skip
        node = {"device": self.device, "intra": intra}
        record: dict[str, Any] = {
            "name": "published",
            "cluster": {
                "sites": [
                    {
                        "nodes": [
                            {"name": "train", "count": -(-width // MACHINE), "devices": min(width, MACHINE), **node},
                            {"name": "serve", "count": 1, "devices": 2, **node},
                        ],
                        "fabric": {"link": "ib-hdr200"},
                    }
                ]
            },
            "models": {"actor": self._model, "critic": self._model},
            "algorithm": {"name": "ppo" if self.role == "critic" else "grpo", "kl_coef": 0},
            "pools": {"train": f"train[0:{width}]", "engine": "serve[0]", "rule": "serve[1]"},
            "place": {
                "actor.generate": [{"pool": "engine"}],
                "actor.train": trainer,
                "reward.score": {"pool": "rule", "kind": "function", "function": "task"},
            },
            "workload": {
                "prompts_per_step": self.ranks, "samples_per_prompt": 2,
                "prompt_tokens": {"dist": "fixed", "value": 1}, "response_tokens": {"dist": "fixed", "value": 1},
            },
            "update": {
                "minibatch_samples": self.ranks, "microbatch_tokens": self.pass_tokens,
                "recompute": "full" if self.recompute else "none",
            },
            "num_steps": 1,
        }  # fmt: skip
        if self.role == "critic":  # its trainer is the one that is priced; the actor's needs devices that differ
            record["place"]["critic.train"] = trainer
            record["sharing"] = {"train": {"how": "resident"}}
        return Scenario.model_validate_json(json.dumps(record))

    @property
    def _model(self) -> dict[str, Any]:
        return {"arch": self.arch} | ({"lora": {"rank": self.lora_rank}} if self.lora_rank else {})

    @cached_property
    def costs(self) -> CostModel:
        """From the library's profile of the device, never from one of this machine."""
        found = find(self.device)
        return CostModel(self.scenario, {self.device: found if found.device == self.device else datasheet(self.device)})

    def scoring(self, lengths: Sequence[int]) -> float:
        """Seconds of frozen forward passes over one rank's samples of these lengths (tokens)."""
        return sum(self._op("logprob", pass_of) for pass_of in self._passes(lengths))

    def update(self, minibatches: Sequence[Sequence[int]]) -> float:
        """Seconds of one rank's optimizer steps, each over samples of these lengths (tokens)."""
        return sum(self._step(lengths) for lengths in minibatches)

    def _step(self, lengths: Sequence[int]) -> float:
        passes = self._passes(lengths)
        compute = sum(self._op("forward", one) + self._op("backward", one) for one in passes)
        trained = float(self.scenario.trainable_parameters(self.role))
        size = trained * 2.0
        reduced = {"calls": 1.0, "bytes": size, "ranks": float(self.ranks)}
        reduce = self._op("grad_sync", reduced) if self.ranks > 1 else 0.0
        return compute + reduce + self._op("optimizer", {"passes": 1.0, "parameters": trained})

    def _passes(self, lengths: Sequence[int]) -> list[dict[str, float]]:
        spec = self.scenario.spec(self.role)
        groups = pack(lengths, self.pass_tokens, self.pass_samples)
        return [pass_quantities(spec, self.role, len(group), lengths[group[0]], self.zero_stage) for group in groups]

    def _op(self, op: str, quantities: dict[str, float]) -> float:
        return self.costs.op(self.scenario.team(self.role, "train")[0], op, quantities).seconds
