"""What a timeline says in numbers: laws on random lawful timelines, and closed forms by hand."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.goodput import daly
from lab.metrics import busy, exposed, num_steady, publications, publishing, step_times, summarise
from lab.timeline import Header, Lane, Span, Timeline
from tests.strategies import play, scenario, timelines

KEYS = [
    "schema_version",
    "scenario",
    "digest",
    "origin",
    "seed",
    "status",
    "num_steps",
    "steps_done",
    "run_dir",
    "startup_s",
    "makespan_s",
    "first_step_s",
    "step_s",
    "stages",
    "pools",
    "tokens",
    "samples",
    "samples_per_s",
    "response_tokens_per_s",
    "goodput",
    "lost_s",
    "checkpoint_s",
    "mtbf_s",
    "young_daly_s",
    "faults",
    "storage",
    "lag",
    "packing",
    "preemptions",
    "overhead_share",
    "device_hours",
    "cost",
    "bottleneck",
    "memory",
    "profiles",
    "data",
    "reward",
    "logprob_gap_max",
    "wall_s",
]


def unit(stage: str, step: int, worker: str) -> float:
    """One second a stage, dispatched at once."""
    return 0.0 if worker == "dispatch" else 1.0


def span(name: str, start: float, end: float, *causes: str, op: str = "") -> Span:
    """`name`: stage/step/worker, with #i for an op."""
    stage, step, worker = name.split("#")[0].split("/")
    return Span(
        span_id=name, cause_ids=causes, resource=worker, step=int(step), stage=stage, op=op, pool="P", worker=worker,
        start_s=start, end_s=end,
    )  # fmt: skip


def by_hand(*spans: Span, **lanes: tuple[str, ...]) -> Timeline:
    """A timeline of one pool with the devices that the lanes name."""
    devices = tuple(sorted({device for found in lanes.values() for device in found}))
    header = Header(
        scenario="hand", digest="0", origin="measured", seed=0, num_steps=1, pools={"P": devices},
        lanes={name: Lane(pool="P", devices=found) for name, found in lanes.items()},
    )  # fmt: skip
    return Timeline.of(header, spans)


def test_the_summary_has_the_keys_of_the_command_line() -> None:
    assert list(summarise(play(scenario(), unit))) == KEYS


def test_a_synchronous_step_is_its_critical_path() -> None:
    """Rollout, then reward and reference together, advantage, update, sync, and every second step a checkpoint."""
    summary = summarise(play(scenario(num_steps=5), unit))
    assert step_times(play(scenario(num_steps=5), unit)) == [5, 5, 5, 5, 5]
    assert (summary["first_step_s"], summary["makespan_s"], summary["steps_done"]) == (5, 25, 5)
    assert summary["step_s"] == {"mean": 5, "p50": 5, "p95": 5}
    assert summary["stages"]["rollout"] == {"busy_s_per_step": 1, "share": 0.2}
    assert summary["stages"]["checkpoint"] == {"busy_s_per_step": 0.5, "share": 0.1}
    assert summary["samples_per_s"] == 5 * 32 / 25
    assert summary["device_hours"] == 2 * 25 / 3600


@given(timelines())
def test_steps_tile_the_time_and_exposed_time_tiles_the_step(timeline: Timeline) -> None:
    times, (shares, gap) = step_times(timeline), exposed(timeline)
    assert len(times) == timeline.header.num_steps
    assert sum(times) == pytest.approx(publications(timeline)[-1])
    assert sum(shares.values()) + gap == pytest.approx(summarise(timeline)["step_s"]["mean"])
    assert all(seconds >= 0 for seconds in shares.values()) and gap >= -1e-9


@given(timelines())
def test_every_pool_accounts_for_all_its_device_seconds(timeline: Timeline) -> None:
    pools = summarise(timeline)["pools"]
    assert set(pools) == set(timeline.header.pools)
    for accounts in pools.values():
        assert sum(accounts.values()) == pytest.approx(1, abs=1e-9)
        assert min(accounts.values()) > 0


@settings(max_examples=30)
@given(timelines(of=scenario("ppo-7b-16gpu", "one_step_off")))
def test_where_nobody_shares_a_device_its_work_is_what_its_spans_last(timeline: Timeline) -> None:
    summary, seconds = summarise(timeline), defaultdict[str, float](float)
    for stage in timeline.stages():
        lane = timeline.header.lanes[stage.worker]
        seconds[lane.pool] += len(lane.devices) * stage.seconds
    for pool, devices in timeline.header.pools.items():
        parts = summary["pools"][pool].items()
        worked = sum(share for account, share in parts if account != "idle" and not account.startswith("waiting:"))
        assert worked * summary["makespan_s"] * len(devices) == pytest.approx(seconds[pool], rel=1e-6, abs=1e-9)


@given(timelines())
def test_a_stage_is_busy_at_least_as_long_as_its_slowest_worker_and_at_most_as_all_of_them(timeline: Timeline) -> None:
    of_step = defaultdict[tuple[str, int], list[float]](list)
    for stage in timeline.stages():
        of_step[stage.stage, stage.step].append(stage.seconds)
    first = 1 if timeline.header.num_steps > 1 else 0
    for name, found in busy(timeline).items():
        parts = [seconds for (stage, step), seconds in of_step.items() if stage == name and step >= first]
        assert sum(map(max, parts)) - 1e-9 <= sum(found) <= sum(map(sum, parts)) + 1e-9


@given(timelines(), st.floats(0.001, 1000))
def test_a_slower_clock_changes_seconds_but_no_share(timeline: Timeline, factor: float) -> None:
    slower = Timeline.of(
        timeline.header,
        [msgspec.structs.replace(s, start_s=s.start_s * factor, end_s=s.end_s * factor) for s in timeline.spans],
    )
    before, after = summarise(timeline), summarise(slower)
    assert after["step_s"]["mean"] == pytest.approx(before["step_s"]["mean"] * factor)
    assert [row["share"] for row in after["stages"].values()] == pytest.approx(
        [row["share"] for row in before["stages"].values()]
    )
    for pool, accounts in before["pools"].items():
        others = after["pools"][pool]
        for account in {*accounts, *others}:
            assert others.get(account, 0) == pytest.approx(accounts.get(account, 0), abs=1e-6)


def test_a_gap_belongs_to_what_the_next_span_waited_for_as_far_back_as_it_goes() -> None:
    """Device d waits for 1 s of dispatch, 3 s of reward, 1 s of dispatch and 2 s of rollout; then works, then is done."""
    timeline = by_hand(
        span("rollout/0/r", 0, 2),
        span("reward/0/s", 3, 6, "rollout/0/r"),
        span("reference/0/t", 2, 4, "rollout/0/r"),
        span("update_actor/0/u", 7, 9, "reward/0/s", "reference/0/t"),
        span("weight_sync/0/v", 9, 10, "update_actor/0/u"),
        r=("a",), s=("b",), t=("c",), u=("d",), v=("e",),
    )  # fmt: skip
    only = Timeline.of(msgspec.structs.replace(timeline.header, pools={"P": ("d",)}), timeline.spans)
    assert summarise(only)["pools"]["P"] == pytest.approx(
        {"waiting:rollout": 0.2, "waiting:dispatch": 0.2, "waiting:reward": 0.3, "update_actor": 0.2, "idle": 0.1}
    )


def test_workers_active_on_one_device_share_it_equally() -> None:
    """Two seconds of rollout alone, two beside the reference, whose last half second is communication."""
    timeline = by_hand(
        span("rollout/0/r", 0, 4),
        span("update_actor/0/u", 2, 4),
        span("update_actor/0/u#0", 3.5, 4, "update_actor/0/u", op="grad_sync"),
        span("weight_sync/0/r", 4, 5, "update_actor/0/u"),
        r=("a",), u=("a",),
    )  # fmt: skip
    assert summarise(timeline)["pools"]["P"] == pytest.approx(
        {"rollout": 3 / 5, "update_actor": 0.75 / 5, "communication": 1.25 / 5}
    )


def test_overhead_is_the_share_of_a_measured_step_outside_every_op() -> None:
    timeline = by_hand(
        *(span(f"weight_sync/{k}/r", 10 * k + 8, 10 * k + 10) for k in range(3)),
        *(span(f"rollout/{k}/r", 10 * k, 10 * k + 7) for k in range(3)),
        *(span(f"rollout/{k}/r#0", 10 * k, 10 * k + 5, op="decode") for k in range(3)),
        *(span(f"rollout/{k}/r#1", 10 * k + 4, 10 * k + 6, op="prefill") for k in range(3)),
        r=("a",),
    )  # fmt: skip
    assert summarise(timeline)["overhead_share"] == pytest.approx(0.4)
    simulated = msgspec.structs.replace(timeline, header=msgspec.structs.replace(timeline.header, origin="simulated"))
    assert summarise(simulated)["overhead_share"] is None


def test_lag_is_zero_when_synchronous_and_one_behind_when_a_rollout_runs_ahead() -> None:
    assert summarise(play(scenario(num_steps=4), unit))["lag"] == {"mean": 0, "max": 0}
    assert summarise(play(scenario(mode="one_step_off", num_steps=4), unit))["lag"] == {"mean": 0.75, "max": 1}


def test_counts_come_from_the_rollouts() -> None:
    summary = summarise(play(scenario("ppo-7b-16gpu", num_steps=3), unit))
    counted = {"prompt": 2 * 3 * 96, "response": 2 * 3 * 200, "recomputed": None, "wasted": 0, "lost": 0}
    assert summary["tokens"] == counted
    assert summary["preemptions"] == 2 * 3
    assert summary["response_tokens_per_s"] == 1200 / summary["makespan_s"]


def test_goodput_leaves_out_what_was_lost_and_what_a_checkpoint_holds_up() -> None:
    """Every stage takes one second, also the two checkpoints, of which one runs beside the next rollout."""
    timeline = play(scenario(num_steps=4), lambda stage, step, worker: float(worker != "dispatch"))
    summary = summarise(timeline)
    assert summary["checkpoint_s"] == pytest.approx(1.0) and summary["young_daly_s"] is None
    assert summary["goodput"] == pytest.approx(1 - 1 / summary["makespan_s"])
    half = summary["makespan_s"] / 2
    saving = next(span.start_s for span in timeline.stages() if span.stage == "checkpoint")
    away = [{"from_s": 0.0, "until_s": saving}, {"from_s": saving + 1, "until_s": saving + 1 + half - saving}]
    failed = msgspec.structs.replace(timeline.header, lost_s=half, mtbf_s=50.0, faults=away)
    lossy = summarise(msgspec.structs.replace(timeline, header=failed))
    assert lossy["goodput"] == pytest.approx(summary["goodput"] - 0.5)
    assert lossy["young_daly_s"] == pytest.approx(daly(0.5, 50.0))


def test_the_bottleneck_is_the_stage_that_lasts() -> None:
    slow = play(scenario(), lambda stage, step, worker: unit(stage, step, worker) * (7 if stage == "reference" else 1))
    assert summarise(slow)["bottleneck"]["stage"] == "reference"


def test_the_price_is_per_hour_of_all_devices() -> None:
    timeline = play(scenario(num_steps=4), unit)
    priced = msgspec.structs.replace(timeline, header=msgspec.structs.replace(timeline.header, price_per_hour=36.0))
    assert (summarise(timeline)["cost"], summarise(priced)["cost"]) == (None, 0.21)  # 20 s of steps and a checkpoint


def test_steps_that_did_not_end_do_not_count() -> None:
    whole = play(scenario(num_steps=4), unit)
    cut = Timeline.of(whole.header, [s for s in whole.spans if s.end_s <= 12])
    summary = summarise(cut)
    assert (summary["steps_done"], num_steady(cut), summary["step_s"]["mean"]) == (2, 1, 5)
    assert sum(summary["pools"]["all"].values()) == pytest.approx(1)


def test_nothing_is_known_of_a_run_that_finished_no_step() -> None:
    nothing = Timeline.of(play(scenario(), unit).header, [])
    summary = summarise(nothing)
    assert (summary["steps_done"], summary["makespan_s"], summary["step_s"]["mean"]) == (0, 0, None)
    assert (summary["bottleneck"], summary["samples_per_s"], summary["lag"]["max"]) == (None, None, None)


@pytest.mark.parametrize(
    ("stages", "ending"),
    [
        ({"rollout", "update_actor", "weight_sync"}, "weight_sync"),
        ({"rollout", "update_actor"}, "weight_sync"),
        ({"reference", "update_actor", "checkpoint"}, "update_actor"),
        ({"update_critic"}, "update_critic"),
    ],
)
def test_a_step_ends_with_the_weights_on_the_engines_or_without_any_with_the_update(
    stages: set[str], ending: str
) -> None:
    assert publishing(stages) == ending


def test_packing_is_a_mean_over_updates_and_unknown_where_nobody_noted_it() -> None:
    noted = [
        msgspec.structs.replace(
            span(f"update_actor/{step}/actor.train[0]", step, step + 1),
            attrs={"padding": share, "imbalance": 2 * share},
        )
        for step, share in enumerate((0.1, 0.3))
    ]
    timeline = play(scenario(), unit)
    assert summarise(timeline)["packing"] == {"padding": None, "imbalance": None}
    found = summarise(msgspec.structs.replace(timeline, spans=tuple(noted)))["packing"]
    assert found == {"padding": pytest.approx(0.2), "imbalance": pytest.approx(0.4)}
