"""A run that ended anywhere goes on from its last whole checkpoint, and its timeline stays lawful and complete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor import checkpoint
from executor.checkpoint import folder_of, staging
from executor.earlier import CHECKPOINTS, LEARNING, SPANS, Earlier
from executor.ledger import Ledger
from executor.recorder import Recorder
from executor.resume import ranks, resume
from lab import runs
from lab.dataflow import conforms
from lab.errors import InputError
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build

Make = Callable[..., Scenario]
STEPS, EVERY = 6, 2


@pytest.fixture
def chosen(scenario: Make) -> Scenario:
    return scenario("quickstart", num_steps=STEPS, checkpoint={"every_steps": EVERY})


class Play:
    """An attempt at a run whose stages do nothing but are recorded, as the real ones are."""

    def __init__(self, scenario: Scenario, folder: Path, earlier: Earlier | None = None) -> None:
        self.scenario, self.folder, self.dataflow = scenario, folder, build(scenario)
        self.earlier = earlier or Earlier()
        self.taken: dict[int, list[tuple[str, int]]] = {}
        self.ledger = Ledger(scenario, self.dataflow, folder, self.earlier)
        self.ledger.start([self.info("setup", -1, name) for name in scenario.workers])

    def info(self, stage: str, step: int, worker: str) -> dict[str, Any]:
        recorder = Recorder(worker, self.scenario.workers[worker].pool)
        with recorder.stage(stage, step, self.dataflow.policy_version(stage, step)) as notes, recorder.op("forward"):
            notes["response_tokens"] = 10
        return {"spans": recorder.take(), "learning": {f"of_{stage}": step}}

    def stage(self, stage: str, step: int) -> None:
        self.ledger.issue(stage)
        self.ledger.add(stage, step, [self.info(stage, step, name) for name in self.dataflow.nodes[stage].workers])

    def save(self, step: int) -> None:
        root = self.folder / CHECKPOINTS
        for rank in ranks(self.scenario):
            own = staging(root, step, self.earlier.attempt) / rank.name
            own.mkdir(parents=True)
            (own / "weights").write_text(str(step))
            about = {"step": step, "digest": self.scenario.digest, "attempt": self.earlier.attempt, "start_s": 0.0}
            checkpoint.seal(own, about | {"role": rank.role, "rank": rank.rank, "world": rank.world})
        kept = self.taken[step]
        driver = {"step": step, "stages": {}, "kept": kept} | self.ledger.unwritten(step, kept)
        checkpoint.commit(root, step, self.earlier.attempt, ranks(self.scenario), driver)

    def steps(self, until: int, saves: bool = True) -> None:
        """All stages of the steps before `until`, and the rollouts that those wait for."""
        nodes, first = self.dataflow.nodes, self.earlier.first_step
        last = min(until, STEPS - 1) if self.scenario.schedule.mode == "one_step_off" else until - 1
        left = [
            (stage, step)
            for step in range(first, until + 1)
            for stage, node in nodes.items()
            if node.runs(step) and step <= (last if stage == "rollout" else until - 1)
        ]
        done = {(stage, step) for stage in nodes for step in range(first)} | set(self.earlier.kept)
        left = [run for run in left if run not in done]
        while left:
            run = next(run for run in left if set(self.dataflow.requirements(*run)) <= done)
            left.remove(run)
            self.stage(*run)
            done.add(run)
            if run[0] == "weight_sync":
                self.taken[run[1]] = sorted(key for key in done if key[0] == "rollout" and key[1] > run[1])
            if run[0] == "checkpoint" and saves:
                self.save(run[1])
                self.ledger.saved(run[1])


def begun(scenario: Scenario, root: Path) -> Play:
    return Play(scenario, runs.begin(root, scenario, "measured"))


def finished(play: Play) -> Timeline:
    play.steps(STEPS)
    timeline = play.ledger.timeline("done")
    ids = [span.span_id for span in timeline.spans]
    assert len(set(ids)) == len(ids)
    assert {name for span in timeline.spans for name in span.cause_ids} <= set(ids)
    assert conforms(play.dataflow, timeline) == []
    kept = {span.span_id.split("~")[0] for span in timeline.stages() if span.stage != "restore"}
    everything = {
        f"{stage}/{step}/{worker}"
        for stage, node in play.dataflow.nodes.items()
        for step in play.dataflow.steps(stage)
        for worker in node.workers
    }
    assert kept == everything
    rows = [json.loads(line) for line in (play.folder / LEARNING).read_text().splitlines()]
    assert (
        [row["step"] for row in rows] == list(range(STEPS)) == [row["of_rollout"] for row in timeline.header.learning]
    )
    assert sorted(span.span_id for span in runs.finished_spans(play.folder)) == sorted(ids)
    counts = timeline.header.samples
    assert counts["issued"] == sum(counts.values()) - counts["issued"]
    return timeline


@pytest.mark.parametrize("done", range(STEPS))
def test_steps_after_the_checkpoint_are_lost_and_done_again(chosen: Scenario, tmp_path: Path, done: int) -> None:
    play = begun(chosen, tmp_path)
    play.steps(done)
    play.stage("rollout", done)  # under way when the process dies
    earlier = resume(chosen, play.folder)
    again = done % EVERY
    assert (earlier.first_step, earlier.faults[-1]["steps"]) == (done - again, again)
    timeline = finished(Play(chosen, play.folder, earlier))
    lost = {span.span_id for span in timeline.lost()}
    assert {name.split("/")[1] for name in lost} == {str(step) for step in range(done - again, done)}
    marked = {span.span_id for span in timeline.stages() if span.stage != "restore" and "~" in span.span_id}
    assert marked == {f"{name}~2" for name in lost}
    size = chosen.workload.samples_per_step
    assert timeline.header.samples["lost"] == again * size
    assert timeline.header.lost_tokens == again * len(lost) / max(again, 1) * 10
    summary = summarise(timeline)
    assert summary["steps_done"] == STEPS
    assert summary["lost_s"] == timeline.header.lost_s >= 0
    assert {span.worker for span in timeline.stages() if span.stage == "restore"} == set(chosen.workers)


@pytest.mark.parametrize("done", range(STEPS))
def test_one_step_off_the_rollout_ahead_is_kept_with_the_checkpoint(scenario: Make, tmp_path: Path, done: int) -> None:
    chosen = scenario("ppo-tiny", num_steps=STEPS, checkpoint={"every_steps": EVERY})
    play = begun(chosen, tmp_path)
    play.steps(done)
    earlier = resume(chosen, play.folder)
    first = done - done % EVERY
    assert earlier.kept == ({("rollout", first)} if first else set())
    timeline = finished(Play(chosen, play.folder, earlier))
    rollouts = [
        span.span_id for span in timeline.spans if span.node == "rollout" and span.step == first and not span.op
    ]
    again = done % EVERY and not first
    assert len(rollouts) == (2 if again else 1)
    assert [span.step for span in timeline.lost() if span.stage == "update_actor"] == list(range(first, done))


def test_a_run_that_is_killed_again_and_again(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(1)
    for until in (1, 3, 5, 5):
        play = Play(chosen, play.folder, resume(chosen, play.folder))
        play.steps(until)
    timeline = finished(Play(chosen, play.folder, resume(chosen, play.folder)))
    assert [fault["steps"] for fault in timeline.header.faults] == [1, 1, 1, 1, 1]
    assert [fault["step"] for fault in timeline.header.faults] == [0, 0, 2, 4, 4]
    assert any(span.span_id.endswith("~3") for span in timeline.stages())
    assert timeline.header.startup_s == runs.read(play.folder).header.startup_s


def test_a_resumption_that_dies_at_once_changes_nothing(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(3)
    first, spans = resume(chosen, play.folder), [*runs.finished_spans(play.folder)]
    second = resume(chosen, play.folder)
    assert spans == [*runs.finished_spans(play.folder)]
    assert first == second


def test_what_a_checkpoint_holds_and_the_disk_does_not_is_put_back(chosen: Scenario, tmp_path: Path) -> None:
    """Killed between the name of the checkpoint and the spans of its step; and with half a line written."""
    play = begun(chosen, tmp_path)
    play.steps(3)
    for stage, node in play.dataflow.nodes.items():
        if node.runs(3):
            play.stage(stage, 3)
    play.taken[3] = []
    play.save(3)
    with (play.folder / SPANS).open("ab") as file:
        file.write(b'{"span_id":"rollout/3')
    with (play.folder / LEARNING).open("ab") as file:
        file.write(b'{"step":3,')
    assert max(span.step for span in runs.finished_spans(play.folder)) == 2
    earlier = resume(chosen, play.folder)
    assert (earlier.first_step, earlier.faults[-1]["steps"]) == (4, 0)
    finished(Play(chosen, play.folder, earlier))


def test_a_step_with_a_due_checkpoint_is_finished_only_once_that_is_complete(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(2, saves=False)
    assert play.ledger.num_finished == 1
    play.save(1)
    play.ledger.saved(1)
    assert play.ledger.num_finished == 2


def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(5)
    root = play.folder / CHECKPOINTS
    (folder_of(root, 3) / "actor-0" / "weights").write_text("something else")
    earlier = resume(chosen, play.folder)
    assert (earlier.first_step, earlier.faults[-1]["steps"]) == (2, 3)
    assert any("step-000003/actor-0/weights is not what was written" in note for note in earlier.notes)
    assert (root / "damaged-step-000003-1").is_dir()
    finished(Play(chosen, play.folder, earlier))


def test_no_whole_checkpoint_is_refused_and_nothing_is_deleted(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(2)
    path = folder_of(play.folder / CHECKPOINTS, 1) / "actor-0" / "weights"
    path.write_text("something else")
    before = (play.folder / SPANS).read_bytes()
    with pytest.raises(InputError, match=r"no checkpoint is whole: .*weights is not what was written"):
        resume(chosen, play.folder)
    assert path.exists()
    assert (play.folder / SPANS).read_bytes() == before


def test_another_scenario_a_run_that_is_done_and_a_simulated_one_are_refused(
    chosen: Scenario, scenario: Make, tmp_path: Path
) -> None:
    play = begun(chosen, tmp_path)
    play.steps(2)
    with pytest.raises(InputError, match=f"{chosen.digest}.*not of quickstart"):
        resume(scenario("quickstart", num_steps=STEPS, seed=8), play.folder)
    with pytest.raises(InputError, match="not a run"):
        resume(chosen, tmp_path)
    with pytest.raises(InputError, match="simulated"):
        resume(chosen, runs.begin(tmp_path, chosen, "simulated"))
    timeline = finished(Play(chosen, play.folder, resume(chosen, play.folder)))
    runs.finish(play.folder, chosen, timeline)
    with pytest.raises(InputError, match="is done"):
        resume(chosen, play.folder)


def test_a_killed_run_reads_as_interrupted_with_what_it_learned(chosen: Scenario, tmp_path: Path) -> None:
    play = begun(chosen, tmp_path)
    play.steps(3)
    found = runs.read(play.folder)
    assert found.header.status == "interrupted"
    assert [row["of_update_actor"] for row in found.header.learning] == [0, 1, 2]
    runs.finish(play.folder, chosen, play.ledger.timeline("cancelled"))
    again = Play(chosen, play.folder, resume(chosen, play.folder))
    again.steps(4)
    assert len(runs.read(play.folder).header.learning) == 4, "not what the first attempt left behind at its end"
