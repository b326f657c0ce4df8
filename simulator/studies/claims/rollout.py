"""Claims about generation: batching, KV layout, parallelism of engines, and how work is dealt to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.studies.claims import Bench, Judgement, Played

SCENARIO = "grpo-7b-16gpu"
ENGINE = "place/actor.generate/0"


def generated(bench: Bench, prompts: int = 256, changes: Mapping[str, Any] | None = None) -> Played:
    """One step of the decoupled GRPO system with so many prompts, of eight samples each."""
    said = {"num_steps": 1, "workload/prompts_per_step": prompts, "update/minibatch_samples": min(512, 8 * prompts)}
    return bench.play(SCENARIO, said | dict(changes or {}))


def token_rate(played: Played) -> float:
    """Response tokens a second of rollout."""
    return float(played.summary["tokens"]["response"]) / played.busy_s("rollout")


def continuous_batching(bench: Bench) -> Judgement:
    """Rollout time of static over continuous batching, over engine sizes, numbers of requests and spreads of lengths."""
    skewed = {"workload/response_tokens": {"dist": "lognormal", "mean": 300, "p95": 1000, "max": 2000}}
    cases: dict[str, tuple[int, int, dict[str, Any]]] = {
        "no queue": (64, 256, {}), "usual": (256, 128, {}), "small slots": (256, 64, {}), "many requests": (512, 64, {}),
        "skewed lengths": (512, 64, skewed), "few slots, skewed": (512, 16, skewed),
    }  # fmt: skip
    found = {}
    for name, (prompts, slots, lengths) in cases.items():
        said = lengths | {"rollout/max_num_seqs": slots}
        static = generated(bench, prompts, said | {"rollout/batching": "static"}).busy_s("rollout")
        found[name] = static / generated(bench, prompts, said).busy_s("rollout")
    low, usual, high = min(found.values()), found["usual"], max(found.values())
    return Judgement(
        value=f"{usual:.1f}× with 128 slots an engine; {low:.1f}× to {high:.1f}× over {len(cases)} settings",
        verdict="holds" if usual >= 3 else "partly" if high >= 3 else "does not hold", numbers=found,
        reason="The gain comes from requests that queue behind a slot and from lengths that differ: with as many slots as "
        "requests there is none, and a step ends with its longest response under either. Iterations of a fuller batch "
        "also take longer, so that slots kept busy do not pay in full.",
    )  # fmt: skip


def static_waste(bench: Bench) -> Judgement:
    """Share of slot-iterations of static batches that belong to sequences that have ended."""
    workload = bench.scenario(SCENARIO).workload
    lengths = workload.response_lengths(0, 0).ravel()
    found = {}
    for slots in (16, 64, 128):
        batches = lengths[: len(lengths) // slots * slots].reshape(-1, slots)
        found[str(slots)] = float(1 - batches.sum() / (batches.max(axis=1) * slots).sum())
    return Judgement(
        value=", ".join(f"{share:.0%} with {slots} slots" for slots, share in found.items()) + " of slot time is waste",
        verdict="holds" if found["64"] > 0.5 else "partly", numbers=found,
        reason="A batch lasts as long as its longest sequence. The waste of time is smaller than that of slots: iterations "
        "with fewer sequences are a little shorter.",
    )  # fmt: skip


def paged_kv(bench: Bench) -> Judgement:
    """Rollout time with contiguous over paged KV, where the cache is ample and where it is short."""
    slots = {"rollout/max_num_seqs": 512}
    found = {}
    for name, fraction, longest in (("ample", 0.9, 2000), ("short", 0.35, 2000), ("long responses", 0.9, 16384)):
        lengths = {"dist": "lognormal", "mean": 500, "p95": 1400, "max": longest}
        said = slots | {"rollout/kv_memory_fraction": fraction, "workload/response_tokens": lengths}
        said |= {"update/microbatch_tokens": max(16384, longest + 1024)}
        whole = generated(bench, 256, said | {"rollout/kv_layout": "contiguous"}).busy_s("rollout")
        found[name] = whole / generated(bench, 256, said).busy_s("rollout")
    best = max(found.values())
    return Judgement(
        value=f"{found['ample']:.2f}× with ample cache, {found['short']:.2f}× with 13 GB of it, "
        f"{found['long responses']:.2f}× where up to 16,384 tokens are reserved",
        verdict="holds" if best > 1.2 else "does not hold", numbers=found,
        reason="Blocks given out as sequences grow let more of them run, and longer ones be allowed; it shows in time as "
        "soon as the cache limits how many run, and not before.",
    )  # fmt: skip


def data_parallel_sampling(bench: Bench) -> Judgement:
    """Rollout time with eight engines of one GPU, against four of two and two of four, from few to many prompts."""
    found = {}
    for prompts in (8, 64, 256, 1024):
        times = {}
        for tensor in (1, 2, 4):
            said = {f"{ENGINE}/engines": 8 // tensor, f"{ENGINE}/tensor_parallel": tensor}
            times[tensor] = generated(bench, prompts, said).busy_s("rollout")
        found[f"{prompts} prompts"] = times[1] / min(times[2], times[4])
    many, few = found["1024 prompts"], found["8 prompts"]
    return Judgement(
        value=f"data parallel takes {many:.2f}× the time of the best tensor parallelism with 1,024 prompts a step, "
        f"{found['64 prompts']:.2f}× with 64, {few:.2f}× with 8",
        verdict="holds" if few <= 1 else "partly" if many < 1 else "does not hold", numbers=found,
        reason="With hundreds of sequences an engine the all-reduces and the smaller products of tensor parallelism cost "
        "more than they bring. With few, decoding waits for weights to be read, which several GPUs do faster: the tail "
        "of a small step is shorter with TP. A model larger than a GPU leaves no choice.",
    )  # fmt: skip


def small_batches(bench: Bench) -> Judgement:
    """Tokens a second of the engines with 1, 16 and 128 slots."""
    found = {
        str(slots): token_rate(generated(bench, 64, {"rollout/max_num_seqs": slots})) for slots in (1, 8, 64)
    }  # fmt: skip
    gain = found["64"] / found["1"]
    return Judgement(
        value=f"{found['1']:,.0f} tokens/s with 1 sequence an engine, {found['8']:,.0f} with 8, {found['64']:,.0f} with 64",
        verdict="holds" if gain > 10 else "partly", numbers=found,
        reason="Decoding reads all weights for every token of a sequence; sequences that decode together share the reading.",
    )  # fmt: skip


def _two_generations(bench: Bench) -> dict[str, Any]:
    """Eight engines on V100 beside the scenario's own on A100."""
    nodes = bench.scenario(SCENARIO).model_dump(mode="json", by_alias=True)["cluster"]["sites"][0]["nodes"]
    old = {"name": "old", "count": 1, "device": "v100-32g-sxm", "devices": 8, "intra": "nvlink2"}
    half = {"dtype": "float16", "kv_dtype": "float16"}
    return {
        "cluster/sites/0/nodes": [*nodes, old], "pools/old": "old[0:8]", "rollout/max_num_batched_tokens": 4096,
        "place/actor.generate": [{"pool": "rollout", "engines": 8, "speed": 2.3}, {"pool": "old", "engines": 8} | half],
    }  # fmt: skip


def weighted_dispatch(bench: Bench) -> Judgement:
    """Engines of two generations: round robin against weights by speed, and against the least loaded."""
    said = _two_generations(bench)
    rules = ("round_robin", "weighted", "least_loaded")
    found = {rule: generated(bench, 512, said | {"rollout/dispatch": rule}).busy_s("rollout") for rule in rules}
    gain = found["round_robin"] / found["weighted"]
    return Judgement(
        value=f"{found['round_robin']:.0f} s in turn, {found['weighted']:.0f} s by speed, "
        f"{found['least_loaded']:.0f} s to the least loaded (A100 beside V100)",
        verdict="holds" if gain > 1.1 else "partly" if gain > 1 else "does not hold", numbers=found,
        reason="A step waits for its slowest engine; in turn, the older cards get as much work as the newer ones.",
    )  # fmt: skip


def length_buckets(bench: Bench) -> Judgement:
    """Long prompts to the stronger engines, by the length that a prompt's history predicts."""
    said = _two_generations(bench) | {"num_steps": 4}
    rules = ("weighted", "length_buckets")
    found = {rule: generated(bench, 512, said | {"rollout/dispatch": rule}).busy_s("rollout") for rule in rules}
    gain = found["weighted"] / found["length_buckets"]
    return Judgement(
        value=f"{found['length_buckets']:.0f} s a step in buckets, {found['weighted']:.0f} s dealt by speed alone",
        verdict="holds" if gain > 1.05 else "partly" if gain > 1 else "does not hold", numbers=found,
        reason="Lengths are drawn anew in every step, so that a prompt's history says little of its next response; "
        "buckets then move work without knowing more. Where a prompt's responses resemble each other it would help.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "continuous-batching": continuous_batching,
    "static-waste": static_waste,
    "paged-kv": paged_kv,
    "data-parallel-sampling": data_parallel_sampling,
    "small-batches": small_batches,
    "weighted-dispatch": weighted_dispatch,
    "length-buckets": length_buckets,
}
