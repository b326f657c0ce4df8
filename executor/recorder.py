"""Spans as a worker records them, on the machine's monotonic clock.

CLOCK_MONOTONIC is one clock for all processes of a machine, so spans of different workers compare without alignment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from executor.tracing import traced
from lab.timeline import Span


class Recorder:
    """Collects the spans of one worker until they are taken; times are absolute seconds of the monotonic clock."""

    def __init__(self, worker: str, pool: str) -> None:
        self.worker, self.pool = worker, pool
        self._spans: list[Span] = []
        self._stage: tuple[str, int, int] | None = None
        self._node = ""

    @contextmanager
    def stage(self, stage: str, step: int, policy_version: int = 0, *, node: str = "") -> Iterator[dict[str, Any]]:
        """Times a stage. The body may fill the yielded dict: tokens, bytes, everything else becomes attrs.

        `node`: the name of the dataflow's node where its stage has several.
        """
        self._stage, self._num_ops, notes = (stage, step, policy_version), 0, dict[str, Any]()
        self._node = node or stage
        with traced(self._node, step, self.worker) as trace:
            notes |= {} if trace is None else {"trace": trace}
            start = time.monotonic()
            try:
                yield notes
            finally:
                self._add(stage, step, policy_version, "", start, time.monotonic(), notes)
                self._stage = None

    @contextmanager
    def op(self, op: str) -> Iterator[dict[str, Any]]:
        """Times an op inside the current stage; outside a stage it is not recorded."""
        notes, start = dict[str, Any](), time.monotonic()
        yield notes
        self.op_between(op, start, time.monotonic(), **notes)

    def op_between(self, op: str, start: float, end: float, **notes: Any) -> None:
        """Records an op that was timed elsewhere."""
        if self._stage is not None:
            self._add(*self._stage, op, start, end, notes)

    def _add(
        self, stage: str, step: int, version: int, op: str, start: float, end: float, notes: dict[str, Any]
    ) -> None:
        span_id = f"{self._node}/{step}/{self.worker}"
        if op:
            span_id, self._num_ops = f"{span_id}#{self._num_ops}", self._num_ops + 1
        self._spans.append(
            Span(
                span_id=span_id, cause_ids=(span_id.split("#")[0],) if op else (), resource=self.worker, step=step,
                stage=stage, op=op, pool=self.pool, worker=self.worker, start_s=start, end_s=end,
                policy_version=version, tokens=int(notes.pop("tokens", 0)), bytes=float(notes.pop("bytes", 0.0)),
                attrs=notes,
            )
        )  # fmt: skip

    @property
    def num_ops(self) -> int:
        """Ops recorded so far in the stage under way."""
        return self._num_ops

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


def rebase(span: Span, zero_s: float, cause_ids: tuple[str, ...] | None = None) -> Span:
    """The span with times counted from `zero_s`, and its causes where given."""
    causes = span.cause_ids if cause_ids is None else cause_ids
    return msgspec.structs.replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s, cause_ids=causes)
