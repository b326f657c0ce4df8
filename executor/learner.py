"""A network under training: DeepSpeed's engine, forward passes over samples, optimizer steps over mini-batches.

Importing this module imports torch and DeepSpeed, which takes seconds; only trainers do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed import comm
from torch import Tensor

from executor import lora, moments
from executor.algorithms.losses import Loss
from executor.attention import PACKED
from executor.experience import Samples
from executor.microbatch import Microbatch
from executor.network import Outputs, build_actor, build_critic
from executor.origin import origin
from executor.recorder import Recorder
from executor.transfer import missed
from lab.measurement import grad_sync_quantities, optimizer_quantities, packed_quantities, pass_quantities
from lab.policies.learning_rate import learning_rate
from lab.policies.microbatch import deal, pack, pack_shared, pack_tight
from lab.scenario import Scenario

PARTITIONED = 2
"""from this ZeRO stage on gradients are reduced inside backward passes, so ranks must make equally many"""

Objective = Callable[[Tensor, Microbatch], Loss]
"""what `Learner.output` gives, and the micro-batch -> loss"""


class Learner:
    """The network of a role on one rank."""

    def __init__(self, scenario: Scenario, role: str, rank: int, world: int, threads: int, recorder: Recorder) -> None:
        """Meets the other ranks where MASTER_ADDR and MASTER_PORT say. Raises RuntimeError where that cannot be."""
        torch.set_num_threads(threads)
        torch.manual_seed(scenario.seed)
        self.scenario, self.role, self.rank, self.world, self.recorder = scenario, role, rank, world, recorder
        self.spec, self.lora = scenario.spec(role), scenario.model(role).lora
        self.zero_stage = scenario.train(role).zero_stage
        self.num_updates = 0
        """optimizer steps made"""
        self.engine = self._start()

    def _start(self) -> Any:
        meet(self.rank, self.world)
        network = Outputs(self._network())
        settings = self.scenario.optimizer
        self._rate = settings.lr if self.role == "actor" or settings.critic_lr is None else settings.critic_lr
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self._rate, weight_decay=0.0, fused=True)
        engine, *_ = deepspeed.initialize(
            model=network, model_parameters=trained, optimizer=optimizer, config=self._settings()
        )
        return engine

    def _network(self) -> Any:
        start = origin(self.scenario, self.role)
        network: Any = build_actor(*start) if self.role == "actor" else build_critic(*start)
        trunk = network if self.role == "actor" else network.trunk
        if self.scenario.update.pack != "padded":
            trunk.set_attn_implementation(PACKED)
        if self.lora is not None:
            lora.add_adapters(network, self.lora, start.seed)
        if self.scenario.update.recompute == "full":
            trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return network.train()

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
    def _reduces_inside(self) -> bool:
        """Whether backward passes end with gradients where the optimizer takes them; else `_reduce` sums them, or one
        rank has nothing to sum."""
        return self.zero_stage >= PARTITIONED or (self.zero_stage > 0 and self.world == 1)

    @property
    def network(self) -> Any:
        """By whose names weights go."""
        return self.engine.module.network

    def groups(self, samples: Samples, chosen: Sequence[int], deals: bool = True) -> list[Microbatch]:
        """Micro-batches of this rank's share of `chosen` samples.

        Where ranks have to make equally many passes, those with fewer repeat their smallest one with weight 0.
        """
        together, how = self.scenario.algorithm.together, self.scenario.update.pack
        shares = deal(len(chosen), self.world, together) if deals else [list(range(len(chosen)))] * self.world
        planned = [self._planned(samples, [chosen[i] for i in share]) for share in shares]
        mine = planned[self.rank]
        found = [Microbatch(samples, group, pack=how) for group in mine]
        missing = max(map(len, planned)) - len(found) if self.world > 1 else 0
        filler = mine[-1] if mine else list(chosen[:together])
        return found + [Microbatch(samples, filler, weight=0.0, pack=how) for _ in range(missing)]

    def _planned(self, samples: Samples, chosen: Sequence[int]) -> list[list[int]]:
        """Groups of one rank's samples, as both worlds make them."""
        update, together = self.scenario.update, self.scenario.algorithm.together
        limits = (self.scenario.pass_tokens, update.microbatch_samples, together)
        lengths = [len(samples.tokens[i]) for i in chosen]
        if not lengths:
            return []
        if update.pack == "shared":
            prompts, tokens = (of[list(chosen)].tolist() for of in (samples.prompts, samples.num_prompt_tokens))
            found = pack_shared(lengths, prompts, tokens, *limits)
        else:
            found = (pack_tight if update.pack == "packed" else pack)(lengths, *limits)
        return [[chosen[i] for i in group] for group in found]

    def read(self, samples: Samples, chosen: Sequence[int], deals: bool) -> dict[int, Any]:
        """One array per sample, a number per response token: log-probs of the actor, values of the critic.

        Of a reward model one number per sample.
        """
        found: dict[int, Any] = {}
        with torch.inference_mode() if self.zero_stage < 3 else torch.no_grad():
            for batch in self.groups(samples, chosen, deals):
                with self.recorder.op("forward") as notes:
                    output = self.output(batch)
                    notes |= self._quantities(batch, "forward")
                if batch.weight:
                    found |= batch.gather(output)
        return found

    def output(self, batch: Microbatch) -> Tensor:
        """Of each response token [R] the log-prob at its sample's temperature, or the value before it.

        Of a reward model [n] what it says of each sample's last token.
        """
        places = batch.lasts if self.role == "reward" else batch.places
        found: Tensor = self.engine(batch.ids, batch.positions, places, batch.rows)
        if self.role != "actor":
            return found.squeeze(-1)
        return logprobs(found, batch.targets, batch.temperatures)

    def step(self, batches: list[Microbatch], objective: Objective, scale: float) -> dict[str, float]:
        """One optimizer step; `scale` is one over what the loss is a mean of, in the mini-batch of all ranks.

        DeepSpeed averages gradients over ranks; the loss is multiplied by their number to make this a sum.
        """
        rate = self._scheduled()
        sums: dict[str, float] = {}
        for batch, last in _with_last(batches):
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.enable_backward_allreduce = self._reduces_inside
            with self.recorder.op("forward") as notes:
                loss = objective(self.output(batch), batch)
                notes |= self._quantities(batch, "forward")
            with self.recorder.op("backward") as notes:
                self.engine.backward(loss.total * (batch.weight * scale * self.world), scale_wrt_gas=False)
                notes |= self._quantities(batch, "backward")
            for key, value in loss.sums.items():
                sums[key] = sums.get(key, 0.0) + batch.weight * value * scale
        self._reduce()
        with self.recorder.op("optimizer") as notes:
            norm = self._apply()
            parameters = self.scenario.trainable_parameters(self.role)
            notes["quantities"] = optimizer_quantities(parameters, 4.0 * parameters, self.zero_stage, self.world)
        self.num_updates += 1
        return sums | {"grad_norm": norm, "learning_rate": rate}

    def _scheduled(self) -> float:
        """The learning rate of the next optimizer step, which it is given."""
        scenario, settings = self.scenario, self.scenario.optimizer
        minibatches = -(-scenario.workload.samples_per_step // scenario.update.minibatch_samples)
        each = scenario.algorithm.epochs * minibatches
        rate = learning_rate(
            self._rate, settings.schedule, self.num_updates, scenario.num_steps * each, settings.warmup_steps * each
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _apply(self) -> float:
        """Clips, and makes the optimizer's step; the gradient's norm before clipping."""
        if self.zero_stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        norm = torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), self.scenario.optimizer.grad_clip)
        self.engine.step()
        return float(norm)

    def _reduce(self) -> None:
        """Sums gradients over ranks, where backward passes have not done so already."""
        if self.world == 1 or self.zero_stage >= PARTITIONED:
            return
        size = 4.0 * self.scenario.trainable_parameters(self.role)
        with self.recorder.op("grad_sync") as notes:
            self.engine.allreduce_gradients()
            notes |= {"bytes": size, "quantities": grad_sync_quantities(size, self.zero_stage, self.world)}

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
        """What is trained, whole on every rank: all parameters by Hugging Face's names, or adapters (and a value head).

        Every rank has to call this.
        """
        return self._gathered(lambda name, parameter: parameter.requires_grad)

    def whole(self) -> dict[str, Tensor]:
        """All parameters by Hugging Face's names, adapters merged into their matrices; every rank has to call this."""
        found = self._gathered(lambda name, parameter: True)
        if self.lora is None:
            return found
        base = {lora.plain(name): tensor for name, tensor in found.items() if not lora.is_adapter(name)}
        trained = {name: tensor for name, tensor in found.items() if lora.is_adapter(name)}
        return base | dict(lora.merged(base, trained, lora.scale(self.lora)))

    def base(self) -> tuple[dict[str, Tensor], float]:
        """The matrices that have adapters, as they were before training, and the factor of the adapters' product."""
        if self.lora is None:
            return {}, 1.0
        start = origin(self.scenario, self.role)
        network = build_actor(*start) if self.role == "actor" else build_critic(*start)
        have = set(lora.matrices(name for name, _ in self.network.named_parameters()))
        found = {name: tensor.detach() for name, tensor in network.named_parameters() if name in have}
        return found, lora.scale(self.lora)

    def _gathered(self, wanted: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
        named = [(name, parameter) for name, parameter in self.network.named_parameters() if wanted(name, parameter)]
        if self.zero_stage < 3:
            return {name: parameter.detach() for name, parameter in named}
        with self._unsharded([parameter for _, parameter in named], None):
            return {name: parameter.detach().clone() for name, parameter in named}

    def _unsharded(self, parameters: list[Tensor], modifier: int | None) -> Any:
        """Inside it parameters are whole on every rank; what rank `modifier` writes stays."""
        if self.zero_stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What this rank has beside the weights, and a copy of it: tensors (the optimizer's moments and step counts, the
        random generator's state), and numbers that JSON holds. A checkpoint of `weights` and this restores bit for bit."""
        return moments.taken(self.engine, self.zero_stage), self._about | {"num_updates": self.num_updates}

    @property
    def _about(self) -> dict[str, Any]:
        """Whose state this is."""
        return {"role": self.role, "rank": self.rank, "world": self.world, "zero_stage": self.zero_stage}

    def restore(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Goes back to where `weights` and `state` were taken; every rank has to call this with the same weights.

        Raises ValueError naming what does not fit: another role, rank, number of ranks or ZeRO stage, or a tensor.
        """
        for key, own in self._about.items():
            if numbers.get(key) != own:
                raise ValueError(f"the checkpoint has {key} {numbers.get(key)}, this trainer has {own}")
        self._load(weights)
        moments.put_back(self.engine, self.zero_stage, dict(tensors))
        self.num_updates = int(numbers["num_updates"])

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        named = {name: parameter for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        if lost := sorted(named.keys() ^ weights.keys()):
            raise ValueError(f"{lost[0]} is in only one of the checkpoint and the network")
        with torch.no_grad(), self._unsharded(list(named.values()), 0):
            for name, parameter in named.items():
                if self.zero_stage < 3 or self.rank == 0:
                    parameter.copy_(weights[name])
        if self.zero_stage:
            self.engine.optimizer.refresh_fp32_params()

    def _quantities(self, batch: Microbatch, op: str) -> dict[str, Any]:
        rows, longest = batch.ids.shape
        if batch.pack != "padded":
            tokens = batch.ids.shape[1]
            found = packed_quantities(self.spec, self.role, batch.lengths.tolist(), self.zero_stage, tokens)
        else:
            found = pass_quantities(self.spec, self.role, rows, longest, self.zero_stage)
        if (lora := self.scenario.model(self.role).lora) is not None:
            found = lora.adapted(self.spec, found, self.scenario.update.products if op == "backward" else 0.0)
        return {"tokens": batch.num_tokens if batch.weight else 0, "quantities": found}


def meet(rank: int, world: int) -> None:
    """Joins the ranks of this role, once in a process. Raises RuntimeError naming the address where they cannot meet."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes, even for gloo
    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(missed(where, f"rank {rank} of {world} and the others", error)) from error


def logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Log-prob [R] of each target [R] from logits [R, V], at its own temperature, or at 1."""
    scaled = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
    return -torch.nn.functional.cross_entropy(scaled, targets, reduction="none")


def _with_last(batches: list[Microbatch]) -> Iterator[tuple[Microbatch, bool]]:
    return ((batch, i == len(batches) - 1) for i, batch in enumerate(batches))
