"""Weights out of the memory of those who have them: who is asked, in which order, and what is refused."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from executor import holding
from executor.fetching import FromMemory
from executor.holding import Blob, Gone, Granted, Holder
from executor.workers import HOST
from lab.copies import Copies, Place, Source
from lab.policies.weight_sync import WeightsReady

HERE = Place("a", "train/0")


def blob(version: int, since: int | None = None) -> Blob:
    return Blob(version=version, digest=f"d{version}", data=bytes([version % 256]) * 5_000_000, since=since)


@pytest.fixture
def trainer() -> Iterator[Holder]:
    found = Holder(HOST, "trainer")
    yield found
    found.close()


def published(trainer: Holder, version: int, *, tree: bool = False, since: int | None = None, above: int = -1) -> None:
    ready = WeightsReady(version=version, place=trainer.address, digest=f"d{version}")
    origin = Source(place=HERE, name="trainer", ends=(trainer.address,))
    trainer.publish(ready, [blob(version, since)], Copies(origin, tree), above)


def test_the_latest_version_is_told_and_its_bytes_come(trainer: Holder) -> None:
    assert holding.latest(trainer.address) is None
    published(trainer, 3)
    assert holding.latest(trainer.address) == WeightsReady(version=3, place=trainer.address, digest="d3")
    (found,) = holding.fetch(trainer.address, 3, held=0)
    assert bytes(found.data) == blob(3).data and found.digest == "d3"


def test_versions_that_all_engines_have_are_let_go(trainer: Holder) -> None:
    for version in (1, 2, 3):
        published(trainer, version, above=version - 2)
    assert holding.fetch(trainer.address, 2, held=1)
    with pytest.raises(Gone, match="no version 1"):
        holding.fetch(trainer.address, 1, held=0)


def test_changes_since_a_version_come_in_order_and_never_with_a_gap(trainer: Holder) -> None:
    for version in (1, 2, 3):
        published(trainer, version, since=version - 1, above=0 if version < 3 else 1)
    assert [one.version for one in holding.fetch(trainer.address, 3, held=1)] == [2, 3]
    with pytest.raises(Gone, match="changed from version 0 to 3"):
        holding.fetch(trainer.address, 3, held=0)


def test_the_whole_comes_where_changes_do_not_help() -> None:
    trainer = Holder(HOST, "trainer", lambda: Blob(version=3, digest="whole", data=b"w"))
    published(trainer, 3, since=2)
    assert [one.digest for one in holding.fetch(trainer.address, 3, held=0)] == ["whole"]
    trainer.close()


def test_whoever_has_them_gives_them_on_to_one_at_a_time(trainer: Holder) -> None:
    """Eight engines: one fetches from the trainer first, and the number of those who give doubles round by round."""
    published(trainer, 1, tree=True)
    engines = [Holder(HOST, f"engine {i}") for i in range(8)]
    serving, worst, lock = dict[str, int](), dict[str, int](), threading.Lock()
    sources: list[str] = []

    def engine(i: int) -> None:
        with holding.turn(trainer.address, HERE, f"engine {i}") as granted:
            with lock:
                serving[granted.source] = serving.get(granted.source, 0) + 1
                worst[granted.source] = max(worst.get(granted.source, 0), serving[granted.source])
                sources.append(granted.source)
            blobs = holding.fetch(granted.address, 1, held=0)
            engines[i].keep(blobs)
            with lock:
                serving[granted.source] -= 1
            granted.holds = engines[i].address

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(engine, range(8)))
    assert set(worst.values()) == {1}
    assert sources[0] == "trainer" and len(set(sources)) > 2
    for one in engines:
        assert bytes(holding.fetch(one.address, 1, held=0)[0].data) == blob(1).data
        one.close()


def test_an_engine_that_goes_away_in_its_turn_makes_room(trainer: Holder) -> None:
    published(trainer, 1, tree=True)
    with pytest.raises(RuntimeError, match="died"), holding.turn(trainer.address, HERE, "first"):
        raise RuntimeError("died")
    with holding.turn(trainer.address, HERE, "second") as granted:
        assert granted.source == "trainer"


def test_where_an_engine_is_gone_the_trainer_gives_them(trainer: Holder) -> None:
    published(trainer, 1, tree=True)
    engine = Holder(HOST, "engine 0")
    engine.close()
    assert trainer.ready is not None
    granted = Granted(ready=trainer.ready, source="engine 0", address=engine.address)
    found = FromMemory(trainer.address, "engine 1", HERE, None).fetch(granted, held=0)
    assert found.source == "trainer" and bytes(found.blobs[0].data) == blob(1).data


def test_a_holder_that_is_no_more_is_named(trainer: Holder) -> None:
    other = Holder(HOST, "other")
    other.close()
    with pytest.raises(OSError):
        holding.fetch(other.address, 1, held=0)
