"""A run waits for what it needs, and remembers no more of a long past than of a short one."""

import asyncio
import tracemalloc
from collections.abc import Callable

from executor.ended import Ended
from lab.dataflow import Dataflow
from lab.scenario import Scenario
from lab.wiring import build

Make = Callable[..., Scenario]


def flow(scenario: Make, num_steps: int) -> Dataflow:
    return build(scenario("quickstart", num_steps=num_steps, checkpoint={"every_steps": 2}))


async def played(dataflow: Dataflow, ended: Ended) -> list[tuple[str, int]]:
    """All runs that have not ended, in the order in which they do."""
    order: list[tuple[str, int]] = []

    async def node(stage: str) -> None:
        async for step in ended.due(stage):
            order.append((stage, step))
            await asyncio.sleep(0)
            ended.add(stage, step)

    await asyncio.gather(*(node(stage) for stage in dataflow.nodes))
    return order


def test_every_run_waits_for_what_it_needs(scenario: Make) -> None:
    dataflow = flow(scenario, 7)
    ended = Ended(dataflow)
    order = asyncio.run(played(dataflow, ended))
    assert sorted(order) == sorted((stage, step) for stage in dataflow.nodes for step in dataflow.steps(stage))
    for place, run in enumerate(order):
        assert set(dataflow.requirements(*run)) <= set(order[:place])
    assert ended.everything()
    assert all(ended.is_whole(step) for step in range(7))
    assert ended._awaited == {}


def test_what_is_behind_a_run_and_what_was_kept_is_not_done_again(scenario: Make) -> None:
    dataflow = flow(scenario, 6)
    ended = Ended(dataflow, 4, [("rollout", 4)])
    assert ("rollout", 4) in ended
    assert ended.is_whole(3)
    assert not ended.is_whole(4)
    order = asyncio.run(played(dataflow, ended))
    assert ("rollout", 4) not in order
    assert {step for _, step in order} == {4, 5}
    assert ended.everything()


def test_a_step_is_waited_for_as_a_whole(scenario: Make) -> None:
    dataflow = flow(scenario, 2)
    ended = Ended(dataflow)

    async def whole() -> None:
        waiting = asyncio.create_task(ended.whole(1))
        for stage in dataflow.nodes:
            await asyncio.sleep(0)
            assert not waiting.done()
            for step in dataflow.steps(stage):
                ended.add(stage, step)
        await waiting

    asyncio.run(whole())


def test_a_long_run_takes_no_more_memory_than_a_short_one(scenario: Make) -> None:
    def peak(num_steps: int) -> int:
        dataflow = flow(scenario, num_steps)
        tracemalloc.start()
        try:
            ended = Ended(dataflow)
            for step in range(num_steps):
                for stage, node in dataflow.nodes.items():
                    if node.runs(step):
                        ended.add(stage, step)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(20_000) < 2 * peak(200)
