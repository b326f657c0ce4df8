"""What a scenario's workers send each other and to storage, as flows on its network.

Alone on the network a transfer takes what the cost model says. Only what was not measured goes as flows: a measured
cost stays what it is, whatever else happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from lab.library import device as library_device
from lab.model import DTYPE_BYTES
from lab.placement import Worker
from profiles.moves import SYNC_TENSOR_S, num_tensors, shard_devices
from profiles.roofline import averaging
from simulator.network import Flow, Flows
from simulator.traffic import chain, flat, over_ports, paced, ring, tree
from simulator.world import Process, World


def networked(world: World, worker: Worker, op: str) -> bool:
    """Whether an op of a worker goes as flows: on GPUs, where its cost was not measured."""
    device = world.scenario.hardware.node_of(worker.devices[0]).device
    return library_device(device).kind == "gpu" and not world.costs.measured(worker, op)


def on_core(world: World, worker: Worker) -> bool:
    """Whether a worker computes on cores."""
    device = world.scenario.hardware.node_of(worker.devices[0]).device
    return library_device(device).kind == "cpu"


def loaded_bytes(world: World, worker: Worker, sent: float) -> float:
    """Bytes for which a transfer into a live engine is charged that sends so many.

    On cores nearly all of its measured time is the loading, of whole weights however they came: of 3.2 MB 23 ms, with
    0.8 MB sent of them 23 ms as well (vLLM on a core, tiny-llama). Adapters are merged, and few.
    """
    packed = world.scenario.weight_sync.payload != "full"
    return whole_bytes(world) if packed and on_core(world, worker) else sent


def whole_bytes(world: World) -> float:
    """Of all that is trained of the actor, in its dtype."""
    scenario = world.scenario
    return scenario.trainable_parameters("actor") * DTYPE_BYTES[scenario.model("actor").dtype]


def fetch_op(world: World, worker: Worker, stored: bool) -> str:
    """The op of the cost model that an engine's fetch is: out of somebody's memory or, where they are `stored`, of
    files; a core is charged for the loading, which takes longer than either."""
    return "checkpoint_read" if stored and not on_core(world, worker) else "weight_sync"


def broadcast(world: World, sender: Worker, size: float, seconds: float) -> Sequence[Flows]:
    """Rounds that bring `size` bytes of the sender's first device to every device of every engine.

    `seconds`: what a chain takes alone. Empty where no engine has a device of its own.
    """
    topology, first = world.network.topology, sender.devices[0]
    engines = world.scenario.team("actor", "generate")
    others = list(dict.fromkeys(device for engine in engines for device in engine.devices if device != first))
    if not others:
        return ()
    how = world.scenario.weight_sync.route
    if how == "tree":
        return tree(topology, first, others, size)
    if how == "flat":
        return (flat(topology, first, others, size),)
    return (paced(topology, chain(topology, [first, *others], size), seconds),)


def per_tensor(world: World, sender: Worker) -> float:
    """Seconds that the tensors of a weight sync cost one by one before their bytes go; a chain is paced with them."""
    return 0.0 if world.scenario.weight_sync.route == "chain" else tensors_s(world, sender)


def tensors_s(world: World, worker: Worker) -> float:
    """Seconds that the tensors of a model cost one by one when they are loaded, beside their bytes."""
    layout = world.costs.layout(worker)
    return SYNC_TENSOR_S[layout.device.kind] * num_tensors(layout)


def written(world: World, worker: Worker, size: float) -> Flows:
    """`size` bytes to the storage of the worker's site, an equal part from each of its devices."""
    part, topology = size / len(worker.devices), world.network.topology
    return Flows.of(Flow(path=topology.to_storage(device), bytes=part) for device in worker.devices)


def gathered(world: World, worker: Worker, size: float, seconds: float) -> Flows:
    """A ring over the devices that hold the shards of a rank's weights, `size` bytes in all; alone it takes `seconds`."""
    topology = world.network.topology
    return paced(topology, ring(topology, shard_devices(world.costs.layout(worker)), size, "all_gather"), seconds)


def fetched(world: World, source: tuple[str, ...] | str, worker: Worker, size: float) -> Flows:
    """`size` bytes to a worker, to each of its devices the part that it keeps.

    `source`: devices or a machine's memory that have the whole, of which each serves its like; or the site of a store.
    """
    topology, part = world.network.topology, size / len(worker.devices)
    if isinstance(source, str):
        return Flows.of(Flow(path=topology.from_storage(device, source), bytes=part) for device in worker.devices)
    hops = [(source[i % len(source)], device) for i, device in enumerate(worker.devices)]
    return Flows.of(flow for hop in hops for flow in over_ports(topology, hop, part))


class Gradients:
    """The gradients of a team of ranks, mini-batch after mini-batch.

    They are reduced from the moment when the last rank is in its last backward pass; the last bucket, and the gathering
    of changed weights, follow when every rank has ended it.
    """

    def __init__(self, world: World, worker: Worker, ranks: int, size: float) -> None:
        layout = world.costs.layout(worker)
        parts, topology = averaging(layout, size), world.network.topology

        def flows(op: str, seconds: float) -> Flows:
            return paced(topology, ring(topology, layout.gradient_devices, size, op), seconds)

        self._hidden = flows(parts.op, parts.reduced_s - parts.last_s)
        self._rest = [flows(parts.op, parts.last_s), flows("all_gather", parts.gathered_s)]
        self._world, self._ranks, self._begun = world, ranks, 0
        self._under_way: simpy.Event | None = None

    @property
    def num_flows(self) -> int:
        """Flows that go at once."""
        return len(self._hidden)

    def begin(self) -> None:
        """A rank starts the last backward pass of a mini-batch."""
        self._begun += 1
        if self._begun % self._ranks == 0:
            self._under_way = self._world.env.process(self._world.network.send_all(self._hidden))

    def finish(self) -> Process:
        """Every rank has ended its last backward pass; one of them calls this."""
        if self._under_way is not None:
            yield self._under_way
        yield from self._world.network.play(self._rest)
