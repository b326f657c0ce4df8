"""An engine that plays ahead is the engine that does not: the same samples end at the same times, whoever comes or goes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.scenario import Scenario
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator.ahead import AheadRun, fitting
from simulator.fleet import EngineRun
from simulator.world import Process, World

SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
BASE = load("scenarios/ppo-7b-16gpu.yaml")
PER_PROMPT = 4
Deed = tuple[float, str, int]
"""seconds, what happens then, and with how many prompts or samples"""


@dataclass
class Seen:
    """What happened to an engine."""

    ends: dict[int, float] = field(default_factory=dict)
    """by sample"""
    stood: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    left: int = 0


LENGTHS = {"dist": "lognormal", "mean": 60, "p95": 150, "max": 300}


def scenario(seed: int, num_seqs: int, ahead: bool, caching: bool = True, lengths: Any = LENGTHS) -> Scenario:
    data = BASE.model_dump(mode="json", by_alias=True)
    return BASE.replace(
        {
            "seed": seed,
            "algorithm": {"name": "grpo", "kl_coef": 0.0},
            "schedule": {"mode": "asynchronous"},
            "workload": {
                "prompts_per_step": 64,
                "samples_per_prompt": PER_PROMPT,
                "prompt_tokens": {"dist": "lognormal", "mean": 100, "p95": 200, "max": 256},
                "response_tokens": lengths,
            },
            "update": data["update"] | {"minibatch_samples": 64},
            "place": data["place"] | {"actor.train": {"pool": "actors", "data_parallel": 2, "tensor_parallel": 2}},
            "rollout": {"max_num_seqs": num_seqs, "async_scheduling": ahead, "prefix_caching": caching},
            "checkpoint": {"every_steps": None},
        }
    )


def driven(kind: Callable[..., Any], chosen: Scenario, deeds: list[Deed], feed: int, until: float = 60.0) -> Seen:
    """An engine under these deeds, which gets `feed` more prompts, one by one, whenever it is dry."""
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    seen, worker = Seen(), chosen.team("actor", "generate")[0]
    left = [feed]

    def give(number: int) -> None:
        first = len(world.ledger) % 256
        indices = (first + np.arange(number * PER_PROMPT)) % 256
        run.submit(world.ledger.issue(len(world.ledger) // 256, indices, 0))

    def dry() -> None:
        if left[0]:
            left[0] -= 1
            give(1)

    def act() -> Process:
        for at, deed, number in sorted(deeds):
            yield world.env.timeout(max(at - world.now, 0.0))
            if deed == "give":
                give(number)
            elif deed == "abort":
                run.abort(range(0, len(world.ledger), number + 1))
            else:
                yield world.env.process(run.pause())
                seen.stood.append(world.now)
                seen.running.append(len(run.running()))
                if deed == "forget":
                    run.interrupt(forget=True)
                yield world.env.timeout(0.1 * number)
                run.resume()

    run = kind(world, worker, lambda sample: seen.ends.update({sample: world.now}), on_dry=dry)
    world.env.process(act())
    world.env.run(until=until)
    seen.left = len(run.running())
    return seen


deeds = st.lists(
    st.tuples(st.floats(0, 8), st.sampled_from(["give", "give", "pause", "forget", "abort"]), st.integers(1, 4)),
    max_size=7,
)


@given(deeds, st.integers(0, 8), st.integers(0, 99), st.sampled_from([1, 3, 16]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_it_is_the_engine_that_looks_at_every_block(
    deeds: list[Deed], feed: int, seed: int, num_seqs: int, ahead: bool
) -> None:
    """Blocks of one prompt that are computed anew may be found by one more sample; without the cache all is equal."""
    chosen = scenario(seed, num_seqs, ahead, caching=False)
    quick, exact = driven(AheadRun, chosen, deeds, feed), driven(EngineRun, chosen, deeds, feed)
    assert quick.ends == pytest.approx(exact.ends, rel=1e-9)
    assert list(quick.ends) == list(exact.ends), "those that end together are told in the same order"
    assert quick.stood == pytest.approx(exact.stood, rel=1e-9)
    assert (quick.running, quick.left) == (exact.running, exact.left)


@given(deeds, st.integers(0, 8), st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_with_the_prefix_cache_times_are_the_same_within_a_prefill(deeds: list[Deed], feed: int, seed: int) -> None:
    chosen = scenario(seed, 16, True)
    kept = [deed for deed in deeds if deed[1] != "abort"]
    quick, exact = driven(AheadRun, chosen, kept, feed), driven(EngineRun, chosen, kept, feed)
    assert quick.ends == pytest.approx(exact.ends, rel=2e-3, abs=2e-2)


def test_where_counting_is_not_enough_the_other_engine_takes_over() -> None:
    chosen = scenario(0, 16, True)
    tight = chosen.replace({"rollout": {"max_num_seqs": 16, "kv_bytes": 6.5e7, "block_tokens": 16}})
    seen = driven(AheadRun, tight, [(0.0, "give", 12)], 4, until=400.0)
    assert sorted(seen.ends) == list(range(16 * PER_PROMPT))


def test_it_is_used_where_nobody_shares_the_devices() -> None:
    chosen = scenario(0, 16, True)
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    assert fitting(world, chosen.team("actor", "generate")[0])
    tight = chosen.replace({"rollout": {"max_num_seqs": 16, "kv_bytes": 6.5e7}})
    assert not fitting(World(tight, build(tight), CostModel(tight, SHEETS)), tight.team("actor", "generate")[0])


SHORT = [{"dist": "fixed", "value": value} for value in (1, 2)] + [{"dist": "lognormal", "mean": 2, "p95": 5, "max": 9}]


@given(
    deeds, st.integers(0, 20), st.integers(0, 99), st.sampled_from([1, 3, 16]), st.booleans(), st.sampled_from(SHORT)
)
@settings(max_examples=40, deadline=None)
def test_responses_that_end_with_their_prefill_are_told_as_well(
    deeds: list[Deed], feed: int, seed: int, num_seqs: int, ahead: bool, lengths: Any
) -> None:
    """Where nobody is aborted in the very iteration in which another one ends: its place is free one iteration sooner."""
    chosen = scenario(seed, num_seqs, ahead, caching=False, lengths=lengths)
    soon = [(0.2 * at, deed, number) for at, deed, number in deeds if deed != "abort"]
    quick, exact = driven(AheadRun, chosen, soon, feed), driven(EngineRun, chosen, soon, feed)
    assert quick.ends == pytest.approx(exact.ends, rel=1e-9)
    assert list(quick.ends) == list(exact.ends), "those that end together are told in the same order"
    assert quick.stood == pytest.approx(exact.stood, rel=1e-9)
    assert (quick.running, quick.left) == (exact.running, exact.left)
