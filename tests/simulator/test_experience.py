"""Samples on their way to the trainer: their bytes, what is hidden and what is not, and where they are scored."""

from typing import Any

import pytest
from pydantic import ValidationError

from lab.dataflow import conforms
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.experience import CODECS, message
from profiles.profile import datasheet
from simulator.run import simulate

BIG = load("scenarios/ppo-7b-16gpu.yaml").model_dump(mode="json", by_alias=True)
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm"), "cpu-core": datasheet("cpu-core")}
WAN = {"between": ["a", "b"], "bandwidth": 1e8, "latency": 0.05}


def scenario(experience: dict[str, Any] | None, away: bool = False, **changes: Any) -> Scenario:
    """Trainers on one machine, engines on another, at the same site or `away`; 64 samples of 256 and 256 tokens."""
    fixed = {"dist": "fixed", "value": 256}
    node = {"device": "a100-80g-sxm", "intra": "nvlink3"}
    train, serve = node | {"name": "train", "devices": 8}, node | {"name": "serve", "devices": 4}
    fabric = {"link": "ib-hdr200"}
    one = [{"name": "a", "nodes": [train, serve], "fabric": fabric}]
    two = [{"name": "a", "nodes": [train], "fabric": fabric}, {"name": "b", "nodes": [serve], "fabric": fabric}]
    data = BIG | {
        "num_steps": 2,
        "cluster": {"sites": two, "wan": [WAN]} if away else {"sites": one},
        "pools": {
            "train": "train[0:4]", "critic": "train[4:6]", "scores": "train[6:8]", "rollout": "serve[0:2]", "edge": "serve[2:4]"
        },
        "sharing": {"scores": {"how": "exclusive"}},
        "place": BIG["place"]
        | {
            "actor.train": {"pool": "train", "data_parallel": 4, "zero_stage": 2},
            "critic.train": {"pool": "critic", "data_parallel": 2, "zero_stage": 2},
            "actor.generate": [{"pool": "rollout", "engines": 2}],
            "reference.score": {"pool": "scores"},
            "reward.score": {"pool": "scores"},
        },
        "workload": {
            "prompts_per_step": 16, "samples_per_prompt": 4, "prompt_tokens": fixed, "response_tokens": fixed,
        },
        "update": BIG["update"] | {"minibatch_samples": 64},
        "experience": experience,
    }  # fmt: skip
    return Scenario.model_validate(data | changes, strict=False)


def play(experience: dict[str, Any] | None, away: bool = False, **changes: Any) -> Timeline:
    chosen = scenario(experience, away, **changes)
    timeline = simulate(chosen, SHEETS)
    assert not conforms(build(chosen), timeline)
    samples = timeline.header.samples
    assert samples["issued"] == samples["trained"] == 2 * chosen.workload.samples_per_step
    return timeline


def sends(timeline: Timeline, step: int = 0) -> list[Span]:
    return [span for span in timeline.spans if span.op == "send" and span.step == step]


def starts(timeline: Timeline, stage: str) -> float:
    return min(span.start_s for span in timeline.stages() if span.stage == stage and span.step == 0)


def ends(timeline: Timeline, stage: str) -> float:
    return max(span.end_s for span in timeline.stages() if span.stage == stage and span.step == 0)


def test_by_default_nothing_is_sent_apart() -> None:
    assert not any(span.stage == "transfer" for span in play(None).spans)


def test_bytes_are_those_of_ids_and_log_probabilities() -> None:
    for logprobs, each in (("none", 0), ("sampled", 4), ("full", 4 * 152064)):
        found = sum(span.bytes for span in sends(play({"logprobs": logprobs})))
        assert found == pytest.approx(64 * (512 * 8 + 256 * each + 64))
    few = sum(span.bytes for span in sends(play({"logprobs": "top_k", "top_k": 20})))
    assert few == pytest.approx(64 * (512 * 8 + 256 * 160 + 64))


def test_alone_a_transfer_takes_packing_the_narrowest_link_and_unpacking() -> None:
    """Two engines share the connection; each packs and unpacks its own."""
    timeline = play({"logprobs": "full"}, away=True)
    size = 32 * (512 * 8 + 256 * 4 * 152064 + 64)
    expected = 1e-3 + 2 * size / 1e9 + 2 * 0.05 + 2 * size / 0.8e8
    assert [span.seconds for span in sends(timeline)] == pytest.approx([expected] * 2, rel=1e-3)


def test_everything_at_the_trainers_site_waits_for_the_samples() -> None:
    timeline = play({"logprobs": "full"}, away=True)
    assert starts(timeline, "transfer") >= ends(timeline, "rollout")
    for stage in ("reward", "reference", "value"):
        assert starts(timeline, stage) >= ends(timeline, "transfer")


def test_what_is_scored_beside_the_engines_is_sent_with_the_samples() -> None:
    place = scenario(None).place.model_dump(mode="json", by_alias=True)
    place |= {"reference.score": {"pool": "edge"}, "reward.score": {"pool": "edge"}}
    timeline = play({}, away=True, place=place)
    assert ends(timeline, "reference") <= starts(timeline, "transfer") <= starts(timeline, "value")
    more = sum(s.bytes for s in sends(timeline)) - sum(s.bytes for s in sends(play({}, away=True)))
    assert more == pytest.approx(64 * 256 * 4), "a reference log-probability for each response token"


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_what_is_sent_as_it_comes_leaves_little_for_the_end(mode: str) -> None:
    lengths = {"response_tokens": {"dist": "lognormal", "mean": 200, "p95": 500, "max": 1000}}
    load = scenario(None).workload.model_dump(mode="json") | lengths
    same = {"workload": load, "schedule": {"mode": mode}}
    late = play({"logprobs": "top_k", "top_k": 500}, away=True, **same)
    soon = play({"logprobs": "top_k", "top_k": 500, "prefetch": True, "batch_samples": 1}, away=True, **same)
    assert ends(soon, "transfer") < ends(late, "transfer")
    assert sum(span.seconds for span in sends(soon)) < 0.9 * sum(span.seconds for span in sends(late))
    assert sum(span.bytes for span in sends(soon)) == pytest.approx(sum(span.bytes for span in sends(late)))


def test_scores_of_single_samples_follow_their_arrival() -> None:
    schedule = {"mode": "synchronous", "scoring": "sample"}
    experience = {"logprobs": "full", "batch_samples": 4}
    batch, single = (play(experience, away=True, schedule=s) for s in ({"mode": "synchronous"}, schedule))
    assert starts(single, "reward") < ends(single, "transfer") <= ends(single, "reward") < ends(batch, "reward")


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_single_samples_are_sent_and_scored_beside_the_rollout(mode: str) -> None:
    """One stage after the other has each sample as soon as the one before is done with it."""
    lengths = {"response_tokens": {"dist": "lognormal", "mean": 200, "p95": 500, "max": 1000}}
    load = scenario(None).workload.model_dump(mode="json") | lengths
    experience = {"logprobs": "top_k", "top_k": 500, "prefetch": True}
    timeline = play(experience, away=True, schedule={"mode": mode, "scoring": "sample"}, workload=load)
    assert (
        starts(timeline, "reward") < ends(timeline, "rollout") < ends(timeline, "transfer") <= ends(timeline, "reward")
    )


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compression_helps_a_narrow_line_and_costs_on_a_wide_one(codec: str) -> None:
    narrow = [sends(play({"compression": name, "logprobs": "none"}, away=True)) for name in ("none", codec)]
    assert max(s.seconds for s in narrow[1]) < max(s.seconds for s in narrow[0])
    wide = [message(scenario({"transport": "rdma", "compression": name}), 32, 16384, 8192) for name in ("none", codec)]
    saved = (wide[0].sent - wide[1].sent) / (0.8 * 25e9)
    assert wide[1].packing_s - wide[0].packing_s > saved
    one, many = (message(scenario({"compression": codec, "logprobs": "none"}), n, 512 * n, 256 * n) for n in (1, 10**6))
    assert (one.sent - 64) / 4096 == pytest.approx(CODECS[codec].alone)
    assert many.sent / many.raw < one.sent / one.raw


def test_many_small_messages_pay_their_latency_one_by_one() -> None:
    few, many = (sends(play({"batch_samples": size}, away=True)) for size in (32, 1))
    assert {span.attrs["messages"] for span in few} == {1} and {span.attrs["messages"] for span in many} == {32}
    gap = max(s.seconds for s in many) - max(s.seconds for s in few)
    assert gap == pytest.approx(31 * 2 * 0.05, rel=0.1)


def test_messages_sent_beside_the_rollout_wait_until_they_are_whole() -> None:
    """Every engine sends its samples in as few messages as they fit in."""
    lengths = {"dist": "lognormal", "mean": 256, "p95": 700, "max": 1024}
    workload = scenario({}).model_dump(mode="json", by_alias=True)["workload"] | {"response_tokens": lengths}
    each: dict[int | None, Timeline] = {}
    for most in (None, 1, 5, 8):
        said = {"prefetch": True} | ({} if most is None else {"batch_samples": most})
        each[most] = play(said, workload=workload)
    for most in (1, 5, 8):
        for span in each[most].stages():
            if span.stage == "transfer":
                send = next(op for op in each[most].spans if op.span_id == f"{span.span_id}#0")
                assert send.attrs["messages"] == -(-span.attrs["samples"] // most)
    assert len({timeline.digest() for timeline in each.values()}) >= 3


def test_a_prescreening_spares_the_reward_what_it_settles() -> None:
    plain, screened = play({}), play({"prescreen": {"share": 0.75, "per_sample": 0.005}})

    def passed(timeline: Timeline) -> int:
        return sum(span.tokens for span in timeline.spans if span.stage == "reward" and span.op == "forward")

    assert 0.1 < passed(screened) / passed(plain) < 0.4
    extra = [b.seconds - a.seconds for a, b in zip(sends(plain), sends(screened), strict=True)]
    assert extra == pytest.approx([32 * 0.005] * 2, rel=1e-3)


def test_engines_on_the_trainers_machine_use_no_network() -> None:
    tiny = load("scenarios/quickstart.yaml").model_dump(mode="json", by_alias=True) | {"num_steps": 1}
    for transport in ("shared_memory", "object_store", "rpc"):
        chosen = Scenario.model_validate(tiny | {"experience": {"transport": transport}}, strict=False)
        timeline = simulate(chosen, SHEETS)
        assert not conforms(build(chosen), timeline) and len(sends(timeline)) == 1


@pytest.mark.parametrize(
    ("experience", "away", "key"),
    [
        ({"transport": "shared_memory"}, False, "machines"),
        ({"transport": "rdma"}, True, "does not reach"),
        ({"top_k": 5}, False, "top_k"),
        ({"logprobs": "top_k"}, False, "top_k"),
    ],
)
def test_what_cannot_be_is_refused(experience: dict[str, Any], away: bool, key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        scenario(experience, away)


def test_samples_that_leave_with_their_rewards_are_not_sent_before() -> None:
    place = scenario(None).place.model_dump(mode="json", by_alias=True) | {"reward.score": {"pool": "edge"}}
    with pytest.raises(ValidationError, match="leave with their reward"):
        scenario({"prefetch": True}, True, place=place)


@pytest.mark.parametrize("scoring", ["batch", "sample"])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("pool", ["scores", "edge"])
def test_without_a_barrier_a_batch_is_made_of_what_has_arrived(scoring: str, away: bool, pool: str) -> None:
    place = scenario(None).place.model_dump(mode="json", by_alias=True)
    place |= {"reference.score": {"pool": pool}, "reward.score": {"pool": pool}}
    schedule = {"mode": "asynchronous", "scoring": scoring, "staleness": {"bound": 1}}
    same = {"schedule": schedule, "num_steps": 3, "place": place}
    plain, sent = (simulate(scenario(said, away, **same), SHEETS) for said in (None, {"logprobs": "full"}))
    trained = [next(s for s in t.stages() if s.stage == "advantage" and s.step == 0).start_s for t in (plain, sent)]
    least = 64 * 256 * 4 * 152064 / (0.8 * (1e8 if away else 25e9))
    assert trained[1] > trained[0] + 0.5 * least
    for timeline in (plain, sent):
        samples = timeline.header.samples
        assert samples["trained"] == 3 * 64
        assert samples["issued"] == sum(number for fate, number in samples.items() if fate != "issued")
