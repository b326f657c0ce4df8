"""A fresh process in the place of one that is gone: what is stated counts, else what was measured, which takes cores."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.measurement import QUANTITIES
from lab.timeline import Span, Timeline
from profiles.formula import FORMULAS
from profiles.profile import OpProfile, Profile, Range
from simulator.launching import UNMEASURED_S
from simulator.run import simulate

TINY = load("scenarios/faults-tiny.yaml").replace({"num_steps": 6, "checkpoint": {"every_steps": 1}})
LARGE = load("scenarios/faults-16gpu.yaml").replace({"num_steps": 3, "checkpoint": {"every_steps": 1}})
LAUNCHES = tuple(op for op in FORMULAS if op.endswith("_launch"))
FREE = Range(low=0, high=1e30)
DETECT_S = 2.0


def profile(device: str, launches: Mapping[str, float]) -> Profile:
    """A device on which a call of an op takes 10 ms, and launches what they are given or were not measured."""
    each = {op: 0.01 for op in FORMULAS if op not in LAUNCHES} | dict(launches)
    ops = {
        op: OpProfile(
            coefficients={"each": seconds}, ranges=dict.fromkeys(FORMULAS[op], FREE), points=1, residual_median=0,
            residual_p90=0,
        )
        for op, seconds in each.items()
    }  # fmt: skip
    return Profile(name="flat", device=device, kind="measured", models=("tiny-llama", "qwen2.5-7b"), ops=ops)


def play(fault: Mapping[str, Any], launches: Mapping[str, float], scenario: Any = TINY) -> Timeline:
    device = next(iter(scenario.hardware.nodes)).device
    chosen = scenario.replace({"faults": [{"detect": f"{DETECT_S} s", **fault}]})
    return simulate(chosen, {device: profile(device, launches)})


def restored(timeline: Timeline, worker: str) -> Span:
    (span,) = [span for span in timeline.stages() if span.stage == "restore" and span.worker == worker]
    return span


def reading(timeline: Timeline) -> float:
    """When everybody who comes back reads the state; all at once."""
    (start,) = {span.start_s for span in timeline.spans if (span.stage, span.op) == ("restore", "read")}
    return start - timeline.header.faults[0]["at_s"] - DETECT_S


def end(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.stages())


def trainer(at: float) -> dict[str, Any]:
    return {"kind": "trainer_lost", "target": "actor.train[1]", "at": at}


def test_launches_are_ops_that_can_be_measured_and_priced() -> None:
    assert {"engine_launch", "trainer_launch", "scorer_launch", "process_launch"} == set(LAUNCHES)
    assert all(QUANTITIES[op] == ("calls",) and FORMULAS[op] == ("each",) for op in LAUNCHES)


@settings(deadline=None, max_examples=10)
@given(st.floats(0.5, 30.0))
def test_all_that_start_side_by_side_share_the_cores(seconds: float) -> None:
    """Six processes of one thread on two cores: three times as long as one."""
    timeline = play(trainer(0.5), dict.fromkeys(LAUNCHES, seconds))
    assert len(TINY.workers) == 6 and reading(timeline) == pytest.approx(3 * seconds)


@settings(deadline=None, max_examples=10)
@given(st.floats(0.5, 4.0), st.sampled_from(["engine", "scorer", "process"]))
def test_one_that_starts_while_others_work_takes_no_less_than_alone_and_holds_them_up(
    seconds: float, kind: str
) -> None:
    target = {"engine": "actor.generate[1]", "scorer": "reference.score[0]", "process": "reward.score[0]"}[kind]
    fault = {"kind": "worker_lost" if kind == "engine" else "scorer_lost", "target": target, "at": 0.5}
    measured = play(fault, dict.fromkeys(LAUNCHES, 1e3) | {f"{kind}_launch": seconds})
    span = restored(measured, target)
    assert span.end_s - span.start_s >= DETECT_S + seconds - 1e-9, "its op, and not another one"
    beside = play(fault | {"start": span.end_s - span.start_s - DETECT_S}, {})
    assert restored(beside, target).end_s == pytest.approx(span.end_s)
    assert end(measured) >= end(beside) - 1e-9, "what only passes takes no cores"


def test_what_is_stated_counts_and_what_nobody_measured_is_a_minute() -> None:
    for fault, seconds in ((trainer(0.5) | {"start": 7.0}, 7.0), (trainer(0.5), UNMEASURED_S)):
        launches = dict.fromkeys(LAUNCHES, 3.0) if "start" in fault else {}
        assert reading(play(fault, launches)) == pytest.approx(seconds)


def test_on_gpus_launches_do_not_slow_each_other() -> None:
    timeline = play(trainer(0.5), dict.fromkeys(LAUNCHES, 9.0), LARGE)
    assert reading(timeline) == pytest.approx(9.0)
