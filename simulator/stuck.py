"""A run in which nothing can happen any more although it is not over: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.world import World


def waits(world: World) -> str:
    """One clause for every stage that is not through, the first of them first; empty for a run that is over."""
    return "; ".join(_waits(world))


def _waits(world: World) -> Iterator[str]:
    for stage in world.dataflow.nodes:
        left = [step for step in world.dataflow.steps(stage) if not world.finished(stage, step).triggered]
        if not left:
            continue
        lacking = [run for run in world.dataflow.requirements(stage, left[0]) if not world.finished(*run).triggered]
        lacking += [run for run in world.dataflow.streams(stage, left[0]) if not world.started(*run).triggered]
        here = f"{stage} of step {left[0]}"
        if lacking:
            yield f"{here} waits for {' and '.join(f'{name} of step {step}' for name, step in lacking)}"
        elif stage in world.why:
            yield f"{here} is under way: {world.why[stage]()}"
        else:
            yield f"{here} is under way and does not end"
