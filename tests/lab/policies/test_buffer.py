from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.buffer import (
    Fill,
    Limits,
    Manifest,
    Page,
    after_epoch,
    filled,
    pinned,
    pressure,
    publication,
    too_small,
)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    low = draw(st.floats(0.0, 0.8))
    capacity = draw(st.integers(1, 200))
    return Limits(
        capacity_samples=capacity,
        trigger_samples=draw(st.integers(1, capacity)),
        low_watermark=low,
        high_watermark=draw(st.floats(low + 0.05, 1.0)),
        at_high=draw(st.sampled_from(["pause", "throttle"])),
    )


moves = st.lists(st.tuples(st.sampled_from(["issue", "arrive", "train", "done"]), st.integers(1, 60)), max_size=60)


def walk(limits: Limits, steps: list[tuple[str, int]]) -> list[tuple[Fill, str]]:
    """A buffer under producers and consumers that do as they are told."""
    fill, seen = Fill(held=0), list[tuple[Fill, str]]()
    for move, num in steps:
        answer = pressure(limits, fill, num)
        seen.append((fill, answer.act))
        fill = replace(fill, pressed=answer.pressed)
        if move == "issue":
            fill = replace(fill, in_flight=fill.in_flight + answer.num_issued)
        elif move == "arrive":
            come = min(num, fill.in_flight)
            fill = replace(fill, in_flight=fill.in_flight - come, held=fill.held + come)
        elif move == "train":
            taken = fill.held // limits.trigger_samples * limits.trigger_samples
            fill = replace(fill, held=fill.held - taken, pinned=fill.pinned + taken)
        else:
            fill = replace(fill, pinned=0)
    return [*seen, (fill, "issue")]


@given(limits(), moves)
def test_the_buffer_never_holds_more_than_its_capacity(limits: Limits, steps: list[tuple[str, int]]) -> None:
    for fill, _ in walk(limits, steps):
        assert 0 <= fill.held + fill.pinned <= fill.taken <= limits.capacity_samples


@given(limits(), moves)
def test_pressure_starts_at_the_high_mark_and_ends_at_the_low_one(limits: Limits, steps: list[tuple[str, int]]) -> None:
    for fill, act in walk(limits, steps)[:-1]:
        share, pushed = fill.taken / limits.capacity_samples, act in ("pause", "throttle")
        if fill.held + fill.in_flight < limits.trigger_samples:
            assert not pushed
        elif share >= limits.high_watermark + 1e-9:
            assert pushed
        elif share <= limits.low_watermark - 1e-9:
            assert not pushed
        elif limits.low_watermark + 1e-9 < share < limits.high_watermark - 1e-9:
            assert pushed == fill.pressed
        assert (act == "resume") == (fill.pressed and not pushed)


@given(limits(), moves)
def test_producers_and_consumers_never_wait_for_each_other(limits: Limits, steps: list[tuple[str, int]]) -> None:
    fill = walk(limits, [*steps, ("arrive", 10**6), ("done", 1)])[-1][0]
    assert fill.held >= limits.trigger_samples or pressure(limits, fill, 1).num_issued == 1


@given(limits(), st.integers(0, 200), st.integers(0, 100))
def test_a_fuller_buffer_is_never_filled_faster(limits: Limits, held: int, wanted: int) -> None:
    held += limits.trigger_samples
    for pressed in (False, True):
        paces = [pressure(limits, Fill(held=n, pressed=pressed), wanted).pace for n in (held, held + 1)]
        assert 1 >= paces[0] >= paces[1] >= 0


def test_a_paused_buffer_lets_nothing_in_and_a_throttled_one_a_part() -> None:
    full = Fill(held=80)
    assert pressure(Limits(capacity_samples=100, high_watermark=0.8), full, 50).num_issued == 0
    throttled = pressure(Limits(capacity_samples=100, high_watermark=0.8, at_high="throttle"), full, 50)
    assert (throttled.pace, throttled.num_issued) == (0.4, 20)


@given(st.integers(1, 5), st.integers(1, 9))
def test_a_page_is_pinned_for_its_epochs_and_then_free(epochs: int, samples: int) -> None:
    page = pinned(filled(Page(index=3), samples, samples), epochs)
    for left in range(epochs, 0, -1):
        assert page.epochs_left == left and not page.writable
        with pytest.raises(ValueError, match="takes no"):
            filled(page, 1, samples)
        page = after_epoch(page)
    assert page == Page(index=3) and page.writable


def test_only_a_full_page_is_pinned_and_only_a_pinned_one_has_epochs() -> None:
    half = filled(Page(index=0), 1, 2)
    with pytest.raises(ValueError, match="cannot be pinned"):
        pinned(half, 1)
    with pytest.raises(ValueError, match="not pinned"):
        after_epoch(half)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50), st.floats(0, 1))
def test_a_batch_is_published_whole_or_with_its_gap_on_record(
    expected: int, arrived: int, lost: int, gap: float
) -> None:
    manifest = Manifest(batch=0, num_expected=expected, num_arrived=arrived, num_lost=lost)
    if arrived + lost > expected:
        with pytest.raises(ValueError, match="more samples than expected"):
            publication(manifest, gap)
        return
    said = publication(manifest, gap)
    assert said.num_missing == expected - arrived - lost
    assert said.publish == (said.num_missing == 0 and lost <= gap * expected)
    assert not said.publish or arrived + said.num_gap == expected


def test_a_buffer_below_one_batch_is_refused() -> None:
    small = Limits(capacity_samples=7, trigger_samples=8)
    assert too_small(small) == "a batch has 8 samples and the buffer holds 7"
    assert too_small(Limits(capacity_samples=8, trigger_samples=8)) is None
