"""What earlier attempts at a run left in its folder, and what of it still counts when the run is resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab.runs import whole_lines
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
    spans: tuple[Span, ...] = ()
    """of all attempts; those of steps that have to be done again have `lost`"""
    learning: tuple[dict[str, Any], ...] = ()
    """rows of the steps before `first_step`, and what is known of the next ones"""
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

    @property
    def ended_s(self) -> float:
        """When what is known of the run ended, on its own clock, which stands still while nobody runs it."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def redone(self) -> Counter[str]:
        """By span id without its `~2`: how often it was done before, in vain or to come back."""
        ended = [span for span in self.spans if not span.op and (span.lost or span.stage == "restore")]
        return Counter(span.span_id.split("~")[0] for span in ended)


def spans_of(folder: Path, saved: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans on disk, and those that a checkpoint held because they were not there yet."""
    found = [msgspec.json.decode(line, type=Span) for line in whole_lines(folder / SPANS)]
    known = {span.span_id for span in found}
    return found + [span for span in msgspec.convert(list(saved), list[Span]) if span.span_id not in known]


def rows_of(folder: Path, saved: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Learning rows by step, a later one of a step over an earlier one; what a checkpoint held over both."""
    rows = {row["step"]: row for row in map(json.loads, whole_lines(folder / LEARNING))}
    return rows | {row["step"]: row for row in saved}


def with_lost(spans: Iterable[Span], first_step: int, kept: frozenset[tuple[str, int]], again: set[str]) -> list[Span]:
    """The spans, those of `first_step` and later marked as lost; not those that `kept` names, in the form that has come
    from the checkpoint: `again` are their ids.
    """
    found = []
    for span in spans:
        counts = span.step < first_step or span.stage in ("restore", "setup") or span.lost
        counts = counts or ((span.node, span.step) in kept and span.span_id in again)
        found.append(span if counts else msgspec.structs.replace(span, attrs=span.attrs | {"lost": True}))
    return found


def interruption(before: Iterable[Span], after: list[Span], first_step: int, restored_s: float) -> dict[str, Any]:
    """What a header says of an interrupted attempt: `before` and `after` are the spans without and with their losses.

    Seconds and tokens are of the steps that were finished; what was under way when the process died, nobody wrote down.
    """
    known = {span.span_id for span in before if span.lost}
    lost = [span for span in after if span.lost and span.span_id not in known]
    ended = max((span.end_s for span in after), default=0.0)
    stages = [span for span in lost if not span.op]
    return {
        "at_s": ended, "kind": "interrupted", "target": "run", "recovery": "resume", "step": first_step,
        "steps": len({span.step for span in stages if span.step >= first_step}),
        "from_s": restored_s, "until_s": ended, "lost_s": max(ended - restored_s, 0.0),
        "lost_tokens": sum(int(span.attrs.get("response_tokens", 0)) for span in stages),
    }  # fmt: skip
