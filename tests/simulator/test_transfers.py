"""Gradients, weights and checkpoints on the network: alone they take their closed forms, together they share it."""

from typing import Any

import pytest

from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles import collectives
from profiles.cost import CostModel
from profiles.profile import OpProfile, Range, datasheet
from profiles.roofline import averaging
from simulator.network import Flow
from simulator.run import simulate
from simulator.traffic import ring
from simulator.transfers import Gradients, broadcast, networked, per_tensor, written
from simulator.world import Process, World

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True) | {"num_steps": 2}
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
SIZE = 14e9


def cluster(count: int, devices: int, nics: int = 1, **site: Any) -> dict[str, Any]:
    node = {"name": "n", "count": count, "device": "a100-80g-sxm", "devices": devices, "intra": "nvlink3", "nics": nics}
    others = {"name": "serve", "device": "a100-80g-sxm", "devices": 8, "intra": "nvlink3"}
    whole = {"nodes": [node, others], "fabric": {"link": "ib-hdr200"}, "storage": {"write": "5 GB/s"}}
    return {"sites": [whole | site]}


def scenario(shape: tuple[int, int, int], zero: int = 0, topology: str = "chain", **changes: Any) -> Scenario:
    """Trainer ranks on one device each of `n`, as many engines on the devices behind them."""
    count, devices, nics = shape
    half = count * devices // 2
    data = BIG | {
        "cluster": cluster(count, devices, nics),
        "pools": {
            "train": f"n[0:{half}]",
            "rollout": f"n[{half}:{2 * half}]",
            "critic": "serve[0:4]",
            "reference": "serve[4]",
            "reward": "serve[5]",
        },
        "place": BIG["place"]
        | {
            "actor.train": {"pool": "train", "data_parallel": half, "zero_stage": zero},
            "critic.train": {"pool": "critic", "data_parallel": 4, "zero_stage": 2},
            "actor.generate": [{"pool": "rollout", "engines": half}],
        },
        "weight_sync": {"topology": topology},
        "update": BIG["update"] | {"minibatch_samples": 384},
    }
    return Scenario.model_validate(data | changes, strict=False)


def world(chosen: Scenario) -> World:
    return World(chosen, build(chosen), CostModel(chosen, SHEETS))


def seconds(of: World, process: Process) -> float:
    of.env.run(of.env.process(process))
    return of.now


shapes = pytest.mark.parametrize("shape", [(1, 8, 1), (2, 1, 1), (4, 8, 1), (4, 8, 8), (12, 2, 2)])


@shapes
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("passing", [0.0, 0.1, 100.0])
def test_alone_gradients_take_their_closed_form_less_what_the_backward_pass_hides(
    shape: tuple[int, int, int], zero: int, passing: float
) -> None:
    here = world(scenario(shape, zero))
    team = here.scenario.team("actor", "train")
    gradients = Gradients(here, team[0], len(team), SIZE)

    def ranks() -> Process:
        for _ in team:
            gradients.begin()
        yield here.env.timeout(passing)
        yield from gradients.finish()

    cost = here.cost(team[0], "grad_sync", {"bytes": SIZE, "beside_s": passing}).seconds
    assert seconds(here, ranks()) - passing == pytest.approx(cost if len(team) > 1 else 0.0, rel=1e-6)


@shapes
def test_what_is_reduced_is_the_closed_form_of_the_collective(shape: tuple[int, int, int]) -> None:
    layout = (here := world(scenario(shape))).costs.layout(here.scenario.team("actor", "train")[0])
    assert averaging(layout, SIZE).reduced_s == collectives.seconds("all_reduce", SIZE, layout.gradients)
    port = 0.8 * 25e9 * shape[2]
    assert layout.gradients.inter.bandwidth == pytest.approx(port)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_groups_of_tensor_ranks_and_stages_share_the_ports_of_their_machine(tensor: int, stages: int) -> None:
    """Four machines with a rank of 8 devices or less each: what crosses their ports is the same however it is cut."""
    place = BIG["place"] | {
        "actor.train": {
            "pool": "train", "data_parallel": 4, "tensor_parallel": tensor, "pipeline_parallel": stages,
            "context_parallel": 8 // tensor // stages, "zero_stage": 0,
        },
        "critic.train": {"pool": "critic", "data_parallel": 4, "zero_stage": 2},
    }  # fmt: skip
    if tensor * stages > 8:
        return
    pools = {
        "train": "n[0:32]",
        "critic": "serve[0:4]",
        "rollout": "n[32:34]",
        "reference": "serve[4]",
        "reward": "serve[5]",
    }
    spec = BIG["models"] | {"actor": {"arch": "opt-6.7b"}, "reference": {"like": "actor"}, "critic": {"like": "actor"}}
    here = world(scenario((5, 8, 8), place=place, pools=pools, models=spec))
    layout = here.costs.layout(here.scenario.team("actor", "train")[0])
    assert layout.gradients.ranks == 32 // tensor // stages
    port, wide = 0.8 * 25e9 * 8, 2 * 3 / 4 * SIZE / (0.8 * 25e9 * 8)
    found = averaging(layout, SIZE).reduced_s
    assert layout.gradients.inter.bandwidth == pytest.approx(port / tensor / stages)
    assert found >= 0.99 * wide, "no faster than all bytes through the ports"
    if tensor * stages == 8:
        assert found == pytest.approx(wide, rel=1e-2)


@shapes
@pytest.mark.parametrize("topology", ["chain", "tree", "flat"])
def test_alone_a_broadcast_takes_its_closed_form(shape: tuple[int, int, int], topology: str) -> None:
    here = world(scenario(shape, topology=topology))
    sender = here.scenario.team("actor", "train")[0]
    closed = here.cost(sender, "weight_sync", {"bytes": SIZE}).seconds
    found = per_tensor(here, sender) + seconds(here, here.network.play(broadcast(here, sender, SIZE, closed)))
    assert found == pytest.approx(closed, rel=1e-6)


def test_alone_a_checkpoint_takes_its_closed_form() -> None:
    here = world(scenario((4, 8, 1)))
    worker = here.scenario.team("actor", "train")[0]
    closed = here.cost(worker, "checkpoint", {"bytes": SIZE / 8}).seconds
    ranks = here.scenario.team("actor", "train")[:8]
    for rank in ranks[1:]:
        here.env.process(here.network.send_all(written(here, rank, SIZE / 8)))
    assert seconds(here, here.network.send_all(written(here, worker, SIZE / 8))) == pytest.approx(closed, rel=1e-5)


def spans(timeline: Timeline, op: str, worker: str = "") -> list[Span]:
    return [span for span in timeline.spans if span.op == op and worker in span.worker]


def test_spans_of_transfers_carry_bytes_and_flows() -> None:
    timeline = simulate(scenario((4, 8, 1), checkpoint={"every_steps": 1}), SHEETS)
    parameters = 7_615_616_512
    for op, flows in (("grad_sync", 16), ("transfer", 16), ("write", 1)):
        found = spans(timeline, op, "actor.train")
        assert found and {span.attrs["flows"] for span in found} == {flows}
    assert {span.bytes for span in spans(timeline, "transfer")} == {2.0 * parameters}
    assert sum(span.bytes for span in spans(timeline, "write", "actor.train")) == pytest.approx(2 * 14 * parameters)


def test_checkpoints_of_one_machine_slow_each_other_down() -> None:
    pools = {
        "train": "n[0:2]", "critic": "n[2:6]", "rollout": "n[8:10]", "reference": "serve[4]", "reward": "serve[5]",
    }  # fmt: skip
    alone = scenario((2, 8, 1), checkpoint={"every_steps": 1})
    place = alone.place.model_dump(mode="json", by_alias=True)
    place |= {"actor.train": {"pool": "train", "data_parallel": 2}, "actor.generate": [{"pool": "rollout"}]}
    together = scenario((2, 8, 1), checkpoint={"every_steps": 1}, pools=pools, place=place)
    slow, fast = (
        {role: spans(simulate(one, SHEETS), "write", role)[0].seconds for role in ("actor", "critic")}
        for one in (together, alone)
    )
    assert slow["actor"] == pytest.approx(2 * fast["actor"], rel=1e-3), "two ranks with half of it each end last"
    assert slow["critic"] == pytest.approx(1.5 * fast["critic"], rel=1e-3)


def test_a_weight_sync_beside_a_gradient_sync_is_slowed_at_the_port_they_share() -> None:
    here = world(scenario((4, 1, 1)))
    sender = here.scenario.team("actor", "train")[0]
    closed = here.cost(sender, "weight_sync", {"bytes": SIZE}).seconds
    gradients = ring(here.network.topology, here.costs.layout(sender).gradient_devices, 4 * SIZE)
    here.env.process(here.network.send_all(gradients))
    found = seconds(here, here.network.play(broadcast(here, sender, SIZE, closed)))
    assert found == pytest.approx(2 * closed, rel=1e-2)


def test_a_slow_connection_of_sites_paces_all_that_crosses_it() -> None:
    one = cluster(4, 2)["sites"][0]
    sites = [one | {"name": "a", "nodes": one["nodes"][:1]}, one | {"name": "b", "nodes": one["nodes"][1:]}]
    wan = [{"between": ["a", "b"], "bandwidth": 1e9, "latency": 0.05}]
    pools = {
        "train": "n[0:4]", "critic": "n[4:8]", "rollout": "serve[0:4]", "reference": "serve[4]", "reward": "serve[5]",
    }  # fmt: skip
    here = world(scenario((4, 2, 1), cluster={"sites": sites, "wan": wan}, pools=pools))
    sender = here.scenario.team("actor", "train")[0]
    closed = here.cost(sender, "weight_sync", {"bytes": SIZE}).seconds
    assert closed > SIZE / 0.8e9
    assert seconds(here, here.network.play(broadcast(here, sender, SIZE, closed))) == pytest.approx(closed, rel=1e-6)


def test_a_measured_cost_stays_what_the_profile_says() -> None:
    ops = {
        op: OpProfile(
            coefficients={"each": 3.0}, ranges={"each": Range(low=1.0, high=1.0)}, points=1, residual_median=0.0,
            residual_p90=0.0,
        )
        for op in ("weight_sync", "grad_sync", "checkpoint")
    }  # fmt: skip
    sheet = SHEETS["a100-80g-sxm"]
    measured = {sheet.device: sheet.model_copy(update={"ops": dict(sheet.ops) | ops})}
    timeline = simulate(scenario((4, 8, 1), checkpoint={"every_steps": 1}), measured)
    for op in ("grad_sync", "transfer", "write"):
        assert {round(span.seconds, 6) for span in spans(timeline, op)} == {3.0}
        assert not any("flows" in span.attrs for span in spans(timeline, op))


@pytest.mark.parametrize("name", ["quickstart", "ppo-tiny", "grpo-learns"])
def test_nothing_goes_as_flows_on_cores(name: str) -> None:
    chosen = load(f"scenarios/{name}.yaml")
    here = World(chosen, build(chosen), CostModel(chosen, {"cpu-core": datasheet("cpu-core")}))
    assert not any(networked(here, worker, "weight_sync") for worker in chosen.workers.values())


def test_a_flow_of_a_device_to_itself_needs_no_link() -> None:
    here = world(scenario((2, 2, 1)))
    assert seconds(here, here.network.send(Flow(path=here.network.topology.between("n[0]", "n[0]"), bytes=1e9))) == 0
