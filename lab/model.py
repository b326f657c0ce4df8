"""The shape of a network: its parameters, FLOPs and bytes. It knows nothing of time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.records import Record

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
DTYPE_BYTES: dict[str, float] = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}


class Mla(Record):
    """Multi-head latent attention: keys and values are kept as one low-rank vector per token (DeepSeek-V2, §2.1)."""

    q_lora_rank: int | None = Field(default=None, ge=1, description="null: queries come straight from the hidden state")
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=1)
    v_head_dim: int = Field(ge=1)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached(self) -> int:
        """Values that one token leaves in the cache of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class Moe(Record):
    """Routed experts in place of the MLP."""

    num_experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    intermediate: int = Field(ge=1, description="of one routed expert")
    shared_intermediate: int = Field(default=0, ge=0, description="of the experts that every token passes; 0: none")
    shared_gate: bool = Field(default=False, description="the shared expert has a scalar gate (Qwen2-MoE)")
    router_bias: bool = Field(default=False, description="one bias per expert in the router (DeepSeek-V3)")
    dense_layers: int = Field(default=0, ge=0, description="layers (the first) that keep the MLP of the model")

    @model_validator(mode="after")
    def _enough(self) -> Moe:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) is above num_experts ({self.num_experts})")
        return self


class ModelSpec(Record):
    """A decoder-only transformer: dense or MoE; multi-head, grouped-query or latent attention.

    Counts follow the usual accounting: a matrix product of an m×k by a k×n matrix costs 2mkn FLOPs
    (Kaplan et al. 2020, appendix B; Narayanan et al. 2021, appendix).
    """

    hidden: int = Field(ge=1)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate: int = Field(ge=1, description="of the MLP of a dense layer")
    vocabulary: int = Field(ge=2)
    tied_embeddings: bool = False
    gated: bool = Field(default=True, description="three MLP matrices (SwiGLU, GeGLU); false: two")
    qkv_bias: bool = False
    output_bias: bool = Field(default=False, description="of the attention's output matrix")
    mlp_bias: bool = Field(default=False, description="of the MLP's or the experts' matrices, and of the router")
    norm_bias: bool = Field(default=False, description="norms with scale and bias (LayerNorm)")
    norms_per_layer: int = Field(default=2, ge=1, description="of width hidden; Gemma 2 and 3 have four")
    qk_norm: bool = Field(default=False, description="norms of width head_dim on queries and on keys (Qwen3)")
    attention_sinks: bool = Field(default=False, description="one learned logit per head (gpt-oss)")
    learned_positions: int = Field(default=0, ge=0, description="rows of a learned position table; 0: none (rotary)")
    mla: Mla | None = Field(default=None, description="latent attention; kv_heads and head_dim then do not count")
    moe: Moe | None = None
    sliding_window: int | None = Field(default=None, ge=1, description="tokens that a windowed layer attends to")
    window_layers: int = Field(default=0, ge=0, description="how many of the layers attend only within the window")
    source: str = ""

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})")
        if self.window_layers > self.layers:
            raise ValueError(f"window_layers ({self.window_layers}) is above layers ({self.layers})")
        if self.window_layers and self.sliding_window is None:
            raise ValueError("window_layers needs sliding_window")
        if self.moe is not None and self.moe.dense_layers > self.layers:
            raise ValueError(f"moe.dense_layers ({self.moe.dense_layers}) is above layers ({self.layers})")
        return self

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def attention_matrix_parameters(self) -> int:
        """Parameters of the attention matrices of one layer: q, k, v, o; or the down- and up-projections of MLA."""
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mla, queries = self.mla, self.heads * self.mla.qk_head_dim
        down = self.hidden * mla.q_lora_rank + mla.q_lora_rank * queries if mla.q_lora_rank else self.hidden * queries
        latent = self.hidden * mla.cached + mla.kv_lora_rank * self.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return down + latent + self.heads * mla.v_head_dim * self.hidden

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of the matrices of one dense layer: attention, and gate, up and down (or two without a gate)."""
        return self.attention_matrix_parameters + self._mlp(self.intermediate)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts' matrices in all layers; the shared experts are not among them."""
        return self.moe_layers * self.moe.num_experts * self._mlp(self.moe.intermediate) if self.moe else 0

    @property
    def active_matrix_parameters(self) -> int:
        """Parameters of all layers' matrices that one token is multiplied with; the LM head is not among them."""
        dense = (self.layers - self.moe_layers) * self.layer_matrix_parameters
        return dense + self.moe_layers * self._sparse(self.moe.experts_per_token if self.moe else 0)

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all layers' matrices, every expert included."""
        dense = (self.layers - self.moe_layers) * self.layer_matrix_parameters
        return dense + self.moe_layers * self._sparse(self.moe.num_experts if self.moe else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token table, the LM head where it is not tied, and the position table."""
        tables = self.vocabulary * (1 if self.tied_embeddings else 2) + self.learned_positions
        return tables * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, embeddings, norms and biases included."""
        return self.matrix_parameters + self.embedding_parameters + self._norms() + self._biases(active=False)

    @property
    def active_parameters(self) -> int:
        """Parameters without the routed experts that a token does not pass; embeddings included."""
        return self.active_matrix_parameters + self.embedding_parameters + self._norms() + self._biases(active=True)

    def linear_flops(self, tokens: float, *, head_tokens: float | None = None) -> float:
        """FLOPs of all matrix products with weights, `tokens` through the layers, `head_tokens` through the LM head.

        Of the routed experts only those that a token passes are counted.
        """
        head = tokens if head_tokens is None else head_tokens
        return 2.0 * (self.active_matrix_parameters * tokens + self.vocabulary * self.hidden * head)

    def attention_flops(self, token_context: float, *, windowed: float | None = None, absorbed: bool = False) -> float:
        """FLOPs of QK^T and AV, where `token_context` is the sum over tokens of the context each attends to.

        `windowed` is the same sum with each context cut at the sliding window; None: no context exceeds it.
        `absorbed`: MLA as engines decode, on the latent vectors themselves; it changes nothing without MLA.
        """
        inside = token_context if windowed is None else windowed
        contexts = (self.layers - self.window_layers) * token_context + self.window_layers * inside
        return 2.0 * self.heads * self._pair_width(absorbed) * contexts

    def causal_attention_flops(self, tokens: float, *, before: float = 0) -> float:
        """FLOPs of QK^T and AV of one causal pass of `tokens` new tokens after `before` earlier ones, window applied."""
        windowed = attended(tokens, before=before, window=self.sliding_window)
        return self.attention_flops(attended(tokens, before=before), windowed=windowed)

    def weight_bytes(self, dtype: str) -> float:
        return self.parameters * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> float:
        """Bytes of keys and values that one token leaves in the cache of all layers."""
        return self.layers * self._cached() * DTYPE_BYTES[dtype]

    def kv_bytes(self, context: float, dtype: str) -> float:
        """Bytes of keys and values of a sequence of `context` tokens where windowed layers drop what they cannot see."""
        window = context if self.sliding_window is None else min(context, self.sliding_window)
        kept = (self.layers - self.window_layers) * context + self.window_layers * window
        return kept * self._cached() * DTYPE_BYTES[dtype]

    def _cached(self) -> int:
        """Values that one token leaves in the cache of one layer."""
        return 2 * self.kv_heads * self.head_dim if self.mla is None else self.mla.cached

    def _pair_width(self, absorbed: bool) -> int:
        """Width of a key plus width of a value, of one head."""
        if self.mla is None:
            return 2 * self.head_dim
        return (self.mla.cached + self.mla.kv_lora_rank) if absorbed else self.mla.qk_head_dim + self.mla.v_head_dim

    def _mlp(self, intermediate: int) -> int:
        """Parameters of the matrices of one MLP or expert."""
        return (3 if self.gated else 2) * self.hidden * intermediate

    def _sparse(self, num_experts: int) -> int:
        """Parameters of the matrices of one MoE layer, `num_experts` of its routed experts counted."""
        if self.moe is None:
            return 0
        shared = self._mlp(self.moe.shared_intermediate) + self.hidden * self.moe.shared_gate
        router = self.hidden * self.moe.num_experts
        return self.attention_matrix_parameters + router + shared + num_experts * self._mlp(self.moe.intermediate)

    def _norms(self) -> int:
        """Parameters of all norms, biases of LayerNorms included, and of the attention sinks."""
        wide = self.hidden * (self.norms_per_layer * self.layers + 1) * (2 if self.norm_bias else 1)
        narrow = 2 * self.head_dim * self.qk_norm + self.heads * self.attention_sinks
        if self.mla is not None:
            narrow += self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0)
        return wide + self.layers * narrow

    def _biases(self, *, active: bool) -> int:
        """Biases of the matrices; of the experts' only those that a token passes where `active`."""
        attention = self.head_dim * (self.heads + 2 * self.kv_heads) * self.qkv_bias + self.hidden * self.output_bias
        dense = (self.layers - self.moe_layers) * self._mlp_biases(self.intermediate)
        sparse = 0
        if self.moe is not None:
            experts = self.moe.experts_per_token if active else self.moe.num_experts
            router = self.moe.num_experts * (self.moe.router_bias or self.mlp_bias)
            sparse = self.moe_layers * (router + experts * self._mlp_biases(self.moe.intermediate))
        return self.layers * attention + dense + sparse

    def _mlp_biases(self, intermediate: int) -> int:
        return ((2 if self.gated else 1) * intermediate + self.hidden) * self.mlp_bias


def attended(tokens: float, *, before: float = 0, window: float | None = None) -> float:
    """Pairs of (token, token that it attends to, itself included) in a causal pass of `tokens` after `before` others.

    With a window every token attends to at most `window` tokens: the sum of min(i, window), i = before + 1 … before +
    tokens. Closed form of an arithmetic series.
    """
    whole = tokens * before + tokens * (tokens + 1) / 2
    if window is None or before + tokens <= window:
        return whole
    beyond = min(tokens, before + tokens - window)  # tokens whose context is cut
    below = tokens - beyond
    return below * before + below * (below + 1) / 2 + beyond * window
