"""A network under training: DeepSpeed's engine, forward passes over samples, optimizer steps over mini-batches.

Importing this module imports torch and DeepSpeed, which takes seconds; only trainers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch
from deepspeed import comm
from torch import Tensor

from executor.algorithms.losses import Loss
from executor.experience import Samples
from executor.network import build_actor, build_critic
from executor.origin import origin
from executor.recorder import Recorder
from executor.scoring import pad
from lab.measurement import pass_quantities, zero_quantities
from lab.policies.microbatch import deal, pack
from lab.scenario import Scenario

PARTITIONED = 2
"""from this ZeRO stage on gradients are reduced inside backward passes, so ranks must make equally many"""


class Microbatch:
    """Some samples as right-padded tensors [B, T]; what belongs to a response token stands at its predecessor, T - 1 wide."""

    def __init__(self, samples: Samples, group: Sequence[int], weight: float = 1.0) -> None:
        """`weight` 0: a pass that only keeps the ranks in step."""
        self.group, self.weight = group, weight
        ids, mask = pad([samples.tokens[i] for i in group])
        self.ids, self.mask = torch.from_numpy(ids), torch.from_numpy(mask)
        self.spans = [(int(samples.num_prompt_tokens[i]) - 1, len(samples.tokens[i]) - 1) for i in group]
        self.response = self.spread([np.ones(end - start, dtype=np.float32) for start, end in self.spans])

    def spread(self, rows: Sequence[Any]) -> Tensor:
        """One number per response token of each sample, at its place in a tensor [B, T - 1], else 0."""
        out = torch.zeros(len(self.group), self.ids.shape[1] - 1)
        for row, (start, end), values in zip(out, self.spans, rows, strict=True):
            row[start:end] = torch.as_tensor(np.array(values, dtype=np.float32))
        return out

    def column(self, rows: Sequence[Any]) -> Tensor:
        """A column of all samples, spread over those of this micro-batch."""
        return self.spread([rows[i] for i in self.group])

    def gather(self, values: Tensor) -> dict[int, Any]:
        """From [B, T - 1] back to one array per sample, by sample."""
        rows = values.detach().numpy()
        pairs = zip(self.group, self.spans, strict=True)
        return {i: rows[row, start:end].copy() for row, (i, (start, end)) in enumerate(pairs)}


Objective = Callable[[Tensor, Microbatch], Loss]
"""output of the network [B, T - 1 or T] and the micro-batch -> loss"""


class Learner:
    """The network of a role on one rank."""

    def __init__(self, scenario: Scenario, role: str, rank: int, world: int, threads: int, recorder: Recorder) -> None:
        torch.set_num_threads(threads)
        self.scenario, self.role, self.rank, self.world, self.recorder = scenario, role, rank, world, recorder
        self.spec = scenario.spec(role)
        self.zero_stage = scenario.train(role).zero_stage
        self.engine = self._start()

    def _start(self) -> Any:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # else it is compiled, for minutes, even for gloo
        )
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        network = (build_actor if self.role == "actor" else build_critic)(*origin(self.scenario, self.role))
        if self.scenario.update.recompute == "full":
            trunk = network if self.role == "actor" else network.trunk
            trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        settings = self.scenario.optimizer
        rate = settings.lr if self.role == "actor" or settings.critic_lr is None else settings.critic_lr
        optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
        engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=self._settings())
        return engine

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's own counting of micro-batches is not used: it is told which pass is a mini-batch's last.

        Without ZeRO it clips but does not say the norm, so `_apply` clips instead.
        """
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.scenario.optimizer.grad_clip if self.zero_stage else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.zero_stage, "overlap_comm": False},
            "steps_per_print": 10**9,
        }

    @property
    def network(self) -> Any:
        return self.engine.module

    def groups(self, samples: Samples, chosen: Sequence[int], deals: bool = True) -> list[Microbatch]:
        """Micro-batches of this rank's share of `chosen` samples.

        Where ranks have to make equally many passes, those with fewer repeat their smallest one with weight 0.
        """
        shares = deal(len(chosen), self.world) if deals else [list(range(len(chosen)))] * self.world
        lengths = samples.lengths
        packed = [self._packed([lengths[chosen[i]] for i in share]) for share in shares]
        mine = [[chosen[shares[self.rank][i]] for i in group] for group in packed[self.rank]]
        found = [Microbatch(samples, group) for group in mine]
        missing = max(map(len, packed)) - len(found) if self.world > 1 else 0
        filler = mine[-1] if mine else [chosen[0]]
        return found + [Microbatch(samples, filler, weight=0.0) for _ in range(missing)]

    def _packed(self, lengths: list[int]) -> list[list[int]]:
        return pack(lengths, self.scenario.pass_tokens) if lengths else []

    def read(self, samples: Samples, chosen: Sequence[int], deals: bool) -> dict[int, Any]:
        """One array per sample, a number per response token: log-probs of the actor, values of the critic."""
        found: dict[int, Any] = {}
        with torch.inference_mode() if self.zero_stage < 3 else torch.no_grad():
            for batch in self.groups(samples, chosen, deals):
                with self.recorder.op("forward") as notes:
                    output = self.output(batch)
                    notes |= self._quantities(batch)
                if batch.weight:
                    found |= batch.gather(output)
        return found

    def output(self, batch: Microbatch) -> Tensor:
        """[B, T - 1]: log-prob of each next token at the sampling temperature, or the value before each next token."""
        if self.role == "critic":
            values: Tensor = self.engine(batch.ids, batch.mask)[:, :-1]
            return values
        logits = self.engine(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1]
        return logprobs(logits, batch.ids, self.scenario.sampling.fixed)

    def step(self, batches: list[Microbatch], objective: Objective, scale: float) -> dict[str, float]:
        """One optimizer step; `scale` is one over the response tokens of the mini-batch of all ranks.

        DeepSpeed averages gradients over ranks; the loss is multiplied by their number to make this a sum.
        """
        sums: dict[str, float] = {}
        for batch, last in _with_last(batches):
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.enable_backward_allreduce = self.zero_stage >= PARTITIONED or self.world == 1
            with self.recorder.op("forward") as notes:
                loss = objective(self.output(batch), batch)
                notes |= self._quantities(batch)
            with self.recorder.op("backward") as notes:
                self.engine.backward(loss.total * (batch.weight * scale * self.world), scale_wrt_gas=False)
                notes |= self._quantities(batch)
            for key, value in loss.sums.items():
                sums[key] = sums.get(key, 0.0) + batch.weight * value * scale
        self._reduce()
        with self.recorder.op("optimizer") as notes:
            norm = self._apply()
            done = {"passes": 1.0, "parameters": float(self.spec.parameters)}
            notes["quantities"] = done | zero_quantities(self.zero_stage)
        return sums | {"grad_norm": norm}

    def _apply(self) -> float:
        """Clips, and makes the optimizer's step; the gradient's norm before clipping."""
        if self.zero_stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.scenario.optimizer.grad_clip)
        self.engine.step()
        return float(norm)

    def _reduce(self) -> None:
        """Sums gradients over ranks, where backward passes have not done so already."""
        if self.world == 1 or self.zero_stage >= PARTITIONED:
            return
        size = self.spec.weight_bytes("float32")
        with self.recorder.op("grad_sync") as notes:
            self.engine.allreduce_gradients()
            notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size, "ranks": float(self.world)}}

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks."""
        if self.world == 1:
            return values
        tensor = torch.tensor(list(values.values()), dtype=torch.float64)
        comm.all_reduce(tensor)
        return dict(zip(values, tensor.tolist(), strict=True))

    def largest(self, value: float) -> float:
        """The maximum over ranks."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        comm.all_reduce(tensor, op=comm.ReduceOp.MAX)
        return float(tensor)

    def weights(self) -> dict[str, Tensor]:
        """All parameters by Hugging Face's names, whole on every rank; every rank has to call this."""
        named = list(self.network.named_parameters())
        if self.zero_stage < 3:
            return {name: parameter.detach() for name, parameter in named}
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in named], modifier_rank=None):
            return {name: parameter.detach().clone() for name, parameter in named}

    def state(self) -> dict[str, Any]:
        """Of the optimizer on this rank, and of torch's random generator, the only one in use."""
        return {"optimizer": self.engine.optimizer.state_dict(), "torch": torch.get_rng_state()}

    def _quantities(self, batch: Microbatch) -> dict[str, Any]:
        tokens = int(batch.mask.sum()) if batch.weight else 0
        rows, longest = batch.ids.shape
        return {
            "tokens": tokens,
            "quantities": pass_quantities(self.spec, self.role, rows, longest, self.zero_stage),
        }


def logprobs(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Log-prob of each next token [B, T - 1] from logits [B, T - 1, V] and ids [B, T]."""
    found = torch.log_softmax(logits.float() / temperature, dim=-1)
    return found.gather(-1, ids[:, 1:, None]).squeeze(-1)


def _with_last(batches: list[Microbatch]) -> Iterator[tuple[Microbatch, bool]]:
    return ((batch, i == len(batches) - 1) for i, batch in enumerate(batches))
