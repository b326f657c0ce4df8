"""The points that a sweep measures; none of them comes from a scenario file."""

from __future__ import annotations

from dataclasses import dataclass, field

MINIBATCH = 16
MICROBATCH_TOKENS = 2560
LONGEST = 512
"""tokens of prompt and response together that the engine takes"""


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Iterations that hold prompts: beside decoding sequences of some context, new ones of some length."""

    decoding: int
    context: int
    prompts: tuple[tuple[int, int, int], ...]
    """one iteration each: (new sequences, tokens of each, tokens of each that the cache has already)"""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Shapes of every kind of work."""

    decode: tuple[tuple[int, int], ...]
    """(sequences, context of each)"""
    mixed: tuple[Mixed, ...]
    rollouts: tuple[tuple[int, int, int], ...]
    """(sequences, prompt tokens, longest response): responses end one after the other, so all smaller batches occur"""
    scored: tuple[tuple[int, int], ...] = ()
    """(samples, tokens of each)"""
    trained: tuple[tuple[int, int, int], ...] = ()
    """(samples, tokens of each, tokens of the last), in mini-batches of MINIBATCH; a short last one passes alone"""
    split: tuple[tuple[int, int, int], ...] = ()
    """the same, in mini-batches of half as many"""
    bytes: tuple[int, ...] = field(default=(1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22))
    """of collectives"""
    joint: tuple[tuple[int, int, int], ...] = ()
    """as `trained`, by two ranks at once"""
    threaded: tuple[tuple[int, int], ...] = ()
    """(samples, tokens of each) that are scored and trained with more threads, and in mini-batches with adapters"""


FITTED = Grid(
    decode=tuple((n, c) for n in (1, 4, 8, 16, 32, 64) for c in (16, 64, 192) if n * c <= 6144),
    mixed=(
        Mixed(decoding=0, context=0, prompts=((1, 256, 0), (2, 64, 0), (4, 448, 0), (16, 16, 0), (8, 160, 128))),
        Mixed(decoding=4, context=32, prompts=((1, 16, 0), (1, 128, 0), (8, 32, 0), (4, 256, 0), (2, 192, 128))),
        Mixed(decoding=32, context=96, prompts=((1, 16, 0), (2, 96, 0), (16, 16, 0), (16, 96, 0), (8, 224, 192))),
    ),
    rollouts=((2, 40, 12), (8, 96, 16), (24, 48, 16), (48, 24, 16), (64, 12, 24), (32, 160, 10)),
    scored=((1, 24), (4, 32), (8, 64), (16, 24), (16, 96), (32, 44), (32, 84), (32, 120), (64, 48)),
    trained=(
        (16, 12, 12), (16, 24, 24), (16, 40, 40), (32, 32, 32), (16, 64, 64), (16, 96, 96), (16, 128, 128),
        (32, 112, 112), (16, 156, 156), (16, 164, 24), (16, 168, 64),
    ),
    split=((16, 24, 24), (32, 24, 24)),
    joint=((16, 160, 160), (16, 112, 112), (32, 80, 80), (16, 64, 64), (32, 40, 40), (16, 24, 24)),
    threaded=((16, 40), (32, 64), (32, 112)),
)  # fmt: skip

HELD_OUT = Grid(
    decode=tuple((n, c) for n in (2, 6, 12, 24, 48) for c in (40, 112)),
    mixed=(
        Mixed(decoding=0, context=0, prompts=((3, 96, 0), (12, 40, 0), (6, 288, 0), (4, 192, 128))),
        Mixed(decoding=12, context=64, prompts=((1, 64, 0), (4, 24, 0), (6, 128, 0), (3, 224, 160))),
    ),
    rollouts=((12, 56, 14), (40, 30, 20)),
)
"""between the fitted ones; never fitted"""
