"""CompactKernels: kernel times from the curves of a profile, so that predictions need no op tables.

A curve holds multiples of a reference that is written here, over few sizes; between and beyond them the reference
carries the dependence. Collectives are curves of seconds over bytes. The names of curves:

    gemm.DTYPE                                m, n, k
    context_attention.KV_DTYPE.HEAD_DIM       tokens, problems (batch·heads), per_key (heads per key head)
    generation_attention.KV_DTYPE.HEAD_DIM    context, problems (batch·key heads), per_key
    moe.DTYPE                                 rows (tokens per expert), experts (held by the device), matrix (hidden·width)
    all_reduce.RANKS, all_reduce_eager.RANKS, fused_all_reduce.RANKS, all_gather.RANKS, …    bytes
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from profiles.curve import Curve, Floats
from profiles.kernels import COMPUTES, LAUNCH_S, MEMORY_EFFICIENCY, WIDTH, Peaks, prefix_share, wide
from profiles.profile import Profile

ATTENTION_S, MOE_S = 8.0e-6, 10.0e-6
"""what the smallest attention and the smallest layer of experts take; references only, the curves correct them"""


def gemm_reference(peaks: Peaks, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> Floats:
    return LAUNCH_S + peaks.gemm(dtype, m, n, k)


def context_reference(
    peaks: Peaks, kv_dtype: str, head_dim: int, tokens: ArrayLike, problems: ArrayLike, per_key: ArrayLike
) -> Floats:
    """Causal attention of whole prompts: 4·d FLOPs for each pair, queries, keys, values and outputs moved once."""
    tokens, problems, per_key = (np.asarray(x, dtype=float) for x in (tokens, problems, per_key))
    computes = "float32" if kv_dtype == "float32" else "bfloat16"
    flops = 4.0 * head_dim * problems * tokens * (tokens + 1) / 2
    moved = tokens * problems * head_dim * (2 * wide(kv_dtype) + 2 * WIDTH[kv_dtype] / per_key)
    return np.asarray(ATTENTION_S + np.maximum(flops / peaks.of(computes), moved / peaks.bandwidth))


def generation_reference(
    peaks: Peaks, kv_dtype: str, head_dim: int, context: ArrayLike, problems: ArrayLike, per_key: ArrayLike
) -> Floats:
    """One new token each: keys and values are read once, queries and outputs moved once."""
    context, problems, per_key = (np.asarray(x, dtype=float) for x in (context, problems, per_key))
    moved = problems * head_dim * (2.0 * WIDTH[kv_dtype] * context + 2 * wide(kv_dtype) * per_key)
    return np.asarray(ATTENTION_S + moved / peaks.bandwidth)


def moe_reference(peaks: Peaks, dtype: str, rows: ArrayLike, experts: ArrayLike, matrix: ArrayLike) -> Floats:
    """Gated experts that get `rows` tokens each in the mean: 1 − e^−rows of them are read."""
    rows, experts, matrix = (np.asarray(x, dtype=float) for x in (rows, experts, matrix))
    flops = 6.0 * matrix * rows * experts
    moved = 3.0 * matrix * WIDTH[dtype] * experts * (1 - np.exp(-rows))
    return np.asarray(MOE_S + np.maximum(flops / peaks.of(dtype), moved / peaks.bandwidth))


def peaks_of(profile: Profile) -> Peaks:
    """The datasheet that a profile's curves refer to: its source says which, else the device library's."""
    from lab.library import device

    kept = profile.source.get("peaks")
    if kept:
        single = device(profile.device).flops["float32"]
        flops = {"float32": single} | {name: float(x) for name, x in kept["flops"].items()}
        return Peaks(flops=flops, bandwidth=float(kept["bandwidth"]))
    return library_peaks(device(profile.device).flops, device(profile.device).memory_bandwidth)


def library_peaks(flops: dict[str, float], bandwidth: float) -> Peaks:
    half = flops.get("bfloat16") or flops.get("float16") or flops["float32"]
    eight = flops.get("fp8", half)
    found = {"float32": flops["float32"], "bfloat16": half, "fp8": eight, "nvfp4": flops.get("fp4", eight)}
    return Peaks(flops=found, bandwidth=bandwidth)


@dataclass(eq=False)
class CompactKernels:
    """Kernels of a profile with curves. Raises ValueError where it has none for matrix products or attention."""

    profile: Profile
    notes: set[str] = field(default_factory=set)
    _stands: dict[tuple[str, str], tuple[str, Curve]] = field(default_factory=dict, init=False)
    """curves by kind and format, once they were looked for"""

    def __post_init__(self) -> None:
        self.peaks = peaks_of(self.profile)
        for kind in ("gemm", "context_attention", "generation_attention"):
            if not self._named(kind):
                raise ValueError(f"the profile {self.profile.name} has no curve of {kind}")

    def token_limit(self, dtype: str) -> float:
        return self._gemm_curve(dtype)[1].ranges["m"].high

    def gemm(self, dtype: str, m: ArrayLike, n: int, k: int) -> Floats:
        """Sizes n and k beyond the measured ones are cut in equal parts."""
        stands, curve = self._gemm_curve(dtype)
        widest, deepest = curve.ranges["n"].high, curve.ranges["k"].high
        parts_n, parts_k = np.ceil(n / widest), np.ceil(k / deepest)
        n_part, k_part = n / parts_n, k / parts_k
        times = curve.at(m=m, n=n_part, k=k_part) * gemm_reference(
            self.peaks, _priced(dtype, stands), m, n_part, k_part
        )
        return np.asarray(parts_n * parts_k * self._asked("gemm", curve, times, m=m))

    def context_attention(
        self, batch: ArrayLike, isl: ArrayLike, prefix: ArrayLike, heads: int, kv_heads: int, head_dim: int,
        kv_dtype: str, window: int = 0,
    ) -> Floats:  # fmt: skip
        """As `SiliconKernels`: a chunk after a prefix takes its share of the pairs of the whole prompt."""
        batch, isl, prefix = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (batch, isl, prefix)))
        alone, whole = (
            self._prompt(batch * heads, tokens, heads / kv_heads, head_dim, kv_dtype) * _windowed(tokens, window)
            for tokens in (isl, isl + prefix)
        )
        share = isl / np.maximum(isl + prefix, 1) if window else prefix_share(isl, prefix)
        return np.where(isl <= 0, 0.0, np.maximum(alone, np.where(prefix > 0, whole * share, alone)))

    def _prompt(self, problems: Floats, tokens: Floats, per_key: float, head_dim: int, kv_dtype: str) -> Floats:
        stands, dim, curve = self._attention_curve("context_attention", kv_dtype, head_dim)
        inside = np.clip(tokens, 1.0, curve.ranges["tokens"].high)
        reference = context_reference(self.peaks, _priced(kv_dtype, stands), dim, inside, problems, per_key)
        times = curve.at(tokens=inside, problems=problems, per_key=per_key) * reference
        return np.asarray(times * (np.maximum(tokens, 1.0) / inside) ** 2 * head_dim / dim)

    def generation_attention(
        self, batch: ArrayLike, context: ArrayLike, heads: int, kv_heads: int, head_dim: int, kv_dtype: str,
        window: int = 0,
    ) -> Floats:  # fmt: skip
        batch, context = np.broadcast_arrays(np.asarray(batch, dtype=float), np.asarray(context, dtype=float))
        stands, dim, curve = self._attention_curve("generation_attention", kv_dtype, head_dim)
        read = np.maximum(np.minimum(context, window) if window else context, 1.0)
        problems, per_key = np.maximum(batch, 1.0) * kv_heads, heads / kv_heads
        reference = generation_reference(self.peaks, _priced(kv_dtype, stands), dim, read, problems, per_key)
        times = curve.at(context=read, problems=problems, per_key=per_key) * reference * head_dim / dim
        return np.where(batch <= 0, 0.0, times)

    def moe(
        self, dtype: str, tokens: ArrayLike, hidden: int, intermediate: int, topk: int, num_experts: int, tp: int,
        ep: int,
    ) -> Floats:  # fmt: skip
        rows = np.maximum(np.asarray(tokens, dtype=float), 1.0) * topk / num_experts
        sizes = {"experts": num_experts / ep, "matrix": hidden * intermediate / tp}
        stands, curve = self._moe_curve(dtype)
        reference = moe_reference(self.peaks, _priced(dtype, stands), rows, sizes["experts"], sizes["matrix"])
        if curve is None:
            self.notes.add("experts were not measured: their roofline stands for them")
            return reference / MEMORY_EFFICIENCY
        return self._asked("moe", curve, curve.at(rows=rows, **sizes) * reference, rows=rows)

    def collective(self, op: str, size: ArrayLike, ranks: int, graph: bool = True) -> Floats:
        if ranks == 1:
            return np.zeros(np.shape(size))
        name = "all_reduce_eager" if op == "all_reduce" and not graph else op
        known = sorted(int(found.split(".")[1]) for found in self._named(name))
        if not known:
            return self._unmeasured(op, size, ranks, graph)
        nearest = min(known, key=lambda own: (own < ranks, abs(own - ranks)))
        if nearest != ranks:
            self.notes.add(f"no {op} of {ranks} ranks was measured: scaled from {nearest}")
        curve = self.profile.kernels[f"{name}.{nearest}"]
        high = curve.ranges["bytes"].high
        inside = np.clip(np.asarray(size, dtype=float), curve.ranges["bytes"].low, high)
        beyond = np.maximum(np.asarray(size, dtype=float) / high, 1.0)
        return np.asarray(curve.at(bytes=inside) * beyond * ((ranks - 1) / ranks) / ((nearest - 1) / nearest))

    def _unmeasured(self, op: str, size: ArrayLike, ranks: int, graph: bool) -> Floats:
        """Another op of which there are curves, or the device's link: a ring (Thakur et al. 2005)."""
        from lab.library import device, link

        if op in ("fused_all_reduce", "all_reduce") and self._named("all_reduce"):
            return self.collective("all_reduce", size, ranks, graph=True)
        self.notes.add(f"{op} was not measured: a ring over the device's link stands for it")
        wire = link(device(self.profile.device).default_link)
        return ring(op, size, ranks, wire.bandwidth, wire.latency)

    def memory_bound(self, size: ArrayLike) -> Floats:
        return np.asarray(LAUNCH_S + np.asarray(size, dtype=float) / (self.peaks.bandwidth * MEMORY_EFFICIENCY))

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        found = dict[str, list[str]]()
        for name in self.profile.kernels:
            found.setdefault(name.split(".")[0], []).append(name)
        return found

    def _named(self, kind: str) -> list[str]:
        return self._kinds.get(kind, [])

    def _asked(self, kind: str, curve: Curve, times: Floats, **sizes: ArrayLike) -> Floats:
        if any(np.max(asked) > curve.ranges[name].high * 1.01 for name, asked in sizes.items()):
            self.notes.add(f"{kind} beyond the measured range")
        return times

    def _gemm_curve(self, dtype: str) -> tuple[str, Curve]:
        return self._standing("gemm", dtype)

    def _moe_curve(self, dtype: str) -> tuple[str, Curve | None]:
        return self._standing("moe", dtype) if self._named("moe") else (dtype, None)

    def _standing(self, kind: str, dtype: str) -> tuple[str, Curve]:
        """The curve of a number format, or of the nearest one that was measured."""
        if (kind, dtype) not in self._stands:
            self._stands[kind, dtype] = self._nearest(kind, dtype)
        return self._stands[kind, dtype]

    def _nearest(self, kind: str, dtype: str) -> tuple[str, Curve]:
        known = {name.split(".")[1]: name for name in self._named(kind)}
        order = [dtype, COMPUTES.get(dtype, dtype), "fp8_block" if WIDTH[dtype] == 1 else dtype, "bfloat16", *known]
        stands = next(name for name in order if name in known)
        if stands != dtype and dtype != "float16":
            scaled = ", slower by the ratio of their rooflines" if dtype == "float32" else ""
            self.notes.add(f"no {kind} in {dtype} was measured: {stands} stands for it{scaled}")
        return stands, self.profile.kernels[known[stands]]

    def _attention_curve(self, kind: str, kv_dtype: str, head_dim: int) -> tuple[str, int, Curve]:
        """Cache format, head size and curve that stand for the asked ones."""
        keys = [name.split(".")[1:] for name in self._named(kind)]
        formats = {key[0] for key in keys}
        wanted = {"float16": "bfloat16", "int8": "fp8"}.get(kv_dtype, kv_dtype)
        stands = wanted if wanted in formats else "bfloat16" if "bfloat16" in formats else sorted(formats)[0]
        dim = min((int(key[1]) for key in keys if key[0] == stands), key=lambda own: abs(np.log(own / head_dim)))
        if stands != wanted or dim != head_dim:
            self.notes.add(
                f"no {kind} with a {wanted} cache and heads of {head_dim} was measured: {stands}, {dim} stand"
            )
        return stands, dim, self.profile.kernels[f"{kind}.{stands}.{dim}"]


def ring(op: str, size: ArrayLike, ranks: int, bandwidth: float, latency: float) -> Floats:
    """Seconds of a collective in a ring of links (Thakur et al. 2005); an all-reduce goes round twice."""
    steps = (2 if "all_reduce" in op else 1) * (ranks - 1)
    return np.asarray(steps * (np.asarray(size, dtype=float) / ranks / bandwidth + latency))


def _priced(dtype: str, stands: str) -> str:
    """The format whose roofline carries a curve: float32 is no other format's equal, whichever stands for it."""
    return "float32" if dtype == "float32" else stands


def _windowed(tokens: Floats, window: int) -> Floats:
    """Share of the pairs of whole prompts that lie within the window."""
    below = np.minimum(tokens, window or np.inf)
    pairs = below * (below + 1) / 2 + (tokens - below) * (window or 0.0)
    return np.asarray(pairs / np.maximum(tokens * (tokens + 1) / 2, 1.0))
