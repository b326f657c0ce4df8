"""Claims about work without a barrier: engines that never wait, samples that are too old, and tails that hold up a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.studies.claims import Bench, Judgement, Played

BASE = "grpo-7b-16gpu"
LONG: dict[str, Any] = {
    "num_steps": 8, "workload/prompts_per_step": 128, "rollout/max_num_seqs": 48,
    "workload/response_tokens": {"dist": "lognormal", "mean": 700, "p95": 2600, "max": 6000},
}  # fmt: skip
"""rollout and training take about equally long, and responses have a tail"""


def mode(bench: Bench, name: str, staleness: Mapping[str, Any] | None = None) -> Played:
    said = LONG | {"schedule/mode": name}
    return bench.play(BASE, said if staleness is None else said | {"schedule/staleness": staleness})


def global_barrier(bench: Bench) -> Judgement:
    """The step with a barrier before every update, one version off, and without any barrier."""
    plays = {name: mode(bench, name) for name in ("synchronous", "one_step_off", "asynchronous")}
    found = {name: played.step_s for name, played in plays.items()}
    gain = found["synchronous"] / found["asynchronous"]
    lag = plays["asynchronous"].summary["lag"]["max"]
    return Judgement(
        value=f"{found['synchronous']:.0f} s a step with a global barrier (lag 0), {found['one_step_off']:.0f} s one step off, "
        f"{found['asynchronous']:.0f} s without a barrier (lag up to {lag:g})",
        verdict="partly" if gain > 1.1 else "holds", numbers=found | {"lag": float(lag)},
        reason="The barrier does keep every sample on the version that is trained. It costs the time of the shorter of "
        "generation and training, and the tail of the longest responses; a bound of one version keeps most of both.",
    )  # fmt: skip


def drop_stale(bench: Bench) -> Judgement:
    """Samples of an older version dropped, against a bound at which engines wait."""
    drop = mode(bench, "asynchronous", {"bound": 0, "at_bound": "drop"})
    block = mode(bench, "asynchronous", {"bound": 0, "at_bound": "block"})
    waste = drop.summary["tokens"]["wasted"] / drop.summary["tokens"]["response"]
    return Judgement(
        value=f"{drop.summary['samples']['dropped']:,} of {drop.summary['samples']['issued']:,} samples dropped, {waste:.0%} of "
        f"tokens; {drop.step_s:.0f} s a step, {block.step_s:.0f} s where engines wait instead",
        verdict="partly", numbers={"waste": waste, "drop_s": drop.step_s, "block_s": block.step_s,
                                   "lag": float(drop.summary["lag"]["max"])},
        reason="Checking the version on entry keeps the lag at its bound. But whatever was generated meanwhile is thrown "
        "away: with strict equality engines work for nothing during every update. A bound of one or more versions, with "
        "the ratio of probabilities corrected, throws away little.",
    )  # fmt: skip


def double_buffer(bench: Bench) -> Judgement:
    """Generation into a second page while the first is trained on."""
    one, two = mode(bench, "asynchronous", {"bound": 0}), mode(bench, "asynchronous", {"bound": 1})
    gain = one.step_s / two.step_s
    return Judgement(
        value=f"{two.step_s:.0f} s a step with a page that fills while another is trained, {one.step_s:.0f} s with one "
        f"({gain:.2f}×)",
        verdict="holds" if gain > 1.15 else "partly" if gain > 1.02 else "does not hold",
        numbers={"one_s": one.step_s, "two_s": two.step_s},
        reason="What fills while the other page is trained is one version old when its turn comes; two pages do not give "
        "both seamless work and the same version.",
    )  # fmt: skip


def work_stealing(bench: Bench) -> Judgement:
    """Engines that ran dry take waiting samples from others: under a heavy tail, and where one engine is slower."""
    base = {
        "rollout/max_num_seqs": 8,
        "workload/prompts_per_step": 512,
        "num_steps": 2,
        "workload/response_tokens/max": 4096,
    }
    slow = {"faults": [{"kind": "straggler", "at": 0, "target": "actor.generate[0]", "factor": 0.5}]}
    found: dict[str, float] = {}
    for name, said in (("tail", base), ("straggler", base | slow)):
        times = [
            bench.play("heavy-tail", said | {"rollout/stealing": steals}).busy_s("rollout") for steals in (False, True)
        ]
        found |= {f"{name}_plain_s": times[0], f"{name}_stealing_s": times[1]}
    gain = found["tail_plain_s"] / found["tail_stealing_s"]
    other = found["straggler_plain_s"] / found["straggler_stealing_s"]
    return Judgement(
        value=f"{found['tail_plain_s']:.0f} s → {found['tail_stealing_s']:.0f} s ({gain:.2f}×) under a heavy tail; "
        f"{found['straggler_plain_s']:.0f} s → {found['straggler_stealing_s']:.0f} s ({other:.2f}×) with an engine of half speed",
        verdict="holds" if gain > 1.15 else "partly" if max(gain, other) > 1.02 else "does not hold", numbers=found,
        reason="Only waiting samples can be taken. It evens out queues, most of all beside a slow engine; the last long "
        "response that already runs is where it is, and with few samples a slot that is what a step waits for.",
    )  # fmt: skip


def over_issue(bench: Bench) -> Judgement:
    """A quarter more prompts than are needed, the slowest stopped."""
    plain = bench.play("heavy-tail", {"num_steps": 2})
    more = bench.play("heavy-tail", {"num_steps": 2, "rollout/over_issue": 0.25})
    wasted = more.summary["tokens"]["wasted"]
    share = wasted / (wasted + more.summary["tokens"]["response"])
    lengths = [one.summary["tokens"]["response"] / one.summary["samples"]["trained"] for one in (plain, more)]
    return Judgement(
        value=f"rollout {more.busy_s('rollout'):.0f} s instead of {plain.busy_s('rollout'):.0f} s, {share:.0%} of tokens wasted; "
        f"trained responses have {lengths[1]:.0f} tokens on average instead of {lengths[0]:.0f}",
        verdict="partly", numbers={"plain_s": plain.busy_s("rollout"), "more_s": more.busy_s("rollout"), "wasted": share,
                                   "length": lengths[1], "plain_length": lengths[0]},
        reason="It cuts the tail, and with it the long responses: what is trained on is no fair sample of the policy's.",
    )  # fmt: skip


def back_pressure(bench: Bench) -> Judgement:
    """A buffer that fills faster than it is emptied: how full it gets, and what pausing engines costs."""
    fast = {
        "num_steps": 6,
        "schedule/mode": "asynchronous",
        "schedule/staleness": {"bound": 8},
        "weight_sync/in_flight": "mix",
    }
    plays = {"free": bench.play(BASE, fast)}
    for places in (8192, 4096):
        plays[str(places)] = bench.play(BASE, fast | {"buffer/capacity_samples": places})
    left = {name: float(one.summary["samples"]["buffered"]) for name, one in plays.items()}
    times = {name: one.step_s for name, one in plays.items()}
    return Judgement(
        value="; ".join(
            f"{'ample' if name == 'free' else f'{int(name):,} places'}: {left[name]:,.0f} samples left, "
            f"{times[name]:.0f} s a step, lag up to {plays[name].summary['lag']['max']:g}" for name in plays
        ),
        verdict="holds" if left["8192"] < left["free"] and times["8192"] < 1.03 * times["free"] else "partly",
        numbers={f"{name}_left": left[name] for name in plays} | {f"{name}_s": times[name] for name in plays},
        reason="Engines that are faster than the trainer can only make samples wait and age; pausing them costs nothing as long "
        "as the low watermark leaves the trainer a batch.",
    )  # fmt: skip


def drained(bench: Bench) -> Judgement:
    """Engines that end what runs before they take new weights, against samples that go on under the new ones."""
    busy = {
        "num_steps": 6,
        "schedule/mode": "asynchronous",
        "schedule/staleness": {"bound": 8},
        "buffer/capacity_samples": 4096,
    }
    plays = {how: bench.play(BASE, busy | {"weight_sync/in_flight": how}) for how in ("drain", "mix")}
    syncs = {how: one.busy_s("weight_sync") for how, one in plays.items()}
    return Judgement(
        value=f"a sync takes {syncs['drain']:.0f} s where running samples end first, {syncs['mix']:.1f} s where they go on; "
        f"{plays['drain'].step_s:.0f} s and {plays['mix'].step_s:.0f} s a step",
        verdict="partly", numbers={f"{how}_s": syncs[how] for how in syncs} | {f"{how}_step_s": plays[how].step_s for how in plays},
        reason="It keeps every sample on one version, as is said, but each sync then waits for the longest running response "
        "of all engines, and engines empty meanwhile.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "global-barrier": global_barrier,
    "drop-stale": drop_stale,
    "double-buffer": double_buffer,
    "work-stealing": work_stealing,
    "over-issue": over_issue,
    "back-pressure": back_pressure,
    "drain-before-pull": drained,
}
