"""How long a large asynchronous scenario takes to simulate: 20 steps, 1,024 GPUs, 1,024 prompts × 8 samples a step.

Prints wall and CPU seconds of `simulate()`, warm, beside what is asked for; the fastest of three, since other work on the
machine only ever adds to it.
"""

from __future__ import annotations

import resource
import time

from lab.cli.simulate import profiles_for
from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.wiring import build
from simulator.run import simulate

SCENARIO, MOST_S, REPEATS = "scenarios/async-1024gpu.yaml", 10.0, 3


def main() -> None:
    chosen = load(SCENARIO)
    profiles = profiles_for(chosen, None)
    simulate(chosen.replace({"num_steps": 1, "faults": []}), profiles)  # compiles what is not compiled yet
    found = []
    for _ in range(REPEATS):
        start, cpu = time.perf_counter(), time.process_time()
        timeline = simulate(chosen, profiles)
        found.append((time.perf_counter() - start, time.process_time() - cpu))
    wall, cpu = (min(column) for column in zip(*found, strict=True))
    summary, peak = summarise(timeline), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    samples, problems = summary["samples"], conforms(build(chosen), timeline)
    print(
        f"{SCENARIO}: {wall:.1f} s, {cpu:.1f} CPU-s (at most {MOST_S:g} s), {peak:.2f} GiB, {len(timeline.spans):,} spans"
    )
    print(f"  {summary['steps_done']} steps of {summary['step_s']['mean']:.0f} s, {samples['issued']:,} samples issued, "
          f"{samples['trained']:,} trained, lag {summary['lag']['mean']:.2f} (at most {summary['lag']['max']})")  # fmt: skip
    print(
        f"  {len(timeline.header.faults)} faults, goodput {summary['goodput']:.3f}, bottleneck: {summary['bottleneck']['why']}"
    )
    print("  lawful" if not problems else "\n".join(problems[:5]))


if __name__ == "__main__":
    main()
