"""Real workers that are killed or hang in the middle of a run: it finishes, and every sample and step is accounted for."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from benchmarks.kills import state
from executor import checkpoint, injecting, processes
from executor.fault_limits import limits
from executor.heartbeat import Pulse
from executor.loss import Loss
from executor.recovery import Recovery
from executor.run import execute
from lab import runs
from lab.dataflow import conforms
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

Make = Callable[..., Scenario]
REFERENCE, TRAINER, ENGINE = "reference.score[0]", "actor.train[0]", "actor.generate[1]"


def played(chosen: Scenario, folder: Path) -> Timeline:
    """A run that is done, lawful, and has trained every sample of every step once."""
    timeline = execute(chosen, folder)
    header, dataflow = timeline.header, build(chosen)
    assert header.status == "done", header.error
    assert conforms(dataflow, timeline) == []
    counts = dict(header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    assert [row["step"] for row in header.learning] == list(range(chosen.num_steps))
    updates = [span for span in timeline.stages() if span.stage == "update_actor" and not span.lost]
    teams = len(dataflow.nodes["update_actor"].workers)
    assert len({(span.step, span.worker) for span in updates}) == len(updates) == chosen.num_steps * teams
    ids = [span.span_id for span in timeline.spans]
    assert len(set(ids)) == len(ids)
    assert not [path for path in folder.rglob("*") if ".part" in path.name]
    assert processes.read(folder) == {}
    return timeline


def at(folder: Path, step: int, act: Callable[[], Any]) -> threading.Thread:
    """Does something once so many steps of a run are finished."""

    def wait() -> None:
        end = time.monotonic() + 300
        while len(runs.finished_rows(folder)) < step and time.monotonic() < end:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.real
def test_a_run_goes_back_to_its_checkpoint_when_a_trainer_is_lost(
    local_ray: None, scenario: Make, tmp_path: Path
) -> None:
    """Stated as a chance that never comes true: it is this test that kills, at a step."""
    fault = {"kind": "trainer_lost", "mtbf": 1e9, "detect": 1.0}
    chosen = scenario("sft-learns", num_steps=8, checkpoint={"every_steps": 2}, evaluate={"every_steps": None})
    chosen = chosen.replace({"faults": [fault]})
    at(tmp_path, 3, lambda: os.kill(processes.read(tmp_path)[TRAINER], signal.SIGKILL))
    timeline = played(chosen, tmp_path)
    (fault,) = timeline.header.faults
    assert (fault["kind"], fault["target"], fault["recovery"]) == ("trainer_lost", TRAINER, "restart_from_checkpoint")
    assert fault["step"] in (2, 4)
    assert fault["steps"] <= 2 and fault["from_s"] < fault["at_s"] + 1e-9 < fault["until_s"]
    assert timeline.header.lost_s == pytest.approx(fault["until_s"] - fault["from_s"])
    (restored,) = [span for span in timeline.stages() if span.stage == "restore"]
    assert restored.start_s >= fault["at_s"] - 1e-9
    assert restored.seconds > 1.0
    assert checkpoint.steps(tmp_path / "checkpoints") == [1, 3, 5, 7]


FAULTS: list[dict[str, Any]] = [
    {"kind": "worker_lost", "mtbf": 1e9, "recovery": "reassign", "detect": 1.0},
    {"kind": "scorer_lost", "mtbf": 1e9, "detect": 1.0},
    {"kind": "trainer_lost", "mtbf": 1e9, "detect": 1.0},
]


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_every_kind_of_worker_is_lost_once(
    local_ray: None, scenario: Make, tmp_path: Path, number: int, mode: str
) -> None:
    """And what was trained is to the bit what a run trains in which nothing fails."""
    changes = {"num_steps": 16, "checkpoint": {"every_steps": 3}, "schedule": {"mode": mode}}
    chosen = scenario("grpo-two-engines", **changes)
    folders = [tmp_path / "calm", tmp_path / "struck"]
    for folder in folders:
        folder.mkdir()
    played(chosen, folders[0])
    strikes = {2: ENGINE, 7: REFERENCE, 12: TRAINER}
    for step, name in strikes.items():
        at(folders[1], step, lambda name=name: os.kill(processes.read(folders[1])[name], number))  # type: ignore[misc]
    timeline = played(chosen.replace({"faults": FAULTS}), folders[1])
    assert [fault["target"] for fault in timeline.header.faults] == list(strikes.values())
    assert {span.worker for span in timeline.stages() if span.stage == "restore"} == set(chosen.workers)
    assert state(folders[0]) == state(folders[1])


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("recovery", ["restart", "reassign", "redundant"])
def test_an_engine_dies_in_the_middle_of_its_samples(
    local_ray: None, scenario: Make, tmp_path: Path, recovery: str
) -> None:
    """What it had finished stays; the rest is generated by whom the scenario names."""
    fault = {"kind": "worker_lost", "mtbf": 1e9, "target": ENGINE, "recovery": recovery, "detect": 0.6}
    spare = {"spare": "actor.generate[2]"} if recovery == "redundant" else {}
    engines = {"place": {"actor.generate": [{"pool": "all", "engines": 3 if spare else 2, "threads": 1}]}}
    longer = {"workload": {"response_tokens": {"dist": "lognormal", "mean": 120, "p95": 200, "max": 300}}}
    chosen = scenario("grpo-two-engines", num_steps=5, **engines, **longer).replace({"faults": [fault | spare]})

    def strike() -> None:
        time.sleep(0.6)  # into the next rollout
        os.kill(processes.read(tmp_path)[ENGINE], signal.SIGKILL)

    at(tmp_path, 2, strike)
    timeline = played(chosen, tmp_path)
    (found,) = timeline.header.faults
    (cut,) = [span for span in timeline.stages() if span.attrs.get("lost_samples")]
    assert cut.worker == ENGINE and cut.attrs["lost_samples"] == found["lost_samples"] > 0
    assert timeline.header.samples["lost"] == found["lost_samples"]
    takers = {span.worker for span in timeline.stages() if span.step == cut.step and span.span_id.endswith("~2")}
    takers |= {span.worker for span in timeline.stages() if span.step == cut.step and span.stage == "rollout"} - {
        "actor.generate[0]",
        ENGINE,
    }
    wanted = {"restart": ENGINE, "reassign": "actor.generate[0]", "redundant": "actor.generate[2]"}[recovery]
    assert takers == {wanted}


@pytest.mark.real
@pytest.mark.full
def test_an_engine_that_comes_back_to_nobody_has_the_weights_of_now(
    local_ray: None, scenario: Make, tmp_path: Path
) -> None:
    """It started with the weights of then; who has been given others since is gone, too."""
    chosen = scenario("grpo-two-engines", num_steps=10, checkpoint={"every_steps": 5})
    folders = [tmp_path / "calm", tmp_path / "struck"]
    for folder in folders:
        folder.mkdir()
    played(chosen, folders[0])
    other = "actor.generate[0]"
    for step, name in {2: ENGINE, 5: other}.items():
        at(folders[1], step, lambda name=name: os.kill(processes.read(folders[1])[name], signal.SIGKILL))  # type: ignore[misc]
    timeline = played(chosen.replace({"faults": FAULTS[:1]}), folders[1])
    first, second = timeline.header.faults
    (back,) = [span for span in timeline.stages() if span.stage == "restore" and span.worker == ENGINE]
    assert (first["target"], second["target"]) == (ENGINE, other)
    assert second["at_s"] < back.end_s, "the other one had not been back before"
    assert state(folders[0]) == state(folders[1])


@pytest.mark.real
@pytest.mark.full
def test_who_dies_without_being_covered_ends_the_run(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    fault = {"kind": "scorer_lost", "mtbf": 1e9, "target": "reward.score[0]", "detect": 1.0}
    chosen = scenario("quickstart", num_steps=6, checkpoint={"every_steps": None}).replace({"faults": [fault]})
    at(tmp_path, 2, lambda: os.kill(processes.read(tmp_path)[REFERENCE], signal.SIGKILL))
    header = execute(chosen, tmp_path).header
    assert header.status == "failed" and "reference.score[0] died" in header.error
    assert len(runs.finished_rows(tmp_path)) == len(header.learning) >= 2


def test_a_spare_works_until_the_engine_that_it_replaces_takes_samples_again(scenario: Make, tmp_path: Path) -> None:
    """Also while that one is back and waits for new weights, which nobody might bring about otherwise."""
    engines = {"actor.generate": [{"pool": "all", "engines": 2, "threads": 1}]}
    fault = {
        "kind": "worker_lost",
        "mtbf": 1e9,
        "target": ENGINE,
        "recovery": "redundant",
        "spare": "actor.generate[0]",
    }
    chosen = scenario("grpo-two-engines", place=engines).replace({"faults": [fault]})

    async def seen() -> list[list[str]]:
        recovery, found = Recovery(chosen, tmp_path), []
        found.append(recovery.working())
        recovery.losses[ENGINE] = Loss(name=ENGINE, fault=chosen.faults[0], at=0.0, record={})
        found.append(recovery.working())
        recovery.joining.add(recovery.losses.pop(ENGINE).name)
        found.append(recovery.working())
        recovery.joining.clear()
        return [*found, recovery.working()]

    assert asyncio.run(seen()) == [[ENGINE], ["actor.generate[0]"], ["actor.generate[0]"], [ENGINE]]


def test_who_died_while_another_was_away_is_the_reason(scenario: Make, tmp_path: Path) -> None:
    """Though its loss is noticed long after its death was told, and the other's was noticed before."""
    chosen = scenario("grpo-two-engines").replace({"faults": [{"kind": "worker_lost", "mtbf": 1e9, "detect": 0.2}]})
    names = [engine.name for engine in chosen.team("actor", "generate")]
    error = ray.exceptions.ActorDiedError()
    error.actor_id = "1"
    actors = {name: SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda i=i: str(i))) for i, name in enumerate(names)}

    async def found() -> Loss | None:
        recovery = Recovery(chosen, tmp_path)
        first, second = (Loss(name=name, fault=chosen.faults[0], at=0.0, record={}) for name in names)
        recovery.losses[names[0]] = first
        recovery._noticed.append(first)
        recovery._workers = SimpleNamespace(names=lambda: {"0": names[0], "1": names[1]}, actors=actors)  # type: ignore[assignment]
        recovery._pulse = pulse = Pulse("127.0.0.1")
        pulse.watch(names[1], 7)
        pulse.silent = lambda: {names[1]: 0.0}  # type: ignore[method-assign]

        def notice() -> None:
            pulse.forget(names[1])
            recovery.losses[names[1]] = second
            recovery._noticed.append(second)

        asyncio.get_running_loop().call_later(1.0, notice)
        try:
            return await recovery.reason(error)
        finally:
            pulse.close()

    loss = asyncio.run(found())
    assert loss is not None and loss.name == names[1]


STATED = {"kind": "worker_lost", "at": 5.0, "target": "actor.generate[0]", "recovery": "restart"}


@pytest.mark.parametrize(
    ("fault", "changes", "key"),
    [
        (STATED | {"detect": 0.1}, {}, "faults[0].detect"),
        (STATED, {"evaluate": {"every_steps": 2}}, "evaluate.every_steps"),
        (STATED, {"schedule": {"scoring": "sample"}}, "schedule.scoring"),
        (STATED, {"experience": {"transport": "rpc"}}, "experience"),
        ({"kind": "buffer_lost", "at": 5.0}, {}, "schedule.mode"),
        ({"kind": "link_degraded", "at": 5.0, "target": "port local/0"}, {}, "faults[0].kind"),
        (STATED | {"kind": "preempted", "duration": 1.0}, {}, "faults[0].kind"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(
    scenario: Make, fault: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    chosen = scenario("quickstart", **changes).replace({"faults": [fault]})
    assert key in {found for found, _, _ in limits(chosen)}
    assert list(limits(scenario("quickstart"))) == []


def test_what_was_struck_is_read_back(tmp_path: Path) -> None:
    (tmp_path / injecting.FILE).write_text(json.dumps({"at_s": 1.0, "pid": 3}) + "\n")
    assert list(injecting.struck(tmp_path)) == [{"at_s": 1.0, "pid": 3}]
