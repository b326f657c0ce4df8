"""EngineTable: how long one iteration of a rollout engine takes, as piecewise-linear tables.

    seconds = step_s + sequence_s·sequences + T(padded tokens) + S(sequences) + attention + prefill_step_s·[any prefill]
    attention = A(chunk, prefix, decodes, mean context) + skew·(A(…, longest context) − A(…, mean context))
                + token_context_s·(pairs that attend) + context_read_s·(context read)

T, S and A interpolate linearly on linear axes: decode attention is linear in the context that is read, and blending
it in log space costs 2-4 points of accuracy (op tables of LLMServingSim, arXiv 2408.05499). Because every term is
piecewise affine in the context, an engine that only decodes can be played forward in closed form between knots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from profiles.interpolate import Packed

Floats = NDArray[np.float64]


def _zero() -> Floats:
    return np.zeros(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Skews:
    """How much uneven contexts slow attention, by prefill tokens and by bins of four more quantities.

    A bin holds what is at most its edge; what lies beyond the last edge, and a number of prefill tokens that is not
    listed, takes `EngineTable.skew`.
    """

    chunks: Floats
    """numbers of prefill tokens, matched exactly"""
    decodes: Floats
    spread: Floats
    """(mean − shortest) / (longest − shortest) context"""
    longest: Floats
    prefix: Floats
    shares: Floats
    """(chunks, decodes, spread, longest, prefix), >= 0"""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineTable:
    """Costs of one engine (one model on its devices). Raises ValueError where a table contradicts its axes."""

    token_grid: Floats = field(default_factory=_zero)
    """(T,) scheduled tokens of an iteration, rising"""
    token_seconds: Floats = field(default_factory=_zero)
    """(T,) all that depends on them: matrix products, norms, experts, collectives inside the engine"""
    sequence_grid: Floats = field(default_factory=_zero)
    """(S,) scheduled sequences, rising"""
    sequence_seconds: Floats = field(default_factory=_zero)
    """(S,) LM head and sampler"""
    chunk_grid: Floats = field(default_factory=_zero)
    """(P,) prefill tokens of an iteration"""
    prefix_grid: Floats = field(default_factory=_zero)
    """(K,) context that they find in the cache; negative for several prompts at once, see `Iteration.prefix`"""
    decode_grid: Floats = field(default_factory=_zero)
    """(N,) sequences that get one token"""
    context_grid: Floats = field(default_factory=_zero)
    """(C,) mean context of those"""
    attention_seconds: Floats = field(default_factory=lambda: np.zeros((1, 1, 1, 1)))
    """(P, K, N, C) attention of the whole model"""
    skew: float = 0.0
    """share of (time at the longest context − time at the mean context) that uneven contexts add, where `skews` has none"""
    skews: Skews | None = None
    """the same, by what the iteration holds"""
    step_s: float = 0.0
    """host and launch time of every iteration"""
    sequence_s: float = 0.0
    """the same, for each scheduled sequence"""
    prefill_step_s: float = 0.0
    """more, where an iteration holds prefill tokens"""
    token_context_s: float = 0.0
    """per pair of a scheduled token and what it attends to"""
    context_read_s: float = 0.0
    """per token of context that is read from the KV cache"""
    capture_sizes: Floats = field(default_factory=lambda: np.zeros(0))
    """token counts that iterations are padded up to (CUDA graphs), rising; above the last nothing is padded"""
    most_pairs: float = float(np.finfo(float).max)
    """largest `token_context` that was measured"""
    most_read: float = float(np.finfo(float).max)
    """largest `context_read` that was measured"""
    measured: bool = False
    """False: nothing here was measured; True: inside the ends of the grids it was"""

    def __post_init__(self) -> None:
        axes = ("token_grid", "sequence_grid", "chunk_grid", "prefix_grid", "decode_grid", "context_grid")
        for name in axes:
            grid = getattr(self, name)
            if grid.ndim != 1 or not len(grid) or np.any(np.diff(grid) <= 0):
                raise ValueError(f"{name} is not a rising list of at least one number")
        shape = tuple(len(getattr(self, name)) for name in axes[2:])
        if self.attention_seconds.shape != shape:
            raise ValueError(f"attention_seconds has shape {self.attention_seconds.shape}, its axes have {shape}")
        if (len(self.token_seconds), len(self.sequence_seconds)) != (len(self.token_grid), len(self.sequence_grid)):
            raise ValueError("token_seconds or sequence_seconds is not as long as its axis")
        for part in fields(self):
            if part.name == "skews":
                continue
            value = np.asarray(getattr(self, part.name), dtype=float)
            least = -np.inf if part.name == "prefix_grid" else 0.0
            if not np.all(np.isfinite(value)) or np.any(value < least):
                raise ValueError(f"{part.name} holds a number that is negative or not finite")

    def seconds(self, iteration: Iteration) -> float:
        """Time of one iteration, alone on its devices."""
        from profiles.interpolate import iteration_seconds

        return float(iteration_seconds(self.packed(), iteration.features()))

    def covers(self, iteration: Iteration) -> bool:
        """Whether the iteration lies inside what was measured (1 % beyond is not called extrapolation)."""
        if not self.measured:
            return False
        asked = (
            (self.token_grid, iteration.tokens),
            (self.sequence_grid, iteration.sequences),
            (self.chunk_grid, iteration.prefill_tokens),
            (self.prefix_grid, iteration.prefix),
            (self.decode_grid, iteration.decodes),
            (self.context_grid, iteration.mean_context),
        )
        read = iteration.token_context <= self.most_pairs * 1.01 and iteration.context_read <= self.most_read * 1.01
        return read and all(len(grid) == 1 or value <= grid[-1] * 1.01 for grid, value in asked)

    def packed(self) -> Packed:
        """Axes, values and constants in the order that the compiled functions take them."""
        constants = np.array(
            [
                self.skew, self.step_s, self.sequence_s, self.prefill_step_s, self.token_context_s, self.context_read_s,
            ]
        )  # fmt: skip
        from profiles.interpolate import Packed

        none = np.zeros(1)
        skews = self.skews or Skews(
            chunks=none,
            decodes=none,
            spread=none,
            longest=none,
            prefix=none,
            shares=np.full((1, 1, 1, 1, 1), self.skew),
        )
        return Packed(
            self.token_grid, self.token_seconds, self.sequence_grid, self.sequence_seconds,
            self.chunk_grid, self.prefix_grid, self.decode_grid, self.context_grid,
            np.ascontiguousarray(self.attention_seconds), self.capture_sizes, constants,
            np.ascontiguousarray(skews.shares), skews.chunks, skews.decodes, skews.spread, skews.longest, skews.prefix,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration schedules."""

    tokens: int
    """prefill and decode"""
    sequences: int
    prefill_tokens: int = 0
    prefix: float = 0.0
    """cached context of the prefill tokens: the one chunk that would attend to as many pairs has so much before it;
    below 0 where several short prompts attend to fewer pairs than one prompt of their length"""
    decodes: int = 0
    """sequences that get exactly one token"""
    context_sum: float = 0.0
    """context of those, the computed token left out"""
    context_max: float = 0.0
    context_min: float = 0.0
    token_context: float = 0.0
    """sum over scheduled tokens of what each attends to"""
    context_read: float = 0.0
    """sum over sequences of the context that is read"""

    @property
    def mean_context(self) -> float:
        return self.context_sum / self.decodes if self.decodes else 0.0

    def features(self) -> Floats:
        """(10,) as the compiled functions take them."""
        return np.array(
            [
                self.tokens, self.sequences, self.prefill_tokens, self.prefix, self.decodes, self.context_sum,
                self.context_max, self.token_context, self.context_read, self.context_min,
            ],
            dtype=float,
        )  # fmt: skip
