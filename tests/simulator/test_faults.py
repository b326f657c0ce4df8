"""Faults that take a run back, slow it down or cut its links: what is lost, what it costs, and what stays."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.accounts import accounts
from lab.dataflow import conforms
from lab.errors import InputError
from lab.load import load
from lab.metrics import publications, summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.profile import datasheet
from simulator.run import simulate

BIG = load("scenarios/ppo-7b-16gpu.yaml")
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
TRAINER = {"kind": "trainer_lost", "target": "actor.train[0]", "detect": 5.0, "start": 10.0}
SAVING = {"every_steps": 2}


def scenario(*faults: dict[str, Any], **changes: Any) -> Scenario:
    return BIG.replace({"num_steps": 6, "checkpoint": SAVING, "faults": faults} | changes)


def play(*faults: dict[str, Any], **changes: Any) -> Timeline:
    """A run that follows its dataflow and counts every sample once."""
    chosen = scenario(*faults, **changes)
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    counts = dict(timeline.header.samples)
    assert counts.pop("issued") == sum(counts.values())
    assert counts["trained"] == chosen.num_steps * chosen.workload.samples_per_step
    return timeline


def makespan(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.stages())


CALM = play()
LENGTH = makespan(CALM)


@settings(max_examples=8)
@given(st.lists(st.floats(1.0, LENGTH - 1), min_size=1, max_size=3), st.booleans())
def test_a_run_takes_longer_by_what_was_lost(times: list[float], blocking: bool) -> None:
    """Its steps are those of a run without faults: the same work, done again where it was lost. What ran beside a
    checkpoint's own step is then done with nothing beside it, for every time that the run goes back to one."""
    checkpoint = SAVING | {"blocking": blocking}
    calm, timeline = play(checkpoint=checkpoint), play(*(TRAINER | {"at": at} for at in times), checkpoint=checkpoint)
    lost = timeline.header.lost_s
    beside = max(span.end_s for span in calm.stages() if span.step == 1) - publications(calm)[1]
    gone_back = sum(fault["step"] > 0 for fault in timeline.header.faults)
    assert -1e-6 < makespan(timeline) - makespan(calm) - lost < gone_back * beside + 1e-6
    assert sum(fault["lost_s"] for fault in timeline.header.faults) == pytest.approx(lost)
    useful = makespan(timeline) - lost - summarise(timeline)["checkpoint_s"]
    assert summarise(timeline)["goodput"] == pytest.approx(useful / makespan(timeline))


def test_a_run_goes_back_to_its_last_complete_checkpoint() -> None:
    saved = max(span.end_s for span in CALM.stages() if span.stage == "checkpoint" and span.step == 1)
    for at, step in ((saved - 1, 0), (saved + 1, 2)):
        timeline = play(TRAINER | {"at": at})
        (fault,) = timeline.header.faults
        assert fault["step"] == step
        assert {span.step for span in timeline.lost() if span.stage == "advantage"} == set(range(step, 2))
        again = {span.step for span in timeline.stages() if span.span_id.endswith("~2") and span.stage != "restore"}
        assert again == {span.step for span in timeline.lost()}
        assert publications(timeline)[:step] == pytest.approx(publications(CALM)[:step])


def test_coming_back_takes_noticing_starting_and_reading() -> None:
    timeline = play(TRAINER | {"at": 300.0})
    restored = [span for span in timeline.stages() if span.stage == "restore"]
    assert {span.worker for span in restored} == {
        name for name, worker in scenario().workers.items() if worker.work in ("generate", "train")
    }
    reads = {span.worker: span for span in timeline.spans if span.stage == "restore" and span.op == "read"}
    assert {span.start_s for span in reads.values()} == {315.0} and {span.start_s for span in restored} == {300.0}
    written = {span.worker: span.bytes for span in timeline.spans if span.stage == "checkpoint" and span.op == "write"}
    assert {name: reads[name].bytes for name in written} == written
    again = min(span.start_s for span in timeline.stages() if span.start_s > 300 and span.stage != "restore")
    assert again >= max(span.end_s for span in restored)


def test_what_was_lost_is_on_the_account_of_the_fault() -> None:
    timeline = play(TRAINER | {"at": 300.0})
    pools = accounts(timeline, makespan(timeline))
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in pools.values())
    assert all(pools[pool]["fault"] > 0 for pool in ("actors", "critic", "rollout", "reward"))
    samples, tokens = timeline.header.samples, summarise(timeline)["tokens"]
    assert samples["lost"] == samples["issued"] - samples["trained"] > 0
    assert tokens["lost"] == tokens["wasted"] > 0
    assert tokens["response"] == summarise(CALM)["tokens"]["response"]


@pytest.mark.parametrize("at", [250.0, 480.0])
def test_a_rollout_ahead_is_lost_with_the_step_that_it_is_for(at: float) -> None:
    timeline = play(TRAINER | {"at": at}, schedule={"mode": "one_step_off"}, num_steps=4)
    assert {span.step for span in timeline.lost() if span.stage == "rollout"} >= {timeline.header.faults[0]["step"]}
    assert {span.step - span.policy_version for span in timeline.stages() if span.stage == "rollout"} == {0, 1}


def test_a_second_loss_while_the_first_is_mended_starts_the_mending_anew() -> None:
    timeline = play(TRAINER | {"at": 300.0}, TRAINER | {"at": 308.0})
    first, second = timeline.header.faults
    assert first["lost_s"] == pytest.approx(300.0) and second["step"] == 0
    assert timeline.header.lost_s == pytest.approx(play(TRAINER | {"at": 300.0}).header.lost_s + 8.0)


def test_a_preemption_with_enough_notice_loses_no_complete_update() -> None:
    taken = {"kind": "preempted", "target": "train/0", "at": 300.0, "duration": 100.0, "start": 10.0}
    sudden, warned = play(taken | {"notice": 1.0}), play(taken | {"notice": 400.0})
    (lost,), (kept,) = sudden.header.faults, warned.header.faults
    assert lost["step"] == 0 and kept["step"] >= 1
    assert kept["lost_s"] < lost["lost_s"] + 400
    assert any(span.step == kept["step"] - 1 for span in warned.stages() if span.stage == "update_critic")


def test_a_straggler_stretches_all_that_it_does_while_it_is_slow() -> None:
    slow = {"kind": "straggler", "target": "actor.generate[0]", "at": 0.0, "factor": 0.5}
    timeline = play(slow)

    def rollout(played: Timeline, engine: int, step: int) -> float:
        worker = f"actor.generate[{engine}]"
        return sum(s.seconds for s in played.stages() if (s.stage, s.step, s.worker) == ("rollout", step, worker))

    for step in range(6):
        assert rollout(timeline, 0, step) == pytest.approx(2 * rollout(CALM, 0, step))
        assert rollout(timeline, 1, step) == pytest.approx(rollout(CALM, 1, step))
    passing = play(slow | {"at": 10.0, "duration": 20.0})
    assert rollout(passing, 0, 0) == pytest.approx(rollout(CALM, 0, 0) + 10.0), "half of 20 s of work"
    assert rollout(passing, 0, 1) == pytest.approx(rollout(CALM, 0, 1))


def test_a_degraded_link_slows_what_crosses_it_until_it_is_mended() -> None:
    cut = {"kind": "link_degraded", "target": "port serve/0", "at": 0.0, "factor": 0.01}

    def syncs(timeline: Timeline) -> list[float]:
        return [max(s.seconds for s in timeline.stages() if (s.stage, s.step) == ("weight_sync", k)) for k in range(6)]

    calm, slow, mended = syncs(CALM), syncs(play(cut)), syncs(play(cut | {"duration": publications(CALM)[0] + 400}))
    assert all(a > 5 * b for a, b in zip(slow, calm, strict=True))
    assert mended[0] == pytest.approx(slow[0]) and mended[5] == pytest.approx(calm[5])


def test_a_degraded_link_stays_so_when_the_run_goes_back() -> None:
    cut = {"kind": "link_degraded", "target": "port serve/0", "at": 0.0, "factor": 0.01}
    timeline = play(cut, TRAINER | {"at": 300.0})
    again = [s.seconds for s in timeline.stages() if (s.stage, s.step) == ("weight_sync", 0)]
    assert max(again) == pytest.approx(
        max(s.seconds for s in play(cut).stages() if (s.stage, s.step) == ("weight_sync", 0))
    )


def test_a_lost_buffer_costs_the_samples_in_it() -> None:
    scored = next(span for span in CALM.stages() if span.stage == "reference" and span.step == 1)
    timeline = play({"kind": "buffer_lost", "at": scored.start_s + 1})
    assert timeline.header.samples["lost"] == scenario().workload.samples_per_step
    assert {span.step for span in timeline.lost()} == {1}
    nothing = next(span for span in CALM.stages() if span.stage == "update_critic" and span.step == 1)
    empty = play({"kind": "buffer_lost", "at": nothing.start_s + 1})
    assert empty.header.samples["lost"] == 0 and makespan(empty) == pytest.approx(LENGTH)


def test_a_time_after_the_end_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        play(TRAINER | {"at": 2 * LENGTH})
    assert caught.value.key == "faults[0].at" and "ends" in caught.value.problem


def test_a_run_that_gets_from_no_checkpoint_to_the_next_is_given_up() -> None:
    with pytest.raises(InputError) as caught:
        play({"kind": "trainer_lost", "mtbf": 5.0, "detect": 1.0, "start": 1.0}, num_steps=2)
    assert caught.value.key == "faults[0].mtbf"


@pytest.mark.parametrize("fault", [{"kind": "worker_lost"}, {"kind": "straggler", "factor": 0.5, "duration": 1.0}])
def test_a_run_that_faults_leave_no_time_is_given_up(fault: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="2000 faults struck") as caught:
        play(fault | {"mtbf": 0.01}, num_steps=2)
    assert caught.value.key == "faults[0].mtbf"


def test_drawn_faults_repeat_with_the_seed() -> None:
    drawn = {key: value for key, value in TRAINER.items() if key != "target"} | {"mtbf": 2000.0}
    first, second = play(drawn), play(drawn)
    assert first.digest() == second.digest() and first.header.faults
    assert first.header.mtbf_s == pytest.approx(500.0), "three ranks of the actor, one of the critic"
    assert play(drawn, seed=5).header.faults != first.header.faults


ENGINE = {"kind": "worker_lost", "target": "actor.generate[0]", "at": 20.0, "detect": 5.0, "start": 10.0}


def rollouts(timeline: Timeline, step: int) -> dict[str, Any]:
    """Spans of a step's rollout by id."""
    return {span.span_id: span for span in timeline.stages() if (span.stage, span.step) == ("rollout", step)}


def test_a_lost_engine_loses_what_it_had_not_ended() -> None:
    """Whoever generates its samples again: what came back stays, the rest is issued a second time."""
    for recovery in ("reassign", "restart"):
        timeline = play(ENGINE | {"recovery": recovery})
        failed = rollouts(timeline, 0)["rollout/0/actor.generate[0]"]
        lost = failed.attrs["lost_samples"]
        assert lost == timeline.header.samples["lost"] > 0 and failed.end_s < 21
        assert (
            sum(span.attrs["samples"] for span in rollouts(timeline, 0).values())
            == scenario().workload.samples_per_step
        )
        assert 0 < summarise(timeline)["tokens"]["lost"] < lost * scenario().workload.response_tokens.max
        assert summarise(timeline)["tokens"]["response"] == summarise(CALM)["tokens"]["response"]
        assert timeline.header.lost_s == 0, "nothing that was trained is lost"
        assert rollouts(timeline, 1).keys() == rollouts(CALM, 1).keys(), "it is back"


def test_others_take_over_once_the_loss_is_noticed() -> None:
    timeline = play(ENGINE)
    (other,) = [span for name, span in rollouts(timeline, 0).items() if "[1]" in name]
    calm = rollouts(CALM, 0)["rollout/0/actor.generate[1]"]
    assert other.attrs["samples"] == calm.attrs["samples"] + timeline.header.samples["lost"]
    assert other.end_s > calm.end_s
    late = play(ENGINE | {"detect": 25.0})
    assert makespan(late) > makespan(timeline)


def test_a_restarted_engine_generates_its_samples_itself() -> None:
    timeline = play(ENGINE | {"recovery": "restart"})
    again = rollouts(timeline, 0)["rollout/0/actor.generate[0]~2"]
    assert again.start_s == pytest.approx(35.0) and again.attrs["samples"] == timeline.header.samples["lost"]
    assert (
        rollouts(timeline, 0)["rollout/0/actor.generate[1]"].end_s
        == rollouts(CALM, 0)["rollout/0/actor.generate[1]"].end_s
    )


def test_a_spare_stands_idle_until_it_is_needed_and_again_afterwards() -> None:
    timeline = play(ENGINE | {"recovery": "redundant", "spare": "actor.generate[1]"})
    assert {span.worker for span in rollouts(timeline, 0).values()} == {"actor.generate[0]", "actor.generate[1]"}
    assert rollouts(timeline, 0)["rollout/0/actor.generate[1]"].start_s >= 25.0
    assert {span.worker for span in rollouts(timeline, 2).values()} == {"actor.generate[0]"}


def test_without_any_engine_the_rollout_waits_for_the_first() -> None:
    gap = max(span.end_s for span in rollouts(CALM, 0).values()) + 1
    both = play(ENGINE | {"kind": "node_lost", "target": "serve/0", "at": gap, "start": 400.0})
    assert min(span.start_s for span in rollouts(both, 1).values()) >= gap + 405
    assert both.header.samples["lost"] == 0, "nothing was being generated"


def test_a_preempted_engine_is_gone_for_its_time() -> None:
    taken = {key: value for key, value in ENGINE.items() if key != "detect"} | {"kind": "preempted", "duration": 100.0}
    timeline = play(taken | {"notice": 3.0})
    (away,) = [span for span in timeline.stages() if span.stage == "restore"]
    assert (away.start_s, away.end_s) == pytest.approx((23.0, 133.0))


@pytest.mark.parametrize("scoring", ["batch", "sample"])
def test_a_lost_scorer_scores_again_what_it_had_under_way(scoring: str) -> None:
    calm = play(schedule={"scoring": scoring}, num_steps=2)
    span = next(span for span in calm.stages() if span.stage == "reward" and span.step == 0)
    at = (span.start_s + span.end_s) / 2
    lost = {"kind": "scorer_lost", "target": "reward.score[0]", "detect": 5.0, "start": 10.0, "at": at}
    timeline = play(lost, schedule={"scoring": scoring}, num_steps=2)
    mine = [s for s in [*timeline.stages(), *timeline.lost()] if s.stage == "reward" and s.step == 0]
    assert len(mine) == 2 and max(s.start_s for s in mine) >= at + 15
    assert sum(s.attrs.get("samples", 0) for s in mine) == scenario().workload.samples_per_step
    assert makespan(timeline) > makespan(calm) and timeline.header.samples["lost"] == 0


def test_nothing_of_a_lost_worker_reaches_into_its_coming_back() -> None:
    """Whatever it does when it fails, also a second time, and while the whole run comes back."""
    away = {"detect": 5.0, "start": 10.0}
    twice = [ENGINE | {"at": 20.0, "recovery": "restart"}, ENGINE | {"at": 27.0, "recovery": "restart"}]
    with_run = [TRAINER | {"at": 40.0}, ENGINE | {"at": 42.0, "start": 60.0}]
    before_run = [ENGINE | {"at": 42.0, "start": 300.0}, TRAINER | {"at": 50.0}]
    gone = {"kind": "preempted", "target": "actor.generate[1]", "duration": 8.0, "notice": 1.0, "at": 30.0} | away
    sync = next(span for span in CALM.stages() if (span.stage, span.worker) == ("weight_sync", "actor.generate[0]"))
    syncing = [ENGINE | {"at": (sync.start_s + sync.end_s) / 2}]
    for faults in (twice, with_run, before_run, [gone], syncing):
        timeline = play(*faults, num_steps=2)
        restored = [span for span in timeline.stages() if span.stage == "restore"]
        for span in restored:
            own = [other for other in timeline.stages() if other.worker == span.worker and other is not span]
            assert all(o.end_s <= span.start_s + 1e-9 or o.start_s >= span.end_s - 1e-9 for o in own)
        assert len({span.span_id for span in timeline.spans}) == len(timeline.spans)
        until = max(f["at"] + f.get("notice", 0) + f.get("duration", f["detect"]) + f["start"] for f in faults)
        engine = [span for span in restored if "generate" in span.worker]
        assert max(span.end_s for span in engine) >= until - 1e-9


def test_goodput_is_a_share_and_falls_with_every_loss() -> None:
    """Also where the checkpoint that a run goes back to is written just before the fault."""
    every = {"every_steps": 1, "blocking": True}
    calm = summarise(play(num_steps=3, checkpoint=every))["goodput"]
    saved = max(span.end_s for span in play(num_steps=3, checkpoint=every).stages() if span.stage == "checkpoint")
    losses = (ENGINE, ENGINE | {"recovery": "restart"}, ENGINE | {"kind": "node_lost", "target": "serve/0"})
    for fault in (*losses, TRAINER | {"at": 90.0}, TRAINER | {"at": saved / 2}, TRAINER | {"at": saved - 0.1}):
        summary = summarise(play(fault, num_steps=3, checkpoint=every))
        assert 0 <= summary["goodput"] < calm
        spans = [fault for fault in summary["faults"] if "from_s" in fault]
        assert sum(f["until_s"] - f["from_s"] for f in spans) == pytest.approx(summary["lost_s"])


@pytest.mark.parametrize("notice", [5.0, 60.0, 200.0])
def test_notice_of_a_preemption_never_lengthens_a_run(notice: float) -> None:
    gone = {"kind": "preempted", "target": "train/0", "duration": 100.0, "start": 10.0}
    sudden, warned = play(gone | {"at": 500.0}), play(gone | {"at": 500.0 - notice, "notice": notice})
    assert makespan(warned) <= makespan(sudden) + 1e-6
