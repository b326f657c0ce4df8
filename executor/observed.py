"""What is known of a run at this moment, metric by metric, from what its stages report. No clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lab.offline import UPDATES
from lab.timeline import Span
from lab.watched import BY_NAME, METRICS

ENGINE_OPS = ("prefill", "decode")
Info = Mapping[str, Any]


class Value(NamedTuple):
    """The present value of one series."""

    number: Any
    """a float; of a histogram its (counts by bucket, sum)"""
    iteration: int
    model_version: int


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How the numbers of one step are spread over the buckets of a metric."""

    counts: tuple[int, ...]
    """by bucket, the last one for all that is larger than every edge; not added up"""
    total: float
    """sum of the numbers"""


class Observed:
    """Series by (metric, values of its own labels). One thread changes it; others take a `copy`."""

    def __init__(self, ends: str, *, barrier: bool = True, batches: int = 1) -> None:
        """`ends`: the stage that ends a step; without a barrier the trainer's part of it does. Spans count their steps in
        batches of a step."""
        self.values: dict[tuple[str, tuple[str, ...]], Value] = {}
        self.iteration, self.model_version = 0, 0
        self._version: int | None = None
        """of the weights behind what is being looked at, where that is known"""
        self._ends, self._barrier, self._batches = ends, barrier, batches
        self._published: dict[int, float] = {}
        self._counted = False

    def copy(self) -> dict[tuple[str, tuple[str, ...]], Value]:
        """All series as they are now."""
        return dict(self.values)

    def stage(self, stage: str, step: int, infos: Sequence[Info], num_samples: int) -> None:
        """A stage of a step has ended on all its workers; spans count their seconds from the run's time zero.

        `num_samples`: that a step trains on.
        """
        spans = [span for info in infos for span in info["spans"]]
        whole = [span for span in spans if not span.op and span.stage == stage]
        self.iteration = max(self.iteration, step)
        self._version = max((span.policy_version for span in whole), default=None)
        self.model_version = max(self.model_version, self._version or 0)
        if whole:
            seconds = max(span.end_s for span in whole) - min(span.start_s for span in whole)
            self.set("stage_seconds", seconds, stage, step=step)
        if stage == "rollout":
            self._rolled(step, whole)
        self._engines(step, spans)
        if stage == "advantage" and whole:
            self._aged(step, whole[0])
        if stage in UPDATES:
            self._updated(step, stage, whole)
        self.add("weight_bytes_total", sum(span.bytes for span in spans if _sends(span)))
        ending = [span for span in whole if self._barrier or ".train[" in span.worker]
        if stage == self._ends and ending and (step + 1) % self._batches == 0:
            self._ended(step // self._batches, max(span.end_s for span in ending), num_samples)
        for info in infos:
            self._said(step, info)
        self._version = None

    def _said(self, step: int, info: Info) -> None:
        for name, found in info.get("distributions", {}).items():
            self.set(name, found, step=step)
        for name, number in info.get("gauges", {}).items():
            self.set(name, number, step=step)

    def learned(self, step: int, row: Mapping[str, Any]) -> None:
        """What is known of what a step learned."""
        for metric in METRICS:
            for label, key in metric.learned:
                if isinstance(row.get(key), int | float) and math.isfinite(row[key]):
                    self.set(metric.name, float(row[key]), *filter(None, [label]), step=step)

    def finished(self, num_finished: int) -> None:
        """So many steps are finished."""
        self.set("steps_total", float(num_finished))

    def fates(self, counts: Mapping[str, int]) -> None:
        """Of every sample so far what has become of it, where somebody counts them one by one."""
        self._counted = True
        for fate in ("trained", "dropped", "aborted", "lost"):
            self.set("samples_total", float(counts.get(fate, 0)), fate)
        self.set("buffer_samples", float(counts.get("buffered", 0)))

    def fault(self, kind: str, num_lost: int = 0) -> None:
        """Something failed; the samples that it took."""
        self.add("faults_total", 1.0, kind)
        if not self._counted:
            self.add("samples_total", float(num_lost), "lost")

    def set(self, name: str, number: Any, *labels: str, step: int | None = None) -> None:
        """The present value of a series. Raises KeyError for a metric that there is not, ValueError for wrong labels."""
        if len(BY_NAME[name].labels) != len(labels):
            raise ValueError(f"{name} has the labels {BY_NAME[name].labels}, not {labels}")
        iteration = self.iteration if step is None else step
        version = self.model_version if self._version is None else self._version
        self.values[name, labels] = Value(number, iteration, version)

    def add(self, name: str, number: float, *labels: str) -> None:
        """Adds to a counter."""
        before = self.values.get((name, labels))
        self.set(name, (before.number if before else 0.0) + number, *labels)

    def forget(self, names: Collection[str], present: Collection[str]) -> None:
        """Series of these metrics whose first own label is not among those present end: a process that is gone."""
        gone = [key for key in self.values if key[0] in names and key[1][0] not in present]
        for key in gone:
            del self.values[key]

    def number(self, name: str, *labels: str) -> float | None:
        """The present value of a series; None before there is one."""
        found = self.values.get((name, labels))
        return None if found is None else float(found.number)

    def of_step(self, step: int) -> dict[str, float]:
        """The gauges whose present value is of a step, by name, with the values of their own labels behind a slash."""
        return {
            "/".join((name, *labels)): float(value.number)
            for (name, labels), value in self.values.items()
            if value.iteration == step and BY_NAME[name].kind == "gauge"
        }

    def _rolled(self, step: int, spans: Sequence[Span]) -> None:
        samples = sum(span.attrs.get("samples", 0) for span in spans)
        tokens = sum(span.attrs.get("response_tokens", 0) for span in spans)
        seconds = max((span.end_s for span in spans), default=0.0) - min((span.start_s for span in spans), default=0.0)
        self.add("generated_tokens_total", float(tokens))
        self._count("generated", samples)
        if seconds > 0:
            self.set("generated_tokens_per_second", tokens / seconds, step=step)
        if samples:
            self.set("response_length_tokens", tokens / samples, step=step)

    def _engines(self, step: int, spans: Sequence[Span]) -> None:
        latest = {span.worker: span for span in spans if span.op in ENGINE_OPS and "running" in span.attrs}
        for worker, span in latest.items():
            self.set("engine_running_requests", float(span.attrs["running"]), worker, step=step)
            self.set("engine_waiting_requests", float(span.attrs["waiting"]), worker, step=step)
            self.set("engine_kv_use_ratio", float(span.attrs["kv_usage"]), worker, step=step)

    def _aged(self, step: int, span: Span) -> None:
        """Samples of a barrier schedule are all of one version; the update makes version step + 1 of version step."""
        age = float(step - span.policy_version)
        self.set("lag_versions", float(span.attrs.get("lag_mean", age)), "mean", step=step)
        self.set("lag_versions", float(span.attrs.get("lag_max", age)), "max", step=step)

    def _updated(self, step: int, stage: str, spans: Sequence[Span]) -> None:
        if stage == "update_actor" or self._ends == stage:
            self._count("trained", sum(span.attrs.get("samples", 0) for span in spans))

    def _count(self, fate: str, number: float) -> None:
        if self._counted and fate != "generated":
            return
        self.add("samples_total", float(number), fate)
        if self._counted:
            return
        generated, trained = (self.number("samples_total", f) or 0.0 for f in ("generated", "trained"))
        self.set("buffer_samples", max(generated - trained - (self.number("samples_total", "dropped") or 0.0), 0.0))

    def _ended(self, step: int, end_s: float, num_samples: int) -> None:
        self._published[step] = end_s
        start = self._published.pop(step - 1, 0.0 if step == 0 else None)
        if start is not None and end_s > start:
            self.set("step_seconds", end_s - start, step=step)
            self.set("samples_per_second", num_samples / (end_s - start), step=step)


def _sends(span: Span) -> bool:
    return span.op == "transfer" and span.stage == "weight_sync" and ".train[" in span.worker
