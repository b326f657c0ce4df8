"""Adapters (LoRA) through PEFT: putting them into a network, merging them into matrices, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from lab.lora import Lora

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""every matrix of attention and MLP; embeddings and heads have no adapters"""
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
_BASE = ".base_layer."


def add_adapters(network: nn.Module, lora: Lora, seed: int) -> None:
    """Freezes the network but for a value head, and puts new adapters beside its matrices: A drawn from the seed, B zero."""
    from peft import LoraConfig, inject_adapter_in_model  # engines merge without it

    config = LoraConfig(
        r=lora.rank, lora_alpha=cast(int, lora.alpha), target_modules=TARGETS, lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)) or name.startswith("value_head."))


def scale(lora: Lora) -> float:
    """By which the product B · A is multiplied."""
    return lora.alpha / lora.rank


def plain(name: str) -> str:
    """The name that a parameter has in a network without adapters."""
    return name.replace(_BASE, ".")


def merged(base: Mapping[str, Tensor], trained: Mapping[str, Tensor], factor: float) -> Iterator[tuple[str, Tensor]]:
    """What changes in a network of these `base` weights (by Hugging Face's names) where adapters were trained.

    Every matrix with an adapter becomes W + factor · B · A; a head that was trained as a whole is itself.
    """
    for name, tensor in trained.items():
        if name.endswith(_A):
            module = name.removesuffix(_A)
            yield f"{module}.weight", torch.addmm(base[f"{module}.weight"], trained[module + _B], tensor, alpha=factor)
        elif not name.endswith(_B):
            yield name, tensor


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((_A, _B))


def matrices(names: Iterable[str]) -> Iterator[str]:
    """The names of the matrices that have adapters of these names."""
    return (f"{name.removesuffix(_A)}.weight" for name in names if name.endswith(_A))
