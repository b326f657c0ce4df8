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
NUM_REQUESTS, NUM_ENGINES = 10_000, 8
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
    print(f"{NUM_REQUESTS:,} requests, {NUM_ENGINES} engines, 256-4096 tokens 1:4, batch 128, burst:")
    for name, exact in (("fast, warm", False), ("exact, warm", True)):
        report_requests(f"  {name}", timed(burst(exact)), timed(burst(exact), time.process_time))


def process(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, capture_output=True)


def simulation(path: str) -> Callable[[], object]:
    from lab.cli.simulate import profiles_for
    from lab.load import load
    from simulator.run import simulate

    scenario = load(path)
    profiles = profiles_for(scenario, "datasheet")
    return lambda: simulate(scenario, profiles)


def burst(exact: bool) -> Callable[[], object]:
    """All requests at once, dealt out to engines of a 7B model on one A100 each: prompts and responses as 1 to 4."""
    from dataclasses import replace

    import numpy as np

    from lab.load import load
    from profiles.cost import CostModel
    from profiles.profile import datasheet
    from simulator.engine import Requests
    from simulator.replay import replay
    from simulator.rollout import settings

    scenario = load("scenarios/ppo-7b-16gpu.yaml")
    worker = scenario.team("actor", "generate")[0]
    table = CostModel(scenario, {"a100-80g-sxm": datasheet("a100-80g-sxm")}).engine_table(worker)
    chosen = replace(settings(scenario, worker), max_num_seqs=128)
    total = np.random.default_rng(0).integers(256, 4096, NUM_REQUESTS, endpoint=True)
    shares = [total[engine::NUM_ENGINES] for engine in range(NUM_ENGINES)]
    requests = [Requests(prompt=share // 5, response=share - share // 5) for share in shares]
    return lambda: [replay(table, chosen, share, exact=exact) for share in requests]


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each repeat; a first one is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        start = clock()
        work()
        found.append(clock() - start)
    return found


def report(name: str, seconds: list[float], python: list[float]) -> None:
    median = statistics.median(seconds)
    ratio = median / statistics.median(python)
    print(
        f"{name:34} {median:7.3f} s  ({min(seconds):.3f} to {max(seconds):.3f})  {ratio:6.1f} x starting Python",
        flush=True,
    )


def report_requests(name: str, wall: list[float], cpu: list[float]) -> None:
    seconds = statistics.median(cpu)
    print(
        f"{name:34} {statistics.median(wall):7.3f} s  ({min(wall):.3f} to {max(wall):.3f})  "
        f"{seconds:.3f} CPU-s  {NUM_REQUESTS / seconds:,.0f} requests per CPU-s",
        flush=True,
    )


if __name__ == "__main__":
    main()
