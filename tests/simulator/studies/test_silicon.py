"""Serving measurements on GPUs: halves, rules, and constants that are fitted on other groups only."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from profiles.engine_table import Fusion
from profiles.readers.silicon import MODULE
from simulator.studies.accuracy import errors
from simulator.studies.silicon import Played, _contradicts, _rule, fit, kv_blocks, play
from simulator.studies.silicon_rows import DENSE, MINIMAX, Case, Engine, cases, engine_of

installed = pytest.mark.skipif(find_spec(MODULE) is None, reason="the extra `silicon` is not installed")
CASE = Case(
    id="x", model=DENSE[0], system="h100_sxm", precision="fp8", prompt=1024, response=1024, clients=8, devices=4,
    data_parallel=1, expert_parallel=1, release="", benchmark=True, tpot_s=0.01, ttft_s=0.1,
)  # fmt: skip
ENGINE = Engine(MINIMAX, "fp8", "fp8", "fp8", Fusion(), 8192, True, ())


def played(case: Case, tpot_s: float, per: tuple[float, float, float], *, waits: bool = False) -> Played:
    return Played(
        case=case, engine=ENGINE, tpot_s=tpot_s, tpot_per=np.array(per), waits=waits, notes=()
    )  # fmt: skip


def test_constants_are_recovered_and_cases_that_wait_for_room_are_left_out() -> None:
    draw, truth = np.random.default_rng(0), np.array([5e-4, 3e-5, 1e-4])
    parts = []
    for i in range(60):
        per = (1.0, float(draw.integers(1, 128)), float(draw.uniform(0, 4)))
        kernels = float(draw.uniform(5e-3, 5e-2))
        case = replace(CASE, system=f"s{i % 3}", tpot_s=kernels + float(np.dot(per, truth)))
        parts.append(played(case, kernels, per))
    parts.append(played(replace(CASE, tpot_s=9.0), 0.01, (1.0, 1.0, 1.0), waits=True))
    assert np.allclose(fit(parts), truth, rtol=1e-3)


def test_constants_are_never_negative() -> None:
    parts = [played(replace(CASE, tpot_s=0.01), 0.02, (1.0, float(n), 0.0)) for n in range(1, 20)]
    assert np.array_equal(fit(parts), np.zeros(3))


def test_more_clients_with_less_time_per_token_contradict() -> None:
    slow = replace(CASE, id="slow", clients=8, tpot_s=0.01)
    assert _contradicts(replace(CASE, clients=32, tpot_s=0.009), slow)
    assert not _contradicts(replace(CASE, clients=16, tpot_s=0.009), slow)
    assert not _contradicts(replace(CASE, clients=32, tpot_s=0.011), slow)
    assert not _contradicts(replace(CASE, clients=32, tpot_s=0.009, devices=8), slow)


def test_rules_name_what_they_take_out() -> None:
    part = played(CASE, 0.01, (1.0, 1.0, 1.0))
    assert _rule(CASE, [CASE], part) == ""
    assert _rule(CASE, [CASE], "does-not-fit") == "does-not-fit"
    assert _rule(replace(CASE, model=DENSE[2]), [], part) == "near-peak"
    assert _rule(replace(CASE, model=DENSE[1], precision="bf16"), [], part) == ""
    assert _rule(replace(CASE, model=DENSE[1], precision="fp8"), [], part) == "near-peak"


def test_lengths_are_drawn_as_the_benchmark_draws_them() -> None:
    prompts, responses = CASE.lengths()
    assert len(prompts) == 80 and prompts.min() >= 819 and prompts.max() <= 1024
    assert np.array_equal(CASE.lengths()[1], responses)
    fixed = replace(CASE, benchmark=False).lengths()[0]
    assert set(fixed.tolist()) == {1024}


def test_weights_leave_less_room_on_fewer_devices() -> None:
    blocks = [kv_blocks(replace(CASE, devices=n), ENGINE) for n in (4, 8)]
    assert 0 < 2 * blocks[0] < blocks[1]
    assert kv_blocks(replace(CASE, devices=1), ENGINE) == 0


@installed
def test_halves_are_disjoint_and_make_the_whole() -> None:
    even, odd, whole = (cases(half) for half in ("even", "odd", "all"))
    assert len(even) + len(odd) == len(whole) == 1328
    assert not {case.id for case in even} & {case.id for case in odd}
    assert sum(case.model in DENSE for case in whole) == 339


@installed
def test_a_case_is_predicted_within_a_quarter_before_any_constant() -> None:
    chosen = [case for case in cases("even") if case.model == DENSE[0] and case.system == "h100_sxm"][:6]
    parts = [play(case) for case in chosen]
    assert all(isinstance(part, Played) for part in parts)
    for case, part in zip(chosen, parts, strict=True):
        assert 0.75 < part.tpot_s / case.tpot_s < 1.1
        assert part.tpot_per[0] == pytest.approx(1.0, rel=0.1), "about one iteration for each token"
        assert part.tpot_per[1] == pytest.approx(case.clients, rel=0.1)


@installed
def test_engines_are_started_as_the_benchmark_says() -> None:
    engines = {case.model: engine_of(case) for case in cases("even") if case.system == "b200_sxm"}
    assert engines["openai/gpt-oss-120b"].expert_dtype == "w4a8_mxfp4_mxfp8"
    assert engines["openai/gpt-oss-120b"].dtype == "bfloat16"
    assert all(engine.fusion.allreduce_norm and engine.assumed for engine in engines.values())


@installed
def test_the_fit_of_a_group_does_not_see_it() -> None:
    from simulator.studies import silicon

    seen = []

    def spying(parts):
        seen.append({part.case.group for part in parts})
        return fit(parts)

    with pytest.MonkeyPatch.context() as patch:
        every = [case for case in cases("even") if case.model in DENSE]
        few = {case.group: case for case in every if case.clients <= 16}.values()
        patch.setattr(silicon, "cases", lambda half: tuple(few))
        patch.setattr(silicon, "fit", spying)
        found = silicon.dense("even")
    groups = [case.group for case in few]
    assert all(group not in fitted for group, fitted in zip(dict.fromkeys(groups), seen, strict=True))
    assert errors(found.judged) and {row.quantity for row in found.rows} == {"TPOT"}
