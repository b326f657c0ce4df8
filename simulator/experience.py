"""Samples on their way from the engines to the trainer's machines: packed, sent over the network, and unpacked there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import simpy
from simpy.resources.resource import Request

from lab.experience import scored_before
from lab.fates import INDEX, PROMPT, RESPONSE, STEP
from lab.library import device as library_device
from lab.placement import Worker
from lab.workload import uniform
from profiles.experience import TRANSPORTS, Message, message
from simulator.blocks import Ints
from simulator.network import Flow, Flows
from simulator.world import Lane, Process, World

SCREENED = 31
"""stream of `lab.workload.uniform` that says which samples a pre-screening settles"""


class Sender:
    """One engine's connection to the trainer: a thread that packs, a line, and a thread there that unpacks.

    A message takes what waits, up to `experience.batch_samples`, as soon as no more than one other is packed; where samples
    are sent while others are generated, it waits for so many or for `flush`. Messages go one after the other through each
    of the three, and are in different ones at once.
    """

    def __init__(
        self, world: World, worker: Worker, arrived: Callable[[list[int]], object], whole: bool = False
    ) -> None:
        """`arrived` is told the samples of every message when they can be used at the trainer. `whole`: none leaves
        with fewer samples than it may take, before `flush`."""
        self._world, self._worker, self._arrived = world, worker, arrived
        self._target = _target(world, worker)
        said = world.scenario.experience
        self._size = None if said is None else said.batch_samples
        self._least = self._size or 1 if whole else 1
        self._packed, self._line, self._unpacker = (simpy.Resource(world.env, number) for number in (2, 1, 1))
        self._waiting: list[int] = []
        self._packing = False
        self._under_way = 0
        self._delivered = world.env.event()
        self.sent = 0.0
        """bytes so far"""
        self.raw = 0.0
        """before they were compressed"""
        self.num_messages = 0

    def put(self, samples: Sequence[int]) -> None:
        """These are to be sent."""
        self._waiting.extend(samples)
        self._under_way += len(samples)
        self._start()

    def flush(self) -> None:
        """No more come: what waits is sent."""
        self._least = 1
        self._start()

    def _start(self) -> None:
        if not self._packing and len(self._waiting) >= self._least:
            self._packing = True
            self._world.env.process(self._pack())

    def delivered(self) -> Process:
        """Ends when everything has arrived."""
        if self._under_way:
            yield self._delivered

    def _pack(self) -> Process:
        while len(self._waiting) >= self._least:
            place = self._packed.request()
            yield place
            samples, self._waiting = self._waiting[: self._size], self._waiting[len(self._waiting[: self._size]) :]
            what = self._message(samples)
            yield from self._compute(what.packing_s + self._screening_s(len(samples)))
            self._world.env.process(self._send(samples, what, place))
        self._packing = False

    def _send(self, samples: list[int], what: Message, place: Request) -> Process:
        with self._line.request() as turn:
            yield turn
            yield from self._world.network.send_all(self._flows(what.sent))
        self._packed.release(place)
        with self._unpacker.request() as turn:
            yield turn
            yield from self._compute(what.unpacking_s)
        self.sent, self.raw, self.num_messages = self.sent + what.sent, self.raw + what.raw, self.num_messages + 1
        self._under_way -= len(samples)
        self._arrived(samples)
        if not self._under_way:
            done, self._delivered = self._delivered, self._world.env.event()
            done.succeed()

    def _message(self, samples: list[int]) -> Message:
        ledger, scenario = self._world.ledger, self._world.scenario
        prompt, response = (float(ledger.column(column)[samples].sum()) for column in (PROMPT, RESPONSE))
        floats = int("reference" in self._world.dataflow.nodes and scored_before(scenario, "reference"))
        return message(scenario, len(samples), prompt + response, response, floats)

    def _screening_s(self, num_samples: int) -> float:
        said = self._world.scenario.experience
        return 0.0 if said is None or said.prescreen is None else said.prescreen.per_sample * num_samples

    def _compute(self, seconds: float) -> Process:
        """One thread of the host: it shares the cores of a machine without GPUs with the engines, and is free beside GPUs."""
        device = self._world.scenario.hardware.node_of(self._worker.devices[0]).device
        if library_device(device).kind == "gpu":
            yield self._world.env.timeout(seconds)
        else:
            yield from self._world.cores(self._worker).work(self._worker, "transfer", seconds)

    def _flows(self, size: float) -> Flows:
        """From the memory of the engine's machine to that of the trainer's, over one port of each; none inside one."""
        said, topology = self._world.scenario.experience, self._world.network.topology
        here = topology.machine(self._worker.devices[0]).name
        if here == self._target:
            return Flows.of([])
        trips = TRANSPORTS["rpc" if said is None else said.transport].trips
        path = topology.between(here, self._target, _index(self._worker))
        return Flows.of([Flow(path=path, bytes=size, num_messages=trips)])


def _target(world: World, worker: Worker) -> str:
    """The machine of the trainer that an engine sends to: they share the engines out."""
    topology, trainers = world.network.topology, world.scenario.team("actor", "train")
    machines = dict.fromkeys(topology.machine(device).name for rank in trainers for device in rank.devices)
    here = topology.machine(worker.devices[0]).name
    return here if here in machines else list(machines)[_index(worker) % len(machines)]


def _index(worker: Worker) -> int:
    """The number of an engine."""
    return int(worker.name.split("[")[1].rstrip("]"))


def transfer(world: World, step: int) -> list[Process]:
    """A step's samples are sent: after the rollout, one process for each engine that has some; or beside it."""
    if world.dataflow.streams("transfer", step):
        return [_beside(world, step)]
    found = world.ledger.by_engine(world.ledger.batches[step])
    return [_after(world, step, world.scenario.workers[name], samples) for name, samples in found.items()]


def _after(world: World, step: int, worker: Worker, samples: Ints) -> Process:
    """All that an engine has generated."""
    lane, sender = Lane(world, "transfer", step, worker), Sender(world, worker, _onward(world, step))
    sender.put(samples.tolist())
    yield from _ended(lane, sender, len(samples))


def _beside(world: World, step: int) -> Process:
    """Samples are sent as they come; the spans are of what is left to do when the rollout has ended."""
    stream, onward = world.stream("rollout", "transfer", step), _onward(world, step)
    senders, numbers = dict[str, Sender](), dict[str, int]()
    samples = yield from stream.take()
    while samples is not None:
        for name, mine in world.ledger.by_engine(np.array(samples)).items():
            sender = senders.setdefault(name, Sender(world, world.scenario.workers[name], onward, whole=True))
            sender.put(mine.tolist())
            numbers[name] = numbers.get(name, 0) + len(mine)
        samples = yield from stream.take()
    lanes = {name: Lane(world, "transfer", step, world.scenario.workers[name]) for name in senders}
    parts = [_ended(lanes[name], sender, numbers[name]) for name, sender in senders.items()]
    yield world.env.all_of([world.env.process(part) for part in parts])


def _onward(world: World, step: int) -> Callable[[list[int]], object]:
    """Whoever takes samples one by one has them when they arrive."""
    streams = world.streams("transfer", step)

    def arrived(samples: list[int]) -> None:
        for stream in streams:
            stream.put(samples)

    return arrived


def _ended(lane: Lane, sender: Sender, num_samples: int) -> Process:
    start = lane.world.now
    sender.flush()
    yield from sender.delivered()
    lane.record("send", start, extrapolated=True, bytes=sender.sent, raw_bytes=sender.raw, messages=sender.num_messages)
    lane.end(samples=num_samples)


def settled(world: World, stage: str, samples: Sequence[int] | Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which samples need no reward any more, because the pre-screening has settled them."""
    said, ledger = world.scenario.experience, world.ledger
    if stage != "reward" or said is None or said.prescreen is None:
        return np.zeros(len(samples), np.bool_)
    drawn = uniform(world.scenario.seed, SCREENED, 0, ledger.column(STEP)[samples], ledger.column(INDEX)[samples])
    return np.asarray(drawn < said.prescreen.share)


class Lines:
    """The connections of all engines that generate without a barrier."""

    def __init__(self, world: World, arrived: Callable[[list[int]], object]) -> None:
        self._world, self._arrived = world, arrived
        self._senders: dict[str, Sender] = {}

    def put(self, worker: Worker, samples: list[int]) -> None:
        """These leave an engine."""
        if worker.name not in self._senders:
            self._senders[worker.name] = Sender(self._world, worker, self._arrived)
        self._senders[worker.name].put(samples)
