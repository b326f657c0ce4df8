"""Low-rank adapters (LoRA, Hu et al. 2021): every weight matrix W gets a trained product B·A beside it; W is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from lab.algorithm import LEARNING
from lab.model import ModelSpec
from lab.records import Record


class Lora(Record):
    """Adapters on the matrices of attention and MLP of every layer; embeddings, heads and routed experts have none."""

    rank: int = Field(ge=1, le=4096, description="columns of A and rows of B")
    alpha: float = Field(
        default=16.0, gt=0, description="the product is scaled by alpha / rank", json_schema_extra=LEARNING
    )

    def parameters(self, spec: ModelSpec) -> int:
        """Parameters of all adapters: rank × (inputs + outputs) of each matrix."""
        mlp = self._mlp(spec, spec.intermediate) * (spec.layers - spec.moe_layers)
        if spec.moe is not None and spec.moe.shared_intermediate:
            mlp += self._mlp(spec, spec.moe.shared_intermediate) * spec.moe_layers
        return self.rank * (self._attention(spec) * spec.layers + mlp)

    def adapted(self, spec: ModelSpec, quantities: Mapping[str, Any], products: float = 0.0) -> dict[str, Any]:
        """The quantities of a pass over frozen matrices with these adapters, from those of one without.

        `products`: of a backward pass over those of its forward pass, all weights trained, one part of which, the
        gradients of frozen weights, is left out; 0: a forward pass. `adapter_values` are what adapters read and write
        beside the matrices: tokens × (inputs + outputs) of each.
        """
        kept = (products - 1.0) / products if products else 1.0
        share = self.parameters(spec) / spec.active_matrix_parameters
        return dict(quantities) | {
            "linear_flops": quantities["linear_flops"] * (kept + share),
            "adapter_values": quantities["tokens"] * (self.parameters(spec) / self.rank),
        }

    def _mlp(self, spec: ModelSpec, intermediate: int) -> int:
        return (3 if spec.gated else 2) * (spec.hidden + intermediate)

    def _attention(self, spec: ModelSpec) -> int:
        """Inputs and outputs of all attention matrices of one layer."""
        if spec.mla is None:
            return 4 * spec.hidden + (2 * spec.heads + 2 * spec.kv_heads) * spec.head_dim
        mla, queries = spec.mla, spec.heads * spec.mla.qk_head_dim
        low = spec.hidden + 2 * mla.q_lora_rank + queries if mla.q_lora_rank else spec.hidden + queries
        values = spec.heads * mla.v_head_dim
        latent = spec.hidden + mla.cached + mla.kv_lora_rank + spec.heads * mla.qk_nope_head_dim + values
        return low + latent + values + spec.hidden
