"""Generation without a barrier, as the driver runs it: it issues samples to the engines, and makes batches of what comes.

The books are those of the simulator (`lab.issuing`, `lab.collecting`); here they are kept by messages. Samples go from the
engines to the buffer and from there to scorers and trainers; the driver sees numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import ray

from executor.calls import value
from executor.past import Past
from executor.publishing import Publication
from lab.collecting import Collecting, Made, ages
from lab.dataflow import Dataflow
from lab.dealing import Dealer
from lab.fates import (
    ABORTED,
    DROPPED,
    FATE,
    IN_FLIGHT,
    INDEX,
    LOST,
    PROMPT,
    RESPONSE,
    STEP,
    VERSION,
    Fates,
    Ints,
)
from lab.issuing import Issuing, seats
from lab.offline import UPDATES
from lab.placement import Worker
from lab.policies import staleness
from lab.scenario import Scenario
from lab.targets import BUFFER
from lab.timeline import Span

Found = TypeVar("Found")
Info = dict[str, Any]


class Report(Protocol):
    """Where spans go that belong to no call of a stage, and whose samples a batch was made of."""

    handed_on: dict[tuple[str, int], str]

    def free(self, spans: Sequence[Span]) -> None:
        """An engine has ended stages of its own."""
        ...


class Producer:
    """An engine as the driver knows it, by what it was told."""

    def __init__(self, worker: Worker, actor: Any, fates: Fates, num_seats: int, version: int) -> None:
        self.worker, self.actor, self.seats, self.version = worker, actor, num_seats, version
        self.samples: set[int] = set()
        self.given = 0
        self.open, self.turned = True, asyncio.Event()
        """whether it takes samples, for it knows of no weights that it has yet to load; and whether it delivers to the
        buffer that is there now, or is gone"""
        self._fates = fates

    @property
    def room(self) -> int:
        """Samples that it takes now."""
        return self.seats - len(self.samples) if self.open else 0

    def give(self, samples: Ints, num_prompts: int) -> None:
        """These are on their way to it."""
        self.samples.update(samples.tolist())
        self.given += num_prompts
        steps, indices = (self._fates.column(column)[samples].tolist() for column in (STEP, INDEX))
        self.actor.give.remote(samples.tolist(), steps, indices)

    def stop(self, samples: Sequence[int]) -> list[int]:
        """It is told; how many tokens each had, it says later."""
        self.samples.difference_update(samples)
        self.actor.stop.remote(list(samples))
        return [0] * len(samples)


class Production(Issuing[Producer]):
    """All engines of a run, the buffer, and the prompts that go from one to the other."""

    def __init__(
        self, scenario: Scenario, dataflow: Dataflow, dealer: Dealer, actors: dict[str, Any], store: Any,
        past: Past, report: Report, scorers: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """`actors` of the engines by name; `store`: the buffer's; `past`: what a run that goes on knows; `scorers` of
        samples that are scored one by one."""
        self._scorers = scorers
        fates, first_step = past.fates, past.first_step
        self.dataflow, self._store, self._past, self._report = dataflow, store, past, report
        self._newest = dataflow.version_at(first_step)
        self._due, self._last = False, dataflow.version_at(dataflow.num_steps)
        self._publication: Publication | None = None
        self._came, self._failed = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._here, self._awaited = set[int](), dict[int, Producer]()
        """numbers of what lies in the buffer, and of what has all its tokens and is on its way there, with its engine"""
        self.excused: Callable[[str], bool] = lambda name: False
        """whether the death of an engine, or of `buffer`, is somebody's business who will call `lose` or `spilt`"""
        self.has_met: Callable[[str], bool] = lambda name: True
        """whether an engine takes part in what is published now: one that came back has yet to meet the sender"""
        self._tasks: list[asyncio.Task[None]] = []
        self._made: dict[int, Made] = {}
        self._updated: dict[int, set[str]] = {}
        """by batch, the updates on it that have ended"""
        engines, room = scenario.team("actor", "generate"), seats(scenario)
        producers = [Producer(worker, actors[worker.name], fates, room, self._newest) for worker in engines]
        kept = scenario.spec("actor").kv_bytes_per_token(scenario.model("actor").dtype)
        fitting = [(scenario.rollout.kv_bytes or 0.0) / kept for _ in engines]
        buffer = Collecting(scenario, fates, self.ask_all, first_step)
        super().__init__(scenario, fates, dealer, buffer, producers, past.trained(), fitting)

    @property
    def names(self) -> list[str]:
        """Of the engines."""
        return [one.worker.name for one in self.producers]

    @property
    def newest(self) -> int:
        return self._newest

    async def begin(self) -> None:
        """Every engine starts, and is listened to; samples are issued."""
        step = self._past.first_step
        begun = [scorer.begin.remote(step, self._newest, self._store) for scorer in self._scorers]
        begun += [one.actor.begin.remote(one.version, self._store, self._scorers) for one in self.producers]
        await asyncio.gather(*(value(call) for call in begun))
        self._listening = {one.worker.name: self._task(self._listen(one)) for one in self.producers}
        self._task(self._receive())
        self.ask_all()

    async def collect(self, step: int) -> Any:
        """Makes the batch of a step, once there is one: a reference to its samples. Raises what an engine failed with."""
        while True:
            while not self.batch(step):
                self._came.clear()
                self._discard()
                await self.guarded(self._came.wait())
            self._discard()
            numbers, latest = self.fates.batches[step], self.latest
            self._here.difference_update(numbers.tolist())
            first = latest.version * self.dataflow.nodes["weight_sync"].every
            self._report.handed_on["rollout", step] = f"rollout/{first}/{latest.worker.name}"
            version, columns = self.dataflow.version_at(step), self._counted(step, numbers)
            page, there = self._store.take.options(num_returns=2).remote(step, version, numbers.tolist(), columns)
            if await self._asked_for(there, BUFFER) is not None:
                return page
            self.buffer.lost(numbers)  # it went down with the buffer
            self._repeat(self.fates.batches.pop(step).tolist())

    def _counted(self, step: int, numbers: Ints) -> dict[str, Any]:
        """What the samples of a batch count for their age, where that is not all the same."""
        if self.buffer.rule.at_bound != "down_weight":
            return {}
        lags = staleness.lag(self.buffer.rule, step, self.fates.column(VERSION)[numbers])
        return {"counts": staleness.weights(self.buffer.rule, lags).astype(np.float32)}

    def about(self, step: int) -> dict[str, Any]:
        """What the span of a batch's advantages says of its age."""
        versions, newest = self.fates.column(VERSION)[self.fates.batches[step]], self.dataflow.version_at(step)
        made, turned = self._made.pop(step), self.buffer.turned.pop(step)
        return ages(self.buffer.rule, step, newest, versions, made, turned)

    async def scored(self, scorers: Sequence[Any], step: int) -> list[Info]:
        """The batch of a step is made: what these scorers did for it, and from now on they score for the next one."""
        following, last = step + 1, step + 1 == self.dataflow.num_steps
        calls = [scorer.hand_on.remote(following, self.dataflow.version_at(following), last) for scorer in scorers]
        return list(await asyncio.gather(*(value(call) for call in calls)))

    def updated(self, stage: str, step: int) -> None:
        """An update on a batch has ended. After all of them its samples are trained, and its page is free."""
        self._updated.setdefault(step, set()).add(stage)
        if self._updated[step] == {name for name in UPDATES if name in self.dataflow.nodes}:
            del self._updated[step]
            self._past.train(self.fates.batches.pop(step))
            self._store.release.remote(step)
            self.buffer.trained(step)

    def hear(self, offered: Any) -> None:
        """Engines are told of new weights, and take no samples until they have them."""
        if isinstance(offered, ray.ObjectRef):
            self._task(self._once(offered))
            return
        for producer in self.producers:
            if self.has_met(producer.worker.name):
                producer.open = producer.open and self.scenario.weight_sync.trigger == "pull"
                producer.actor.hear.remote(offered)

    async def _once(self, offered: Any) -> None:
        self.hear(await value(offered))

    async def publish(self, step: int, publication: Publication, trainers: Sequence[Any]) -> list[Info]:
        """The weights of a step go to the engines, or can be had; what the trainers say of it."""
        self._publication = publication
        infos = await self.guarded(publication.publish(step, trainers, self.hear))
        self._newest = self.dataflow.version_at(step + 1)
        return infos

    def shut(self) -> None:
        """Nothing is issued any more."""
        self._last = 0
        for producer in self.producers:
            producer.open = False

    async def finish(self) -> None:
        """The run is over: engines tell what they did, and stop."""
        for producer in self.producers:
            producer.actor.finish.remote()
        await self.guarded(asyncio.gather(*self._listening.values()))
        self.rest()

    def rest(self) -> None:
        """Nobody is listened to any more."""
        for task in self._tasks:
            task.cancel()
        if self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # told by whoever awaited it, if anybody did

    async def guarded(self, wanted: Coroutine[Any, Any, Found] | Awaitable[Found]) -> Found:
        """What is awaited, or the error of an engine or the buffer that comes before it."""
        task = asyncio.ensure_future(wanted)
        await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        self._failed.result()
        raise AssertionError("it has an error, and no result")

    def lose(self, name: str) -> int:
        """An engine's process is gone. What it had, or had sent and nobody got, is lost and goes out again; how many
        samples these are."""
        producer = next(one for one in self.producers if one.worker.name == name)
        gone = producer.samples | {sample for sample, engine in self._awaited.items() if engine is producer}
        producer.open, producer.samples = False, set()
        producer.turned.set()
        if self._publication is not None:
            self._publication.leave(name)
        return self._lose(gone)

    async def revive(self, name: str, actor: Any, version: int) -> None:
        """Another process stands in the place of an engine, with the weights of a version: it generates from now on."""
        producer = next(one for one in self.producers if one.worker.name == name)
        producer.actor, begun = actor, actor.begin.remote(version, self._store, self._scorers)
        self._holds(producer, version)  # at once: it may hear of newer weights from now on
        await value(begun)
        self._listening[name] = self._task(self._listen(producer))

    async def spilt(self, store: Any) -> int:
        """The buffer's process is gone, and another one, `store`, stands in its place. What waited in it is lost and goes
        out again; how many response tokens these had."""
        before, self._store = self.fates.lost_tokens(), store
        self._here.clear()
        self.spill()
        self._task(self._receive())
        turning = [one for one in self.producers if not self._listening[one.worker.name].done()]
        for one in turning:
            one.turned.clear()
            one.actor.deliver_to.remote(store)
        await asyncio.gather(*(one.turned.wait() for one in turning))
        return self.fates.lost_tokens() - before

    def _turned(self, producer: Producer, _: None) -> None:
        """All that it told of before went to a buffer that is gone."""
        self._lose({sample for sample, engine in self._awaited.items() if engine is producer})
        producer.turned.set()

    def _lose(self, samples: set[int]) -> int:
        for sample in samples & self._awaited.keys():
            del self._awaited[sample]
        self.lost(sorted(samples), [0] * len(samples))
        return len(samples)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _listen(self, producer: Producer) -> None:
        """What an engine has to tell, to its end."""
        actor = producer.actor
        news, name = actor.news.options(concurrency_group="news"), producer.worker.name
        while (told := await self._asked_for(news.remote(), name)) is not None:
            for kind, what in told:
                if kind == "over":
                    return
                EVENTS[kind](self, producer, what)

    async def _receive(self) -> None:
        """What comes to the buffer."""
        store = self._store
        while (numbers := await self._asked_for(store.news.remote(self.buffer.missing), BUFFER)) is not None:
            self._here.update(numbers)
            for number in numbers:
                if self._awaited.pop(number, None) is not None:
                    self._whole(number)

    async def _asked_for(self, answer: Any, name: str) -> list[Any] | None:
        """What somebody answers; None where it died and that is excused."""
        try:
            found: list[Any] = await value(answer)
        except ray.exceptions.RayActorError:
            if self.excused(name):
                return None
            raise
        return found

    def _came_back(self, producer: Producer, told: tuple[int, int, int, int]) -> None:
        sample, prompt, response, version = told
        producer.samples.discard(sample)
        if self._owner.get(sample) is not producer:
            return  # it was given up meanwhile
        for column, number in ((PROMPT, prompt), (RESPONSE, response), (VERSION, version)):
            self.fates.column(column)[sample] = number
        self.back(producer, sample)

    def _handed(self, producer: Producer, sample: int) -> None:
        """Whole once the buffer says that it has it, which may have been before."""
        if sample in self._here:
            self._whole(sample)
        else:
            self._awaited[sample] = producer

    def _whole(self, sample: int) -> None:
        if self.fates.column(FATE)[sample] == IN_FLIGHT:
            self.buffer.ended(sample)
            if self.buffer.depth >= self.buffer.rule.samples_per_unit:
                self._came.set()

    def _stopped(self, producer: Producer, made: dict[int, int]) -> None:
        self.fates.generated(list(made), list(made.values()))

    def _thrown_away(self, producer: Producer, made: dict[int, int]) -> None:
        """For weights that came; those that were given up meanwhile have their fate."""
        producer.samples.difference_update(made)
        wanted = {sample: tokens for sample, tokens in made.items() if self._owner.get(sample) is producer}
        if wanted:
            self.thrown(list(wanted), list(wanted.values()), ABORTED)

    def _holds(self, producer: Producer, version: int) -> None:
        producer.version, producer.open = version, version < self._last
        if self._publication is not None:
            self._publication.acknowledge(producer.worker.name, version)
        if producer.open:  # else nobody trains what it would make now
            self.wants(producer)

    def _ended_stages(self, producer: Producer, spans: list[Span]) -> None:
        """Under the last version nothing is done that counts."""
        self._report.free([span for span in spans if span.step < self.dataflow.num_steps])

    def _discard(self) -> None:
        """What lies in the buffer and is wanted no more leaves it."""
        numbers = np.array(sorted(self._here), np.int64)
        fates = self.fates.column(FATE)[numbers]
        gone = numbers[np.isin(fates, (DROPPED, ABORTED, LOST))].tolist()
        if gone:
            self._here.difference_update(gone)
            self._store.drop.remote(gone)

    def _decided(self, batch: int, decision: Made) -> None:
        self._made[batch] = decision

    def _soon(self) -> None:
        """After all that was told at once."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._issue)

    def _issue(self) -> None:
        self._due = False
        try:
            self.issue()
        except Exception as error:  # nobody awaits this
            if not self._failed.done():
                self._failed.set_exception(error)


EVENTS: dict[str, Callable[[Production, Producer, Any], None]] = {
    "back": Production._came_back,
    "stopped": Production._stopped,
    "thrown": Production._thrown_away,
    "dry": lambda production, producer, _: production.dry(producer),
    "held": Production._holds,
    "spans": Production._ended_stages,
    "turned": Production._turned,
}
"""by what an engine tells (`executor.producing.Event`)"""
