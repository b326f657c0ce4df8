"""How often to save: a sweep of the checkpoint interval under drawn failures against Young's and Daly's formula.

python -m simulator.studies.intervals
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.goodput import daly, expected_seconds
from lab.metrics import summarise
from lab.scenario import Scenario
from profiles.profile import datasheet
from simulator.run import simulate

DEVICE = "a100-80g-sxm"
WRITES_PER_FAILURE = 100
"""mean time between failures over the time of one write"""
COME_BACK_S = 0.05
"""until a loss is noticed, and from there until the trainer starts: short against its steps"""
BASE: dict[str, Any] = {
    "name": "checkpoint-interval",
    "cluster": {
        "sites": [
            {
                "nodes": [{"name": "gpu", "count": 1, "device": DEVICE, "devices": 1, "intra": "nvlink3"}],
                "storage": {"write": "100 GB/s", "read": "100 GB/s"},
            }
        ]
    },
    "models": {"actor": {"arch": "qwen2.5-0.5b"}},
    "algorithm": {"name": "sft"},
    "pools": {"train": "gpu[0]"},
    "place": {"actor.train": {"pool": "train", "data_parallel": 1}},
    "workload": {
        "prompts_per_step": 1,
        "samples_per_prompt": 1,
        "prompt_tokens": {"dist": "fixed", "value": 8192},
        "response_tokens": {"dist": "fixed", "value": 8192},
    },
    "update": {"minibatch_samples": 1, "microbatch_tokens": 16384},
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the formula needs, from a run without failures."""

    step_s: float
    write_s: float
    restart_s: float
    """a failure until work goes on"""

    @property
    def mtbf_s(self) -> float:
        return WRITES_PER_FAILURE * self.write_s

    @property
    def chosen(self) -> int:
        """Steps between two checkpoints that come nearest to Daly's interval."""
        return max(round(daly(self.write_s, self.mtbf_s) / self.step_s), 1)

    def expected(self, every_steps: int) -> float:
        """Seconds of wall per second of steps, by Daly's formula."""
        return expected_seconds(1.0, every_steps * self.step_s, self.write_s, self.mtbf_s, self.restart_s)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One interval."""

    every_steps: int
    cost: float
    """seconds of wall per second of steps, over all seeds"""
    expected: float
    """the same by Daly's formula"""
    num_faults: int


def scenario(
    num_steps: int, every_steps: int, seed: int = 0, mtbf_s: float | None = None, at: float | None = None
) -> Scenario:
    """One trainer that saves every so many steps and fails now and then, or once."""
    fault = {"kind": "trainer_lost", "detect": COME_BACK_S, "start": COME_BACK_S}
    faults = [fault | {"mtbf": mtbf_s}] if mtbf_s else []
    faults += [fault | {"at": at, "target": "actor.train[0]"}] if at else []
    chosen = {"num_steps": num_steps, "seed": seed, "checkpoint": {"every_steps": every_steps}, "faults": faults}
    return Scenario.model_validate_json(json.dumps(BASE | chosen))


def play(chosen: Scenario) -> dict[str, Any]:
    """The summary of a run."""
    return summarise(simulate(chosen, {DEVICE: datasheet(DEVICE)}))


def costs() -> Costs:
    """Of a step, a write, and coming back."""
    calm = play(scenario(8, 4))
    step_s = (calm["makespan_s"] - calm["checkpoint_s"]) / 8
    failed = play(scenario(8, 4, at=0.9 * calm["makespan_s"] / 2))
    fault = failed["faults"][0]
    return Costs(step_s=step_s, write_s=calm["checkpoint_s"] / 2, restart_s=fault["lost_s"] - fault["at_s"])


def sweep(every: Sequence[int], num_steps: int, seeds: Sequence[int]) -> tuple[Costs, list[Row]]:
    """Runs of so many steps for each interval, under the same failures."""
    known = costs()
    rows = []
    for every_steps in every:
        runs = [play(scenario(num_steps, every_steps, seed, known.mtbf_s)) for seed in seeds]
        work = known.step_s * num_steps * len(runs)
        rows.append(
            Row(
                every_steps=every_steps, cost=sum(run["makespan_s"] for run in runs) / work,
                expected=known.expected(every_steps), num_faults=sum(len(run["faults"]) for run in runs),
            )
        )  # fmt: skip
    return known, rows


def main() -> None:
    """Prints the sweep."""
    chosen = costs().chosen
    every = sorted({max(round(chosen * factor), 1) for factor in (0.25, 0.5, 0.71, 1, 1.41, 2, 4)})
    known, rows = sweep(every, 2000, range(3))
    print(f"a step {known.step_s:.4g} s, a write {known.write_s:.4g} s, failures every {known.mtbf_s:.4g} s")
    for row in rows:
        mark = "  <- Daly" if row.every_steps == chosen else ""
        told = f"simulated {row.cost:.4f}, by the formula {row.expected:.4f}, {row.num_faults} failures"
        print(f"every {row.every_steps:4d} steps: {told}{mark}")
    best, mine = min(row.cost for row in rows), next(row.cost for row in rows if row.every_steps == chosen)
    print(f"at Daly's interval {mine / best - 1:.2%} above the best of the sweep")


if __name__ == "__main__":
    main()
