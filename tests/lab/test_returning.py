"""What is back of a step, and when it is enough."""

from hypothesis import given
from hypothesis import strategies as st

from lab.load import load
from lab.returning import Returning, joint
from lab.scenario import Scenario

QUICK = load("scenarios/quickstart.yaml")
TRIED, NEEDED = QUICK.num_tried, QUICK.workload.prompts_per_step


def over_issued(share: float) -> Scenario:
    return QUICK.replace({"rollout": QUICK.rollout.model_dump(mode="json") | {"over_issue": share}})


@given(st.permutations(range(NEEDED * TRIED)))
def test_without_over_issue_every_sample_counts_and_the_last_one_is_enough(order: list[int]) -> None:
    back = Returning(QUICK)
    assert not joint(QUICK) and not back.over_issued
    for number, place in enumerate(order):
        assert not back.enough
        assert back.back(place) == [place]
        assert back.enough == (number + 1 == len(order))
    assert sorted(back.stop().keep) == list(range(NEEDED)) and not back.stop().abort


@given(st.permutations(range(2 * NEEDED * TRIED)))
def test_with_over_issue_the_first_whole_prompts_are_kept(order: list[int]) -> None:
    chosen = over_issued(1.0)
    back, left = Returning(chosen), dict.fromkeys(range(2 * NEEDED), TRIED)
    whole: list[int] = []
    assert joint(chosen) and back.over_issued
    for place in order:
        if back.enough:
            break
        usable, prompt = back.back(place), place // TRIED
        left[prompt] -= 1
        if left[prompt]:
            assert usable == []
        else:
            assert usable == back.places([prompt])
            whole.append(prompt)
    said = back.stop()
    assert list(said.keep) == whole and len(whole) == NEEDED
    assert set(said.abort) == set(range(2 * NEEDED)) - set(whole)
