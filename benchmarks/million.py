"""How long a step of 1,000,000 rollouts on 512 engines takes to simulate, and how that grows from 10,000 on.

Everything `simulate()` does is counted: lengths drawn, prompts dealt to the least loaded engine, KV blocks, packing,
the update of 500 ranks. CPU seconds of one process, the best of three, once everything is compiled.
"""

from __future__ import annotations

import resource
import time

from lab.load import load
from lab.scenario import Scenario
from profiles.profile import resolve
from simulator.run import simulate

SIZES = (10_000, 100_000, 1_000_000)
REPEATS = 3


def main() -> None:
    whole = load("scenarios/million-rollouts.yaml")
    profiles = resolve(["h100-80g-sxm"])
    simulate(sized(whole, SIZES[0]), profiles)
    times = {size: min(seconds(sized(whole, size), profiles) for _ in range(REPEATS)) for size in SIZES}
    for size, spent in times.items():
        print(f"{size:>9,} rollouts: {spent:6.2f} CPU-s, {1e6 * spent / size:6.2f} us each")
    print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def sized(scenario: Scenario, rollouts: int) -> Scenario:
    """The same with fewer rollouts a step, on a number of engines and ranks in proportion."""
    share = rollouts / scenario.workload.samples_per_step
    engines, ranks = round(512 * share), round(500 * share)
    data = scenario.model_dump(mode="json", by_alias=True)
    data["workload"]["prompts_per_step"] = rollouts // 16
    data["update"]["minibatch_samples"] = rollouts
    data["pools"] = {"trainers": f"train[0:{ranks}]", "engines": f"serve[0:{engines}]"}
    data["place"]["actor.generate"][0]["engines"] = engines
    data["place"]["actor.train"]["data_parallel"] = ranks
    return scenario.replace(data)


def seconds(scenario: Scenario, profiles: dict) -> float:
    begun = time.process_time()
    timeline = simulate(scenario, profiles)
    spent = time.process_time() - begun
    assert timeline.header.samples["trained"] == scenario.workload.samples_per_step
    return spent


if __name__ == "__main__":
    main()
