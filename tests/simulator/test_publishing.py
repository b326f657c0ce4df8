"""Weights on their way to engines that fetch them: rounds, stores, looks, changes only, and a barrier that is missed."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from lab.errors import InputError, RunStuck
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.cost import CostModel
from profiles.profile import datasheet
from simulator.run import simulate
from simulator.traffic import direct
from simulator.transfers import gathered, tensors_s
from simulator.world import Process, World

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
SIZE = 2 * 7_615_616_512
PORT = 0.8 * 25e9
CALL = 7e-3
WAN = [{"between": ["a", "b"], "bandwidth": 1e9, "latency": 0.05}]


def node(name: str, count: int, devices: int) -> dict[str, Any]:
    return {"name": name, "count": count, "device": "a100-80g-sxm", "devices": devices, "intra": "nvlink3"}


def scenario(machines: int, engines: int, sync: dict[str, Any], **changes: Any) -> Scenario:
    """One trainer rank on a machine of its own, `engines` on each of `machines` others; little to generate."""
    nodes = [node("train", 1, 8), node("serve", machines, engines)]
    storage = {"write": 4e9, "read": 2e9}
    data = BIG | {
        "num_steps": 2,
        "cluster": {"sites": [{"name": "a", "nodes": nodes, "fabric": {"link": "ib-hdr200"}, "storage": storage}]},
        "pools": {
            "train": "train[0:4]", "critic": "train[4:6]", "reference": "train[6]", "reward": "train[7]",
            "rollout": f"serve[0:{machines * engines}]",
        },
        "place": BIG["place"]
        | {
            "actor.train": {"pool": "train", "data_parallel": 4, "zero_stage": 2},
            "critic.train": {"pool": "critic", "data_parallel": 2, "zero_stage": 2},
            "actor.generate": [{"pool": "rollout", "engines": machines * engines}],
        },
        "weight_sync": sync,
        "workload": BIG["workload"] | {"prompts_per_step": 8, "samples_per_prompt": 1},
        "update": BIG["update"] | {"minibatch_samples": 8},
    }  # fmt: skip
    return Scenario.model_validate(data | changes, strict=False)


def syncs(timeline: Timeline, worker: str = "actor.generate", op: str = "", step: int = 0) -> list[Span]:
    found = [span for span in timeline.spans if span.stage == "weight_sync" and span.op == op and span.step == step]
    return [span for span in found if worker in span.worker]


def fetched_s(timeline: Timeline) -> float:
    """From the trainer's publication to the last byte at an engine."""
    published = max(span.end_s for span in syncs(timeline, "actor.train", "snapshot"))
    return max(span.end_s for span in syncs(timeline, op="transfer")) - published


def loading(chosen: Scenario) -> float:
    """Seconds for the tensors one by one."""
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    return tensors_s(world, chosen.team("actor", "generate")[0])


@pytest.mark.parametrize("machines", [1, 3, 7])
def test_fetches_from_the_trainer_alone_share_its_port(machines: int) -> None:
    chosen = scenario(machines, 1, {"trigger": "event", "topology": "flat"})
    expected = CALL + loading(chosen) + machines * SIZE / PORT
    assert fetched_s(simulate(chosen, SHEETS)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("machines", [1, 2, 3, 4, 7, 12])
def test_fetches_from_the_nearest_double_the_holders_in_each_round(machines: int) -> None:
    chosen = scenario(machines, 1, {"trigger": "event"})
    rounds = math.ceil(math.log2(machines + 1))
    expected = CALL + rounds * (loading(chosen) + SIZE / PORT)
    assert fetched_s(simulate(chosen, SHEETS)) == pytest.approx(expected, rel=1e-3)


def fetches(timeline: Timeline) -> list[tuple[str, str]]:
    """Where engines had the weights from, and where they are."""
    lanes, engines = timeline.header.lanes, syncs(timeline)
    pools = {name: lane.devices[0].split("[")[0] for name, lane in lanes.items()}
    return [(pools.get(span.attrs["source"], "train"), pools[span.worker]) for span in engines]


def test_a_machine_fetches_once_and_hands_on_inside() -> None:
    nodes = [node("train", 1, 8), node("x", 1, 4), node("y", 1, 4)]
    pools = scenario(2, 4, {}).pools | {"rollout": "x[0:4]", "more": "y[0:4]"}
    place = scenario(2, 4, {}).place.model_dump(mode="json", by_alias=True)
    place |= {"actor.generate": [{"pool": pool, "engines": 4} for pool in ("rollout", "more")]}
    chosen = scenario(
        2, 4, {"trigger": "event"}, pools=pools, place=place,
        cluster={"sites": [{"nodes": nodes, "fabric": {"link": "ib-hdr200"}}]},
    )  # fmt: skip
    found = fetches(simulate(chosen, SHEETS))
    assert len(found) == 8
    assert [sum(there == name != here for here, there in found) for name in "xy"] == [1, 1]


def test_a_core_is_charged_for_loading_whole_weights_however_they_come() -> None:
    base, cores = load("scenarios/quickstart.yaml"), {"cpu-core": datasheet("cpu-core")}
    ways = (
        {},
        {"payload": "int8"},
        {"payload": "delta", "delta_share": 0.01},
        {"trigger": "event", "transport": "store"},
    )
    transfers = [syncs(simulate(base.replace({"weight_sync": way}), cores), op="transfer")[0] for way in ways]
    assert [span.seconds for span in transfers] == pytest.approx([transfers[0].seconds] * len(ways))
    assert transfers[2].bytes < transfers[1].bytes < transfers[0].bytes == transfers[3].bytes


def test_through_ray_s_store_a_machine_fetches_once_and_its_engines_read_at_once() -> None:
    """Beside the rounds of a tree: nobody on the machine waits for another one to have read."""
    said = {
        transport: scenario(1, 4, {"trigger": "event", "transport": transport})
        for transport in ("nccl", "object_store")
    }
    found = {name: simulate(chosen, SHEETS) for name, chosen in said.items()}
    sources = [span.attrs["source"] for span in syncs(found["object_store"])]
    assert sources.count("train/0") == 1
    starts = sorted(span.start_s for span in syncs(found["object_store"], op="transfer"))
    assert starts[1:] == [pytest.approx(starts[1], abs=1e-6)] * 3
    assert fetched_s(found["object_store"]) < fetched_s(found["nccl"])


def test_in_a_synchronous_run_everybody_has_the_weights_before_anybody_generates() -> None:
    timeline = simulate(scenario(3, 2, {"trigger": "event"}), SHEETS)
    taken = max(span.end_s for span in syncs(timeline))
    begun = min(span.start_s for span in timeline.stages() if span.stage == "rollout" and span.step == 1)
    assert begun >= taken and {span.end_s for span in syncs(timeline, "actor.train")} == {taken}


def test_a_store_is_written_by_all_ranks_and_read_by_every_engine() -> None:
    timeline = simulate(scenario(2, 1, {"trigger": "event", "transport": "store", "topology": "flat"}), SHEETS)
    uploads, reads = syncs(timeline, "actor.train", "upload"), syncs(timeline, op="transfer")
    assert sum(span.bytes for span in uploads) == pytest.approx(SIZE)
    assert uploads[0].seconds == pytest.approx(SIZE / 4e9, rel=1e-3)
    assert all(span.seconds == pytest.approx(SIZE / 2e9, rel=0.1) for span in reads)
    assert not syncs(timeline, op="snapshot") and {span.attrs["source"] for span in syncs(timeline)} == {"a"}


def test_engines_that_pull_look_in_turn() -> None:
    every = 30.0
    timeline = simulate(scenario(3, 1, {"trigger": "pull", "every": every, "topology": "flat"}), SHEETS)
    for index, span in enumerate(sorted(syncs(timeline), key=lambda span: span.worker)):
        looks = (span.start_s - index * every / 3) / every
        assert looks == pytest.approx(round(looks), abs=1e-6)
    published = syncs(timeline, "actor.train", "snapshot")[0].end_s
    assert all(published <= span.start_s <= published + every for span in syncs(timeline))


def test_a_period_that_outlasts_the_run_is_refused() -> None:
    """Nobody waits for the engines here, and they would generate with the first weights to the end."""
    age = {"bound": 1.0, "at_bound": "down_weight"}
    free = {"schedule": {"mode": "asynchronous", "staleness": age}, "sampling": BIG["sampling"]}
    often, seldom = ({"trigger": "pull", "every": every} for every in (5.0, 1e6))
    assert len({span.policy_version for span in simulate(scenario(1, 2, often, **free), SHEETS).spans}) > 1
    with pytest.raises(InputError, match="every 1e\\+06 s, and the run ends at"):
        simulate(scenario(1, 2, seldom, **free), SHEETS)


def test_less_is_sent_of_changes_and_of_eight_bits() -> None:
    sent = {}
    for name, more in (("full", {}), ("delta", {"delta_share": 0.1}), ("int8", {})):
        timeline = simulate(scenario(1, 1, {"trigger": "event", "payload": name} | more), SHEETS)
        (transfer,) = syncs(timeline, op="transfer")
        sent[name] = transfer.bytes
        work = {"full": set(), "delta": {"apply"}, "int8": {"convert"}}[name]
        assert {span.op for span in timeline.spans if span.stage == "weight_sync" and "generate" in span.worker} == {
            "", "transfer"
        } | work  # fmt: skip
    assert sent["full"] == SIZE
    assert sent["delta"] == pytest.approx(SIZE / 2 * (0.2 + 0.125))
    assert sent["int8"] == pytest.approx(SIZE / 2 * (1 + 4 / 128))


def far(sync: dict[str, Any], steps: int = 3) -> Scenario:
    """Two engines beside the trainer, and two behind a narrow connection."""
    near, away = [node("train", 1, 8), node("serve", 1, 2)], [node("edge", 1, 2)]
    fabric = {"link": "ib-hdr200"}
    sites = [{"name": "a", "nodes": near, "fabric": fabric}, {"name": "b", "nodes": away, "fabric": fabric}]
    pools = scenario(1, 2, {}).pools | {"edge": "edge[0:2]"}
    place = BIG["place"] | {
        "actor.train": {"pool": "train", "data_parallel": 4, "zero_stage": 2},
        "critic.train": {"pool": "critic", "data_parallel": 2, "zero_stage": 2},
        "actor.generate": [{"pool": "rollout", "engines": 2}, {"pool": "edge", "engines": 2}],
    }
    return scenario(
        1, 2, sync, num_steps=steps, cluster={"sites": sites, "wan": WAN}, pools=pools, place=place
    )  # fmt: skip


def test_late_engines_are_named_and_left_out_of_the_next_step() -> None:
    timeline = simulate(far({"trigger": "event", "barrier_timeout": 5.0}), SHEETS)
    late = {"actor.generate[2]", "actor.generate[3]"}
    trainer = syncs(timeline, "actor.train[0]")
    assert set(trainer[0].attrs["absent"]) == late
    absent = [span for span in syncs(timeline) if span.attrs.get("absent")]
    assert {span.worker for span in absent} == late and max(s.end_s for s in absent) == trainer[0].end_s
    generating = {span.worker for span in timeline.stages() if span.stage == "rollout" and span.step > 0}
    assert generating == {"actor.generate[0]", "actor.generate[1]"}
    samples = timeline.header.samples
    assert samples["issued"] == samples["trained"] == 24


def test_a_barrier_that_nobody_reaches_is_said() -> None:
    with pytest.raises(RunStuck, match="barrier_timeout"):
        simulate(far({"trigger": "event", "barrier_timeout": 0.05}), SHEETS)


def test_without_a_timeout_they_are_waited_for_and_a_site_is_crossed_to_once() -> None:
    timeline = simulate(far({"trigger": "event"}, steps=2), SHEETS)
    assert not any("absent" in span.attrs for span in syncs(timeline, ""))
    assert sum(there == "edge" != here for here, there in fetches(timeline)) == 1
    assert fetched_s(timeline) > SIZE / 0.8e9


def asynchronous(sync: dict[str, Any], num_steps: int = 3) -> World:
    """Engines that nobody waits for; the test plays trainer and engines."""
    schedule = {"mode": "asynchronous", "staleness": {"bound": 1}}
    chosen = scenario(3, 1, sync, num_steps=num_steps, schedule=schedule)
    return World(chosen, build(chosen), CostModel(chosen, SHEETS))


def trainer(world: World, period: float, published: list[float]) -> Process:
    from simulator.publishing import weight_sync

    for step in range(world.scenario.num_steps):
        yield world.env.timeout(period)
        yield world.env.all_of([world.env.process(part) for part in weight_sync(world, step)])
        published.append(world.now)


def engine(world: World, name: str, busy_s: float, held: list[int]) -> Process:
    """It generates pieces of `busy_s` and looks between them whether weights are there."""
    receiver = world.publication.receivers[name]
    while receiver.held < world.scenario.num_steps:
        if receiver.due(0) == "load":
            yield from receiver.load()
            held.append(receiver.held)
        else:
            yield receiver.news()
            yield world.env.timeout(busy_s)


@pytest.mark.parametrize("sync", [{}, {"trigger": "event"}, {"trigger": "pull", "every": 7.0}])
def test_engines_without_a_barrier_end_with_the_last_version(sync: dict[str, Any]) -> None:
    world, published = asynchronous(sync), list[float]()
    held: dict[str, list[int]] = {name: [] for name in world.publication.receivers}
    world.env.process(trainer(world, 20.0, published))
    for index, name in enumerate(held):
        world.env.process(engine(world, name, 1.0 + index, held[name]))
    world.env.run(500)
    assert len(published) == 3 and all(seen == sorted(set(seen)) and seen[-1] == 3 for seen in held.values())
    spans = [span for span in world.spans if not span.op and "generate" in span.worker]
    assert sorted(span.step + 1 for span in spans) == sorted(version for seen in held.values() for version in seen)


def test_a_push_waits_for_the_slowest_engine_and_an_event_for_none() -> None:
    ends = {}
    for trigger in ("push", "event"):
        world, published = asynchronous({"trigger": trigger}, num_steps=1), list[float]()
        world.env.process(trainer(world, 10.0, published))
        for index, name in enumerate(world.publication.receivers):
            world.env.process(engine(world, name, 100.0 * index, []))
        world.env.run(1000)
        ends[trigger] = published[0]
    assert ends["event"] < 20 and ends["push"] > 200


def test_an_engine_that_overslept_versions_takes_the_last_and_all_changes_since() -> None:
    world = asynchronous({"trigger": "event", "payload": "delta", "delta_share": 0.01})
    name, held = "actor.generate[0]", list[int]()
    world.env.process(trainer(world, 5.0, []))
    world.env.process(engine(world, name, 100.0, held))
    world.env.run(500)
    assert held == [3]
    (transfer,) = [span for span in world.spans if span.op == "transfer" and span.worker == name]
    assert transfer.bytes == pytest.approx(3 * world.publication.payload_bytes)


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    world, published = asynchronous({}, num_steps=1), list[float]()
    first, second, gone = world.scenario.team("actor", "generate")
    world.env.process(trainer(world, 1.0, published))
    for worker in (first, second):
        world.env.process(engine(world, worker.name, 0.1, []))
    world.env.run(50)
    assert not published, "a push needs everybody"
    world.publication.leave(gone)
    world.env.run(100)
    assert len(published) == 1


@pytest.mark.parametrize(
    ("sync", "key"),
    [
        ({"trigger": "pull"}, "every"),
        ({"every": "5 s"}, "every"),
        ({"payload": "delta"}, "delta_share"),
        ({"transport": "store"}, "transport"),
        ({"transport": "object_store"}, "transport"),
        ({"trigger": "event", "transport": "object_store", "topology": "tree"}, "topology"),
        ({"trigger": "event", "topology": "chain"}, "topology"),
        ({"barrier_timeout": 5}, "barrier_timeout"),
        ({"in_flight": "drain", "kv": "keep"}, "kv"),
        ({"in_flight": "interrupt"}, "mode"),
    ],
)
def test_what_has_no_meaning_is_refused(sync: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        scenario(1, 1, sync)


def test_resharding_takes_its_closed_form_alone_and_longer_beside_other_traffic() -> None:
    place = scenario(1, 1, {}).place.model_dump(mode="json", by_alias=True)
    nodes = [node("train", 1, 8), node("more", 2, 1), node("serve", 1, 1)]
    place |= {"actor.train": {"pool": "train", "data_parallel": 2, "zero_stage": 3}}
    chosen = scenario(
        1, 1, {}, num_steps=1, cluster={"sites": [{"nodes": nodes, "fabric": {"link": "ib-hdr200"}}]},
        pools={
            "train": "more[0:2]", "critic": "train[0:2]", "reference": "train[6]", "reward": "train[7]", "rollout": "serve[0]"
        },
        place=place,
    )  # fmt: skip
    (one, *_) = syncs(simulate(chosen, SHEETS), "actor.train", "reshard")
    assert one.seconds == pytest.approx(SIZE / 2 / PORT, rel=1e-3), "half of the weights cross the ports"
    world = World(chosen, build(chosen), CostModel(chosen, SHEETS))
    sender = chosen.team("actor", "train")[0]
    topology = world.network.topology
    world.env.process(world.network.send_all(direct(topology, "more[0]", "more[1]", 100 * SIZE)))
    world.env.run(world.env.process(world.network.send_all(gathered(world, sender, SIZE, one.seconds))))
    assert world.now == pytest.approx(2 * one.seconds, rel=1e-2)


def test_a_store_of_another_site_is_read_over_the_connection() -> None:
    sync = {"trigger": "event", "transport": "store", "topology": "flat"}
    reads = syncs(simulate(far(sync, steps=1), SHEETS), op="transfer")
    far_away = [span.seconds for span in reads if span.worker[-2] in "23"]
    assert far_away == pytest.approx([2 * SIZE / 0.8e9] * 2, rel=1e-2), "two engines share it"
    near = [span.seconds for span in reads if span.worker[-2] in "01"]
    assert near == pytest.approx([2 * SIZE / 1e9] * 2, rel=1e-2), "and so do two at their machine's mount"


def cluster_with(storage: dict[str, Any]) -> dict[str, Any]:
    return {"sites": [{"nodes": [node("train", 1, 8), node("serve", 1, 1)], "storage": storage}]}


@pytest.mark.parametrize(
    ("sync", "changes", "problem"),
    [
        (
            {"trigger": "event", "transport": "store"},
            {"cluster": cluster_with({"tier": "nvme"})},
            "lies in each machine",
        ),
        ({"payload": "delta", "delta_share": 0.1}, {"dtype": "int8"}, "cannot be added"),
        ({"payload": "delta", "delta_share": 0.1}, {"lora": {"rank": 8}}, "adapters"),
        ({"trigger": "event", "barrier_timeout": 5}, {"schedule": {"mode": "asynchronous"}}, "do not wait"),
    ],
)
def test_what_a_scenario_cannot_do_is_refused(sync: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    if "dtype" in changes:
        place = scenario(1, 1, {}).place.model_dump(mode="json", by_alias=True)
        changes = {"place": place | {"actor.generate": [{"pool": "rollout", "dtype": changes["dtype"]}]}}
    if "lora" in changes:
        changes = {"models": BIG["models"] | {"actor": BIG["models"]["actor"] | changes}}
    with pytest.raises(ValidationError, match=problem):
        scenario(1, 1, sync, **changes)
