"""How fast the lab answers: whole processes and the simulation itself, as multiples of starting Python.

Machines are noisy, so each number is the median of five, all taken in one run, and stands beside the smallest and largest.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPEATS = 5
LAB = str(Path(sys.executable).parent / "lab")


def main() -> None:
    with tempfile.TemporaryDirectory() as runs:
        python = timed(process(sys.executable, "-c", "pass"))
        report("python starts", python, python)
        report(
            "import lab, profiles, simulator",
            timed(process(sys.executable, "-c", "import lab.load, profiles.cost, simulator.run")),
            python,
        )
        report("lab --help", timed(process(LAB, "--help")), python)
        for scenario in ("quickstart", "ppo-7b-16gpu"):
            path = f"scenarios/{scenario}.yaml"
            report(f"lab simulate {scenario}", timed(process(LAB, "simulate", path, "--out", runs)), python)
            report(f"simulate() of {scenario}", timed(simulation(path)), python)


def process(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, capture_output=True)


def simulation(path: str) -> Callable[[], object]:
    from lab.cli.simulate import profiles_for
    from lab.load import load
    from simulator.run import simulate

    scenario = load(path)
    profiles = profiles_for(scenario, "datasheet")
    return lambda: simulate(scenario, profiles)


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of each repeat; a first one is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def report(name: str, seconds: list[float], python: list[float]) -> None:
    median = statistics.median(seconds)
    ratio = median / statistics.median(python)
    print(
        f"{name:34} {median:7.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})  {ratio:6.1f} x starting Python",
        flush=True,
    )


if __name__ == "__main__":
    main()
