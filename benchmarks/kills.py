"""SIGKILL from outside at seeded moments of checkpointing and training; what every resumption lost, and whether the run
that was killed ended bit for bit as one that never was.

    python benchmarks/kills.py --kills 10 --every 1 --every 4 --write benchmarks/kills.md

Half of the kills wait for a rank to begin a write, the others for up to one interval and a step, and a moment. What is
killed is the driver, a trainer, or every process at once, as when the machine loses power; moments and victims come from
the seed. A checkpoint of every step holds the trainers up, those of longer intervals are written beside the next steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as parquet

from lab import runs
from lab.dataflow import conforms
from lab.load import dump, load
from lab.scenario import Scenario
from lab.wiring import build

ROOT = Path(__file__).resolve().parents[1]
MARK = "LAB_KILLS_MARK"
VICTIMS = ("driver", "trainer", "everything")
START_TIMEOUT_S, END_TIMEOUT_S = 600.0, 120.0
LATEST_S, IN_WRITE_S = 1.5, 0.08
"""of a kill: after a step has ended, and after a write has begun"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill and what it cost."""

    victim: str
    moment: str
    """writing or training"""
    after_s: float
    finished: int
    """steps that were finished when the process died"""
    first_step: int = 0
    """with which the run went on"""

    @property
    def done_again(self) -> int:
        return max(self.finished - self.first_step, 0)


class Attempt:
    """A process of `lab execute`, and everything that it starts."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        variables = os.environ | {MARK: self.mark, "PYTHONPATH": str(ROOT), "TMPDIR": str(log.parent)}
        command = [sys.executable, "-c", "from lab.cli import app; app()", "execute", *arguments]
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=variables, cwd=log.parent, stdout=file, stderr=file)

    def kill(self, victim: str) -> None:
        """SIGKILL; then waits until nothing that it started is left."""
        family = self.family()
        trainers = [process for process in family if "Trainer" in _title(process)]
        if victim == "trainer":
            for process in trainers[:1]:
                _quietly(process.kill)
        else:
            self.process.kill()
            for process in family if victim == "everything" else []:
                _quietly(process.kill)
        self.process.wait(START_TIMEOUT_S)
        wait_until(lambda: not list(self.family()), END_TIMEOUT_S)

    def family(self) -> list[psutil.Process]:
        """Living processes that carry the mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _quietly(act: Callable[[], Any]) -> None:
    try:
        act()
    except psutil.Error:
        return


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.002)


def finished(folder: Path) -> int:
    """Steps of a run that are finished."""
    return len(runs.finished_rows(folder))


def uninterrupted(file: Path, out: Path) -> Path:
    """The folder of a run that nobody kills."""
    attempt = Attempt([str(file), "--out", str(out)], out.parent / "reference.log")
    if attempt.process.wait(START_TIMEOUT_S * 2):
        raise RuntimeError((out.parent / "reference.log").read_text()[-2000:])
    (folder,) = out.iterdir()
    return folder


def killed(file: Path, out: Path, kills: int, draw: random.Random, moments: tuple[str, ...]) -> tuple[Path, list[Kill]]:
    """A run that is killed so many times, each time once it has gone on, and then left to end."""
    log, found, arguments = out.parent / "killed.log", list[Kill](), [str(file), "--out", str(out)]
    for number in range(kills + 1):
        seen = _resumptions(out)
        attempt = Attempt(arguments, log)
        wait_until(lambda: _resumptions(out) > seen or attempt.process.poll() is not None, START_TIMEOUT_S)  # noqa: B023
        (folder,) = out.iterdir()
        if found:
            found[-1] = _gone_on(found[-1], folder)
        if number == kills:
            break
        arguments = [str(file), "--resume", str(folder)]
        found.append(_strike(attempt, folder, draw, moments[number % len(moments)]))
        if attempt.process.returncode == 0:
            raise RuntimeError(f"it ended after {number} kills: more steps are needed")
    if attempt.process.wait(START_TIMEOUT_S * 2):
        raise RuntimeError(log.read_text()[-2000:])
    return folder, found


def _resumptions(out: Path) -> int:
    """How often the run has got so far that its workers were ready."""
    files = list(out.glob("*/spans.jsonl"))
    if not files:
        return 0
    spans = [json.loads(line) for line in runs.whole_lines(files[0])]
    return len({span["span_id"] for span in spans if span["stage"] in ("setup", "restore")})


def _strike(attempt: Attempt, folder: Path, draw: random.Random, moment: str) -> Kill:
    """Waits for the moment and kills the victim."""
    every = runs.read_scenario(folder).checkpoint.every_steps or 1
    victim, skip = draw.choice(VICTIMS), draw.randrange(every + 2)
    after = draw.uniform(0.0, LATEST_S if moment == "training" else IN_WRITE_S)
    if moment == "writing":
        for _ in range(1 + skip // 2):
            before = _staged(folder)
            wait_until(lambda: _staged(folder) - before or attempt.process.poll() is not None, START_TIMEOUT_S)  # noqa: B023
    else:
        begun = finished(folder)
        wait_until(lambda: finished(folder) >= begun + skip or attempt.process.poll() is not None, START_TIMEOUT_S)
    time.sleep(after)
    attempt.kill(victim)
    return Kill(victim=victim, moment=moment, after_s=after, finished=finished(folder))


def _staged(folder: Path) -> set[str]:
    """What ranks are writing."""
    return {path.name for path in (folder / "checkpoints").glob(".step-*")}


def _gone_on(kill: Kill, folder: Path) -> Kill:
    faults = json.loads((folder / "run.json").read_bytes())["header"]["faults"]
    return Kill(**(kill.__dict__ | {"first_step": faults[-1]["step"]}))


def differences(one: Path, other: Path) -> list[str]:
    """What of two runs is not the same to the bit: trained state after every saved step, what was learned, tokens."""
    ours, theirs = state(one), state(other)
    found = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    left, right = (runs.finished_rows(folder) for folder in (one, other))
    found += [
        f"learning of step {step}" for step in sorted(left.keys() | right.keys()) if left.get(step) != right.get(step)
    ]
    return found + [
        name for name in sorted({*tokens(one), *tokens(other)}) if tokens(one).get(name) != tokens(other).get(name)
    ]


def state(folder: Path) -> dict[str, str]:
    """Hashes of weights, optimizer and numbers in every checkpoint."""
    files = sorted((folder / "checkpoints").glob("step-*/*-*/*"))
    kept = [file for file in files if file.suffix == ".safetensors" or file.name == "numbers.json"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in kept}


def tokens(folder: Path) -> dict[str, Any]:
    """Of every record, the tokens of its samples and the log-probs that they were drawn with."""
    files = sorted((folder / "records").glob("*.parquet"))
    return {file.name: parquet.read_table(file, columns=["tokens", "token_log_probs"]).to_pydict() for file in files}


def campaign(
    scenario: Scenario, folder: Path, kills: int, seed: int, moments: tuple[str, ...] = ("writing", "training")
) -> tuple[list[Kill], list[str], Path]:
    """Kills, what differs from a run that was not killed, and the killed run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.yaml").write_text(dump(scenario))
    reference = uninterrupted(folder / "scenario.yaml", folder / "reference")
    ended, found = killed(folder / "scenario.yaml", folder / "killed", kills, random.Random(seed), moments)
    wrong = differences(reference, ended) + conforms(build(runs.read_scenario(ended)), runs.read(ended))
    return found, wrong, ended


def lines(every: int, found: list[Kill], wrong: list[str]) -> Iterator[str]:
    yield f"| kill | when | after | finished steps | went on with step | finished steps done again (`every_steps: {every}`) |"
    yield "|---|---|---|---|---|---|"
    for kill in found:
        row = (kill.victim, kill.moment, f"{kill.after_s:.3f} s", kill.finished, kill.first_step, kill.done_again)
        yield "| " + " | ".join(map(str, row)) + " |"
    again = [kill.done_again for kill in found]
    bits = "bit for bit as without kills" if not wrong else f"NOT as without kills: {', '.join(wrong[:5])}"
    yield ""
    yield f"{len(found)} kills, {sum(again)} finished steps done again, at most {max(again)} of a kill; the run ended {bits}."
    yield ""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, default=ROOT / "scenarios" / "ppo-tiny.yaml")
    parser.add_argument("--kills", type=int, default=10, help="for each interval")
    parser.add_argument("--every", type=int, action="append", help="checkpoint.every_steps; may be given again")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a Markdown file for what was found")
    given = parser.parse_args()
    told = [f"`python benchmarks/kills.py {' '.join(sys.argv[1:])}`", ""]
    for every in given.every or [1, 4]:
        keys = {"every_steps": every, "blocking": every == 1}
        scenario = load(given.scenario).replace({"num_steps": given.steps, "checkpoint": keys})
        with tempfile.TemporaryDirectory(prefix="lk-") as folder:
            found, wrong, _ = campaign(scenario, Path(folder), given.kills, given.seed)
        told += lines(every, found, wrong)
        print("\n".join(told), flush=True)
        if given.write:
            given.write.write_text("# Kills and resumptions\n\n" + "\n".join(told))


if __name__ == "__main__":
    main()
