"""Scoring sample by sample: a desk beside the engines gives what scoring a whole step gives, whenever samples come."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.experience import Samples
from executor.kept import Kept
from executor.recorder import Recorder
from executor.rewards import RewardFailed
from executor.services import Columns, Desk, added
from lab.policies.scoring import Batching
from lab.services import ScoreCache
from lab.timeline import Span
from tests.executor.judged import samples

PATIENCE_S = 30.0


def reading(rows: Samples, notes: dict[str, Any]) -> Columns:
    """Numbers and a list, which depend on each sample alone."""
    notes |= {"samples": len(rows), "tokens": sum(rows.lengths), "quantities": {"calls": 1.0}}
    return {
        "rewards": np.asarray([float(row.sum()) for row in rows.tokens]),
        "each": [row[12:] * 2 for row in rows.tokens],
    }


def desk(score: Callable[..., Columns] = reading, num_servers: int = 1, **rule: Any) -> tuple[Desk, Recorder]:
    recorder = Recorder("reward.score[0]", "all")
    return Desk("reward", recorder, Batching(**({"max_samples": 4} | rule)), score, num_servers), recorder


def equal(first: Columns, second: Columns) -> bool:
    same = all((a == b).all() for a, b in zip(first["each"], second["each"], strict=True))
    return first.keys() == second.keys() and first["rewards"].tolist() == second["rewards"].tolist() and same


def stage_of(recorder: Recorder) -> tuple[Span, list[Span]]:
    spans = recorder.take()
    (stage,) = [span for span in spans if not span.op]
    return stage, [span for span in spans if span.op]


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(12)), st.sets(st.integers(1, 11), max_size=4), st.integers(1, 5), st.sampled_from([1, 3]))
def test_the_order_and_the_batches_in_which_samples_come_change_nothing(
    order: list[int], cuts: set[int], most: int, num_servers: int
) -> None:
    rows = samples(12, per_prompt=3)
    served, recorder = desk(num_servers=num_servers, max_samples=most)
    served.open(0, 7)
    for part in np.split(np.asarray(order), sorted(cuts)):
        served.submit(0, rows.take(part))
    assert equal(served.collect(0, rows), reading(rows, {}))
    stage, _ = stage_of(recorder)
    assert (stage.stage, stage.step, stage.policy_version) == ("reward", 0, 7)
    assert (stage.attrs["samples"], stage.tokens, stage.attrs["ahead"]) == (12, sum(rows.lengths), 12)
    assert -(-12 // most) <= stage.attrs["batches"] == stage.attrs["quantities"]["calls"] <= 12


@pytest.mark.parametrize("handed_in", [0, 5, 9])
def test_what_was_not_handed_in_is_scored_when_all_is_collected(handed_in: int) -> None:
    rows = samples(9)
    served, recorder = desk()
    served.open(0, 0)
    served.submit(0, rows.take(range(handed_in)))
    assert equal(served.collect(0, rows), reading(rows, {}))
    assert stage_of(recorder)[0].attrs["ahead"] == handed_in


def test_samples_are_scored_before_they_are_collected() -> None:
    """A full batch leaves while others are still generated; its scores are there before the last sample has come."""
    rows, seen = samples(6), threading.Event()

    def told(batch: Samples, notes: dict[str, Any]) -> Columns:
        seen.set()
        return reading(batch, notes)

    served, recorder = desk(told, max_wait_s=PATIENCE_S)
    served.open(0, 0)
    served.submit(0, rows.take(range(3)))
    assert not seen.wait(0.05), "three of four samples wait for a fourth"
    served.submit(0, rows.take([3]))
    assert seen.wait(PATIENCE_S)
    assert equal(served.collect(0, rows), reading(rows, {}))
    stage, ops = stage_of(recorder)
    assert stage.attrs["batches"] == 2
    assert {op.op for op in ops} == {"sample_wait"} and stage.start_s <= ops[0].start_s <= ops[-1].end_s <= stage.end_s


def test_a_batch_that_is_not_full_leaves_when_its_first_sample_has_waited() -> None:
    done = threading.Event()

    def told(batch: Samples, notes: dict[str, Any]) -> Columns:
        done.set()
        return reading(batch, notes)

    rows = samples(2)
    served, _ = desk(told, max_samples=50, max_wait_s=0.05)
    served.open(0, 0)
    start = time.monotonic()
    served.submit(0, rows)
    assert done.wait(PATIENCE_S) and time.monotonic() - start >= 0.05
    served.collect(0, rows)


def test_samples_of_the_next_step_wait_for_their_turn() -> None:
    first, second = samples(5), samples(5, step=1, seed=1)
    served, recorder = desk()
    served.open(0, 0)
    served.submit(1, second.take(range(4)))
    served.submit(0, first)
    assert equal(served.collect(0, first), reading(first, {}))
    served.open(1, 0)
    served.submit(0, first)  # late: nobody asks for it any more
    assert equal(served.collect(1, second), reading(second, {}))
    stages = [span for span in recorder.take() if not span.op]
    assert [(span.step, span.attrs["samples"]) for span in stages] == [(0, 5), (1, 5)]
    assert stages[0].end_s <= stages[1].start_s


def test_so_many_batches_are_under_way_and_no_more() -> None:
    together, lock, inside, most = threading.Barrier(2), threading.Lock(), [0], [0]

    def slow(batch: Samples, notes: dict[str, Any]) -> Columns:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        together.wait(PATIENCE_S)
        with lock:
            inside[0] -= 1
        return reading(batch, notes)

    rows = samples(8)
    served, _ = desk(slow, num_servers=2, max_samples=1)
    served.open(0, 0)
    served.submit(0, rows)
    assert equal(served.collect(0, rows), reading(rows, {}))
    assert most == [2]


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_failure_is_told_to_whoever_collects_and_ends_the_step(num_servers: int) -> None:
    def fails(batch: Samples, notes: dict[str, Any]) -> Columns:
        if 5 in batch.prompts:
            raise RewardFailed("the fifth is wrong")
        return reading(batch, notes)

    rows = samples(9)
    served, _ = desk(fails, num_servers=num_servers, max_samples=2)
    served.open(0, 0)
    served.submit(0, rows)
    with pytest.raises(RewardFailed, match="the fifth is wrong"):
        served.collect(0, rows)


def test_batches_with_other_components_are_told() -> None:
    def changing(batch: Samples, notes: dict[str, Any]) -> Columns:
        extra = {"reward_b": np.zeros(len(batch))} if 5 in batch.prompts else {}
        return {"rewards": np.zeros(len(batch))} | extra

    rows = samples(9)
    served, _ = desk(changing, max_samples=1)
    served.open(0, 0)
    with pytest.raises(RewardFailed, match="rewards; then reward_b, rewards"):
        served.collect(0, rows)


def test_counts_add() -> None:
    assert added({"a": 1, "q": {"x": 1.0}}, {"a": 2, "b": 3, "q": {"x": 2.0, "y": 1.0}}) == {
        "a": 3, "b": 3, "q": {"x": 3.0, "y": 1.0},
    }  # fmt: skip


class Counting:
    """Scores that say how often they were computed."""

    def __init__(self) -> None:
        self.scored: list[int] = []

    def __call__(self, rows: Samples, notes: dict[str, Any]) -> Columns:
        self.scored.append(len(rows))
        notes |= {"samples": len(rows), "tokens": sum(rows.lengths)}
        sums = np.asarray([float(row.sum()) for row in rows.tokens])
        return {"rewards": sums + 0.1, "reward_sum": sums, "reward_rest": np.full(len(rows), 0.1)}


def kept(**settings: Any) -> tuple[Kept, Counting]:
    inner = Counting()
    capacity = settings.pop("capacity", 100)
    return Kept(inner, ScoreCache.model_validate({"hit_share": 0.5} | settings), capacity), inner


def test_what_is_known_is_not_scored_again_and_scores_the_same_to_the_bit() -> None:
    cached, inner = kept()
    rows = samples(8)
    first = cached.score(rows, notes := {})
    assert (notes["hits"], inner.scored) == (0, [8])
    again = cached.score(rows.take([7, 3, 0]), notes := {})
    assert (notes["hits"], notes["samples"], inner.scored) == (3, 3, [8])
    fresh = Counting()(rows, {})
    assert {name: column.tolist() for name, column in first.items()} == {n: c.tolist() for n, c in fresh.items()}
    assert {n: c.tolist() for n, c in again.items()} == {n: c[[7, 3, 0]].tolist() for n, c in fresh.items()}


def test_equal_samples_of_one_call_are_scored_once() -> None:
    cached, inner = kept()
    columns = cached.score(samples(4).take([0, 1, 0, 2, 1]), notes := {})
    assert (notes["hits"], inner.scored) == (2, [3])
    assert columns["rewards"][0] == columns["rewards"][2] and columns["rewards"][1] == columns["rewards"][4]


def test_where_the_prompt_ends_is_part_of_what_is_known() -> None:
    from dataclasses import replace

    cached, inner = kept()
    rows = samples(2)
    cached.score(rows, {})
    cached.score(replace(rows, num_prompt_tokens=rows.num_prompt_tokens - 1), notes := {})
    assert (notes["hits"], inner.scored) == (0, [2, 2])


def test_a_new_version_forgets_everything() -> None:
    from dataclasses import replace

    cached, inner = kept(version_steps=2)
    rows = samples(3)
    hits = []
    for step in range(5):
        cached.score(replace(rows, step=step), notes := {})
        hits.append(notes["hits"])
    assert hits == [0, 3, 0, 3, 0] and inner.scored == [3, 3, 3]


def test_the_oldest_are_forgotten_first() -> None:
    cached, _ = kept(capacity=4)
    rows = samples(6)
    cached.score(rows, {})
    cached.score(rows.take([2, 3, 4, 5]), notes := {})
    assert notes["hits"] == 4
    cached.score(rows.take([0, 1]), notes := {})
    assert notes["hits"] == 0
