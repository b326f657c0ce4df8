"""Scorers that start and stop with their queue: real actors, the first of which leads."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from executor.crew import Crew, lead
from executor.scoring import ReferenceWorker
from executor.workers import CALLS_AT_ONCE, environment
from lab.scaling import Scale
from lab.scenario import Scenario
from tests.executor.judged import samples

Make = Callable[..., Scenario]


@pytest.fixture(scope="module")
def team(local_ray: None, scenario: Make) -> Iterator[tuple[Scenario, list[Any]]]:
    """Two scorers, of which the second is an empty process."""
    chosen = scenario(
        "scoring-tiny", place={"reference.score": {"pool": "all", "replicas": 2, "max_batch_samples": 2}},
        scaling={"reference.score": {"min": 1, "start": 0.01, "drain": 0.02, "hold": 0.05, "look": 0.02}},
    )  # fmt: skip
    options = {"num_cpus": 0.5, "max_concurrency": CALLS_AT_ONCE, "runtime_env": {"env_vars": environment(threads=1)}}
    actors = [
        ray.remote(ReferenceWorker).options(**options).remote(worker, chosen)
        for worker in chosen.team("reference", "score")
    ]
    ray.get(actors[0].ready.remote())
    ray.get(actors[0].__ray_call__.remote(lead, actors[1:]))
    yield chosen, actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.real
def test_a_second_scorer_starts_scores_and_stops_again(team: tuple[Scenario, list[Any]]) -> None:
    _, [first, second] = team
    rows = samples(64, per_prompt=4)
    alone = ray.get(first.judged.remote(rows))["reference_logprobs"]
    workers, decisions = set[str](), list[dict[str, Any]]()
    for step in range(20):
        ray.get(first.open.remote(step, 0, float(step)))
        first.submit.remote(step, list(range(64)), rows)
        columns, info = ray.get(first.collect.remote(step, rows))
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(columns["reference_logprobs"], alone, strict=True))
        mine = [span for span in info["spans"] if span.stage == "reference" and not span.op]
        assert sum(span.attrs["samples"] for span in mine) == 64
        workers |= {span.worker for span in mine}
        decisions += mine[0].attrs["scaling"]
        if len(workers) == 2 and any(one["target"] == 1 for one in decisions):
            break
        time.sleep(0.2)  # nothing waits meanwhile: the hold passes
    assert workers == {"reference.score[0]", "reference.score[1]"}
    assert decisions[0]["target"] == 2 and decisions[0]["why"] == "backlog" and decisions[0]["ready"] == 1
    assert ray.get(second.judged.remote(rows.take([0]))) if decisions[-1]["target"] == 2 else True


def test_the_rule_sees_the_queue_and_what_is_known_of_the_rate() -> None:
    crew = Crew(Scale(min=1, start=0.0, drain=1.0, look=1.0), [], own_start_s=5.0)
    crew.open(0, 0)
    assert crew.look(num_queued=9, num_running=0, at_s=1.0).why == "unknown_rate"
    assert (crew.num_servers, crew.most, crew.decisions) == (1, 1, [])
