"""Training in a simulation: its time follows token sums and the fullest rank; pipelines, adapters and syncs show."""

from pathlib import Path
from typing import Any

import pytest

from lab.accounts import accounts
from lab.load import load, parse
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from profiles.formula import FORMULAS
from profiles.profile import OpProfile, Profile, Range, datasheet
from simulator.run import simulate

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True) | {"num_steps": 1}
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}


def play(train: dict[str, Any] | None = None, generate: dict[str, Any] | None = None, **changes: Any) -> Timeline:
    place = BIG["place"] | {
        "actor.train": BIG["place"]["actor.train"] | {"tensor_parallel": 1, "zero_stage": 0} | (train or {}),
        "actor.generate": [BIG["place"]["actor.generate"][0] | (generate or {})],
    }
    merged = {key: BIG[key] | value for key, value in changes.items()}
    return simulate(Scenario.model_validate(BIG | {"place": place} | merged, strict=False), SHEETS)


def ops(timeline: Timeline, stage: str, *names: str) -> list[Span]:
    return [span for span in timeline.spans if span.stage == stage and span.op in names]


def seconds(timeline: Timeline, stage: str, *names: str) -> float:
    return sum(span.seconds for span in ops(timeline, stage, *names))


def values(*numbers: int) -> dict[str, Any]:
    return {"response_tokens": {"dist": "empirical", "values": list(numbers)}}


def test_passes_take_time_by_their_tokens_not_their_samples() -> None:
    """All samples of one length: twice the tokens of each takes at least twice as long, launches aside."""
    prompt = {"prompt_tokens": {"dist": "fixed", "value": 24}}
    short, long = (play(workload=prompt | values(n)) for n in (1000, 2024))
    ratio = seconds(long, "update_actor", "forward") / seconds(short, "update_actor", "forward")
    assert 2.0 <= ratio < 2.3, "attention adds to it"


def test_every_rank_waits_for_the_one_with_the_most_tokens() -> None:
    timeline = play(workload=values(16, 4000))
    team = {span.worker for span in timeline.stages() if span.stage == "update_actor"}
    busy = dict.fromkeys(team, 0.0)
    for span in ops(timeline, "update_actor", "forward", "backward"):
        busy[span.worker] += span.seconds
    starts = [span.start_s for span in ops(timeline, "update_actor", "grad_sync")]
    assert len(team) == 3 and max(busy.values()) > 1.001 * min(busy.values())
    begin = min(span.start_s for span in timeline.stages() if span.stage == "update_actor")
    assert starts == pytest.approx([begin + max(busy.values())] * 3)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_of_p_stages_stands_idle_for_p_minus_1_of_its_microbatches(stages: int) -> None:
    """Bubble over work is (p-1)/m (Narayanan et al. 2021)."""
    timeline = play({"data_parallel": 1, "pipeline_parallel": stages})
    number = len(ops(timeline, "update_actor", "forward"))
    work = seconds(timeline, "update_actor", "forward", "backward")
    assert seconds(timeline, "update_actor", "bubble") == pytest.approx(work * (stages - 1) / number)
    assert not ops(play(), "update_actor", "bubble")
    makespan = max(span.end_s for span in timeline.spans)
    lost = stages / 6 * seconds(timeline, "update_actor", "bubble") / makespan
    assert accounts(timeline, makespan)["actors"]["waiting:pipeline"] == pytest.approx(lost)


def test_context_parallel_ranks_average_gradients_even_of_one_data_rank() -> None:
    assert ops(play({"data_parallel": 1, "context_parallel": 2}), "update_actor", "grad_sync")
    assert not ops(play({"data_parallel": 1}), "update_actor", "grad_sync")


def test_adapters_shrink_what_is_synced_saved_and_optimised() -> None:
    lora = {"models": {"actor": {"arch": "qwen2.5-7b", "lora": {"rank": 16}}}, "checkpoint": {"every_steps": 1}}
    whole, small = play(checkpoint={"every_steps": 1}), play(**lora)
    assert seconds(small, "update_actor", "optimizer") < 0.1 * seconds(whole, "update_actor", "optimizer")
    assert seconds(small, "weight_sync", "transfer") < 0.5 * seconds(whole, "weight_sync", "transfer")  # tensors remain
    sent = [sum(span.bytes for span in ops(t, "update_actor", "grad_sync")) for t in (small, whole)]
    assert sent[0] < 0.01 * sent[1]
    actor = [sum(s.bytes for s in ops(t, "checkpoint", "write") if "actor" in s.worker) for t in (small, whole)]
    assert actor[0] < 0.01 * actor[1]
    assert seconds(small, "update_actor", "forward") > seconds(whole, "update_actor", "forward")


def test_a_plain_weight_sync_is_one_transfer_that_holds_everyone() -> None:
    timeline = play()
    spans = [span for span in timeline.spans if span.stage == "weight_sync" and span.op]
    assert {span.op for span in spans} == {"transfer"} and len(spans) == 3 + 2
    assert len({(span.start_s, span.end_s) for span in spans}) == 1


def test_resharding_and_conversion_show_apart_from_the_transfer() -> None:
    timeline = play({"tensor_parallel": 2}, {"dtype": "int8"})
    names = {
        work: [span.op for span in timeline.spans if span.stage == "weight_sync" and span.op and span.worker == worker]
        for work, worker in (("train", "actor.train[0]"), ("generate", "actor.generate[0]"))
    }
    assert names == {"train": ["reshard", "transfer"], "generate": ["transfer", "convert", "engine_rebuild"]}
    ends = {span.end_s for span in timeline.stages() if span.stage == "weight_sync"}
    assert len(ends) == 1, "the trainer is held until the last engine is ready"


def on_cores(ranks: int, stage: int, **costs: dict[str, float]) -> Timeline:
    """Two cores; these ops cost what is said, the others what the datasheet says."""
    text = Path("scenarios/grpo-two-engines.yaml").read_text()
    scenario = parse(text.replace("data_parallel: 2, zero_stage: 1", f"data_parallel: {ranks}, zero_stage: {stage}"))
    anything = Range(low=0, high=1e12)
    fitted = {
        op: OpProfile(
            coefficients=each, ranges=dict.fromkeys(FORMULAS[op], anything), points=9, residual_median=0, residual_p90=0
        )
        for op, each in costs.items()
    }
    profile = Profile(name="m", device="cpu-core", kind="measured", models=("tiny-llama",), ops=fitted)
    return simulate(scenario, {"cpu-core": profile})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_on_cores_pay_for_what_they_tell_each_other(stage: int) -> None:
    """Gradients in every mini-batch, with ZeRO 1 and 2 the weights that others changed, and once what they learnt."""
    costs = {
        "grad_sync": {"each": 0.25, "zero1_bytes": 0.5 / 3_215_872}, "optimizer": {"each": 0.125, "gathers": 1.0},
        "update_host": {"each": 0.0625, "peers": 2.0},
    }  # fmt: skip
    two, one = (on_cores(ranks, stage, **costs) for ranks in (2, 1))

    def durations(timeline: Timeline, op: str) -> list[float]:
        return [span.seconds for span in ops(timeline, "update_actor", op)]

    number = len(ops(two, "update_actor", "optimizer"))
    assert durations(two, "optimizer") == pytest.approx([1.125 if stage else 0.125] * number)
    assert durations(two, "grad_sync") == pytest.approx([0.75 if stage == 1 else 0.25] * number)
    assert durations(one, "optimizer") == pytest.approx([0.125] * (number // 2)) and number
    for timeline, host in ((two, 2.0625), (one, 0.0625)):
        for stage_span in (span for span in timeline.stages() if span.stage == "update_actor"):
            last = max(span.end_s for span in timeline.spans if span.span_id.startswith(f"{stage_span.span_id}#"))
            assert stage_span.end_s - last == pytest.approx(host)
