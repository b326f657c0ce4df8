"""Does the simulated scheduler decide what vLLM decides? Random workloads, iteration by iteration.

Three references: `engine`, the real engine with a small network in this process; `sync` and `async`, vLLM's two
scheduler classes without a model. Most workloads are short of KV blocks and share prefixes. A row per workload; the
first iteration that differs is printed in full, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.load import load
from simulator.engine import Requests, Settings
from simulator.replay import trace

if TYPE_CHECKING:
    from executor.replay import EngineSettings, ReplayRequest, TracedIteration

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("engine", "sync", "async")
BLOCK_TOKENS = (4, 8, 16, 32)
"""block sizes of the workloads without a model, in turn; the engine on a CPU takes the last"""
NAMES = ("scheduled", "running", "waiting", "blocks", "preempted", "finished")
"""what an iteration is compared by"""
Reference = Callable[["EngineSettings", Sequence["ReplayRequest"]], "list[TracedIteration]"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload that vLLM and the simulator both played."""

    kind: str
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
    parser.add_argument("--workloads", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    chosen = parser.parse_args()
    print(f"{'':8}{'seed':>5}{'requests':>10}{'iterations':>12}{'preemptions':>13}{'prefix hits':>13}  decisions")
    cases: list[Case] = []
    for kind in chosen.kinds:
        for case in compare(kind, range(chosen.workloads)):
            cases.append(case)
            print(
                f"{kind:8}{case.seed:5}{case.requests:10}{case.iterations:12}{case.preemptions:13}{case.prefix_hits:13}  "
                f"{case.difference or 'the same'}",
                flush=True,
            )
    for kind in chosen.kinds:
        print(summary([case for case in cases if case.kind == kind]))
    return int(any(case.difference for case in cases))


def summary(cases: Sequence[Case]) -> str:
    """One line for the cases of one kind."""
    both = sum(bool(case.preemptions and case.prefix_hits) for case in cases)
    same = sum(not case.difference for case in cases)
    return (
        f"{cases[0].kind}: {same} of {len(cases)} workloads the same in all of {sum(c.iterations for c in cases)} "
        f"iterations; {sum(c.preemptions for c in cases)} preemptions, {sum(c.prefix_hits for c in cases)} prefix hits, "
        f"{both} workloads with both"
    )


def compare(kind: str, seeds: Iterable[int], **changed: Any) -> Iterator[Case]:
    """Plays random workloads with vLLM and the simulator; `changed` settings hold for the simulator only."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from executor.replay import random_workload

    with tempfile.TemporaryDirectory(prefix="lab-conformance-") as folder:
        play = reference(kind, Path(folder))
        for seed in seeds:
            block = BLOCK_TOKENS[-1] if kind == "engine" else BLOCK_TOKENS[seed % len(BLOCK_TOKENS)]
            settings, requests = random_workload(seed, block)
            settings = replace(settings, async_scheduling=kind == "async")
            iterations = play(settings, requests)
            ours = simulated(Settings(**(asdict(settings) | changed)), requests)
            yield Case(
                kind=kind, seed=seed, requests=len(requests), iterations=len(iterations),
                preemptions=sum(len(it.preempted) for it in iterations),
                prefix_hits=sum(tokens > 0 for it in iterations for _, tokens in it.hits),
                difference=difference([comparable(it) for it in iterations], ours),
            )  # fmt: skip


def collect(kind: str, seeds: Iterable[int], changed: dict[str, Any]) -> list[Case]:
    """`compare` at once, for another process."""
    return list(compare(kind, seeds, **changed))


def reference(kind: str, folder: Path) -> Reference:
    """vLLM's side: from a workload to its trace. A network is written to `folder`."""
    from executor.network import build_actor, save
    from executor.replay import arguments, random_workload, replay_engine, replay_scheduler

    save(build_actor(load(ROOT / "scenarios" / "quickstart.yaml").spec("actor"), 0), folder)
    if kind == "engine":
        return lambda settings, requests: replay_engine(folder, settings, requests)[0]
    config = arguments(folder, random_workload(0, BLOCK_TOKENS[-1])[0]).create_engine_config()
    return lambda settings, requests: replay_scheduler(config, settings, requests)


def simulated(settings: Settings, requests: Sequence[ReplayRequest]) -> list[tuple[Any, ...]]:
    """The simulator's decisions on a workload."""
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
