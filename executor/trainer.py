"""The trainer: one rank of the actor's or the critic's training in a Ray actor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.algorithms.advantages import ADVANTAGES, joined
from executor.experience import Samples
from executor.recorder import Recorder
from lab.algorithm import PolicyGradient
from lab.placement import Worker
from lab.policies.microbatch import deal, minibatches
from lab.scenario import Scenario

if TYPE_CHECKING:
    from torch import Tensor

    from executor.algorithms.losses import Loss
    from executor.learner import Microbatch

Info = dict[str, Any]


class Trainer:
    """All ranks of a role are called together with the same arguments.

    Nothing heavy is imported before `ready`, so that whoever starts this actor stays light.
    """

    def __init__(self, worker: Worker, rank: int, world: int, role: str, scenario: Scenario, master_port: int) -> None:
        """`world` ranks meet at `master_port`, which is also in the environment of the process."""
        self.worker, self.rank, self.world, self.role, self.scenario = worker, rank, world, role, scenario
        self.master_port = master_port
        self.recorder = Recorder(worker.name, worker.pool)

    def ready(self) -> Info:
        """Builds network and optimizer; ends when all ranks have."""
        with self.recorder.stage("setup", -1):
            from executor.learner import Learner

            arguments = (self.scenario, self.role, self.rank, self.world, self.worker.threads, self.recorder)
            self.learner = Learner(*arguments)
        return self._info()

    def connect(self, host: str, port: int, world_size: int) -> None:
        """Meets the engines that will receive weights; blocks until all have come."""
        from executor.transfer import WeightSender

        self._sender = WeightSender(host, port, world_size)

    def values(self, step: int, samples: Samples) -> tuple[dict[str, Any], Info]:
        """`values` of the samples that this rank is dealt, by index: one number per response token, before it is drawn."""
        with self.recorder.stage("value", step, samples.policy_version) as notes:
            found = self.learner.read(samples, range(len(samples)), deals=True)
            mine = [samples.lengths[i] for i in deal(len(samples), self.world)[self.rank]]
            notes |= _counts(len(mine), sum(mine))
        return {"values": found}, self._info()

    def advantage(self, step: int, samples: Samples, *columns: dict[str, Any]) -> tuple[Samples, Info]:
        """The samples with the columns of all scorers and with advantages; on the actor's rank 0."""
        with self.recorder.stage("advantage", step, samples.policy_version) as notes:
            algorithm = self.scenario.algorithm
            batch = ADVANTAGES[algorithm.name](samples.with_columns(**joined(columns, len(samples))), algorithm)
            notes |= _counts(len(samples), sum(samples.lengths))
        return batch, self._info(reward=float(np.mean(batch.columns["rewards"])))

    def update(self, step: int, samples: Samples) -> Info:
        """Every optimizer step of a training step: epochs over mini-batches in fixed order."""
        epochs = self.scenario.algorithm.epochs
        chosen = minibatches(len(samples), self.scenario.update.minibatch_samples)
        with self.recorder.stage(f"update_{self.role}", step, step + 1) as notes:
            self._gap = 0.0
            steps = [self._minibatch(samples, batch, first=i == 0) for i, batch in enumerate(chosen * epochs)]
            learned = self._learned(step, samples, steps)
            mine = [batch[i] for batch in chosen for i in deal(len(batch), self.world)[self.rank]]
            notes |= _counts(len(mine), epochs * sum(samples.lengths[i] for i in mine))
            notes["quantities"]["minibatches"] = float(len(steps))
        return self._info(**learned)

    def send_weights(self, step: int) -> Info:
        """Broadcasts the weights from rank 0; every rank takes part in gathering them."""
        with self.recorder.stage("weight_sync", step, step + 1):
            if self.rank == 0:
                with self.recorder.op("transfer") as notes:
                    size = self._sender.send(self.learner.weights().items())
                    notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
            else:
                self.learner.weights()
        return self._info()

    def save(self, folder: Path, step: int) -> Info:
        """Writes this rank's part of a checkpoint below `folder`."""
        from executor.checkpoint import name, write

        about = {
            "step": step,
            "role": self.role,
            "rank": self.rank,
            "world": self.world,
            "digest": self.scenario.digest,
        }
        with self.recorder.stage("checkpoint", step, step + 1), self.recorder.op("write") as notes:
            weights = self.learner.weights()
            path = folder / name(step, self.role, self.rank)
            size = write(path, weights if self.rank == 0 else None, self.learner.state(), about)
            notes |= {"bytes": size, "quantities": {"calls": 1.0, "bytes": size}}
        return self._info()

    def logprobs(self, samples: Samples) -> list[Any]:
        """Log-probs of every response token under the weights at hand, on every rank; leaves no span."""
        found = self.learner.read(samples, range(len(samples)), deals=False)
        return [found[i] for i in range(len(samples))]

    def _minibatch(self, samples: Samples, chosen: list[int], first: bool) -> dict[str, float]:
        total = sum(len(samples.logprobs[i]) for i in chosen)
        batches = self.learner.groups(samples, chosen)

        def objective(output: Tensor, batch: Microbatch) -> Loss:
            if self.role == "critic":
                return self._critic_loss(output, batch, samples)
            if first and batch.weight:
                old = batch.column(samples.logprobs)
                self._gap = max(self._gap, float(((output.detach() - old).abs() * batch.response).max()))
            return self._actor_loss(output, batch, samples)

        return self.learner.step(batches, objective, 1.0 / total)

    def _actor_loss(self, output: Tensor, batch: Microbatch, samples: Samples) -> Loss:
        from executor.algorithms.losses import divergence, policy_loss

        algorithm, columns = self.scenario.algorithm, samples.columns
        assert isinstance(algorithm, PolicyGradient), "refused by executor.limits"
        reference = batch.column(columns["reference_logprobs"]) if "reference_logprobs" in columns else None
        loss = policy_loss(
            output, batch.column(samples.logprobs), batch.column(columns["advantages"]), batch.response,
            clip=algorithm.clip, kl_coef=algorithm.kl_coef, reference=reference if algorithm.name == "grpo" else None,
        )  # fmt: skip
        if reference is not None:
            loss.sums["kl"] = divergence(output, reference, batch.response)
        return loss

    def _critic_loss(self, output: Tensor, batch: Microbatch, samples: Samples) -> Loss:
        from executor.algorithms.losses import value_loss

        algorithm, columns = self.scenario.algorithm, samples.columns
        assert algorithm.name == "ppo", "only PPO has a critic"
        old, returns = batch.column(columns["values"]), batch.column(columns["returns"])
        return value_loss(output, old, returns, batch.response, clip=algorithm.value_clip)

    def _learned(self, step: int, samples: Samples, steps: list[dict[str, float]]) -> dict[str, float | None]:
        """Means over optimizer steps; sums of all ranks. The gap means something only where the weights are the same."""
        sums = {key: sum(one[key] for one in steps) / len(steps) for key in steps[0]}
        norm = sums.pop("grad_norm")
        found: dict[str, float | None] = dict(self.learner.total(sums))
        if self.role == "critic":
            return found | {"critic_grad_norm": norm}
        gap = self.learner.largest(self._gap)
        return found | {"grad_norm": norm, "logprob_gap": gap if samples.policy_version == step else None}

    def _info(self, **learning: float | None) -> Info:
        return {"spans": self.recorder.take(), "learning": learning if self.rank == 0 else {}}


def _counts(num_samples: int, tokens: int) -> dict[str, Any]:
    quantities = {"calls": 1.0, "samples": float(num_samples), "tokens": float(tokens)}
    return {"samples": num_samples, "tokens": tokens, "quantities": quantities}
