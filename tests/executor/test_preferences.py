import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.preferences import HARMFUL, LONGER_CHOSEN, Draws, echo_demonstration, echo_labelled, echo_pair
from executor.tasks import TASKS
from executor.tokenizer import IDS
from lab.rows import KINDS, Kind

REWARD = TASKS["echo"].reward
PLACES = st.builds(
    Draws, seed=st.integers(0, 99), step=st.integers(0, 999), prompt=st.integers(0, 999), sample=st.integers(0, 9)
)
LENGTHS = st.integers(1, 80)


@given(draws=PLACES, prompt=st.integers(1, 40), lengths=st.tuples(LENGTHS, LENGTHS), kind=st.sampled_from(KINDS))
def test_the_chosen_response_always_earns_more(draws: Draws, prompt: int, lengths: tuple[int, int], kind: Kind) -> None:
    pair = echo_pair(draws, prompt, lengths, kind)
    assert len(pair.prompt) == prompt
    assert REWARD(pair.prompt, pair.chosen) >= 0.75
    assert REWARD(pair.prompt, pair.rejected) <= 0.5
    assert (pair.safety == "harmful") == (pair.rejected.count(IDS[HARMFUL]) >= max(len(pair.rejected) / 2, 1))
    assert IDS[HARMFUL] not in pair.chosen
    assert pair == echo_pair(draws, prompt, lengths, kind)


@given(draws=PLACES, lengths=st.tuples(LENGTHS, LENGTHS))
def test_lengths_are_those_asked_for(draws: Draws, lengths: tuple[int, int]) -> None:
    natural, matched, adversarial = (echo_pair(draws, 12, lengths, kind) for kind in KINDS)
    assert {len(natural.chosen), len(natural.rejected)} == set(lengths)
    assert len(matched.chosen) == len(matched.rejected) == lengths[0]
    assert len(adversarial.rejected) == max(lengths)
    assert len(adversarial.chosen) < len(adversarial.rejected) or max(lengths) == 1


def test_in_training_the_longer_response_tends_to_be_the_chosen_one() -> None:
    pairs = [echo_pair(Draws(seed=0, step=0, prompt=i), 12, (5, 9)) for i in range(2000)]
    share = np.mean([len(pair.chosen) > len(pair.rejected) for pair in pairs])
    assert share == pytest.approx(LONGER_CHOSEN, abs=4 * np.sqrt(0.16 / len(pairs)))


def test_every_attribute_varies() -> None:
    pairs = [echo_pair(Draws(seed=0, step=0, prompt=i), 12, (5, 9)) for i in range(300)]
    assert {pair.language for pair in pairs} == {"en", "de", "zh"}
    assert {pair.topic for pair in pairs} == set("abcd")
    assert {pair.safety for pair in pairs} == {"harmful", "harmless"}
    assert len({tuple(pair.prompt[:6]) for pair in pairs}) == 3


@given(draws=PLACES, prompt=st.integers(1, 40), length=LENGTHS)
def test_demonstrations_leave_something_to_learn(draws: Draws, prompt: int, length: int) -> None:
    known, response = echo_demonstration(draws, prompt, length)
    assert known == TASKS["echo"].prompt(draws.seed, draws.step, draws.prompt, prompt)
    assert len(response) == length
    assert 2 / 3 <= REWARD(known, response) < 2 / 3 + 1 / length


def test_labels_are_even_and_say_which_response_is_good() -> None:
    found = [echo_labelled(Draws(seed=1, step=0, prompt=i), 12, 16) for i in range(1000)]
    assert all((REWARD(prompt, response) >= 0.75) == bool(label) for prompt, response, label in found)
    assert np.mean([label for *_, label in found]) == pytest.approx(0.5, abs=0.06)
