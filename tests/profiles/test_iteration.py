"""Tables of engine iterations as laws of interpolation."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.interpolate import attention, iteration_seconds, line, padded, segment, skew_share, steps_to_bend
from profiles.iteration import EngineTable, Iteration, Skews
from tests.engines import plain, tables

numbers = st.floats(0, 200)
grids = st.lists(st.integers(0, 100), min_size=1, max_size=6, unique=True).map(lambda xs: np.array(sorted(xs), float))
seeds = st.integers(0, 2**32)


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 2, shape)


@given(grids, seeds)
def test_a_line_goes_through_its_points(grid: np.ndarray, seed: int) -> None:
    found = values(seed, len(grid))
    assert [line(grid, found, x) for x in grid] == pytest.approx(found.tolist())


@given(grids, seeds, numbers)
def test_a_line_is_numpys_between_its_ends_and_straight_beyond(grid: np.ndarray, seed: int, at: float) -> None:
    found = values(seed, len(grid))
    expected = np.interp(at, grid, found)
    if len(grid) > 1 and at > grid[-1]:
        expected = found[-1] + (at - grid[-1]) * (found[-1] - found[-2]) / (grid[-1] - grid[-2])
    assert line(grid, found, at) == pytest.approx(max(expected, 0.0))


@given(grids, numbers)
def test_a_segment_holds_its_value(grid: np.ndarray, at: float) -> None:
    index, position = segment(grid, at)
    if len(grid) == 1:
        assert (index, position) == (0, 0.0)
        return
    assert grid[index] + position * (grid[index + 1] - grid[index]) == pytest.approx(at, abs=1e-9)
    assert (0 <= position < 1) == (grid[0] <= at < grid[-1])


@given(grids, grids, grids, grids, seeds)
def test_attention_goes_through_its_points(
    chunk: np.ndarray, prefix: np.ndarray, decode: np.ndarray, context: np.ndarray, seed: int
) -> None:
    axes = (chunk, prefix, decode, context)
    found = values(seed, *map(len, axes))
    packed = four(axes, found).packed()
    for where in product(*(range(len(axis)) for axis in axes)):
        point = [axis[i] for axis, i in zip(axes, where, strict=True)]
        assert attention(packed, *point) == pytest.approx(found[where])


@given(st.lists(st.floats(0, 3), min_size=16, max_size=16), st.lists(st.floats(0, 300), min_size=4, max_size=4), seeds)
def test_a_multilinear_function_is_met_everywhere(terms: list[float], at: list[float], seed: int) -> None:
    """Inside and beyond the grid, however that is spaced; below its start the start holds."""
    random = np.random.default_rng(seed)
    axes = tuple(np.sort(random.choice(100, random.integers(2, 5), replace=False)).astype(float) for _ in range(4))

    def function(*point: Any) -> Any:
        return sum(
            term * np.prod([x for x, used in zip(point, which, strict=True) if used], axis=0)
            for term, which in zip(terms, product((0, 1), repeat=4), strict=True)
        )

    found = np.zeros(tuple(map(len, axes)))
    for where in np.ndindex(found.shape):
        found[where] = function(*(axis[i] for axis, i in zip(axes, where, strict=True)))
    inside = [max(x, float(axis[0])) for x, axis in zip(at, axes, strict=True)]
    assert attention(four(axes, found).packed(), *at) == pytest.approx(function(*inside), rel=1e-6, abs=1e-6)


def four(axes: tuple[np.ndarray, ...], found: np.ndarray, **more: Any) -> EngineTable:
    return EngineTable(
        chunk_grid=axes[0], prefix_grid=axes[1], decode_grid=axes[2], context_grid=axes[3], attention_seconds=found,
        **more,
    )  # fmt: skip


@st.composite
def some_iterations(draw: st.DrawFn) -> Iteration:
    contexts, chunk = draw(st.lists(st.integers(0, 90), max_size=12)), draw(st.integers(0, 70))
    decodes = len(contexts)
    return Iteration(
        tokens=decodes + chunk, sequences=decodes + (chunk > 0), prefill_tokens=chunk,
        prefix=draw(st.integers(0, 50)) if chunk else 0, decodes=decodes, context_sum=sum(contexts),
        context_max=max(contexts, default=0), context_min=min(contexts, default=0),
        token_context=draw(st.integers(0, 9999)), context_read=draw(st.integers(0, 9999)),
    )  # fmt: skip


@given(tables(), some_iterations())
def test_seconds_are_the_terms_added_up(table: EngineTable, it: Iteration) -> None:
    if it.tokens == 0:
        assert table.seconds(it) == 0.0
        return
    packed = table.packed()
    sizes = [size for size in table.capture_sizes if size >= it.tokens]
    level = attention(packed, *map(float, (it.prefill_tokens, it.prefix, it.decodes, it.mean_context)))
    longest = attention(packed, *map(float, (it.prefill_tokens, it.prefix, it.decodes, it.context_max)))
    expected = (
        table.step_s + table.sequence_s * it.sequences + table.prefill_step_s * (it.prefill_tokens > 0)
        + line(table.token_grid, table.token_seconds, float(min(sizes, default=it.tokens)))
        + line(table.sequence_grid, table.sequence_seconds, float(it.sequences))
        + level + skew_share(packed, it.features()) * (longest - level)
        + table.token_context_s * it.token_context + table.context_read_s * it.context_read
    )  # fmt: skip
    assert table.seconds(it) == pytest.approx(expected)
    assert table.seconds(it) == float(iteration_seconds(packed, it.features()))
    with plain():
        assert table.seconds(it) == pytest.approx(expected)


@given(tables(), some_iterations())
def test_even_contexts_have_no_skew_and_uneven_ones_cost_no_less(table: EngineTable, it: Iteration) -> None:
    straight = replace(table, skew=0.0, skews=None)
    assert table.seconds(it) >= straight.seconds(it) * (1 - 1e-12)
    even = replace(it, context_max=it.mean_context, context_min=it.mean_context)
    assert table.seconds(even) == pytest.approx(straight.seconds(even))


def test_skews_are_matched_by_bins_and_what_lies_outside_takes_the_default() -> None:
    edges = [np.array(edge, float) for edge in ([0, 32], [4, 8], [0.5, 1.0], [100, 200], [0, 64])]
    shares = 1.0 + np.arange(32.0).reshape(2, 2, 2, 2, 2)
    skews = Skews(chunks=edges[0], decodes=edges[1], spread=edges[2], longest=edges[3], prefix=edges[4], shares=shares)  # type: ignore[arg-type]
    packed = EngineTable(skew=0.25, skews=skews).packed()

    def share(chunk: int, decodes: int, spread: float, longest: float, prefix: float = 0.0) -> float:
        mean = 10 + spread * (longest - 10)
        return skew_share(packed, Iteration(
            tokens=decodes + chunk, sequences=decodes, prefill_tokens=chunk, prefix=prefix, decodes=decodes,
            context_sum=mean * decodes, context_max=longest, context_min=10,
        ).features())  # fmt: skip

    assert share(0, 3, 0.4, 99) == shares[0, 0, 0, 0, 0]
    assert share(0, 4, 0.5, 100) == shares[0, 0, 0, 0, 0], "an edge belongs to the bin below it"
    assert share(32, 5, 0.6, 101, 1) == shares[1, 1, 1, 1, 1]
    assert share(32, 5, 0.4, 150, 0) == shares[1, 1, 0, 1, 0]
    for outside in ((31, 4, 0.4, 99), (33, 4, 0.4, 99), (0, 9, 0.4, 99), (0, 4, 0.4, 201)):
        assert share(*outside) == 0.25
    assert share(0, 4, 0.4, 99, 65) == 0.25
    assert share(0, 1, 0.4, 99) == 0.0, "one sequence is even"


@given(st.integers(1, 100))
def test_tokens_are_padded_to_the_next_captured_size(tokens: int) -> None:
    sizes = np.array([1, 2, 4, 8, 64], float)
    assert padded(sizes, float(tokens)) == min((s for s in sizes if s >= tokens), default=tokens)
    assert padded(np.zeros(0), float(tokens)) == tokens


@given(tables(), st.lists(st.integers(0, 90), min_size=1, max_size=12))
def test_up_to_the_next_bend_time_is_a_straight_line(table: EngineTable, contexts: list[int]) -> None:
    packed, number = table.packed(), len(contexts)

    def seconds(step: int) -> float:
        total = sum(contexts) + step * number
        return table.seconds(Iteration(
            tokens=number, sequences=number, decodes=number, context_sum=total, context_max=max(contexts) + step,
            context_min=min(contexts) + step, token_context=total + number, context_read=total + number,
        ))  # fmt: skip

    steps = steps_to_bend(packed, sum(contexts) / number, float(max(contexts)))
    assert steps >= 1
    times = [seconds(step) for step in range(min(steps, 100))]
    np.testing.assert_allclose(times, np.linspace(times[0], times[-1], len(times)), rtol=1e-9)


def test_bends_are_where_mean_and_longest_meet_a_knot() -> None:
    packed = EngineTable(context_grid=np.array([10.0, 20.0, 30.0]), attention_seconds=np.ones((1, 1, 1, 3))).packed()
    asked = {(5.0, 5.0): 6, (10.0, 10.0): 1, (10.5, 20.0): 1, (11.0, 12.0): 9, (12.5, 31.0): 8}
    assert {at: steps_to_bend(packed, *at) for at in asked} == asked
    assert steps_to_bend(packed, 31.0, 40.0) > 10**12


MEASURED = four(
    (np.array([0.0, 64]), np.array([0.0, 100]), np.array([0.0, 8]), np.array([0.0, 1000])),
    np.ones((2, 2, 2, 2)), token_grid=np.array([1.0, 100]), token_seconds=np.ones(2),
    sequence_grid=np.array([1.0, 20]), sequence_seconds=np.ones(2), measured=True,
)  # fmt: skip
INSIDE = Iteration(tokens=72, sequences=9, prefill_tokens=64, prefix=100, decodes=8, context_sum=8000, context_max=1e9)


def test_what_was_measured_is_covered_and_a_percent_more() -> None:
    assert MEASURED.covers(INSIDE) and MEASURED.covers(replace(INSIDE, tokens=101))
    assert not replace(MEASURED, measured=False).covers(INSIDE)
    beyond = [{"tokens": 102}, {"sequences": 21}, {"prefill_tokens": 65}, {"prefix": 102}, {"decodes": 9},
              {"context_sum": 8100}]  # fmt: skip
    assert not any(MEASURED.covers(replace(INSIDE, **{"context_sum": 8000, **change})) for change in beyond)
    limited = replace(MEASURED, most_pairs=1000.0, most_read=500.0)
    for pairs, read, inside in ((1000, 500, True), (1020, 500, False), (1000, 510, False)):
        assert limited.covers(replace(INSIDE, token_context=pairs, context_read=read)) == inside
    flat = EngineTable(step_s=1.0, measured=True)
    assert flat.covers(INSIDE), "an axis of one point does not matter"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_grid": np.array([2.0, 1.0]), "token_seconds": np.ones(2)}, "token_grid is not a rising"),
        ({"context_grid": np.zeros(0)}, "context_grid is not a rising"),
        ({"chunk_grid": np.array([1.0, 1.0])}, "chunk_grid is not a rising"),
        ({"prefix_grid": np.zeros((1, 1))}, "prefix_grid is not a rising"),
        ({"decode_grid": np.array([1.0, 2.0])}, r"attention_seconds has shape \(1, 1, 1, 1\)"),
        ({"sequence_seconds": np.ones(2)}, "not as long as its axis"),
        ({"token_seconds": np.array([-1.0])}, "token_seconds holds a number"),
        ({"attention_seconds": np.full((1, 1, 1, 1), np.nan)}, "attention_seconds holds a number"),
        ({"step_s": float("inf")}, "step_s holds a number"),
        ({"context_read_s": -1e-9}, "context_read_s holds a number"),
        ({"capture_sizes": np.array([np.nan])}, "capture_sizes holds a number"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_tables_that_contradict_themselves_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineTable(**changes)
