"""Works in turns on the same devices: nobody works in another's turn, and every change costs what it moves."""

import json
from functools import cache
from itertools import combinations
from typing import Any

import pytest

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.placement import Worker
from lab.scenario import Scenario
from lab.slices import slice_of
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.memory import pools, worker_footprint
from profiles.moves import ENGINE_SWITCH_S, host_copy_seconds
from profiles.profile import datasheet
from simulator.run import simulate

BIG = load("scenarios/colocated-8gpu.yaml").model_dump(mode="json", by_alias=True)
SMALL: dict[str, Any] = {
    "num_steps": 2,
    "workload": BIG["workload"] | {"prompts_per_step": 64, "response_tokens": {"dist": "fixed", "value": 50}},
}


def scenario(switch: str = "offload", **changes: Any) -> Scenario:
    sharing = {pool: said | {"switch": switch} for pool, said in BIG["sharing"].items()}
    return Scenario.model_validate_json(json.dumps(BIG | SMALL | {"sharing": sharing} | changes))


@cache
def played(switch: str) -> Timeline:
    return simulate(scenario(switch), {"a100-80g-sxm": datasheet("a100-80g-sxm")})


def held_bytes(given: Scenario, worker: Worker, *consumers: str) -> float:
    resident = worker_footprint(given, worker).resident
    return sum(resident[name] for name in consumers)


@pytest.mark.parametrize("switch", ["sleep", "offload", "reload"])
def test_it_conforms_and_conserves(switch: str) -> None:
    timeline = played(switch)
    assert conforms(build(scenario(switch)), timeline) == []
    samples = timeline.header.samples
    assert samples["issued"] == samples["trained"] == 2 * 64
    for account in summarise(timeline)["pools"].values():
        assert sum(account.values()) == pytest.approx(1)


@pytest.mark.parametrize("switch", ["sleep", "offload", "reload"])
def test_works_of_different_slices_never_overlap_on_a_device(switch: str) -> None:
    given, timeline = scenario(switch), played(switch)
    busy = [span for span in timeline.stages() if span.stage not in ("advantage", "weight_sync", "switch")]
    for pool in given.sharing:
        own = [span for span in busy if span.pool == pool]
        for a, b in combinations(own, 2):
            apart = a.end_s <= b.start_s + 1e-9 or b.end_s <= a.start_s + 1e-9
            assert apart or slice_of(given, given.workers[a.worker]) == slice_of(given, given.workers[b.worker])


def test_a_switch_takes_what_its_copies_take() -> None:
    given, moved = scenario(), ops(played("offload"), "switch:train:0", step=1)
    engine, trainer = given.workers["actor.generate[0]"], given.workers["actor.train[0]"]
    assert [span.op for span in moved if span.worker == engine.name] == ["sleep"]
    asleep = held_bytes(given, engine, "weights", "adapters")
    (sleep,) = [span for span in moved if span.worker == engine.name]
    assert sleep.bytes == asleep
    assert sleep.seconds == pytest.approx(ENGINE_SWITCH_S + host_copy_seconds(asleep))
    both = held_bytes(given, trainer, "weights", "adapters")
    onload = [span for span in moved if span.op == "onload"]
    assert {span.bytes for span in onload} == {both}
    # Actor and critic share the GPU's way to its host.
    assert max(span.seconds for span in onload) == pytest.approx(2 * host_copy_seconds(both), rel=0.01)


def test_frozen_weights_are_dropped_and_changed_states_are_saved() -> None:
    back = {span.worker: span for span in ops(played("offload"), "switch:train:1", step=0)}
    given = scenario()
    trainer = given.workers["actor.train[0]"]
    assert back[trainer.name].op == "offload"
    assert back[trainer.name].bytes == held_bytes(given, trainer, "adapters", "optimizer states", "fp32 masters")
    left = [span.worker for span in ops(played("offload"), "switch:frozen:1", step=0)]
    assert not [name for name in left if "score" in name]


def test_a_start_from_storage_is_the_dearest_and_sleep_the_cheapest() -> None:
    seconds = {
        how: summarise(played(how))["stages"]["switch"]["busy_s_per_step"] for how in ("sleep", "offload", "reload")
    }
    assert seconds["sleep"] < seconds["offload"] < seconds["reload"]


def test_in_turns_a_pool_needs_less_than_with_everything_loaded() -> None:
    turns = pools(scenario())["train"]
    resident = pools(scenario(sharing={pool: {"how": "resident"} for pool in BIG["sharing"]}))["train"]
    asleep = pools(scenario("sleep"))["train"]
    assert turns.largest_bytes < turns.peak_bytes < asleep.peak_bytes < resident.peak_bytes
    assert turns.fits
    assert not resident.fits


def test_weights_that_are_trained_in_full_meet_those_of_the_engine() -> None:
    full = {role: BIG["models"][role] | {"lora": None} for role in ("actor", "critic")}
    given = scenario(models=BIG["models"] | full)
    pool = pools(given)["train"]
    trainers = [worker for worker in given.workers.values() if worker.pool == "train" and worker.work == "train"]
    here = [worker for worker in trainers if pool.device in worker.devices]
    loaded = sum(worker_footprint(given, worker).loaded_bytes for worker in here)
    engine = worker_footprint(given, given.workers["actor.generate[0]"]).resident["weights"]
    assert pool.peak_bytes >= loaded + engine


def test_helpers_on_the_trainers_pool_shorten_the_rollout() -> None:
    """A pool that changes its role: its engines help while there is nothing to train, at the cost of two switches."""
    alone = scenario(place=BIG["place"] | {"actor.generate": BIG["place"]["actor.generate"][1:]}, sharing={
        "frozen": BIG["sharing"]["frozen"], "train": {"how": "resident"},
    })  # fmt: skip
    profiles = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
    without = summarise(simulate(alone, profiles))["stages"]
    helped = summarise(played("offload"))["stages"]
    assert helped["rollout"]["busy_s_per_step"] < without["rollout"]["busy_s_per_step"]
    assert helped["switch"]["busy_s_per_step"] > without["switch"]["busy_s_per_step"]


def ops(timeline: Timeline, node: str, step: int) -> list[Span]:
    return [span for span in timeline.spans if span.op and span.node == node and span.step == step]
