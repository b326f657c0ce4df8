"""What the driver decides about sampling: the same after a resume, and from nothing that may not be known yet."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from executor.diversity import distinct, diversity, joined
from executor.experience import Samples
from executor.sampling import COLDEST, Decisions, keep_best
from lab import drawing
from lab.policies.sampling import Temperature, temperature
from lab.scenario import Scenario

Make = Callable[..., Scenario]
ARMS = [{"temperature": 0.6, "share": 0.5}, {"temperature": 1.0, "share": 0.25}, {"temperature": 1.4, "share": 0.25}]
BEST = 1
"""the arm that pays"""


def made(scenario: Make, mode: str = "synchronous", **sampling: Any) -> Decisions:
    return Decisions(scenario("quickstart", sampling=sampling, schedule={"mode": mode}, num_steps=20))


def info(entropy: float, tokens: int = 10) -> dict[str, Any]:
    sums = {"prompts": 2.0, "distinct_1": 1.0, "distinct_2": 1.5, "tokens": float(tokens), "surprise": entropy * tokens}
    return {"spans": [], "diversity": sums}


def play(decisions: Decisions, step: int, entropy: float = 1.0) -> dict[str, Any]:
    """A step whose samples of the best arm are rewarded with 9, others with -1 (and one in eight the other way)."""
    row = decisions.rolled(step, [info(entropy)])
    if decisions.wants_rewards:
        arms = decisions.arms(step)
        flipped = np.random.default_rng(step).random(len(arms)) < 1 / 8
        row |= decisions.rewarded(step, [{"rewards": np.where((arms == BEST) ^ flipped, 9.0, -1.0)}])
    return row


def test_without_a_choice_temperatures_are_the_scenario_s(scenario: Make) -> None:
    moving = {"start": 1.0, "end": 0.6, "schedule": "cosine"}
    for sampling in ({}, {"temperature": 0.7}, {"temperature": 0.02}, {"temperature": moving}, {"mixture": ARMS}):
        decisions = made(scenario, **sampling)
        for step in range(20):
            found = decisions.temperatures(step)
            assert np.array_equal(found, drawing.temperatures(decisions._scenario, step, found.shape))
            assert play(decisions, step)["temperature"] == pytest.approx(found.mean())
    rule = Temperature(start=1.0, end=0.6, schedule="cosine")
    assert made(scenario, temperature=moving).temperatures(7)[0, 0] == temperature(rule, 7, 20)


@pytest.mark.parametrize("rule", ["ucb", "thompson"])
def test_a_bandit_moves_the_shares_to_the_temperature_that_pays(scenario: Make, rule: str) -> None:
    decisions = made(scenario, mixture=ARMS, bandit={"rule": rule, "floor": 0.05})
    rows = [play(decisions, step) for step in range(12)]
    assert rows[0]["sampling"]["shares"] == []
    last = rows[-1]["sampling"]
    assert sum(last["shares"]) == pytest.approx(1.0)
    assert last["shares"][BEST] > 0.7
    assert min(last["shares"]) >= 0.05 - 1e-12
    assert last["observed"]["last_step"] == 10
    drawn = decisions.temperatures(11)
    assert (drawn == 1.0).mean() == pytest.approx(last["shares"][BEST], abs=1 / drawn.size)
    assert rows[-1]["reward_by_temperature"]["1"] > rows[-1]["reward_by_temperature"]["0.6"]


def test_an_entropy_watch_warms_and_cools_within_its_limits(scenario: Make) -> None:
    decisions = made(scenario, temperature=0.8, entropy={"low": 1.0, "high": 2.0, "step": 0.1, "most": 0.3})
    found = []
    for step, entropy in enumerate([0.5, 0.5, 0.5, 0.5, 0.5, 1.5, 1.5, 2.5, 2.5]):
        found.append(float(decisions.temperatures(step)[0, 0]))
        play(decisions, step, entropy)
    assert found == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.0])
    cold = made(scenario, temperature=0.1, entropy={"low": 0.0, "high": 0.1, "step": 0.5, "most": 1.0})
    play(cold, 0, 5.0)
    assert cold.temperatures(1).max() == COLDEST


@pytest.mark.parametrize(("mode", "lag"), [("synchronous", 1), ("one_step_off", 2)])
def test_a_step_depends_on_those_whose_weights_are_out(scenario: Make, mode: str, lag: int) -> None:
    """What came earlier than that is not waited for, and what came later, or not at all, changes nothing."""
    about: dict[str, Any] = {"mixture": ARMS, "bandit": {}, "entropy": {"low": 1.5}}
    one, other = made(scenario, mode, **about), made(scenario, mode, **about)
    for step in range(6):
        play(one, step)
    for step in range(6 - lag + 1):
        play(other, step)
    later = 6
    for step in range(6 - lag + 1, 6):
        one._seen.pop(step, None)
    assert np.array_equal(one.temperatures(later), other.temperatures(later))


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_resumed_run_decides_as_it_would_have(scenario: Make, mode: str, stop: int) -> None:
    about: dict[str, Any] = {"mixture": ARMS, "bandit": {"rule": "thompson"}, "entropy": {"low": 1.2, "high": 1.6}}
    entropies = [1.0 + 0.1 * (step % 9) for step in range(12)]
    straight, ahead = made(scenario, mode, **about), 2 if mode == "one_step_off" else 1
    expected, state = [], ""
    for step in range(12):
        expected.append((straight.temperatures(step), play(straight, step, entropies[step])))
        if step == stop + ahead - 1:
            state = json.dumps(straight.state())
    again = made(scenario, mode, **about)
    again.restore(json.loads(state))
    for step in range(stop + 1, 12):
        assert np.array_equal(again.temperatures(step), expected[step][0])
        assert play(again, step, entropies[step]) == expected[step][1]


def answers(number: int, best_of: int) -> Samples:
    rng = np.random.default_rng(number)
    size = number * best_of
    return Samples(
        step=0, policy_version=0, prompts=np.repeat(np.arange(number), best_of), num_prompt_tokens=np.full(size, 2),
        tokens=[rng.integers(3, 9, 2 + int(n)) for n in rng.integers(1, 5, size)],
        logprobs=[np.zeros(1, dtype=np.float32)] * size,
    )  # fmt: skip


def test_the_best_answers_are_kept_with_all_that_was_said_of_them() -> None:
    samples, rewards = answers(5, 4), np.random.default_rng(0).integers(0, 5, 20).astype(float)
    by_rank = {"rows": {i: np.full(2, i) for i in range(20)}}
    kept, columns = keep_best(None, 2, samples, {"rewards": rewards}, by_rank)
    assert len(kept) == 10
    for place in range(10):
        pair = rewards[2 * place : 2 * place + 2]
        winner = 2 * place + int(pair[1] > pair[0])
        assert columns["rewards"][place] == pair.max()
        assert columns["rows"][place].tolist() == [winner, winner]
        assert np.array_equal(kept.tokens[place], samples.tokens[winner])


def test_distinct_n_by_hand() -> None:
    responses = [[1, 2, 1, 2], [1, 2, 3]]
    assert distinct(responses, 1) == 3 / 7
    assert distinct(responses, 2) == 3 / 5  # 12 21 12 12 23
    assert distinct([[1], [2]], 2) == 0.0


def test_diversity_adds_up_over_engines() -> None:
    samples = answers(6, 3)
    parts = [diversity(samples.take(np.flatnonzero(samples.prompts % 2 == side))) for side in (0, 1)]
    whole = joined([diversity(samples)])
    assert joined(parts) == pytest.approx(whole)
    groups = [[samples.tokens[3 * i + j][2:].tolist() for j in range(3)] for i in range(6)]
    assert whole["distinct_1"] == pytest.approx(np.mean([distinct(group, 1) for group in groups]))
