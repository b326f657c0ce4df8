"""Engines that are lost while weights are published: killed or hanging, in the meeting or in the transfer, one after the
other; the run finishes, and everything is trained once."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor import processes, syncing
from lab.scenario import Scenario
from tests.executor.test_faults import played

Make = Callable[..., Scenario]
FIRST, SECOND = "actor.generate[0]", "actor.generate[1]"
LONGEST_S = {"sync": 0.02, "meet": 0.04}
"""that these take without a loss, about: strikes come within"""
FAULT: dict[str, Any] = {"kind": "worker_lost", "mtbf": 1e9, "recovery": "reassign", "detect": 1.0}


class Striking:
    """Strikes engines at moments of weight_sync: in a transfer, in the meeting with the process that takes the place, and
    the other engine while the first one is away. Where nobody is struck, waits for who is away: it comes in the middle."""

    def __init__(self, folder: Path, seed: int, number: int) -> None:
        self._folder, self._draw, self._number = folder, random.Random(seed), number
        self.left = [("sync", SECOND), ("meet", SECOND), ("sync", FIRST)]

    def wrap(self, name: str, play: Callable[..., Any]) -> Callable[..., Any]:
        async def struck(stages: Any, *arguments: Any) -> Any:
            if stages.recovery is not None:
                engines = arguments[0] if name == "meet" else syncing.circle(stages)
                await self._strike(name, [engine.name for engine in engines], stages.recovery)
            return await play(stages, *arguments)

        return struck

    async def _strike(self, name: str, engines: list[str], recovery: Any) -> None:
        if self.left and self.left[0][0] == name and self.left[0][1] in engines:
            pid = processes.read(self._folder)[self.left.pop(0)[1]]
            when = self._draw.uniform(0.0, LONGEST_S[name])
            asyncio.get_running_loop().call_later(when, os.kill, pid, self._number)
            return
        while recovery.losses and (not self.left or self.left[0][1] != FIRST):
            await asyncio.sleep(0.01)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "number", "seed"),
    [
        ("synchronous", signal.SIGKILL, 1),
        ("synchronous", signal.SIGSTOP, 2),
        ("synchronous", signal.SIGSTOP, 3),
        ("one_step_off", signal.SIGSTOP, 4),
    ],
)
def test_engines_are_lost_in_weight_syncs(
    local_ray: None, scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, number: int, seed: int
) -> None:
    striking = Striking(tmp_path, seed, number)
    for name in ("sync", "meet"):
        monkeypatch.setattr(syncing, name, striking.wrap(name, getattr(syncing, name)))
    chosen = scenario("grpo-two-engines", num_steps=8, schedule={"mode": mode}).replace({"faults": [FAULT]})
    timeline = played(chosen, tmp_path)
    assert not striking.left
    assert sorted(fault["target"] for fault in timeline.header.faults) == [FIRST, SECOND, SECOND]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize(
    ("trigger", "transport", "payload"),
    [("event", "store", "full"), ("pull", "object_store", "full"), ("event", "store", "delta")],
)
def test_an_engine_is_lost_where_engines_fetch_weights(
    local_ray: None, scenario: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigger: str, transport: str, payload: str
) -> None:  # fmt: skip
    striking = Striking(tmp_path, 5, signal.SIGKILL)
    striking.left = [("sync", SECOND)]
    monkeypatch.setattr(syncing, "sync", striking.wrap("sync", syncing.sync))
    sync: dict[str, Any] = {"trigger": trigger, "transport": transport, "payload": payload}
    sync |= {"every": "100 ms"} if trigger == "pull" else {}
    sync |= {"delta_share": 1.0} if payload == "delta" else {}
    chosen = scenario("grpo-two-engines", num_steps=6, weight_sync=sync).replace({"faults": [FAULT]})
    timeline = played(chosen, tmp_path)
    (fault,) = timeline.header.faults
    again = [span for span in timeline.stages() if span.worker == SECOND and span.stage == "rollout" and not span.lost]
    assert not striking.left and max(span.step for span in again) == 5
    assert max(span.start_s for span in again) > fault["at_s"]
