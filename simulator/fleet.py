"""An engine in virtual time that others give work to and take it from while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from lab.fates import PROMPT, RESPONSE
from lab.placement import Worker
from simulator.blocks import Ints
from simulator.lockstep import start_engine
from simulator.playing import ROUNDING
from simulator.rollout import Engine, Piece, samples
from simulator.world import Process, World


@dataclass(kw_only=True)
class Counts:
    """What an engine has done so far."""

    busy_s: float = 0.0
    """as others on its devices let it"""
    iterations: int = 0
    tokens: int = 0
    """scheduled in all iterations"""
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    samples: int = 0
    """that ended"""

    def add(self, piece: Piece, seconds: float) -> None:
        self.busy_s += seconds
        self.iterations += piece.iterations
        self.tokens += piece.iterations * piece.tokens
        self.preemptions += piece.preempted
        self.recomputed_tokens += piece.recomputed_tokens
        self.cached_tokens += piece.cached_tokens


class EngineRun:
    """One engine that generates whatever samples it is given, until the simulation ends.

    A stretch in which every running sample just gets one token after the other passes as one wait; who comes or goes
    meanwhile cuts it at the end of the iteration under way. Samples are numbers of the ledger.
    """

    def __init__(
        self, world: World, worker: Worker, on_end: Callable[[int], None],
        on_piece: Callable[[Piece, float], None] | None = None, on_dry: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_end` is called when a sample has all its tokens; `on_piece` after every piece, with its start; `on_dry`
        when nothing waits and more could run, before it goes on."""
        self.worker, self.counts = worker, Counts()
        self._world, self._on_end, self._on_piece, self._on_dry = world, on_end, on_piece, on_dry
        self._engine = start_engine(world.scenario, worker, world.costs.engine_table(worker))
        self._alone = world.exclusive(worker) and not world.slowed(worker)
        self._sample_of, self._request_of = dict[int, int](), dict[int, int]()
        self._inbox, self._leaving = list[int](), list[int]()
        self._jumping = self._stretching = self._working = self._standing = self._forgets = False
        self._begun = 0.0
        self._ending: tuple[int, ...] = ()
        self._wake: simpy.Event | None = None
        self._stood: simpy.Event | None = None
        self.process = world.env.process(self._play())

    @property
    def num_open(self) -> int:
        """Samples that were given to it and are not back."""
        return len(self._request_of) + len(self._inbox)

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_queued(self) -> int:
        """Samples that wait in it, those included that it has not seen yet."""
        return self._engine.num_waiting + len(self._inbox)

    @property
    def free_slots(self) -> int:
        """How many more could run at once, as far as their number is limited."""
        return self._world.scenario.rollout.max_num_seqs * self.worker.parallelism.data - self.num_running

    @property
    def free_blocks(self) -> int:
        return self._engine.free_blocks

    def submit(self, numbers: Sequence[int] | Ints) -> None:
        """These samples wait from now on, and can join at the next iteration boundary."""
        self._inbox += [int(number) for number in numbers]
        if self._engine.num_waiting == 0 and self.free_slots > 0:
            self._nudge()
        self._rouse()

    def take_over(self, made: Mapping[int, int], counts: Counts) -> None:
        """Of an engine that has just started: these samples wait, with so many tokens each, which are computed anew."""
        assert isinstance(self._engine, Engine), "an engine without copies"
        self.counts = counts
        self.submit(list(made))
        self._take_in()
        self._engine.have([self._request_of[sample] for sample in made], list(made.values()))

    def abort(self, numbers: Sequence[int] | Ints) -> None:
        """These samples leave, whether they run or wait; those that are not in the engine are left out."""
        gone = {int(number) for number in numbers}
        self._inbox = [number for number in self._inbox if number not in gone]
        for number in gone & self._request_of.keys():
            request = self._request_of.pop(number)
            del self._sample_of[request]
            self._leaving.append(request)
        if self._leaving and not self._working:
            self._let_go()
        self._nudge()

    def withdraw(self, number: int) -> list[int]:
        """At most so many of the samples that wait, have no tokens and would start last leave."""
        late = self._inbox[max(len(self._inbox) - number, 0) :]
        del self._inbox[len(self._inbox) - len(late) :]
        found = list[int]()
        for request in self._engine.withdraw(number - len(late)):
            if request in self._sample_of:  # else it was aborted, and leaves now
                found.append(self._sample_of.pop(request))
                del self._request_of[found[-1]]
        return found + late

    def running(self) -> list[tuple[int, int, int]]:
        """Sample, prompt tokens and generated tokens of every sample that runs, as the last iteration left them."""
        now = self._iterations_so_far()
        found = [
            (self._sample_of[request], prompt, generated + now)
            for request, prompt, generated in self._engine.running()
            if request in self._sample_of
        ]
        ending = [self._sample_of[request] for request in self._ending if request in self._sample_of]
        sizes = [self._world.ledger.column(column)[ending].tolist() for column in (PROMPT, RESPONSE)]
        return found + list(zip(ending, *sizes, strict=True))

    def pause(self) -> Process:
        """Ends when the iteration under way has ended and nothing is scheduled after it: the engine stands still."""
        self._standing = True
        self._nudge()
        self._rouse()
        if self._stood is None:
            self._stood = self._world.env.event()
        yield self._stood

    def resume(self) -> None:
        """It goes on."""
        self._standing, self._stood = False, None
        self._rouse()

    def interrupt(self, forget: bool) -> int:
        """Puts every running sample back to be computed again, of an engine that stands still; returns how many.

        `forget` empties the prefix cache too. Raises RuntimeError where the engine is at work.
        """
        if self._working or not self._standing:
            raise RuntimeError(f"{self.worker.name} is at work: pause it first")
        self._take_in()
        return self._engine.interrupt(forget)

    def lose(self) -> list[int]:
        """Everything in the engine is gone, and it stands still until `resume`; returns the samples that were in it."""
        found = [*self._request_of, *self._inbox]
        self.abort(found)
        self._forgets = self._standing = True
        self._nudge()
        self._rouse()
        return found

    def _play(self) -> Process:
        while True:
            self._let_go()
            self._take_in()
            if self._on_dry is not None and not self._standing and not self._engine.num_waiting and self.free_slots:
                self._on_dry()
                self._take_in()
            if self._standing:
                yield from self._stand()
            elif self._engine.busy:
                yield from self._piece()
            else:
                yield from self._rest()

    def _stand(self) -> Process:
        """What the device has under way ends, and then nothing happens."""
        self._working = True
        piece = self._engine.land()
        yield from self._pass(piece.seconds)
        self._working = False
        self.counts.busy_s += piece.seconds
        self._deliver(piece.ended)
        self._let_go()
        if not self._standing:
            return
        if self._stood is not None and not self._stood.triggered:
            self._stood.succeed()
        yield from self._rest()

    def _rest(self) -> Process:
        self._wake = self._world.env.event()
        yield self._wake
        self._wake = None

    def _rouse(self) -> None:
        """Who rests looks again."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def _nudge(self) -> None:
        """A stretch under way ends with the iteration under way."""
        if self._jumping:
            self._jumping = False
            self.process.interrupt()

    def _piece(self) -> Process:
        start, self._working = self._world.now, True
        steps, seconds = self._engine.ahead()
        piece = (yield from self._jump(seconds)) if steps else self._engine.turn()
        if not steps:
            self._ending = piece.ended
            yield from self._pass(piece.seconds)
        self._working, self._ending = False, ()
        self._world.costs.iterations(self.worker, piece.seconds, (piece.first, piece.last))
        self.counts.add(piece, self._world.now - start)
        if self._on_piece is not None:
            self._on_piece(piece, start)
        self._deliver(piece.ended)

    def _jump(self, seconds: float) -> Process:
        """Iterations in which everybody gets a token: all of them, or those until somebody comes or goes."""
        self._begun, self._jumping, self._stretching = self._world.now, True, True
        left = yield from self._attempt(seconds)
        self._jumping, done = False, seconds - left
        if left <= ROUNDING * seconds:
            done = np.inf
        else:
            _, whole = self._engine.ahead(done)
            yield from self._pass(whole - done)
        self._stretching = False
        return self._engine.turn(done)

    def _attempt(self, seconds: float) -> Process:
        """Works until it is done or somebody interrupts; returns the seconds of work that are left."""
        if not self._alone:
            return (yield from self._world.cores(self.worker).attempt(self.worker, "engine_step", seconds))
        try:
            yield self._world.env.timeout(seconds)
        except simpy.Interrupt:
            return seconds - (self._world.now - self._begun)
        return 0.0

    def _pass(self, seconds: float) -> Process:
        """Works, and is not interrupted."""
        if not self._alone:
            yield from self._world.cores(self.worker).work(self.worker, "engine_step", seconds)
        elif seconds > 0:
            yield self._world.env.timeout(seconds)

    def _iterations_so_far(self) -> int:
        """Of the stretch under way, as far as time alone tells."""
        elapsed = self._world.now - self._begun
        if not self._stretching or not elapsed:
            return 0
        steps, seconds = self._engine.ahead(elapsed)
        return steps - (seconds > elapsed * (1 + ROUNDING))

    def _deliver(self, ended: tuple[int, ...]) -> None:
        for place, request in enumerate(ended):
            self._ending = ended[place + 1 :]
            sample = self._sample_of.pop(request, None)
            if sample is None:  # it was aborted meanwhile
                continue
            del self._request_of[sample]
            self.counts.samples += 1
            self._on_end(sample)

    def _let_go(self) -> None:
        """Those who were aborted leave."""
        if self._leaving:
            self._engine.abort(self._leaving)
            self._leaving = []
        if self._forgets:
            self._engine.interrupt(forget=True)
            self._forgets = False

    def _take_in(self) -> None:
        """Those who came join the queue."""
        if self._inbox:
            given, self._inbox = self._inbox, []
            requests = samples(self._world.scenario, self._world.ledger, np.array(given))
            for request, sample in zip(self._engine.add(requests), given, strict=True):
                self._sample_of[request], self._request_of[sample] = sample, request
