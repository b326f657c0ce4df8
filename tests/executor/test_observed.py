"""What is known of a run from what its stages report: played by a simulation, whose spans are those of a real run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.distributions import distributions, spread
from executor.experience import Samples
from executor.observed import Observed
from lab.metrics import step_times
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.watched import BY_NAME
from profiles.profile import datasheet
from simulator.run import simulate

Make = Callable[..., Scenario]


def replayed(scenario: Scenario, timeline: Timeline, observed: Observed) -> Observed:
    """Tells of a run's stages in the order in which they ended."""
    groups: dict[tuple[str, int], list[Span]] = {}
    for span in timeline.spans:
        groups.setdefault((span.node, span.step), []).append(span)
    for (stage, step), spans in sorted(groups.items(), key=lambda item: max(span.end_s for span in item[1])):
        observed.stage(stage, step, [{"spans": spans}], scenario.workload.samples_per_step)
    return observed


@pytest.fixture(scope="module")
def watched(scenario: Make) -> tuple[Scenario, Timeline, Observed]:
    chosen = scenario("ppo-tiny", num_steps=5)
    timeline = simulate(chosen, {"cpu-core": datasheet("cpu-core")})
    return chosen, timeline, replayed(chosen, timeline, Observed("weight_sync"))


def test_counts_are_those_of_the_run(watched: tuple[Scenario, Timeline, Observed]) -> None:
    chosen, timeline, seen = watched
    total = chosen.workload.samples_per_step * chosen.num_steps
    assert seen.number("samples_total", "generated") == seen.number("samples_total", "trained") == total
    assert seen.number("buffer_samples") == 0
    tokens = sum(span.attrs.get("response_tokens", 0) for span in timeline.stages() if span.stage == "rollout")
    assert seen.number("generated_tokens_total") == tokens > 0


def test_the_step_is_as_long_as_the_summary_says(watched: tuple[Scenario, Timeline, Observed]) -> None:
    chosen, timeline, seen = watched
    assert seen.number("step_seconds") == pytest.approx(step_times(timeline)[-1])
    expected = chosen.workload.samples_per_step / step_times(timeline)[-1]
    assert seen.number("samples_per_second") == pytest.approx(expected)


def test_iteration_and_version_are_those_of_the_latest(watched: tuple[Scenario, Timeline, Observed]) -> None:
    _, _, seen = watched
    for name, version in {"generated_tokens_per_second": 3, "step_seconds": 5}.items():  # rollouts are one step behind
        value = seen.values[name, ()]
        assert (value.iteration, value.model_version) == (4, version)
    assert seen.number("lag_versions", "max") == 1


def test_a_learning_row_fills_its_metrics() -> None:
    seen = Observed("weight_sync")
    seen.learned(3, {"reward": 0.5, "value_loss": 2.0, "kl": float("nan"), "distinct_2": 0.25, "note": "text"})
    assert {key: value.number for key, value in seen.values.items()} == {
        ("reward", ()): 0.5, ("critic_loss", ()): 2.0, ("distinct_ratio", ("2",)): 0.25,
    }  # fmt: skip
    assert seen.of_step(3) == {"reward": 0.5, "critic_loss": 2.0, "distinct_ratio/2": 0.25}
    assert seen.of_step(2) == {}


def test_processes_that_are_gone_have_no_series() -> None:
    seen = Observed("weight_sync")
    for name in ("a", "b"):
        seen.set("worker_cpu_cores", 1.0, name)
    seen.set("device_use_ratio", 1.0, "core0")
    seen.forget(("worker_cpu_cores",), {"b"})
    assert seen.values.keys() == {("worker_cpu_cores", ("b",)), ("device_use_ratio", ("core0",))}


def test_faults_are_counted_by_kind() -> None:
    seen = Observed("weight_sync")
    for lost in (3, 4):
        seen.fault("worker_lost", lost)
    assert seen.number("faults_total", "worker_lost") == 2 and seen.number("samples_total", "lost") == 7


def test_where_samples_are_counted_one_by_one_these_counts_stand() -> None:
    seen = Observed("weight_sync", barrier=False)
    spans = [
        Span(
            span_id=f"{stage}/0/{worker}", resource=worker, step=0, stage=stage, pool="all", worker=worker, start_s=0.0,
            end_s=end, policy_version=1, attrs={"samples": 8, "response_tokens": 80},
        )
        for stage, worker, end in (
            ("rollout", "actor.generate[0]", 2.0), ("update_actor", "actor.train[0]", 3.0),
            ("weight_sync", "actor.train[0]", 4.0), ("weight_sync", "actor.generate[0]", 9.0),
        )
    ]  # fmt: skip
    seen.stage("rollout", 0, [{"spans": spans[:1]}], 8)
    seen.fates({"issued": 20, "trained": 0, "dropped": 2, "buffered": 6, "in_flight": 12})
    assert seen.number("buffer_samples") == 6
    seen.stage("update_actor", 0, [{"spans": spans[1:2]}], 8)
    seen.fates({"issued": 20, "trained": 4, "dropped": 2, "buffered": 2, "in_flight": 12})
    found = {
        fate: seen.number("samples_total", fate) for fate in ("generated", "trained", "dropped", "aborted", "lost")
    }
    assert found == {"generated": 8, "trained": 4, "dropped": 2, "aborted": 0, "lost": 0}
    for mine in (spans[3:], spans[2:3]):  # an engine takes the version whenever it can; the trainer's part publishes it
        seen.stage("weight_sync", 0, [{"spans": mine}], 8)
    assert seen.number("step_seconds") == 4.0 and seen.number("buffer_samples") == 2


@pytest.mark.parametrize(("name", "labels", "error"), [("nothing", (), KeyError), ("reward", ("x",), ValueError)])
def test_what_is_no_metric_is_refused(name: str, labels: tuple[str, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        Observed("weight_sync").set(name, 1.0, *labels)


# ---------------------------------------------------------------- distributions


@given(st.lists(st.floats(-20, 20), max_size=30), st.lists(st.floats(-10, 10), min_size=1, max_size=6, unique=True))
def test_every_number_is_in_one_bucket(numbers: list[float], ends: list[float]) -> None:
    edges = tuple(sorted(ends))
    found = spread(np.asarray(numbers), edges)
    assert sum(found.counts) == len(numbers) and found.total == pytest.approx(sum(numbers), abs=1e-9)
    for i, edge in enumerate(edges):
        assert sum(found.counts[: i + 1]) == sum(number <= edge for number in numbers)


def samples(**columns: Any) -> Samples:
    """Two samples, with two and three response tokens."""
    return Samples(
        step=0, policy_version=0, prompts=np.zeros(2, dtype=np.int64), num_prompt_tokens=np.full(2, 4),
        tokens=[np.arange(6), np.arange(7)], logprobs=[np.float32([-1, -2]), np.float32([-1, -1, -4])], columns=columns,
    )  # fmt: skip


def test_distributions_of_a_step() -> None:
    reference = [np.float32([-1, -1]), np.float32([-2, -2, -2])]
    advantages = [np.full(2, 0.5, dtype=np.float32), np.full(3, -0.2, dtype=np.float32)]
    found = distributions(samples(rewards=np.asarray([0.0, 1.0]), advantages=advantages, reference_logprobs=reference))
    assert found.keys() == {"response_tokens", "reward_distribution", "advantage_distribution", "kl_distribution"}
    assert found["response_tokens"].total == 5
    assert found["reward_distribution"].total == 1
    assert found["advantage_distribution"].total == pytest.approx(0.3)
    assert found["kl_distribution"].total == pytest.approx(-0.5 + 0.0)  # means of (0, -1) and of (1, 1, -2)
    assert all(sum(one.counts) == 2 and len(one.counts) == len(BY_NAME[name].edges) + 1 for name, one in found.items())


def test_what_there_is_no_column_of_has_no_distribution() -> None:
    assert distributions(samples()).keys() == {"response_tokens"}
    odd = samples(rewards=np.asarray([np.nan, 1.0]), reference_logprobs=[np.float32([-1]), np.float32([-2, -2, -2])])
    found = distributions(odd)
    assert found.keys() == {"response_tokens", "reward_distribution"} and sum(found["reward_distribution"].counts) == 1
