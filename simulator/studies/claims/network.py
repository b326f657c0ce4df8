"""Claims about what travels: gradients, weights, experience and scores, and what makes them travel faster."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import yaml

from simulator.studies.claims import Bench, Judgement, Played, size

SPREAD = {"cluster/sites/0/nodes/1/count": 2, "pools/train": "train[0:16]", "place/actor.train/data_parallel": 16,
          "place/actor.train/zero_stage": 2, "num_steps": 2}  # fmt: skip
"""of grpo-7b-16gpu: sixteen ranks on two machines, so that gradients cross the fabric"""
ID, SCALAR = 4.0, 4.0
"""bytes of a token id, and of a log-probability or score"""


def traffic(bench: Bench) -> dict[str, float]:
    """Bytes of one step that leave or reach a device: gradients (ring), weights, experience, calls to the scorers."""
    played = bench.play("grpo-7b-16gpu", SPREAD | {"experience": {"transport": "rdma"}})
    ranks = len(played.scenario.team("actor", "train"))
    reduced = sum(span.bytes for span in played.timeline.spans if span.op == "grad_sync" and span.step == 1)
    synced = [span.bytes for span in played.timeline.spans if span.op == "transfer" and span.step == 1]
    engines = len(played.scenario.team("actor", "generate"))
    return {
        "gradients": reduced * 2 * (ranks - 1) / ranks,
        "weights": max(synced) * engines,
        "experience": sum(span.bytes for span in played.timeline.spans if span.op == "send" and span.step == 1),
        "scoring": _tokens(played) * (ID + SCALAR),
    }


def _tokens(played: Played) -> float:
    return float(
        sum(span.tokens for span in played.timeline.stages() if span.stage == "update_actor" and span.step == 1)
    )


def gradient_size(bench: Bench) -> Judgement:
    """Bytes of the gradients of a 7B model."""
    played = bench.play("grpo-7b-16gpu", SPREAD)
    (each,) = {span.bytes for span in played.timeline.spans if span.op == "grad_sync"}
    spec = played.scenario.spec("actor")
    return Judgement(
        value=f"{size(each)} for {spec.parameters / 1e9:.2f} billion parameters",
        verdict="holds" if 13e9 <= each <= 16e9 else "does not hold", numbers={"bytes": each},
        reason="Two bytes a parameter in bfloat16. A ring all-reduce moves it twice through every rank.",
    )  # fmt: skip


def heaviest_traffic(bench: Bench) -> Judgement:
    """The four kinds of traffic in bytes and in time, on two machines of trainers."""
    found = traffic(bench)
    order = sorted(found, key=lambda kind: -found[kind])
    claimed = ["gradients", "weights", "experience", "scoring"]
    told = ", ".join(f"{kind} {size(found[kind])}" for kind in order)
    return Judgement(
        value=f"{told} a step",
        verdict="holds" if order == claimed else "partly" if order[0] == "gradients" else "does not hold", numbers=found,
        reason="Gradients go round once for every mini-batch and every rank, weights once a step to every engine, experience "
        "is a few bytes a token. With one mini-batch a step and many engines, weights overtake gradients.",
    )  # fmt: skip


def gradient_bottleneck(bench: Bench) -> Judgement:
    """Share of a training stage that waits for gradients: on one machine, on two, and on two with slow links."""
    cases: dict[str, dict[str, Any]] = {
        "one machine": {"num_steps": 2, "place/actor.train/zero_stage": 2},
        "two machines": SPREAD,
        "two machines, 25 Gbit/s": SPREAD | {"cluster/sites/0/fabric/link": "ethernet-25"},
        "two machines, 25 Gbit/s, small mini-batches": SPREAD
        | {"cluster/sites/0/fabric/link": "ethernet-25", "update/minibatch_samples": 128},
    }
    found = {}
    for name, said in cases.items():
        played = bench.play("grpo-7b-16gpu", said)
        waited = sum(span.seconds for span in played.timeline.spans if span.op == "grad_sync" and span.step == 1)
        ranks = len(played.scenario.team("actor", "train"))
        found[name] = waited / ranks / played.busy_s("update_actor")
    worst = max(found.values())
    return Judgement(
        value="; ".join(f"{name}: {share:.1%}" for name, share in found.items()) + " of training",
        verdict="holds" if found["two machines"] > 0.2 else "partly" if worst > 0.2 else "does not hold", numbers=found,
        reason="Most of an all-reduce hides behind the backward pass, and mini-batches of hundreds of long samples compute "
        "for long. With NVLink and InfiniBand gradients are no bottleneck; with slow links and small mini-batches they are.",
    )  # fmt: skip


def long_experience(bench: Bench) -> Judgement:
    """From which length on the experience of 8,192 samples takes a hundredth of a step on the fabric."""
    rollout = {"workload/prompts_per_step": 1024, "num_steps": 1, "update/microbatch_tokens": 16384}
    found: dict[str, float] = {}
    for name, length, logprobs in (("512", 512, "sampled"), ("4096", 4096, "sampled"), ("all logits", 4096, "full")):
        said = rollout | {"workload/response_tokens": {"dist": "fixed", "value": length}}
        said |= {"experience": {"transport": "rdma", "logprobs": logprobs}}
        played = bench.play("grpo-7b-16gpu", SPREAD | said)
        found[f"{name}_s"], found[f"{name}_share"] = (
            played.busy_s("transfer"),
            played.busy_s("transfer") / played.step_s,
        )
    rest = 0.01 / found["4096_share"]
    return Judgement(
        value=f"8,192 samples of 512 tokens take {found['512_s']:.3f} s, of 4,096 tokens {found['4096_s']:.2f} s, "
        f"{found['4096_share']:.3%} of their step, and with the "
        f"log-probabilities of the whole vocabulary {found['all logits_s']:,.0f} s",
        verdict="does not hold" if found["4096_share"] < 0.01 else "holds", numbers=found | {"times_to_a_hundredth": rest},
        reason="Both the samples and the step grow with the length, so that their share stays: even very large batches of long "
        "samples are nothing to a fabric of 200 Gbit/s. It is the distribution over the vocabulary that must not be sent, or "
        "a slow link between sites, that makes it count.",
    )  # fmt: skip


def scoring_traffic(bench: Bench) -> Judgement:
    """What goes to reference and reward model and comes back, beside the gradients."""
    found = traffic(bench)
    share = found["scoring"] / sum(found.values())
    return Judgement(
        value=f"{found['scoring'] / 1e6:,.0f} MB a step, {share:.4%} of all traffic",
        verdict="holds" if share < 0.001 else "does not hold", numbers={"bytes": found["scoring"], "share": share},
        reason="Ids go there, a number a token or a sample comes back.",
    )  # fmt: skip


def broadcast_storm(bench: Bench) -> Judgement:
    """Weights to 128 engines: from the trainer to each, in a tree, in a chain."""
    found = {
        how: bench.play("weight-sync-128", {"weight_sync/topology": how}).busy_s("weight_sync")
        for how in ("flat", "tree", "chain")
    }
    rest = bench.play("weight-sync-128").step_s - found["tree"]
    return Judgement(
        value=f"{found['flat']:.0f} s from the trainer to each of 128 engines, {found['tree']:.1f} s in a tree, "
        f"{found['chain']:.1f} s in a chain; the rest of the step takes {rest:.0f} s",
        verdict="holds" if found["flat"] > 0.1 * 600 and found["tree"] < 0.1 * found["flat"] else "partly", numbers=found,
        reason="All of it leaves through one machine's port when nobody passes it on: every ten minutes that would be a "
        "sixth of the time. Engines that pass it on end the storm with full weights too.",
    )  # fmt: skip


def adapters_only(bench: Bench) -> Judgement:
    """Weights to 128 engines, all of them or adapters alone, in the worst topology."""
    flat = {"weight_sync/topology": "flat"}
    full = bench.play("weight-sync-128", flat)
    lora = bench.play("weight-sync-128", flat | {"models/actor/lora": {"rank": 16}})
    size = {name: _synced(played) for name, played in (("full", full), ("adapters", lora))}
    found = {"full_s": full.busy_s("weight_sync"), "adapters_s": lora.busy_s("weight_sync")}
    return Judgement(
        value=f"{size['adapters'] / 1e6:.0f} MB instead of {size['full'] / 1e9:.1f} GB, {found['adapters_s']:.1f} s instead "
        f"of {found['full_s']:.0f} s",
        verdict="holds" if found["adapters_s"] < 0.02 * found["full_s"] else "partly",
        numbers=found | {f"{name}_bytes": bytes for name, bytes in size.items()},
        reason="Adapters of rank 16 are half a percent of the weights; what remains is a latency for each of their tensors. "
        "It presupposes that adapters are what is trained.",
    )  # fmt: skip


def _synced(played: Played) -> float:
    return max(span.bytes for span in played.timeline.spans if span.stage == "weight_sync" and span.op == "transfer")


def rdma_or_tcp(bench: Bench) -> Judgement:
    """The same cards with RDMA and with TCP: weights and gradients."""
    found: dict[str, float] = {}
    for name, wire in (("rdma", "ib-hdr200"), ("tcp", "ib-hdr200-tcp"), ("ethernet_25", "ethernet-25")):
        played = bench.play("grpo-7b-16gpu", SPREAD | {"cluster/sites/0/fabric/link": wire})
        found |= {f"{name}_sync_s": played.busy_s("weight_sync"), f"{name}_step_s": played.step_s}
    gain = found["tcp_sync_s"] / found["rdma_sync_s"]
    return Judgement(
        value=f"weights {found['rdma_sync_s']:.2f} s with RDMA, {found['tcp_sync_s']:.2f} s with TCP on the same cards "
        f"({gain:.1f}×), {found['ethernet_25_sync_s']:.1f} s on 25 Gbit/s; the step {found['rdma_step_s']:.0f}, "
        f"{found['tcp_step_s']:.0f} and {found['ethernet_25_step_s']:.0f} s",
        verdict="holds" if gain > 1.3 else "partly" if gain > 1.05 else "does not hold", numbers=found,
        reason="TCP reaches about half of what the card does. Whether it matters depends on how much of it is hidden: of a "
        "step of minutes, a second of weights is little, gradients between machines are more.",
    )  # fmt: skip


def compressed_ids(bench: Bench) -> Judgement:
    """Zstandard and LZ4 on real token ids, as measured once."""
    table = compression()
    saved = {(row["samples"], row["ids"], row["codec"]): row["saved"] for row in table["rows"]}
    one, many = saved[1, "int32", "zstd-3"], saved[1024, "int32", "zstd-3"]
    wide, lz4 = saved[64, "int64", "zstd-3"], saved[64, "int32", "lz4"]
    packed = saved[64, "uint16", "zstd-3"]
    return Judgement(
        value=f"Zstandard saves {one:.0%} of a single sample's 32-bit ids, {saved[64, 'int32', 'zstd-3']:.0%} of a batch of "
        f"64, {many:.0%} of 1,024; of 64-bit ids {wide:.0%}; LZ4 {lz4:.0%}",
        verdict="holds" if one >= 0.8 else "partly" if max(many, wide) >= 0.8 else "does not hold",
        numbers={"one": one, "many": many, "int64": wide, "lz4": lz4, "uint16": packed},
        reason=f"An id carries about {table['entropy_bits_per_token']:.0f} bits, so that 80 % is reached where ids are stored "
        f"in 64 bits, or in large batches that repeat themselves; ids packed into 16 bits leave {packed:.0%} to save. Most of "
        f"what is saved is padding of the number format. Measured on {table['tokens'] / 1e6:.1f} million tokens.",
    )  # fmt: skip


def compression() -> dict[str, Any]:
    """The measured table of `lab/library/token_compression.yaml`."""
    text = (resources.files("lab.library") / "token_compression.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "gradient-size": gradient_size,
    "heaviest-traffic": heaviest_traffic,
    "gradient-bottleneck": gradient_bottleneck,
    "long-experience": long_experience,
    "scoring-traffic": scoring_traffic,
    "broadcast-storm": broadcast_storm,
    "adapters-only": adapters_only,
    "rdma-or-tcp": rdma_or_tcp,
    "compressed-ids": compressed_ids,
}
