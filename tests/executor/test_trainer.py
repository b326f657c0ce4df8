"""Real trainers: however a step is packed, sharded and spread over ranks, it is the same step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from executor import checkpoint
from executor.experience import Samples
from executor.trainer import Trainer
from executor.workers import HOST, environment, free_port
from lab.scenario import Scenario
from lab.timeline import Span

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
NUMBER, MINIBATCH = 16, 8


def scenario_of(scenario: Make, ranks: int = 1, zero_stage: int = 0, **changes: Any) -> Scenario:
    train = {"pool": "all", "data_parallel": ranks, "zero_stage": zero_stage}
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": 90}
    place = {"actor.train": train, "critic.train": train}
    return scenario("ppo-tiny", **({"update": update, "place": place} | changes))


@contextmanager
def trainers(chosen: Scenario, role: str = "actor") -> Iterator[list[Any]]:
    """The ranks of a role, ready."""
    team, port = chosen.team(role, "train"), free_port()
    actors = []
    for rank, worker in enumerate(team):
        variables = environment(threads=1) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(team)), "LOCAL_SIZE": str(len(team)),
            "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
        }  # fmt: skip
        options = {"num_cpus": 0.1, "runtime_env": {"env_vars": variables}}
        actors.append(ray.remote(Trainer).options(**options).remote(worker, rank, len(team), role, chosen, port))
    try:
        ray.get([actor.ready.remote() for actor in actors])
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def samples(seed: int = 0) -> Samples:
    """Responses of very different lengths, so that ranks get different numbers of micro-batches."""
    rng = np.random.default_rng(seed)
    responses = [40 if i % 2 == 0 else 3 for i in range(NUMBER)]
    rows = [rng.normal(-4, 0.3, n).astype(np.float32) for n in responses]
    return Samples(
        step=0, policy_version=0, prompts=np.arange(NUMBER) // 4, num_prompt_tokens=np.full(NUMBER, 6),
        tokens=[rng.integers(4, 64, 6 + n) for n in responses], logprobs=rows,
        columns={
            "advantages": [rng.normal(size=n).astype(np.float32) for n in responses],
            "returns": [rng.normal(size=n).astype(np.float32) for n in responses],
            "values": [rng.normal(size=n).astype(np.float32) for n in responses],
            "reference_logprobs": [row - 0.1 for row in rows],
        },
    )  # fmt: skip


Step = tuple[dict[str, Any], dict[str, float], list[list[Span]]]


def after_update(chosen: Scenario, role: str = "actor") -> Step:
    """Weights, numbers of interest and spans of all ranks after one step on `samples`."""
    with trainers(chosen, role) as team:
        return updated(team)


def updated(team: list[Any]) -> Step:
    infos = ray.get([actor.update.remote(0, samples()) for actor in team])
    weights = ray.get([actor.__ray_call__.remote(_weights) for actor in team])[0]
    return weights, infos[0]["learning"], [info["spans"] for info in infos]


def _weights(trainer: Trainer) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in trainer.learner.weights().items()}


@pytest.fixture(scope="module")
def plain(local_ray: None, scenario: Make) -> Step:
    return after_update(scenario_of(scenario))


def assert_same_step(one: Step, other: Step) -> None:
    """Adam divides by the gradient's size, so the norm of the gradient is compared as well."""
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        np.testing.assert_allclose(one[0][name], other[0][name], atol=2e-4, err_msg=name)
    assert {key: value for key, value in one[1].items() if key != "logprob_gap"} == pytest.approx(
        {key: value for key, value in other[1].items() if key != "logprob_gap"}, rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize(("ranks", "zero_stage"), [
    (2, 0),
    (2, 2),
    pytest.param(2, 1, marks=pytest.mark.full),
    pytest.param(2, 3, marks=pytest.mark.full),
    pytest.param(1, 1, marks=pytest.mark.full),
    pytest.param(1, 2, marks=pytest.mark.full),
    pytest.param(1, 3, marks=pytest.mark.full),
])  # fmt: skip
def test_ranks_and_zero_stages_make_the_same_step(plain: Step, scenario: Make, ranks: int, zero_stage: int) -> None:
    found = after_update(scenario_of(scenario, ranks, zero_stage))
    assert_same_step(plain, found)
    for spans in found[2]:
        assert sum(span.op == "grad_sync" for span in spans) == (4 if ranks > 1 and zero_stage < 2 else 0)
        assert sum(span.op == "optimizer" for span in spans) == 4  # two mini-batches, two epochs


def test_packing_makes_the_same_step(plain: Step, scenario: Make) -> None:
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": 4096}
    found = after_update(scenario_of(scenario, update=update))
    assert_same_step(plain, found)
    passes = [sum(span.op == "forward" for span in spans) for (spans,) in (plain[2], found[2])]
    assert passes[0] > passes[1] == 2 * 2  # mini-batches, epochs


@pytest.mark.full
def test_recomputing_activations_makes_the_same_step(plain: Step, scenario: Make) -> None:
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": 90, "recompute": "full"}
    assert_same_step(plain, after_update(scenario_of(scenario, update=update)))


def test_critic_ranks_agree_on_the_step_and_cover_all_values(local_ray: None, scenario: Make) -> None:
    with trainers(scenario_of(scenario, ranks=2), "critic") as team:
        calls = [actor.values.options(num_returns=2).remote(0, samples()) for actor in team]
        parts = ray.get([columns for columns, _ in calls])
        assert_same_step(after_update(scenario_of(scenario), "critic"), updated(team))
    merged = parts[0]["values"] | parts[1]["values"]
    assert sorted(merged) == list(range(NUMBER))
    assert not set(parts[0]["values"]) & set(parts[1]["values"])
    assert [len(merged[i]) for i in range(NUMBER)] == [len(row) for row in samples().logprobs]


def test_a_checkpoint_holds_the_weights(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    with trainers(scenario_of(scenario)) as (actor,):
        info = ray.get(actor.save.remote(tmp_path, 4))
        weights = ray.get(actor.__ray_call__.remote(_weights))
        learned = ray.get(actor.logprobs.remote(samples()))
    found, _, manifest = checkpoint.read(tmp_path / checkpoint.name(4, "actor", 0))
    assert (manifest["step"], manifest["role"]) == (4, "actor")
    assert all(np.array_equal(found[name].numpy(), weights[name]) for name in weights)
    (write,) = [span for span in info["spans"] if span.op == "write"]
    assert write.bytes == write.attrs["quantities"]["bytes"] > 0
    assert [len(row) for row in learned] == [len(row) for row in samples().logprobs]
