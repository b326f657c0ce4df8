"""Timeline -> numbers: step time, stages, accounts of device-seconds, throughput, lag, cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import fmean, median, stdev
from typing import Any

from lab import goodput
from lab.accounts import FAULT, SAMPLE_WAIT, accounts
from lab.goodput import daly
from lab.intervals import Interval, clip, divide, length, without
from lab.timeline import SCHEMA_VERSION, Span, Timeline

PUBLISHES = ("weight_sync", "update_actor", "update_critic")
"""stages whose end publishes a version, and with it ends a step: without engines the update itself"""


def publications(timeline: Timeline) -> list[float]:
    """When each complete step's policy version was published, in order; a step k is complete if all before it are.

    Without a barrier engines take a version when they can: it is published when the trainer has done its part.
    """
    ends: dict[int, float] = {}
    stages = timeline.stages()
    ending = publishing({span.stage for span in stages})
    for span in stages:
        if span.stage == ending and (timeline.header.barrier or ".train[" in span.worker):
            step = span.step // timeline.header.batches
            ends[step] = max(span.end_s, ends.get(step, span.end_s))
    complete: list[float] = []
    while len(complete) in ends:
        complete.append(ends[len(complete)])
    return complete


def publishing(stages: Collection[str]) -> str:
    """The stage that ends a step of a run with these stages."""
    if "rollout" in stages:
        return PUBLISHES[0]
    return next((stage for stage in PUBLISHES if stage in stages), PUBLISHES[0])


def step_times(timeline: Timeline) -> list[float]:
    """Seconds of each complete step: from one publication to the next, the first from time zero."""
    ends = publications(timeline)
    return [end - start for start, end in zip([0.0, *ends], ends, strict=False)]


def steady_window(timeline: Timeline) -> Interval:
    """All complete steps but the first; of a single step, that one."""
    ends = publications(timeline)
    return (ends[0], ends[-1]) if len(ends) > 1 else (0.0, ends[0] if ends else 0.0)


def num_steady(timeline: Timeline) -> int:
    """Steps in the steady window."""
    return max(len(publications(timeline)) - 1, 1)


def at_work(timeline: Timeline) -> list[tuple[Span, list[Interval]]]:
    """Stage spans and the intervals in which they do something: a scorer may wait for its samples in between."""
    waits: dict[str, list[Interval]] = defaultdict(list)
    for span in timeline.spans:
        if span.op == SAMPLE_WAIT:
            waits[span.span_id.split("#")[0]].append((span.start_s, span.end_s))
    return [(span, without((span.start_s, span.end_s), waits.get(span.span_id, ()))) for span in timeline.stages()]


def busy(timeline: Timeline) -> dict[str, list[float]]:
    """By stage, its wall seconds in each steady step in which it runs: the union over its workers."""
    found: dict[str, dict[int, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    last = len(publications(timeline))
    for span, parts in at_work(timeline):
        step = span.step // timeline.header.batches
        if (1 if last > 1 else 0) <= step < last:
            found[span.stage][step] += parts
    return {stage: [length(parts) for parts in steps.values()] for stage, steps in found.items()}


def exposed(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Seconds of a steady step by stage, each instant shared equally by the stages under way, and the gap where none is.

    Together they are the mean steady step time.
    """
    window = steady_window(timeline)
    active: dict[str, list[Interval]] = defaultdict(list)
    for span, parts in at_work(timeline):
        active[span.stage] += parts
    for span in timeline.lost():
        active[FAULT].append((span.start_s, span.end_s))
    shares, gaps = divide(active, window)
    steps = num_steady(timeline)
    return {stage: seconds / steps for stage, seconds in shares.items()}, sum(b - a for a, b in gaps) / steps


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean, relative to it; None for fewer than two values."""
    return stdev(values) / len(values) ** 0.5 / fmean(values) if len(values) > 1 and fmean(values) else None


def summarise(timeline: Timeline) -> dict[str, Any]:
    """The summary of a run; seconds unless said, None where unknown."""
    header, ends = timeline.header, publications(timeline)
    makespan = max((span.end_s for span in timeline.stages()), default=0.0)
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": header.scenario,
        "digest": header.digest,
        "origin": header.origin,
        "seed": header.seed,
        "status": header.status,
        "num_steps": header.num_steps,
        "steps_done": len(ends),
        "run_dir": None,
        "startup_s": header.startup_s,
        "makespan_s": makespan,
        **_steps(timeline),
        "pools": accounts(timeline, makespan),
        **_throughput(timeline, makespan),
        **_goodput(timeline, makespan),
        "storage": timeline.header.storage,
        "lag": _lag(timeline),
        "packing": _packing(timeline),
        "preemptions": _total(timeline, "preemptions"),
        "overhead_share": _overhead(timeline),
        "device_hours": sum(map(len, header.pools.values())) * makespan / 3600,
        "cost": None if header.price_per_hour is None else header.price_per_hour * makespan / 3600,
        "bottleneck": _bottleneck(timeline),
        "memory": header.memory,
        "profiles": header.profiles,
        "data": header.data or None,
        "reward": _reward(timeline),
        "logprob_gap_max": max((row["logprob_gap"] for row in header.learning if "logprob_gap" in row), default=None),
        "wall_s": header.wall_s,
    }


def _steps(timeline: Timeline) -> dict[str, Any]:
    times = step_times(timeline)
    if not times:
        return {"first_step_s": None, "step_s": {"mean": None, "p50": None, "p95": None}, "stages": {}}
    steady = times[1:] or times
    mean, steps = fmean(steady), num_steady(timeline)
    stages = {
        stage: {"busy_s_per_step": sum(seconds) / steps, "share": sum(seconds) / steps / mean if mean else None}
        for stage, seconds in busy(timeline).items()
    }
    p95 = sorted(steady)[min(int(0.95 * len(steady)), len(steady) - 1)]
    return {"first_step_s": times[0], "step_s": {"mean": mean, "p50": median(steady), "p95": p95}, "stages": stages}


def _rollouts(timeline: Timeline) -> list[Span]:
    done = len(publications(timeline))
    steps = done * timeline.header.batches
    return [span for span in timeline.stages() if span.stage == "rollout" and span.step < steps]


def _total(timeline: Timeline, note: str) -> int | None:
    counts = [span.attrs[note] for span in _rollouts(timeline) if note in span.attrs]
    return sum(counts) if counts else None


def _throughput(timeline: Timeline, makespan: float) -> dict[str, Any]:
    """Counts over all complete steps, rates over the makespan."""
    samples = timeline.header.samples
    thrown_away = any(samples.get(fate, 0) for fate in ("dropped", "aborted", "lost"))
    wasted = timeline.header.wasted_tokens if thrown_away else 0
    notes = {"prompt": "prompt_tokens", "response": "response_tokens", "recomputed": "recomputed_tokens"}
    tokens = {kind: _total(timeline, note) for kind, note in notes.items()}
    response, trained = tokens["response"], samples.get("trained")
    return {
        "tokens": tokens | {"wasted": wasted, "lost": timeline.header.lost_tokens},
        "samples": samples,
        "samples_per_s": trained / makespan if trained is not None and makespan else None,
        "response_tokens_per_s": response / makespan if response is not None and makespan else None,
    }


def _goodput(timeline: Timeline, makespan: float) -> dict[str, Any]:
    """How much of the run's time made progress, `lab.goodput.goodput`, and what held it up.

    The checkpoint interval that Daly's formula chooses goes by the seconds for which one holds the run up; it is no less
    than a write takes, for one follows the other.
    """
    header, held = timeline.header, goodput.held(timeline)
    steps = {span.step for span in timeline.stages() if span.stage == "checkpoint"}
    held_s = length(held)
    writes = [span.seconds for span in timeline.spans if (span.stage, span.op) == ("checkpoint", "write")]
    chosen = max(daly(held_s / len(steps), header.mtbf_s), *writes) if steps and writes and header.mtbf_s else None
    return {
        "goodput": goodput.goodput(timeline, makespan) if makespan else None,
        "lost_s": header.lost_s,
        "checkpoint_s": held_s,
        "mtbf_s": header.mtbf_s,
        "young_daly_s": chosen,
        "faults": header.faults,
    }


def _lag(timeline: Timeline) -> dict[str, Any]:
    """Versions between the trainer and the samples it trains on: step k trains version k."""
    if not timeline.header.barrier:
        noted = [span.attrs for span in timeline.stages() if span.stage == "advantage" and "lost" not in span.attrs]
        mean = fmean(note["lag_mean"] for note in noted) if noted else None
        return {"mean": mean, "max": max((note["lag_max"] for note in noted), default=None)}
    lags = [span.step - span.policy_version for span in _rollouts(timeline)]
    return {"mean": fmean(lags) if lags else None, "max": max(lags, default=None)}


def _packing(timeline: Timeline) -> dict[str, float | None]:
    """Means over the updates of all ranks: share of padding among their tokens, and what the most loaded rank of a
    mini-batch has above the mean."""
    noted = [span.attrs for span in timeline.stages() if span.stage in PUBLISHES and "padding" in span.attrs]
    return {name: fmean(note[name] for note in noted) if noted else None for name in ("padding", "imbalance")}


def _overhead(timeline: Timeline) -> float | None:
    """Share of a measured run's steady time outside every op."""
    window = steady_window(timeline)
    ops = [(span.start_s, span.end_s) for span in timeline.spans if span.op]
    if timeline.header.origin != "measured" or not ops or window[1] <= window[0]:
        return None
    return 1 - length(clip(ops, window)) / (window[1] - window[0])


def _bottleneck(timeline: Timeline) -> dict[str, str] | None:
    """The stage with the largest exposed share of the step."""
    if not publications(timeline):
        return None
    shares, gap = exposed(timeline)
    total = sum(shares.values()) + gap
    if not shares or not total:
        return None
    stage = max(shares, key=lambda name: shares[name])
    why = f"{stage} takes {shares[stage] / total:.0%} of the step where nothing hides it ({shares[stage]:.3g} s of {total:.3g} s)"
    return {"stage": stage, "why": why}


def _reward(timeline: Timeline) -> dict[str, float | None]:
    rewards = [row["reward"] for row in timeline.header.learning if "reward" in row]
    return {"first": rewards[0] if rewards else None, "last": rewards[-1] if rewards else None}


def about_samples(summary: dict[str, Any]) -> list[str]:
    """How old what was trained on was, and what became of the samples that were not; nothing where all were trained."""
    lag, fates, lines = summary["lag"], summary["samples"], list[str]()
    if lag["max"]:
        lines.append(f"lag: samples were {lag['mean']:.2f} versions old when trained, at most {lag['max']}")
    named = {"dropped": "dropped", "aborted": "aborted", "lost": "lost", "buffered": "left in the buffer",
             "in_flight": "left on the way"}  # fmt: skip
    if others := [f"{fates[fate]:,} {said}" for fate, said in named.items() if fates.get(fate)]:
        issued, trained = fates.get("issued", 0), fates.get("trained", 0)
        lines.append(f"samples: {issued:,} issued, {trained:,} trained, {', '.join(others)}")
    return lines
