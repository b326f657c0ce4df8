"""The checkpoints of a run as its driver sees them: what it adds to the parts of the ranks, when they are a whole, and
which of them stay.

A checkpoint after step k holds the state in which step k had published its weights: `published` takes the driver's part
of it at that very moment, before anything of a later step can begin on it. It becomes complete when every rank has
written its part and every stage of step k has ended. With `one_step_off` the samples of step k + 1 have been generated
by then, by weights that are gone: they are saved too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor import checkpoint, parcel
from executor.checkpoint import Rank, sealed
from executor.earlier import CHECKPOINTS
from executor.ledger import Ledger
from executor.resume import ranks
from executor.saving import FAILED
from executor.stages import Stages
from lab.policies import retention
from lab.policies.decision import Decision
from lab.scenario import Scenario
from lab.timeline import Span

_POLL_S = 0.01
SCORES = {
    "evaluation_reward": 1, "evaluation_accuracy": 1, "evaluation_margin": 1, "evaluation_loss": -1,
    "reward": 1, "accuracy": 1, "margin": 1, "loss": -1,
}  # fmt: skip
"""what checkpoints are judged by, the first of these that the learning row of any has; whether more of it is better"""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The driver's state as a step's weights were published."""

    stages: dict[str, Any]
    in_flight: dict[int, Any]
    """by later step, references to the samples that were generated for it"""


class Store:
    """Checkpoints on disk, complete ones and those that are being written."""

    def __init__(self, scenario: Scenario, folder: Path, stages: Stages, ledger: Ledger) -> None:
        self.scenario, self.root, self.stages, self.ledger = scenario, folder / CHECKPOINTS, stages, ledger
        stages.attempt = self.attempt = ledger.earlier.attempt
        self.ranks = ranks(scenario)
        self._taken: dict[int, Taken] = {}
        self._one_by_one = asyncio.Lock()
        self._sizes = {step: _size(self.root, step) for step in checkpoint.steps(self.root)}
        self._written = self._peak = 0.0
        self._deleted: list[dict[str, object]] = []
        self._tell()

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows a step."""
        node = self.stages.dataflow.nodes.get("checkpoint")
        return node is not None and node.runs(step)

    def published(self, step: int) -> None:
        """A step has published its weights, and nothing that may run later has begun yet.

        Of steps that no checkpoint follows only the last one is remembered: a run that is stopped saves it. Without a
        barrier what is saved depends on what was trained alone, and can be taken then.
        """
        if "checkpoint" not in self.stages.dataflow.nodes or (self.stages.dataflow.continuous and not self.due(step)):
            return
        for earlier in [known for known in self._taken if not self.due(known)]:
            del self._taken[earlier]
        self._taken[step] = Taken(stages=self.stages.state(), in_flight=self.stages.in_flight(step))

    async def last(self, step: int | None) -> None:
        """Saves the state after the last whole step of a run that is stopped, if checkpoints are wanted and it is not saved.

        Raises OSError where a rank or this process cannot write.
        """
        if "checkpoint" not in self.stages.dataflow.nodes or step is None or self.due(step):
            return
        if self.stages.dataflow.continuous and self.ledger.earlier.first_step <= step:
            self._taken[step] = Taken(stages=self.stages.state(), in_flight={})
        if step in self._taken:
            await self.stages.checkpoint(step)
            await self.complete(step, asyncio.sleep(0))

    async def complete(self, step: int, ended: Awaitable[Any]) -> None:
        """Makes the parts of all ranks a checkpoint once they are written and `ended`, and deletes what is not kept.

        Raises OSError where a rank or this process cannot write.
        """
        async with self._one_by_one:
            taken = self._taken.pop(step)
            await ended
            await self.stages.recording.finish()
            for rank in self.ranks:
                await self._sealed(step, rank)
            folder = checkpoint.staging(self.root, step, self.attempt)
            for later, reference in taken.in_flight.items():
                await asyncio.to_thread(parcel.write, folder / parcel.name(later), await reference)
            obtains = [stage for stage in ("rollout", "transfer") if stage in self.stages.dataflow.nodes]
            kept = [(stage, later) for later in taken.in_flight for stage in obtains]
            driver = {"step": step, "stages": taken.stages, "kept": kept} | self.ledger.unwritten(step, kept)
            arguments = (self.root, step, self.attempt, self.ranks, driver)
            self._sizes[step] = await asyncio.to_thread(checkpoint.commit, *arguments)
            self._written += self._sizes[step]
            self._peak = max(self._peak, sum(self._sizes.values()))
            self.ledger.saved(step)
            await asyncio.to_thread(self._prune)
            self._tell()

    async def _sealed(self, step: int, rank: Rank) -> None:
        """Waits for a rank's part; where it was written beside the run, the ledger gets its span."""
        folder = checkpoint.staging(self.root, step, self.attempt)
        while (about := sealed(folder, rank)) is None:
            if (failed := folder / rank.name / FAILED).exists():
                raise OSError(f"the checkpoint of step {step} cannot be written: {failed.read_text()}")
            await asyncio.sleep(_POLL_S)
        if not self.scenario.checkpoint.blocking and self.due(step):
            self.ledger.beside(step, self._write_span(step, rank, about))

    def _write_span(self, step: int, rank: Rank, about: dict[str, Any]) -> Span:
        worker = self.scenario.team(rank.role, "train")[rank.rank]
        name, size = f"checkpoint/{step}/{worker.name}", float(sum(file["bytes"] for file in about["files"].values()))
        return Span(
            span_id=f"{name}#{about['op']}", cause_ids=(name,), resource=f"{worker.name}.write", step=step,
            stage="checkpoint", op="write", pool=worker.pool, worker=worker.name, start_s=about["start_s"],
            end_s=about["end_s"], policy_version=step + 1, bytes=size,
            attrs={"quantities": {"calls": 1.0, "bytes": size}},
        )  # fmt: skip

    def _prune(self) -> None:
        rule = self.scenario.checkpoint.keep
        if rule is None:
            return
        judged = scores(self.ledger.rows(self._sizes))
        there = [retention.Checkpoint(step=step, score=judged[step]) for step in self._sizes]
        wanted = retention.Retention(**rule.model_dump())
        decided = retention.kept(wanted, there)
        for step in decided.delete:
            checkpoint.remove(self.root, step)
            del self._sizes[step]
        if decided.delete:
            self._deleted.append(Decision(rule="retention.kept", observed=tuple(there), decided=decided).plain())

    def _tell(self) -> None:
        self.ledger.storage = {
            "written_bytes": self._written, "peak_bytes": self._peak, "bytes": sum(self._sizes.values()),
            "steps": sorted(self._sizes), "decisions": self._deleted,
        }  # fmt: skip


def scores(rows: Mapping[int, dict[str, Any]]) -> dict[int, float | None]:
    """By step, how good the model after it is: by evaluations, or by the samples of the steps where nothing was evaluated.

    Only numbers of one name compare, so a step that was not evaluated has no score where others were; None: nobody knows.
    """
    known = [name for name in SCORES if any(_is_number(row.get(name)) for row in rows.values())]
    return {
        step: SCORES[known[0]] * float(row[known[0]]) if known and _is_number(row.get(known[0])) else None
        for step, row in rows.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _size(root: Path, step: int) -> float:
    files = checkpoint.read_json(checkpoint.folder_of(root, step) / checkpoint.MANIFEST)["files"]
    return float(sum(entry["bytes"] for entry in files.values()))
