"""The datasheet roofline: what an op costs where nothing was measured.

time = max(FLOPs / (peak × efficiency), bytes / (bandwidth × efficiency)) + overheads (Williams et al. 2009).
Every constant here is an assumption with its source; a prediction made with them is marked as extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.library import Device
from lab.library import device as library_device
from lab.library import link as library_link
from lab.model import DTYPE_BYTES

if TYPE_CHECKING:
    from lab.placement import Train, Worker
    from lab.scenario import Scenario

TRAIN_EFFICIENCY = 0.45
"""share of peak FLOP/s in training and scoring: 38-43 % (Llama 3 report 2024, table 4), 44-52 % (Narayanan et al. 2021)"""
DECODE_EFFICIENCY = 0.6
"""share of peak FLOP/s of the engine's matrix products at large batch; between training MFU and bare GEMM efficiency"""
MEMORY_EFFICIENCY = 0.8
"""share of peak memory bandwidth that streaming kernels reach (BabelStream on A100 and H100 reaches 0.8-0.9)"""
ENGINE_STEP_S = {"gpu": 1.0e-3, "cpu": 8.0e-3}
"""host time of one engine iteration: 0.7-1.6 ms on a GPU server (Agrawal et al. 2024, Vidur); CPU: measured order"""
ENGINE_SEQUENCE_S = 2.0e-5
"""host time per running sequence and iteration: 0.006-0.035 ms in fits to public serving measurements"""
LAYER_PASS_S = {"gpu": 2.0e-4, "cpu": 1.0e-3}
"""launching the kernels of one layer: some twenty kernels of about 10 us on a GPU; CPU: measured order"""
DISPATCH_S = 7.0e-3
"""one remote call, driver to worker and back: measured with Ray on one machine"""
HOST_CALL_S, HOST_SAMPLE_S = 1.0e-3, 5.0e-5
"""Python around a stage, per call and per sample: measured order"""
ADAM_BYTES = 30.0
"""memory traffic of Adam per parameter: reads and writes of fp32 weight, two moments and gradient, and the 16-bit copy"""
CPU_ADAM_S = 2.5e-10
"""seconds per parameter of Adam on host CPUs: about 0.25 s per 10⁹ parameters (Ren et al. 2021, ZeRO-Offload)"""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Costs of a scenario's workers from datasheets alone."""

    scenario: Scenario

    def seconds(self, worker: Worker, op: str, quantities: Mapping[str, float]) -> float:
        """Time of an op on a worker; quantities as in `lab.measurement.OPS`, not divided by any parallelism."""
        if op in ("rollout_host", "score_host", "update_host", "advantage", "reward"):
            return HOST_CALL_S + HOST_SAMPLE_S * quantities.get("samples", 0.0)
        return float(getattr(self, f"_{op}")(worker, quantities))

    def _engine_step(self, worker: Worker, q: Mapping[str, float]) -> float:
        width, kind = len(worker.devices), self._device(worker).kind
        flops = self._flops(worker) * DECODE_EFFICIENCY * width * self.threads(worker)
        bandwidth = self._device(worker).memory_bandwidth * MEMORY_EFFICIENCY * width
        weights = self.scenario.spec(worker.role).weight_bytes(self.scenario.model(worker.role).dtype)
        linear: float = max(q["linear_flops"] / flops, weights / bandwidth)
        attention = q["attention_flops"] / flops + q["kv_bytes"] / bandwidth
        host = ENGINE_STEP_S[kind] + ENGINE_SEQUENCE_S * q["sequences"]
        return linear + attention + host + self._layer_reductions(worker, q["tokens"])

    def _pass(self, worker: Worker, q: Mapping[str, float], factor: float) -> float:
        spec = self.scenario.spec(worker.role)
        flops = self._flops(worker) * TRAIN_EFFICIENCY * len(worker.devices) * self.threads(worker)
        launches = spec.layers * LAYER_PASS_S[self._device(worker).kind]
        work = (q["linear_flops"] + q["attention_flops"]) / flops + launches
        return factor * (work + self._layer_reductions(worker, q["tokens"])) + self._gather(worker)

    def _logprob(self, worker: Worker, q: Mapping[str, float]) -> float:
        return self._pass(worker, q, 1.0)

    def _forward(self, worker: Worker, q: Mapping[str, float]) -> float:
        return self._pass(worker, q, 1.0)

    def _backward(self, worker: Worker, q: Mapping[str, float]) -> float:
        """Twice the forward pass, and once more where activations are recomputed (Narayanan et al. 2021)."""
        return self._pass(worker, q, 3.0 if self.scenario.update.recompute == "full" else 2.0)

    def _optimizer(self, worker: Worker, q: Mapping[str, float]) -> float:
        train = self._train(worker)
        mine: float = q["parameters"] / len(worker.devices) / (train.data_parallel if train.zero_stage else 1)
        if train.offload == "optimizer":
            moved = 2 * DTYPE_BYTES[self.scenario.model(worker.role).dtype] * mine  # gradients down, weights up
            return mine * CPU_ADAM_S + moved / library_link("pcie4").bandwidth
        return mine * ADAM_BYTES / (self._device(worker).memory_bandwidth * MEMORY_EFFICIENCY)

    def _grad_sync(self, worker: Worker, q: Mapping[str, float]) -> float:
        """Ring: each of n ranks sends 2(n-1)/n of its bytes for an all-reduce, half of that for a reduce-scatter."""
        train = self._train(worker)
        n, share = train.data_parallel, 1.0 if train.zero_stage == 3 else 2.0
        bandwidth, latency = self._between(worker)
        return share * (n - 1) / n * q["bytes"] / len(worker.devices) / bandwidth + share * (n - 1) * latency

    def _weight_sync(self, worker: Worker, q: Mapping[str, float]) -> float:
        """A pipelined broadcast over the slowest link between trainer and engines; shards are gathered first."""
        ends = [worker, *self.scenario.team("actor", "generate")]
        bandwidth, latency = self._slowest([device for end in ends for device in end.devices])
        own, _ = self._slowest(list(worker.devices))
        shards = len(worker.devices)
        return q["bytes"] / bandwidth + (shards - 1) / shards * q["bytes"] / own + len(ends) * latency

    def _checkpoint(self, worker: Worker, q: Mapping[str, float]) -> float:
        return q["bytes"] / self.scenario.hardware.sites[0].storage.write

    def _dispatch(self, worker: Worker, q: Mapping[str, float]) -> float:
        bandwidth, latency = self._fabric()
        return DISPATCH_S + latency + q["bytes"] / bandwidth

    def _layer_reductions(self, worker: Worker, tokens: float) -> float:
        """Tensor parallelism: two ring all-reduces of tokens × hidden per layer (Shoeybi et al. 2019)."""
        width, spec = len(worker.devices), self.scenario.spec(worker.role)
        if width == 1:
            return 0.0
        bandwidth, latency = self._slowest(list(worker.devices))
        size = tokens * spec.hidden * DTYPE_BYTES[self.scenario.model(worker.role).dtype]
        return 2 * spec.layers * (2 * (width - 1) / width * size / bandwidth + 2 * (width - 1) * latency)

    def _gather(self, worker: Worker) -> float:
        """ZeRO-3 gathers every layer's weights for each pass (Rajbhandari et al. 2020)."""
        if worker.work != "train" or self._train(worker).zero_stage < 3 or self._train(worker).data_parallel == 1:
            return 0.0
        n, (bandwidth, latency) = self._train(worker).data_parallel, self._between(worker)
        spec = self.scenario.spec(worker.role)
        weights = spec.weight_bytes(self.scenario.model(worker.role).dtype) / len(worker.devices)
        return (n - 1) / n * weights / bandwidth + spec.layers * (n - 1) * latency

    def _train(self, worker: Worker) -> Train:
        place = self.scenario.place
        return place.critic_train if worker.role == "critic" and place.critic_train else place.actor_train

    def threads(self, worker: Worker) -> int:
        """CPU threads of each device's work; they have no meaning on a GPU. They share one memory bandwidth."""
        return worker.threads if self._device(worker).kind == "cpu" else 1

    def _device(self, worker: Worker) -> Device:
        return library_device(self.scenario.hardware.node_of(worker.devices[0]).device)

    def _flops(self, worker: Worker) -> float:
        """Peak of the model's dtype; a dtype the device has no units for runs at its bfloat16 or float32 rate."""
        flops: dict[str, float] = self._device(worker).flops
        dtype = self.scenario.model(worker.role).dtype
        return flops.get(dtype) or flops.get("bfloat16") or flops["float32"]

    def _between(self, worker: Worker) -> tuple[float, float]:
        team = self.scenario.team(worker.role, worker.work)
        return self._slowest([rank.devices[0] for rank in team])

    def _slowest(self, devices: list[str]) -> tuple[float, float]:
        """Bandwidth and latency of the slowest link among devices: inside a machine, or the fabric between."""
        hardware = self.scenario.hardware
        if len({hardware.machine_of(device) for device in devices}) > 1:
            return self._fabric()
        inside = library_link(hardware.node_of(devices[0]).intra)
        return inside.bandwidth, inside.latency

    def _fabric(self) -> tuple[float, float]:
        fabric = self.scenario.hardware.sites[0].fabric
        link = library_link(fabric.link)
        return link.bandwidth / fabric.oversubscription, link.latency
