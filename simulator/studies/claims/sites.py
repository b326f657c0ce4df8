"""Claims about generation and training at separate sites, and about how weights and samples travel between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.studies.claims import Bench, Judgement, Played, size

SITES = "two-sites"
AFTER = {"num_steps": 2, "experience/prefetch": False}
"""samples go after the rollout, so that their time shows"""


def sent(bench: Bench, changes: Mapping[str, Any] | None = None) -> Played:
    return bench.play(SITES, AFTER | dict(changes or {}))


def volume(played: Played) -> float:
    """Bytes of samples that cross to the trainers' site in a step."""
    return sum(span.bytes for span in played.timeline.spans if span.op == "send" and span.step == 1)


def compressed_samples(bench: Bench) -> Judgement:
    """Samples over the wide-area link, plain and compressed."""
    plays = {how: sent(bench, {"experience/compression": how}) for how in ("none", "lz4", "zstd")}
    found = {f"{how}_s": played.busy_s("transfer") for how, played in plays.items()}
    share = 1 - volume(plays["zstd"]) / volume(plays["none"])
    whole = plays["none"].step_s
    return Judgement(
        value=f"{size(volume(plays['none']))} a step in {found['none_s']:.2f} s; {found['zstd_s']:.2f} s with Zstandard, which "
        f"saves {share:.0%}, of a step of {whole:.0f} s",
        verdict="partly" if found["zstd_s"] < found["none_s"] else "does not hold", numbers=found | {"saved": share},
        reason="Log-probabilities are floating-point numbers that hardly compress, beside ids that do. Of adapters and sampled "
        "log-probabilities even 1 Gbit/s carries a step's samples in well under a second: little is left to optimise.",
    )  # fmt: skip


def sampled_logprobs(bench: Bench) -> Judgement:
    """Log-probabilities of the sampled token, of fifty, and of the whole vocabulary."""
    cases: dict[str, dict[str, Any]] = {
        "sampled": {}, "top 50": {"experience/logprobs": "top_k", "experience/top_k": 50},
        "all": {"experience/logprobs": "full"},
    }  # fmt: skip
    plays = {name: sent(bench, said) for name, said in cases.items()}
    found = {name: played.busy_s("transfer") for name, played in plays.items()}
    return Judgement(
        value="; ".join(f"{name}: {size(volume(plays[name]))} in {seconds:,.1f} s" for name, seconds in found.items()),
        verdict="holds" if found["all"] > 100 * found["sampled"] else "partly", numbers=found,
        reason="A vocabulary of 152,000 numbers a token is what makes experience heavy; PPO needs one of them.",
    )  # fmt: skip


def batched_messages(bench: Bench) -> Judgement:
    """One message for each sample, and one for all of an engine."""
    rpc = {"experience/transport": "rpc"}
    single = sent(bench, rpc | {"experience/batch_samples": 1}).busy_s("transfer")
    whole = sent(bench, rpc).busy_s("transfer")
    return Judgement(
        value=f"{single:.1f} s with a call for each sample, {whole:.2f} s with one for each engine",
        verdict="holds" if single > 2 * whole else "partly", numbers={"single_s": single, "batched_s": whole},
        reason="Each call waits for the way there and back, 70 ms between the sites; bytes are few.",
    )  # fmt: skip


def prefetched(bench: Bench) -> Judgement:
    """Samples that leave while the rollout runs, with fifty log-probabilities a token."""
    heavy = {"num_steps": 2, "experience/logprobs": "top_k", "experience/top_k": 50}
    after = bench.play(SITES, heavy | {"experience/prefetch": False})
    beside = bench.play(SITES, heavy | {"experience/prefetch": True})
    shown = [played.busy_s("transfer") for played in (after, beside)]
    return Judgement(
        value=f"a step of {after.step_s:.1f} s with {shown[0]:.1f} s of transfer after the rollout, {beside.step_s:.1f} s where "
        "samples leave as they end",
        verdict="holds" if beside.step_s < after.step_s - 0.5 * shown[0] else "partly",
        numbers={"after_s": after.step_s, "beside_s": beside.step_s, "transfer_s": shown[0]},
        reason="Most samples end long before the last one, so that only the last ones' way shows.",
    )  # fmt: skip


def local_scoring(bench: Bench) -> Judgement:
    """The reward model at the trainers' site, and beside the engines."""
    home = sent(bench)
    pools = bench.scenario(SITES).model_dump(mode="json")["pools"]
    away = sent(
        bench,
        {"pools": pools | {"rollout": "serve[0:12]", "reward": "serve[12:16]"}, "place/actor.generate/0/engines": 12},
    )
    gone = abs(away.busy_s("transfer") - home.busy_s("transfer"))
    return Judgement(
        value=f"samples take {home.busy_s('transfer'):.2f} s with scoring at the trainers' site, {away.busy_s('transfer'):.2f} s "
        "with rewards sent along",
        verdict="partly" if gone < 0.1 * home.step_s else "holds",
        numbers={"home_s": home.busy_s("transfer"), "away_s": away.busy_s("transfer")},
        reason="A reward is four bytes a sample: its way back is nothing. What decides is where there are GPUs for it.",
    )  # fmt: skip


def prescreened(bench: Bench) -> Judgement:
    """A small reward model at the engines that settles half of the samples."""
    plain, screened = sent(bench), sent(bench, {"experience/prescreen": {"share": 0.5, "per_sample": 0.01}})
    saved = plain.busy_s("reward") - screened.busy_s("reward")
    return Judgement(
        value=f"the reward stage takes {screened.busy_s('reward'):.0f} s instead of {plain.busy_s('reward'):.0f} s, the step "
        f"{screened.step_s:.0f} s instead of {plain.step_s:.0f} s",
        verdict="holds" if screened.step_s < 0.97 * plain.step_s else "partly" if saved > 0 else "does not hold",
        numbers={"plain_s": plain.step_s, "screened_s": screened.step_s, "saved_s": saved},
        reason="It halves the work of the large reward model, but every sample still goes to the trainers, and here the "
        "reference takes as long. Whether half can be settled safely is not simulated.",
    )  # fmt: skip


def weights_between_sites(bench: Bench) -> Judgement:
    """All weights, or adapters, over the wide-area link."""
    found = {}
    for name, lora in (("adapters", {"rank": 16}), ("full", None)):
        found[name] = bench.play(SITES, {"num_steps": 2, "models/actor/lora": lora}).busy_s("weight_sync")
    experience = bench.play(SITES, AFTER).busy_s("transfer")
    return Judgement(
        value=f"weights {found['full']:.0f} s in full, {found['adapters']:.1f} s as adapters; samples {experience:.2f} s",
        verdict="does not hold" if found["full"] > experience else "holds", numbers=found | {"experience_s": experience},
        reason="Between sites it is not text and rewards that need the bandwidth, as is said, but the weights of every step.",
    )  # fmt: skip


def event_or_pull(bench: Bench) -> Judgement:
    """Weights that are pushed, looked for every ten and sixty seconds, and fetched upon an event through the store."""
    cases: dict[str, dict[str, Any]] = {
        "push": {"topology": "tree"}, "event": {"trigger": "event", "transport": "store"},
        "pull every 10 s": {"trigger": "pull", "every": 10, "transport": "store"},
        "pull every 60 s": {"trigger": "pull", "every": 60, "transport": "store"},
    }  # fmt: skip
    found = {
        name: bench.play("weight-sync-128", {"weight_sync": said}).busy_s("weight_sync") for name, said in cases.items()
    }
    late = found["pull every 60 s"] - found["event"]
    return Judgement(
        value="; ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items()) + " until the last engine has them",
        verdict="holds" if found["event"] <= found["pull every 10 s"] and late > 0 else "partly", numbers=found,
        reason="An event costs nothing and comes at once; looking every so often adds up to that much until the last of 128 "
        "engines has looked. A push in a tree is as fast as either where all stand on one network.",
    )  # fmt: skip


def zero_copy(bench: Bench) -> Judgement:
    """Samples by rpc, object store and RDMA inside one site."""
    found = {
        how: bench.play("grpo-7b-16gpu", {"experience": {"transport": how}}).busy_s("transfer")
        for how in ("rpc", "object_store", "rdma")
    }
    step = bench.play("grpo-7b-16gpu").step_s
    return Judgement(
        value=", ".join(f"{how} {seconds * 1e3:.1f} ms" for how, seconds in found.items()) + f" of a step of {step:.0f} s",
        verdict="partly" if found["rdma"] < found["rpc"] else "does not hold", numbers=found,
        reason="Without packing and copies it is several times faster, of something that is a ten-thousandth of the step.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "compressed-samples": compressed_samples,
    "sampled-logprobs": sampled_logprobs,
    "batched-messages": batched_messages,
    "prefetch": prefetched,
    "local-scoring": local_scoring,
    "prescreening": prescreened,
    "weights-between-sites": weights_between_sites,
    "event-or-pull": event_or_pull,
    "zero-copy": zero_copy,
}
