"""What a driver remembers of the spans of a run: a few numbers, and which stages of the latest steps there are.

The spans themselves are on disk, for there are more of them the longer a run is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lab.timeline import Span

REMEMBERED = 1000
"""steps of which more is known than what is on disk"""


@dataclass(kw_only=True)
class Known:
    """Ids of whole stages, without their `~2`, of the latest steps; those of steps long past are forgotten."""

    _by_step: dict[int, set[str]] = field(default_factory=dict)
    _oldest: int = -1

    def __contains__(self, name: str) -> bool:
        return name in self._by_step.get(_step(name), ())

    def add(self, name: str) -> None:
        step = _step(name)
        if step >= self._oldest:
            self._by_step.setdefault(step, set()).add(name)
        if step - REMEMBERED > self._oldest:
            self._oldest = step - REMEMBERED
            self._by_step = {known: names for known, names in self._by_step.items() if known >= self._oldest}

    def discard(self, name: str) -> None:
        self._by_step.get(_step(name), set()).discard(name)

    def may_have(self, name: str) -> bool:
        """Whether it is known, or forgotten."""
        return _step(name) < self._oldest or name in self


def _step(name: str) -> int:
    return int(name.split("/", 2)[1])


@dataclass(kw_only=True)
class Trail:
    """What is remembered of spans, which are told of one after the other and not kept."""

    ended_s: float = 0.0
    """when what is known of the run ended, on its own clock, which stands still while nobody runs it"""
    ends: dict[str, float] = field(default_factory=dict)
    """by resource, when its last span ended"""
    redone: Counter[str] = field(default_factory=Counter)
    """by span id without its `~2`: how often it was done before, in vain or to come back"""
    known: Known = field(default_factory=Known)
    """whole stages that count"""
    num_aborted: int = 0
    num_wasted: int = 0

    def add(self, span: Span) -> None:
        self.ended_s = max(self.ended_s, span.end_s)
        self.ends[span.resource] = max(span.end_s, self.ends.get(span.resource, span.end_s))
        self.num_aborted += aborted(span)
        self.num_wasted += wasted(span)
        if not span.op and (span.lost or span.stage == "restore"):
            self.redone[span.span_id.split("~")[0]] += 1
        if not span.lost and not span.op:
            self.known.add(span.span_id.partition("~")[0])


def wasted(span: Span) -> int:
    """Response tokens on a span that nobody is trained on."""
    return 0 if span.lost else int(span.attrs.get("wasted_tokens", 0))


def aborted(span: Span) -> int:
    """Samples that were stopped in the stage of a span, as far as that counts."""
    return 0 if span.lost else int(span.attrs.get("aborted", 0))
