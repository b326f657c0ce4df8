"""Requests, settings and cost tables of rollout engines, drawn for laws; and the engine in its plain form."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest
from hypothesis import strategies as st

from lab.fates import Fates
from lab.scenario import Scenario
from profiles import interpolate
from profiles.iteration import EngineTable, Skews
from simulator import blocks, jump, playing, scheduler
from simulator.engine import Requests, Settings, grouped
from simulator.replay import Replayed
from simulator.rollout import samples

BLOCK = 4
LONGEST = 70
"""tokens of the longest sequence drawn"""
STEP_S = 0.01
CONSTANT = EngineTable(step_s=STEP_S)
"""every iteration takes as long"""
COMPILED: tuple[ModuleType, ...] = (interpolate, blocks, scheduler, jump, playing)


@contextmanager
def plain() -> Iterator[None]:
    """The engine as Python runs it, which also refuses what lies outside an array."""
    with pytest.MonkeyPatch.context() as patch:
        for module in COMPILED:
            for name, value in list(vars(module).items()):
                if hasattr(value, "py_func"):
                    patch.setattr(module, name, value.py_func)
        yield


def load(
    prompt: Sequence[int], response: Sequence[int], groups: Sequence[int] | None = None,
    arrival_s: Sequence[float] | None = None,
) -> Requests:  # fmt: skip
    """Requests; those of one group have the same prompt."""
    return Requests(
        prompt=np.array(prompt, dtype=np.int64), response=np.array(response, dtype=np.int64),
        arrival_s=None if arrival_s is None else np.array(arrival_s, dtype=float),
        contents=None if groups is None else grouped(prompt, groups, BLOCK),
    )  # fmt: skip


@st.composite
def loads(draw: st.DrawFn, *, spread_s: float = 0.0) -> Requests:
    """Up to 24 requests in groups that share prompts; with `spread_s` they arrive one after the other over that time."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompts = random.integers(1, draw(st.integers(1, 40)) + 1, draw(st.integers(1, 8))).tolist()
    groups = np.repeat(np.arange(len(prompts)), random.integers(1, 4, len(prompts))).tolist()
    response = random.integers(1, draw(st.integers(1, LONGEST - 40)) + 1, len(groups))
    arrival = np.sort(random.uniform(0, spread_s, len(groups))).tolist() if spread_s else None
    return load([prompts[group] for group in groups], response.tolist(), groups, arrival)


@st.composite  # type: ignore[arg-type]
def settings(draw: st.DrawFn, **fixed: object) -> Settings:
    """Any engine that a sequence of LONGEST tokens fits; many are short of blocks."""
    drawn: dict[str, object] = {
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_num_batched_tokens": draw(st.integers(1, 64)),
        "num_blocks": draw(st.integers(20, 60)),
        "prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "reserve_full_isl": draw(st.booleans()),
        "reuse_uncached_first": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
        "batching": draw(st.sampled_from(["continuous", "continuous", "static"])),
        "contiguous_tokens": draw(st.sampled_from([0, 0, LONGEST])),
    }
    return Settings(block_tokens=BLOCK, **(drawn | fixed))  # type: ignore[arg-type]


def rising(random: np.random.Generator, number: int, most: float, first: float = 0.0) -> np.ndarray:
    """An axis of so many points from `first` on, most of them no whole numbers."""
    return first + np.concatenate([[0.0], np.cumsum(random.uniform(0.05, 2 * most / max(number - 1, 1), number - 1))])


@st.composite
def tables(draw: st.DrawFn) -> EngineTable:
    """Piecewise-linear costs that bend many times within what the requests drawn reach, and never fall."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = [draw(st.integers(1, most)) for most in (4, 3, 3, 3, 3, 5)]
    axes = [rising(random, number, most) for number, most in zip(shape, (64, 12, 40, 40, 12, 60), strict=True)]
    attention = random.uniform(0, 1e-3, shape[2:])
    for axis in range(4):
        attention = np.cumsum(attention, axis)
    skewed = draw(st.sampled_from(["no", "one", "bins"]))
    return EngineTable(
        token_grid=axes[0], token_seconds=np.cumsum(random.uniform(0, 2e-3, shape[0])),
        sequence_grid=axes[1], sequence_seconds=np.cumsum(random.uniform(0, 1e-3, shape[1])),
        chunk_grid=axes[2], prefix_grid=axes[3], decode_grid=axes[4], context_grid=axes[5],
        attention_seconds=attention, skew=0.0 if skewed == "no" else random.uniform(0, 1),
        skews=bins(random) if skewed == "bins" else None, step_s=random.uniform(1e-4, 1e-2),
        sequence_s=random.uniform(0, 1e-4), prefill_step_s=random.uniform(0, 1e-3),
        token_context_s=random.uniform(0, 1e-6), context_read_s=random.uniform(0, 1e-6),
        capture_sizes=np.array(draw(st.sampled_from([[], [1, 2, 4, 8], [8, 16, 32, 64]])), dtype=float),
    )  # fmt: skip


def bins(random: np.random.Generator) -> Skews:
    """Shares by bins, whose edges the contexts drawn cross."""
    edges = [rising(random, 3, most, first) for most, first in ((9, 2), (0.9, 0.1), (50, 5), (30, 0))]
    return Skews(
        chunks=np.array([0.0, 5.0]), decodes=edges[0], spread=edges[1], longest=edges[2], prefix=edges[3],
        shares=random.uniform(0, 1, (2, 3, 3, 3, 3)),
    )  # fmt: skip


def assert_same(one: Replayed, other: Replayed, rel: float = 1e-9) -> None:
    """The same happened, at the same times."""
    counts = [(r.iterations, r.preemptions, r.recomputed_tokens, r.hit_tokens) for r in (one, other)]
    assert counts[0] == counts[1]
    for name in ("admitted_s", "first_token_s", "last_token_s"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=rel, atol=1e-12, err_msg=name)


def of_step(scenario: Scenario, step: int, prompts: Sequence[int]) -> Requests:
    """All samples of some prompts of a step."""
    ledger, number = Fates(scenario), scenario.workload.samples_per_prompt
    indices = [prompt * number + sample for prompt in prompts for sample in range(number)]
    return samples(scenario, ledger, ledger.issue(step, indices, 0))
