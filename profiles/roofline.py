"""The datasheet roofline: what an op costs where nothing was measured.

time = max(FLOPs / (peak × efficiency), bytes / (bandwidth × efficiency)) + overheads (Williams et al. 2009), and
collectives in closed form (`profiles.collectives`). Every constant here is an assumption with its source; a prediction
made with them is marked as extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lab.measurement import HEADLESS
from lab.model import DTYPE_BYTES
from profiles import collectives, moves
from profiles.layout import Layout

if TYPE_CHECKING:
    from lab.placement import Worker
    from lab.scenario import Scenario
    from profiles.iteration import EngineTable

TRAIN_EFFICIENCY = 0.45
"""share of peak FLOP/s in training and scoring: 38-43 % (Llama 3 report 2024, table 4), 44-52 % (Narayanan et al. 2021)"""
DECODE_EFFICIENCY = {"gpu": 0.65, "cpu": 0.6}
"""share of peak FLOP/s of the engine's matrix products at large batch. GPU: this, `ENGINE_MEMORY_EFFICIENCY` and
`ENGINE_LAYER_S` come nearest to the eight kernel profiles in the library, over 264 iterations of models of 0.5B to 7B:
median error 6 %, nine tenths within 19 %; CPU: between training MFU and bare GEMM efficiency"""
ENGINE_MEMORY_EFFICIENCY = {"gpu": 0.8, "cpu": 0.8}
"""share of peak memory bandwidth at which an engine reads weights, keys and values; CPU: as `MEMORY_EFFICIENCY`"""
ENGINE_LAYER_S = {"gpu": 3.0e-5, "cpu": 0.0}
"""a layer's small kernels and the launches of its large ones, whatever the batch; CPU: in `ENGINE_STEP_S`"""
ENGINE_PREFILL_LAYER_S = {"gpu": 1.45e-4, "cpu": 0.0}
"""host time of a layer in an iteration with prefill, which runs outside full CUDA graphs; see `profiles.engine_table`"""
MEMORY_EFFICIENCY = 0.8
"""share of peak memory bandwidth that streaming kernels reach (BabelStream on A100 and H100 reaches 0.8-0.9)"""
ENGINE_STEP_S = {"gpu": 5.4e-4, "cpu": 8.0e-3}
"""host time of one engine iteration: GPU as fitted in `profiles.engine_table`; CPU: measured order"""
ENGINE_SEQUENCE_S = {"gpu": 3.5e-5, "cpu": 2.0e-5}
"""host time per running sequence and iteration: GPU as fitted in `profiles.engine_table`; CPU: measured order"""
EXPERT_EFFICIENCY = 0.2
"""share of peak FLOP/s of routed experts in training, sorting of tokens included: Qwen3-30B-A3B reaches 28 % of an H100
in all, where dense models reach 39-43 % (NVIDIA NeMo AutoModel, performance summary, 2026)"""
LAYER_PASS_S = {"gpu": 1.5e-3, "cpu": 1.0e-3}
"""host time of one layer's pass: some forty kernels launched from Python; a GPU computes meanwhile, a CPU does not. GPU:
forward passes of one sample of a 7B critic in a public verl log take 43 ms, 1.5 ms a layer; CPU: measured order"""
PASS_S = {"gpu": 2.5e-2, "cpu": 0.0}
"""host time of a pass beside its layers where it ends in logits: a micro-batch cut out and packed, its loss or log-probs.
GPU: passes of 1160 tokens through 16 layers take 49 ms: fitted to the even half of the published cases (1 run, 30
November 2026); CPU: within its fitted costs"""
HOSTS = {"gb200": 2.0}
"""how much longer a host takes for the launches of a layer than an x86 server: of Grace's cores about twice, so that models
of 8B and 32B take Megatron about 3 ms a layer on a GB200: fitted as above (2 runs)"""
EXPERTS_PASS_S = {"gpu": 4.5e-3, "cpu": 0.0}
"""of a layer's routed experts, beside that: router, permutation, exchange and a product for each expert, whose sizes the
host waits for. Qwen3-30B-A3B takes 6 to 7 ms a layer in all on H100 and GB200: fitted as above (3 runs); CPU: not priced"""
DISPATCH_S = 7.0e-3
"""one remote call, driver to worker and back: measured with Ray on one machine"""
HOST_CALL_S, HOST_SAMPLE_S = 1.0e-3, 5.0e-5
"""Python around a stage, per call and per sample: measured order"""
ADAM_BYTES = 30.0
"""memory traffic of Adam per parameter: reads and writes of fp32 weight, two moments and gradient, and the 16-bit copy"""
CPU_ADAM_S = 2.5e-10
"""seconds per parameter of Adam on all CPUs of a host: about 0.25 s per 10⁹ parameters (Ren et al. 2021, ZeRO-Offload)"""
BUCKET_BYTES = 25e6
"""gradients that are averaged while the next ones are computed; the last bucket is never hidden (Li et al. 2020, DDP)"""
HOST_OPS = frozenset({"rollout_host", "score_host", "update_host", "advantage", "reward"})


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Costs of a scenario's workers from datasheets alone."""

    scenario: Scenario
    _layouts: dict[str, Layout] = field(default_factory=dict)

    def seconds(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> float:
        """Time of an op on a worker; quantities as in `lab.measurement.OPS`, not divided by any parallelism.

        `beside_s` of a `grad_sync`: seconds of the backward pass that hides its buckets. Raises ValueError for an op
        there is not.
        """
        layout = self.layout(worker)
        if op in HOST_OPS:
            return HOST_CALL_S + HOST_SAMPLE_S * quantities.get("samples", 0.0)
        if op in collectives.ALGORITHMS:
            return collectives.seconds(op, quantities["bytes"], layout.group(worker.devices))
        if op in moves.MOVES:
            return moves.MOVES[op](layout, quantities)
        if op not in _OPS:
            raise ValueError(f"there is no roofline of the op {op!r}")
        return _OPS[op](layout, quantities)

    def talk(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> float:
        """Of an engine iteration or a pass, the part that devices of the worker spend on each other."""
        layout, spread = self.layout(worker), worker.parallelism
        if op == "engine_step":
            return engine_talk(layout, quantities["tokens"] / spread.data)
        times = backward_factor(layout) - 1.0 if op == "backward" else 1.0
        tokens = quantities["tokens"] / spread.context
        return times * (layer_collectives(layout, tokens) + handing_on(layout, tokens))

    def layout(self, worker: Worker) -> Layout:
        """Where a worker stands."""
        if worker.name not in self._layouts:
            team = self.scenario.team(worker.role, worker.work)
            leader = worker.work == "train" and worker.name != team[0].name
            self._layouts[worker.name] = Layout(self.scenario, worker, self.layout(team[0]) if leader else None)
        return self._layouts[worker.name]

    def threads(self, worker: Worker) -> int:
        """CPU threads of each device's work; they have no meaning on a GPU. They share one memory bandwidth."""
        return self.layout(worker).threads

    def engine_table(self, worker: Worker) -> EngineTable:
        """Iterations of an engine as piecewise-linear tables; nothing of them is measured."""
        from profiles.engine_roofline import table

        return table(self.layout(worker))


def peak(layout: Layout, dtype: str | None = None) -> float:
    """FLOP/s of one device, all its threads, for a dtype (None: of the worker's weights).

    A dtype the device has no units for runs at its bfloat16 or float32 rate.
    """
    flops: dict[str, float] = layout.device.flops
    return (flops.get(dtype or layout.worker.dtype) or flops.get("bfloat16") or flops["float32"]) * layout.threads


def streaming(layout: Layout) -> float:
    """Bytes per second that kernels read from or write to one device's memory."""
    return layout.device.memory_bandwidth * MEMORY_EFFICIENCY


def _engine_step(layout: Layout, q: Mapping[str, float]) -> float:
    """One iteration in which every device of the engine has an equal part."""
    from profiles.engine_roofline import seconds

    return seconds(layout, q)


def _pass(layout: Layout, q: Mapping[str, float], *, products: float, times: float) -> float:
    """A micro-batch on one pipeline stage: work, launches, collectives in its layers, and weights gathered for it.

    `products`: how often the forward pass's arithmetic is done; `times`: how often its layers are gone through.
    """
    spread = layout.worker.parallelism
    flops = peak(layout) * TRAIN_EFFICIENCY * spread.tensor * spread.pipeline * spread.context
    work = products * (q["linear_flops"] * expert_factor(layout) + q["attention_flops"]) / flops
    return float(whole_pass(layout, q, work, times=times))


def whole_pass(layout: Layout, q: Mapping[str, Any], work: Any, *, times: float) -> Any:
    """A pass whose kernels take `work` seconds: launches, collectives and gathered weights beside or after them.

    Of one pass, or (passes,) each.
    """
    spread, kind = layout.worker.parallelism, layout.device.kind
    launches = times * launch_seconds(layout)
    work = np.maximum(work, launches) if kind == "gpu" else work + launches
    if spread.devices == spread.expert == 1:
        return work + _gather(layout, work)
    sizes = np.unique(q["tokens"])
    talk = [layer_collectives(layout, size) + handing_on(layout, size) for size in (sizes / spread.context).tolist()]
    return work + times * np.interp(q["tokens"], sizes, talk) + _gather(layout, work)


def launch_seconds(layout: Layout) -> float:
    """Host time of a pass that goes through the layers of one pipeline stage once."""
    kind, spec = layout.device.kind, layout.spec
    host = HOSTS.get(layout.scenario.hardware.node_of(layout.worker.devices[0]).device, 1.0)
    layers = spec.layers * LAYER_PASS_S[kind] * host + spec.moe_layers * EXPERTS_PASS_S[kind]
    beside = 0.0 if layout.worker.role in HEADLESS else PASS_S[kind]
    return layers / layout.worker.parallelism.pipeline + beside


def offloaded_seconds(layout: Layout) -> float:
    """A micro-batch's gradients where the optimizer is on the host: what was summed so far comes to the device and goes
    back with them (DeepSpeed, `partition_grads` of runtime/zero/stage3.py), in the order of the backward pass."""
    train = layout.scenario.train(layout.worker.role)
    if train.offload != "optimizer" or layout.device.kind == "cpu":
        return 0.0
    size = layout.scenario.trainable_parameters(layout.worker.role) * DTYPE_BYTES[layout.worker.dtype]
    share = 1.0 / layout.width / layout.replicas if train.zero_stage >= 2 else layout.share
    return 2.0 * moves.host_copy_seconds(size * share)


def expert_factor(layout: Layout) -> float:
    """How much longer products take because a part of them is done by routed experts."""
    spec = layout.spec
    if spec.moe is None:
        return 1.0
    routed = spec.expert_parameters * spec.moe.experts_per_token / spec.moe.num_experts
    return 1.0 + routed / spec.active_matrix_parameters * (TRAIN_EFFICIENCY / EXPERT_EFFICIENCY - 1.0)


def _forward(layout: Layout, q: Mapping[str, float]) -> float:
    return _pass(layout, q, products=1.0, times=1.0)


def _backward(layout: Layout, q: Mapping[str, float]) -> float:
    """Twice the products of the forward pass, and once more where activations are recomputed (Narayanan et al. 2021)."""
    whole = backward_factor(layout)
    return _pass(layout, q, products=whole, times=whole - 1.0) + offloaded_seconds(layout)


def backward_factor(layout: Layout) -> float:
    """Products of a backward pass over those of its forward pass, all weights trained."""
    return layout.scenario.update.products


def _optimizer(layout: Layout, q: Mapping[str, float]) -> float:
    """Adam on the share of the parameters that this device keeps states of."""
    train = layout.scenario.train(layout.worker.role)
    mine = q["parameters"] / layout.width / layout.replicas if train.zero_stage else q["parameters"] * layout.share
    if train.offload == "optimizer":
        moved = 2 * DTYPE_BYTES[layout.worker.dtype] * mine  # gradients down, weights up
        beside = layout.group(layout.devices_of_team).per_machine  # they share their host's memory and cores
        return beside * mine * CPU_ADAM_S + moves.host_copy_seconds(moved)
    return mine * ADAM_BYTES / streaming(layout)


def _grad_sync(layout: Layout, q: Mapping[str, float]) -> float:
    """Averaging gradients of `bytes` in all (Rajbhandari et al. 2020), as far as the backward pass does not hide it.

    ZeRO 0: an all-reduce; 1 and 2: a reduce-scatter, and after the step the changed weights are gathered; 3: a
    reduce-scatter. Buckets are reduced during the backward pass, but for the last one; the gathering is not hidden.
    """
    parts = averaging(layout, q["bytes"])
    return parts.gathered_s + max(parts.reduced_s - q.get("beside_s", 0.0), parts.last_s)


class Averaging(NamedTuple):
    """Seconds of averaging gradients, alone on the network."""

    reduced_s: float
    last_s: float
    """of `reduced_s`, the bucket that no backward pass hides"""
    gathered_s: float
    """of changed weights"""
    op: str
    """the collective that reduces"""


def averaging(layout: Layout, size: float) -> Averaging:
    """What gradients of `size` bytes in all take, part by part."""
    stage = layout.scenario.train(layout.worker.role).zero_stage
    op = "reduce_scatter" if stage else "all_reduce"
    reduced = replicas_seconds(layout, op, size)
    gathered = replicas_seconds(layout, "all_gather", size) if stage in (1, 2) else 0.0
    return Averaging(reduced, reduced * min(1.0, BUCKET_BYTES / max(size * layout.share, 1.0)), gathered, op)


def replicas_seconds(layout: Layout, op: str, size: float) -> float:
    """A collective on weights or gradients of `size` bytes in all, over the ranks that hold the same ones."""
    dense, experts = layout.parts(size)
    return collectives.seconds(op, dense, layout.gradients) + collectives.seconds(op, experts, layout.expert_gradients)


def _dispatch(layout: Layout, q: Mapping[str, float]) -> float:
    wire = layout.fabric(layout.worker.devices[:1])
    return DISPATCH_S + wire.latency + q["bytes"] / wire.bandwidth


def layer_collectives(layout: Layout, tokens: float) -> float:
    """What the layers of one pipeline stage say to each other in a forward pass of `tokens` tokens on each device.

    Tensor parallelism: two all-reduces of tokens × hidden per layer (Shoeybi et al. 2019). Expert parallelism: tokens
    go to their experts and back, two all-to-alls per MoE layer (Lepikhin et al. 2021). Context parallelism: keys and
    values of all ranks are gathered (Llama 3 report 2024, 3.3.2).
    """
    spec, spread = layout.spec, layout.worker.parallelism
    width = DTYPE_BYTES[layout.activations]
    row = tokens * spec.hidden * width
    total = 2 * spec.layers * collectives.seconds("all_reduce", row, layout.tensor)
    total += expert_seconds(layout, tokens)
    if spread.context > 1:
        cached = spec.kv_bytes_per_token(layout.activations) / spec.layers
        whole = tokens * spread.context * cached / spread.tensor
        total += spec.layers * collectives.seconds("all_gather", whole, layout.context)
    return total / spread.pipeline


def expert_seconds(layout: Layout, tokens: float) -> float:
    """Tokens of all layers on their way to their experts and back, each tensor rank with its part of them."""
    spec, spread = layout.spec, layout.worker.parallelism
    if spec.moe is None or spread.expert == 1:
        return 0.0
    sent = tokens * spec.hidden * DTYPE_BYTES[layout.activations] * spec.moe.experts_per_token / spread.tensor
    return 2 * spec.moe_layers * collectives.seconds("all_to_all", sent, layout.experts)


def engine_talk(layout: Layout, tokens: float) -> float:
    """What the devices of one copy of an engine spend on each other in an iteration of `tokens` tokens."""
    stages = layout.worker.parallelism.pipeline
    return stages * (layer_collectives(layout, tokens / stages) + handing_on(layout, tokens / stages))


def handing_on(layout: Layout, tokens: float) -> float:
    """Activations of `tokens` tokens from a pipeline stage to the next."""
    size = tokens * layout.spec.hidden * DTYPE_BYTES[layout.activations]
    return collectives.seconds("p2p", size, layout.stages)


def _gather(layout: Layout, work: Any) -> Any:
    """ZeRO-3 gathers every layer's weights for each pass (Rajbhandari et al. 2020), the next ones during `work`."""
    if layout.worker.work != "train" or layout.scenario.train(layout.worker.role).zero_stage < 3:
        return 0.0
    layers = layout.spec.layers / layout.worker.parallelism.pipeline
    layer = replicas_seconds(layout, "all_gather", layout.spec.weight_bytes(layout.worker.dtype) / layers)
    return layer + np.maximum(0.0, (layers - 1) * layer - work)


_OPS: dict[str, Callable[[Layout, Mapping[str, float]], float]] = {
    "engine_step": _engine_step,
    "forward": _forward,
    "logprob": _forward,
    "backward": _backward,
    "optimizer": _optimizer,
    "grad_sync": _grad_sync,
    "dispatch": _dispatch,
}
"""by op: its time on a worker"""
