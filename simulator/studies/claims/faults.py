"""Claims about what fails: checkpoints, preemption, lost workers, and how much work goes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lab.goodput import daly, expected_seconds
from simulator.studies.claims import Bench, Judgement, Played

BASE = "faults-16gpu"
QUIET: dict[str, Any] = {"faults": [], "checkpoint/blocking": True}
TRAINER = {"kind": "trainer_lost", "at": 330, "target": "actor.train[0]"}
SLOW = {"cluster/sites/0/storage": {"write": 90e6, "read": 1e9}}
"""storage to which a checkpoint of 107 GB takes about twenty minutes"""


def played(bench: Bench, changes: Mapping[str, Any]) -> Played:
    return bench.play(BASE, QUIET | dict(changes))


def makespan(one: Played) -> float:
    return float(one.summary["makespan_s"])


def write_seconds(one: Played) -> float:
    """Of the first checkpoint, which its slowest rank ends."""
    spans = [span for span in one.timeline.stages() if span.stage == "checkpoint"]
    first = min(span.step for span in spans)
    return max(span.end_s for span in spans if span.step == first) - min(
        span.start_s for span in spans if span.step == first
    )


def every_step(bench: Bench) -> Judgement:
    """A checkpoint of weights and optimizer after every step: held up for it, and written beside the next step."""
    none = makespan(played(bench, {"checkpoint/every_steps": None}))
    held = makespan(played(bench, {"checkpoint/every_steps": 1})) / none - 1
    beside = makespan(played(bench, {"checkpoint/every_steps": 1, "checkpoint/blocking": False})) / none - 1
    slow = makespan(played(bench, SLOW | {"checkpoint/every_steps": 1})) / none
    return Judgement(
        value=f"{held:.0%} longer where trainers wait for a parallel file system, {beside:.1%} where the copy is written beside "
        f"the next step; {slow:.0f}× as long at 90 MB/s",
        verdict="holds" if held < 0.05 else "partly", numbers={"blocking": held, "beside": beside, "slow": slow},
        reason="With storage of 15 GB/s and steps of minutes it is affordable, as the next rollout hides most of it, and "
        "nearly free when it is asynchronous; with "
        "slow storage it is out of the question.",
    )  # fmt: skip


def preempt_any_time(bench: Bench) -> Judgement:
    """A machine of trainers is taken away with two minutes' notice, with fast and with slow checkpoints."""
    said = {"checkpoint/every_steps": 4, "faults": [
        {"kind": "preempted", "at": 330, "duration": 60, "notice": 120, "target": "train/0"}]}  # fmt: skip
    fast = played(bench, said)
    late = {"kind": "preempted", "at": 330, "duration": 60, "notice": 120, "target": "train/0"}
    slow = played(bench, said | SLOW | {"faults": [late]})
    seconds = write_seconds(played(bench, SLOW | {"checkpoint/every_steps": 4}))
    lost = [one.summary["samples"]["lost"] for one in (fast, slow)]
    work = 24 * 3600.0
    hour = daly(seconds, 3600.0)
    ratio = work / expected_seconds(work, hour, seconds, 3600.0, 120.0)
    return Judgement(
        value=f"{lost[0]:,} samples lost where a checkpoint takes seconds, {lost[1]:,} where it takes {seconds / 60:.0f} min; "
        f"preempted once an hour, {ratio:.0%} of the time would be progress at best",
        verdict="holds" if lost[1] > lost[0] and ratio < 0.5 else "partly",
        numbers={"fast_lost": float(lost[0]), "slow_lost": float(lost[1]), "write_s": seconds, "goodput": ratio},
        reason="A notice of two minutes is enough for a checkpoint of seconds, not for one of twenty minutes; without it all "
        "work since the last one is done again, and the interval that Daly gives is itself most of an hour.",
    )  # fmt: skip


def frequent_checkpoints(bench: Bench) -> Judgement:
    """Loss of a trainer with checkpoints after every, every second and every fourth step, on an NFS server."""
    store = {"cluster/sites/0/storage": {"tier": "nfs"}}
    base = makespan(played(bench, store | {"checkpoint/every_steps": None}))
    found = {}
    for number in (1, 2, 4):
        said = store | {"checkpoint/every_steps": number}
        quiet = played(bench, said)
        # The fault comes shortly before the eighth step ends, so that every interval has its own last checkpoint.
        late = max(span.end_s for span in quiet.timeline.stages() if span.stage == "update_actor") - 5
        lost = played(bench, said | {"faults": [TRAINER | {"at": late}]})
        found[f"{number}_pause_s"] = makespan(quiet) - base
        found[f"{number}_redo_s"] = makespan(lost) - makespan(quiet)
    told = (
        f"every {n}: {found[f'{n}_redo_s']:.0f} s lost to a fault, {found[f'{n}_pause_s']:.0f} s of pauses"
        for n in (1, 2, 4)
    )
    falls, rises = found["1_pause_s"] > found["4_pause_s"], found["1_redo_s"] < found["4_redo_s"]
    return Judgement(
        value="; ".join(told), verdict="holds" if falls and rises else "partly", numbers=found,
        reason="Both as is said; the interval that balances them follows from the time of a write and the mean time between "
        "failures (Young, Daly).",
    )  # fmt: skip


def stateless_workers(bench: Bench) -> Judgement:
    """An engine is lost in mid-rollout and the others take over its samples."""
    quiet = makespan(played(bench, {"num_steps": 4}))
    fault = {"kind": "worker_lost", "at": 60, "target": "actor.generate[0]"}
    found = {}
    for way in ("reassign", "restart"):
        one = played(bench, {"num_steps": 4, "faults": [fault | {"recovery": way}]})
        found[f"{way}_s"], found[f"{way}_lost"] = makespan(one) - quiet, float(one.summary["samples"]["lost"])
    return Judgement(
        value=f"{found['reassign_lost']:.0f} samples start again elsewhere, {found['reassign_s']:.0f} s lost; waiting for the "
        f"engine to come back {found['restart_s']:.0f} s",
        verdict="holds" if found["reassign_s"] < found["restart_s"] else "partly", numbers=found,
        reason="Nothing but running samples is lost. In a synchronous step most of the time goes into noticing, half a minute "
        "of missed heartbeats; an asynchronous trainer would hardly see it.",
    )  # fmt: skip


def redundant_workers(bench: Bench) -> Judgement:
    """A ninth engine: idle until one is lost, or working from the start, against none."""
    nine = {"cluster/sites/0/nodes/0/devices": 9, "pools/rollout": "serve[0:9]", "place/actor.generate/0/engines": 9}
    fault = {"kind": "worker_lost", "at": 60, "target": "actor.generate[0]"}
    cases: dict[str, dict[str, Any]] = {
        "eight": {"faults": [fault | {"recovery": "restart"}]},
        "spare": nine | {"faults": [fault | {"recovery": "redundant", "spare": "actor.generate[8]"}]},
        "nine": nine | {"faults": [fault | {"recovery": "reassign"}]},
    }
    quiet = makespan(played(bench, {"num_steps": 4}))
    found = {name: makespan(played(bench, {"num_steps": 4} | said)) - quiet for name, said in cases.items()}
    return Judgement(
        value=f"a lost engine costs {found['eight']:.0f} s without a spare, {found['spare']:.0f} s with one that stood idle, "
        f"{found['nine']:.0f} s where the ninth worked from the start",
        verdict="holds" if min(found["spare"], found["nine"]) < 0.7 * found["eight"] else "partly", numbers=found,
        reason="A spare takes over at once when the loss is noticed. Letting it work from the start is at least as good, as "
        "any engine can take over any sample: redundancy need not stand idle.",
    )  # fmt: skip


def straggler(bench: Bench) -> Judgement:
    """One engine of eight at half its speed."""
    quiet = played(bench, {"num_steps": 3}).busy_s("rollout")
    slow = {"kind": "straggler", "at": 0, "target": "actor.generate[0]", "factor": 0.5}
    plain = played(bench, {"num_steps": 3, "faults": [slow]}).busy_s("rollout")
    return Judgement(
        value=f"rollout {plain:.0f} s instead of {quiet:.0f} s: {plain / quiet:.2f}×",
        verdict="holds" if plain > 1.5 * quiet else "partly", numbers={"quiet_s": quiet, "slow_s": plain},
        reason="One slow engine of eight costs as much as if all were slow: with a barrier the whole step waits for it.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "checkpoint-every-step": every_step,
    "preempt-any-time": preempt_any_time,
    "frequent-checkpoints": frequent_checkpoints,
    "stateless-workers": stateless_workers,
    "redundant-workers": redundant_workers,
    "straggler": straggler,
}
