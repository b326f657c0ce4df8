"""Generation without a barrier: who issues samples to the engines, and who makes batches of what comes back."""

from __future__ import annotations

from typing import Any

from lab.faults import Fault
from lab.issuing import Issuing, Prompt, trained
from lab.targets import BUFFER
from profiles.memory import kv_blocks
from simulator.collecting import Collecting
from simulator.handing import Handing
from simulator.launching import BARE, launch
from simulator.messages import Messages
from simulator.producing import Producer
from simulator.world import Process, World


class Production(Issuing[Producer]):
    """All engines of a run, the buffer, and the prompts that go from one to the other."""

    buffer: Collecting

    def __init__(self, world: World) -> None:
        self._world, self._due, self._gone = world, False, 0
        buffer = Collecting(world, self.ask_all)
        self.messages, self.handing = Messages(world), Handing(world, self._whole)
        producers = [Producer(world, worker, self) for worker in world.scenario.team("actor", "generate")]
        kv_tokens = [_kv_tokens(world, producer) for producer in producers]
        gone = trained(world.ledger, world.first_step)
        super().__init__(world.scenario, world.ledger, world.dealer, buffer, producers, gone, kv_tokens)
        world.why["rollout"] = buffer.why
        world.at_end["rollout"] = self.finish
        world.on_loss[BUFFER] = self.spilt
        self.ask_all()

    @property
    def newest(self) -> int:
        return self._world.publication.version

    def _handed(self, producer: Producer, sample: int) -> None:
        self.handing.submit(producer.worker, sample)

    def _whole(self, sample: int) -> None:
        """It lies in the buffer, with all that is waited for."""
        before = self.buffer.depth
        self.buffer.ended(sample)
        if self.buffer.depth > before:
            self.messages.delivered(self.buffer.depth >= self.buffer.rule.samples_per_unit)

    def _give(self, producer: Producer, prompts: list[Prompt], version: int) -> None:
        self.messages.given()
        super()._give(producer, prompts, version)

    def spilt(self, fault: Fault) -> None:
        """The buffer failed: what waits in it, and what comes until it is noticed and mended, is lost and issued anew."""
        self._world.env.process(self._refill(fault, self._world.struck))

    def _refill(self, fault: Fault, record: dict[str, Any]) -> Process:
        """Until another buffer stands there no batch is made, and what ends goes where nobody is."""
        self._gone += 1
        yield self._world.env.timeout(fault.detect)
        yield from launch(self._world, self._world.scenario.team("actor", "train")[0], BARE, fault.start)
        self._gone -= 1
        record["lost_tokens"] += self.spill()

    def finish(self) -> None:
        """The run is over."""
        for producer in self.producers:
            producer.finish()

    def collect(self) -> Process:
        """Makes one batch after the other, each when the dataflow has room for it."""
        world = self._world
        for step in range(world.first_step, world.dataflow.num_steps):
            for needed in world.dataflow.requirements("rollout", step):
                yield world.finished(*needed)
            world.started("rollout", step).succeed()
            while self._gone or not self.batch(step):
                yield self.buffer.arrival()
            world.handed_on["rollout", step] = self.latest.stretch
            world.env.process(self._release(step))
            world.finished("rollout", step).succeed()
            self.handing.hand_on(step)

    def _release(self, step: int) -> Process:
        """The page of a batch is free once everybody has trained on it."""
        updates = [stage for stage in ("update_actor", "update_critic") if stage in self._world.dataflow.nodes]
        yield self._world.env.all_of([self._world.finished(stage, step) for stage in updates])
        self.buffer.trained(step)

    def _soon(self) -> None:
        """At this instant, after all that ends now."""
        if not self._due:
            self._due = True
            self._world.env.process(self._issue())

    def _issue(self) -> Process:
        yield self._world.env.timeout(0.0)
        self._due = False
        self.issue()


def _kv_tokens(world: World, producer: Producer) -> float:
    return float(kv_blocks(world.scenario, producer.worker) * world.scenario.rollout.block_tokens)


def play(world: World) -> None:
    """Starts the engines and who collects what they make."""
    production = Production(world)
    for producer in production.producers:
        world.env.process(producer.play())
    if world.engines is not None:
        world.env.process(world.engines.oversee(production))
    world.env.process(production.collect())
