"""One engine that generates without a barrier: what it is given, the versions it works under, and how it takes new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lab.fates import ABORTED, PROMPT, RESPONSE, VERSION
from lab.faults import Fault
from lab.issuing import seats
from lab.placement import Worker
from lab.policies import weight_sync as policy
from lab.targets import spares
from simulator.ahead import AheadRun, fitting
from simulator.blocks import Ints
from simulator.fleet import Counts, EngineRun
from simulator.receiving import rule_of
from simulator.world import Lane, Process, World

if TYPE_CHECKING:
    import simpy

COUNTS = ("iterations", "preemptions", "recomputed_tokens", "cached_tokens")


class Issuer(Protocol):
    """Who gives samples to engines, as an engine knows it."""

    def back(self, producer: Producer, sample: int) -> None:
        """A sample has all its tokens."""
        ...

    def dry(self, producer: Producer) -> None:
        """Nobody waits in the engine, and more could run."""
        ...

    def wants(self, producer: Producer) -> None:
        """The engine has room for more, or another version."""
        ...

    def thrown(self, samples: Sequence[int], tokens: Sequence[int], fate: int) -> None:
        """Samples met this fate before their end, with so many response tokens each."""
        ...

    def lost(self, samples: Sequence[int], tokens: Sequence[int]) -> None:
        """An engine that failed had these, with so many response tokens each."""
        ...


class Producer:
    """An engine between its loads of weights. `rollout/k` is what it does under version k."""

    def __init__(self, world: World, worker: Worker, issuer: Issuer) -> None:
        self.worker, self.seats = worker, seats(world.scenario)
        self.samples: set[int] = set()
        """what was given to it and is not back"""
        self.open = True
        """whether it takes new samples"""
        self.given = 0
        """prompts so far"""
        self._world, self._issuer, self._rule = world, issuer, rule_of(world)
        self._receiver = world.publication.receivers[worker.name]
        self._run = self._start()
        self._empty, self._failure = world.env.event(), world.env.event()
        self._dismissed = world.engines is not None and worker.name not in world.engines.crew.up
        if not self._dismissed and not world.is_up(worker.name):  # it failed while the run came back
            self.open = False
            self._failure.succeed()
        self._told = world.env.event()
        self.decisions: list[dict[str, Any]] = []
        """what its next span notes of scaling"""
        self._is_spare = worker.name in spares(world.scenario)
        world.on_loss[worker.name] = self._fail
        self._back: list[int] = []
        self._issued = 0
        self._lane: Lane | None = None
        self._shown: int | None = None
        """step of its last span"""
        self._waiting: set[int] = set()
        """samples that had not begun when it last stood still"""
        self._busy_s = [0.0, 0.0]
        self._counted = dict.fromkeys(COUNTS, 0)

    @property
    def counts(self) -> Counts:
        """What it has done so far."""
        return self._run.counts

    @property
    def version(self) -> int:
        return self._receiver.held

    @property
    def room(self) -> int:
        """Samples that it takes now: as many as can run at once, and those of one prompt that wait."""
        if not self.open or self._dismissed or (self._is_spare and self.worker.name not in self._world.working()):
            return 0
        return self.seats - len(self.samples)

    def give(self, samples: Ints, num_prompts: int) -> None:
        """These join its queue now."""
        if not self.samples and not self._issued:
            self._busy_s[0] = self._world.now
        self.samples.update(samples.tolist())
        self.given += num_prompts
        self._issued += len(samples)
        self._run.submit(samples)

    def play(self) -> Process:
        """Generates to the end of the run, and takes new weights whenever they are due."""
        publication = self._world.publication
        if not self._dismissed and not self._failure.triggered:
            self._begin()
        while True:
            if self._failure.triggered:
                yield from self._mend()
                if publication.final:
                    return
            if self._dismissed and not self.samples:
                yield from self._stand_by()
                if publication.final:
                    return
            act = self._receiver.due(len(self.samples))
            self.open = act == "none" and not self._dismissed
            if act == "load":
                yield from self._stand_still()
                if self._failure.triggered:
                    continue
                yield from self._receiver.load()
                self._name_anew()
                if publication.final and self.version == publication.version:
                    return  # nobody trains what it would make now
                if not self._failure.triggered:  # else it begins when it works again
                    self._begin()
                    self._go_on()
            else:
                news = self._receiver.news() | self._failure | self._told
                yield news if self.open else self._drained() | news

    def _name_anew(self) -> None:
        """What waited when new weights came is begun by these."""
        waiting = sorted(self._waiting & self.samples)
        self._world.ledger.column(VERSION)[waiting] = self.version

    def _go_on(self) -> None:
        self._run.resume()
        self.open = True
        self._issuer.wants(self)

    def dismiss(self) -> None:
        """It takes no more samples, and stands by once it has none."""
        self._dismissed, self.open = True, False
        self._tell()

    def call(self) -> None:
        """It is needed, and has started: it works again, under the latest weights."""
        self._dismissed = False
        self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, self._world.env.event()
        told.succeed()

    def _stand_by(self) -> Process:
        """It is down until it is called."""
        publication = self._world.publication
        if self._lane is not None:
            yield from self._run.pause()
            yield from self._close(0)
        publication.leave(self.worker)
        while self._dismissed:
            yield self._told
        publication.enter(self.worker, publication.version)
        if not publication.final:
            self._begin()
            self._go_on()

    def _start(self) -> EngineRun | AheadRun:
        """A fresh engine. One that failed may go on unseen: nobody hears of it."""
        world = self._world

        def ended(sample: int) -> None:
            if self._run is run:
                self._ended(sample)

        def dry() -> None:
            if self.open and self._run is run:
                self._issuer.dry(self)

        kind = AheadRun if fitting(world, self.worker) else EngineRun
        run: EngineRun | AheadRun = kind(world, self.worker, ended, on_dry=dry)
        if world.lossy:
            world.stoppable.append(run)
        return run

    def _fail(self, fault: Fault) -> None:
        """All that is in the engine is lost; others get it when that is noticed."""
        self.open = False
        made = {sample: tokens for sample, _, tokens in self._run.running()}
        lost = sorted(self.samples)
        counts = {name: int(getattr(self._run.counts, name)) for name in COUNTS}
        self._counted = {name: self._counted[name] - counts[name] for name in COUNTS}
        self._world.stoppable.remove(self._run)
        self._run = self._start()
        if self.samples:
            self._busy_s[1] = self._world.now
        self.samples.clear()
        self._world.env.process(self._report(lost, [made.get(sample, 0) for sample in lost], fault))
        if not self._failure.triggered:
            self._failure.succeed()

    def _report(self, lost: list[int], tokens: list[int], fault: Fault) -> Process:
        record = self._world.struck
        yield self._world.env.timeout(0.0 if fault.kind == "preempted" else fault.detect)
        record["lost_tokens"] += sum(tokens)
        self._issuer.lost(lost, tokens)

    def _mend(self) -> Process:
        """It failed: it does nothing until it works again, under the latest weights."""
        world, publication = self._world, self._world.publication
        if self._lane is not None:
            yield from self._close(0)
        yield from world.until_up(self.worker.name)
        publication.enter(self.worker, publication.version)
        self._failure = world.env.event()
        if not publication.final:
            self._begin()
            self._go_on()

    def stop(self, samples: Sequence[int]) -> list[int]:
        """These leave, whether they run or wait; returns the response tokens that they have."""
        made = {sample: tokens for sample, _, tokens in self._run.running()}
        self._run.abort(samples)
        had = bool(self.samples)
        self.samples.difference_update(samples)
        if had and not self.samples:
            self._emptied()
        return [made.get(sample, 0) for sample in samples]

    def _drained(self) -> simpy.Event:
        """The event that nothing is left in the engine."""
        self._empty = self._world.env.event()
        if not self.samples:
            self._empty.succeed()
        return self._empty

    def _ended(self, sample: int) -> None:
        self.samples.discard(sample)
        self._back.append(sample)
        if not self.samples:
            self._emptied()
        self._issuer.back(self, sample)

    def _emptied(self) -> None:
        """Its last sample left, whatever its fate."""
        self._busy_s[1] = self._world.now
        if not self.open and not self._empty.triggered:
            self._empty.succeed()

    @property
    def stretch(self) -> str:
        """Id of the span of what it does under this version."""
        return self._world.span_id("rollout", self._step, self.worker.name)

    @property
    def _step(self) -> int:
        return self.version * self._world.dataflow.nodes["weight_sync"].every

    def _begin(self) -> None:
        """From now on it works under the version that it has, once more perhaps."""
        self._world.redone[f"rollout/{self._step}/{self.worker.name}"] += self._shown == self._step
        self._lane = Lane(self._world, "rollout", self._step, self.worker)
        self._busy_s = [self._world.now, 0.0]

    def _stand_still(self) -> Process:
        """The iteration under way ends, and what runs has its fate under the weights that come."""
        self.open = False
        yield from self._run.pause()
        running = [policy.Running(sample=s, prompt_tokens=p, response_tokens=t) for s, p, t in self._run.running()]
        self._waiting = self.samples - {one.sample for one in running}
        said = policy.in_flight(self._rule, running)
        if said.abort:
            self._issuer.thrown(said.abort, self.stop(said.abort), ABORTED)
        if not said.carry or self._rule.kv == "recompute":
            self._run.interrupt(forget=True)
        yield from self._close(len(said.carry))

    def _close(self, num_carried: int) -> Process:
        """Ends what was done under a version; before its first sample and after its last one the engine is idle."""
        assert self._lane is not None, "it has begun"
        world, back = self._world, self._back
        given, made = (int(world.ledger.column(column)[back].sum()) for column in (PROMPT, RESPONSE))
        host = {"calls": 1.0, "samples": float(len(back)), "tokens": float(made)}
        yield from world.spend(self.worker, "rollout_host", host)
        self._record(num_carried, given, made)

    def finish(self) -> None:
        """The run is over: what was done under the version that it has is shown as it is."""
        if self._lane is not None:
            if isinstance(self._run, AheadRun):
                self._run.halt()
            back = self._back
            given, made = (int(self._world.ledger.column(column)[back].sum()) for column in (PROMPT, RESPONSE))
            self._record(len(self.samples), given, made)

    def _record(self, num_carried: int, given: int, made: int) -> None:
        assert self._lane is not None, "it has begun"
        world, back, self._shown = self._world, self._back, self._lane.step
        beyond = {"extrapolated": True} if isinstance(self._run, AheadRun) and self._run.extrapolated() else {}
        now = {name: int(getattr(self._run.counts, name)) for name in COUNTS}
        counts = {name: now[name] - self._counted[name] for name in COUNTS}
        notes: dict[str, Any] = {"dispatch": world.scenario.rollout.dispatch, "issued": self._issued}
        notes |= {"carried": num_carried} | beyond
        notes |= {"scaling": self.decisions} if self.decisions else {}
        self._lane.end(
            tokens=given + made, samples=len(back), prompt_tokens=given, response_tokens=made, **counts, **notes
        )  # fmt: skip
        self.decisions = []
        start, end = self._busy_s
        busy = world.spans[-1]
        world.spans[-1] = msgspec.structs.replace(
            busy, start_s=start, end_s=busy.end_s if self.samples else max(start, end)
        )
        self._counted, self._back, self._issued, self._lane = now, [], 0, None
