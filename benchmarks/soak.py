"""A long run on two cores in which everything is killed, stopped or slowed down at random, again and again.

    SOAK_SECONDS=1200 python -m benchmarks.soak --write benchmarks/soak.md

At the end the run is stopped as a user would. What is looked at: the memory of every process after its warm-up, processes
and shared memory that are left behind, files that are half-written, and whether every step and sample is accounted for.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec
import psutil

from benchmarks.faults import wrong
from benchmarks.kills import Attempt, wait_until
from executor import injecting, processes
from lab import runs
from lab.load import dump, load
from lab.scenario import Scenario
from lab.timeline import Timeline

ROOT = Path(__file__).resolve().parents[1]
LAB = [sys.executable, "-c", "from lab.cli import app; app()"]
GROWTH = 0.02
"""of a process after its warm-up, at most"""
KEPT_BYTES, RAY = 128 * 2**10, ("gcs_server", "raylet")
"""what Ray's two servers may keep besides of every process that they have started meanwhile, whoever uses them"""
WARM_S, JUDGED_S = 120.0, 60.0
"""a process's warm-up, and what has to follow for its memory to be judged. A worker's begins once it works, with models
loaded: its heap, which is not given back, has the size of the largest batch so far, and of some forty random ones few that
follow are larger. That of a process which outlasts workers begins with the run, and anew once that has been back at a
checkpoint for the first time.
"""
SAMPLE_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 2.0, 300.0, 120.0
SHARED = Path("/dev/shm")
FAULTS = [
    {"kind": "worker_lost", "mtbf": 240.0, "recovery": "reassign", "detect": 2.0},
    {"kind": "scorer_lost", "mtbf": 400.0, "detect": 2.0},
    {"kind": "trainer_lost", "mtbf": 700.0, "detect": 2.0},
    {"kind": "straggler", "mtbf": 300.0, "factor": 0.3, "duration": 5.0},
]
STEPS = 3000
"""more than fit into the time"""


def scenario(seed: int) -> Scenario:
    """Two engines, two ranks of a trainer, a reference and a reward on two cores."""
    changes = {
        "name": "soak", "seed": seed, "num_steps": STEPS, "faults": FAULTS,
        "checkpoint": {"every_steps": 5, "blocking": False, "keep": {"latest": 2}},
    }  # fmt: skip
    return load(ROOT / "scenarios" / "grpo-two-engines.yaml").replace(changes)


@dataclass(kw_only=True)
class Process:
    """The memory of one process over its life."""

    name: str
    begun_s: float
    is_actor: bool = False
    """it is begun anew where it is lost; everything else outlasts it"""
    working_s: float | None = None
    """when its warm-up began; None: with the process, and that of an actor has not"""
    resident: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, bytes), without what is shared with others: Ray's object store appears in all who have used it"""

    @property
    def judged(self) -> list[tuple[float, int]]:
        warm = (self.begun_s if self.working_s is None else self.working_s) + WARM_S
        return [(at, size) for at, size in self.resident if at >= warm]

    @property
    def thirds(self) -> tuple[list[tuple[float, int]], list[tuple[float, int]]] | None:
        """The first and the last of what follows the warm-up; None where that is too short."""
        found = self.judged if self.working_s is not None or not self.is_actor else []
        if not found or found[-1][0] - found[0][0] < JUDGED_S - SAMPLE_S:
            return None
        third = len(found) // 3
        return found[:third], found[-third:]

    @property
    def growth(self) -> float | None:
        """Of the median of the last third against that of the first."""
        if self.thirds is None:
            return None
        first, last = (median(size for _, size in part) for part in self.thirds)
        return last / first - 1


class Memory:
    """Samples the resident memory of a run's processes."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self._trainers: dict[str, int] = {}

    def look(self, family: Sequence[psutil.Process], names: dict[int, str], now: float) -> None:
        for process in family:
            try:
                memory, pid = process.memory_info(), process.pid
                size, title = memory.rss - memory.shared, " ".join(process.cmdline())
                known = self.processes.setdefault(pid, Process(name=names.get(pid, process.name()), begun_s=now))
            except psutil.Error:
                continue
            known.resident.append((now, size))
            known.is_actor = known.is_actor or title.startswith("ray::")
        self.name(names, now)

    def name(self, names: dict[int, str], now: float) -> None:
        """These processes work now, under these names."""
        for pid, name in names.items():
            if (known := self.processes.get(pid)) is None:
                continue
            known.name = name
            if known.is_actor and known.working_s is None:
                known.working_s = now
            if ".train[" in name and self._trainers.setdefault(name, pid) != pid:
                self._back(now)

    def _back(self, now: float) -> None:
        """The run has been back at a checkpoint, for the first time perhaps."""
        for process in self.processes.values():
            if not process.is_actor and process.working_s is None:
                process.working_s = max(now, process.begun_s)

    def allowed(self, process: Process) -> float:
        """How much a process may grow, as a share."""
        if process.thirds is None or process.name not in RAY:
            return GROWTH
        (since, _), (until, _) = (part[len(part) // 2] for part in process.thirds)
        begun = sum(since < one.begun_s <= until for one in self.processes.values())
        return GROWTH + begun * KEPT_BYTES / median(size for _, size in process.thirds[0])


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What was found."""

    seconds: float
    timeline: Timeline
    struck: list[str]
    memory: Memory
    complaints: list[str]


def soak(folder: Path, seconds: float, seed: int) -> Soaked:
    """Runs, watches, stops and looks at what is left. `folder` has to have a short name."""
    chosen, shared = scenario(seed), set(SHARED.iterdir())
    (folder / "soak.yaml").write_text(dump(chosen))
    out, memory = folder / "runs", Memory()
    attempt = Attempt([str(folder / "soak.yaml"), "--out", str(out), "--no-metrics", "--no-tracking"], folder / "log")
    wait_until(lambda: attempt.process.poll() is not None or any(out.glob("*/spans.jsonl")), START_TIMEOUT_S)
    (run,) = out.iterdir()
    begun = time.monotonic()
    while time.monotonic() - begun < seconds and attempt.process.poll() is None:
        names = {pid: name for name, pid in processes.read(run).items()}
        memory.look(attempt.family(), names, time.monotonic())
        time.sleep(SAMPLE_S)
    stopped = subprocess.run([*LAB, "stop", str(run)], capture_output=True, text=True, cwd=ROOT)
    attempt.process.wait(STOP_TIMEOUT_S)
    struck = [f"{said['how']} {said['target']}" for said in injecting.struck(run)]
    timeline = runs.read(run)
    found = [*_left(attempt, run, shared), *_accounts(chosen, timeline), *_grown(memory)]
    if stopped.returncode or timeline.header.status != "cancelled":
        found.append(f"it ended as {timeline.header.status}: {timeline.header.error} {stopped.stderr[-500:]}")
    return Soaked(seconds=seconds, timeline=timeline, struck=struck, memory=memory, complaints=found)


def _left(attempt: Attempt, run: Path, shared: set[Path]) -> Iterator[str]:
    """Processes, shared memory and halves of files."""
    try:
        wait_until(lambda: not attempt.family(), STOP_TIMEOUT_S)
    except TimeoutError:
        yield from (f"process {process.pid} is left" for process in attempt.family())
    for path in set(SHARED.iterdir()) - shared:
        if path.exists() and path.stat().st_uid == os.getuid() and not _is_used(path):
            yield f"{path} is left"
    for path in run.rglob("*"):
        if path.name.startswith(".") or path.suffix in (".part", ".tmp") or path.name == processes.FILE:
            yield f"{path.relative_to(run)} is left"
    for path in run.glob("*.jsonl"):
        if not path.read_bytes().endswith(b"\n"):
            yield f"{path.name} ends in the middle of a line"


def _is_used(path: Path) -> bool:
    """Whether a process has a file of shared memory open: it is somebody else's, for those of the run have ended."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False


def _accounts(chosen: Scenario, timeline: Timeline) -> list[str]:
    """As of a run that was to have so many steps as it finished."""
    steps = len(timeline.header.learning)
    header = msgspec.structs.replace(timeline.header, num_steps=steps)
    return wrong(chosen.replace({"num_steps": max(steps, 1)}), msgspec.structs.replace(timeline, header=header))


def _grown(memory: Memory) -> Iterator[str]:
    for pid, process in memory.processes.items():
        if (growth := process.growth) is not None and growth > (allowed := memory.allowed(process)):
            yield f"{process.name} ({pid}) grew by {growth:.1%}, {allowed:.1%} at most"


def lines(found: Soaked) -> Iterator[str]:
    header = found.timeline.header
    yield f"{found.seconds:.0f} s, {len(header.learning)} steps finished, {len(found.struck)} strikes:"
    for text in sorted(set(found.struck)):
        yield f"- {found.struck.count(text)} × {text}"
    back = [fault for fault in header.faults if "step" in fault]
    yield ""
    yield f"Back to a checkpoint {len(back)} times; samples {header.samples}."
    yield ""
    yield "| process | judged for | resident | growth | at most |"
    yield "|---|---|---|---|---|"
    for process in found.memory.processes.values():
        if (growth := process.growth) is not None:
            (since, *_), size = process.judged, median(size for _, size in process.judged) / 2**20
            told = f"{process.resident[-1][0] - since[0]:.0f} s | {size:.0f} MiB | {growth:+.2%}"
            yield f"| {process.name} | {told} | {found.memory.allowed(process):.1%} |"
    yield ""
    yield f"Complaints: {'; '.join(found.complaints) or 'none'}."


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", type=Path, help="a Markdown file for what was found")
    given = parser.parse_args()
    seconds = float(os.environ.get("SOAK_SECONDS", "1200"))
    with tempfile.TemporaryDirectory(prefix="ls-", ignore_cleanup_errors=True) as folder:
        found = soak(Path(folder), seconds, given.seed)
    text = "\n".join(
        [f"`SOAK_SECONDS={seconds:g} python -m benchmarks.soak --seed {given.seed}`", "", *lines(found), ""]
    )
    print(text)
    if given.write:
        given.write.write_text("# A soak with random faults\n\n" + text)
    sys.exit(bool(found.complaints))


if __name__ == "__main__":
    main()
