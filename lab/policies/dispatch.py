"""Which engine gets the next prompt. Both worlds call this."""

from __future__ import annotations


def round_robin(num_prompts: int, num_engines: int) -> list[list[int]]:
    """Prompts of each engine: engine e takes e, e + engines, …; all samples of a prompt stay together."""
    return [list(range(engine, num_prompts, num_engines)) for engine in range(num_engines)]
