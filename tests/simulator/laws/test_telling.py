"""What a timeline tells of costs and of many small things told as one: nothing is left out, and what was guessed is marked."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.scenario import Scenario
from lab.timeline import Span
from profiles.formula import FORMULAS, terms
from profiles.profile import OpProfile, Profile, Range
from simulator import generating, microbatches, producing
from simulator.world import Lane
from tests.plays import Played, play
from tests.strategies import on_cores, on_gpus

WAITS = frozenset({"sample_wait", "write_wait"})
"""ops in which a worker does nothing"""


@given(st.one_of(on_gpus(), on_cores()))
@settings(max_examples=15)
def test_what_comes_from_a_datasheet_is_marked(chosen: Scenario) -> None:
    played = play(chosen)
    assert {span.op for span in played.timeline.spans if span.op and not span.attrs.get("extrapolated")} <= WAITS
    said = played.timeline.header.profiles.values()
    assert {told["extrapolated_share"] for told in said if told["kind"] == "datasheet"} <= {0.0, 1.0}


FREE = Range(low=0, high=1e30)


def measured(op: str, term: str, most: float) -> Profile:
    """Every op takes a millisecond; one term of one op was measured up to a limit only."""
    ranges = {name: dict.fromkeys(terms, FREE) for name, terms in FORMULAS.items()}
    ranges[op][term] = Range(low=0, high=most)
    ops = {
        name: OpProfile(coefficients={"each": 0.001}, ranges=own, points=1, residual_median=0, residual_p90=0)
        for name, own in ranges.items()
    }
    return Profile(name="narrow", device="cpu-core", kind="measured", models=("tiny-llama",), ops=ops)


Asked = tuple[Span, str, Mapping[str, float]]


def asked(chosen: Scenario, profile: Profile) -> tuple[Played, list[Asked]]:
    """A run, and for every op of a lane its span, the op that its cost is of, and the quantities."""
    found, original = list[Asked](), Lane.op

    def op(lane: Lane, name: str, cost_op: str, quantities: Mapping[str, float], **notes: Any) -> Iterator[Any]:
        yield from original(lane, name, cost_op, quantities, **notes)
        found.append((lane.world.spans[-1], cost_op, dict(quantities)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "op", op)
        return play(chosen, {"cpu-core": profile}), found


@given(on_cores(), st.data())
@settings(max_examples=10)
def test_a_cost_is_marked_exactly_where_it_lies_outside_what_was_measured(
    chosen: Scenario, data: st.DataObject
) -> None:
    op = data.draw(st.sampled_from(["forward", "backward", "logprob", "optimizer"]))
    term = "parameters" if op == "optimizer" else data.draw(st.sampled_from(["linear_flops", "attention_flops"]))
    _, before = asked(chosen, measured(op, term, 1e30))
    sizes = sorted({terms(op, quantities)[term] for _, name, quantities in before if name == op})
    if not sizes:
        return
    most = data.draw(st.sampled_from(sizes)) * data.draw(st.sampled_from([0.5, 1.0]))
    played, found = asked(chosen, measured(op, term, most))
    for span, name, quantities in found:
        outside = name == op and terms(op, quantities)[term] > 1.01 * most
        assert span.attrs.get("extrapolated", False) == outside
    share = played.timeline.header.profiles["cpu-core"]["extrapolated_share"]
    assert share > 0 or not any(span.attrs.get("extrapolated") for span, *_ in found)


def totals(played: Played) -> dict[tuple[str, int, str], Counter[str]]:
    """By stage, step and worker: what its ops add up to."""
    found = defaultdict[tuple[str, int, str], Counter[str]](Counter)
    for span in played.timeline.spans:
        if span.op:
            own = found[span.stage, span.step, span.worker]
            own.update(
                tokens=span.tokens, seconds=span.seconds, bytes=span.bytes, iterations=span.attrs.get("iterations", 0)
            )
    return found


def same(one: Played, other: Played) -> None:
    """The same stages at the same times, whose ops add up to the same."""
    mine, theirs = ({span.span_id: span for span in played.stages_all()} for played in (one, other))
    assert mine.keys() == theirs.keys()
    for name, span in mine.items():
        assert (span.start_s, span.end_s) == pytest.approx((theirs[name].start_s, theirs[name].end_s), rel=1e-9)
        assert span.tokens == theirs[name].tokens and span.attrs.get("samples") == theirs[name].attrs.get("samples")
    first, second = totals(one), totals(other)
    assert first.keys() == second.keys()
    for key, told in first.items():
        assert dict(told) == pytest.approx(dict(second[key]), rel=1e-9, abs=1e-9)


@given(on_gpus(modes=("synchronous", "one_step_off")))
@settings(max_examples=12)
def test_an_engine_told_in_windows_does_what_it_does_piece_by_piece(chosen: Scenario) -> None:
    whole = play(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generating, "_whole", lambda *_: None)
        pieces = play(chosen)
    same(whole, pieces)


@given(on_gpus(modes=("asynchronous",)))
@settings(max_examples=15)
def test_an_engine_played_ahead_does_what_it_does_as_time_passes(chosen: Scenario) -> None:
    """But where a cache is forgotten."""
    forgets = chosen.weight_sync.kv == "keep" and chosen.rollout.prefix_caching
    ahead = play(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producing, "fitting", lambda *_: False)
        exact = play(chosen)
    if not forgets:
        same(ahead, exact)
        assert ahead.samples == exact.samples


@given(on_gpus())
@settings(max_examples=8)
def test_passes_told_together_are_those_told_one_by_one(chosen: Scenario) -> None:
    """Forward and backward passes of a mini-batch change places in time, and nothing else."""
    single = play(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatches, "MOST_SHOWN", 0)
        merged = play(chosen)
    assert len(merged.timeline.spans) <= len(single.timeline.spans)
    same(single, merged)
