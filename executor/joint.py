"""The rollout of a step by engines that help each other: they take over what waits elsewhere, and stop together.

The driver hears what ended where, asks the rules (`lab.policies`), and commands; samples themselves stay on the engines
until the step has what it needs. Its counterpart in virtual time is `simulator.joint`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from executor import seat as engine_side
from executor.calls import retrieved
from executor.experience import Samples, joined
from executor.handing import made
from executor.inbox import in_order
from executor.outgoing import wanted
from executor.seat import TALK, News
from lab.dealing import Share
from lab.placement import Worker
from lab.policies.stealing import Queues, Room, Steal, settled, startable, steals
from lab.returning import Returning
from lab.scenario import Scenario

if TYPE_CHECKING:
    from executor.stages import Stages

Info = dict[str, Any]


@dataclass(kw_only=True, eq=False)
class Seat:
    """An engine in the rollout of a step, as the driver sees it."""

    worker: Worker
    actor: Any
    share: Share
    playing: asyncio.Task[Info] | None = None
    samples: Any = None
    """a reference to what the engine keeps"""
    given: int = 0
    ended: list[int] = field(default_factory=list)
    """places of the samples that it has given all their tokens"""
    busy_s: float = 0.0
    """of its passes, as it last said"""
    notes: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    @property
    def idle(self) -> bool:
        return self.given == len(self.ended)

    @property
    def num_samples(self) -> int:
        """That it has given all their tokens."""
        return len(self.ended)

    async def ask(self, command: str, *arguments: Any) -> Any:
        """What the engine says to a command, while it generates."""
        call = self.actor.__ray_call__.options(concurrency_group=TALK)
        return await call.remote(engine_side.talk, command, *arguments)


class Joint:
    """One step's rollout. Engines that are absent take no part."""

    def __init__(
        self, scenario: Scenario, step: int, version: int, heats: NDArray[np.float64], sinks: Sequence[Any],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        """`heats`: of each sample that is issued, [prompts, samples]. `now`: the clock of the run."""
        self._scenario, self._step, self._version, self._heats = scenario, step, version, heats
        self._sinks, self._now = sinks, now
        self._hands_on = bool(sinks) or (scenario.experience is not None and scenario.experience.prefetch)
        self._returning = Returning(scenario)
        self._stealing = scenario.rollout.stealing or "actor.generate" in scenario.scaling
        self.seats: list[Seat] = []
        self.over = asyncio.Event()
        """the step has what it needs"""
        self.lock = asyncio.Lock()
        """held while somebody decides"""
        self._listeners = set[asyncio.Task[None]]()
        self._error: BaseException | None = None

    async def play(self, engines: Sequence[tuple[Worker, Any, Share]]) -> list[Info]:
        """Ends when every engine is through. What they report, in the order of `seats`.

        `engines`: those that take part, their actors and what they are dealt.
        """
        for worker, actor, share in engines:
            if share.prompts or self._stealing:
                await self._open(worker, actor, share)
        await self.over.wait()
        if self._error is not None:
            raise self._error
        return list(await asyncio.gather(*(seat.playing for seat in self.seats if seat.playing is not None)))

    @property
    def kept(self) -> list[int]:
        """Places of the samples that the step is trained on, in order."""
        return sorted(self._returning.places(self._returning.stop().keep))

    def active(self) -> list[Seat]:
        """The engines that are not through."""
        return [seat for seat in self.seats if not seat.closed]

    def seat_of(self, name: str) -> Seat | None:
        """Where an engine works now; None where it is through."""
        return next((seat for seat in self.seats if seat.worker.name == name and not seat.closed), None)

    async def retire(self, seat: Seat) -> None:
        """An engine that has nothing is not needed any more in this step; its process may end once it has reported."""
        await self._close(seat)
        assert seat.playing is not None, "it is open"
        await seat.playing

    def note(self, name: str, record: dict[str, Any]) -> None:
        """The first engine that is not through notes a decision on its span."""
        for seat in self.active()[:1]:
            seat.notes.setdefault(name, []).append(record)

    async def rooms(self, seats: Sequence[Seat]) -> list[Room]:
        """What waits and runs on these engines, and how many more could."""
        found = await asyncio.gather(*(seat.ask("state") for seat in seats))
        for seat, (_, busy_s) in zip(seats, found, strict=True):
            seat.busy_s = busy_s
        return [room for room, _ in found]

    async def join(self, worker: Worker, actor: Any) -> None:
        """An engine is there that was not at the start; it takes what waits elsewhere."""
        if self._stealing and not self.over.is_set():
            notes: dict[str, Any] = {"dispatch": self._scenario.rollout.dispatch, "prompts": [], "speed": worker.speed}
            await self._open(worker, actor, Share(prompts=[], notes=notes))

    async def _open(self, worker: Worker, actor: Any, share: Share) -> None:
        seat = Seat(worker=worker, actor=actor, share=share)
        await actor.__ray_call__.remote(engine_side.open_seat, self._step, self._heats)
        if self.over.is_set():
            return
        places = self._returning.places(share.prompts)
        seat.given = len(places)
        call = actor.__ray_call__.options(num_returns=2)
        seat.samples, info = call.remote(engine_side.play, self._version, places, share.notes)
        seat.playing = asyncio.create_task(self._played(info))
        seat.playing.add_done_callback(retrieved)
        self.seats.append(seat)
        listener = asyncio.create_task(self._listen(seat))
        self._listeners.add(listener)
        listener.add_done_callback(self._failed)

    async def _played(self, reference: Any) -> Info:
        """What an engine reports when it is through; one that fails ends the rollout."""
        try:
            info: Info = await reference
        except BaseException as error:
            self._error = self._error or error
            self.over.set()
            raise
        return info

    def _failed(self, task: asyncio.Task[None]) -> None:
        """A listener that fails ends the rollout: its engine has failed too, and says why."""
        self._listeners.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self.over.set()

    async def _listen(self, seat: Seat) -> None:
        while not seat.closed and not self.over.is_set():
            try:
                news = await seat.ask("listen")
            except Exception:
                if seat in self.active():
                    raise
                return  # its process was ended
            async with self.lock:
                await self._hear(seat, news)

    async def _hear(self, seat: Seat, news: News) -> None:
        """Samples are back, or an engine could start more than waits in it."""
        seat.ended += news.ended
        usable = [place for ended in news.ended for place in self._returning.back(ended)]
        if usable and self._hands_on:
            await self._hand_on(usable)
        if self._returning.enough and not self.over.is_set():
            await self._stop()
            return
        if self._stealing and (news.dry or any(other.idle for other in self.active())):
            await self._steal()
        await self._close_idle()

    async def _hand_on(self, places: Sequence[int]) -> None:
        """To whoever takes samples one by one; of a prompt that is whole at once, wherever its samples are."""
        holding = [seat for seat in self.seats if set(places) & set(seat.ended)]
        await asyncio.gather(*(seat.ask("hand_on", places, self._sinks) for seat in holding))

    async def _stop(self) -> None:
        """Enough prompts are whole: the rest is given up, and what came of it is dropped."""
        said, self._stealing = self._returning.stop(), False
        for seat in self.active():
            if not seat.idle:
                seat.notes |= {"kept_prompts": len(said.keep)}
        await asyncio.gather(*(self._close(seat) for seat in self.active()))
        self.over.set()

    async def _close(self, seat: Seat) -> None:
        seat.closed = True
        await seat.ask("close", seat.notes)

    async def _close_idle(self) -> None:
        """Engines that have nothing, and that nothing comes to, are through."""
        if not self._stealing:
            await asyncio.gather(*(self._close(seat) for seat in self.active() if seat.idle))

    async def _steal(self) -> None:
        seats = self.active()
        rooms = await self.rooms(seats)
        queues = Queues(
            queued=np.array([room.num_queued for room in rooms]),
            free_slots=np.array([startable(room) for room in rooms]),
            speed=np.array([seat.worker.speed for seat in seats]),
        )
        for move in steals(queues):
            await self._move(move, seats[move.thief], seats[move.victim], int(queues.queued[move.victim]))
        if settled(queues):
            self._stealing = False

    async def _move(self, move: Steal, thief: Seat, victim: Seat, queued: int) -> None:
        """Samples go from one queue to another."""
        taken = await victim.ask("withdraw", move.num)
        if not taken:
            return
        victim.given -= len(taken)
        theft = {"from": victim.worker.name, "samples": len(taken), "queued": queued, "at_s": self._now()}
        thief.notes.setdefault("steals", []).append(theft)
        await thief.ask("give", taken)
        thief.given += len(taken)


def _count_wasted(info: Info, kept: Sequence[int]) -> None:
    """On an engine's span: the response tokens of samples that nobody is trained on."""
    useless = ~np.isin(np.asarray(info.pop("places"), dtype=np.int64), np.asarray(kept))
    number = int(np.asarray(info["responses"][1])[useless].sum())
    for place, span in enumerate(info["spans"]):
        if not span.op:
            number += span.attrs.get("aborted_tokens", 0)
            more = {"wasted_tokens": number} if number else {}
            info["spans"][place] = msgspec.structs.replace(span, attrs=span.attrs | more)


def chosen(worker: Any, places: Sequence[int], num_tried: int, *parts: Samples) -> Samples:
    """Of the samples of several engines those at these places of their step, in the order of prompts."""
    return in_order(wanted(joined([part for part in parts if len(part)]), places, num_tried))


async def together(stages: Stages, step: int, version: int) -> list[Info]:
    """The stage `rollout` of a run whose engines help each other."""
    scenario, elastic = stages.scenario, stages.elastic
    rollout = Joint(scenario, step, version, stages.decisions.issued(step), stages.judges.sinks, stages.now)
    absent = stages.publication.absent | (frozenset[int]() if elastic is None else elastic.absent())
    shares = stages.dealer.deal(step, absent)
    engines = list(zip(scenario.team("actor", "generate"), stages.engines, shares, strict=True))
    watch = None if elastic is None else asyncio.create_task(elastic.watch(rollout, step))
    infos = await rollout.play([engine for place, engine in enumerate(engines) if place not in absent])
    if watch is not None:
        await watch
    for info in infos:
        _count_wasted(info, rollout.kept)
        stages.dealer.returned(*info.pop("responses"))
    infos[0]["learning"] = stages.decisions.rolled(step, infos)
    if stages.handing.used:
        stages.handing.made(step, made(infos), rollout.kept)
    else:
        parts, call = [seat.samples for seat in rollout.seats], engines[0][1].__ray_call__
        stages.came(step, call.remote(chosen, rollout.kept, scenario.num_tried, *parts))
    return infos + ([] if elastic is None else elastic.reported())
