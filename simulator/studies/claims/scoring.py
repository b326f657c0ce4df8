"""Claims about scoring: what it costs beside generation, batching, int8, shared trunks, caches, and services of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from profiles.memory import device_bytes
from simulator.studies.claims import Bench, Judgement, Played

BASE = "ppo-7b-16gpu"
FAST_CRITIC: dict[str, Any] = {
    "num_steps": 3,
    "pools": {"actors": "train[0:6]", "critic": "train[6:12]", "reference": "serve[0]", "reward": "serve[1]",
              "rollout": "serve[2:4]"},
    "place/critic.train": {"pool": "critic", "data_parallel": 6, "zero_stage": 2},
}  # fmt: skip
"""of the sixteen-GPU topology: the critic gets the GPUs without work, so that scoring is not hidden behind it"""


def scored(bench: Bench, changes: Mapping[str, Any] | None = None) -> Played:
    return bench.play(BASE, FAST_CRITIC | dict(changes or {}))


def one_pass(bench: Bench) -> Judgement:
    """GPU-seconds of the reward model and of generation for the same samples."""
    played = scored(bench)
    engines = len(played.scenario.team("actor", "generate"))
    ratio = played.busy_s("reward") / (engines * played.busy_s("rollout"))
    return Judgement(
        value=f"{played.busy_s('reward'):.0f} GPU-seconds, generation {engines * played.busy_s('rollout'):.0f}: {ratio:.0%}",
        verdict="holds" if ratio < 0.2 else "partly" if ratio < 0.6 else "does not hold", numbers={"ratio": ratio},
        reason="A pass over the sequence has as many FLOPs as generating it in full batches. Scoring is cheaper because it "
        "is bound by arithmetic instead of memory, yet for a reward model as large as the actor it is no small thing.",
    )  # fmt: skip


def batched_scoring(bench: Bench) -> Judgement:
    """Reward in batches of one, eight and 32 samples."""
    found = {}
    for number in (1, 8, 32):
        found[str(number)] = scored(bench, {"place/reward.score/max_batch_samples": number}).busy_s("reward")
    gain = found["1"] / min(found["8"], found["32"])
    return Judgement(
        value=", ".join(f"{seconds:.0f} s in batches of {number}" for number, seconds in found.items()),
        verdict="holds" if gain > 1.3 else "partly" if gain > 1.05 else "does not hold", numbers=found,
        reason="A single sample of a thousand tokens already fills the GPU's arithmetic, so that batches bring little; with "
        "padding to the longest of a batch they can even cost. They matter for short texts.",
    )  # fmt: skip


def int8_scoring(bench: Bench) -> Judgement:
    """Reference and reward with int8 weights: time and memory."""
    said = {"place/reward.score/dtype": "int8", "place/reference.score/dtype": "int8"}
    wide, narrow = scored(bench.datasheets), scored(bench.datasheets, said)
    memory = [device_bytes(one.scenario, one.scenario.team("reward", "score")[0]) for one in (wide, narrow)]
    gain = wide.busy_s("reward") / narrow.busy_s("reward")
    return Judgement(
        value=f"{gain:.2f}× as fast, {memory[1] / 1e9:.1f} GB instead of {memory[0] / 1e9:.1f} GB",
        verdict="holds" if gain > 1.3 else "partly",
        numbers={"gain": gain, "bytes": memory[1], "wide_bytes": memory[0]},
        reason="By datasheets, with kernels that compute in int8 at the card's peak; none were measured. "
        "bitsandbytes, which is named, computes in 16 bits "
        "and is usually slower than without; the memory is saved either way.",
    )  # fmt: skip


def shared_trunk(bench: Bench) -> Judgement:
    """Reference and reward as heads on one trunk, against two models."""
    apart = scored(bench)
    pools = {name: devices for name, devices in FAST_CRITIC["pools"].items() if name != "reward"}
    shared = scored(bench, {
        "pools": pools, "place/reward.score": {"pool": "reference", "kind": "model", "shares_trunk": True},
        "models/reward": {"like": "reference"},
    })  # fmt: skip
    gain = apart.step_s / shared.step_s
    return Judgement(
        value=f"one GPU instead of two, {shared.step_s:.0f} s a step instead of {apart.step_s:.0f} s",
        verdict="holds" if gain > 0.98 else "partly", numbers={"apart_s": apart.step_s, "shared_s": shared.step_s},
        reason="One pass gives both. It presupposes a reward model that was trained as a head on the very weights of the "
        "reference.",
    )  # fmt: skip


def cached_rewards(bench: Bench) -> Judgement:
    """A cache that knows a tenth and half of the samples."""
    found = {}
    for share in (0.0, 0.1, 0.5):
        said = {"place/reward.score/cache": {"hit_share": share}} if share else {}
        found[f"{share:g}"] = scored(bench, said).busy_s("reward")
    return Judgement(
        value=", ".join(f"{seconds:.0f} s with {float(share):.0%} known" for share, seconds in found.items()),
        verdict="partly", numbers=found,
        reason="The time falls with the share that is known. But a score belongs to a response, and sampled responses hardly "
        "ever repeat: caching by prompt, as is proposed, would give wrong rewards.",
    )  # fmt: skip


def more_scorers(bench: Bench) -> Judgement:
    """Scoring on one GPU and on two for each model, the rest unchanged."""
    pools = FAST_CRITIC["pools"] | {"critic": "train[6:10]", "reference": "train[10:12]", "reward": "serve[0:2]"}
    base = {"pools": pools, "place/critic.train/data_parallel": 4}
    one = scored(bench, base)
    two = scored(bench, base | {"place/reference.score/replicas": 2, "place/reward.score/replicas": 2})
    saved = one.step_s - two.step_s
    return Judgement(
        value=f"{one.step_s:.0f} s a step with a GPU for each, {two.step_s:.0f} s with two",
        verdict="holds" if saved > 0.02 * one.step_s else "partly", numbers={"one_s": one.step_s, "two_s": two.step_s},
        reason="As services of their own they can be enlarged alone, as long as scoring is what the step waits for.",
    )  # fmt: skip


def scoring_beside(bench: Bench) -> Judgement:
    """Scoring sample by sample beside generation, against after it."""
    after, beside = scored(bench), scored(bench, {"schedule/scoring": "sample"})
    saved = after.step_s - beside.step_s
    return Judgement(
        value=f"{beside.step_s:.0f} s a step instead of {after.step_s:.0f} s",
        verdict="holds" if saved > 0.05 * after.step_s else "partly" if saved > 0 else "does not hold",
        numbers={"after_s": after.step_s, "beside_s": beside.step_s},
        reason="Scores of early samples are ready before the last one is generated; what remains is the scoring of the tail.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "one-pass": one_pass,
    "batched-scoring": batched_scoring,
    "int8-scoring": int8_scoring,
    "shared-trunk": shared_trunk,
    "cached-rewards": cached_rewards,
    "more-scorers": more_scorers,
    "scoring-beside": scoring_beside,
}
