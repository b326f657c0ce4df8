"""Whole simulations as laws: they follow the dataflow, conserve samples and tokens, and obey their resources' limits."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.dataflow import conforms
from lab.errors import InputError
from lab.load import load, parse
from lab.metrics import summarise
from lab.scenario import Scenario
from lab.timeline import Timeline
from lab.wiring import build
from profiles.formula import FORMULAS
from profiles.profile import OpProfile, Profile, Range, datasheet
from simulator.rollout import Engine
from simulator.run import simulate

SHIPPED = ("quickstart", "ppo-tiny", "grpo-learns", "ppo-7b-16gpu")
LOADED = {name: load(f"scenarios/{name}.yaml") for name in SHIPPED}
SHEETS = {device: datasheet(device) for device in ("cpu-core", "a100-80g-sxm")}
MODES = ("synchronous", "one_step_off")


def scenario(name: str = "quickstart", **changes: Any) -> Scenario:
    """A shipped scenario with parts of its top-level mappings replaced."""
    data = LOADED[name].model_dump(mode="json", by_alias=True)
    merged = {
        key: data[key] | value if isinstance(value, Mapping) and isinstance(data[key], dict) else value
        for key, value in changes.items()
    }
    return LOADED[name].replace({"num_steps": 3} | merged)


def play(chosen: Scenario) -> Timeline:
    return simulate(chosen, SHEETS)


def makespan(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.spans)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenarios_conform_and_repeat(name: str, mode: str) -> None:
    chosen = scenario(name, schedule={"mode": mode}, checkpoint={"every_steps": 2})
    timeline = play(chosen)
    assert conforms(build(chosen), timeline) == []
    assert timeline.digest() == play(chosen).digest()
    expected = {(stage, step) for stage in build(chosen).nodes for step in build(chosen).steps(stage)}
    assert {(span.stage, span.step) for span in timeline.stages()} == expected


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small scenarios on the machine's cores: both algorithms and modes, several engines and ranks, KV pressure."""
    samples, prompts, ranks = draw(st.integers(2, 4)), draw(st.sampled_from([4, 8])), draw(st.sampled_from([1, 2]))
    name = draw(st.sampled_from(["quickstart", "ppo-tiny"]))
    place = LOADED[name].model_dump(mode="json", by_alias=True)["place"]
    place["actor.generate"] = [place["actor.generate"][0] | {"engines": draw(st.integers(1, 3))}]
    place["actor.train"] |= {"data_parallel": ranks, "zero_stage": draw(st.integers(0, 3))}
    return scenario(
        name,
        num_steps=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 99)),
        place=place,
        schedule={"mode": draw(st.sampled_from(MODES))},
        algorithm={"kl_coef": draw(st.sampled_from([0.0, 0.1])), "ppo_epochs": draw(st.integers(1, 2))},
        workload={"prompts_per_step": prompts, "samples_per_prompt": samples},
        rollout={"max_num_seqs": draw(st.integers(1, 32)), "kv_bytes": draw(st.sampled_from([1.5e6, 64e6]))},
        update={"minibatch_samples": prompts * samples // draw(st.sampled_from([1, 2]))},
        checkpoint={"every_steps": draw(st.sampled_from([None, 1, 2]))},
    )


@given(scenarios())
@settings(max_examples=40)
def test_any_small_scenario_conforms_and_conserves(chosen: Scenario) -> None:
    timeline = play(chosen)
    assert conforms(build(chosen), timeline) == []
    steps, per_step = chosen.num_steps, chosen.workload.samples_per_step
    lengths = [chosen.workload.response_lengths(chosen.seed, step).sum() for step in range(steps)]
    for stage, epochs in (("rollout", 1), ("reward", 1), ("update_actor", chosen.algorithm.ppo_epochs)):
        spans = [span for span in timeline.stages() if span.stage == stage]
        assert sum(span.attrs["samples"] for span in spans) == steps * per_step
        prompts = sum(chosen.workload.prompt_lengths(chosen.seed, k).sum() for k in range(steps))
        total = prompts * chosen.workload.samples_per_prompt + sum(lengths)
        assert sum(span.tokens for span in spans) == epochs * total
    assert sum(span.attrs.get("response_tokens", 0) for span in timeline.stages()) == sum(lengths)
    counts = timeline.header.samples
    assert counts["issued"] == steps * per_step == sum(value for key, value in counts.items() if key != "issued")


@given(scenarios())
@settings(max_examples=40)
def test_ops_lie_inside_their_stage_in_order(chosen: Scenario) -> None:
    timeline = play(chosen)
    stages = {span.span_id: span for span in timeline.stages()}
    last: dict[str, float] = {}
    for span in timeline.spans:
        if span.op:
            own = stages[span.span_id.split("#")[0]]
            assert own.start_s <= span.start_s <= span.end_s <= own.end_s + 1e-9 and span.worker == own.worker
            assert span.start_s >= last.get(own.span_id, 0.0) - 1e-9
            last[own.span_id] = span.end_s


def stepped(chosen: Scenario) -> Timeline:
    """The same with every iteration scheduled on its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.lockstep.Engine", partial(Engine, max_jump=1))
        return play(chosen)


@given(scenarios())
@settings(max_examples=20)
def test_jumps_and_single_steps_take_the_same_time(chosen: Scenario) -> None:
    fast, exact = play(chosen), stepped(chosen)
    assert len(exact.spans) >= len(fast.spans)
    ends = {span.span_id: span.end_s for span in exact.stages()}
    assert {span.span_id: span.end_s for span in fast.stages()} == pytest.approx(ends, rel=1e-9)


def test_single_steps_are_more_spans() -> None:
    assert len(stepped(scenario()).spans) > 1.5 * len(play(scenario()).spans)


@given(scenarios())
@settings(max_examples=10)
def test_the_accounts_of_every_pool_add_to_one(chosen: Scenario) -> None:
    for account in summarise(play(chosen))["pools"].values():
        assert sum(account.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["quickstart", "ppo-tiny"])
def test_more_cores_never_slow_a_run_down_and_two_halve_at_most(name: str) -> None:
    def on(cores: int) -> float:
        node = {"name": "local", "device": "cpu-core", "devices": cores, "intra": "shared-memory"}
        pools = {"all": f"local[0:{cores}]"}
        place = LOADED[name].model_dump(mode="json", by_alias=True)["place"]
        place["actor.generate"] = [place["actor.generate"][0] | {"engines": 4}]
        return makespan(play(scenario(name, cluster={"sites": [{"nodes": [node]}]}, pools=pools, place=place)))

    one, two, four = on(1), on(2), on(4)
    assert one >= two >= four and two >= one / 2 - 1e-9 and four >= two / 2 - 1e-9


def big(**site: Any) -> Scenario:
    cluster = LOADED["ppo-7b-16gpu"].model_dump(mode="json", by_alias=True)["cluster"]
    cluster["sites"][0] |= site
    return scenario("ppo-7b-16gpu", num_steps=1, cluster=cluster, checkpoint={"every_steps": 1})


def stage_seconds(timeline: Timeline, stage: str) -> float:
    return sum(span.seconds for span in timeline.stages() if span.stage == stage)


def test_a_checkpoint_takes_its_bytes_over_the_write_bandwidth() -> None:
    """The critic's machine also writes the third of the actor's state that one of its ranks holds."""
    slow, fast = (play(big(storage={"write": rate})) for rate in (1e9, 2e9))
    assert stage_seconds(slow, "checkpoint") == pytest.approx(2 * stage_seconds(fast, "checkpoint"))
    critic = [span for span in slow.stages() if span.stage == "checkpoint" and span.worker.startswith("critic")]
    assert critic[0].seconds == pytest.approx(LOADED["ppo-7b-16gpu"].spec("critic").parameters * 14 * 4 / 3 / 1e9)


def test_time_never_grows_with_bandwidth() -> None:
    played = [play(big(fabric={"link": "ib-hdr200", "oversubscription": over})) for over in (8.0, 4.0, 2.0, 1.0)]
    for stage in ("update_actor", "weight_sync"):
        spent = [stage_seconds(timeline, stage) for timeline in played]
        assert spent == sorted(spent, reverse=True) and spent[0] > 1.05 * spent[-1]
    assert makespan(played[0]) >= makespan(played[-1])


def test_one_step_off_is_never_longer_and_is_shorter_where_rollout_and_training_have_devices_of_their_own() -> None:
    for name in SHIPPED:
        sync, off = (makespan(play(scenario(name, num_steps=4, schedule={"mode": mode}))) for mode in MODES)
        assert off <= sync * (1 + 1e-9), name
    grpo = {"name": "grpo", "kl_coef": 0.05}
    data = LOADED["ppo-7b-16gpu"].replace({"algorithm": grpo, "num_steps": 4, "workload": _two_samples()})
    sync, off = (play(data.replace({"schedule": {"mode": mode}})) for mode in MODES)
    assert makespan(off) < 0.9 * makespan(sync)


def _two_samples() -> dict[str, Any]:
    workload = LOADED["ppo-7b-16gpu"].model_dump(mode="json", by_alias=True)["workload"]
    return workload | {"prompts_per_step": 192, "samples_per_prompt": 2}


def flat(each: float) -> Profile:
    """A measured profile in which each op costs the same whatever it does."""
    free = Range(low=0, high=1e30)
    ops = {
        op: OpProfile(
            coefficients={"each": each}, ranges=dict.fromkeys(names, free), points=1, residual_median=0, residual_p90=0
        )
        for op, names in FORMULAS.items()
        if op != "grad_sync"
    }
    return Profile(name="flat", device="cpu-core", kind="measured", models=("tiny-llama",), ops=ops)


def test_a_step_of_unit_costs_is_the_sum_along_its_critical_path() -> None:
    """One engine, fixed lengths, unit costs: dispatch + 16 iterations + host, and so on for each stage in turn."""
    workload = {"prompts_per_step": 8, "samples_per_prompt": 4, "response_tokens": {"dist": "fixed", "value": 16}}
    chosen = scenario(workload=workload, num_steps=2, algorithm={"kl_coef": 0.0}, checkpoint={"every_steps": None})
    timeline = simulate(chosen, {"cpu-core": flat(0.001)})
    rollout, reward, advantage, update, sync = 1 + 16 + 1, 1 + 1, 1 + 1, 1 + 1 + 1 + 1 + 1, 1 + 1
    assert makespan(timeline) == pytest.approx(2 * 0.001 * (rollout + reward + advantage + update + sync))
    assert timeline.header.profiles["cpu-core"] == {
        "name": "flat",
        "kind": "measured",
        "extrapolated_share": 0.0,
        "unmeasured": [],
    }
    assert not any(span.attrs.get("extrapolated") for span in timeline.spans)


def test_costs_scale_a_timeline() -> None:
    one, three = (simulate(scenario(), {"cpu-core": flat(each)}) for each in (0.001, 0.003))
    for short, long in zip(one.spans, three.spans, strict=True):
        assert long.span_id == short.span_id and long.end_s == pytest.approx(3 * short.end_s)


def test_what_a_measured_profile_lacks_is_filled_from_the_datasheet_and_said() -> None:
    full = flat(0.001)
    lacking = full.model_copy(update={"ops": {op: cost for op, cost in full.ops.items() if op != "backward"}})
    timeline = simulate(scenario(), {"cpu-core": lacking})
    said = timeline.header.profiles["cpu-core"]
    assert said["unmeasured"] == ["backward"] and 0 < said["extrapolated_share"] < 1
    assert {span.op for span in timeline.spans if span.attrs.get("extrapolated")} == {"backward"}


def test_everything_from_a_datasheet_is_extrapolated() -> None:
    timeline = play(scenario())
    assert timeline.header.profiles["cpu-core"]["extrapolated_share"] == 1.0
    assert all(span.attrs["extrapolated"] for span in timeline.spans if span.op)


def test_a_sequence_that_cannot_fit_the_cache_is_the_users_error() -> None:
    with pytest.raises(InputError, match="KV blocks") as caught:
        play(scenario(rollout={"kv_bytes": 40_000.0}))
    assert caught.value.key == "rollout.kv_bytes"


def test_the_header_says_what_the_timeline_is_of() -> None:
    header = play(scenario("ppo-7b-16gpu")).header
    assert header.origin == "simulated" and header.pools["spare"] and header.memory["rollout"]["fits"]
    assert header.lanes["actor.train[2]"].devices == ("train[4]", "train[5]")
    assert header.digest == scenario("ppo-7b-16gpu").digest


def test_weights_that_leave_no_room_are_named_instead_of_the_cache() -> None:
    text = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
    small = parse(text.replace("a100-80g-sxm", "rtx-4090").replace("qwen2.5-7b", "qwen2.5-14b"))
    with pytest.raises(InputError, match=r"(?s)weights take 29\.\d GB.*no room for KV") as caught:
        simulate(small, {"rtx-4090": datasheet("rtx-4090")})
    assert caught.value.key == "place.actor.generate"
    assert "tensor_parallel above 1" in caught.value.remedy and "dtype: fp8" in caught.value.remedy
