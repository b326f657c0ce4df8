from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.network import build_actor, build_critic, save
from lab.library import model
from lab.model import ModelSpec

TINY = model("tiny-llama")
SHAPES = {
    "tiny-llama": TINY,
    "small-llama": model("small-llama"),
    "tied": TINY.model_copy(update={"tied_embeddings": True}),
    "biased": TINY.model_copy(update={"qkv_bias": True}),
    "no grouped heads": TINY.model_copy(update={"kv_heads": 4}),
    "wide heads": TINY.model_copy(update={"head_dim": 64, "heads": 2}),
}


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)
def test_the_network_has_the_parameters_that_the_spec_counts(spec: ModelSpec) -> None:
    assert sum(parameter.numel() for parameter in build_actor(spec, 0).parameters()) == spec.parameters


def test_the_seed_decides_the_weights_and_nothing_else_does() -> None:
    one = build_actor(TINY, 5)
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    assert equal(one, build_actor(TINY, 5))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not equal(one, build_actor(TINY, 6))


def test_a_saved_actor_is_read_back(tmp_path: Path) -> None:
    actor = build_actor(TINY, 1)
    save(actor, tmp_path)
    assert equal(actor, build_actor(TINY, 2, str(tmp_path)))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}


def test_a_saved_critic_is_read_back(tmp_path: Path) -> None:
    critic = build_critic(TINY, 1, head_std=1.0)
    save(critic, tmp_path)
    assert equal(critic, build_critic(TINY, 2, str(tmp_path)))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save(build_actor(TINY, 1), tmp_path)
    with pytest.raises(ValueError, match="parameters"):
        build_actor(SHAPES["small-llama"], 1, str(tmp_path))


def test_weights_of_other_names_are_refused(tmp_path: Path) -> None:
    """Parameters that a folder does not have would be drawn at random, and nobody would notice."""
    spec = model("tiny-llama")
    save(build_actor(spec, 0), tmp_path)
    file, weights = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if name != "lm_head.weight"}, file, metadata={"format": "pt"})
    build_critic(spec, 1, str(tmp_path))
    renamed = {name.replace("up_proj", "upward"): tensor for name, tensor in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.mlp\.up_proj\.weight"):
        build_actor(spec, 1, str(tmp_path))


def test_a_critic_starts_on_the_actor_s_trunk_with_values_of_zero() -> None:
    actor, critic = build_actor(TINY, 3), build_critic(TINY, 3)
    assert equal(actor.model, critic.trunk)
    values = critic(tokens(), torch.ones(2, 9, dtype=torch.int64))
    assert values.shape == (2, 9)
    assert not values.any()


def test_padding_changes_neither_values_nor_logits() -> None:
    critic, actor, ids = build_critic(TINY, 3, head_std=1.0), build_actor(TINY, 3), tokens()
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.int64)], dim=1)
    mask = (torch.arange(13) < 9).long().expand(2, -1)
    alone, beside = critic(ids, torch.ones_like(ids)), critic(padded, mask)[:, :9]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=0)
    logits = actor(input_ids=padded, attention_mask=mask).logits[:, :9]
    torch.testing.assert_close(actor(input_ids=ids).logits, logits, atol=1e-5, rtol=0)


def test_values_do_not_look_ahead() -> None:
    critic, ids = build_critic(TINY, 3, head_std=1.0), tokens()
    changed = ids.clone()
    changed[:, -1] = 5
    mask = torch.ones_like(ids)
    torch.testing.assert_close(critic(ids, mask)[:, :-1], critic(changed, mask)[:, :-1], atol=1e-6, rtol=0)
