"""More hands, and hands that help: what one more engine, stealing and extra prompts may never cost."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.policies.dispatch import DISPATCH
from lab.scenario import Scenario
from tests.plays import Played, batches, drawn_for, play
from tests.strategies import changed, on_gpus

ORDERLY = ("synchronous", "one_step_off")


def equal(engines: list[dict[str, Any]], prompts: int, samples: int, tokens: int, **changes: Any) -> Scenario:
    """All prompts and all responses are equally long."""
    work = {
        "prompts_per_step": prompts, "samples_per_prompt": samples, "prompt_tokens": {"dist": "fixed", "value": 40},
        "response_tokens": {"dist": "fixed", "value": tokens},
    }  # fmt: skip
    own = {"num_steps": 2, "workload": work, "place": {"actor.generate": engines, "actor.train": {"data_parallel": 1}},
           "update": {"minibatch_samples": prompts * samples}}  # fmt: skip
    return changed("ppo-7b-16gpu", own, changes)


def lasted(played: Played) -> list[float]:
    """Seconds of each step's rollout."""
    steps = {span.step for span in played.stages("rollout")}
    own = [[span for span in played.stages("rollout") if span.step == step] for step in sorted(steps)]
    return [max(span.end_s for span in spans) - min(span.start_s for span in spans) for spans in own]


@given(
    st.sampled_from(sorted(DISPATCH)), st.integers(1, 4), st.integers(1, 30), st.sampled_from([1, 3]), st.integers(20, 90),
    st.sampled_from([2, 8, 64]), st.sampled_from(ORDERLY), st.sampled_from(["batch", "sample"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=20)
def test_with_equal_lengths_one_more_equal_engine_never_lengthens_rollout(
    dispatch: str,
    num: int,
    prompts: int,
    samples: int,
    tokens: int,
    seats: int,
    mode: str,
    scoring: str,
    stealing: bool,
) -> None:
    rules = {"rollout": {"dispatch": dispatch, "max_num_seqs": seats, "stealing": stealing},
             "schedule": {"mode": mode, "scoring": scoring}}  # fmt: skip
    few, more = (
        play(equal([{"pool": "spare", "engines": engines}], prompts, samples, tokens, **rules))
        for engines in (num, num + 1)
    )
    assert all(b <= a * (1 + 1e-9) for a, b in zip(lasted(few), lasted(more), strict=True))


def call_seconds(played: Played) -> float:
    worker = played.scenario.team("actor", "generate")[0]
    return played.world.cost(worker, "dispatch", {"calls": 1.0, "bytes": 0.0}).seconds


def longest_iteration(played: Played) -> float:
    ops = [span for span in played.timeline.spans if span.stage == "rollout" and span.attrs.get("iterations")]
    return max(span.seconds / span.attrs["iterations"] for span in ops if span.op)


def steals(played: Played) -> int:
    return sum(len(span.attrs.get("steals", ())) for span in played.stages("rollout"))


@given(
    st.integers(1, 3), st.integers(1, 30), st.sampled_from([1, 3]), st.integers(20, 90), st.sampled_from([2, 4, 8]),
    st.sampled_from(["round_robin", "weighted", "least_loaded"]), st.sampled_from([1.0, 3.0]),
)  # fmt: skip
@settings(max_examples=25)
def test_with_equal_lengths_stealing_costs_at_most_its_calls_and_an_iteration_each(
    num: int, prompts: int, samples: int, tokens: int, seats: int, dispatch: str, speed: float
) -> None:
    """What is stolen joins when its call has come and the iteration under way has ended. Also where prompts are dealt as
    if one engine were thrice as fast, so that it has too many."""
    engines = [{"pool": "spare", "engines": num}, {"pool": "rollout", "engines": 1, "speed": speed}]
    rules = {"dispatch": dispatch, "max_num_seqs": seats}
    plain, stolen = (
        play(equal(engines, prompts, samples, tokens, rollout=rules | {"stealing": on})) for on in (False, True)
    )
    cost = steals(stolen) * (call_seconds(stolen) + longest_iteration(stolen))
    assert sum(lasted(stolen)) <= sum(lasted(plain)) + cost + 1e-9
    assert stolen.samples == plain.samples


@given(on_gpus(modes=ORDERLY), st.sampled_from([0.1, 0.5, 2.0]))
@settings(max_examples=12)
def test_extra_prompts_are_never_trained_beyond_a_steps_samples(chosen: Scenario, extra: float) -> None:
    """A step trains as many whole prompts as without, all of its own; what else was issued is dropped or aborted."""
    data = chosen.model_dump(mode="json", by_alias=True)
    played = play(chosen.replace({"rollout": data["rollout"] | {"over_issue": extra}}))
    work, counts = chosen.workload, played.samples
    for step, batch in enumerate(batches(played.world)):
        mine = drawn_for(played.world, step)
        assert len(batch) == work.samples_per_step and {own for own, _ in mine} == {step}
        held = Counter(place // work.samples_per_prompt for _, place in mine)
        assert set(held.values()) == {work.samples_per_prompt} and len(held) == work.prompts_per_step
    assert counts["issued"] - counts["trained"] == counts["dropped"] + counts["aborted"] > 0
    assert played.timeline.header.wasted_tokens >= 0
