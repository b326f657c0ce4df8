from hypothesis import given
from hypothesis import strategies as st

from lab.policies.over_issue import Returns, early_stop, num_to_issue


@given(st.integers(1, 1000), st.floats(0, 2))
def test_enough_is_issued_and_not_more(needed: int, extra: float) -> None:
    issued = num_to_issue(needed, extra)
    assert needed <= issued < needed * (1 + extra) + 1


def test_no_extra_issues_what_is_needed() -> None:
    assert num_to_issue(10, 0) == 10 and num_to_issue(10, 0.3) == 13 and num_to_issue(3, 0.5) == 5


@given(st.permutations(range(12)), st.integers(0, 12), st.integers(1, 12))
def test_what_was_issued_is_kept_dropped_or_aborted(order: list[int], back: int, needed: int) -> None:
    decided = early_stop(Returns(num_needed=needed, issued=tuple(range(12)), finished=tuple(order[:back])))
    assert decided.stop == (back >= needed)
    if decided.stop:
        assert sorted(decided.keep + decided.surplus + decided.abort) == list(range(12))
        assert decided.keep == tuple(order[:needed])
    else:
        assert decided.keep == decided.surplus == decided.abort == ()
