"""Claims about what runs beside what: the pipeline of stages, and one pool for everything against several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.metrics import steady_window
from simulator.studies.claims import Bench, Judgement, Played

PIPELINED = {"schedule/mode": "one_step_off"}
FULL = {"models/actor/lora": None, "models/critic/lora": None}


def pipeline_of_three(bench: Bench) -> Judgement:
    """Ten, two and eight minutes, one after the other and as a pipeline."""
    serial = bench.play("pipeline-10-2-8")
    piped = bench.play("pipeline-10-2-8", PIPELINED | {"num_steps": 8})
    parts = [serial.busy_s(stage) / 60 for stage in ("rollout", "reward", "update_actor")]
    before, after = serial.step_s / 60, piped.step_s / 60
    near = abs(before / 20 - 1) < 0.05 and abs(after / 10 - 1) < 0.05
    return Judgement(
        value=f"{before:.1f} min a step in series ({parts[0]:.1f} + {parts[1]:.1f} + {parts[2]:.1f}), "
        f"{after:.1f} min as a pipeline: {before / after:.2f}×",
        verdict="holds" if near else "partly", numbers={"serial_min": before, "pipeline_min": after},
        reason="The period of a pipeline is its slowest stage, here sampling, or scoring and training together. It is paid "
        "with samples that are one version old, and the first step still takes the whole twenty minutes.",
    )  # fmt: skip


def pipeline_in_general(bench: Bench) -> Judgement:
    """How much one-step-off brings to the library's scenarios."""
    names = ("pipeline-10-2-8", "grpo-7b-16gpu", "minimal-8gpu", "ppo-7b-16gpu")
    found = {}
    for name in names:
        serial = bench.play(name, {"num_steps": 4, "schedule/mode": "synchronous"}).step_s
        found[name] = serial / bench.play(name, {"num_steps": 8} | PIPELINED).step_s
    low, high = min(found.values()), max(found.values())
    return Judgement(
        value=f"{low:.2f}× to {high:.2f}× over {len(names)} scenarios",
        verdict="holds" if low >= 1.95 else "partly" if high >= 1.95 else "does not hold", numbers=found,
        reason="Two stages that overlap bring at most 2×, and only where both take equally long; three times would need "
        "three equal stages, each on GPUs of its own. Where training takes most of a step, as here with PPO, there is "
        "little to hide.",
    )  # fmt: skip


def trainers_wait_for_nothing(bench: Bench) -> Judgement:
    """Share of its time that the trainer's pool does not compute, in series and as a pipeline."""
    found = {}
    for name, said in (("serial", {}), ("pipeline", PIPELINED | {"num_steps": 8})):
        account = bench.play("pipeline-10-2-8", said).summary["pools"]["train"]
        found[name] = sum(share for what, share in account.items() if what.startswith(("waiting", "idle")))
    left = found["pipeline"]
    return Judgement(
        value=f"the trainers stand still for {found['serial']:.0%} of the time in series, {left:.0%} as a pipeline",
        verdict="holds" if left < 0.05 else "partly" if left < 0.8 * found["serial"] else "does not hold", numbers=found,
        reason="They stay idle for what the slowest stage takes longer than theirs, beside the first step in which there is "
        "nothing to train; only equal stages leave no gap.",
    )  # fmt: skip


def coupled_memory(bench: Bench) -> Judgement:
    """Memory of everything loaded on the same GPUs."""
    needed = bench.play("naive-coupled-8gpu").summary["memory"]["all"]
    lean = bench.play("naive-coupled-8gpu", {
        "models/actor/lora": {"rank": 16}, "models/critic/lora": {"rank": 16}, "rollout/kv_memory_fraction": 0.4,
    }).summary["memory"]["all"]  # fmt: skip
    ratio = needed["peak_bytes"] / needed["capacity_bytes"]
    return Judgement(
        value=f"{needed['peak_bytes'] / 1e9:.0f} GB on a GPU of {needed['capacity_bytes'] / 1e9:.0f} GB; with adapters and "
        f"less cache {lean['peak_bytes'] / 1e9:.0f} GB",
        verdict="does not hold" if needed["fits"] else "holds",
        numbers={"share": ratio, "lean_share": lean["peak_bytes"] / lean["capacity_bytes"]},
        reason="Engine, actor, critic, reference and reward model with their states and activations do not fit a GPU of "
        "80 GB together. That is a matter of what is loaded at once: in time slices the same GPUs are enough.",
    )  # fmt: skip


def coupled_swing(bench: Bench) -> Judgement:
    """Use of the GPUs' arithmetic, second by second, and the share of time they stand still."""
    played = bench.play("naive-coupled-8gpu")
    low, middle, high = np.quantile(utilisation(played), [0.1, 0.5, 0.9])
    account = played.summary["pools"]["all"]
    still = sum(share for what, share in account.items() if what.startswith(("waiting", "idle")))
    return Judgement(
        value=f"from {low:.1%} (a tenth of the time below) over {middle:.0%} to {high:.0%} of peak FLOP/s; {still:.0%} of "
        "GPU time idle",
        verdict="holds" if high > 3 * low else "does not hold",
        numbers={"low": float(low), "median": float(middle), "high": float(high), "idle": still},
        reason="Decoding waits for memory, its tail and the two scorers leave most GPUs without work, and training is bound "
        "by arithmetic. The phases would alternate in pools of their own too, but each pool would then be sized for one.",
    )  # fmt: skip


FLOPS = {"prefill": 2.0, "decode": 2.0, "forward": 2.0, "backward": 4.0}
"""by op: per parameter and token (Kaplan et al. 2020)"""


def utilisation(played: Played, bin_s: float = 1.0) -> NDArray[np.float64]:
    """By second after the first step: share of all devices' peak that tokens in engines and passes use."""
    scenario, timeline = played.scenario, played.timeline
    begin, end = steady_window(timeline)
    done = np.zeros(int((end - begin) / bin_s))
    for span in timeline.spans:
        if span.op in FLOPS and span.end_s > begin and span.start_s < end:
            work = FLOPS[span.op] * scenario.spec(scenario.workers[span.worker].role).parameters * span.tokens
            first, last = ((edge - begin) / bin_s for edge in (span.start_s, span.end_s))
            inside = np.clip(
                np.minimum(last, np.arange(1, len(done) + 1)) - np.maximum(first, np.arange(len(done))), 0, 1
            )
            done += work * inside / max(last - first, 1e-9)
    peak = sum(scenario.device_of(pool).flops["bfloat16"] * len(ids) for pool, ids in scenario.devices.items())
    return np.asarray(done / (peak * bin_s), np.float64)


def coupled_or_decoupled(bench: Bench) -> Judgement:
    """Step time on the same sixteen GPUs: all for everything in turns, against eight for each."""
    apart = bench.play("grpo-7b-16gpu")
    pipelined = bench.play("grpo-7b-16gpu", PIPELINED | {"num_steps": 6})
    turns = {
        "pools": {"serve": "serve[0:8]", "train": "train[0:8]"},
        "sharing": {"train": {"how": "time_sliced", "switch": "sleep"}},
        "place/actor.generate": [{"pool": "serve", "engines": 8}, {"pool": "train", "engines": 8}],
        "place/reward.score/pool": "serve",
    }
    helped = bench.play("grpo-7b-16gpu", turns | {"rollout/kv_memory_fraction": 0.4})
    every = {"cluster/sites/0/nodes": _one_node_type(bench), "pools": {"all": "gpu[0:16]"},
             "sharing": {"all": {"how": "time_sliced", "switch": "offload"}},
             "place/actor.generate": [{"pool": "all", "engines": 16}], "place/reward.score/pool": "all",
             "place/actor.train/pool": "all", "place/actor.train/data_parallel": 16}  # fmt: skip
    together = bench.play("grpo-7b-16gpu", every)
    found = {"apart": apart.step_s, "apart_pipelined": pipelined.step_s, "helped": helped.step_s,
             "together": together.step_s}  # fmt: skip
    best = min(found["apart"], found["apart_pipelined"])
    return Judgement(
        value=f"apart {found['apart']:.0f} s a step, {found['apart_pipelined']:.0f} s one step off; all sixteen in turns "
        f"{found['together']:.0f} s; trainers that help to sample {found['helped']:.0f} s",
        verdict="holds" if best < 0.9 * together.step_s else "partly" if best < 1.1 * together.step_s else "does not hold",
        numbers=found,
        reason="Naive coupling does not fit; but taking turns, with engines that sleep and states on the host, uses every "
        "GPU for every stage and keeps samples on policy. Pools of their own win where stages overlap and are sized to "
        "take equally long; here training needs far more than sampling.",
    )  # fmt: skip


def _one_node_type(bench: Bench) -> list[Mapping[str, Any]]:
    nodes = bench.scenario("grpo-7b-16gpu").model_dump(mode="json", by_alias=True)["cluster"]["sites"][0]["nodes"]
    return [nodes[0] | {"name": "gpu", "count": 2}]


def colocated_eight(bench: Bench) -> Judgement:
    """The eight-GPU system in two phases: does it fit, what do the switches cost, and what is lost to the other layout."""
    turns = bench.play("colocated-8gpu", {"num_steps": 3})
    apart = bench.play("minimal-8gpu", {"num_steps": 3, "workload": _workload(bench, "colocated-8gpu")})
    reload = bench.play("colocated-8gpu", {
        "num_steps": 3, "sharing/train/switch": "reload", "sharing/frozen/switch": "reload",
    })  # fmt: skip
    fits = all(pool["fits"] for pool in turns.summary["memory"].values())
    share = turns.busy_s("switch") / turns.step_s
    return Judgement(
        value=f"{'fits' if fits else 'does not fit'}; {turns.step_s:.0f} s a step, {share:.1%} of it "
        f"switching ({reload.busy_s('switch'):.0f} s a step if "
        f"engines start anew); with pools of their own {apart.step_s:.0f} s",
        verdict="holds" if fits else "does not hold",
        numbers={"step_s": turns.step_s, "apart_s": apart.step_s, "switching": share, "reload_s": reload.busy_s("switch")},
        reason="Every GPU fits with adapters, int8 scorers and offloaded Adam states. What limits it is training on two "
        "GPUs while six rest: the switches are small beside it, and throughput is no lower than with fixed pools of the same "
        "eight GPUs.",
    )  # fmt: skip


def _workload(bench: Bench, name: str) -> Any:
    return bench.scenario(name).model_dump(mode="json", by_alias=True)["workload"]


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "pipeline-10-2-8": pipeline_of_three,
    "pipeline-in-general": pipeline_in_general,
    "pipeline-hides": trainers_wait_for_nothing,
    "coupled-memory": coupled_memory,
    "coupled-swing": coupled_swing,
    "coupled-or-decoupled": coupled_or_decoupled,
    "eight-gpus": colocated_eight,
}
