"""The shape of a network: its parameters, FLOPs and bytes. It knows nothing of time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.records import Record

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
DTYPE_BYTES: dict[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}


class ModelSpec(Record):
    """A decoder-only transformer with grouped-query attention and a gated MLP (the Llama family).

    Counts follow the usual accounting: a matrix product of an m×k by a k×n matrix costs 2mkn FLOPs
    (Kaplan et al. 2020, appendix B; Narayanan et al. 2021, appendix).
    """

    hidden: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    vocabulary: int = Field(ge=2)
    tied_embeddings: bool = False
    qkv_bias: bool = False
    source: str = ""

    @model_validator(mode="after")
    def _divisible(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        return self

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of the matrices of one layer: q, k, v, o, gate, up, down."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters, embeddings, norms and biases included."""
        norms = self.hidden * (2 * self.layers + 1)
        biases = self.layers * self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_matrix_parameters + norms + biases + embeddings

    def linear_flops(self, tokens: float, *, head_tokens: float | None = None) -> float:
        """FLOPs of all matrix products with weights, `tokens` through the layers, `head_tokens` through the LM head."""
        head = tokens if head_tokens is None else head_tokens
        return 2.0 * (self.layers * self.layer_matrix_parameters * tokens + self.vocabulary * self.hidden * head)

    def attention_flops(self, token_context: float) -> float:
        """FLOPs of QK^T and AV, where `token_context` is the sum over tokens of the context each attends to."""
        return 4.0 * self.layers * self.heads * self.head_dim * token_context

    def weight_bytes(self, dtype: str) -> float:
        return self.parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> float:
        """Bytes of keys and values that one token leaves in the cache."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]
