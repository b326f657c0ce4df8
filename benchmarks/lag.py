"""What generation without a barrier is worth on two cores, and how old its samples are: predicted, then executed.

    lab profile && .venv/bin/python benchmarks/lag.py --repeats 3

Cases: a barrier with one thread per stage, a barrier whose stages use both cores, and no barrier, where generating a step
takes as long as training on it; then no barrier with bounds of 0, 1, 2 and 4 versions where training takes twice as long,
so that engines run ahead as far as they may. Prints samples per second and lags of the steady steps, predicted and
measured, the spread over repeats. Exit code 1: a sample was older than its bound, or samples were lost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from lab import runs
from lab.cli.simulate import profiles_for
from lab.load import dump, load
from lab.metrics import num_steady, steady_window, summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from simulator.run import simulate

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 540
BARRIER: dict[str, Any] = {"schedule": {"mode": "synchronous"}, "weight_sync": {}}
BOTH: dict[str, Any] = BARRIER | {
    "pools": {"all": "local[0:2]"}, "sharing": {"all": {"how": "resident"}},
    "place": {
        "actor.generate": [{"pool": "all", "engines": 1, "threads": 2}],
        "actor.train": {"pool": "all", "data_parallel": 1, "zero_stage": 0, "threads": 2},
        "reward.score": {"pool": "all", "kind": "function", "function": "task", "threads": 1},
    },
}  # fmt: skip


def bounded(bound: int, epochs: int) -> dict[str, Any]:
    """No barrier, and at most so many versions between a sample and its training, of so many epochs."""
    staleness = {"unit": "versions", "bound": bound, "at_bound": "block"}
    algorithm = {"name": "grpo", "ppo_epochs": epochs, "kl_coef": 0.0, "clip": 0.2}
    return {"schedule": {"mode": "asynchronous", "staleness": staleness}, "algorithm": algorithm}


CASES = {"barrier": BARRIER, "barrier, both cores": BOTH, "no barrier": bounded(1, epochs=1)}
CASES |= {f"bound {n}": bounded(n, epochs=2) for n in (0, 1, 2, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--profile", help="a cost profile; default: this machine's own")
    chosen = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="lab-lag-") as folder:
        for case in chosen.cases:
            scenario = load(ROOT / "scenarios/async-tiny.yaml").replace(CASES[case] | {"num_steps": chosen.steps})
            predicted = said(simulate(scenario, profiles_for(scenario, chosen.profile)))
            print(line(case, "predicted", [predicted]), flush=True)
            found = [said(executed(scenario, Path(folder) / f"{i}")) for i in range(chosen.repeats)]
            print(line(case, "measured", found), flush=True)
            bound = case.removeprefix("bound ")
            wrong += sum(row["lost"] > 0 or (bound.isdigit() and row["lag_max"] > int(bound)) for row in found)
    return int(wrong > 0)


def executed(scenario: Scenario, folder: Path) -> Timeline:
    """A run of its own process. Raises RuntimeError where it does not end well."""
    folder.mkdir(exist_ok=True)
    file = folder / "scenario.yaml"
    file.write_text(dump(scenario))
    command = [sys.executable, "-c", "from lab.cli import main; main()", "execute", str(file), "--json"]
    done = subprocess.run(
        [*command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-2000:]}")
    return runs.read(Path(json.loads(done.stdout)["run_dir"]))


def said(timeline: Timeline) -> dict[str, float]:
    """Of the steady steps."""
    start, end = steady_window(timeline)
    trained = timeline.header.samples["trained"] / timeline.header.num_steps
    lag = summarise(timeline)["lag"]
    return {
        "rate": trained * num_steady(timeline) / (end - start), "lag": lag["mean"] or 0.0, "lag_max": lag["max"] or 0,
        "lost": timeline.header.samples["lost"],
    }  # fmt: skip


def line(case: str, origin: str, rows: list[dict[str, float]]) -> str:
    """Medians over the repeats, and the spread of the rate."""
    rates = [row["rate"] for row in rows]
    spread = (max(rates) - min(rates)) / median(rates)
    return (
        f"{case:20} {origin:10} {median(rates):7.2f} samples/s ± {spread:.1%}  lag {median(r['lag'] for r in rows):.2f} "
        f"(at most {max(r['lag_max'] for r in rows):g})"
    )


if __name__ == "__main__":
    sys.exit(main())
