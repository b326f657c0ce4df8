"""Scoring sample by sample: the workers behind a scoring service, each with the lane of the step that it works for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import simpy

from lab.accounts import SAMPLE_WAIT
from lab.fates import INDEX, PROMPT, RESPONSE, STEP, Fates
from lab.faults import Fault
from lab.judging import TRAINERS
from lab.measurement import pass_quantities
from lab.placement import RewardScore, Score, Worker
from lab.policies import scoring as policy
from lab.scenario import Scenario
from lab.services import ScoreCache
from simulator.blocks import Ints
from simulator.elastic import serve
from simulator.experience import settled
from simulator.services import Service
from simulator.world import Lane, Process, World


class Scorer:
    """One worker of a scoring role: a server, or several where it calls a service elsewhere."""

    def __init__(self, world: World, stage: str, step: int, worker: Worker) -> None:
        self._world, self._stage, self._step, self._worker = world, stage, step, worker
        self._lane: Lane | None = None
        self._next: int | None = None
        self._num_busy, self._idle_since, self._left = 0, 0.0, False
        self._counts: dict[str, int] = {}
        self._held = self._coming = False
        self._under_way: dict[simpy.Process, int] = {}
        """samples by batch that is being scored, as far as a fault may end that"""
        self._work, self._calls = WORK[kind(world.scenario, stage)], kind(world.scenario, stage) == "remote"

    def begin(self) -> None:
        """Its part of the step starts now, or once it works again."""
        world, worker, self._held = self._world, self._worker, True
        if world.losable(worker):
            world.on_loss[worker.name] = self._fail
            if not world.is_up(worker.name):
                self._come_back()
                return
        if self._lane is None:
            self._lane, self._idle_since = Lane(world, self._stage, self._step, worker), world.now

    def _fail(self, fault: Fault) -> None:
        """Its part of the step ends here, and what it was scoring is scored again once it works."""
        if self._lane is not None:
            self._waited()
            lost = {"lost_samples": sum(self._under_way.values())} if self._under_way else {}
            self._lane.cut(**self._counts, **lost)
            self._lane, self._counts = None, {}
        for process in self._under_way:
            process.interrupt()
        self._under_way.clear()
        self._come_back()

    def _come_back(self) -> None:
        if not self._coming:
            self._coming = True
            self._world.env.process(self._return())

    def _return(self) -> Process:
        yield from self._world.until_up(self._worker.name)
        self._coming = False
        if self._held:
            self.begin()

    def score(self, samples: list[int], lengths: list[int]) -> Process:
        """Ends when the batch is scored."""
        self.begin()
        self._waited()
        self._num_busy += 1
        counts = yield from self._attempts(samples, lengths)
        self._add(counts | {"samples": len(samples), "tokens": sum(lengths), "batches": 1})
        self._num_busy -= 1
        self._idle_since = self._world.now
        self._turn()

    def _attempts(self, samples: list[int], lengths: list[int]) -> Process:
        """Scores a batch, again where the worker fails meanwhile; returns what was counted."""
        world = self._world
        while True:
            yield from world.until_up(self._worker.name)
            self.begin()
            lane, under_way = self._lane, world.env.active_process
            assert lane is not None and under_way is not None, "it has begun"
            if not world.losable(self._worker):
                return (yield from self._work(lane, samples, lengths))
            self._under_way[under_way] = len(samples)
            try:
                return (yield from self._work(lane, samples, lengths))
            except simpy.Interrupt:
                continue
            finally:
                self._under_way.pop(under_way, None)

    def note(self, **counts: int) -> None:
        """Counts what it need not score."""
        self.begin()
        self._add(counts)

    def hand_on(self, step: int) -> None:
        """Another step begins: what is scored from now on belongs to it; a batch under way still to the old one."""
        self._next = step
        self._turn()

    def leave(self) -> None:
        """It ends what is under way, and then works for no step any more."""
        self._left = True
        self._turn()

    def end(self) -> None:
        """Its part of the step ends now."""
        self._held = False
        if self._world.on_loss.get(self._worker.name) == self._fail:
            del self._world.on_loss[self._worker.name]
        if self._lane is not None:
            self._waited()
            self._lane.end(**self._counts)
            self._lane, self._counts = None, {}

    def _turn(self) -> None:
        """Ends its part of a step that is over, once no pass for it is under way; calls elsewhere belong to no step."""
        if self._num_busy and not self._calls:
            return
        if self._left:
            self.end()
        elif self._next is not None:
            self.end()
            self._step, self._next = self._next, None
            self.begin()

    def _add(self, counts: dict[str, int]) -> None:
        for name, number in counts.items():
            self._counts[name] = self._counts.get(name, 0) + number

    def _waited(self) -> None:
        """Notes that it had nothing to do until now."""
        if not self._num_busy and self._lane is not None and self._world.now > self._idle_since:
            self._lane.record(SAMPLE_WAIT, self._idle_since, extrapolated=False)


Work = Callable[[Lane, list[int], list[int]], Process]
"""does one batch on a lane, given its ledger numbers and their tokens; returns what to count beside samples and tokens"""


def _model(lane: Lane, samples: list[int], lengths: list[int]) -> Process:
    scenario, role = lane.world.scenario, lane.worker.role
    stage = scenario.train(role).zero_stage if lane.worker.work == "train" else 0
    quantities = pass_quantities(scenario.spec(role), role, len(lengths), max(lengths), stage)
    yield from lane.op("forward", "logprob", quantities, tokens=sum(lengths))
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    return {}


def _head(lane: Lane, samples: list[int], lengths: list[int]) -> Process:
    """The pass is the trunk's; the head's 2 × hidden FLOPs a token, a millionth of it, are left out."""
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    return {}


def _function(lane: Lane, samples: list[int], lengths: list[int]) -> Process:
    yield from lane.world.spend(lane.worker, "reward", host(len(lengths), sum(lengths)))
    return {}


def _remote(lane: Lane, samples: list[int], lengths: list[int]) -> Process:
    yield from lane.world.spend(lane.worker, "score_host", host(len(lengths), sum(lengths)))
    found = calls(lane.world, samples[:1])
    yield lane.world.env.timeout(float(found.seconds[0]))
    return counted(found, len(samples), len(samples))


WORK: dict[str, Work] = {"model": _model, "head": _head, "function": _function, "remote": _remote}
"""by kind"""


def placed(scenario: Scenario, stage: str) -> Score | None:
    """How the scorers of a stage are placed; None where a trainer scores."""
    return next((part for role, part in scenario.scored.items() if role == stage), None)


def kind(scenario: Scenario, stage: str) -> str:
    """What scores: a model, a head on another one's trunk, a function on the host, or a service elsewhere."""
    chosen = placed(scenario, stage)
    if not isinstance(chosen, RewardScore):
        return "model"
    return "head" if chosen.shares_trunk else chosen.kind


def team(scenario: Scenario, stage: str) -> tuple[Worker, ...]:
    """The workers of a stage that scores."""
    return scenario.team(TRAINERS[stage], "train") if stage in TRAINERS else scenario.team(stage, "score")


def cache(scenario: Scenario, stage: str) -> ScoreCache | None:
    """The scores that are kept; None where all are computed."""
    chosen = placed(scenario, stage)
    return chosen.cache if isinstance(chosen, RewardScore) else None


def host(num_samples: int, tokens: int) -> dict[str, float]:
    """Quantities of what Python does around one call."""
    return {"calls": 1.0, "samples": float(num_samples), "tokens": float(tokens)}


def sizes(ledger: Fates, samples: list[int] | Ints) -> list[int]:
    """Tokens of samples, prompt and response."""
    found: list[int] = (ledger.column(PROMPT)[samples] + ledger.column(RESPONSE)[samples]).tolist()
    return found


def known(world: World, role: str, samples: Sequence[int] | Ints) -> policy.Bools:
    """Which of these samples a cache can answer, or were settled before they were sent."""
    kept, ledger = cache(world.scenario, role), world.ledger
    steps, index = ledger.column(STEP)[samples], ledger.column(INDEX)[samples]
    screened = settled(world, role, samples)
    if kept is None:
        return screened
    shares = np.array([kept.share(step) for step in range(int(steps.max(initial=0)) + 1)])[steps]
    return np.asarray(screened | policy.known(shares, world.scenario.seed, steps, index))


def calls(world: World, firsts: Sequence[int] | Ints) -> policy.Calls:
    """How the calls of the reward's remote service end whose first samples are these."""
    chosen, ledger = world.scenario.place.reward_score, world.ledger
    assert chosen is not None and chosen.remote is not None, "refused by lab.placement"
    steps, index = ledger.column(STEP)[firsts], ledger.column(INDEX)[firsts]
    return policy.calls(chosen.remote.rule, world.scenario.seed, steps, index)


def counted(found: policy.Calls, num_samples: int, last_samples: int) -> dict[str, int]:
    """Notes of a span about calls; every call has `num_samples`, the last one `last_samples`."""
    missed = int((~found.answered).sum()) * num_samples
    if len(found.answered) and not found.answered[-1]:
        missed += last_samples - num_samples
    again = int(found.attempts.sum()) - len(found.attempts)
    return {"calls": len(found.attempts), "retries": again, "unanswered": missed}


class ScoringService(Service):
    """The service of a scoring stage, whose servers keep the lanes of the steps."""

    def __init__(self, world: World, stage: str, step: int) -> None:
        chosen = placed(world.scenario, stage)
        self._scorers = [Scorer(world, stage, step, worker) for worker in team(world.scenario, stage)]
        remote = chosen.remote if isinstance(chosen, RewardScore) else None
        limit = world.scenario.update.microbatch_samples or world.scenario.pass_tokens
        rule = policy.Batching(
            max_samples=chosen.max_batch_samples if chosen else limit, max_wait_s=chosen.max_wait if chosen else 0.0,
            max_tokens=world.scenario.pass_tokens if kind(world.scenario, stage) in ("model", "head") else None,
        )  # fmt: skip
        super().__init__(
            world.env, self._scorers * (remote.concurrency if remote else 1), rule,
            lengths=lambda samples: sizes(world.ledger, samples),
            known=self._hits if cache(world.scenario, stage) or world.scenario.experience else None,
        )  # fmt: skip
        self._world, self._stage = world, stage
        self._left = False

    def submit(self, samples: Sequence[int]) -> None:
        """These wait from now on, unless nobody needs scores any more."""
        if not self._left:
            super().submit(samples)

    def _score(self, server: int, samples: list[int], lengths: list[int]) -> Process:
        if not self._left:
            yield from super()._score(server, samples, lengths)

    def _hits(self, samples: list[int]) -> list[bool]:
        """Those that a cache knows; the first worker notes them."""
        hits = known(self._world, self._stage, samples)
        tokens = sum(sizes(self._world.ledger, np.asarray(samples)[hits]))
        self._scorers[0].note(hits=int(hits.sum()), samples=int(hits.sum()), tokens=tokens)
        return hits.tolist()  # type: ignore[no-any-return]

    def begin(self) -> None:
        """All workers that are up are held from now on."""
        for scorer in self._scorers[: self._active]:
            scorer.begin()

    def hand_on(self, step: int) -> None:
        """Another step begins: what leaves the queue from now on belongs to it."""
        for scorer in self._scorers:
            scorer.hand_on(step)

    def leave(self) -> None:
        """What is under way is scored; what waits, and what comes, is not."""
        self._left = True
        self.scale(0)
        for scorer in self._scorers:
            scorer.leave()

    def end(self) -> None:
        """The lanes end now; nothing may be under way."""
        for scorer in self._scorers:
            scorer.end()


def start(world: World, stage: str, step: int = 0) -> ScoringService:
    """The service of a stage that scores, on the workers that do that; its lanes are those of the given step.

    `submit` it ledger numbers; `on_scored` is told when they are scored. One that outlives its step is moved on by
    `hand_on`; its lanes are recorded when a step ends, the last ones by `end`.
    """
    service = ScoringService(world, stage, step)
    for work in world.scenario.scaling:
        if work == f"{stage}.score":
            world.env.process(serve(world, world.crew(work), service, step))
    return service


def overlap(world: World, stage: str, step: int) -> Process:
    """A stage of a step whose samples come one by one from the stage before it, and go on so where that is asked."""
    (source, _), *_ = world.dataflow.streams(stage, step)
    stream, onward = world.stream(source, stage, step), world.streams(stage, step)
    service = start(world, stage, step)
    for target in onward:
        service.on_scored(target.put)
    samples = yield from stream.take()
    service.begin()
    while samples is not None:
        service.submit(samples)
        samples = yield from stream.take()
    service.close()
    yield service.drained
    service.end()
