"""Claims about updates: epochs, more rollouts, more GPUs, adapters, and other algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator.studies.claims import Bench, Judgement, Played


def tokens_rolled_out(played: Played) -> float:
    """Response tokens of all steps."""
    return float(played.summary["tokens"]["response"])


def more_epochs(bench: Bench) -> Judgement:
    """Four PPO epochs against one."""
    one = bench.play("ppo-7b-16gpu", {"num_steps": 3, "algorithm/ppo_epochs": 1})
    four = bench.play("ppo-7b-16gpu", {"num_steps": 3, "algorithm/ppo_epochs": 4})
    tokens = tokens_rolled_out(four) / tokens_rolled_out(one)
    update = four.busy_s("update_actor") / one.busy_s("update_actor")
    return Judgement(
        value=f"{tokens:.2f}× the rollout tokens, {update:.2f}× the update time with four epochs instead of one",
        verdict="holds" if tokens == 1 and update > 3.5 else "does not hold", numbers={"tokens": tokens, "update": update},
        reason="Epochs pass again over samples that are there. What that does to learning is not simulated.",
    )  # fmt: skip


def more_rollouts(bench: Bench) -> Judgement:
    """Twice and four times the samples of each prompt."""
    found: dict[str, dict[str, float]] = {}
    for number in (4, 8, 16):
        said = {"num_steps": 2, "workload/samples_per_prompt": number, "update/minibatch_samples": 256}
        played = bench.play("grpo-7b-16gpu", said)
        found[str(number)] = {stage: played.busy_s(stage) for stage in ("rollout", "update_actor")}
    grown = {stage: found["16"][stage] / found["4"][stage] for stage in ("rollout", "update_actor")}
    return Judgement(
        value=f"four times the samples: rollout {grown['rollout']:.1f}×, update {grown['update_actor']:.1f}× as long",
        verdict="holds" if grown["rollout"] > grown["update_actor"] else "does not hold", numbers=grown,
        reason="Generation grows less than its tokens as long as engines have free slots: more sequences share each reading "
        "of the weights. Training grows in proportion, so that it is training whose cost swells first here.",
    )  # fmt: skip


def rollout_or_update(bench: Bench) -> Judgement:
    """GPU-seconds of generation and training, from short to long responses and from many to few of them."""
    found = {}
    for mean, prompts in ((250, 256), (1000, 256), (4000, 256), (4000, 32)):
        lengths = {"dist": "lognormal", "mean": mean, "p95": 2.8 * mean, "max": 4 * mean}
        said = {
            "num_steps": 1,
            "workload/response_tokens": lengths,
            "update/microbatch_tokens": max(16384, 4 * mean + 1024),
        }
        said |= {"workload/prompts_per_step": prompts, "update/minibatch_samples": min(512, 8 * prompts)}
        played = bench.play("grpo-7b-16gpu", said)
        found[f"{8 * prompts:,} of {mean:,} tokens"] = played.busy_s("rollout") / played.busy_s("update_actor")
    low, high = min(found.values()), max(found.values())
    return Judgement(
        value="generation takes " + ", ".join(f"{ratio:.2f}× ({name})" for name, ratio in found.items())
        + " the GPU-seconds of training",
        verdict="holds" if low > 1 else "partly" if high > 1 else "does not hold", numbers=found,
        reason="With full batches a token is generated for less than it is trained (forward, recomputed forward and "
        "backward). Generation becomes the dearer part where engines have few sequences each: the longest responses then "
        "set its time, whatever they are worth.",
    )  # fmt: skip


def more_gpus(bench: Bench) -> Judgement:
    """Twice and four times the GPUs of both pools."""
    times = {}
    for factor in (1, 2, 4):
        said: dict[str, Any] = {
            "num_steps": 2, "cluster/sites/0/nodes/0/count": factor, "cluster/sites/0/nodes/1/count": factor,
            "pools/rollout": f"serve[0:{8 * factor}]", "pools/train": f"train[0:{8 * factor}]",
            "place/actor.generate/0/engines": 8 * factor, "place/actor.train/data_parallel": 8 * factor,
        }  # fmt: skip
        times[factor] = bench.play("grpo-7b-16gpu", said)
    gain = {factor: times[1].step_s / played.step_s for factor, played in times.items()}
    rollout = times[1].busy_s("rollout") / times[4].busy_s("rollout")
    return Judgement(
        value=f"{gain[2]:.2f}× as fast with twice the GPUs, {gain[4]:.2f}× with four times (rollout alone {rollout:.2f}×)",
        verdict="holds" if gain[4] < 3.6 else "does not hold",
        numbers={"two": gain[2], "four": gain[4], "rollout": rollout},
        reason="The longest response takes its time on any number of engines, and engines with fewer sequences decode them "
        "hardly faster; weights and gradients cross more machines.",
    )  # fmt: skip


def adapters(bench: Bench) -> Judgement:
    """Memory of a trainer with adapters instead of all weights."""
    from profiles.memory import device_bytes

    found = {}
    for name, lora in (("full", None), ("adapters", {"rank": 16})):
        given = bench.scenario("minimal-8gpu", {"models/actor/lora": lora, "models/critic/lora": lora})
        found[name] = device_bytes(given, given.team("actor", "train")[0])
    share = found["adapters"] / found["full"]
    return Judgement(
        value=f"{found['adapters'] / 1e9:.0f} GB on each of two GPUs instead of {found['full'] / 1e9:.0f} GB",
        verdict="holds" if share < 0.6 else "partly", numbers=found,
        reason="No gradients and Adam states of frozen weights; the weights themselves and activations remain.",
    )  # fmt: skip


def offloaded_optimizer(bench: Bench) -> Judgement:
    """Adam's states in host memory, with all weights trained and with adapters."""
    from profiles.memory import device_bytes

    found = {}
    for name, lora in (("full", None), ("adapters", {"rank": 16})):
        for offload in ("none", "optimizer"):
            said = {"models/actor/lora": lora, "models/critic/lora": lora, "place/actor.train/offload": offload}
            given = bench.scenario("minimal-8gpu", said)
            found[f"{name}_{offload}"] = device_bytes(given, given.team("actor", "train")[0])
    full, light = (found[f"{kind}_none"] - found[f"{kind}_optimizer"] for kind in ("full", "adapters"))
    return Judgement(
        value=f"saves {full / 1e9:.0f} GB of {found['full_none'] / 1e9:.0f} GB a GPU where all weights are trained, "
        f"{light / 1e9:.1f} GB with adapters",
        verdict="holds" if full > 10e9 and light > 5e9 else "partly" if full > 10e9 else "does not hold", numbers=found,
        reason="With adapters, as that system uses them, there are hardly any optimizer states to move: offloading is worth "
        "nothing there, and much where all weights are trained.",
    )  # fmt: skip


def pipeline_bubble(bench: Bench) -> Judgement:
    """Training as a pipeline of two and four stages on the same eight GPUs."""
    found = {}
    for stages in (1, 2, 4):
        said = {"num_steps": 2, "place/actor.train/zero_stage": 1, "place/actor.train/pipeline_parallel": stages,
                "place/actor.train/data_parallel": 8 // stages, "models/actor/lora": {"rank": 16}}  # fmt: skip
        played = bench.play("grpo-7b-16gpu", said)
        bubbles = sum(span.seconds for span in played.timeline.spans if span.op == "bubble" and span.step == 1)
        found[str(stages)] = bubbles / (8 // stages) / played.busy_s("update_actor")
    return Judgement(
        value=f"bubbles are {found['2']:.0%} of training with two stages, {found['4']:.0%} with four",
        verdict="holds" if found["4"] > 0.05 else "partly", numbers=found,
        reason="Filling and draining takes (stages - 1) slots for every mini-batch; the more micro-batches, the less it is.",
    )  # fmt: skip


def larger_minibatches(bench: Bench) -> Judgement:
    """Fewer, larger optimizer steps (gradient accumulation) on slow links between two machines."""
    from simulator.studies.claims.network import SPREAD

    slow = SPREAD | {"cluster/sites/0/fabric/link": "ethernet-25"}
    small, large = (
        bench.play("grpo-7b-16gpu", slow | {"update/minibatch_samples": number}).busy_s("update_actor")
        for number in (128, 2048)
    )
    return Judgement(
        value=f"{small:.0f} s with sixteen optimizer steps, {large:.0f} s with one ({small / large:.2f}×), on 25 Gbit/s",
        verdict="holds" if small > 1.1 * large else "partly", numbers={"small_s": small, "large_s": large},
        reason="Gradients are exchanged once for every optimizer step. Fewer steps also learn less from the same samples, "
        "which is not simulated.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "more-epochs": more_epochs,
    "more-rollouts": more_rollouts,
    "rollout-or-update": rollout_or_update,
    "more-gpus": more_gpus,
    "adapters-memory": adapters,
    "offloaded-optimizer": offloaded_optimizer,
    "pipeline-bubble": pipeline_bubble,
    "larger-minibatches": larger_minibatches,
}
