"""Runs a scenario for real: one task per node of the dataflow, each waiting for what it requires.

The loop is the simulator's: await the requirements, run the stage, publish. Only the stage itself differs.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from executor.earlier import Earlier
from executor.ledger import Ledger, finishes
from executor.limits import refuse
from executor.stages import Stages
from executor.store import Store
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
    scenario: Scenario, folder: Path, progress: Progress | None = None, earlier: Earlier | None = None
) -> Timeline:
    """Executes a scenario on this machine with Ray, vLLM and DeepSpeed; returns what was measured.

    Spans of finished steps are appended to `folder/spans.jsonl` as the run goes on, checkpoints are written to
    `folder/checkpoints`. Time zero is the moment at which all workers are ready. Ctrl-C and SIGTERM end the run with
    status `cancelled`, an error in a worker with status `failed` and the header's `error`; finished steps are kept
    in both cases and no process is left behind. `earlier`: the past of a run that is resumed, which
    `executor.resume.resume` reads. Raises InputError, before anything starts, for what cannot be honoured.
    """
    refuse(scenario)
    return asyncio.run(_execute(scenario, folder, progress or (lambda stage, num_finished: None), earlier or Earlier()))


async def _execute(scenario: Scenario, folder: Path, progress: Progress, earlier: Earlier) -> Timeline:
    dataflow = build(scenario)
    ledger = Ledger(scenario, dataflow, folder, earlier)
    with _interruptible(), Workers(scenario) as workers:
        try:
            workers.start()
            stages = Stages(scenario, dataflow, workers, folder)
            store = Store(scenario, folder, stages, ledger)
            infos = await asyncio.wait_for(stages.setup(), _SETUP_TIMEOUT_S)
            ledger.start(infos + await asyncio.wait_for(stages.restore(earlier), _SETUP_TIMEOUT_S))
            progress("setup", ledger.num_finished)
            await _play(dataflow, stages, ledger, store, progress)
            await stages.finish()
            ledger.memory = await _memory(scenario, workers)
        except asyncio.CancelledError:
            return ledger.timeline("cancelled")
        except InputError:
            raise
        except Exception as error:  # whatever a worker may raise
            return ledger.timeline("failed", _message(error, workers.names()))
    return ledger.timeline("done")


async def _play(dataflow: Dataflow, stages: Stages, ledger: Ledger, store: Store, progress: Progress) -> None:
    """All nodes side by side; the first one that fails stops the others."""
    done = {(stage, step): asyncio.Event() for stage in dataflow.nodes for step in dataflow.steps(stage)}
    saving: dict[int, asyncio.Task[None]] = {}
    for run, event in done.items():
        if run[1] < ledger.earlier.first_step or run in ledger.earlier.kept:
            event.set()

    async def ended(step: int) -> None:
        for stage, node in dataflow.nodes.items():
            if node.runs(step):
                await done[stage, step].wait()

    async def saved(step: int) -> None:
        saving[step] = asyncio.create_task(store.complete(step, ended(step)))
        await asyncio.shield(saving[step])
        progress("checkpoint", ledger.num_finished)

    async def node(stage: str) -> None:
        for step in [step for step in dataflow.steps(stage) if not done[stage, step].is_set()]:
            for needed in dataflow.requirements(stage, step):
                await done[needed].wait()
            ledger.issue(stage)
            ledger.add(stage, step, await stages.run(stage, step))
            if stage == finishes(dataflow) and store.due(step):
                store.published(step)
            if stage == "checkpoint":
                group.create_task(saved(step))
            done[stage, step].set()
            progress(stage, ledger.num_finished)

    try:
        async with asyncio.TaskGroup() as group:
            nodes = [group.create_task(node(stage)) for stage in dataflow.nodes]
            await asyncio.wait(nodes)
            await stages.settle()
    finally:
        await _completed({
            task: all(event.is_set() for (_, k), event in done.items() if k == step) for step, task in saving.items()
        })  # fmt: skip


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


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM cancel the run instead of ending this process; outside the main thread they do nothing new."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught = []
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, task.cancel)
            caught.append(number)
        except (ValueError, RuntimeError):  # not the main thread
            break
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


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
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None) or error
    if getattr(cause, "_actor_init_failed", False):
        return str(cause).strip().splitlines()[-1]
    if (dead := names.get(str(getattr(cause, "actor_id", None)))) is not None:
        return f"the process of {dead} died: it crashed, was killed, or there was no memory left for it"
    return f"{type(cause).__name__}: {cause}".strip()
