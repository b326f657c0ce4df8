"""Measures do what they promise: an effect is the difference it makes, and the least combination fits and is least."""

import itertools
from pathlib import Path

import pytest

from lab.load import parse
from profiles.footprint_measures import _Trial, answer, changed, possible_measures
from profiles.memory import pools

MINIMAL = Path("scenarios/minimal-8gpu.yaml").read_text()
BARE = MINIMAL.replace(", lora: {rank: 16}", "").replace("recompute: full", "recompute: none")


def test_the_minimal_system_fits_and_only_because_of_its_adapters_and_recomputation() -> None:
    found = answer(parse(MINIMAL))
    assert all(pool.memory.fits and pool.least == () for pool in found.values())
    without = {taken.measure.label: taken.fits_without for taken in found["train"].taken}
    assert without["adapters (LoRA) of actor and critic"] is False
    assert without["recompute every layer in the backward pass"] is False
    bits = {taken.measure.label: taken for taken in found["frozen"].taken}
    assert (
        bits["int8 weights of the reference"].fits_without and bits["int8 weights of the reference"].saved_bytes > 6e9
    )


def test_what_is_taken_instead_fits() -> None:
    scenario = parse(MINIMAL)
    trial = _Trial(scenario)
    by_label = {measure.label: without for measure, without in trial.taken}
    for taken in answer(scenario)["train"].taken:
        if taken.instead:
            after = by_label[taken.measure.label].after(*taken.instead)
            assert after is not None and after["train"].fits


def test_the_least_combination_fits_and_no_smaller_one_does() -> None:
    scenario = parse(BARE)
    found = answer(scenario)["train"]
    assert not found.memory.fits and found.least
    trial = _Trial(scenario)
    after = trial.after(*found.least)
    assert after is not None and after["train"].fits
    for count in range(1, len(found.least)):
        for chosen in itertools.combinations(trial.possible, count):
            other = trial.after(*chosen)
            assert other is None or not other["train"].fits


def test_an_effect_is_the_difference_that_the_changed_file_makes() -> None:
    before, after = (
        pools(parse(MINIMAL)),
        pools(parse(MINIMAL.replace("microbatch_tokens: 4096", "microbatch_tokens: 2048"))),
    )
    [effect] = [e for e in answer(parse(MINIMAL))["train"].possible if e.measure.key == "update/microbatch_tokens"]
    assert effect.saved_bytes == pytest.approx(before["train"].peak_bytes - after["train"].peak_bytes)


def test_a_change_leaves_the_scenario_as_it_was() -> None:
    scenario = parse(MINIMAL)
    other = changed(scenario, ("place", "actor_generate", 0, "tensor_parallel"), 2)
    assert scenario == parse(MINIMAL)
    assert other.place.actor_generate[0].tensor_parallel == 2 and other.place.actor_train == scenario.place.actor_train


def test_every_measure_names_a_key_of_the_scenario() -> None:
    for text in (MINIMAL, BARE, Path("scenarios/ppo-7b-16gpu.yaml").read_text()):
        scenario = parse(text)
        for measure in possible_measures(scenario):
            found = scenario
            for part in measure.key.split("/"):
                found = found[int(part)] if part.isdigit() else getattr(found, part)
            assert found != measure.value


def test_offload_without_zero_is_not_proposed() -> None:
    text = BARE.replace("zero_stage: 2", "zero_stage: 0")
    found = answer(parse(text))["train"]
    assert not any("host memory" in effect.measure.label for effect in found.possible)


def test_engines_can_be_merged_into_wider_ones_on_the_same_devices() -> None:
    scenario = parse(MINIMAL)
    wider = [m for m in possible_measures(scenario) if m.key == "place/actor_generate"]
    [part] = scenario.place.actor_generate
    assert part.engines > 1 and wider
    for measure in wider:
        [merged] = measure.value
        assert merged.engines * merged.tensor_parallel == part.engines * part.tensor_parallel
    trial = _Trial(scenario)
    after = trial.after(wider[0])
    assert after is not None
    weights = [
        next(size for _, what, size in found["rollout"].consumers if what == "weights") for found in (trial.now, after)
    ]
    assert weights[1] == pytest.approx(weights[0] / 2)


def test_keys_are_spelled_as_in_a_scenario() -> None:
    keys = {measure.yaml_key for measure in possible_measures(parse(BARE))}
    assert {"place.actor.train.offload", "update.microbatch_tokens", "place.actor.generate"} <= keys
    assert not any("_train" in key or "_score" in key or "/" in key for key in keys)
