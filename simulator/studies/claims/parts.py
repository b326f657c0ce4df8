"""Claims about what else makes a step cheaper: other algorithms and number formats, more of one stage, fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiles.memory import worker_footprint
from profiles.slices import trained_bytes
from simulator.studies.claims import Bench, Judgement, Played, size
from simulator.studies.claims.rollout import ENGINE, generated, token_rate
from simulator.studies.claims.scoring import scored


def ppo_or_dpo(bench: Bench) -> Judgement:
    """The same number of samples of the same lengths on sixteen GPUs with PPO, on eight with DPO."""
    said = {
        "schedule/mode": "synchronous",
        "checkpoint/every_steps": None,
        "num_steps": 3,
        "workload/prompts_per_step": 192,
    }
    dpo = bench.play("dpo-7b", said | {"update/minibatch_samples": 384})
    lengths = bench.scenario("dpo-7b").model_dump(mode="json", by_alias=True)["workload"]
    ppo = bench.play("ppo-7b-16gpu", {"num_steps": 3, "checkpoint/every_steps": None} | {
        f"workload/{what}": lengths[what] for what in ("prompt_tokens", "response_tokens")
    })  # fmt: skip
    ours, theirs = set(dpo.summary["stages"]), set(ppo.summary["stages"])
    gone = ", ".join(sorted(theirs - ours))
    hours = [one.step_s * num / 3600 for one, num in ((ppo, 16), (dpo, 8))]
    return Judgement(
        value=f"without {gone}; {hours[1]:.2f} GPU-hours a step of 384 samples instead of {hours[0]:.2f}",
        verdict="holds" if {"rollout", "reward"} <= theirs - ours and hours[1] < hours[0] else "partly",
        numbers={"ppo_hours": hours[0], "dpo_hours": hours[1], "ppo_s": ppo.step_s, "dpo_s": dpo.step_s},
        reason="Generation, scoring, the critic and weight syncs go; the reference stays. The pairs must come from somewhere: "
        "what people or a judge cost, and how old they are for the policy, is not counted.",
    )  # fmt: skip


def mixed_precision(bench: Bench) -> Judgement:
    """A trainer in float32 and in bfloat16."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        said = {
            "num_steps": 2,
            "models/actor/dtype": dtype,
            f"{ENGINE}/dtype": "bfloat16",
            f"{ENGINE}/kv_dtype": "bfloat16",
        }
        found[dtype] = bench.play("grpo-7b-16gpu", said).busy_s("update_actor")
    gain = found["float32"] / found["bfloat16"]
    return Judgement(
        value=f"training {found['bfloat16']:.0f} s instead of {found['float32']:.0f} s: {gain:.1f}×",
        verdict="holds" if gain > 2 else "partly", numbers=found,
        reason="An A100's matrix units give sixteen times its float32 peak; TF32, which is not simulated, would be half of that.",
    )  # fmt: skip


def quantised_engine(bench: Bench) -> Judgement:
    """Engines with int8 weights on A100, by datasheets; and with fp8 weights on H100, by measured kernels."""
    sheets = bench.datasheets
    wide = token_rate(generated(sheets))
    narrow = token_rate(generated(sheets, 256, {f"{ENGINE}/dtype": "int8"}))
    both = token_rate(generated(sheets, 256, {f"{ENGINE}/dtype": "int8", f"{ENGINE}/kv_dtype": "fp8"}))
    hopper = {"cluster/sites/0/nodes/0/device": "h100-80g-sxm", "cluster/sites/0/nodes/0/intra": "nvlink4"}
    plain = token_rate(generated(bench, 256, hopper))
    fp8 = token_rate(generated(bench, 256, hopper | {f"{ENGINE}/dtype": "fp8"}))
    found = {"int8": narrow / wide, "int8_and_cache": both / wide, "fp8_measured": fp8 / plain}
    return Judgement(
        value=f"A100, int8 weights: {found['int8']:.2f}× the tokens a second by datasheets, {found['int8_and_cache']:.2f}× with an "
        f"fp8 cache too; H100, fp8 weights: {found['fp8_measured']:.2f}× by measured kernels",
        verdict="holds" if min(found.values()) > 1.1 else "partly", numbers=found,
        reason="Decoding reads half the bytes of weights; with full batches attention and what surrounds it weigh as much. The "
        "engine's policy is then not exactly the trainer's, and every sync has to quantise anew.",
    )  # fmt: skip


def adapter_checkpoints(bench: Bench) -> Judgement:
    """Bytes of a checkpoint with adapters and with all weights."""
    found = {}
    for name, lora in (("full", None), ("adapters", {"rank": 16})):
        given = bench.scenario("grpo-7b-16gpu", {"models/actor/lora": lora})
        ranks = given.team("actor", "train")
        found[name] = sum(trained_bytes(given, rank, worker_footprint(given, rank)) for rank in ranks)
    return Judgement(
        value=f"{size(found['adapters'])} instead of {size(found['full'])}",
        verdict="holds" if found["adapters"] < 0.02 * found["full"] else "partly", numbers=found,
        reason="Adapters and their Adam states are all that changes.",
    )  # fmt: skip


def endless_scaling(bench: Bench) -> Judgement:
    """Rollout with 8 to 64 engines, the same prompts."""
    found = {}
    for factor in (1, 2, 4, 8):
        said: dict[str, Any] = {
            "cluster/sites/0/nodes/0/count": factor, "pools/rollout": f"serve[0:{8 * factor}]", f"{ENGINE}/engines": 8 * factor,
        }  # fmt: skip
        found[str(8 * factor)] = generated(bench, 256, said).busy_s("rollout")
    gain = found["8"] / found["64"]
    return Judgement(
        value=", ".join(f"{seconds:.0f} s with {number} engines" for number, seconds in found.items()),
        verdict="does not hold" if gain < 4 else "partly" if gain < 7 else "holds", numbers=found,
        reason="The workers do scale, the rollout does not: the longest response is generated token by token by one engine, "
        "and with few sequences an engine is no faster. More engines pay only with more prompts.",
    )  # fmt: skip


def balanced_stages(bench: Bench) -> Judgement:
    """Sixteen GPUs, one step off, split 8:8 and 4:12 and 12:4 between rollout and training."""
    found = {}
    for engines, ranks in ((12, 4), (8, 8), (4, 12)):
        said: dict[str, Any] = {
            "schedule/mode": "one_step_off", "num_steps": 6, "cluster/sites/0/nodes/0/devices": 16,
            "pools": {"rollout": f"serve[0:{engines}]", "train": f"serve[{engines}:16]"}, f"{ENGINE}/engines": engines,
            "place/actor.train/data_parallel": ranks, "update/minibatch_samples": 384, "workload/prompts_per_step": 288,
        }  # fmt: skip
        found[f"{engines}:{ranks}"] = bench.play("grpo-7b-16gpu", said).step_s
    best = min(found, key=lambda split: found[split])
    return Judgement(
        value=", ".join(f"{seconds:.0f} s a step with {split}" for split, seconds in found.items()),
        verdict="holds" if max(found.values()) > 1.2 * found[best] else "partly", numbers=found,
        reason="The period is that of the slower side: GPUs belong where the longer stage is, which here is training, not "
        "inference, as the example in the text assumes.",
    )  # fmt: skip


def ray_calls(bench: Bench) -> Judgement:
    """Share of a step that goes into the driver's calls, with a 7B model and with a tiny one."""
    found = {name: _calls(bench.play(name, {"num_steps": 3})) for name in ("grpo-7b-16gpu", "quickstart")}
    return Judgement(
        value=f"{found['grpo-7b-16gpu']:.3%} of a step of minutes, {found['quickstart']:.1%} of one of a tiny model",
        verdict="holds" if found["quickstart"] > 20 * found["grpo-7b-16gpu"] else "partly", numbers=found,
        reason="A call costs about a millisecond, once for each stage: it counts only where stages take milliseconds, as with "
        "very frequent micro-batches.",
    )  # fmt: skip


def _calls(played: Played) -> float:
    """The most that a pool waits for calls."""
    return max(float(account.get("waiting:dispatch", 0.0)) for account in played.summary["pools"].values())


def engine_logprobs(bench: Bench) -> Judgement:
    """Log-probabilities of the samples from the engine, and computed anew by the trainer."""
    engine = bench.play("grpo-7b-16gpu", {"num_steps": 2})
    again = bench.play("grpo-7b-16gpu", {"num_steps": 2, "algorithm/old_logprob": "recompute"})
    saved = again.step_s - engine.step_s
    return Judgement(
        value=f"saves a pass of {saved:.0f} s of a step of {again.step_s:.0f} s",
        verdict="holds" if saved > 0.02 * again.step_s else "partly", numbers={"engine_s": engine.step_s, "again_s": again.step_s},
        reason="The engine has them anyway. They come from other kernels than the trainer's, which is why many frameworks do "
        "compute them anew.",
    )  # fmt: skip


def near_reward(bench: Bench) -> Judgement:
    """A remote reward service with answers after 1 ms, 100 ms and 2 s, sample by sample beside the rollout and after it."""
    found = {}
    for after in (0.001, 0.1, 2.0):
        remote = {"latency": after, "concurrency": 16}
        said = {"place/reward.score": {"pool": "reward", "kind": "remote", "remote": remote, "max_batch_samples": 1}}
        found[f"{after:g}"] = scored(bench, said).busy_s("reward")
        found[f"{after:g}_beside"] = scored(bench, said | {"schedule/scoring": "sample"}).step_s
    grown = found["2_beside"] / found["0.001_beside"]
    return Judgement(
        value=f"384 samples after the rollout: {found['0.001']:.1f} s, {found['0.1']:.1f} s and {found['2']:.0f} s at 1 ms, 100 ms "
        f"and 2 s an answer; asked as samples end, the step is {grown:.2f}× as long at 2 s",
        verdict="partly" if grown < 1.1 else "holds", numbers=found,
        reason="Latency adds up only where calls go one after the other; asked while others are still generated, seconds an "
        "answer hardly show. Throughput matters more than being near.",
    )  # fmt: skip


def autoscaling(bench: Bench) -> Judgement:
    """Two to eight engines, started as the queue demands, against eight from the start."""
    fixed = generated(bench, 256)
    scaled = generated(bench, 256, {"scaling": {"actor.generate": {"min": 2, "max": 8, "start": 30}}})
    slower = scaled.busy_s("rollout") / fixed.busy_s("rollout")
    return Judgement(
        value=f"rollout {scaled.busy_s('rollout'):.0f} s instead of {fixed.busy_s('rollout'):.0f} s ({slower:.2f}×)",
        verdict="partly" if slower > 1.05 else "holds",
        numbers={"fixed_s": fixed.busy_s("rollout"), "scaled_s": scaled.busy_s("rollout")},
        reason="An engine takes half a minute to start, as long as this whole rollout: within a step autoscaling comes too late. "
        "It suits demand that changes over many minutes.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "ppo-or-dpo": ppo_or_dpo,
    "mixed-precision": mixed_precision,
    "quantised-engine": quantised_engine,
    "adapter-checkpoints": adapter_checkpoints,
    "endless-scaling": endless_scaling,
    "balanced-stages": balanced_stages,
    "ray-calls": ray_calls,
    "engine-logprobs": engine_logprobs,
    "near-reward": near_reward,
    "autoscaling": autoscaling,
}
