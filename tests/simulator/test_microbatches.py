"""Samples become passes: all of them, within the limits, and what padding and uneven ranks cost is told."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.load import load
from lab.scenario import Scenario
from profiles.profile import datasheet
from simulator.microbatches import Plan, plan
from simulator.run import simulate

BASE = load("scenarios/sft-7b.yaml")
SHEETS = {"a100-80g-sxm": datasheet("a100-80g-sxm")}


def scenario(**update: Any) -> Scenario:
    data = BASE.model_dump(mode="json", by_alias=True)
    return BASE.replace({"update": data["update"] | update, "num_steps": 1})


def padded(made: Plan) -> float:
    return sum(one.quantities["tokens"] for batch in made.passes for rank in batch for one in rank)


def num_passes(made: Plan) -> int:
    return sum(len(rank) for batch in made.passes for rank in batch)


lengths = st.lists(st.integers(2, 4096), min_size=128, max_size=128)


@settings(max_examples=25)
@given(lengths, st.sampled_from(["padded", "packed"]), st.integers(1, 20))
def test_every_token_is_in_exactly_one_pass_within_the_limits(sizes: list[int], pack: str, most: int) -> None:
    made = plan(scenario(pack=pack, microbatch_samples=most), "actor", sizes)
    passes = [one for batch in made.passes for rank in batch for one in rank]
    assert sum(one.tokens for one in passes) == sum(sizes)
    assert all(one.quantities["tokens"] <= 8192 for one in passes)
    assert len(passes) >= -(-128 // most)


@settings(max_examples=25)
@given(lengths)
def test_packing_saves_the_padding_and_nothing_else(sizes: list[int]) -> None:
    loose, tight = (plan(scenario(pack=pack), "actor", sizes) for pack in ("padded", "packed"))
    assert padded(tight) == sum(sizes) <= padded(loose)
    assert num_passes(tight) <= num_passes(loose)
    assert tight.notes(0)["padding"] == 0.0 <= loose.notes(0)["padding"] < 1.0


def test_notes_in_closed_form() -> None:
    """Of eight ranks one has a double share; of two samples in a pass one is half as long as the other."""
    even = plan(scenario(pack="padded"), "actor", [1000] * 128)
    assert even.notes(3) == {"padding": 0.0, "imbalance": 0.0}
    uneven = plan(scenario(pack="packed"), "actor", [2000 if i % 8 == 0 else 1000 for i in range(128)])
    assert uneven.notes(0)["imbalance"] == pytest.approx(2 / (9 / 8) - 1)
    half = plan(scenario(pack="padded", microbatch_samples=2), "actor", [1000, *[500] * 7, *[500] * 8] * 8)
    assert half.notes(0)["padding"] == pytest.approx(0.0), "samples of a length go together"


def test_packed_samples_attend_to_themselves_alone() -> None:
    tight = plan(scenario(pack="packed"), "actor", [1000] * 128)
    loose = plan(scenario(pack="padded"), "actor", [1000] * 128)
    total = [
        sum(one.quantities["attention_flops"] for batch in made.passes for rank in batch for one in rank)
        for made in (tight, loose)
    ]
    assert total[0] == pytest.approx(total[1])


def test_padding_takes_time_and_the_span_says_how_much() -> None:
    times, notes = [], []
    for pack in ("packed", "padded"):
        stages = [span for span in simulate(scenario(pack=pack), SHEETS).stages() if span.stage == "update_actor"]
        times.append(max(span.end_s for span in stages))
        notes.append([span.attrs["padding"] for span in stages])
    assert times[0] < times[1] and not any(notes[0]) and all(notes[1])


def test_a_limit_of_samples_can_stand_alone() -> None:
    chosen = scenario(microbatch_tokens=None, microbatch_samples=2)
    assert chosen.pass_tokens == 2 * chosen.workload.max_sequence_tokens
    made = plan(chosen, "actor", [100] * 128)
    assert num_passes(made) == 64
    with pytest.raises(ValueError, match="microbatch_tokens"):
        scenario(microbatch_tokens=None)


@pytest.mark.parametrize(("limit", "tokens"), [(2000, 8 * (400 + 2 * 600) * 2), (2900, 8 * (400 + 4 * 600))])
def test_samples_of_a_prompt_share_its_tokens_within_a_pass(limit: int, tokens: int) -> None:
    """Eight prompts of 400 tokens with four responses of 600 each: two of them fit a pass of 2000, four one of 2900."""
    data = BASE.model_dump(mode="json", by_alias=True)
    fixed = {"prompt_tokens": {"dist": "fixed", "value": 400}, "response_tokens": {"dist": "fixed", "value": 600}}
    chosen = BASE.replace({
        "update": {"minibatch_samples": 32, "microbatch_tokens": limit, "pack": "shared"},
        "workload": data["workload"] | fixed | {"prompts_per_step": 32},
        "place": {"actor.train": {"pool": "train", "data_parallel": 1}}, "pools": {"train": "gpu[0:1]"},
    })  # fmt: skip
    made = plan(chosen, "actor", [1000] * 32, ([i // 4 for i in range(32)], [400] * 32))
    assert padded(made) == tokens
    assert sum(one.tokens for batch in made.passes for rank in batch for one in rank) == 32_000
