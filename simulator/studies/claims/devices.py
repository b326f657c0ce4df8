"""Claims about which devices do what: cheaper cards for rollout, CPUs for frozen models, the sixteen-GPU topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.errors import InputError
from lab.library import device
from profiles.memory import device_bytes
from simulator.studies.claims import Bench, Judgement
from simulator.studies.claims.rollout import ENGINE, generated, token_rate

HALF = {f"{ENGINE}/dtype": "float16", f"{ENGINE}/kv_dtype": "float16"}
BYTE = {f"{ENGINE}/dtype": "int8", f"{ENGINE}/kv_dtype": "float16"}


def card(name: str) -> dict[str, Any]:
    """The engines' machine with eight cards of a kind."""
    nodes = "cluster/sites/0/nodes/0"
    return {
        f"{nodes}/device": name,
        f"{nodes}/intra": device(name).default_link,
        "rollout/max_num_batched_tokens": 2048,
    }


def cheaper_cards(bench: Bench) -> Judgement:
    """Response tokens for a dollar of rollout, 7B, on T4, L40S and A100; on an A10 the price that would equal an A100's."""
    bench = bench.datasheets  # nothing was measured on T4 and A10
    found: dict[str, float] = {}
    for name, said in (("t4", BYTE), ("l40s", HALF), ("a100-80g-sxm", HALF), ("a10", HALF)):
        rate = token_rate(generated(bench, 256, card(name) | said))
        price = device(name).price_per_hour
        found[f"{name}_tokens_per_s"] = rate
        if price is not None:
            found[f"{name}_tokens_per_dollar"] = rate * 3600 / (8 * price)
    try:
        whole = token_rate(generated(bench, 256, card("t4") | HALF)) > 0
    except InputError:
        whole = False
    usd = {name: found[f"{name}_tokens_per_dollar"] / 1e6 for name in ("t4", "l40s", "a100-80g-sxm")}
    dear = device("a100-80g-sxm").price_per_hour or 0.0
    slow = found["a100-80g-sxm_tokens_per_s"] / found["a10_tokens_per_s"]
    return Judgement(
        value=f"million tokens a dollar: T4 {usd['t4']:.1f} (int8), L40S {usd['l40s']:.1f}, A100 {usd['a100-80g-sxm']:.1f}; "
        f"an A10 is {slow:.1f}× slower than an A100, and cheaper below ${dear / slow:.2f} an hour",
        verdict="partly" if not whole and usd["t4"] > usd["a100-80g-sxm"] else "holds" if whole else "does not hold",
        numbers=found,
        reason="By datasheets and at list prices small cards do give more tokens for a dollar, but 7B in 16 bits "
        "does not fit a T4 at all "
        "(with int8 it does, at a loss of precision), step time grows three- to fourfold unless there are more of "
        "them, and their KV cache is soon short with longer contexts.",
    )  # fmt: skip


def frozen_on_cpu(bench: Bench) -> Judgement:
    """Reference and reward in int8 on 64 cores, against two GPUs of the same eight."""
    cpu, gpu = bench.play("reference-on-cpu", {"num_steps": 2}), bench.play("minimal-8gpu", {"num_steps": 2})
    ratio = cpu.step_s / gpu.step_s
    return Judgement(
        value=f"a step of {cpu.step_s / 60:.0f} min, of which scoring {cpu.busy_s('reference') / 60:.0f} min, instead of "
        f"{gpu.step_s / 60:.1f} min with two GPUs for it: {ratio:.0f}×",
        verdict="does not hold" if ratio > 2 else "partly" if ratio > 1 else "holds",
        numbers={"cpu_s": cpu.step_s, "gpu_s": gpu.step_s},
        reason="It frees two GPUs, but scoring is as many FLOPs as a third of a training pass. On cores without matrix units it "
        "takes most of the step; with them it would be several times faster and still the slowest stage. It "
        "suits rewards of small models.",
    )  # fmt: skip


def sixteen_gpus(bench: Bench) -> Judgement:
    """The sixteen-GPU topology as drawn: does it fit, who waits, what stands idle."""
    played = bench.play("ppo-7b-16gpu", {"num_steps": 3})
    fits = all(pool["fits"] for pool in played.summary["memory"].values())
    alone = bench.scenario("ppo-7b-16gpu", {"place/critic.train/offload": "none"})
    critic = device_bytes(alone, alone.team("critic", "train")[0])
    busy = {stage: played.busy_s(stage) for stage in ("rollout", "update_actor", "update_critic")}
    pools, devices = played.summary["pools"], played.scenario.devices
    still = sum(
        len(devices[pool]) * sum(share for what, share in account.items() if what.startswith(("waiting", "idle")))
        for pool, account in pools.items()
    ) / sum(map(len, devices.values()))  # fmt: skip
    return Judgement(
        value=f"{'fits' if fits else 'does not fit'}, if the critic's optimizer is on the host ({critic / 1e9:.0f} GB without); "
        f"a step of {played.step_s:.0f} s, of which the critic's update {busy['update_critic']:.0f} s, the actor's "
        f"{busy['update_actor']:.0f} s, rollout {busy['rollout']:.0f} s; {still:.0%} of GPU time idle",
        verdict="partly" if fits else "does not hold", numbers=busy | {"step_s": played.step_s, "idle": still, "critic": critic},
        reason="The critic is as large as the actor and trains on one GPU beside the actor's six: it holds everything up, and "
        "as drawn it does not even fit without offloading. Five of the sixteen GPUs have no work.",
    )  # fmt: skip


def single_gpu_scorers(bench: Bench) -> Judgement:
    """Reference and reward on one GPU each, and what time slices on a single one would cost."""
    apart = bench.play("ppo-7b-16gpu", {"num_steps": 3})
    pools = bench.scenario("ppo-7b-16gpu").model_dump(mode="json")["pools"]
    said = {
        "num_steps": 3,
        "pools": pools | {"reference": "serve[0]", "idle": "serve[1]"},
        "place/reward.score/pool": "reference",
    }
    del said["pools"]["reward"]
    slices = bench.play("ppo-7b-16gpu", said | {"sharing/reference": {"how": "time_sliced", "switch": "offload"}})
    both = bench.play("ppo-7b-16gpu", said | {"sharing/reference": {"how": "resident"}})
    found = {"apart_s": apart.step_s, "sliced_s": slices.step_s, "resident_s": both.step_s}
    fits = both.summary["memory"]["reference"]["fits"]
    return Judgement(
        value=f"{apart.step_s:.0f} s a step on a GPU each, {slices.step_s:.0f} s in turns on one, {both.step_s:.0f} s both "
        f"loaded on one ({'fits' if fits else 'does not fit'})",
        verdict="holds" if slices.step_s < 1.3 * apart.step_s else "partly", numbers=found,
        reason="Neither trains, so that both fit one GPU at once and turns save nothing; scoring on one GPU instead of two "
        "takes twice as long, which the critic's update hides here.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "cheaper-cards": cheaper_cards,
    "frozen-on-cpu": frozen_on_cpu,
    "sixteen-gpus": sixteen_gpus,
    "scorers-share-a-gpu": single_gpu_scorers,
}
