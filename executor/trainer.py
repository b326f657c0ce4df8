"""The trainer: one rank of the actor's or the critic's training in a Ray actor."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.algorithms.advantages import ADVANTAGES, joined
from executor.algorithms.mismatch import mismatched
from executor.checkpoint import Rank
from executor.distributions import distributions
from executor.diversity import diversity
from executor.diversity import joined as means
from executor.experience import Samples
from executor.recorder import Recorder
from executor.saving import Saving, restore
from lab.measurement import update_quantities
from lab.offline import update_of
from lab.placement import Worker
from lab.policies.microbatch import deal, imbalance, minibatches
from lab.scenario import Scenario
from lab.wiring import batches

if TYPE_CHECKING:
    from torch import Tensor

    from executor.algorithms.losses import Loss
    from executor.microbatch import Microbatch
    from executor.offering import Offering
    from executor.publishing import Board, Offered

Info = dict[str, Any]


class Trainer:
    """All ranks of a role are called together with the same arguments.

    Nothing heavy is imported before `ready`, so that whoever starts this actor stays light.
    """

    def __init__(self, worker: Worker, rank: int, world: int, role: str, scenario: Scenario, master_port: int) -> None:
        """`world` ranks meet at `master_port`, which is also in the environment of the process."""
        self.worker, self.rank, self.world, self.role, self.scenario = worker, rank, world, role, scenario
        self.master_port, self._every = master_port, batches(scenario)
        self.recorder = Recorder(worker.name, worker.pool)
        self.saving = Saving(Rank(role=role, rank=rank, world=world), self.recorder)
        self._held = ExitStack()
        """the span of a publication that engines are still fetching"""

    def ready(self) -> Info:
        """Builds network and optimizer; ends when all ranks have."""
        with self.recorder.stage("setup", -1):
            self.load()
        return self._info()

    def load(self) -> None:
        """Builds network and optimizer as they were before the first step; ends when all ranks have."""
        from executor.learner import Learner

        arguments = (self.scenario, self.role, self.rank, self.world, self.worker.threads, self.recorder)
        self.learner = Learner(*arguments)

    def release(self) -> None:
        """Drops network and optimizer; whoever needs them later saves them before."""
        self.learner.engine.destroy()
        del self.learner

    def connect(self, host: str, port: int, world_size: int, *, bare: bool = False) -> None:
        """Meets the engines that will receive weights; blocks until all have come.

        `bare`: they have the weights from before training, and want adapters alone.
        """
        self.offering.meet(host, port, world_size, None if bare else self.learner)

    def open_weights(self, host: str, folder: Path) -> Board:
        """Makes ready where engines fetch weights; returns where they look. `folder`: of a store; `host`: of this process."""
        return self.offering.open(host, folder)

    @cached_property
    def offering(self) -> Offering:
        """This rank's side of the publication."""
        from executor.offering import Offering

        return Offering(self.scenario, self.rank, self.world, self.recorder)

    def values(self, step: int, samples: Samples) -> tuple[dict[str, Any], Info]:
        """`values` of the samples that this rank is dealt, by index: one number per response token, before it is drawn."""
        with self.recorder.stage("value", step, samples.policy_version) as notes:
            found = self.learner.read(samples, range(len(samples)), deals=True)
            mine = [samples.lengths[i] for i in deal(len(samples), self.world)[self.rank]]
            notes |= _counts(len(mine), sum(mine))
        return {"values": found}, self._info()

    def old_logprobs(self, step: int, samples: Samples) -> tuple[dict[str, Any], Info]:
        """`old_logprobs` of the samples that this rank is dealt, by index, under the weights that the update starts from."""
        with self.recorder.stage("old_logprob", step, samples.policy_version) as notes:
            found = self.learner.read(samples, range(len(samples)), deals=True)
            mine = [samples.lengths[i] for i in deal(len(samples), self.world)[self.rank]]
            notes |= _counts(len(mine), sum(mine))
        return {"old_logprobs": found}, self._info()

    def advantage(
        self, step: int, samples: Samples, *columns: dict[str, Any], about: dict[str, Any] | None = None
    ) -> tuple[Samples, Info]:
        """The samples with the columns of all scorers and with advantages, or in pairs; on the actor's rank 0.

        `about`: what the span says of the age of a batch that was made without a barrier; then the learning row says how
        its samples were drawn.
        """
        with self.recorder.stage("advantage", step, samples.policy_version) as notes:
            algorithm = self.scenario.algorithm
            batch = ADVANTAGES[algorithm.name](samples.with_columns(**joined(columns, len(samples))), algorithm)
            notes |= _counts(len(samples), sum(samples.lengths)) | (about or {})
        told = {"distributions": distributions(batch)}
        drawn = {} if about is None else _drawn(samples, about)
        return batch, self._info(reward=float(np.mean(batch.columns["rewards"])), **drawn) | told

    def update(self, step: int, samples: Samples, *columns: dict[str, Any]) -> Info:
        """Every optimizer step of a training step: epochs over mini-batches in fixed order.

        `columns` of scorers, where no stage between them and this one has put them into the samples.
        """
        samples = samples.with_columns(**joined(columns, len(samples)))
        epochs, together = self.scenario.algorithm.epochs, self.scenario.algorithm.together
        chosen = minibatches(len(samples), self.scenario.update.minibatch_samples)
        with self.recorder.stage(update_of(self.role), step, (step + 1) // self._every) as notes:
            self._gap, self._loads = 0.0, list[tuple[int, int]]()
            steps = [self._minibatch(step, samples, batch, first=i == 0) for i, batch in enumerate(chosen * epochs)]
            learned = self._learned(step, samples, steps)
            mine = [batch[i] for batch in chosen for i in deal(len(batch), self.world, together)[self.rank]]
            tokens = epochs * sum(samples.lengths[i] for i in mine)
            notes |= {"samples": len(mine), "tokens": tokens}
            notes["quantities"] = update_quantities(len(mine), tokens, len(steps), self.world)
            notes |= self._packing()
        return self._info(**learned)

    def send_weights(self, step: int, *_: Any) -> Info:
        """Pushes the weights from rank 0 to all engines; every rank takes part in gathering them. What more is given is
        only waited for."""
        with self.recorder.stage("weight_sync", step, self._published(step)):
            self.offering.push(self.learner)
        return self._info()

    def publish_weights(self, step: int, acknowledged: int) -> tuple[Offered, Info]:
        """Leaves the weights where engines fetch them; `acknowledged`: a version that all of these have."""
        offered = self.offer_weights(step, acknowledged)
        return offered, self.weights_published([])

    def offer_weights(self, step: int, acknowledged: int, *_: Any) -> Offered:
        """The same, and is held until `weights_published`."""
        version = self._published(step)
        self._held.close()  # of a publication in which an engine was lost
        self._notes = self._held.enter_context(self.recorder.stage("weight_sync", step, version))
        return self.offering.offer(version, acknowledged, self.learner)

    def weights_published(self, absent: list[str]) -> Info:
        """Engines have taken the weights, or are named as absent."""
        self._notes |= {"absent": absent} if absent else {}
        self._held.close()
        return self._info()

    def _published(self, step: int) -> int:
        """The version that a step publishes."""
        return (step + 1) // self._every

    def save(self, folder: Path, step: int, about: dict[str, Any]) -> Info:
        """Writes this rank's part of a checkpoint into the staging `folder`, at once or beside the next steps.

        Raises OSError where this write or the one before it failed.
        """
        with self.recorder.stage("checkpoint", step, step + 1):
            self.saving.save(self.learner, folder, about, self.scenario.checkpoint.blocking)
        return self._info()

    def settle(self) -> None:
        """Waits for the write that goes on beside the run. Raises OSError where it failed."""
        self.saving.settle()

    def restore(self, folder: Path, step: int) -> Info:
        """Takes the state from a complete checkpoint; `step` is the next one to be done."""
        with self.recorder.stage("restore", step, step), self.recorder.op("read") as notes:
            size = restore(self.learner, folder, self.saving.rank)
            notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
        return self._info()

    def logprobs(self, samples: Samples) -> list[Any]:
        """Log-probs of every response token under the weights at hand, on every rank; leaves no span."""
        found = self.learner.read(samples, range(len(samples)), deals=False)
        return [found[i] for i in range(len(samples))]

    def _minibatch(self, step: int, samples: Samples, chosen: list[int], first: bool) -> dict[str, float]:
        """One optimizer step; means over the units of the loss, and their number on all ranks as `units`."""
        from executor.algorithms.objectives import OBJECTIVES, Material, units

        algorithm = self.scenario.algorithm
        objective, fresh = OBJECTIVES[algorithm.name, self.role], self._fresh(samples, step)
        stale = samples.policy_version < step // self._every
        drift = self._drift(samples, chosen) if algorithm.extra_forwards else 0.0
        material = Material(algorithm=algorithm, samples=samples, stale=stale, fresh=fresh, drift=drift)
        compares = first and self._compares

        def loss(output: Tensor, batch: Microbatch) -> Loss:
            if compares and batch.weight:
                old = batch.column(samples.logprobs)
                same = batch.response if fresh is None else batch.column(fresh)
                self._gap = max(self._gap, float(((output.detach() - old).abs() * same).max()))
            return objective.loss(output, batch, material)

        number, batches = units(objective.unit, samples, chosen), self.learner.groups(samples, chosen)
        real = [batch for batch in batches if batch.weight]
        self._loads.append((sum(batch.ids.numel() for batch in real), sum(batch.num_tokens for batch in real)))
        means = self.learner.step(batches, loss, 1.0 / number)
        return means | {"units": float(number)} | ({"drift": drift} if algorithm.extra_forwards else {})

    def _fresh(self, samples: Samples, step: int) -> list[Any] | None:
        """Of each sample which response tokens were drawn by the weights that the step starts from, where a batch has
        samples of several versions."""
        if "versions" not in samples.columns:
            return None
        version = step // self._every if step % self._every == 0 else -1
        known = zip(samples.columns["versions"], samples.logprobs, strict=True)
        rows = samples.columns.get("token_versions") or [np.full(len(row), made) for made, row in known]
        return [row == version for row in rows]

    def _packing(self) -> dict[str, float]:
        """`padding`: the share of this rank's padded tokens that are none, 0 where prompts are shared. `imbalance`:
        what the most loaded rank of a mini-batch has above the mean, as a share of it, over all mini-batches."""
        places = [(i, rank) for i in range(len(self._loads)) for rank in range(self.world)]
        mine = {f"{i}/{rank}": float(self._loads[i][0] * (rank == self.rank)) for i, rank in places}
        every = iter(self.learner.total(mine).values())
        loads = [[next(every) for _ in range(self.world)] for _ in self._loads]
        padded, tokens = map(sum, zip(*self._loads, strict=True))
        above = sum(imbalance(load) * sum(load) for load in loads)
        return {"padding": max(1.0 - tokens / padded, 0.0), "imbalance": above / sum(map(sum, loads))}

    @property
    def _compares(self) -> bool:
        """Whether the engine's log-probs of a step's samples are to be the trainer's own: tokens were drawn from the whole
        distribution."""
        return self.role == "actor" and self.scenario.algorithm.rolls_out and self.scenario.sampling.plain

    def _drift(self, samples: Samples, chosen: list[int]) -> float:
        """KTO's estimate of KL(policy, reference): the mean of log p - log p_reference over a mini-batch's mismatched
        responses, at least 0; on all ranks."""
        mine, reference = samples.take(chosen), samples.columns["mismatched_logprobs"][chosen]
        found = self.learner.read(mismatched(mine, len(mine)), range(len(mine)), deals=True)
        total = sum(float(row.sum(dtype=np.float64)) - float(reference[i]) for i, row in found.items())
        return max(self.learner.total({"drift": total})["drift"] / len(chosen), 0.0)

    def _learned(self, step: int, samples: Samples, steps: list[dict[str, float]]) -> dict[str, float | None]:
        """Means over the units of all optimizer steps and ranks. The gap means something only where the weights are the
        same."""
        from executor.algorithms.objectives import reported

        number = sum(one["units"] for one in steps)
        same = {"grad_norm": sum(one["grad_norm"] for one in steps) / len(steps)}
        same["learning_rate"] = steps[-1]["learning_rate"]
        if "drift" in steps[0]:
            same["kl"] = sum(one["drift"] * one["units"] for one in steps) / number
        parts = [key for key in steps[0] if key not in (*same, "drift", "units")]
        sums = {key: sum(one[key] * one["units"] for one in steps) / number for key in parts}
        found: dict[str, float | None] = {**reported(self.learner.total(sums)), **same}
        for key in ("loss", "value_loss", "grad_norm"):
            if not math.isfinite(value := found.get(key) or 0.0):
                raise FloatingPointError(f"update of {self.role} in step {step}: {key} is {value}; lower optimizer.lr")
        if self.role == "critic":
            return {key if key == "value_loss" else f"critic_{key}": value for key, value in found.items()}
        if self._compares:
            gap = self.learner.largest(self._gap)
            fresh = self._fresh(samples, step)
            known = samples.policy_version == step if fresh is None else any(row.any() for row in fresh)
            found["logprob_gap"] = gap if known else None
        return found

    def _info(self, **learning: float | None) -> Info:
        return {"spans": self.recorder.take(), "learning": learning if self.rank == 0 else {}}


def _drawn(samples: Samples, about: dict[str, Any]) -> dict[str, float]:
    """How the samples of a batch were drawn, and how old they are."""
    found = means([diversity(samples)]) | {"temperature": float(samples.temperatures.mean())}
    return found | {key: about[key] for key in ("lag_mean", "lag_max")}


def _counts(num_samples: int, tokens: int) -> dict[str, Any]:
    quantities = {"calls": 1.0, "samples": float(num_samples), "tokens": float(tokens)}
    return {"samples": num_samples, "tokens": tokens, "quantities": quantities}
