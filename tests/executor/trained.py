"""A network that plays the learner's part where weights are published: it changes at random."""

from dataclasses import dataclass
from typing import Any

import torch

from executor.lora import scale


@dataclass
class Trained:
    """The network that plays the learner's part."""

    network: Any
    lora: Any = None
    zero_stage: int = 0

    def weights(self) -> dict[str, torch.Tensor]:
        named = self.network.named_parameters()
        return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}

    def base(self) -> tuple[dict[str, torch.Tensor], float]:
        named = {name.replace(".base_layer.", "."): p.detach() for name, p in self.network.named_parameters()}
        return {name: tensor.clone() for name, tensor in named.items() if "lora_" not in name}, scale(self.lora)

    def change(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.network.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.05)
