"""A rank's part of a checkpoint is read back bit for bit, and its folder loads as `models.X.weights`."""

from pathlib import Path

import pytest
import torch

from executor import shard
from executor.checkpoint import PART, Damaged, Rank, verify_part
from executor.network import build_actor, build_critic
from executor.saving import _describer
from executor.shard import ADAPTERS, HEAD, NUMBERS, TENSORS, WEIGHTS, Shard
from lab.library import model

ABOUT = {"step": 7, "digest": "d", "attempt": 0, "start_s": 0.0}
ACTOR, CRITIC = Rank(role="actor", rank=0, world=2), Rank(role="critic", rank=0, world=1)


def weights_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(3, 5, generator=generator)
    shared = {"optimizer.0.exp_avg": moments, "optimizer.1.exp_avg": moments, "optimizer.2.exp_avg": moments[1:]}
    return shared | {"optimizer.0.step": torch.tensor(3.0), "torch_rng": generator.get_state()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_written_is_read_bit_for_bit_and_ranks_beyond_the_first_have_no_weights(tmp_path: Path) -> None:
    weights = weights_of(build_actor(model("tiny-llama"), 0))
    numbers = {"num_updates": 3, "rate": 0.1 + 0.2}
    for rank in (ACTOR, Rank(role="actor", rank=1, world=2)):
        whole = Shard(weights=weights if rank.rank == 0 else None, tensors=state(rank.rank), numbers=numbers)
        size = shard.write(tmp_path, rank, whole, ABOUT)
        own = tmp_path / rank.name
        assert {path.name for path in own.iterdir()} == {TENSORS, NUMBERS, PART} | (
            {WEIGHTS} if rank.rank == 0 else set()
        )
        assert (
            size
            == verify_part(tmp_path, rank)
            == sum(path.stat().st_size for path in own.iterdir() if path.name != PART)
        )
    for rank in (ACTOR, Rank(role="actor", rank=1, world=2)):
        found = shard.read(tmp_path, rank)
        assert found.weights is not None
        assert same(found.weights, weights)
        assert same(found.tensors, state(rank.rank))
        assert found.numbers == numbers


def test_a_second_write_of_a_part_replaces_the_first(tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / CRITIC.name / "left").mkdir(parents=True)
        shard.write(tmp_path, CRITIC, Shard(weights={}, tensors=state(seed), numbers={}), ABOUT)
        assert same(shard.read(tmp_path, CRITIC).tensors, state(seed))
        assert {path.name for path in (tmp_path / CRITIC.name).iterdir()} == {TENSORS, NUMBERS, PART}


@pytest.mark.parametrize("file", [WEIGHTS, TENSORS, NUMBERS])
def test_a_changed_file_is_named(tmp_path: Path, file: str) -> None:
    shard.write(tmp_path, ACTOR, Shard(weights={"w": torch.ones(4)}, tensors=state(0), numbers={"n": 1}), ABOUT)
    path = tmp_path / ACTOR.name / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match=file):
        verify_part(tmp_path, ACTOR)


def test_an_actors_and_a_critics_folder_load_as_weights(tmp_path: Path) -> None:
    """What supervised training or a reward model has learned is what the next run starts from."""
    spec = model("tiny-llama")
    actor, critic = build_actor(spec, 5), build_critic(spec, 6, head_std=1.0)
    for rank, network in ((ACTOR, actor), (CRITIC, critic)):
        whole = Shard(weights=weights_of(network), tensors={}, numbers={}, describe=_describer(network))
        shard.write(tmp_path, rank, whole, ABOUT)
        found = shard.read(tmp_path, rank).weights
        assert found is not None
        assert same(found, weights_of(network))
    assert (tmp_path / CRITIC.name / HEAD).exists()
    assert same(weights_of(build_actor(spec, 0, str(tmp_path / ACTOR.name))), weights_of(actor))
    assert same(weights_of(build_critic(spec, 0, str(tmp_path / CRITIC.name))), weights_of(critic))


def test_adapters_lie_in_a_file_of_their_own_under_their_own_names(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    weights = {name: torch.ones(2, 3), "value_head.weight": torch.zeros(1, 3)}
    shard.write(tmp_path, CRITIC, Shard(weights=weights, tensors={}, numbers={}), ABOUT)
    assert {path.name for path in (tmp_path / CRITIC.name).glob("*.safetensors")} == {ADAPTERS, TENSORS}
    found = shard.read(tmp_path, CRITIC).weights
    assert found is not None
    assert same(found, weights)


def test_a_copy_does_not_change_with_the_weights() -> None:
    weights = {"w": torch.zeros(3)}
    copy = Shard(weights=weights, tensors={}, numbers={}).copied()
    weights["w"] += 1
    assert copy.weights is not None
    assert copy.weights["w"].tolist() == [0, 0, 0]
