"""Generation without a barrier: who issues samples to the engines, and who makes batches of what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from lab.faults import Fault
from lab.policies.dispatch import Engines
from lab.targets import BUFFER
from profiles.memory import kv_blocks
from simulator.blocks import Ints
from simulator.collecting import Collecting, Group
from simulator.handing import Handing
from simulator.ledger import ABORTED, DROPPED, INDEX, LOST, RESPONSE, STEP
from simulator.producing import Producer
from simulator.prompts import Prompt, Prompts
from simulator.world import Process, World


class Production:
    """All engines of a run, the buffer, and the prompts that go from one to the other."""

    def __init__(self, world: World) -> None:
        self._world, self._per_prompt = world, world.scenario.workload.samples_per_prompt
        self.buffer = Collecting(world, self._ask_all)
        self.handing = Handing(world, self.buffer.ended)
        self.prompts = Prompts(world.scenario, _trained(world))
        self.producers = [Producer(world, worker, self) for worker in world.scenario.team("actor", "generate")]
        self._place = {producer: place for place, producer in enumerate(self.producers)}
        self._seats = sum(producer.seats for producer in self.producers)
        self._owner: dict[int, Producer] = {}
        self._asking: set[int] = set()
        self._paced = self.buffer.limits.at_high == "throttle"
        self._due = self._shut = False
        self._latest = self.producers[0]
        world.why["rollout"] = self.buffer.why
        world.at_end["rollout"] = self.finish
        world.on_loss[BUFFER] = self.spill
        self._kv_tokens = np.array([_kv_tokens(world, producer) for producer in self.producers])
        self._ask_all()

    def back(self, producer: Producer, sample: int) -> None:
        """A sample has all its tokens."""
        del self._owner[sample]
        self._latest = producer
        self.handing.submit(producer.worker, sample)
        if self._paced and producer.room >= self._per_prompt:
            self._ask(producer)  # fewer are under way than before

    def dry(self, producer: Producer) -> None:
        """Nobody waits in an engine, and more could run."""
        if self._shut or producer.room < self._per_prompt:
            return
        if self._asking - {self._place[producer]}:
            self._ask(producer)  # others are to have their share of what there is now
        else:
            self._deal([producer], producer.version)

    def backlog(self) -> int:
        """Samples that could be issued now if an engine had room for them."""
        return self.buffer.room(self._seats, self._world.publication.version)

    def wants(self, producer: Producer) -> None:
        """An engine takes samples again, under another version perhaps."""
        self._shut = False
        self._ask(producer)

    def thrown(self, samples: Sequence[int], tokens: Sequence[int], fate: int) -> None:
        """Samples met this fate before their end, with so many tokens. They are issued anew: in the place that they had
        where others of their group are kept, else as a new prompt."""
        self._settle(samples, tokens, fate)
        for group, lost in self.buffer.thrown(samples):
            if group.members:
                self._repeat(lost, group)
            else:
                self.buffer.forget([group])
                self._anew(lost[0])

    def lost(self, samples: Sequence[int], tokens: Sequence[int]) -> None:
        """An engine that failed had these; those that are wanted still are issued anew."""
        owned = [(sample, made) for sample, made in zip(samples, tokens, strict=True) if sample in self._owner]
        if owned:
            self.thrown([sample for sample, _ in owned], [made for _, made in owned], LOST)

    def spill(self, fault: Fault) -> None:
        """What waits in the buffer is lost, and issued anew."""
        versions, ready = self.buffer.contents()
        before = self._world.ledger.lost_tokens()
        self._repeat(self.buffer.drop(ready, versions, LOST).tolist())
        self._world.struck["lost_tokens"] += self._world.ledger.lost_tokens() - before

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
            while not self._batch(step):
                yield self.buffer.arrival()
            world.env.process(self._release(step))
            world.finished("rollout", step).succeed()
            self.handing.hand_on(step)

    def _batch(self, step: int) -> bool:
        """Asks the rule about age, and does as it says; returns whether the batch of this step is made."""
        said, versions = self.buffer.decide()
        self._repeat(self.buffer.drop(said.drop, versions).tolist())
        doomed = self.buffer.doomed(said.interrupt, versions)
        if said.start:
            self._world.handed_on["rollout", step] = self._latest.stretch
            numbers, ledger = self.buffer.take(said.take, versions), self._world.ledger
            ledger.batches[step] = numbers
            prompts = ledger.column(INDEX)[numbers] // self._per_prompt
            self._world.dealer.returned(prompts, ledger.column(RESPONSE)[numbers])
            self._ask_all()
        self._interrupt(doomed)
        return said.start

    def _interrupt(self, groups: Sequence[Group]) -> None:
        """Groups leave that would be too old: what runs is stopped, what came back is thrown away."""
        if not groups:
            return
        self.buffer.forget(groups)
        members = [member for group in groups for member in group.members]
        running = sorted((sample for sample in members if sample in self._owner), key=self._owned)
        for place, samples in groupby(running, key=self._owned):
            stopped = list(samples)
            self._settle(stopped, self.producers[place].stop(stopped), ABORTED)
        rest = np.setdiff1d(members, running).astype(np.int64)
        ledger = self._world.ledger
        ledger.generated(rest, ledger.column(RESPONSE)[rest])
        ledger.settle(rest, DROPPED)
        for group in groups:
            self._anew(group.members[0])

    def _owned(self, sample: int) -> int:
        return self._place[self._owner[sample]]

    def _settle(self, samples: Sequence[int], tokens: Sequence[int], fate: int) -> None:
        for sample in samples:
            del self._owner[sample]
        self._world.ledger.generated(samples, tokens)
        self._world.ledger.settle(samples, fate)

    def _repeat(self, samples: Sequence[int], group: Group | None = None) -> None:
        """These go out again, before others: in a group's place, or as prompts of their own."""
        if samples:
            rows = np.array([self._world.ledger.column(column)[list(samples)] for column in (STEP, INDEX)])
            self.prompts.again(rows, group)
            self._ask_all()

    def _anew(self, sample: int) -> None:
        """The whole group of a sample goes out again."""
        step, index = (int(self._world.ledger.column(column)[sample]) for column in (STEP, INDEX))
        size = self.buffer.size
        indices = index // size * size + np.arange(size)
        self.prompts.again(np.array([np.full(size, step), indices]), None)
        self._ask_all()

    def _release(self, step: int) -> Process:
        """The page of a batch is free once everybody has trained on it."""
        updates = [stage for stage in ("update_actor", "update_critic") if stage in self._world.dataflow.nodes]
        yield self._world.env.all_of([self._world.finished(stage, step) for stage in updates])
        self.buffer.trained(step)

    def _ask_all(self) -> None:
        self._shut = False
        for producer in self.producers:
            self._ask(producer)

    def _ask(self, producer: Producer) -> None:
        """Samples are issued at this instant, after all that ends now."""
        self._asking.add(self._place[producer])
        if not self._due:
            self._due = True
            self._world.env.process(self._issue())

    def _issue(self) -> Process:
        """Gives the engines that ask what age, buffer and their own room allow; the newest version first."""
        yield self._world.env.timeout(0.0)
        self._due = False
        asking, self._asking = sorted(self._asking), set()
        able = self._able(self.producers[place] for place in asking)
        for version in sorted({producer.version for producer in able}, reverse=True):
            self._deal([producer for producer in able if producer.version == version], version)

    def _able(self, producers: Iterable[Producer]) -> list[Producer]:
        return [producer for producer in producers if producer.room >= self._per_prompt]

    def _deal(self, able: list[Producer], version: int) -> None:
        """Prompts to engines of one version, by the rule of dispatch among those that have room."""
        room = sum(producer.room // self._per_prompt for producer in able)
        prompts = self.prompts.replacing(room, version)
        allowed = self.buffer.room(self._seats, version) // self._per_prompt
        prompts += self.prompts.take(min(room - len(prompts), allowed))
        self._shut = allowed < room and not self._paced
        while prompts:
            left = list[Prompt]()
            for producer, share in zip(able, self._shares(prompts, able), strict=True):
                fits = producer.room // self._per_prompt
                self._give(producer, [prompts[i] for i in share[:fits]], version)
                left += [prompts[i] for i in share[fits:]]
            prompts, able = left, self._able(able)

    def _shares(self, prompts: list[Prompt], able: list[Producer]) -> list[list[int]]:
        """Places in `prompts` by engine."""
        if len(able) == 1:
            return [list(range(len(prompts)))]
        workload = self._world.scenario.workload
        under_way = np.array([len(producer.samples) for producer in able])
        room = self._kv_tokens[[self._place[producer] for producer in able]]
        engines = Engines(
            speed=np.array([producer.worker.speed for producer in able]),
            given=np.array([producer.given for producer in able]), queued=np.zeros_like(under_way), running=under_way,
            free_kv_tokens=room - under_way * (workload.prompt_tokens.mean + workload.response_tokens.mean),
        )  # fmt: skip
        return self._world.dealer.choose([(prompt.step, prompt.number) for prompt in prompts], engines)

    def _give(self, producer: Producer, prompts: list[Prompt], version: int) -> None:
        """Issues prompts to an engine."""
        for (step, group), parts in groupby(prompts, key=lambda prompt: (prompt.step, prompt.group)):
            found = list(parts)
            numbers = self._world.ledger.issue(step, np.concatenate([prompt.indices for prompt in found]), version)
            samples = numbers.tolist()
            if group is None:
                self.buffer.issued(samples, version)
            else:
                self.buffer.replaced(group, samples)
            self._owner.update(dict.fromkeys(samples, producer))
            producer.give(numbers, len(found))


def _trained(world: World) -> Ints:
    """(2, samples) steps and indices of what the run has trained on before."""
    kept = [numbers for step, numbers in world.ledger.batches.items() if step < world.first_step]
    numbers = np.concatenate([np.zeros(0, np.int64), *kept])
    return np.array([world.ledger.column(column)[numbers] for column in (STEP, INDEX)])


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
