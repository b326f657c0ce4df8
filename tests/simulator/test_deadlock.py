"""Whatever a scenario without a barrier says of ages, batches, room and faults: it is refused by name, or it ends."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.errors import InputError
from lab.scenario import Scenario
from simulator.run import simulate
from tests.simulator.test_asynchronous import BASE, GRPO, MODE, SHEETS, scenario

AT_BOUND = ["block", "drop", "down_weight", "interrupt"]


@st.composite
def tight(draw: st.DrawFn) -> dict[str, Any]:
    """Batches, bounds and buffers at and around the least that hold together."""
    algorithm = draw(st.sampled_from([GRPO, BASE["algorithm"]]))
    samples = draw(st.sampled_from([2, 3, 4, 8] if algorithm is GRPO else [1, 2, 3, 4, 8]))
    prompts = draw(st.sampled_from([1, 2, 4, 6, 16]))
    step = samples * prompts
    batch = draw(st.sampled_from([n for n in range(samples, step + 1, samples) if step % n == 0]))
    unit = draw(st.sampled_from(["versions", "steps", "batches", "extra_samples"]))
    more = draw(st.sampled_from([0, 0.1, 0.5, 1.3, 3] if unit == "extra_samples" else [0, 1, 2, 7]))
    high = draw(st.sampled_from([0.01, 0.3, 0.5, 0.9, 1.0]))
    return {
        "seed": draw(st.integers(0, 99)),
        "num_steps": draw(st.integers(1, 4)),
        "algorithm": algorithm,
        "workload": {"prompts_per_step": prompts, "samples_per_prompt": samples},
        "update": {"minibatch_samples": draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))},
        "place": {
            "actor.train": {"pool": "actors", "data_parallel": 1, "tensor_parallel": 2, "zero_stage": 0},
        },
        "schedule": MODE
        | {
            "trigger_samples": batch,
            "scoring": draw(st.sampled_from(["batch", "sample"])),
            "staleness": {
                "unit": unit,
                "bound": more + (step // batch - 1 if unit == "batches" else 0),
                "at_bound": draw(st.sampled_from(AT_BOUND)),
            },
        },
        "buffer": {
            "capacity_samples": draw(st.sampled_from([None, batch, batch + 1, batch + samples, 2 * batch - 1, step])),
            "high_watermark": high,
            "low_watermark": high * draw(st.sampled_from([0.0, 0.5, 0.99])),
            "at_high": draw(st.sampled_from(["pause", "throttle"])),
        },
        "weight_sync": draw(
            st.sampled_from([{"trigger": "push"}, {"trigger": "event"}, {"trigger": "pull", "every": 0.5}])
        )
        | {"in_flight": draw(st.sampled_from(["drain", "interrupt", "mix"]))},
        "rollout": {"max_num_seqs": draw(st.sampled_from([1, 2, 3, 8, 64]))},
    }  # fmt: skip


@st.composite
def failing(draw: st.DrawFn) -> dict[str, Any]:
    """The same, and processes die again and again."""
    faults = []
    for kind in draw(st.lists(st.sampled_from(["worker_lost", "trainer_lost", "buffer_lost"]), min_size=1, max_size=3)):
        fault = {"kind": kind, "mtbf": draw(st.sampled_from([8.0, 60.0])), "detect": draw(st.sampled_from([0.1, 2.0]))}
        ways = {"recovery": draw(st.sampled_from(["reassign", "restart"]))} if kind == "worker_lost" else {}
        faults.append(fault | ways | {"start": draw(st.sampled_from([0.1, 4.0]))})
    return draw(tight()) | {"faults": faults, "checkpoint": {"every_steps": draw(st.integers(1, 2))}}


def refused_or_ended(chosen: Scenario) -> bool:
    """Whether it ended, with all of its samples trained once; a run that is stuck raises."""
    try:
        timeline = simulate(chosen, SHEETS)
    except InputError as error:
        assert error.key and error.remedy
        return False
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    return True


FRAGMENTS: dict[str, Any] = {
    "seed": 0,
    "num_steps": 2,
    "algorithm": BASE["algorithm"],
    "workload": {"prompts_per_step": 2, "samples_per_prompt": 3},
    "update": {"minibatch_samples": 2},
    "schedule": MODE | {"staleness": {"bound": 0, "at_bound": "drop"}},
    "buffer": {"high_watermark": 0.01, "low_watermark": 0.0},
    "weight_sync": {"in_flight": "interrupt"},
    "rollout": {"max_num_seqs": 2},
}
"""samples of several prompts are thrown away one by one, and go out again without the rest of their prompts"""


@given(tight())
@example(FRAGMENTS)
@settings(max_examples=40)
def test_whatever_is_coherent_ends(change: dict[str, Any]) -> None:
    chosen = scenario(change)
    assert refused_or_ended(chosen) or chosen.weight_sync.trigger == "pull"


@given(failing())
@settings(max_examples=25)
def test_whatever_dies_it_ends(change: dict[str, Any]) -> None:
    refused_or_ended(scenario(change))
