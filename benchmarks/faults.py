"""Every kind of worker is killed once: what the run loses, how much longer it takes, and whether the simulation saw it.

    python benchmarks/faults.py --repeats 3 --write benchmarks/faults.md

The delay is the makespan beside that of the same scenario without its faults, in both worlds. Predictions are made
before anything is executed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab import runs
from lab.dataflow import conforms
from lab.load import dump, load
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

ROOT = Path(__file__).resolve().parents[1]
LAB = [sys.executable, "-c", "from lab.cli import app; app()"]
WITHIN = 0.2
"""of the measured delay, or twice the spread where that is more"""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """What faults cost, over repeats."""

    predicted_s: float
    calm_s: tuple[float, ...]
    struck_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return median(self.delays_s)

    @property
    def delays_s(self) -> list[float]:
        """Of every repeat, whose two runs follow one another: a slow hour of the machine is in both."""
        return [struck - calm for struck, calm in zip(self.struck_s, self.calm_s, strict=True)]

    @property
    def spread(self) -> float:
        """(max - min) / median of the delays of repeats."""
        delays = self.delays_s
        return (max(delays) - min(delays)) / median(delays) if len(delays) > 2 else 0.0

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= max(WITHIN, 2 * self.spread)


def makespan(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.stages())


def played(command: str, file: Path, out: Path) -> Timeline:
    """A run by the command line. Raises RuntimeError with its output where it failed."""
    before = set(out.glob("*")) if out.exists() else set()
    done = subprocess.run([*LAB, command, str(file), "--out", str(out)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    (folder,) = set(out.glob("*")) - before
    return runs.read(folder)


def wrong(scenario: Scenario, timeline: Timeline) -> list[str]:
    """What is lost that must not be, or done twice; empty for a run that kept everything."""
    found = conforms(build(scenario), timeline)
    counts = dict(timeline.header.samples)
    if counts.pop("issued") != sum(counts.values()):
        found.append(f"samples do not add up: {timeline.header.samples}")
    if counts["trained"] != scenario.num_steps * scenario.workload.samples_per_step:
        found.append(f"{counts['trained']} samples were trained")
    kept = [span for span in timeline.stages() if span.stage == "update_actor" and not span.lost]
    steps = [(span.step, span.worker) for span in kept]
    if len(set(steps)) != len(steps):
        found.append("a step was trained twice")
    if len(timeline.header.learning) != scenario.num_steps:
        found.append(f"{len(timeline.header.learning)} steps were finished")
    return found


def lines(scenario: Scenario, struck: Sequence[Timeline], predicted: Timeline, delay: Delay) -> Iterator[str]:
    yield f"{scenario.name}, {scenario.num_steps} steps; medians of {len(struck)} repeats."
    yield ""
    yield "| fault | target | struck at | back to step | finished steps lost | samples generated again | away | simulated |"
    yield "|---|---|---|---|---|---|---|---|"
    for i, fault in enumerate(struck[0].header.faults):
        simulated = predicted.header.faults[i] if i < len(predicted.header.faults) else {}
        gone = _all([away_s(timeline, fault["target"]) for timeline in struck])
        yield "| " + " | ".join(map(str, _row(fault, gone, simulated, away_s(predicted, fault["target"])))) + " |"
    yield ""
    bound = f"max({WITHIN:.0%}, 2 × spread {delay.spread:.1%})"
    yield (
        f"Delay: predicted {delay.predicted_s:.1f} s, measured {delay.measured_s:.1f} s, error {delay.error:+.1%}, "
        f"{'within' if delay.holds else 'NOT within'} {bound}."
    )
    yield f"Without faults {_all(delay.calm_s)} s, with {_all(delay.struck_s)} s: delays {_all(delay.delays_s)} s."
    broken = [text for timeline in struck for text in wrong(scenario, timeline)]
    yield f"Finished steps lost for good, steps trained twice, samples unaccounted for: {broken or 'none'}."


def away_s(timeline: Timeline, worker: str) -> float:
    """Until who was struck first works again, as the run recorded it."""
    back = [span for span in timeline.stages() if span.stage == "restore" and span.worker == worker]
    return min(back, key=lambda span: span.start_s).seconds if back else 0.0


def _row(fault: dict[str, Any], gone: str, simulated: dict[str, Any], away: float) -> Iterator[Any]:
    yield from (fault["kind"], fault["target"], f"{fault['at_s']:.1f} s", fault.get("step", ""), fault.get("steps", 0))
    yield fault.get("lost_samples", "")
    yield f"{gone} s"
    yield f"at {simulated['at_s']:.1f} s, step {simulated.get('step', '-')}, away {away:.1f} s" if simulated else "-"


def _all(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.1f}" for number in numbers)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, default=ROOT / "scenarios" / "faults-tiny.yaml")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a Markdown file for what was found")
    given = parser.parse_args()
    scenario = load(given.scenario)
    with tempfile.TemporaryDirectory(prefix="lf-") as name:
        folder = Path(name)
        files = {"calm": scenario.replace({"faults": []}), "struck": scenario}
        for kind, chosen in files.items():
            (folder / f"{kind}.yaml").write_text(dump(chosen))
        said = {kind: played("simulate", folder / f"{kind}.yaml", folder / "simulated") for kind in files}
        done: dict[str, list[Timeline]] = {kind: [] for kind in files}
        for _ in range(given.repeats):
            for kind, found in done.items():
                found.append(played("execute", folder / f"{kind}.yaml", folder / kind))
    delay = Delay(
        predicted_s=makespan(said["struck"]) - makespan(said["calm"]),
        calm_s=tuple(map(makespan, done["calm"])), struck_s=tuple(map(makespan, done["struck"])),
    )  # fmt: skip
    text = "\n".join([f"`python benchmarks/faults.py {' '.join(sys.argv[1:])}`", ""])
    text += "\n".join(["", *lines(scenario, done["struck"], said["struck"], delay), ""])
    print(text)
    if given.write:
        given.write.write_text("# Faults that strike a real run, and its simulation\n\n" + text)


if __name__ == "__main__":
    main()
