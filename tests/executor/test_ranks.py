"""However a step is sharded, spread over ranks, packed and interrupted, it is the same step."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from executor.experience import Samples
from executor.workers import HOST
from lab.scenario import Scenario
from tests.executor.ranks import Ranks

pytestmark = pytest.mark.real
Make = Callable[..., Scenario]
NUMBER, MINIBATCH = 8, 4
COMBINATIONS = [(ranks, stage) for ranks in (1, 2) for stage in (0, 1, 2, 3)]


def some(*quick: Any) -> list[Any]:
    """All combinations of ranks and ZeRO stages, those that are not `quick` in full runs only."""
    return [pytest.param(*one, marks=() if one in quick else pytest.mark.full) for one in COMBINATIONS]


LORA = {"rank": 4, "alpha": 8.0}


def scenario_of(
    scenario: Make, ranks: int = 1, stage: int = 0, role: str = "actor", lora: Any = None, **changes: Any
) -> Scenario:
    train = {"pool": "all", "data_parallel": ranks, "zero_stage": stage}
    model = {"lora": lora}
    parts = {
        "update": {"minibatch_samples": MINIBATCH, "microbatch_tokens": 80},
        "algorithm": {"ppo_epochs": 1},
        "place": {"actor.train": train, "critic.train": train},
        "models": {"actor": {"arch": "tiny-llama", "dtype": "float32"} | (model if role == "actor" else {}),
                   "critic": {"like": "actor", "dtype": "float32"} | (model if role == "critic" else {})},
        "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1, "grad_clip": 0.5},
    }  # fmt: skip
    return scenario("ppo-tiny", **(parts | changes))


def samples(seed: int) -> Samples:
    """Responses of very different lengths, so that ranks get different numbers of micro-batches, and two temperatures."""
    rng = np.random.default_rng(seed)
    responses = [22 if i % 2 == 0 else 3 for i in range(NUMBER)]
    rows = [rng.normal(-4, 0.3, n).astype(np.float32) for n in responses]
    prompts = [rng.integers(4, 64, 6) for _ in range(NUMBER // 4)]
    return Samples(
        step=seed, policy_version=seed, prompts=np.arange(NUMBER) // 4, num_prompt_tokens=np.full(NUMBER, 6),
        tokens=[np.append(prompts[i // 4], rng.integers(4, 64, n)) for i, n in enumerate(responses)], logprobs=rows,
        temperatures=np.where(np.arange(NUMBER) % 3, 1.0, 0.7).astype(np.float32),
        columns={
            "advantages": [rng.normal(size=n).astype(np.float32) for n in responses],
            "returns": [rng.normal(size=n).astype(np.float32) for n in responses],
            "values": [rng.normal(size=n).astype(np.float32) for n in responses],
            "reference_logprobs": [row - 0.1 for row in rows],
        },
    )  # fmt: skip


def trainer_of(rank: int, world: int, chosen: Scenario, role: str) -> Any:
    from executor.trainer import Trainer

    found = Trainer(chosen.team(role, "train")[rank], rank, world, role, chosen, 0)
    found.ready()
    return found


def weights_of(trainer: Any, whole: bool = False) -> dict[str, Any]:
    found = trainer.learner.whole() if whole else trainer.learner.weights()
    return {name: tensor.numpy().copy() for name, tensor in found.items()}


def learn(rank: int, world: int, chosen: Scenario, role: str, steps: int = 2) -> tuple[dict[str, Any], list[Any]]:
    """All weights and what was learned after some steps."""
    trainer = trainer_of(rank, world, chosen, role)
    learned = [trainer.update(step, samples(step))["learning"] for step in range(steps)]
    return weights_of(trainer, whole=True), learned


def interrupted(rank: int, world: int, chosen: Scenario, role: str) -> list[tuple[Any, Any]]:
    """What two steps learn after a break, and the weights after them: as if there was none, after everything was
    restored, and after the weights alone were."""
    first = trainer_of(rank, world, chosen, role)
    first.update(0, samples(0))
    weights = {name: tensor.clone() for name, tensor in first.learner.weights().items()}
    state = first.learner.state()
    found = [_two_steps(first)]
    for again in (lambda learner: learner.restore(weights, *state), lambda learner: learner._load(weights)):
        other = trainer_of(rank, world, chosen, role)
        other.update(5, samples(5))  # whatever it holds is replaced
        again(other.learner)
        found.append(_two_steps(other))
    return found


def _two_steps(trainer: Any) -> tuple[Any, Any]:
    return [trainer.update(step, samples(step))["learning"] for step in (1, 2)], weights_of(trainer)


@pytest.fixture(scope="module")
def fleets() -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one, Ranks(2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def plain(fleets: dict[int, Ranks], scenario: Make) -> dict[str, Any]:
    return {role: fleets[1].run(learn, scenario_of(scenario), role)[0] for role in ("actor", "critic")}


def assert_same(one: Any, other: Any) -> None:
    """Adam divides by the gradient's size, so tiny differences of tiny gradients grow."""
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        np.testing.assert_allclose(one[0][name], other[0][name], atol=3e-4, err_msg=name)
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("ranks", "stage"), some((1, 3), (2, 0), (2, 2))[1:])
def test_ranks_and_zero_stages_make_the_same_steps(
    fleets: dict[int, Ranks], plain: dict[str, Any], scenario: Make, ranks: int, stage: int, role: str
) -> None:
    found = fleets[ranks].run(learn, scenario_of(scenario, ranks, stage), role)
    assert_same(plain[role], found[0])
    for name, weights in found[0][0].items():
        assert all(np.array_equal(weights, other[0][name]) for other in found), name


@pytest.mark.parametrize("pack", ["packed", "shared"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_samples_laid_end_to_end_make_the_same_steps(
    fleets: dict[int, Ranks], plain: dict[str, Any], scenario: Make, ranks: int, role: str, pack: str
) -> None:
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": 80, "pack": pack}
    assert_same(plain[role], fleets[ranks].run(learn, scenario_of(scenario, ranks, update=update), role)[0])


def test_recomputing_activations_makes_the_same_steps(
    fleets: dict[int, Ranks], plain: dict[str, Any], scenario: Make
) -> None:
    update = {"minibatch_samples": MINIBATCH, "microbatch_tokens": 80, "recompute": "full"}
    assert_same(plain["actor"], fleets[1].run(learn, scenario_of(scenario, update=update), "actor")[0])


@pytest.mark.parametrize(("role", "lora"), [
    ("actor", None), ("critic", LORA), *(pytest.param(*one, marks=pytest.mark.full) for one in (("actor", LORA), ("critic", None))),
])  # fmt: skip
@pytest.mark.parametrize(("ranks", "stage"), some((1, 0), (2, 1)))
def test_a_restored_trainer_goes_on_bit_for_bit_and_weights_alone_do_not(
    fleets: dict[int, Ranks], scenario: Make, ranks: int, stage: int, role: str, lora: Any
) -> None:
    for straight, resumed, by_weights in fleets[ranks].run(
        interrupted, scenario_of(scenario, ranks, stage, role, lora), role
    ):
        assert straight[0] == resumed[0]
        assert all(np.array_equal(straight[1][name], resumed[1][name]) for name in straight[1])
        assert not all(np.array_equal(straight[1][name], by_weights[1][name]) for name in straight[1])


def refused(rank: int, world: int, chosen: Scenario) -> list[str]:
    """What a restore says of states that are not this rank's."""
    learner = trainer_of(rank, world, chosen, "actor").learner
    learner_state = trainer_of(rank, world, chosen, "actor")
    learner_state.update(0, samples(0))
    weights, (tensors, numbers) = learner.weights(), learner_state.learner.state()
    lost = {name: tensor for name, tensor in tensors.items() if name != "optimizer.3.exp_avg"}
    wrong = tensors | {"optimizer.0.exp_avg": tensors["optimizer.0.exp_avg"][:1]}
    few = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    found = []
    for given in (
        (weights, tensors, numbers | {"world": 3}), (weights, tensors, numbers | {"zero_stage": 2}),
        (weights, tensors, numbers | {"role": "critic"}), (few, tensors, numbers), (weights, lost, numbers),
        (weights, wrong, numbers),
    ):  # fmt: skip
        try:
            learner.restore(*given)
            found.append("restored")
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_state_of_another_trainer_is_refused_by_name(fleets: dict[int, Ranks], scenario: Make) -> None:
    (told,) = fleets[1].run(refused, scenario_of(scenario))
    expected = ("world 3", "zero_stage 2", "role critic", "lm_head.weight", "missing", "shape")
    assert all(part in message for part, message in zip(expected, told, strict=True)), told


def started(rank: int, world: int, chosen: Scenario) -> None:
    trainer_of(rank, world, chosen, "actor")


def test_a_port_that_is_taken_is_named(scenario: Make) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with Ranks(1, port) as ranks, pytest.raises(RuntimeError, match=f"{port}: another program has taken the port"):
            ranks.run(started, scenario_of(scenario))
