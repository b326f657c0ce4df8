"""The networks that run for real: a Llama-shaped actor and a critic on the same trunk, built from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from executor.attention import Rows
from executor.inputs import MAX_POSITIONS, VALUE_HEAD
from executor.tokenizer import BOS, EOS, IDS, PAD, save_tokenizer
from lab.model import ModelSpec


class Critic(nn.Module):
    """A decoder trunk with a scalar head: one value per token."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = nn.Linear(trunk.config.hidden_size, 1, bias=False)

    @property
    def config(self) -> PretrainedConfig:
        return self.trunk.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Values [B, T] of right-padded token ids [B, T] with their mask [B, T]."""
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.value_head(hidden).squeeze(-1)


class Outputs(nn.Module):
    """What a trainer reads of a network, and only where it reads it: logits of an actor, values of a critic.

    Long prompts cost no projection to the vocabulary this way.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.direct = isinstance(network, (Critic, LlamaForCausalLM, Qwen2ForCausalLM))

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None, places: torch.Tensor, rows: Rows | None = None
    ) -> torch.Tensor:
        """[places, vocabulary] or [places, 1] of token ids [B, T] padded on the right, or laid end to end in `rows`.

        Padding on the right is never attended to by what comes before it, so no mask is needed.
        """
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        if rows is not None:
            given["rows"] = rows
        if not self.direct:
            logits: torch.Tensor = self.network(**given).logits
            return logits.flatten(0, 1)[places]
        critic = isinstance(self.network, Critic)
        trunk, head = (
            (self.network.trunk, self.network.value_head) if critic else (self.network.model, self.network.lm_head)
        )
        found: torch.Tensor = head(trunk(**given).last_hidden_state.flatten(0, 1)[places])
        return found


def configuration(spec: ModelSpec) -> PretrainedConfig:
    """The Hugging Face configuration of a shape: Llama, or Qwen2 where q, k and v have biases."""
    kind = Qwen2Config if spec.qkv_bias else LlamaConfig
    return kind(
        hidden_size=spec.hidden, num_hidden_layers=spec.layers, num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim, intermediate_size=spec.intermediate,
        vocab_size=spec.vocabulary, tie_word_embeddings=spec.tied_embeddings, max_position_embeddings=MAX_POSITIONS,
        initializer_range=spec.hidden**-0.5 if spec.hidden < 1024 else 0.02,
        pad_token_id=IDS[PAD], bos_token_id=IDS[BOS], eos_token_id=IDS[EOS],
    )  # fmt: skip


def build_actor(spec: ModelSpec, seed: int, weights: str = "random") -> LlamaForCausalLM:
    """The policy network in float32: from the seed, or from a folder with safetensors and config.

    Matrices are drawn with standard deviation hidden^-1/2 in small networks, which learn several times faster from it
    than from the usual 0.02, and with 0.02 from width 1024 on. The same seed gives the same weights.
    Raises ValueError where the folder holds a network of another shape, not all of one, or none that can be built.
    """
    if weights != "random":
        return _loaded(spec, weights)
    config = configuration(spec)
    network = Qwen2ForCausalLM if spec.qkv_bias else LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network(config).float()


def build_critic(spec: ModelSpec, seed: int, weights: str = "random", *, head_std: float = 0.0) -> Critic:
    """A value network: the actor's trunk of the same seed (or folder) and a value head, at zero unless `head_std`.

    `forward(input_ids, attention_mask)` gives values [B, T]. At a zero head the first advantages are the rewards'; a
    reward model that is not trained needs another one to tell samples apart.
    """
    critic = Critic(build_actor(spec, seed, weights).model)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(critic.value_head.weight, std=head_std * spec.hidden**-0.5, generator=generator)
    if weights != "random" and (Path(weights) / VALUE_HEAD).exists():
        critic.value_head.load_state_dict(load_file(str(Path(weights) / VALUE_HEAD)))
    return critic


def save(model: nn.Module, folder: Path | str) -> None:
    """Writes safetensors, config and tokenizer (and the value head of a critic) for `weights: FOLDER` and vLLM."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Critic):
        save_file(model.value_head.state_dict(), str(folder / VALUE_HEAD))
        _causal(model.trunk).save_pretrained(folder)
    else:
        model.save_pretrained(folder)  # type: ignore[operator]
    save_tokenizer(folder)


def _causal(trunk: PreTrainedModel) -> PreTrainedModel:
    """The trunk under a fresh LM head, so that a critic's folder has the same layout as an actor's."""
    model = AutoModelForCausalLM.from_config(trunk.config)
    model.model = trunk
    return model


def _loaded(spec: ModelSpec, folder: str) -> LlamaForCausalLM:
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attention_dropout=0.0, output_loading_info=True
        )
    except Exception as error:  # of many kinds: what a config.json says is checked as it is used
        raise ValueError(f"the network in {folder} cannot be built: {type(error).__name__}: {error}") from error
    missing = sorted(set(told["missing_keys"]) - {"lm_head.weight"})  # a critic's folder has none, and needs none
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}, which would be drawn at random")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != spec.parameters:
        raise ValueError(f"{folder} holds {count} parameters, the architecture has {spec.parameters}")
    return model
