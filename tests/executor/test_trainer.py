"""Real trainers: what their spans and columns say, however a step is packed, sharded and spread over ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.scenario import Scenario
from lab.timeline import Span
from tests.executor.ranks import Ranks
from tests.executor.test_ranks import MINIBATCH, NUMBER, samples, scenario_of, trainer_of

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two:
        yield {1: one, 2: two}


def updated(rank: int, world: int, chosen: Scenario, role: str) -> list[Span]:
    """The spans of one step on `samples`."""
    spans: list[Span] = trainer_of(rank, world, chosen, role).update(0, samples(0))["spans"]
    return spans


def count(spans: list[Span], op: str) -> int:
    return sum(span.op == op for span in spans)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 2)])
def test_every_rank_has_a_span_for_each_of_its_ops(
    fleets: dict[int, Ranks], scenario: Make, ranks: int, stage: int
) -> None:
    minibatches = NUMBER // MINIBATCH
    found = fleets[ranks].run(updated, scenario_of(scenario, ranks, stage), "actor")
    for spans in found:
        assert count(spans, "grad_sync") == (minibatches if ranks > 1 and stage < 2 else 0)
        assert count(spans, "optimizer") == minibatches
        assert count(spans, "forward") == count(spans, "backward")
    assert len({count(spans, "forward") for spans in found}) == 1, "ranks make equally many passes"
    tokens = sum(span.tokens for spans in found for span in spans if span.op == "forward")
    assert tokens == sum(samples(0).lengths)


@pytest.mark.parametrize(("limit", "passes"), [({"microbatch_tokens": 4096}, 2), ({"microbatch_samples": 2}, 4)])
@pytest.mark.parametrize("pack", ["padded", "packed"])
def test_limits_of_a_micro_batch_decide_the_passes(
    fleets: dict[int, Ranks], scenario: Make, limit: dict[str, int], passes: int, pack: str
) -> None:
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": None, "pack": pack} | limit
    (spans,) = fleets[1].run(updated, scenario_of(scenario, update=update), "actor")
    assert count(spans, "forward") == passes


def read(rank: int, world: int, chosen: Scenario) -> dict[int, Any]:
    values, _ = trainer_of(rank, world, chosen, "critic").values(0, samples(0))
    found: dict[int, Any] = values["values"]
    return found


def test_critic_ranks_cover_all_values_once(fleets: dict[int, Ranks], scenario: Make) -> None:
    one, other = fleets[2].run(read, scenario_of(scenario, ranks=2))
    assert not set(one) & set(other)
    assert sorted(one | other) == list(range(NUMBER))
    assert [len((one | other)[i]) for i in range(NUMBER)] == [len(row) for row in samples(0).logprobs]
