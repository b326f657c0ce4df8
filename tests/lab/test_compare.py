"""Comparison: the errors of stages and step, their noise, and a decomposition that leaves nothing out."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.compare import SPREAD, STANDARD_ERROR, caveats, compare
from lab.errors import InputError
from lab.metrics import step_times, summarise
from lab.timeline import Timeline
from tests.strategies import Seconds, play, scenario, timelines

QUICK = scenario(num_steps=4)
PPO = scenario("ppo-tiny", "one_step_off", 4)


def lasting(**stages: float) -> Seconds:
    """One second a stage but for the named ones, dispatched at once."""

    def seconds(stage: str, step: int, worker: str) -> float:
        return stages.get("dispatch", 0.0) if worker == "dispatch" else stages.get(stage, 1.0)

    return seconds


def measured(**stages: float) -> Timeline:
    return play(QUICK, lasting(**stages), "measured")


def test_a_timeline_does_not_differ_from_itself() -> None:
    found = compare(play(QUICK, lasting()), [measured()])
    assert (found.step.predicted, found.step.measured, found.step.error, found.remainder) == (5, 5, 0, 0)
    assert all(row.error == 0 for row in found.stages.values())
    assert all(reason.seconds == 0 and "as long as predicted" in reason.text for reason in found.explains)


def test_a_stage_that_takes_longer_than_predicted_explains_the_whole_difference() -> None:
    found = compare(play(QUICK, lasting()), [measured(update_actor=2.0)])
    assert (found.step.measured, found.step.error) == (6, pytest.approx(-1 / 6))
    row = found.stages["update_actor"]
    assert (row.predicted, row.measured, row.error, row.share) == (1, 2, -0.5, pytest.approx(1 / 3))
    first = found.explains[0]
    assert (first.stage, first.seconds) == ("update_actor", -1)
    assert first.text == "update_actor holds up the step 1 s longer than predicted: 100% of the difference"


def test_a_longer_stage_that_another_one_hides_explains_nothing_of_the_step() -> None:
    """The checkpoint of every second step runs beside the next rollout."""
    found = compare(play(QUICK, lasting(rollout=4.0)), [measured(rollout=4.0, checkpoint=2.0)])
    assert found.stages["checkpoint"].error == -0.5
    assert found.step.error == 0
    assert sum(reason.seconds for reason in found.explains) == pytest.approx(0)


def test_time_between_stages_is_the_remainder() -> None:
    """Five dispatches of 0.1 s a step, in one of which the first checkpoint still runs, beside others' work."""
    found = compare(play(QUICK, lasting(checkpoint=0.05)), [measured(checkpoint=0.05, dispatch=0.1)])
    assert found.step.error == pytest.approx(-0.5 / 5.5)
    assert found.explains[0].stage == "gap"
    assert found.explains[0].seconds == found.remainder
    assert found.remainder == pytest.approx(-0.5, abs=0.05)


@settings(max_examples=50)
@given(timelines(of=PPO), st.lists(timelines(of=PPO, origin="measured"), min_size=1, max_size=3))
def test_the_reasons_add_up_to_the_difference_of_the_step_times(predicted: Timeline, runs: list[Timeline]) -> None:
    found = compare(predicted, runs)
    assert found.step.predicted is not None and found.step.measured is not None
    difference = found.step.predicted - found.step.measured
    total = found.step.predicted + found.step.measured
    assert sum(reason.seconds for reason in found.explains) == pytest.approx(difference, abs=1e-9 * total)
    sizes = [abs(reason.seconds) for reason in found.explains]
    assert sizes == sorted(sizes, reverse=True)
    assert {reason.stage for reason in found.explains} == {*found.stages, "gap"}


@settings(max_examples=30)
@given(timelines(of=PPO), timelines(of=PPO, origin="measured"))
def test_both_sides_of_every_pool_add_to_one(predicted: Timeline, run: Timeline) -> None:
    found = compare(predicted, [run])
    for pool, accounts in found.pools.items():
        for side, timeline in (("predicted", predicted), ("measured", run)):
            assert sum(row[side] for row in accounts.values()) == pytest.approx(1)
            own = summarise(timeline)["pools"][pool]
            assert {name: row[side] for name, row in accounts.items() if row[side]} == own


def test_the_noise_of_three_repeats_is_their_spread() -> None:
    found = compare(play(QUICK, lasting()), [measured(rollout=r) for r in (2.0, 1.0, 1.5)])
    assert (found.repeats, found.step.noise_kind) == (3, SPREAD)
    assert found.step.noise == pytest.approx(1 / 5.5)
    assert found.stages["rollout"].noise == pytest.approx(1 / 1.5)
    assert found.stages["rollout"].measured == pytest.approx(1.5)
    assert found.stages["update_actor"].noise == 0


def test_the_noise_of_one_run_is_the_standard_error_over_its_steady_steps() -> None:
    """Steady rollouts of 1, 2 and 3 s after a first one of 100 s: σ = 1 over three steps."""

    def seconds(stage: str, step: int, worker: str) -> float:
        return 0.0 if worker == "dispatch" else (100.0, 1.0, 2.0, 3.0)[step] if stage == "rollout" else 1.0

    run = play(QUICK, seconds, "measured")
    assert step_times(run) == [104, 5, 6, 7]
    found = compare(play(QUICK, lasting()), [run])
    assert found.step.noise_kind == STANDARD_ERROR
    assert found.step.noise == pytest.approx(1 / 3**0.5 / 6)
    assert found.stages["rollout"].noise == pytest.approx(1 / 3**0.5 / 2)


def test_two_runs_of_one_step_have_no_noise() -> None:
    short = scenario(num_steps=1)
    found = compare(play(short, lasting()), [play(short, lasting(), "measured")])
    assert (found.step.error, found.step.noise) == (0, None)


def test_a_stage_that_one_side_lacks_has_no_error_but_still_explains() -> None:
    run = measured()
    without = Timeline.of(run.header, [span for span in run.spans if span.stage != "reference"])
    found = compare(play(QUICK, lasting()), [without])
    assert (found.stages["reference"].measured, found.stages["reference"].error) == (None, None)
    assert next(reason for reason in found.explains if reason.stage == "reference").seconds > 0


def test_runs_of_different_scenarios_are_refused_by_name() -> None:
    other = scenario("ppo-tiny")
    with pytest.raises(InputError) as caught:
        compare(play(QUICK, lasting()), [measured(), play(other, lasting(), "measured")])
    for part in (QUICK.name, QUICK.digest, other.name, other.digest):
        assert part in str(caught.value)


def test_a_run_without_a_complete_step_is_refused() -> None:
    nothing = Timeline.of(measured().header, [])
    with pytest.raises(InputError, match="no complete step"):
        compare(play(QUICK, lasting()), [nothing])
    with pytest.raises(InputError, match="no measured run"):
        compare(play(QUICK, lasting()), [])


def test_a_comparison_is_plain_json() -> None:
    found = compare(play(QUICK, lasting()), [measured(rollout=3.0)]).to_dict()
    assert json.loads(json.dumps(found))["stages"] == found["stages"]
    assert {"predicted", "measured", "error", "noise"} <= set(found["step"])
    assert "remainder" in found


def test_a_stage_that_explains_more_than_the_difference_is_not_told_in_percent() -> None:
    """Rollout lasts 3 s longer, the update 2.9 s less: the step differs by 0.1 s only."""
    found = compare(play(QUICK, lasting(update_actor=4.0)), [measured(rollout=4.0, update_actor=1.1)])
    assert found.explains[0].text.endswith("more than the whole difference, which others make up for")
    assert found.explains[1].text.endswith("against the difference")


def test_caveats_tell_what_a_comparison_cannot_settle() -> None:
    predicted = play(QUICK, lasting())

    def told(*runs: Timeline) -> str:
        return " ".join(caveats(compare(predicted, runs), predicted, runs))

    calm, wild = [measured(rollout=r) for r in (1.0, 1.2, 1.1)], [measured(rollout=r) for r in (1.0, 3.0, 2.0)]
    assert told(measured()) == told(*calm) == ""
    assert "differ by 33.3%" in told(*wild) and "repeat" in told(*wild)
    assert "itself simulated" in told(predicted)
    cut = msgspec.structs.replace(calm[0], header=msgspec.structs.replace(calm[0].header, status="interrupted"))
    assert "did not finish" in told(cut)
