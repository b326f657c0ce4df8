"""Does the simulated scheduler decide what vLLM decides? Random workloads, iteration by iteration.

Three sources: `engine`, the real engine with a small network; `sync` and `async`, vLLM's two scheduler classes without
a model. Most workloads are short of KV blocks and share prefixes. A row per workload; the
first iteration that differs is printed in full, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from executor.replay import ReplayRequest, Source, TracedIteration, play, random_workload

if TYPE_CHECKING:
    from simulator.engine import Settings

SOURCES: tuple[Source, ...] = ("engine", "sync", "async")
BLOCK_TOKENS = (4, 8, 16, 32)
"""block sizes of the workloads without a model, in turn; the engine on a CPU takes the last"""
NAMES = ("scheduled", "running", "waiting", "blocks", "preempted", "finished")
"""what an iteration is compared by"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload that vLLM and the simulator both played."""

    source: Source
    seed: int
    requests: int
    iterations: int
    """that vLLM's scheduler was called for"""
    preemptions: int
    prefix_hits: int
    """admissions that found part of their prefix cached"""
    difference: str
    """the first iteration that differs and what differs; empty: none"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=50, help="of each source")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES)
    chosen = parser.parse_args()
    print(f"{'':8}{'seed':>5}{'requests':>10}{'iterations':>12}{'preemptions':>13}{'prefix hits':>13}  decisions")
    cases: list[Case] = []
    with vllm() as process:
        for source in chosen.sources:
            for case in compare(process, source, range(chosen.workloads)):
                cases.append(case)
                print(row(case), flush=True)
    for source in chosen.sources:
        print(summary([case for case in cases if case.source == source]))
    return int(any(case.difference for case in cases))


def row(case: Case) -> str:
    counts = f"{case.requests:10}{case.iterations:12}{case.preemptions:13}{case.prefix_hits:13}"
    return f"{case.source:8}{case.seed:5}{counts}  {case.difference or 'the same'}"


def summary(cases: Sequence[Case]) -> str:
    """One line for the cases of one source."""
    both = sum(bool(case.preemptions and case.prefix_hits) for case in cases)
    same = sum(not case.difference for case in cases)
    return (
        f"{cases[0].source}: {same} of {len(cases)} workloads the same in all of {sum(c.iterations for c in cases)} "
        f"iterations; {sum(c.preemptions for c in cases)} preemptions, {sum(c.prefix_hits for c in cases)} prefix hits, "
        f"{both} workloads with both"
    )


def vllm() -> ProcessPoolExecutor:
    """A process for vLLM, which keeps what it needs from one workload to the next."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def compare(process: ProcessPoolExecutor, source: Source, seeds: Iterable[int], **changed: Any) -> Iterator[Case]:
    """Plays random workloads with vLLM and the simulator; `changed` settings hold for the simulator only."""
    from simulator.engine import Settings

    for seed in seeds:
        block = BLOCK_TOKENS[-1] if source == "engine" else BLOCK_TOKENS[seed % len(BLOCK_TOKENS)]
        settings, requests = random_workload(seed, block)
        settings = replace(settings, async_scheduling=source == "async")
        iterations = process.submit(play, source, settings, requests).result()
        ours = simulated(Settings(**(asdict(settings) | changed)), requests)
        yield Case(
            source=source, seed=seed, requests=len(requests), iterations=len(iterations),
            preemptions=sum(len(it.preempted) for it in iterations),
            prefix_hits=sum(tokens > 0 for it in iterations for _, tokens in it.hits),
            difference=difference([comparable(it) for it in iterations], ours),
        )  # fmt: skip


def simulated(settings: Settings, requests: Sequence[ReplayRequest]) -> list[tuple[Any, ...]]:
    """The simulator's decisions on a workload."""
    import numpy as np

    from simulator.engine import Requests
    from simulator.replay import trace

    numbers: dict[tuple[int, ...], int] = {}
    step = settings.block_tokens
    contents = [
        [numbers.setdefault(item.prompt[:end], len(numbers)) for end in range(step, len(item.prompt) + 1, step)]
        for item in requests
    ]
    known = Requests(
        prompt=np.array([len(item.prompt) for item in requests]),
        response=np.array([item.response for item in requests]),
        contents=contents,
    )
    return [tuple(iteration) for iteration in trace(settings, known, [item.arrival for item in requests])]


def comparable(iteration: TracedIteration) -> tuple[Any, ...]:
    """What both sides tell about an iteration, in the order of NAMES."""
    scheduled = [tuple(item) for item in iteration.scheduled]
    return (scheduled, *(getattr(iteration, name) for name in NAMES[1:]))


def difference(theirs: Sequence[tuple[Any, ...]], ours: Sequence[tuple[Any, ...]]) -> str:
    """The first iteration that differs, with what differs in it; empty where all are equal."""
    for number, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        parts = [f"{name} {a} in vLLM, {b} simulated" for name, a, b in zip(NAMES, one, other, strict=True) if a != b]
        if parts:
            return f"iteration {number}: " + "; ".join(parts)
    return "" if len(theirs) == len(ours) else f"{len(theirs)} iterations in vLLM, {len(ours)} simulated"


if __name__ == "__main__":
    sys.exit(main())
