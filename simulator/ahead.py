"""An engine in virtual time that plays ahead: of what nobody disturbs, all is played at once, and told when it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import simpy

from lab.fates import INDEX, PROMPT, RESPONSE, STEP
from lab.placement import Worker
from simulator.blocks import Ints
from simulator.counting import Counting
from simulator.fleet import Counts, EngineRun
from simulator.rollout import settings
from simulator.stretch import DRY, ROUNDING, UNCOUNTABLE
from simulator.whole import countable, window_of
from simulator.world import Process, World

ROOMY = 0.8
"""share of the KV cache that sequences of mean length may fill where counting is tried"""


class AheadRun:
    """What `EngineRun` is, for a worker whose devices nobody shares and where counting is enough; see `fitting`.

    A stretch ends where somebody could join and nobody waits. Whoever comes or goes before takes it back to the end of
    the iteration under way. Where counting turns out not to be enough, an `EngineRun` goes on, all KV computed anew.
    """

    def __init__(
        self, world: World, worker: Worker, on_end: Callable[[int], None], on_dry: Callable[[], None]
    ) -> None:  # fmt: skip
        self.worker, self.counts = worker, Counts()
        self._world, self._on_end, self._on_dry = world, on_end, on_dry
        chosen = settings(world.scenario, worker)
        self._lag = int(chosen.async_scheduling)
        self._engine = Counting(chosen, world.tables(world.costs.engine_table(worker), chosen.max_num_seqs), world.now)
        self._sample = list[int]()
        self._inbox, self._leaving = list[int](), list[int]()
        self._told = self._again = self._found = 0
        self._playing = self._standing = self._landed = self._late = False
        self._kept = self._engine.snapshot()
        self._came = list[int]()
        self._wake: simpy.Event | None = None
        self._stood: simpy.Event | None = None
        self._exact: EngineRun | None = None
        self.process = world.env.process(self._play())

    @property
    def _given_up(self) -> bool:
        return self._exact is not None

    def submit(self, numbers: Sequence[int] | Ints) -> None:
        """These samples wait from now on, and can join at the next iteration boundary."""
        if self._exact is not None:
            self._exact.submit(numbers)
            return
        self._inbox += [int(number) for number in numbers]
        self._disturb()

    def abort(self, numbers: Sequence[int] | Ints) -> None:
        """These samples leave, whether they run or wait."""
        if self._exact is not None:
            self._exact.abort(numbers)
            return
        gone = {int(number) for number in numbers}
        self._leaving += sorted(gone.difference(self._inbox))
        self._inbox = [number for number in self._inbox if number not in gone]
        if self._standing and self._stood is not None and self._stood.triggered:
            self._let_go()
        self._disturb()

    def running(self) -> list[tuple[int, int, int]]:
        """Sample, prompt tokens and generated tokens of every sample that runs, at the end of the iteration under way."""
        if self._exact is not None:
            return self._exact.running()
        if self._playing:
            self._take_back()
        held = [(self._sample[one.row], one.generated) for one in self._engine.running()]
        if self._playing:
            self._engine.restore(self._kept)
            self._script(np.inf)
        sizes, gone = self._world.ledger.column(PROMPT), set(self._leaving)
        return [(sample, int(sizes[sample]), tokens) for sample, tokens in held if sample not in gone]

    def pause(self) -> Process:
        """Ends when the iteration under way has ended and nothing is scheduled after it: the engine stands still."""
        self._standing = True
        if self._exact is None:
            self._disturb()
            if self._stood is None:
                self._stood = self._world.env.event()
            yield self._stood
        if self._exact is not None:  # since then, perhaps
            yield from self._exact.pause()

    def resume(self) -> None:
        """It goes on."""
        if self._exact is not None:
            self._exact.resume()
            return
        self._standing, self._stood = False, None
        self.counts.recomputed_tokens += self._again
        self._again = 0
        self._rouse()

    def interrupt(self, forget: bool) -> int:
        """Puts every running sample back to be computed again, of an engine that stands still; returns how many. The
        prefix cache is emptied, whatever is asked."""
        if self._exact is not None:
            return self._exact.interrupt(forget)
        running = self._engine.running()
        self.extrapolated()
        self._again, self._found = self._engine.again(running)
        rows = self._engine.back(self._world.now, running + self._engine.waiting())
        self._sample = [self._sample[row] for row in rows]
        self._told = 0
        return len(running)

    def lose(self) -> list[int]:
        """Everything in the engine is gone, and it stands still until `resume`; returns the samples that were in it."""
        if self._exact is not None:
            return self._exact.lose()
        if self._playing:
            self._take_back()
        held = [one.row for one in self._engine.running() + self._engine.waiting()]
        found = [*(self._sample[row] for row in held), *self._inbox]
        self.abort(found)
        self._standing = True
        self._disturb()
        return found

    def halt(self) -> None:
        """The run is over: what was played ahead of it never happened."""
        if self._playing:
            self._take_back()

    def extrapolated(self) -> bool:
        """Counts what was done since this was asked last; whether it took iterations beyond what is known."""
        tokens, row = self._engine.cached_tokens, self._engine.summed() if self._exact is None else None
        self.counts.cached_tokens += max(tokens - self._found, 0)
        self._found = max(tokens, self._found)
        if row is None:
            return False
        window = window_of(row)
        self.counts.iterations += window.iterations
        self.counts.tokens += window.tokens
        self.counts.busy_s += window.end_s - window.start_s
        features = (window.largest, window.largest)
        return self._world.costs.iterations(self.worker, window.end_s - window.start_s, features).extrapolated

    def _play(self) -> Process:
        while self._exact is None:
            if self._leaving and not self._standing:
                yield from self._land()
                if self._given_up:
                    return
                self._let_go()
            if not self._standing and not self._inbox and self._engine.dry:
                self._on_dry()
            if self._standing:
                yield from self._stand()
            elif self._inbox or self._engine.busy or self._told < self._engine.num_ended:
                yield from self._go()
            else:
                yield from self._rest()

    def _go(self) -> Process:
        """Plays as far as nobody disturbs it, and tells what happens when it does."""
        ahead = self._engine.clock > self._world.now * (1 + ROUNDING)
        self._late, self._landed = bool(self._lag) and not ahead and not self._landed, False
        self._engine.wait_until(self._world.now)
        self._kept, self._came, self._inbox = self._engine.snapshot(), self._inbox, []
        said = self._script(np.inf)
        if said == UNCOUNTABLE:
            self._give_up()
            return
        self._playing = True
        try:
            yield from self._tell(self._engine.dry_at if said == DRY else np.inf)
            self._playing = False
        except simpy.Interrupt:
            self._take_back()
            yield from self._tell()

    def _script(self, until_s: float) -> int:
        """Plays from the snapshot on: those who came join when the iteration under way has ended."""
        engine = self._engine
        if self._came:
            if self._late and engine.busy and engine.stretch(most=self._lag) == UNCOUNTABLE:
                return UNCOUNTABLE
            self._add(self._came)
        if engine.clock <= until_s < np.inf and engine.stretch(most=1) == UNCOUNTABLE:  # it has begun
            return UNCOUNTABLE
        return engine.stretch(until_s, stop_dry=not engine.dry)

    def _take_back(self) -> None:
        """What was played ahead of the iteration under way never happened."""
        self._engine.restore(self._kept)
        self._script(self._world.now)

    def _tell(self, until_s: float = np.inf) -> Process:
        """Lets time pass to where the engine is, or until then, and says who ends on the way."""
        env = self._world.env
        for ended_s, row in self._engine.ended(self._told):
            if ended_s > until_s * (1 + ROUNDING):
                break
            if ended_s > env.now:
                yield env.timeout(ended_s - env.now)
            self._told += 1
            sample = self._sample[row]
            if sample not in self._leaving:
                self.counts.samples += 1
                self._on_end(sample)
        if (left := min(self._engine.clock, until_s) - env.now) > 0:
            yield env.timeout(left)

    def _land(self) -> Process:
        """What the device has under way ends, and nothing is scheduled after it."""
        if not self._lag or not self._engine.busy:
            return
        late = self._engine.clock <= self._world.now * (1 + ROUNDING)
        self._engine.wait_until(self._world.now)
        self._kept, self._came = self._engine.snapshot(), []
        if late and self._engine.stretch(most=self._lag) == UNCOUNTABLE:
            self._give_up()
        else:
            yield from self._tell()
            self._engine.land()
            self._landed = True

    def _stand(self) -> Process:
        """The engine stands still until it is told to go on."""
        if self._stood is None or not self._stood.triggered:
            yield from self._land()
        if self._exact is None:
            self._let_go()
        if self._stood is not None and not self._stood.triggered:
            self._stood.succeed()
        if self._standing and self._exact is None:
            yield from self._rest()

    def _rest(self) -> Process:
        self._wake = self._world.env.event()
        yield self._wake
        self._wake = None

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def _disturb(self) -> None:
        """A stretch under way ends with the iteration under way; who rests looks again."""
        if self._playing:
            self._playing = False
            self.process.interrupt()
        self._rouse()

    def _let_go(self) -> None:
        """Those who were aborted leave."""
        for sample in self._leaving:
            held = [one.row for one in self._engine.running() + self._engine.waiting()]
            for row in [row for row in held if self._sample[row] == sample]:
                if self._engine.leave(row):
                    del self._sample[row]
        self._leaving = []

    def _add(self, samples: Sequence[int]) -> None:
        ledger, workload = self._world.ledger, self._world.scenario.workload
        prompt, response, step, index = (ledger.column(column)[samples] for column in (PROMPT, RESPONSE, STEP, INDEX))
        groups = step * workload.prompts_per_step + index // self._world.scenario.num_tried
        rows = self._engine.add(prompt, response, groups)
        self._sample[rows.start :] = samples

    def _give_up(self) -> None:
        """An engine that looks at every block takes over all samples, with the tokens that they have."""
        self._engine.restore(self._kept)
        self.extrapolated()
        held = self._engine.running() + self._engine.waiting()
        made = {self._sample[one.row]: one.generated for one in held}
        self._exact = EngineRun(self._world, self.worker, self._on_end, on_dry=self._on_dry)
        self._exact.take_over(made | dict.fromkeys(self._came + self._inbox, 0), self.counts)
        self._exact.abort(self._leaving)


def fitting(world: World, worker: Worker) -> bool:
    """Whether an engine can be played ahead: on devices of its own that keep their speed, without copies, and with room
    for as many sequences of mean length as may run."""
    scenario, workload = world.scenario, world.scenario.workload
    slowed = any(fault.kind == "straggler" for fault in scenario.faults)
    if slowed or worker.parallelism.data > 1 or not world.exclusive(worker):
        return False
    chosen = settings(scenario, worker)
    tokens = chosen.max_num_seqs * (workload.prompt_tokens.mean + workload.response_tokens.mean)
    roomy = tokens <= ROOMY * chosen.num_blocks * chosen.block_tokens
    return roomy and countable(chosen, world.costs.engine_table(worker))
