"""A rollout that hands over every sample as soon as it has all its tokens, for engines that may die before their last.

What was handed over belongs to whoever asked, and outlives the engine. Everything here runs in a worker's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.diversity import Sums, diversity
from executor.experience import Samples, joined

if TYPE_CHECKING:
    from executor.inference import Ended, Iteration
    from executor.rollout import RolloutWorker

Info = dict[str, Any]
Wanted = Mapping[int, Sequence[int]]
"""samples of each prompt"""


def generate(
    worker: RolloutWorker,
    step: int,
    policy_version: int,
    wanted: Wanted,
    about: Mapping[str, Any],
    temperatures: NDArray[np.float64],
) -> Iterator[Info | Samples]:
    """The wanted samples of a step, in turn what came of some iterations and the samples that ended with the last of them.

    What came: the `spans` since the last one; `ended`, (prompt, sample, response tokens) of each; `made`, response tokens
    of those that still run. The very last has nothing after it, `ended` is empty and the stage's span is there.
    `temperatures`: of each sample of these prompts, [prompts, samples of a prompt]. Raises RuntimeError where the engine
    has another version.
    """
    if policy_version != worker.policy_version:
        problem = (
            f"{worker.worker.name} has policy version {worker.policy_version}, step {step} asks for {policy_version}"
        )
        raise RuntimeError(problem)
    requests = [
        request for request in worker._requests(step, list(wanted), temperatures)
        if request.sample in wanted[request.prompt_index]
    ]  # fmt: skip
    iterations: list[Iteration] = []
    finished: dict[int, Ended] = {}
    with worker.recorder.stage("rollout", step, policy_version) as notes:
        for progress in worker.backend.generate(requests):
            for found in progress.iterations:
                worker._record(found, progress.start_s, progress.end_s)
            iterations += progress.iterations
            finished |= {ended.index: ended for ended in progress.ended}
            if progress.ended:
                asked = [requests[one.index] for one in progress.ended]
                yield _came(
                    worker,
                    [(a.prompt_index, a.sample, len(b.tokens)) for a, b in zip(asked, progress.ended, strict=True)],
                )
                yield worker._samples(step, asked, progress.ended)
        notes |= worker._summary(requests, iterations, finished)
        notes |= about
    yield _came(worker, [])


def _came(worker: RolloutWorker, ended: list[tuple[int, int, int]]) -> Info:
    made = sum(running.response_tokens for running in worker.backend.running())
    return {"spans": worker.recorder.take(), "ended": ended, "made": made}


def together(_: Any, *parts: Samples) -> tuple[Samples, Sums]:
    """The samples of a step in order, by prompt and place, and what is said of how much they differ."""
    found = joined(parts)
    whole = found.take(np.lexsort((found.indices, found.prompts)))
    return whole, diversity(whole)
