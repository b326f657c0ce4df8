"""How sampling changes number and length of responses; without a length model it changes no length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.drawing import assumed, response_lengths, temperatures
from lab.load import load
from lab.scenario import Scenario

BASE = load("scenarios/quickstart.yaml")
LONG = {"dist": "lognormal", "mean": 400, "p95": 900, "max": 100_000}


def scenario(sampling: dict[str, Any], **workload: Any) -> Scenario:
    data = BASE.model_dump(mode="json", by_alias=True)
    changed = {"workload": data["workload"] | {"response_tokens": LONG} | workload, "sampling": sampling}
    return BASE.replace(changed | {"update": data["update"] | {"microbatch_tokens": 200_000}, "num_steps": 5})


@given(st.floats(0.1, 3.0), st.floats(0.1, 1.0), st.floats(0.5, 2.0), st.integers(0, 4))
def test_sampling_alone_changes_no_length(heat: float, top_p: float, penalty: float, step: int) -> None:
    chosen = scenario({"temperature": heat, "top_p": top_p, "repetition_penalty": penalty})
    assert np.array_equal(response_lengths(chosen, step), chosen.workload.response_lengths(chosen.seed, step))


def test_a_slope_stretches_every_length_by_its_factor() -> None:
    slopes = {"temperature": 0.5, "top_p": 2.0, "repetition_penalty": -1.0}
    chosen = scenario({"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.2, "lengths": slopes})
    factor = np.exp(0.5 * 0.4 + 2.0 * -0.1 - 0.2)
    drawn = chosen.workload.response_lengths(chosen.seed, 1)
    assert np.abs(response_lengths(chosen, 1) - drawn * factor).max() <= 0.5


def test_measured_factors_are_joined_by_lines_and_constant_beyond() -> None:
    points = [{"temperature": 0.5, "factor": 0.8}, {"temperature": 1.5, "factor": 1.6}]
    for heat, factor in ((0.2, 0.8), (1.0, 1.2), (3.0, 1.6)):
        chosen = scenario({"temperature": heat, "lengths": {"measured": points}})
        drawn = chosen.workload.response_lengths(chosen.seed, 0)
        assert np.abs(response_lengths(chosen, 0) - drawn * factor).max() <= 0.5


def test_a_moving_temperature_reaches_its_end_at_the_last_step() -> None:
    moving = {"start": 1.2, "end": 0.4, "schedule": "linear"}
    chosen = scenario({"temperature": moving, "lengths": {"temperature": 1.0}})
    assert [float(temperatures(chosen, step, (1,))[0]) for step in range(5)] == pytest.approx([1.2, 1.0, 0.8, 0.6, 0.4])


def test_a_mixture_gives_every_temperature_its_share_of_a_step() -> None:
    arms = [{"temperature": 0.6, "share": 0.25}, {"temperature": 1.2, "share": 0.75}]
    chosen = scenario({"mixture": arms, "lengths": {"temperature": 1.0}})
    heats = temperatures(chosen, 2, (chosen.workload.prompts_per_step, chosen.num_tried))
    assert np.mean(heats == 0.6) == pytest.approx(0.25)
    drawn = chosen.workload.response_lengths(chosen.seed, 2)
    cool, hot = (drawn[heats == heat] * np.exp(heat - 1) for heat in (0.6, 1.2))
    assert response_lengths(chosen, 2).sum() == pytest.approx(cool.sum() + hot.sum(), rel=1e-2)


def test_lengths_stay_within_what_the_workload_allows() -> None:
    chosen = scenario({"temperature": 9.0, "lengths": {"temperature": 9.0}})
    assert np.all(response_lengths(chosen, 0) == LONG["max"])


def test_the_best_of_n_extends_the_answers_that_were_there() -> None:
    one, four = scenario({}), scenario({"best_of": 4})
    assert four.num_tried == 4 * one.num_tried
    assert np.array_equal(response_lengths(four, 3)[:, : one.num_tried], response_lengths(one, 3))


@given(st.integers(4, 9), st.integers(0, 4))
def test_all_beams_run_to_the_longest(beams: int, step: int) -> None:
    chosen = scenario({"beams": beams})
    lengths = response_lengths(chosen, step)
    alone = chosen.workload.response_lengths(chosen.seed, step, num_samples=beams)
    assert lengths.shape[1] == beams and np.array_equal(lengths, np.repeat(alone.max(1)[:, None], beams, 1))


@pytest.mark.parametrize(
    ("sampling", "changes", "said"),
    [
        ({"best_of": 2, "beams": 8}, {}, "exclude each other"),
        ({"temperature": 0.7, "mixture": [{"temperature": 1.0, "share": 1.0}]}, {}, "exclude each other"),
        ({"mixture": [{"temperature": 1.0, "share": 0.7}]}, {}, "do not add to 1"),
        ({"beams": 2}, {}, "2 beams hold no 4 answers"),
        ({"beams": 8}, {"schedule": {"scoring": "sample"}}, "when all of them have ended"),
        ({"best_of": 2}, {"schedule": {"mode": "asynchronous"}}, "by itself"),
        (
            {"lengths": {"measured": [{"temperature": 1, "factor": 1}, {"temperature": 0.5, "factor": 1}]}},
            {},
            "must rise",
        ),
        ({"lengths": {"temperature": 1, "measured": [{"temperature": 1, "factor": 1}]}}, {}, "say the same twice"),
    ],
)
def test_what_contradicts_itself_is_refused(sampling: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BASE.replace({"sampling": sampling} | changes)


ARMS = [{"temperature": 0.7, "share": 0.5}, {"temperature": 1.3, "share": 0.5}]


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"bandit": {}}, "mixture"),
        ({"bandit": {}, "mixture": [{"temperature": 0.7, "share": 1.0}]}, "mixture"),
        ({"bandit": {"floor": 0.6}, "mixture": ARMS}, "floor"),
        ({"entropy": {"low": 2.0, "high": 1.0}}, "high"),
        ({"beams": 8, "mixture": ARMS}, "beams"),
        ({"beams": 8, "entropy": {}}, "beams"),
        ({"entropy": {}, "lengths": {"temperature": 1.0}}, "lengths"),
        ({"bandit": {}, "mixture": ARMS, "lengths": {"measured": [{"temperature": 1.0, "factor": 2.0}]}}, "lengths"),
    ],
)
def test_what_cannot_be_decided_is_refused(sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        scenario(sampling)


def test_a_length_model_without_temperature_goes_with_what_moves_it() -> None:
    chosen = scenario({"entropy": {}, "bandit": {}, "mixture": ARMS, "lengths": {"top_p": 1.0}, "top_p": 0.9})
    assert chosen.sampling.decides
    assert not chosen.sampling.plain


def test_what_a_simulation_takes_for_granted_is_said() -> None:
    assert list(assumed(BASE)) == []
    place = BASE.model_dump(mode="json", by_alias=True)["place"]
    plain = {"actor.generate": [{"pool": "all", "backend": "transformers"}]}
    told = list(assumed(scenario({}, end="eos").replace({"place": place | plain})))
    assert [line.split(":")[0] for line in told] == ["workload.end", "backend"]
