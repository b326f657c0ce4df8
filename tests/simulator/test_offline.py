"""Algorithms that read their samples from a data set: supervised tuning, preferences, reward models."""

from typing import Any

import pytest

from lab.dataflow import conforms
from lab.load import load
from lab.metrics import num_steady, publications, summarise
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.memory import pools
from profiles.profile import datasheet
from simulator.run import simulate

NAMES = ("sft-7b", "reward-model-7b", "dpo-7b", "kto-7b")
LOADED = {name: load(f"scenarios/{name}.yaml") for name in NAMES}
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}
FIXED = {
    "prompt_tokens": {"dist": "fixed", "value": 200},
    "response_tokens": {"dist": "fixed", "value": 300},
}


def scenario(name: str, **changes: Any) -> Scenario:
    data = LOADED[name].model_dump(mode="json", by_alias=True)
    plain = {"num_steps": 4, "checkpoint": {"every_steps": None}, "evaluate": {"every_steps": None}}
    merged = {key: data[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    return LOADED[name].replace(plain | merged)


def play(name: str, **changes: Any) -> Timeline:
    return simulate(scenario(name, **changes), SHEETS)


def spans(timeline: Timeline, stage: str, op: str = "") -> list[Span]:
    return [span for span in timeline.spans if span.stage == stage and span.op == op]


def seconds(timeline: Timeline, stage: str, op: str) -> float:
    return sum(span.seconds for span in spans(timeline, stage, op))


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
@pytest.mark.parametrize("name", NAMES)
def test_runs_conform_repeat_and_train_every_sample_that_is_read(name: str, mode: str) -> None:
    evaluate = {"every_steps": 2, "samples_per_prompt": 2}
    changes = {"schedule": {"mode": mode}, "checkpoint": {"every_steps": 2}, "evaluate": evaluate}
    chosen = scenario(name, **changes, workload={"samples_per_prompt": 2})
    timeline, samples = simulate(chosen, SHEETS), chosen.workload.samples_per_step * 4
    assert conforms(build(chosen), timeline) == []
    assert timeline.digest() == simulate(chosen, SHEETS).digest()
    assert timeline.header.samples["issued"] == timeline.header.samples["trained"] == samples
    assert not {"rollout", "reward", "advantage", "weight_sync"} & {span.stage for span in timeline.spans}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_ends_with_its_update_and_all_figures_that_exist_are_given(name: str) -> None:
    timeline = play(name)
    stage = "update_critic" if name == "reward-model-7b" else "update_actor"
    ends = [max(span.end_s for span in spans(timeline, stage) if span.step == step) for step in range(4)]
    assert publications(timeline) == ends and num_steady(timeline) == 3
    told = summarise(timeline)
    assert told["steps_done"] == 4 and told["samples_per_s"] > 0 and told["bottleneck"]["stage"] == stage
    assert told["response_tokens_per_s"] is None and told["lag"] == {"mean": None, "max": None}
    assert all(sum(shares.values()) == pytest.approx(1) for shares in told["pools"].values())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_placed_fits(name: str) -> None:
    assert all(pool.fits for pool in pools(LOADED[name]).values())


def test_the_reference_of_the_next_step_hides_behind_the_update_only_one_step_off() -> None:
    """With equal lengths every step is the same: together, or the longer of the two."""
    for mode, period in (("synchronous", sum), ("one_step_off", max)):
        timeline = play("dpo-7b", workload=FIXED, schedule={"mode": mode})
        stages = [max(span.seconds for span in spans(timeline, stage)) for stage in ("reference", "update_actor")]
        times = [b - a for a, b in zip(publications(timeline), publications(timeline)[1:], strict=False)]
        assert times == pytest.approx([period(stages)] * 3, rel=5e-3), "calls aside"


def test_the_kl_of_kto_costs_one_more_forward_pass_each() -> None:
    with_it, without = (play("kto-7b", workload=FIXED, algorithm={"kl": kl}) for kl in ("mismatched", "none"))
    ratio = seconds(with_it, "reference", "forward") / seconds(without, "reference", "forward")
    assert ratio == pytest.approx(2.0)
    first = max(span.seconds for span in spans(without, "update_actor", "forward"))
    extra = seconds(with_it, "update_actor", "forward") / seconds(without, "update_actor", "forward")
    assert first > 0 and 1.7 < extra <= 2.0, "without a gradient a pass is at most as long"


def test_the_two_responses_of_a_pair_are_read_by_one_rank_in_one_pass() -> None:
    """One pair a rank and pass: every pass holds the tokens of one prompt twice and of two neighbouring responses."""
    chosen = scenario("dpo-7b", update={"microbatch_samples": 2}, num_steps=1)
    timeline = simulate(chosen, SHEETS)
    prompts = chosen.workload.prompt_lengths(chosen.seed, 0)
    responses = chosen.workload.response_lengths(chosen.seed, 0)
    pairs = (2 * prompts + responses.sum(axis=1)).tolist()
    passes = [span.tokens for span in spans(timeline, "update_actor", "forward")]
    assert sorted(passes) == sorted(pairs)


def test_a_reward_model_trains_on_its_own_place_without_logits() -> None:
    timeline = play("reward-model-7b")
    assert {span.worker.split("[")[0] for span in timeline.spans} == {"reward.train"}
    [pool] = pools(LOADED["reward-model-7b"]).values()
    held = pool.workers["reward.train[0]"]
    assert sum(held.instants["logits"].values()) < 5e9


def test_online_dpo_rolls_out_pairs_and_publishes_weights() -> None:
    place = LOADED["dpo-7b"].model_dump(mode="json", by_alias=True)["place"] | {
        "actor.generate": [{"pool": "engine"}],
        "reward.score": {"pool": "judge"},
        "reference.score": {"pool": "frozen"},
        "actor.train": {"pool": "train", "data_parallel": 4, "zero_stage": 3},
    }
    chosen = LOADED["dpo-7b"].replace(
        {
            "algorithm": {"name": "dpo", "online": True},
            "pools": {"train": "gpu[0:4]", "frozen": "gpu[4]", "judge": "gpu[5]", "engine": "gpu[6]"},
            "models": {"actor": {"arch": "qwen2.5-7b"}, "reference": {"like": "actor"}, "reward": {"like": "actor"}},
            "place": place, "num_steps": 2, "schedule": {"mode": "synchronous"}, "checkpoint": {"every_steps": None},
        }
    )  # fmt: skip
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    stages = {"rollout", "reward", "reference", "advantage", "update_actor", "weight_sync"}
    assert {span.stage for span in timeline.spans} == stages
    assert timeline.header.samples["trained"] == 2 * 192


@pytest.mark.parametrize("sharing", [{"how": "time_sliced", "switch": "offload"}, {"how": "resident"}])
def test_reference_and_trainer_can_share_their_devices(sharing: dict[str, Any]) -> None:
    place = {
        "actor.train": {"pool": "all", "data_parallel": 8, "zero_stage": 3},
        "reference.score": {"pool": "all", "replicas": 8, "max_batch_samples": 16},
    }
    data = LOADED["dpo-7b"].model_dump(mode="json", by_alias=True)
    changes = {
        "pools": {"all": "gpu[0:8]"}, "sharing": {"all": sharing}, "place": place, "num_steps": 3,
        "workload": data["workload"] | {"prompts_per_step": 64}, "update": data["update"] | {"minibatch_samples": 128},
        "schedule": {"mode": "synchronous"}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip
    chosen = LOADED["dpo-7b"].replace(changes)
    timeline = simulate(chosen, SHEETS)
    assert conforms(build(chosen), timeline) == []
    assert ("switch" in {span.stage for span in timeline.spans}) == (sharing["how"] == "time_sliced")
