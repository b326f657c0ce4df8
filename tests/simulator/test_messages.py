"""Calls between the processes of a run take the cores that the work needs, and only where these are all there is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.measurement import QUANTITIES
from lab.scenario import Scenario
from lab.timeline import Timeline
from profiles.formula import FORMULAS
from profiles.profile import OpProfile, Profile, Range
from simulator import messages
from simulator.run import simulate

TINY = load("scenarios/async-tiny.yaml").replace({"num_steps": 5})
LARGE = load("scenarios/ppo-7b-16gpu.yaml").replace(
    {"num_steps": 3, "schedule": {"mode": "asynchronous"}, "checkpoint": {"every_steps": None}}
)
FREE = Range(low=0, high=1e30)


def profile(device: str, message_s: float | None) -> Profile:
    """A device on which a call of an op takes 5 ms, and one between processes so long."""
    each = dict.fromkeys(FORMULAS, 0.005) | {"message": message_s}
    ops = {
        op: OpProfile(
            coefficients={"each": seconds}, ranges=dict.fromkeys(FORMULAS[op], FREE), points=1, residual_median=0,
            residual_p90=0,
        )
        for op, seconds in each.items() if seconds is not None
    }  # fmt: skip
    return Profile(name="flat", device=device, kind="measured", models=("tiny-llama", "llama-2-7b"), ops=ops)


def played(scenario: Scenario, message_s: float | None) -> Timeline:
    device = next(iter(scenario.hardware.nodes)).device
    return simulate(scenario, {device: profile(device, message_s)})


def test_a_call_is_an_op_that_can_be_measured_and_priced() -> None:
    assert QUANTITIES["message"] == ("calls",) and FORMULAS["message"] == ("each",)


def test_what_was_not_measured_or_costs_nothing_changes_nothing() -> None:
    assert played(TINY, None).spans == played(TINY, 0.0).spans


def test_beside_gpus_calls_are_free() -> None:
    assert played(LARGE, 0.05).spans == played(LARGE, None).spans


@settings(deadline=None, max_examples=8)
@given(st.floats(0.0002, 0.01))
def test_a_run_gets_longer_by_no_more_than_its_calls_take(told_s: float) -> None:
    numbers: list[int] = []
    spend = messages.Messages._spend

    def counted(self: messages.Messages, number: int) -> None:
        numbers.append(number)
        spend(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.Messages, "_spend", counted)
        loaded = played(TINY, told_s)
    prompts = loaded.header.samples["trained"] // TINY.workload.samples_per_prompt
    assert sum(numbers) >= messages.DELIVERED * prompts
    end_s, free_s = (max(span.end_s for span in run.spans) for run in (loaded, played(TINY, 0.0)))
    assert 0.99 * free_s < end_s < free_s + 1.5 * sum(numbers) * told_s  # calls change who gets which prompt when
    assert end_s > free_s or told_s < 0.001
