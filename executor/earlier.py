"""What earlier attempts at a run left in its folder, and what of it still counts when the run is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from executor.trail import Trail
from lab.runs import finished_spans, written_rows
from lab.timeline import Span

SPANS, LEARNING, CHECKPOINTS = "spans.jsonl", "learning.jsonl", "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The past of a run; empty for one that begins."""

    attempt: int = 0
    """attempts before this one"""
    first_step: int = 0
    """the step to go on with; those before it are done"""
    checkpoint: Path | None = None
    """of the step before; None: from the beginning"""
    stages: dict[str, Any] = field(default_factory=dict)
    """what the driver had decided by, as `Stages.state` said"""
    kept: frozenset[tuple[str, int]] = frozenset()
    """runs of stages from `first_step` on whose output lies in the checkpoint: they are not done again"""
    trail: Trail = field(default_factory=Trail)
    """what is remembered of the spans of all attempts, which are on disk"""
    learning: tuple[dict[str, Any], ...] = ()
    """rows of the latest steps before `first_step`, and what is known of the next ones"""
    faults: tuple[dict[str, Any], ...] = ()
    """one for each time the run was interrupted, as in a timeline's header"""
    startup_s: float | None = None
    """of the first attempt"""
    samples: Any = None
    """of a run without a barrier that goes back by itself: the books of the attempt before (`executor.past.Past`)"""
    notes: tuple[str, ...] = ()
    """what the user should know"""
    clock: tuple[float, float] | None = None
    """where the process that began the run lives on: its beginning and the run's time zero on the monotonic clock"""


def spans_of(folder: Path, saved: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """The spans on disk, and those that a checkpoint held because they were not there yet."""
    left = {span.span_id: span for span in msgspec.convert(list(saved), list[Span])}
    for span in finished_spans(folder):
        left.pop(span.span_id, None)
        yield span
    yield from left.values()


def rows_of(folder: Path, saved: Mapping[int, dict[str, Any]], first_step: int) -> Iterator[dict[str, Any]]:
    """Learning rows of the steps before `first_step`, a later one of a step after an earlier one; what a checkpoint held
    of a step, by step, instead of all others."""
    for row in written_rows(folder):
        if row["step"] < first_step and row["step"] not in saved:
            yield row
    yield from (row for step, row in saved.items() if step < first_step)


def counted(span: Span, first_step: int, kept: frozenset[tuple[str, int]], again: set[str]) -> Span:
    """The span, marked as lost where it is of `first_step` or later; not if `kept` names it, in the form that has come from
    the checkpoint: `again` are the ids of those.
    """
    counts = span.step < first_step or span.stage in ("restore", "setup") or span.lost
    counts = counts or ((span.node, span.step) in kept and span.span_id in again)
    return span if counts else msgspec.structs.replace(span, attrs=span.attrs | {"lost": True})


@dataclass(kw_only=True)
class Interruption:
    """What an interrupted attempt cost, by spans without and with their losses, one after the other.

    Seconds and tokens are of the steps that were finished; what was under way when the process died, nobody wrote down.
    """

    first_step: int
    restored_s: float = 0.0
    """when the last span before `first_step` ended"""
    ended_s: float = 0.0
    lost_tokens: int = 0
    steps: set[int] = field(default_factory=set)

    def add(self, before: Span, after: Span) -> None:
        self.ended_s = max(self.ended_s, after.end_s)
        if after.step < self.first_step and not after.lost:
            self.restored_s = max(self.restored_s, after.end_s)
        if after.lost and not before.lost and not after.op:
            self.lost_tokens += int(after.attrs.get("response_tokens", 0))
            self.steps |= {after.step} if after.step >= self.first_step else set()

    @property
    def record(self) -> dict[str, Any]:
        """As the header has it."""
        return {
            "at_s": self.ended_s, "kind": "interrupted", "target": "run", "recovery": "resume", "step": self.first_step,
            "steps": len(self.steps), "from_s": self.restored_s, "until_s": self.ended_s,
            "lost_s": max(self.ended_s - self.restored_s, 0.0), "lost_tokens": self.lost_tokens,
        }  # fmt: skip
