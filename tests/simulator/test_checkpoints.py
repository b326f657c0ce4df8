"""Checkpoints: what blocks and what goes on beside the next steps, and what is left of them in storage."""

from typing import Any

import pytest

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.checkpoints import Store
from simulator.run import simulate

BIG = load("scenarios/ppo-7b-16gpu.yaml")
QUICK = load("scenarios/quickstart.yaml")
SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm")}


def scenario(base: Scenario = BIG, num_steps: int = 4, **checkpoint: Any) -> Scenario:
    return base.replace({"num_steps": num_steps, "checkpoint": {"every_steps": 1} | checkpoint})


def play(chosen: Scenario) -> Timeline:
    return simulate(chosen, SHEETS)


def ops(timeline: Timeline, *names: str) -> list[Span]:
    return [span for span in timeline.spans if span.stage == "checkpoint" and span.op in names]


@pytest.mark.parametrize("base", [BIG, QUICK], ids=["flows", "cores"])
def test_beside_the_next_steps_only_the_copy_blocks(base: Scenario) -> None:
    blocking, beside = play(scenario(base)), play(scenario(base, blocking=False))
    assert conforms(build(scenario(base, blocking=False)), beside) == []
    assert sum(s.bytes for s in ops(blocking, "write")) == sum(s.bytes for s in ops(beside, "write"))
    for span in beside.stages():
        if span.stage == "checkpoint":
            own = [op for op in beside.spans if op.span_id.startswith(f"{span.span_id}#")]
            held = sum(op.seconds for op in own if op.op in ("snapshot", "write_wait"))
            assert span.seconds == pytest.approx(held)
    assert summarise(beside)["checkpoint_s"] < summarise(blocking)["checkpoint_s"]


def test_one_checkpoint_at_a_time_leaves_the_hosts_memory() -> None:
    """Storage so slow that a write outlasts a step: the next copy waits for it."""
    data = BIG.model_dump(mode="json", by_alias=True)
    data["cluster"]["sites"][0]["storage"] = {"write": 2e8}
    timeline = play(
        Scenario.model_validate(
            data | {"num_steps": 3, "checkpoint": {"every_steps": 1, "blocking": False}}, strict=False
        )
    )
    for worker in ("actor.train[0]", "critic.train[0]"):
        writes = sorted((s for s in ops(timeline, "write") if s.worker == worker), key=lambda s: s.start_s)
        copies = sorted((s for s in ops(timeline, "snapshot") if s.worker == worker), key=lambda s: s.start_s)
        assert len(writes) == len(copies) == 3
        for copied, written, following in zip(copies, writes, copies[1:], strict=False):
            assert copied.end_s <= written.start_s and written.end_s <= following.start_s + 1e-9
    assert ops(timeline, "write_wait")


def test_a_write_beside_shares_the_network_with_the_steps() -> None:
    """Its flows and those of the gradients meet at the machine's port."""
    data = BIG.model_dump(mode="json", by_alias=True)
    data["cluster"]["sites"][0] |= {"storage": {"write": "100 GB/s"}, "fabric": {"link": "ethernet-10"}}
    slow = Scenario.model_validate(
        data | {"num_steps": 2, "checkpoint": {"every_steps": 1, "blocking": False}}, strict=False
    )
    calm = play(slow.replace({"checkpoint": {"every_steps": None}}))
    busy = play(slow)

    def syncs(timeline: Timeline) -> float:
        return sum(s.seconds for s in timeline.spans if s.op == "grad_sync" and s.step == 1)

    assert syncs(busy) > 1.01 * syncs(calm)


def test_what_is_not_kept_leaves_storage() -> None:
    whole = play(scenario(num_steps=6)).header.storage
    each = whole["written_bytes"] / 6
    assert whole["steps"] == list(range(6)) and whole["bytes"] == whole["peak_bytes"] == pytest.approx(6 * each)
    last = play(scenario(num_steps=6, keep={"latest": 2})).header.storage
    assert last["steps"] == [4, 5] and last["bytes"] == pytest.approx(2 * each)
    assert last["peak_bytes"] == pytest.approx(3 * each), "an old one goes when the new one is complete"
    stones = play(scenario(num_steps=6, keep={"latest": 1, "milestone_every": 2})).header.storage
    assert stones["steps"] == [1, 3, 5]
    best = play(scenario(num_steps=6, keep={"latest": 1, "best": 2})).header.storage
    assert 2 <= len(best["steps"]) <= 3 and best["written_bytes"] == whole["written_bytes"]


def test_a_checkpoint_is_there_once_every_rank_has_written() -> None:
    store = Store(scenario(keep={"latest": 1}))
    store.begin(0, parts=2, progress_s=10.0)
    store.write(0, 5.0)
    assert store.last() is None
    store.write(0, 5.0)
    store.begin(1, parts=2, progress_s=20.0)
    store.write(1, 5.0)
    last = store.last()
    assert last is not None and (last.step, last.progress_s, store.bytes) == (0, 10.0, 15.0)
    store.discard(1)
    assert store.bytes == 10.0, "what was not complete is gone"
