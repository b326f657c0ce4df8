"""What a trainer holds on one device: states as ZeRO or FSDP divides them, and what each instant of a step adds.

States follow Rajbhandari et al. 2020 (ZeRO: 2 + 2 + 12 bytes per parameter with Adam in mixed precision; stage 1
divides the optimizer's states, 2 the gradients too, 3 the weights too), activations Korthikanti et al. 2022. The same
function serves a scenario's trainers and the published cases of `lab validate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.model import ModelSpec
from profiles.footprint import (
    FRAGMENTATION,
    Footprint,
    device_parameters,
    fragmented,
    head_parameters,
    layer_parameters,
    overhead,
    size_of,
)
from profiles.footprint_layers import Recompute, Widths, every_layer, input_width, widths
from profiles.footprint_serving import weight_bytes, wide

BUCKET_NUMBERS = 5e8
"""reduce_bucket_size and allgather_bucket_size, DeepSpeed's defaults (configuration reference, ZeRO)."""
LIVE_NUMBERS = 1e9
"""stage3_max_live_parameters, DeepSpeed's default: parameters gathered at once under stage 3."""
MOMENTS_BYTES = 8.0
"""Adam's two moments in fp32, per trained parameter."""
HOST_STATE_BYTES = 16.0
"""In host memory per offloaded parameter: fp32 master, both moments and the fp32 gradient (DeepSpeed's memory estimator
for ZeRO-2 with offload, without the factor 1.5 that it proposes for buffers)."""
LOGITS_FP32_COPIES = 4
"""fp32 arrays of logits at once with an unfused loss: the logits, their log-softmax, and both gradients."""
FOREACH_BYTES = 4.0
"""Temporaries of torch's foreach AdamW per parameter (the square root of the second moment), in fp32."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One rank of a trainer.

    Attributes:
        dtype: of computation, and of weights gathered from other ranks.
        stored: dtype in which weights persist on the device; None: `dtype`.
        masters: whether an fp32 copy lies beside them for the optimizer (DeepSpeed, unless `stored` is fp32).
        gradients: dtype in which gradients persist; None: that of `stored`.
        reduce: dtype in which gradients travel between ranks.
        data: ranks over which ZeRO divides; tensor, pipeline, expert, context: the other parallelisms.
        offload: `optimizer`: masters and moments in host memory; `all`: weights too.
        adapter: parameters of one LoRA adapter, before any division; None: every parameter is trained. `adapters` of
            them are loaded, one is trained.
        tokens: of one micro-batch on one rank.
        scores: tokens of a sequence where attention keeps its softmax; 0: blockwise attention.
        outputs: numbers per token that the head gives; None: the vocabulary, 1: a value.
        logit_columns: columns of the vocabulary that a fused loss holds at once; None: all of them.
        logit_bytes: bytes per logit at once; None: that of an unfused loss.
        gathered: parameters gathered at once under stage 3; None: two layers and the head, as FSDP does.
        buckets: whether gradients are reduced in DeepSpeed's buckets rather than layer by layer.
        fragmentation: what the allocator holds beside what comes and goes, as a share.
        device_kind: a CPU has no context and no NCCL.
    """

    spec: ModelSpec
    tokens: float
    dtype: str = "bfloat16"
    stored: str | None = None
    masters: bool = True
    gradients: str | None = None
    reduce: str = "float32"
    moments_bytes: float = MOMENTS_BYTES
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: Literal["none", "optimizer", "all"] = "none"
    recompute: Recompute = "none"
    offload_activations: bool = False
    adapter: float | None = None
    adapters: int = 1
    scores: int = 0
    outputs: int | None = None
    logit_columns: int | None = None
    logit_bytes: float | None = None
    gathered: float | None = None
    buckets: bool = False
    fragmentation: float = FRAGMENTATION
    device_kind: str = "gpu"

    @property
    def persistent(self) -> str:
        return self.stored or self.dtype

    @property
    def parameters(self) -> float:
        """On this device, before ZeRO divides them."""
        return device_parameters(self.spec, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)

    @property
    def trained(self) -> float:
        """Parameters with gradients and optimizer states on this device, before ZeRO divides them."""
        return self.parameters if self.adapter is None else self.adapter / (self.tensor * self.pipeline)

    @property
    def sends_gradients(self) -> bool:
        """Whether gradients leave the device bucket by bucket, as ZeRO-Offload does from stage 2 on (Ren et al. 2021)."""
        return self.offload != "none" and self.zero_stage >= 2

    @property
    def host_bytes(self) -> float:
        """What one rank's offloaded states take in the memory of its host."""
        if self.offload == "none":
            return 0.0
        weights = self.left(3, trained=False) * size_of(self.persistent) if self.offload == "all" else 0.0
        return weights + self.left(1, trained=True) * HOST_STATE_BYTES

    @property
    def ranks(self) -> int:
        """Over which ZeRO divides: context-parallel ranks hold the same weights too."""
        return self.data * self.context

    def left(self, stage: int, *, trained: bool) -> float:
        """Numbers that remain here of a state which ZeRO divides from `stage` on.

        Experts that are already spread over some of the ranks are divided over the others only.
        """
        share = 1.0 / self.ranks if self.zero_stage >= stage else 1.0
        if trained and self.adapter is not None:
            return self.trained * share
        experts = self.spec.expert_parameters / (self.tensor * self.pipeline * self.expert)
        return (self.parameters - experts) * share + experts * min(1.0, share * self.expert)


def footprint(training: Training) -> Footprint:
    """Bytes on one device: states as long as the trainer is loaded, and the instants of a step.

    The instants: `logits` (the loss), `layer` (backward through one layer), `optimizer` (the step itself).
    """
    t = training
    instants = {"logits": _logits(t), "layer": _layer(t), "optimizer": _step(t)}
    return Footprint(
        resident=_states(t) | overhead(t.device_kind, 1 if t.ranks * t.tensor * t.pipeline > 1 else 0),
        instants={name: fragmented(found, t.fragmentation) for name, found in instants.items()},
    )


def _states(t: Training) -> dict[str, float]:
    stored = size_of(t.persistent)
    quantised = weight_bytes(t.spec, t.persistent) / (t.spec.parameters * stored)  # embeddings stay wide
    found = {"weights": 0.0 if t.offload == "all" else t.left(3, trained=False) * stored * quantised}
    if t.adapter is not None:
        found["adapters"] = t.adapters * t.left(3, trained=True) * size_of(wide(t.persistent))
    found["gradients"] = (
        0.0 if t.sends_gradients else t.left(2, trained=True) * size_of(t.gradients or wide(t.persistent))
    )
    here = 0.0 if t.offload in ("optimizer", "all") else t.left(1, trained=True)
    found["optimizer states"] = here * t.moments_bytes
    found["fp32 masters"] = here * 4.0 if t.masters and t.persistent != "float32" else 0.0
    if t.buckets and ((t.ranks > 1 and t.zero_stage < 3) or t.sends_gradients):
        found["communication buckets"] = 2 * min(t.trained, BUCKET_NUMBERS) * size_of(t.dtype)
    return found


def _gathers(t: Training) -> bool:
    """Whether weights are brought together, or into another dtype, layer by layer."""
    return t.offload == "all" or (t.zero_stage == 3 and (t.ranks > 1 or t.persistent != t.dtype))


def _gathered(t: Training, layers: int) -> float:
    if not _gathers(t):
        return 0.0
    whole = layers * layer_parameters(t.spec) / (t.tensor * t.expert) + head_parameters(t.spec) / t.tensor
    return min(whole if t.gathered is None else t.gathered, t.parameters) * size_of(t.dtype)


def _bytes(t: Training, width: Widths, *, grads: bool) -> float:
    """Per token, of the saved activations of a layer, or of what its backward pass adds."""
    size = size_of(t.dtype)
    if grads:
        return width.grads * size + width.grads_fp32 * 4.0
    kept = width.light if t.recompute == "selective" else width.kept
    return kept * size + width.kept_fp32 * 4.0


def _tokens(t: Training) -> float:
    return t.tokens / t.context


def _kept(t: Training) -> float:
    """Activations kept from the forward pass through all layers of this device (1F1B keeps a pipeline full)."""
    if t.offload_activations and t.recompute == "full":
        return _tokens(t) * input_width(t.spec) * size_of(t.dtype)
    if t.recompute == "full":
        each = input_width(t.spec) * size_of(t.dtype) * t.spec.layers
    else:
        each = sum(n * _bytes(t, w, grads=False) for n, w in every_layer(t.spec, tensor=t.tensor, scores=t.scores))
    return _tokens(t) * each


def _ends(t: Training) -> float:
    """The last layer's output, its norm, and the gradient of both."""
    return _tokens(t) * 4 * t.spec.hidden * size_of(t.dtype)


def _logits(t: Training) -> dict[str, float]:
    outputs = t.spec.vocabulary if t.outputs is None else t.outputs
    columns = min(outputs, t.logit_columns or outputs) / t.tensor
    narrow = size_of(t.dtype) if size_of(t.dtype) < 4 else 0.0
    each = t.logit_bytes if t.logit_bytes is not None else 4.0 * LOGITS_FP32_COPIES + narrow
    found = {"activations": _kept(t) + _ends(t), "logits": _tokens(t) * columns * each}
    if t.logit_columns is not None:
        found["logits"] += _tokens(t) * t.spec.hidden * 4.0
    if _gathers(t):
        found["gathered weights"] = _gathered(t, 1)
        trains_head = t.adapter is None or t.logit_columns is not None
        found["gradient in flight"] = head_parameters(t.spec) / t.tensor * size_of(t.dtype) if trains_head else 0.0
    return found


def _layer(t: Training) -> dict[str, float]:
    width = widths(t.spec, tensor=t.tensor, scores=t.scores)
    again = 0.0 if t.recompute == "none" else _tokens(t) * (width.kept * size_of(t.dtype) + width.kept_fp32 * 4.0)
    if t.recompute == "selective":
        again = max(0.0, again - _tokens(t) * _bytes(t, width, grads=False))
    adapter = max(t.spec.hidden, t.spec.intermediate / t.tensor)
    if t.spec.moe is not None:
        adapter = max(adapter, t.spec.moe.experts_per_token * t.spec.hidden)
    found = {
        "activations": _kept(t) + _ends(t),
        "layer recomputed": again,
        "layer gradients": _tokens(t) * _bytes(t, width, grads=True),
        "adapter output": _tokens(t) * adapter * size_of(t.dtype) if t.adapter is not None else 0.0,
        "gathered weights": _gathered(t, 2),
    }
    if _gathers(t) and t.adapter is None:
        layer = layer_parameters(t.spec) / (t.tensor * t.expert)
        tied = head_parameters(t.spec) / t.tensor if t.spec.tied_embeddings else 0.0
        found["gradient in flight"] = layer * (size_of(t.dtype) + size_of(t.reduce)) + tied * size_of(t.dtype)
    return found


def _step(t: Training) -> dict[str, float]:
    here = 0.0 if t.offload in ("optimizer", "all") else t.left(1, trained=True)
    return {"optimizer temporaries": here * FOREACH_BYTES}
