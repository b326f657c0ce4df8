"""Weights on their way from a network under training into a real engine, in this process: every way, every trigger."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.inference import Request
from executor.lora import add_adapters
from executor.network import build_actor, save
from executor.offering import Offering
from executor.origin import origin
from executor.publishing import LATEST, MANIFEST, Offered, fetches, version_name
from executor.receiving import Absent, Receiver
from executor.recorder import Recorder
from executor.transformers_engine import TransformersBackend
from executor.workers import HOST, free_port
from lab.policies.weight_sync import WeightsReady
from lab.scenario import Scenario
from lab.timeline import Span
from tests.executor.trained import Trained

Make = Callable[..., Scenario]
CLOSE = 1e-3
ENGINE = {"pool": "all", "backend": "transformers"}
WAYS: dict[str, dict[str, Any]] = {
    "push": {},
    "push, tree": {"topology": "tree"},
    "event, memory": {"trigger": "event"},
    "event, memory of the trainer alone": {"trigger": "event", "topology": "flat"},
    "event, store": {"trigger": "event", "transport": "store"},
    "event, store of all": {"trigger": "event", "transport": "store", "topology": "flat"},
    "pull, memory": {"trigger": "pull", "every": 0.05},
    "pull, store": {"trigger": "pull", "every": 0.05, "transport": "store"},
}
PAYLOADS: dict[str, dict[str, Any]] = {
    "full": {},
    "delta": {"payload": "delta", "delta_share": 0.5},
    "int8": {"payload": "int8"},
}


@dataclass
class Pair:
    """A trainer's rank and the engines of a scenario."""

    scenario: Scenario
    trained: Trained
    offering: Offering
    backends: list[TransformersBackend]
    receivers: list[Receiver]
    recorders: list[Recorder]
    pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)

    def publish(self, version: int, acknowledged: int = 0) -> list[dict[str, Any]]:
        """A version goes to all engines; returns what they note."""
        if not fetches(self.scenario):
            ready = Offered(ready=WeightsReady(version=version, place="trainer", digest=""))
            sending = self.pool.submit(self.offering.push, self.trained)  # type: ignore[arg-type]
            found = self.taken(ready)
            sending.result()
            return found
        return self.taken(self.offering.offer(version, acknowledged, self.trained))  # type: ignore[arg-type]

    def taken(self, offered: Offered) -> list[dict[str, Any]]:
        def one(i: int) -> dict[str, Any]:
            receiver = self.receivers[i]
            receiver.hear(offered)
            while receiver.due(0, time.monotonic()) != "load":
                time.sleep(receiver.next_news_s(time.monotonic()) or 0.001)
            return receiver.load(self.backends[i], self.recorders[i])

        return list(self.pool.map(one, range(len(self.receivers))))

    def gap(self, engine: int = 0) -> float:
        """max |log-prob of the engine - log-prob of the network| over a few fresh tokens."""
        requests = [Request(prompt_index=i, prompt=[1, 5 + i, 7], num_tokens=6, seed=i) for i in range(3)]
        worst = 0.0
        for progress in self.backends[engine].generate(requests):
            for ended in progress.ended:
                ids = torch.tensor([*requests[ended.index].prompt, *ended.tokens])
                with torch.no_grad():
                    logits = self.trained.network(input_ids=ids[None]).logits[0, 2:-1]
                ours = torch.log_softmax(logits, -1).gather(1, ids[3:, None])[:, 0]
                worst = max(worst, float((ours - torch.from_numpy(ended.logprobs)).abs().max()))
        return worst

    def spans(self, engine: int = 0) -> list[Span]:
        return self.recorders[engine].take()

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.offering.close()
        self.pool.shutdown()


@pytest.fixture
def pairs(scenario: Make, tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """pairs(weight_sync, engines=1, **changes of the scenario)."""
    made: list[Pair] = []

    def make(sync: dict[str, Any], engines: int = 1, **changes: Any) -> Pair:
        place = {"actor.generate": [ENGINE | {"engines": engines}]}
        chosen = scenario("quickstart", weight_sync=sync, place=place, **changes)
        made.append(pair_of(chosen, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pair_of(chosen: Scenario, folder: Path) -> Pair:
    network, lora = build_actor(*origin(chosen, "actor")), chosen.model("actor").lora
    save(network, folder / "actor")
    trained, team = Trained(network, lora), chosen.team("actor", "generate")
    if lora is not None:
        add_adapters(network, lora, seed=3)
    backends = [TransformersBackend(chosen, worker, folder / "actor") for worker in team]
    receivers = [Receiver(chosen, worker, i) for i, worker in enumerate(team)]
    offering = Offering(chosen, 0, 1, Recorder("trainer", "all"))
    pair = Pair(chosen, trained, offering, backends, receivers, [Recorder(worker.name, "all") for worker in team])
    port, ends = free_port(), 1 + len(team)
    if not fetches(chosen) or lora is not None or chosen.weight_sync.payload == "delta":
        meeting = pair.pool.submit(offering.meet, HOST, port, ends, trained)  # type: ignore[arg-type]
        met = receivers if fetches(chosen) else backends
        joining = [
            pair.pool.submit(one.meet if fetches(chosen) else one.connect, HOST, port, 1 + i, ends)  # type: ignore[attr-defined]
            for i, one in enumerate(met)
        ]
        for each in (meeting, *joining):
            each.result()
    if fetches(chosen):
        (folder / "weights").mkdir(exist_ok=True)
        board = offering.open(HOST, folder / "weights")
        for receiver in receivers:
            receiver.look_at(board, HOST)
    return pair


@pytest.mark.parametrize(
    ("way", "payload"),
    [(way, "full") for way in WAYS]
    + [(way, part) for way in ("push", "event, memory", "pull, store") for part in ("delta", "int8")],
)
def test_engines_answer_with_the_new_weights(pairs: Callable[..., Pair], way: str, payload: str) -> None:
    pair = pairs(WAYS[way] | PAYLOADS[payload], engines=2)
    close = 0.3 if payload == "int8" else CLOSE
    for version in (1, 2):
        pair.trained.change(version)
        assert pair.gap() > close, "they differ before"
        pair.publish(version, version - 1)
        for engine, receiver in enumerate(pair.receivers):
            assert receiver.held == version
            assert pair.gap(engine) < close
    ops = {"full": ["transfer"], "delta": ["transfer", "apply"], "int8": ["transfer", "convert"]}[payload]
    for engine in range(2):
        spans = pair.spans(engine)
        assert [span.op for span in spans if span.op] == 2 * ops
        assert [(span.span_id.rsplit("/", 1)[0], span.policy_version) for span in spans if not span.op] == [
            (f"weight_sync/{version - 1}", version) for version in (1, 2)
        ]


@pytest.mark.parametrize("way", ["push", "event, memory", "pull, store"])
def test_adapters_travel_alone(pairs: Callable[..., Pair], way: str) -> None:
    pair = pairs(WAYS[way], models={"actor": {"arch": "tiny-llama", "dtype": "float32", "lora": {"rank": 4}}})
    pair.trained.change(1)
    pair.publish(1)
    assert pair.gap() < CLOSE
    trainer = pair.offering._recorder
    assert not trainer.take(), "ops are recorded inside a stage alone"


def test_an_engine_that_missed_versions_takes_all_changes_at_once(pairs: Callable[..., Pair]) -> None:
    for transport in ("nccl", "store"):
        pair = pairs({"trigger": "event", "transport": transport} | PAYLOADS["delta"])
        for version in (1, 2, 3):
            pair.trained.change(version)
            offered = pair.offering.offer(version, 0, pair.trained)  # type: ignore[arg-type]
        pair.taken(offered)
        assert pair.receivers[0].held == 3
        assert pair.gap() < CLOSE


@pytest.mark.parametrize("transport", ["nccl", "store"])
def test_changes_after_a_run_has_come_back_are_those_since_the_beginning(
    pairs: Callable[..., Pair], transport: str
) -> None:
    """A trainer that was restored offers a late version first, and engines have what they were built with."""
    pair = pairs({"trigger": "event", "transport": transport} | PAYLOADS["delta"])
    for version in (5, 6):
        pair.trained.change(version)
        pair.publish(version)
        assert pair.receivers[0].held == version and pair.gap() < CLOSE


def test_a_damaged_file_is_refused_and_fetched_again(pairs: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pairs({"trigger": "event", "transport": "store"})
    pair.trained.change(1)
    offered = pair.offering.offer(1, 0, pair.trained)  # type: ignore[arg-type]
    file = tmp_path / "weights" / version_name(1) / "part-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    receiver, backend = pair.receivers[0], pair.backends[0]
    receiver.hear(offered)
    with pytest.raises(RuntimeError, match="another digest than was published"):
        receiver.load(backend, pair.recorders[0])
    assert receiver.held == 0
    file.write_bytes(whole)
    assert "refused" not in receiver.load(backend, pair.recorders[0])
    assert pair.gap() < CLOSE


def test_a_manifest_that_was_not_published_is_refused(pairs: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pairs({"trigger": "event", "transport": "store"})
    offered = pair.offering.offer(1, 0, pair.trained)  # type: ignore[arg-type]
    path = tmp_path / "weights" / version_name(1) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"since": 0}))
    pair.receivers[0].hear(offered)
    with pytest.raises(RuntimeError, match="is not what was published"):
        pair.receivers[0].load(pair.backends[0], pair.recorders[0])


def test_changes_go_once_all_have_them_and_whole_weights_once_they_were_overtaken(
    pairs: Callable[..., Pair], tmp_path: Path
) -> None:
    for payload, kept in (("delta", [2, 3, 4]), ("full", [3, 4])):
        pair = pairs({"trigger": "event", "transport": "store"} | PAYLOADS[payload])
        for version, acknowledged in ((1, 0), (2, 0), (3, 1), (4, 1)):
            pair.trained.change(version)
            pair.offering.offer(version, acknowledged, pair.trained)  # type: ignore[arg-type]
        found = sorted(path.name for path in (tmp_path / "weights").iterdir())
        assert found == [LATEST, *(version_name(version) for version in kept)]


def test_an_engine_drains_first_and_loads_at_once_where_samples_may_mix(pairs: Callable[..., Pair]) -> None:
    pair = pairs({"trigger": "event"})
    receiver, now = pair.receivers[0], time.monotonic()
    assert receiver.due(2, now) == "none"
    receiver.hear(pair.offering.offer(1, 0, pair.trained))  # type: ignore[arg-type]
    assert receiver.due(2, now) == "drain" and receiver.due(0, now) == "load"


def test_an_engine_that_pulls_sees_nothing_before_its_look(pairs: Callable[..., Pair]) -> None:
    """Looks of two engines are half a period apart."""
    pair = pairs({"trigger": "pull", "every": 1000.0}, engines=2)
    pair.publish_later = pair.offering.offer(1, 0, pair.trained)  # type: ignore[attr-defined, arg-type]
    now = time.monotonic()
    for receiver, look in zip(pair.receivers, (1000.0, 500.0), strict=True):
        receiver.hear(pair.publish_later)  # type: ignore[attr-defined]
        assert receiver.due(0, now) == "none"
        assert receiver.next_news_s(now) == pytest.approx(look, abs=1.0)
        assert receiver.due(0, now + look + 1) == "load"


def test_who_is_late_gives_up_and_keeps_what_it_has(pairs: Callable[..., Pair]) -> None:
    pair = pairs({"trigger": "event", "barrier_timeout": 0.5})
    receiver, backend, recorder = pair.receivers[0], pair.backends[0], pair.recorders[0]
    assert pair.gap() < CLOSE
    offered = pair.offering.offer(1, 0, pair.trained)  # type: ignore[arg-type]
    late = Offered(ready=offered.ready, at_s=time.time() - 60)
    with pytest.raises(Absent):
        receiver.take_part(backend, recorder, 1, late, 0.5)
    assert receiver.held == 0 and not recorder.take()
    with pytest.raises(Absent):
        receiver.load(backend, recorder, until=time.time())
    assert receiver.held == 0
    (span,) = (span for span in recorder.take() if not span.op)
    assert span.attrs["absent"] is True
    receiver.take_part(backend, recorder, 1, offered, 60.0)
    assert receiver.held == 1
