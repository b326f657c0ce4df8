"""Real trainers: what their spans and columns say, however a step is packed, sharded and spread over ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.fetching import FromStore
from executor.payload import opened
from executor.workers import HOST
from lab.scenario import Scenario
from lab.timeline import Span
from tests.executor.ranks import Ranks
from tests.executor.test_ranks import MINIBATCH, NUMBER, samples, scenario_of, trainer_of, weights_of

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


def published(rank: int, world: int, chosen: Scenario, folder: Path) -> tuple[dict[str, Any], list[Span]]:
    """The weights after a step, which every rank has left where engines fetch them, and the spans of that."""
    trainer = trainer_of(rank, world, chosen, "actor")
    trainer.open_weights(HOST, folder)
    trainer.update(0, samples(0))
    trainer.offer_weights(0, 0)
    spans: list[Span] = trainer.weights_published(["late"])["spans"]
    weights = weights_of(trainer)
    trainer.offering.close()
    return weights, spans


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_write_a_part_of_the_weights_each(
    fleets: dict[int, Ranks], scenario: Make, stage: int, tmp_path: Path
) -> None:
    sync = {"trigger": "event", "transport": "store", "topology": "flat"}
    found = fleets[2].run(published, scenario_of(scenario, 2, stage, weight_sync=sync), tmp_path)
    store = FromStore(tmp_path, "here")
    with store.turn() as turn:
        fetched = store.fetch(turn, held=0)
    parcels = [opened(blob.data, blob.digest) for blob in fetched.blobs]
    assert fetched.version == 1 and len(parcels) == 2
    sizes = [parcel.num_bytes for parcel in parcels]
    assert min(sizes) > 0.3 * sum(sizes)
    weights = {name: tensor.numpy() for parcel in parcels for name, tensor in parcel.tensors.items()}
    assert weights.keys() == found[0][0].keys()
    assert all(np.array_equal(weights[name], array) for name, array in found[0][0].items())
    for _, spans in found:
        (whole,) = (span for span in spans if not span.op)
        assert whole.span_id.startswith("weight_sync/0/") and whole.attrs["absent"] == ["late"]
        assert [span.op for span in spans if span.op] == ["upload"]


@pytest.mark.parametrize(("stage", "ops"), [(0, ["snapshot"]), (3, ["reshard", "snapshot"])])
def test_shards_are_gathered_before_the_first_rank_offers_them(
    fleets: dict[int, Ranks], scenario: Make, stage: int, ops: list[str], tmp_path: Path
) -> None:
    chosen = scenario_of(scenario, 2, stage, weight_sync={"trigger": "event", "topology": "flat"})
    found = fleets[2].run(published, chosen, tmp_path)
    assert [span.op for span in found[0][1] if span.op] == ops
    assert [span.op for span in found[1][1] if span.op] == ops[:-1]
