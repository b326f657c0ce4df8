"""What goes out next: every sample of the workload once, in order, but for those that were trained before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lab.issuing import Prompt, Prompts
from tests.strategies import changed

CHOSEN = changed(
    "grpo-7b-16gpu",
    {"workload": {"prompts_per_step": 6, "samples_per_prompt": 4}, "update": {"minibatch_samples": 24}},
)
PER_STEP = CHOSEN.workload.samples_per_step


def places(prompt: Prompt) -> list[int]:
    """Of its samples in the workload as a whole."""
    return [prompt.step * PER_STEP + int(i) for i in prompt.indices]


def taken(prompts: Prompts, most: int) -> list[int]:
    """Places of so many prompts' samples."""
    return [place for prompt in prompts.take(most, 2**62) for place in places(prompt)]


@given(st.sets(st.integers(0, 4 * PER_STEP - 1)), st.integers(0, 30))
def test_all_that_was_not_trained_goes_out_once_and_in_order(trained: set[int], most: int) -> None:
    rows = np.array([divmod(place, PER_STEP) for place in sorted(trained)], np.int64).reshape(-1, 2).T
    prompts = Prompts(CHOSEN, rows)
    found = [*taken(prompts, most), *taken(prompts, 24)]
    assert found == sorted(set(found)) and trained.isdisjoint(found)
    assert set(range(max(found) + 1)) <= trained | set(found)


@given(st.sets(st.integers(0, 2 * PER_STEP - 1), min_size=1))
def test_what_goes_out_again_comes_first(again: set[int]) -> None:
    prompts = Prompts(CHOSEN, np.zeros((2, 0), np.int64))
    first = taken(prompts, 12)
    prompts.again(np.array([divmod(place, PER_STEP) for place in again], np.int64).T, None)
    found = taken(prompts, 40)
    assert found[: len(again)] == sorted(again) and found[len(again)] == len(first)


@given(st.sets(st.integers(0, 2 * PER_STEP - 1)), st.integers(0, 40), st.booleans())
def test_no_more_goes_out_than_there_is_room_for(trained: set[int], room: int, part: bool) -> None:
    """What does not fit stays where it is; a part of a prompt goes out only where nothing whole fits."""
    rows = np.array([divmod(place, PER_STEP) for place in sorted(trained)], np.int64).reshape(-1, 2).T
    prompts, other = Prompts(CHOSEN, rows), Prompts(CHOSEN, rows)
    found = [place for prompt in prompts.take(99, room, part) for place in places(prompt)]
    whole = list[int]()
    while len(whole) + len(following := places(other.take(1, 2**62)[0])) <= room:
        whole += following
    assert found == (whole or following[:room] if part else whole)
    assert taken(prompts, 1)[0] == [*whole, *following][len(found)]
