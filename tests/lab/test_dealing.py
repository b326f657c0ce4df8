"""Both worlds deal alike: what a dealer says follows from the scenario and from what came back, in whatever order."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.dealing import Dealer, Share
from lab.load import load
from lab.policies.dispatch import DISPATCH, Engines, Prompts, round_robin
from lab.scenario import Scenario

QUICK = load("scenarios/quickstart.yaml")
SPEEDS = (1.0, 3.0, 2.0)
rules = st.sampled_from(list(DISPATCH))


def scenario(dispatch: str, speeds: tuple[float, ...] = SPEEDS, num_prompts: int = 11, **lengths: Any) -> Scenario:
    data = QUICK.model_dump(mode="json", by_alias=True)
    data["place"]["actor.generate"] = [{"pool": "all", "speed": speed} for speed in speeds]
    data["rollout"]["dispatch"] = dispatch
    data["workload"] |= {"prompts_per_step": num_prompts} | lengths
    data["update"]["minibatch_samples"] = 4 * num_prompts
    return QUICK.replace(data)


def responses(chosen: Scenario, step: int, share: Share) -> tuple[np.ndarray, np.ndarray]:
    """What an engine reports once it has generated its share."""
    tokens = chosen.workload.response_lengths(chosen.seed, step)[share.prompts]
    return np.repeat(share.prompts, tokens.shape[1]), tokens.ravel()


@given(rules, st.permutations(range(3)))
def test_dealers_that_heard_the_same_in_any_order_deal_the_same(rule: str, order: list[int]) -> None:
    chosen = scenario(rule)
    ours, theirs = Dealer(chosen), Dealer(chosen)
    for step in range(4):
        shares = ours.deal(step)
        assert shares == theirs.deal(step)
        assert sorted(prompt for share in shares for prompt in share.prompts) == list(range(11))
        for engine in range(3):
            ours.returned(*responses(chosen, step, shares[engine]))
            theirs.returned(*responses(chosen, step, shares[order[engine]]))


@given(rules)
def test_what_a_share_records_is_enough_to_decide_again(rule: str) -> None:
    chosen = scenario(rule)
    dealer = Dealer(chosen)
    for step in range(3):
        shares = dealer.deal(step)
        predicted = np.zeros(11)
        for share in shares:
            predicted[share.prompts] = share.notes.get("predicted_tokens", 0.0)
            dealer.returned(*responses(chosen, step, share))
        prompts = Prompts(predicted_tokens=predicted, samples_per_prompt=4, num_buckets=3)
        again = DISPATCH[shares[0].notes["dispatch"]](prompts, Engines.idle([share.notes["speed"] for share in shares]))
        assert again == [share.notes["prompts"] for share in shares]


def test_by_default_prompts_go_round_in_every_step() -> None:
    dealer = Dealer(QUICK.replace({"place": scenario("round_robin").place.model_dump(mode="json", by_alias=True)}))
    for step in range(3):
        assert [share.prompts for share in dealer.deal(step)] == round_robin(8, 3)


def test_before_anything_came_back_the_mean_is_expected_and_never_the_length_to_come() -> None:
    chosen = scenario("length_buckets")
    longer = scenario("length_buckets", response_tokens={"dist": "lognormal", "mean": 28, "p95": 64, "max": 90})
    known = chosen.workload.prompt_lengths(chosen.seed, 0)
    assert Dealer(chosen).prompts(0).predicted_tokens == pytest.approx(known + 28.0)
    assert Dealer(chosen).deal(0) == Dealer(longer).deal(0)
    assert (chosen.workload.response_lengths(7, 0) != longer.workload.response_lengths(7, 0)).any()


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [({"dist": "fixed", "value": 9}, 9.0), ({"dist": "empirical", "values": [4, 8, 30]}, 14.0)],
)
def test_the_prior_is_the_mean_of_the_distribution(lengths: dict[str, Any], mean: float) -> None:
    dealer = Dealer(scenario("least_loaded", prompt_tokens={"dist": "fixed", "value": 5}, response_tokens=lengths))
    assert dealer.prompts(0).predicted_tokens.tolist() == [5.0 + mean] * 11


def test_prompts_whose_responses_were_long_go_to_the_faster_engine() -> None:
    dealer = Dealer(scenario("length_buckets", (1.0, 2.0), 8))
    first = [share.prompts for share in dealer.deal(0)]
    long = [1, 2, 6, 7]
    for prompt in range(8):
        dealer.returned([prompt], [90 if prompt in long else 10])
    slow, fast = dealer.deal(1)
    assert fast.prompts == long != first[1]
    assert min(fast.notes["predicted_tokens"]) > max(slow.notes["predicted_tokens"])


def test_shares_follow_speed() -> None:
    for rule in ("weighted", "least_loaded"):
        counts = [len(share.prompts) for share in Dealer(scenario(rule, num_prompts=12)).deal(0)]
        assert counts == [2, 6, 4]
