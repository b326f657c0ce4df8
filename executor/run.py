"""Runs a scenario for real: one task per node of the dataflow, each waiting for what it requires.

The loop is the simulator's: await the requirements, run the stage, publish. Only the stage itself differs.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from executor import processes
from executor.earlier import Earlier
from executor.ended import Ended
from executor.going_back import go_back
from executor.ledger import Ledger, finishes
from executor.limits import refuse
from executor.loss import GoneBack, Loss, dead, innermost
from executor.recovery import Recovery
from executor.stages import Stages
from executor.stopping import Stopped, Stopping, interruptible
from executor.store import Store
from executor.watching import Watch
from executor.workers import Workers
from lab.dataflow import Dataflow
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

Progress = Callable[[str, int], None]
"""called with the stage that has just ended and the number of finished steps"""
_SETUP_TIMEOUT_S = 600.0
_COMPLETE_TIMEOUT_S = 30.0
"""that ranks get to write the checkpoint of a step that has ended, when the run ends early"""


def execute(
    scenario: Scenario,
    folder: Path,
    progress: Progress | None = None,
    earlier: Earlier | None = None,
    watch: Watch | None = None,
) -> Timeline:
    """Executes a scenario on this machine with Ray, vLLM and DeepSpeed; returns what was measured.

    Spans of finished steps are appended to `folder/spans.jsonl` as the run goes on, checkpoints are written to
    `folder/checkpoints`. Time zero is the moment at which all workers are ready. Ctrl-C and SIGTERM end the run with
    status `cancelled`, an error in a worker with status `failed` and the header's `error`; finished steps are kept
    in both cases and no process is left behind. `earlier`: the past of a run that is resumed, which
    `executor.resume.resume` reads; `watch`: is told how it goes, and closed by whoever opened it. Raises InputError,
    before anything starts, for what cannot be honoured.
    """
    refuse(scenario)
    told = progress or (lambda stage, num_finished: None)
    return asyncio.run(_execute(scenario, folder, told, earlier or Earlier(), watch))


async def _execute(
    scenario: Scenario, folder: Path, progress: Progress, earlier: Earlier, watch: Watch | None = None
) -> Timeline:
    attempt = Attempt(scenario, folder, earlier, watch)
    with (
        interruptible(lambda: attempt.stop()), processes.told(folder), Workers(scenario) as workers,
        Recovery(scenario, folder) as recovery,
    ):  # fmt: skip
        try:
            while (lost := await attempt.play(workers, recovery, progress)) is not None:
                recovery.kill_all()
                workers.clear()
                attempt = Attempt(scenario, folder, go_back(scenario, folder, attempt.ledger, lost), watch)
        except (asyncio.CancelledError, Stopped):
            return attempt.ledger.timeline("cancelled")
        except InputError:
            raise
        except Exception as error:  # whatever a worker may raise
            return attempt.ledger.timeline("failed", _message(error, workers.names()))
    return attempt.ledger.timeline("done")


class Attempt:
    """One attempt at a run: from its beginning or a checkpoint to its end, or until trained state is lost."""

    def __init__(self, scenario: Scenario, folder: Path, earlier: Earlier, watch: Watch | None) -> None:
        self.scenario, self.folder, self.earlier = scenario, folder, earlier
        self.dataflow = build(scenario)
        self.stopping = Stopping(self.dataflow, earlier.first_step)
        self.ledger = Ledger(scenario, self.dataflow, folder, earlier)
        self.ledger.watch = watch
        self._plays = False

    def stop(self) -> bool:
        """Whether it comes to an orderly end; there is nothing to save before it has begun."""
        if self._plays:
            self.stopping.stop()
        return self._plays

    async def play(self, workers: Workers, recovery: Recovery, progress: Progress) -> Loss | None:
        """To the end; returns what took the run back. Raises Stopped where it was asked to."""
        scenario, ledger, dataflow = self.scenario, self.ledger, self.dataflow
        workers.start()
        stages = Stages(scenario, dataflow, workers, self.folder)
        store = Store(scenario, self.folder, stages, ledger)
        infos = await asyncio.wait_for(stages.setup(), _SETUP_TIMEOUT_S)
        ledger.clocks, ledger.nodes = await workers.clocks(), workers.addresses
        ledger.start(infos + await asyncio.wait_for(stages.restore(self.earlier), _SETUP_TIMEOUT_S))
        stages.may_begin = self.stopping.may_begin
        stages.now = stages.judges.now = lambda: time.monotonic() - ledger.zero_s
        await recovery.begin(stages, ledger, workers)
        await stages.begin(ledger)
        progress("setup", ledger.num_finished)
        self._plays = True
        try:
            await recovery.guard(_play(dataflow, stages, ledger, store, progress, self.stopping))
            await stages.finish()
            ledger.memory = await _memory(scenario, workers)
            ledger.clocks = ledger.clocks.drifted(await workers.clocks())
            recovery.finish()
        except GoneBack as back:
            return back.loss
        finally:
            self._plays = False
            recovery.rest()
            if stages.production is not None:
                stages.production.rest()
        return None


async def _play(
    dataflow: Dataflow, stages: Stages, ledger: Ledger, store: Store, progress: Progress, stopping: Stopping
) -> None:
    """All nodes side by side; the first one that fails stops the others. Raises Stopped where the run was to end."""
    ended = Ended(dataflow, ledger.earlier.first_step, ledger.earlier.kept)
    saving: dict[int, asyncio.Task[None]] = {}
    savers = set[asyncio.Task[None]]()

    async def saved(step: int) -> None:
        saving[step] = asyncio.create_task(store.complete(step, ended.whole(step)))
        await asyncio.shield(saving[step])
        del saving[step]
        progress("checkpoint", ledger.num_finished)

    async def node(stage: str) -> None:
        async for step in ended.due(stage):
            await stopping.begin((stage, step))
            ledger.issue(stage)
            ledger.add(stage, step, await stages.run(stage, step))
            if stage == finishes(dataflow):
                store.published(step)
            if stage == "checkpoint":
                savers.add(saver := group.create_task(saved(step)))
                saver.add_done_callback(savers.discard)
            ended.add(stage, step)
            progress(stage, ledger.num_finished)

    async def stopped() -> None:
        await stopping.requested.wait()
        if stages.production is not None:
            stages.production.shut()
        for step in range(stopping.last + 1):
            await ended.whole(step)

    try:
        async with asyncio.TaskGroup() as group:
            nodes = [group.create_task(node(stage)) for stage in dataflow.nodes]
            stop = group.create_task(stopped())
            if await _first(stop, nodes):
                await asyncio.wait([*nodes, *savers])
                await store.last(stopping.last)
            await stages.settle()
    finally:
        await _completed({task: ended.is_whole(step) for step, task in saving.items()})
    if not ended.everything():
        raise Stopped


async def _first(stop: asyncio.Task[None], nodes: Sequence[asyncio.Task[None]]) -> bool:
    """Whether a run was stopped before all of its nodes had ended; then they are given up."""
    everything = asyncio.ensure_future(asyncio.wait(nodes))
    await asyncio.wait({everything, stop}, return_when=asyncio.FIRST_COMPLETED)
    if everything.done():
        stop.cancel()
        return False
    for task in (everything, *nodes):
        task.cancel()
    return True


async def _completed(saving: Mapping[asyncio.Task[None], bool]) -> None:
    """What makes a checkpoint whole ends, where its step has (True); what is of another step is given up.

    So that a run that fails, or is ended, keeps the steps that are behind it.
    """
    for task, has_ended in saving.items():
        if not has_ended:
            task.cancel()
    if saving:
        whole, late = await asyncio.wait(saving, timeout=_COMPLETE_TIMEOUT_S)
        for task in late:
            task.cancel()
        for task in whole:
            if not task.cancelled():
                task.exception()  # told by whoever waits for it


async def _memory(scenario: Scenario, workers: Workers) -> dict[str, Any]:
    """Peak resident memory of each pool's processes; on a CPU every pool shares the machine's memory."""
    names = list(workers.actors)
    peaks = await asyncio.gather(*(_peak(workers.actors[name]) for name in names))
    capacity = psutil.virtual_memory().total
    found = {}
    for pool in scenario.pools:
        peak = sum(peak for name, peak in zip(names, peaks, strict=True) if scenario.workers[name].pool == pool)
        found[pool] = {"peak_bytes": peak, "capacity_bytes": capacity, "fits": peak <= capacity}
    return found


async def _peak(actor: Any) -> int:
    peak: int = await actor.__ray_call__.remote(_own_peak)
    return peak


def _own_peak(_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _message(error: BaseException, names: Mapping[str, str]) -> str:
    """The innermost cause, with its type; workers' errors carry their own traceback. `names`: of workers by actor id."""
    cause = innermost(error)
    if getattr(cause, "_actor_init_failed", False):
        return str(cause).strip().splitlines()[-1]
    if (name := dead(error, names)) is not None:
        return f"the process of {name} died: it crashed, was killed, or there was no memory left for it"
    return f"{type(cause).__name__}: {cause}".strip()
