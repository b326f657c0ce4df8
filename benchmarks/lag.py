"""What generation without a barrier is worth on two cores, and how old its samples are: predicted, then executed.

    lab profile && .venv/bin/python benchmarks/lag.py --repeats 3

Cases: a barrier with one thread per stage, a barrier whose stages use both cores, and no barrier, where generating a step
takes as long as training on it; then no barrier with bounds of 0, 1, 2 and 4 versions where training takes twice as long,
so that engines run ahead as far as they may. Prints samples per second and lags of the steady steps, predicted and
measured, with their spread over repeats. Exit code 1: a sample was older than its bound, or samples were lost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
Row = dict[str, float]
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


FREE = "no barrier"
BARRIERS = {"barrier": BARRIER, "barrier, both cores": BOTH}
CASES = BARRIERS | {FREE: bounded(1, epochs=1)}
CASES |= {f"bound {n}": bounded(n, epochs=2) for n in (0, 1, 2, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--profile", help="a cost profile; default: this machine's own")
    parser.add_argument("--write", type=Path, help="a Markdown file for what was found")
    chosen = parser.parse_args()
    base = load(ROOT / "scenarios/async-tiny.yaml")
    scenarios = {case: base.replace(CASES[case] | {"num_steps": chosen.steps}) for case in chosen.cases}
    predicted = {case: said(simulate(one, profiles_for(one, chosen.profile))) for case, one in scenarios.items()}
    measured: dict[str, list[Row]] = {case: [] for case in scenarios}
    with tempfile.TemporaryDirectory(prefix="lab-lag-") as folder:
        for number in range(chosen.repeats):  # cases take turns: a slow minute of the machine falls on any
            for case, rows in measured.items():
                rows.append(said(executed(scenarios[case], Path(folder) / f"{case}-{number}".replace(" ", "-"))))
                print(f"{number + 1}: {case}, {rows[-1]}", flush=True)
    text = "\n".join(
        [f"`python benchmarks/lag.py {' '.join(sys.argv[1:])}`", "", *table(predicted, measured), ""]
        + [ratio(case, predicted, measured) for case in BARRIERS if {case, FREE} <= set(measured)]
    )
    print(text)
    if chosen.write:
        chosen.write.write_text("# Generation without a barrier on two cores, and the age of samples\n\n" + text + "\n")
    return int(any(wrong(case, row) for case, rows in measured.items() for row in rows))


def wrong(case: str, row: Row) -> bool:
    """Whether samples were lost, or one was older than the bound."""
    bound = case.removeprefix("bound ")
    return row["lost"] > 0 or (bound.isdigit() and row["lag_max"] > int(bound))


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


def said(timeline: Timeline) -> Row:
    """Of the steady steps."""
    start, end = steady_window(timeline)
    trained = timeline.header.samples["trained"] / timeline.header.num_steps
    lag = summarise(timeline)["lag"]
    return {
        "rate": trained * num_steady(timeline) / (end - start), "lag": lag["mean"] or 0.0, "lag_max": lag["max"] or 0,
        "lost": timeline.header.samples["lost"],
    }  # fmt: skip


def table(predicted: Mapping[str, Row], measured: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Medians over the repeats, and (max - min) / median of them."""
    yield "| case | samples/s predicted | measured | error | spread | mean lag predicted | measured | error | spread | oldest |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case, rows in measured.items():
        cells = [case]
        for key, form in (("rate", ".1f"), ("lag", ".2f")):
            found, expected = [row[key] for row in rows], predicted[case][key]
            middle = median(found)
            error = f"{expected / middle - 1:+.1%}" if middle else "-"
            cells += [f"{expected:{form}}", f"{middle:{form}}", error, f"{spread(found):.1%}"]
        yield "| " + " | ".join([*cells, f"{max(row['lag_max'] for row in rows):g}"]) + " |"


def ratio(barrier: str, predicted: Mapping[str, Row], measured: Mapping[str, Sequence[Row]]) -> str:
    """What giving up the barrier is worth, each repeat against its own."""
    expected = predicted[FREE]["rate"] / predicted[barrier]["rate"]
    found = [free["rate"] / bound["rate"] for free, bound in zip(measured[FREE], measured[barrier], strict=True)]
    return (
        f"No barrier against {barrier}: predicted {expected:.2f}x, measured {median(found):.2f}x "
        f"({', '.join(f'{one:.2f}' for one in found)}), error {expected / median(found) - 1:+.1%}.\n"
    )


def spread(found: Sequence[float]) -> float:
    return (max(found) - min(found)) / median(found) if median(found) else 0.0


if __name__ == "__main__":
    sys.exit(main())
