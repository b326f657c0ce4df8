"""An engine that is given work and robbed of it while it runs does what one does that knows its arrivals from the start."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from lab.fates import RESPONSE
from lab.load import load
from lab.scenario import Scenario
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator.fleet import EngineRun
from simulator.replay import replay
from simulator.rollout import Piece, samples, settings
from simulator.world import Process, World

SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm")}
SMALL = {
    "prompts_per_step": 9, "samples_per_prompt": 4, "prompt_tokens": {"dist": "lognormal", "mean": 40, "p95": 80, "max": 99},
    "response_tokens": {"dist": "lognormal", "mean": 60, "p95": 200, "max": 256},
}  # fmt: skip
BIG = load("scenarios/ppo-7b-16gpu.yaml").replace(
    {"num_steps": 1, "workload": SMALL, "update": {"minibatch_samples": 36, "microbatch_tokens": 4096}}
)
NUM = 36


def scenario(seed: int = 0, **rollout: Any) -> Scenario:
    return BIG.replace({"seed": seed, "rollout": {"max_num_seqs": 6, "max_num_batched_tokens": 256} | rollout})


def started(chosen: Scenario) -> World:
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    world.ledger.issue(0, range(NUM), 0)
    return world


class Played:
    """An engine, and when its samples ended."""

    def __init__(self, chosen: Scenario, alone: bool = True) -> None:
        self.world = started(chosen)
        self.worker = chosen.team("actor", "generate")[0]
        self.ends, self.pieces = dict[int, float](), list[Piece]()
        self.run = EngineRun(self.world, self.worker, self._end, lambda piece, start: self.pieces.append(piece))
        self.run._alone = alone

    def _end(self, sample: int) -> None:
        assert sample not in self.ends, "a sample ends once"
        self.ends[sample] = self.world.now

    def at(self, when: float, act: Callable[[], object]) -> None:
        def process() -> Process:
            yield self.world.env.timeout(when)
            act()

        self.world.env.process(process())

    def total(self) -> int:
        """Blocks when nothing runs."""
        return settings(self.world.scenario, self.worker).num_blocks - 1


def arrivals(seed: int, spread: float) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).uniform(0, spread, NUM))


def replayed(chosen: Scenario, arrival: Sequence[float]) -> np.ndarray:
    """When samples end that arrive at these times, by the engine that knows them all."""
    world, worker = started(chosen), chosen.team("actor", "generate")[0]
    requests = samples(chosen, world.ledger, np.arange(NUM))
    requests = type(requests)(
        prompt=requests.prompt, response=requests.response, contents=requests.contents,
        arrival_s=np.asarray(arrival, dtype=float),
    )  # fmt: skip
    return replay(world.costs.engine_table(worker), settings(chosen, worker), requests).last_token_s


@given(st.integers(0, 99), st.sampled_from([0.0, 0.5, 5.0]), st.booleans(), st.booleans())
@effort(deadline=None, max_examples=30)
def test_samples_given_one_by_one_end_as_those_that_arrive(
    seed: int, spread: float, lagging: bool, alone: bool
) -> None:
    chosen, arrival = scenario(seed, async_scheduling=lagging), arrivals(seed, spread)
    played = Played(chosen, alone)
    for sample, when in enumerate(arrival):
        played.at(when, lambda sample=sample: played.run.submit([sample]))  # type: ignore[misc]
    played.world.env.run()
    np.testing.assert_allclose([played.ends[i] for i in range(NUM)], replayed(chosen, arrival), rtol=1e-9)
    assert played.run.counts.busy_s == pytest.approx(sum(piece.seconds for piece in played.pieces))
    assert played.run.counts.samples == NUM and played.run.num_open == 0
    assert played.run.free_blocks == played.total()


@given(st.integers(0, 99), st.floats(0, 3), st.floats(0, 2))
@effort(deadline=None, max_examples=20)
def test_a_pause_moves_everything_after_it(seed: int, when: float, length: float) -> None:
    chosen = scenario(seed, async_scheduling=False)
    whole, paused = Played(chosen), Played(chosen)
    stood = []

    def pause() -> Process:
        yield paused.world.env.timeout(when)
        yield from paused.run.pause()
        stood.append(paused.world.now)
        yield paused.world.env.timeout(length)
        paused.run.resume()

    paused.world.env.process(pause())
    for played in (whole, paused):
        played.run.submit(range(NUM))
        played.world.env.run()
    for sample, end in whole.ends.items():
        moved = length if end > stood[0] + 1e-12 else 0.0
        assert paused.ends[sample] == pytest.approx(end + moved, abs=1e-9)


@given(st.integers(0, 99), st.floats(0, 3), st.booleans(), st.booleans())
@effort(deadline=None, max_examples=30)
def test_who_is_aborted_never_ends_and_holds_nothing(seed: int, when: float, lagging: bool, alone: bool) -> None:
    played = Played(scenario(seed, async_scheduling=lagging), alone)
    chosen = set(np.flatnonzero(np.random.default_rng(seed).random(NUM) < 0.5).tolist())
    before: list[set[int]] = []

    def abort() -> None:
        before.append(set(played.ends))
        played.run.abort(sorted(chosen))
        assert not chosen & {sample for sample, _, _ in played.run.running()}

    played.run.submit(range(NUM))
    played.at(when, abort)
    played.world.env.run()
    assert set(played.ends) == (set(range(NUM)) - chosen) | before[0]
    assert played.run.free_blocks == played.total() and played.run.num_open == 0


@given(st.integers(0, 99), st.floats(0, 3), st.booleans(), st.booleans())
@effort(deadline=None, max_examples=30)
def test_interrupted_samples_go_on_with_the_tokens_they_have(
    seed: int, when: float, lagging: bool, forget: bool
) -> None:
    played, ledger = Played(scenario(seed, async_scheduling=lagging)), started(scenario(seed)).ledger

    def interrupt() -> Process:
        yield played.world.env.timeout(when)
        yield from played.run.pause()
        running = played.run.running()
        assert all(0 <= made < ledger.column(RESPONSE)[sample] for sample, _, made in running)
        assert played.run.interrupt(forget) == len(running) and not played.run.running()
        assert played.run.free_blocks == played.total()
        played.run.resume()

    played.run.submit(range(NUM))
    played.world.env.process(interrupt())
    played.world.env.run()
    assert set(played.ends) == set(range(NUM))


@given(st.integers(0, 99), st.floats(0.01, 3), st.integers(1, 40))
@effort(deadline=None, max_examples=30)
def test_what_is_withdrawn_or_lost_can_go_elsewhere(seed: int, when: float, number: int) -> None:
    played, taken = Played(scenario(seed)), list[int]()

    def take() -> None:
        queued = played.run.num_queued
        taken.extend(played.run.withdraw(number))
        assert len(taken) == min(number, queued) and played.run.num_queued == queued - len(taken)
        taken.extend(played.run.lose())

    played.run.submit(range(NUM))
    played.at(when, take)
    played.world.env.run()
    assert sorted([*taken, *played.ends]) == list(range(NUM))
    assert played.run.free_blocks == played.total() and not played.run.num_open
    played.run.submit(taken)
    played.run.resume()
    played.world.env.run()
    assert set(played.ends) == set(range(NUM))


def test_running_tells_how_far_everybody_is() -> None:
    played = Played(scenario(async_scheduling=False, max_num_batched_tokens=8192))
    seen: list[int] = []

    def look() -> Process:
        while len(seen) < 30:
            yield played.world.env.timeout(0.01)
            seen.append({sample: made for sample, _, made in played.run.running()}.get(0, -1))

    played.run.submit([0, 1])
    played.world.env.process(look())
    played.world.env.run()
    known = [made for made in seen if made >= 0]
    assert known == sorted(known) and known[0] <= 2 and len(set(known)) > 5


def test_only_an_engine_that_stands_still_can_be_interrupted() -> None:
    played = Played(scenario())
    played.run.submit([0])
    played.world.env.run(until=0.05)
    with pytest.raises(RuntimeError, match="pause it first"):
        played.run.interrupt(forget=True)


def test_a_straggler_takes_as_much_longer_from_when_it_is_slowed_down() -> None:
    straight, slow = Played(scenario()), Played(scenario(), alone=False)
    for played in (straight, slow):
        played.run.submit(range(NUM))
    slow.at(0.5, lambda: slow.world.slow_down(slow.worker.name, 0.5))
    straight.world.env.run()
    slow.world.env.run()
    for sample, end in straight.ends.items():
        assert slow.ends[sample] == pytest.approx(end if end < 0.5 else 0.5 + 2 * (end - 0.5), rel=1e-9)
