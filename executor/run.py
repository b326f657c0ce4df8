"""Runs a scenario for real: one task per node of the dataflow, each waiting for what it requires.

The loop is the simulator's: await the requirements, run the stage, publish. Only the stage itself differs.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from executor.ledger import Ledger
from executor.limits import refuse
from executor.stages import Stages
from executor.workers import Workers
from lab.dataflow import Dataflow
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

Progress = Callable[[str, int], None]
"""called with the stage that has just ended and the number of finished steps"""
_SETUP_TIMEOUT_S = 600.0


def execute(scenario: Scenario, folder: Path, progress: Progress | None = None) -> Timeline:
    """Executes a scenario on this machine with Ray, vLLM and DeepSpeed; returns what was measured.

    Spans of finished steps are appended to `folder/spans.jsonl` as the run goes on, checkpoints are written to
    `folder/checkpoints`. Time zero is the moment at which all workers are ready. Ctrl-C and SIGTERM end the run with
    status `cancelled`, an error in a worker with status `failed` and the header's `error`; finished steps are kept
    in both cases and no process is left behind. Raises InputError, before anything starts, for what cannot be honoured.
    """
    refuse(scenario)
    return asyncio.run(_execute(scenario, folder, progress or (lambda stage, num_finished: None)))


async def _execute(scenario: Scenario, folder: Path, progress: Progress) -> Timeline:
    dataflow = build(scenario)
    ledger = Ledger(scenario, dataflow, folder)
    with _interruptible(), Workers(scenario) as workers:
        try:
            workers.start()
            stages = Stages(scenario, dataflow, workers, folder)
            ledger.start(await asyncio.wait_for(stages.setup(), _SETUP_TIMEOUT_S))
            progress("setup", 0)
            await _play(dataflow, stages, ledger, progress)
            ledger.memory = await _memory(scenario, workers)
        except asyncio.CancelledError:
            return ledger.timeline("cancelled")
        except InputError:
            raise
        except Exception as error:  # whatever a worker may raise
            return ledger.timeline("failed", _message(error))
    return ledger.timeline("done")


async def _play(dataflow: Dataflow, stages: Stages, ledger: Ledger, progress: Progress) -> None:
    """All nodes side by side; the first one that fails stops the others."""
    done = {(stage, step): asyncio.Event() for stage in dataflow.nodes for step in dataflow.steps(stage)}

    async def node(stage: str) -> None:
        for step in dataflow.steps(stage):
            for needed in dataflow.requirements(stage, step):
                await done[needed].wait()
            ledger.issue(stage)
            ledger.add(stage, step, await stages.run(stage, step))
            done[stage, step].set()
            progress(stage, ledger.num_finished)

    async with asyncio.TaskGroup() as group:
        for stage in dataflow.nodes:
            group.create_task(node(stage))


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


def _message(error: BaseException) -> str:
    """The innermost cause, with its type; workers' errors carry their own traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}".strip()
