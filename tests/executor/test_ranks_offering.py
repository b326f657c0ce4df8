"""Ranks that publish each a part: an engine has afterwards what the network is, whatever travels, and also who came late."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.network import build_actor, save
from executor.offering import Offering
from executor.origin import origin
from executor.publishing import needs_base
from executor.receiving import Receiver
from executor.recorder import Recorder
from executor.transformers_engine import TransformersBackend
from executor.workers import HOST, free_port
from lab.scenario import Scenario
from tests.executor.test_receiving import ENGINE, PAYLOADS
from tests.executor.trained import Trained

Make = Callable[..., Scenario]
RANKS, VERSIONS, LATE = 2, (1, 2, 3), 3
"""`LATE`: before this version an engine joins that was built with the one before"""


def rank_of(
    rank: int, chosen: Scenario, folder: Path, port: int, meetings: list[int], told: Any, published: Any
) -> None:
    """A rank that changes as the other does; it says what it offers, once it is told what is acknowledged."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=RANKS)
    offering = Offering(chosen, rank, RANKS, Recorder("trainer", "all"))
    trained: Any = Trained(build_actor(*origin(chosen, "actor")))
    published.put(offering.open(HOST, folder))
    for version in VERSIONS:
        if version in (VERSIONS[0], LATE) and needs_base(chosen):
            offering.meet(HOST, meetings.pop(0), 2, trained)
        trained.change(version)
        offered = offering.offer(version, told.get(), trained)
        published.put(offered)
    told.get()
    offering.close()
    distributed.destroy_process_group()


class Engine:
    """An engine that meets the first rank and takes what it hears of."""

    def __init__(self, chosen: Scenario, folder: Path, board: Any, port: int, version: int) -> None:
        worker = chosen.team("actor", "generate")[0]
        self.receiver, self.recorder = Receiver(chosen, worker, 0), Recorder(worker.name, "all")
        self.backend = TransformersBackend(chosen, worker, folder / "actor")
        self.receiver.enter(version)
        self.receiver.look_at(board, HOST)
        if needs_base(chosen):
            self.receiver.meet(HOST, port, 1, 2)

    def take(self, offered: Any) -> None:
        self.receiver.hear(offered)
        while self.receiver.due(0, time.monotonic()) != "load":
            threading.Event().wait(self.receiver.next_news_s(time.monotonic()) or 0.001)
        self.receiver.load(self.backend, self.recorder)

    def gap(self, network: Any) -> float:
        """max |parameter - its own|, over the largest parameter."""
        own = dict(self.backend._network.named_parameters())
        with torch.no_grad():
            return max(float((own[name] - p).abs().max() / p.abs().max()) for name, p in network.named_parameters())


@pytest.mark.parametrize(
    ("payload", "topology"),
    [
        pytest.param(payload, topology, marks=[] if (payload, topology) == ("delta", "tree") else [pytest.mark.full])
        for payload in PAYLOADS
        for topology in ("flat", "tree")
    ],
)
def test_an_engine_has_what_the_ranks_have(scenario: Make, tmp_path: Path, payload: str, topology: str) -> None:
    sync = {"trigger": "event", "transport": "store", "topology": topology} | PAYLOADS[payload]
    chosen = scenario("quickstart", weight_sync=sync, place={"actor.generate": [ENGINE]})
    network = build_actor(*origin(chosen, "actor"))
    save(network, tmp_path / "actor")
    trained, spawn = Trained(network), multiprocessing.get_context("spawn")
    told, published = [spawn.Queue() for _ in range(RANKS)], [spawn.Queue() for _ in range(RANKS)]
    meetings = [free_port(), free_port()]
    arguments = (chosen, tmp_path / "weights", free_port(), list(meetings))
    ranks = [
        spawn.Process(target=rank_of, args=(rank, *arguments, told[rank], published[rank]), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    board, _ = (one.get(timeout=120) for one in published)
    engines = [Engine(chosen, tmp_path, board, meetings[0], 0)]
    for version in VERSIONS:
        if version == LATE:
            engines.append(Engine(chosen, tmp_path, board, meetings[1], LATE - 1))
        for one in told:
            one.put(version - 1)
        offered, _ = (one.get(timeout=60) for one in published)
        trained.change(version)
        for engine in engines:
            engine.take(offered)
            assert engine.receiver.held == version
            assert engine.gap(network) <= (0.05 if payload == "int8" else 0.0)
    for one, rank in zip(told, ranks, strict=True):
        one.put(None)
        rank.join(timeout=60)
        assert rank.exitcode == 0
