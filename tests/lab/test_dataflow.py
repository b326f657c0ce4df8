"""The marked graph: what may start when, and the law that every run obeys."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab import dataflow as df
from lab.dataflow import Dataflow, Edge, Node, conforms
from lab.load import load, parse
from lab.runs import header_of
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from tests.strategies import SCENARIOS

QUICK = Path("scenarios/quickstart.yaml").read_text()
MODES = ("synchronous", "one_step_off")


def played(scenario: Scenario, seconds: float = 1.0) -> Timeline:
    """The earliest lawful timeline in which every stage takes `seconds`: a max-plus evaluation of the graph.

    A stage that could take samples one by one waits for all of them.
    """
    graph = build(scenario)

    def needs(stage: str, step: int) -> list[tuple[str, int]]:
        return [*graph.requirements(stage, step), *graph.streams(stage, step)]

    ends: dict[tuple[str, int], float] = {}
    spans = []
    pending = [
        (stage, step) for step in range(graph.num_steps) for stage in graph.nodes if graph.nodes[stage].runs(step)
    ]
    while pending:
        ready = [key for key in pending if all(need in ends for need in needs(*key))]
        assert ready, "the graph is stuck"
        for stage, step in ready:
            start = max((ends[need] for need in needs(stage, step)), default=0.0)
            ends[stage, step] = start + seconds
            spans += [span(stage, step, worker, start, start + seconds) for worker in graph.nodes[stage].workers]
        pending = [key for key in pending if key not in ends]
    return Timeline.of(header_of(scenario, "simulated"), spans)


def span(stage: str, step: int, worker: str, start: float, end: float) -> Span:
    return Span(
        span_id=f"{stage}/{step}/{worker}",
        resource=worker,
        worker=worker,
        pool="",
        step=step,
        stage=stage,
        start_s=start,
        end_s=end,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_earliest_schedule_is_lawful(name: str, mode: str) -> None:
    schedule = {"mode": mode, "scoring": SCENARIOS[name].schedule.scoring}
    scenario = SCENARIOS[name].replace({"schedule": schedule, "num_steps": 7})
    assert conforms(build(scenario), played(scenario)) == []


def test_synchronous_steps_take_the_sum_of_their_stages_and_one_step_off_the_slowest_cycle() -> None:
    def period(mode: str) -> float:
        scenario = SCENARIOS["quickstart"].replace({"schedule": {"mode": mode}, "num_steps": 12, "checkpoint": {}})
        ends = [
            s.end_s for s in played(scenario).spans if s.stage == "weight_sync" and s.worker.startswith("actor.train")
        ]
        return ends[-1] - ends[-2]

    assert period("synchronous") == 5  # rollout, reward beside reference, advantage, update, weight sync
    assert period("one_step_off") == 3  # the cycle of the trainer: advantage, update, weight sync


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_span_moved_before_its_cause_is_found(data: st.DataObject) -> None:
    scenario = SCENARIOS["quickstart"].replace({"num_steps": 4})
    timeline = played(scenario)
    victim = data.draw(st.sampled_from([s for s in timeline.spans if s.start_s > 0]))
    moved = msgspec.structs.replace(victim, start_s=victim.start_s - 0.5, end_s=victim.end_s - 0.5)
    broken = Timeline.of(timeline.header, [moved if s is victim else s for s in timeline.spans])
    assert conforms(build(scenario), broken)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_missing_stage_a_strange_worker_and_a_strange_stage_are_found(data: st.DataObject) -> None:
    scenario = SCENARIOS["quickstart"].replace({"num_steps": 3})
    timeline, graph = played(scenario), build(scenario)
    victim = data.draw(st.sampled_from([s for s in timeline.spans if s.step < 2]))
    without = [s for s in timeline.spans if (s.stage, s.step) != (victim.stage, victim.step)]
    if victim.stage != "checkpoint":
        assert conforms(graph, Timeline.of(timeline.header, without))
    for change in ({"worker": "nobody[0]"}, {"stage": "lunch"}):
        strange = msgspec.structs.replace(victim, **change)
        assert conforms(graph, Timeline.of(timeline.header, [*timeline.spans, strange]))


def test_rollouts_lag_by_the_schedule() -> None:
    for mode, lag in zip(MODES, (0, 1), strict=True):
        graph = build(SCENARIOS["quickstart"].replace({"schedule": {"mode": mode}}))
        assert [graph.policy_version("rollout", k) for k in range(4)] == [max(k - lag, 0) for k in range(4)]


def test_a_cycle_without_lag_and_a_capacity_of_nothing_are_refused() -> None:
    nodes = {name: Node(stage=name, role="actor", workers=(name,), output="batch") for name in "ab"}
    there = Edge(source="a", target="b", unit="batch")
    for edges in (
        (there, Edge(source="b", target="a", unit="weights")),
        (Edge(source="a", target="b", unit="batch", capacity=0),),
    ):
        with pytest.raises(ValueError, match="waits for itself"):
            df.check(Dataflow(nodes=nodes, edges=edges, workers={}, num_steps=3))
    df.check(
        Dataflow(
            nodes=nodes, edges=(there, Edge(source="b", target="a", unit="weights", lag=1)), workers={}, num_steps=3
        )
    )


def test_no_reference_without_kl_and_no_critic_without_ppo() -> None:
    assert "reference" not in build(parse(QUICK.replace("kl_coef: 0.01", "kl_coef: 0"))).nodes
    assert "value" not in build(SCENARIOS["quickstart"]).nodes and "value" in build(SCENARIOS["ppo-tiny"]).nodes


def test_checkpoints_stand_where_they_are_due() -> None:
    graph = build(SCENARIOS["quickstart"])
    assert list(graph.steps("checkpoint")) == [7, 15, 23]
    assert ("checkpoint", 7) in graph.requirements("advantage", 8)


@pytest.mark.parametrize(("mode", "ahead"), [("synchronous", 0), ("one_step_off", 1)])
def test_nobody_generates_before_actor_and_critic_are_trained(mode: str, ahead: int) -> None:
    """The barrier of a PPO step, also where the critic is the slower of the two."""
    chosen = load("scenarios/ppo-7b-16gpu.yaml").replace({"schedule": {"mode": mode}})
    needed = build(chosen).requirements("rollout", 3)
    assert {("weight_sync", 2 - ahead), ("update_critic", 2 - ahead)} <= set(needed)
