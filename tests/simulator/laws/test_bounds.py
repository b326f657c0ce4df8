"""Limits that nothing passes: the KV cache of an engine, and the age of what is trained."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.fates import VERSION
from lab.scenario import Scenario
from profiles.memory import kv_blocks
from simulator.engine import Settings
from simulator.producing import Producer
from simulator.rollout import Engine, Piece
from tests.plays import Played, fresh, num_batches, play, start
from tests.strategies import PROMPTS, SHORT, TIGHT, changed, on_cores, on_gpus, stalenesses

Running = Iterable[tuple[int, int, int]]
"""request or sample, tokens of its prompt, tokens generated"""


def blocks(running: Running, block_tokens: int) -> int:
    """KV blocks of these sequences, where none share any."""
    return sum(-(-(prompt + generated) // block_tokens) for _, prompt, generated in running)


def watched(seen: list[int]) -> Callable[[Engine, float], Piece]:
    """`Engine.turn` that looks at the cache after every piece."""
    original = Engine.turn

    def turn(engine: Engine, until_s: float = np.inf) -> Piece:
        piece = original(engine, until_s)
        limits: Settings = engine._settings
        held = blocks(engine.running(), limits.block_tokens)
        assert 0 <= engine.free_blocks <= limits.num_blocks - 1
        assert engine.num_running <= limits.max_num_seqs and piece.sequences <= limits.max_num_seqs
        assert limits.prefix_caching or held - limits.num_blocks + 1 <= 0
        if not engine.busy:
            assert engine.free_blocks == limits.num_blocks - 1, "all came back"
        seen.append(held)
        return piece

    return turn


@given(st.one_of(on_gpus(), on_cores()))
@settings(max_examples=15)
def test_the_kv_cache_is_never_above_its_capacity(chosen: Scenario) -> None:
    """Played by scheduling, through whatever the simulation does to its engines."""
    seen = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.generating._whole", lambda *_: None)
        patch.setattr("simulator.producing.fitting", lambda *_: False)
        patch.setattr(Engine, "turn", watched(seen))
        play(chosen)
    assert seen


def producers(world: Any) -> list[Producer]:
    """The engines of an asynchronous simulation."""
    names = [worker.name for worker in world.scenario.team("actor", "generate")]
    return [world.on_loss[name].__self__ for name in names]


@given(on_gpus(modes=("asynchronous",)), st.lists(st.floats(0, 1), min_size=3, max_size=8).map(sorted))
@settings(max_examples=10)
def test_engines_that_are_played_ahead_hold_no_more_than_fits(chosen: Scenario, shares: list[float]) -> None:
    played, world = play(chosen), fresh(chosen)
    start(world)
    for share in shares:
        if share * played.makespan > world.now:
            world.env.run(until=share * played.makespan)
        for producer in producers(world):
            running = producer._run.running()
            assert len(running) <= chosen.rollout.max_num_seqs
            room = kv_blocks(chosen, producer.worker) - 1
            assert chosen.rollout.prefix_caching or blocks(running, chosen.rollout.block_tokens) <= room
            assert {sample for sample, *_ in running} <= producer.samples


def test_without_room_engines_preempt() -> None:
    """The law above is one of full caches."""
    tight = {"rollout": {"kv_bytes": TIGHT, "max_num_seqs": 64}}
    played = play(changed("ppo-7b-16gpu", SMALL, tight))
    assert sum(span.attrs["preemptions"] for span in played.stages("rollout")) > 0


LONG = {"dist": "lognormal", "mean": 120, "p95": 200, "max": 260}
SMALL = {
    "num_steps": 2,
    "workload": {"prompts_per_step": 24, "prompt_tokens": {"dist": "fixed", "value": 40}, "response_tokens": LONG},
    "update": {"minibatch_samples": 24},
}


def lags(played: Played) -> list[np.ndarray]:
    """By batch: versions between the trainer's weights and those that began each sample."""
    every, ledger = played.world.dataflow.nodes["weight_sync"].every, played.world.ledger
    return [step // every - ledger.column(VERSION)[ledger.batches[step]] for step in range(num_batches(played))]


@st.composite
def old(draw: st.DrawFn) -> Scenario:
    """Asynchronous, with every unit of age, every rule at the bound, and engines that are far ahead."""
    halves = draw(st.sampled_from([1, 2]))
    chosen = draw(on_gpus(modes=("asynchronous",)))
    data = chosen.model_dump(mode="json", by_alias=True)
    step = chosen.workload.samples_per_step
    data["schedule"] |= {"staleness": draw(stalenesses(halves)), "trigger_samples": step // halves}
    data["buffer"] |= {"capacity_samples": draw(st.sampled_from([None, 3 * step]))}
    data["num_steps"] = 4
    return chosen.replace(data)


@given(old())
@settings(max_examples=30)
def test_no_sample_is_older_than_the_bound_but_under_down_weight(chosen: Scenario) -> None:
    """In its own unit; the spans of advantages say the same as the versions that samples were begun with."""
    played, said = play(chosen), chosen.schedule.staleness
    every, found = played.world.dataflow.nodes["weight_sync"].every, lags(played)
    for span in played.stages("advantage"):
        mine = found[span.step]
        assert (span.attrs["lag_max"], span.attrs["lag_mean"]) == (mine.max(), pytest.approx(mine.mean()))
        assert mine.min() >= 0
        versions = span.step // every - mine
        in_unit = span.step - every * versions if said.unit == "batches" else mine
        if said.at_bound != "down_weight":
            assert in_unit.max() <= np.ceil(said.bound) and span.attrs["weight_mean"] == 1.0
        elif said.unit == "batches" or (every == 1 and said.bound == int(said.bound)):
            weights = 0.5 ** np.maximum(in_unit - said.bound, 0.0)
            assert span.attrs["weight_mean"] == pytest.approx(weights.mean())
    waste = played.samples["dropped"] + played.samples["aborted"]
    kept = chosen.weight_sync.in_flight != "interrupt"
    assert not (said.at_bound in ("block", "down_weight") and kept and waste)


@pytest.mark.parametrize("in_flight", ["drain", "interrupt", "mix"])
@pytest.mark.parametrize("trigger", ["push", "event"])
@pytest.mark.parametrize("at_bound", ["block", "drop", "interrupt"])
def test_whoever_waits_at_the_bound_goes_on(at_bound: str, trigger: str, in_flight: str) -> None:
    """Two batches a version, groups of two, engines with few seats: what is stopped or thrown away holds nobody up."""
    work = {"prompts_per_step": 6, "samples_per_prompt": 2, "prompt_tokens": PROMPTS, "response_tokens": SHORT}
    own = {
        "algorithm": {"name": "grpo", "kl_coef": 0.0}, "num_steps": 2, "workload": work,
        "rollout": {"max_num_seqs": 2, "prefix_caching": False}, "weight_sync": {"trigger": trigger, "in_flight": in_flight},
        "place": {"actor.train": {"data_parallel": 1}}, "update": {"minibatch_samples": 6, "microbatch_tokens": 300},
        "schedule": {"mode": "asynchronous", "trigger_samples": 6, "staleness": {"bound": 1, "at_bound": at_bound}},
    }  # fmt: skip
    for seed in range(4):
        played = play(changed("ppo-7b-16gpu", {"algorithm": None}, own, {"seed": seed}))
        assert played.samples["trained"] == 2 * 12


@pytest.mark.parametrize("unit", ["versions", "steps", "batches", "extra_samples"])
def test_what_is_too_old_counts_less_or_is_never_trained(unit: str) -> None:
    """With a large buffer and engines that are faster than the trainer, the bound is met: the laws above are not empty."""

    def run(at_bound: str) -> Played:
        staleness = {"unit": unit, "bound": 0, "at_bound": at_bound}
        schedule = {"schedule": {"mode": "asynchronous", "staleness": staleness}, "buffer": {"capacity_samples": 240}}
        return play(changed("ppo-7b-16gpu", SMALL, {"num_steps": 5}, schedule))

    light, dropped, stopped = (run(at_bound) for at_bound in ("down_weight", "drop", "interrupt"))
    assert max(mine.max() for mine in lags(light)) > 0
    assert min(span.attrs["weight_mean"] for span in light.stages("advantage")) < 1
    assert dropped.samples["dropped"] > 0 and stopped.samples["dropped"] + stopped.samples["aborted"] > 0
    for played in (dropped, stopped):
        assert max(mine.max() for mine in lags(played)) == 0
