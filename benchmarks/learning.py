"""Does every algorithm learn? Real runs on the built-in task, several seeds each, with a bound that each has to meet.

    .venv/bin/python benchmarks/learning.py --seeds 3 --output benchmarks/learning.md

Networks of 1.8 M parameters. `seconds` are from the start of `lab execute`, starting workers included, to the end of the
first step from which the mean reward of five steps is over the bound, or to the end of the run. Exit code 1: a bound is
not met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.load import dump, load
from lab.runs import read
from lab.timeline import Timeline

ROOT = Path(__file__).resolve().parents[1]
CHANCE = 1 / 64
"""reward of a policy that draws tokens uniformly; one that repeats a character whatever the prompt says gets 1/4"""
BOUND, LIMIT_S, WINDOW = 0.8, 300.0, 5
TIMEOUT_S = 1200


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run, or a chain of runs, of one seed."""

    case: str
    seed: int
    met: bool
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is done."""

    folder: Path
    timeline: Timeline
    wall_s: float

    def rewards(self) -> list[float]:
        """Mean reward of every step."""
        return [float(row["reward"]) for row in self.timeline.header.learning]

    def evaluations(self) -> list[dict[str, Any]]:
        """Rows of evaluations on what was never trained on, that of the start first."""
        return [json.loads(line) for line in (self.folder / "evaluations.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of each case")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--output", type=Path, help="write the table to this file")
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="lab-learning-") as folder:
        runs = chosen.runs or Path(folder)
        runs.mkdir(parents=True, exist_ok=True)
        for case in chosen.cases:
            for seed in range(chosen.seeds):
                outcomes.append(CASES[case](runs, seed))
                print(line(outcomes[-1]), flush=True)
    if chosen.output:
        chosen.output.write_text(page(outcomes))
    return int(not all(outcome.met for outcome in outcomes))


def execute(runs: Path, name: str, seed: int, **changes: Any) -> Run:
    """Runs a shipped scenario with parts of it replaced. Raises RuntimeError where it does not end well."""
    original = load(ROOT / f"scenarios/{name}.yaml")
    data = original.model_dump(mode="json", by_alias=True)
    parts = {key: data[key] | part if isinstance(part, dict) else part for key, part in changes.items()}
    file = runs / f"{name}-{seed}.yaml"
    file.write_text(dump(original.replace(parts | {"seed": seed})))
    command = [sys.executable, "-c", "from lab.cli import main; main()", "execute", str(file), "--json"]
    done = subprocess.run(
        [*command, "--out", str(runs)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} with seed {seed} ended with {done.returncode}: {done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    folder = Path(summary["run_dir"])
    return Run(folder=folder, timeline=read(folder), wall_s=summary["wall_s"])


def reached(run: Run) -> float | None:
    """Seconds until the mean reward of `WINDOW` steps is over the bound; None: never."""
    from lab.metrics import publications

    rewards, ends = run.rewards(), publications(run.timeline)
    for step in range(WINDOW - 1, len(rewards)):
        if sum(rewards[step + 1 - WINDOW : step + 1]) / WINDOW >= BOUND:
            return run.timeline.header.startup_s + ends[step]
    return None


def _policy(case: str, run: Run, seed: int, *, above: float = 0.0) -> Outcome:
    """Of an algorithm that rolls out: first reward, last rewards, and how soon the bound was met."""
    rewards, seconds = run.rewards(), reached(run)
    last = sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])
    met = seconds is not None and seconds < LIMIT_S and rewards[0] > above
    numbers = {"first reward": rewards[0], "last reward": last, "steps": float(len(rewards))}
    return Outcome(case=case, seed=seed, met=met, seconds=seconds or run.wall_s, numbers=numbers)


def grpo(runs: Path, seed: int) -> Outcome:
    """From chance to 0.8 of the maximum in under five minutes."""
    return _policy("grpo", execute(runs, "grpo-learns", seed, models={"actor": network()}), seed)


def ppo(runs: Path, seed: int) -> Outcome:
    """From chance to 0.8 of the maximum in under five minutes."""
    return _policy("ppo", execute(runs, "ppo-learns", seed), seed)


def sft_then_ppo(runs: Path, seed: int) -> Outcome:
    """PPO from what SFT saved: its first rewards are above chance, and above what ignoring the prompt can earn."""
    first = execute(runs, "sft-learns", seed)
    steps = sorted((first.folder / "checkpoints").glob("step-*"))
    actor = network(weights=str(steps[-1] / "actor-0"))
    return _policy("sft, then ppo", execute(runs, "ppo-learns", seed, models={"actor": actor}), seed, above=0.25)


def network(**changes: Any) -> dict[str, Any]:
    """The policy of 1.8 M parameters that all cases train."""
    models = load(ROOT / "scenarios/ppo-learns.yaml").model_dump(mode="json", by_alias=True)["models"]
    found: dict[str, Any] = models["actor"] | changes
    return found


def reward_model(runs: Path, seed: int) -> Outcome:
    """At least 0.9 of held-out pairs in the right order, also where lengths are equal or mislead."""
    run = execute(runs, "reward-model-learns", seed)
    report = json.loads((run.folder / "reward_report.json").read_text())
    numbers = {name: float(row["accuracy"]) for name, row in report["groups"]["kind"].items()}
    met = min(numbers.values()) >= 0.9 and report["verdict"] == "passes"
    return Outcome(case="reward model", seed=seed, met=met, seconds=run.wall_s, numbers=numbers)


def _margins(case: str, name: str, runs: Path, seed: int) -> Outcome:
    """The margin on held-out samples after every evaluation, the first before the first step."""
    run = execute(runs, name, seed)
    margins = [row["margin"] for row in run.evaluations()]
    numbers = {"margin at the start": margins[0], "margin at the end": margins[-1]}
    numbers["accuracy at the end"] = run.evaluations()[-1]["accuracy"]
    return Outcome(case=case, seed=seed, met=margins[-1] > margins[0], seconds=run.wall_s, numbers=numbers)


def dpo(runs: Path, seed: int) -> Outcome:
    """The margin of chosen over rejected responses rises on held-out pairs."""
    return _margins("dpo", "dpo-learns", runs, seed)


def kto(runs: Path, seed: int) -> Outcome:
    """The margin of good over bad responses rises on held-out ones."""
    return _margins("kto", "kto-learns", runs, seed)


CASES: dict[str, Callable[[Path, int], Outcome]] = {
    "grpo": grpo, "ppo": ppo, "sft_then_ppo": sft_then_ppo, "reward_model": reward_model, "dpo": dpo, "kto": kto,
}  # fmt: skip


def line(outcome: Outcome) -> str:
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in outcome.numbers.items())
    return (
        f"| {outcome.case} | {outcome.seed} | {numbers} | {outcome.seconds:.0f} s | {'yes' if outcome.met else 'no'} |"
    )


def page(outcomes: Sequence[Outcome]) -> str:
    """The table with what it says, how it was made, and on what."""
    from executor.ledger import host, software

    machine, versions = host(), software()
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    rules = [f"- {name}: {(case.__doc__ or '').strip()}" for name, case in CASES.items()]
    made = f"Made by `benchmarks/learning.py`, {datetime.now(UTC):%Y-%m-%dT%H:%M} UTC, commit {_commit()}."
    return "\n".join([
        "# Does every algorithm learn?", "", made, f"Machine: {machine['cpu']}, {machine['cores']} cores. {said}.", "",
        f"Chance is {CHANCE:.3f}; ignoring the prompt earns at most 0.25; the maximum is 1. `met`:", "", *rules, "",
        "| case | seed | numbers | seconds | met |", "| --- | --- | --- | --- | --- |", *map(line, outcomes), "",
    ])  # fmt: skip


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
