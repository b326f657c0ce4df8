"""The rollout of a step by engines that may die in the middle of it: who generates their samples again.

What has all its tokens was handed over and is not lost. The counterpart in virtual time is `simulator.losing`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from executor import handing_over
from executor.loss import Loss
from executor.recovery import Recovery
from lab.policies.dispatch import Engines
from lab.timeline import Span

if TYPE_CHECKING:
    from executor.stages import Stages

Info = dict[str, Any]
Sample = tuple[int, int]
"""prompt within the step, and place among its samples"""


class LossyRollout:
    """One step's rollout."""

    def __init__(self, stages: Stages, recovery: Recovery, step: int) -> None:
        self._stages, self._recovery, self._step = stages, recovery, step
        self._scenario = stages.scenario
        self._heats = stages.decisions.temperatures(step)
        self._version = stages.dataflow.policy_version("rollout", step)
        self._parts: list[Any] = []
        """references to samples"""
        self._lengths: dict[Sample, int] = {}
        """response tokens of each sample that is back"""
        self._infos: list[Info] = []
        self._open: dict[str, dict[Sample, None]] = {}
        """by engine, what it was asked for and has not handed over"""
        self._given: dict[str, int] = {}

    async def play(self) -> tuple[Any, list[Info], dict[str, float]]:
        """A reference to the step's samples in order, what the engines report, and sums of how much the samples differ."""
        await self._recovery.somebody()
        every = range(self._scenario.num_tried)
        absent = self._recovery.absent() | self._stages.publication.absent
        shares = self._stages.dealer.deal(self._step, absent)
        engines = self._scenario.team("actor", "generate")
        async with asyncio.TaskGroup() as self._group:
            for engine, share in zip(engines, shares, strict=True):
                if share.prompts:
                    self._ask(engine.name, dict.fromkeys(share.prompts, every), share.notes)
        order = sorted(self._lengths)
        self._stages.dealer.returned([prompt for prompt, _ in order], [self._lengths[sample] for sample in order])
        samples, sums = await self._together()
        return samples, self._infos, sums

    def _ask(self, name: str, wanted: handing_over.Wanted, notes: Mapping[str, Any]) -> None:
        self._given[name] = self._given.get(name, 0) + len(wanted)
        self._group.create_task(self._generate(name, wanted, notes))

    async def _generate(self, name: str, wanted: handing_over.Wanted, notes: Mapping[str, Any]) -> None:
        """One engine's part, from its first sample to its last, or to its end."""
        left = dict.fromkeys((prompt, sample) for prompt, chosen in wanted.items() for sample in chosen)
        self._open[name] = self._open.get(name, {}) | left
        call = self._stages.workers.actors[name].hand_over.options(num_returns="streaming")
        arguments = (self._step, self._version, wanted, dict(notes), self._heats[list(wanted)])
        begun, spans, made, asked = time.monotonic(), list[Span](), 0, len(left)
        queued = self._given[name] > len(wanted)
        try:
            stream = call.remote(*arguments)
            async for reference in stream:
                came = await reference
                spans, made = spans + came["spans"], came["made"]
                if came["ended"]:
                    self._take(name, came["ended"], left, await anext(stream))
        except ray.exceptions.RayActorError as error:
            loss = await self._lost(name, error)
            said = {**notes, "samples": asked - len(left), "lost_samples": len(left)}
            self._infos += self._cut(loss, begun if not queued else loss.at, spans, said)
            self._recovery.note_lost(loss, len(left), made)
            if left:
                self._open[name] = {}
                await self._again(loss, list(left))
        else:
            self._infos.append({"spans": spans})

    def _take(self, name: str, ended: Sequence[tuple[int, int, int]], left: dict[Sample, None], samples: Any) -> None:
        """Samples are back."""
        self._parts.append(samples)
        for prompt, sample, tokens in ended:
            self._lengths[prompt, sample] = tokens
            left.pop((prompt, sample))
            self._open[name].pop((prompt, sample), None)

    async def _lost(self, name: str, error: Exception) -> Loss:
        """Waits until the death of an engine has been noticed. Raises the error where it is not to be survived."""
        loss = await self._recovery.reason(error)
        if loss is None or loss.name != name:
            loss = self._recovery.losses.get(name)
        if loss is None:
            raise error
        return loss

    async def _again(self, loss: Loss, samples: Sequence[Sample]) -> None:
        """Someone else generates them, or the same engine once it works again."""
        if loss.fault.way_back == "restart":
            await loss.up.wait()
        takers = await self._recovery.somebody()
        if loss.fault.way_back == "restart" and loss.name in takers:
            takers = [loss.name]
        elif loss.fault.spare in takers:
            takers = [loss.fault.spare]
        of: dict[int, list[int]] = {}
        for prompt, sample in samples:
            of.setdefault(prompt, []).append(sample)
        prompts = list(of)
        dealt = self._stages.dealer.choose([(self._step, prompt) for prompt in prompts], self._engines(takers))
        for name, share in zip(takers, dealt, strict=True):
            if share:
                mine = {prompts[place]: of[prompts[place]] for place in share}
                speed, rule = self._scenario.workers[name].speed, self._scenario.rollout.dispatch
                self._ask(name, mine, {"dispatch": rule, "prompts": list(mine), "speed": speed})

    def _engines(self, names: Sequence[str]) -> Engines:
        """As the driver knows them: what it gave, and what is not back."""
        open_, most = [len(self._open.get(name, ())) for name in names], self._scenario.rollout.max_num_seqs
        return Engines(
            speed=np.array([self._scenario.workers[name].speed for name in names]),
            given=np.array([self._given.get(name, 0) for name in names]),
            queued=np.array([max(number - most, 0) for number in open_]),
            running=np.array([min(number, most) for number in open_]), free_kv_tokens=np.full(len(names), np.inf),
        )  # fmt: skip

    def _cut(self, loss: Loss, begun: float, spans: Sequence[Span], attrs: dict[str, Any]) -> list[Info]:
        """What a dead engine did, as far as it told: it ended when it was struck. Nothing where that was before."""
        start, worker = min([begun, *(span.start_s for span in spans)]), self._scenario.workers[loss.name]
        if loss.at < start:
            return []
        loss.at = max([loss.at, *(span.end_s for span in spans)])
        whole = Span(
            span_id=f"rollout/{self._step}/{loss.name}", resource=loss.name, step=self._step, stage="rollout",
            pool=worker.pool, worker=loss.name, start_s=start, end_s=loss.at, policy_version=self._version, attrs=attrs,
        )  # fmt: skip
        return [{"spans": [*spans, whole]}]

    async def _together(self) -> tuple[Any, dict[str, float]]:
        """The samples of all engines as those of the step: an engine joins them, another where that one dies."""
        while True:
            name = (await self._recovery.somebody())[0]
            call = self._stages.workers.actors[name].__ray_call__.options(num_returns=2)
            samples, sums = call.remote(handing_over.together, *self._parts)
            try:
                return samples, await sums
            except ray.exceptions.RayActorError as error:
                await self._lost(name, error)
