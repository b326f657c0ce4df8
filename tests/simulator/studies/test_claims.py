"""Claims and their judges: every claim has one, every judgement says why, and a few can be checked by hand."""

import math
from pathlib import Path

import pytest

from lab.errors import InputError
from simulator.studies.claims import VERDICTS, Bench, changed, chosen, claims, judge
from simulator.studies.claims.network import compression
from simulator.studies.claims.sampling import distribution, entropy

ALL = [claim.id for claim in claims()]
QUICK = ("pipeline-10-2-8", "pipeline-hides", "coupled-memory", "lower-top-p", "hundred-runs", "compressed-ids",
         "gradient-size", "static-waste", "adapters-memory")  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def test_ids_are_unique_and_scenarios_exist() -> None:
    assert len(set(ALL)) == len(ALL)
    named = {name for claim in claims() for name in claim.scenarios}
    assert {name for name in named if not (Path("scenarios") / f"{name}.yaml").exists()} == set()


@pytest.mark.parametrize("name", QUICK)
def test_a_judgement_has_numbers_and_a_reason(bench: Bench, name: str) -> None:
    valid(bench, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_so_have_all_others(bench: Bench, name: str) -> None:
    valid(bench, name)


def valid(bench: Bench, name: str) -> None:
    (claim,) = chosen([name])
    found = judge(claim, bench)
    assert found.verdict in VERDICTS
    assert found.numbers
    assert all(math.isfinite(number) for number in found.numbers.values())
    assert found.reason.endswith(".")


def test_the_pipeline_takes_its_slowest_stage(bench: Bench) -> None:
    """Rollout against reward and training: the closed form of a period without a barrier."""
    serial = bench.play("pipeline-10-2-8")
    piped = bench.play("pipeline-10-2-8", {"schedule/mode": "one_step_off", "num_steps": 8})
    rest = serial.step_s - serial.busy_s("rollout")
    assert piped.step_s == pytest.approx(max(serial.busy_s("rollout"), rest), rel=0.01)


def test_an_unknown_claim_is_the_users_mistake() -> None:
    with pytest.raises(InputError, match="did you mean"):
        chosen(["pipelin-10-2-8"])


def test_changes_are_checked_like_a_file(bench: Bench) -> None:
    scenario = bench.scenario("grpo-7b-16gpu")
    again = changed(scenario, {"place/actor.generate/0/engines": 4})
    assert again.place.actor_generate[0].engines == 4
    with pytest.raises(ValueError, match="64 devices"):
        changed(scenario, {"place/actor.generate/0/engines": 64})


def test_a_played_scenario_is_played_once(bench: Bench) -> None:
    assert bench.play("pipeline-10-2-8") is bench.play("pipeline-10-2-8", {"num_steps": 4})


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="checkout"):
        Bench(tmp_path).scenario("pipeline-10-2-8")


def test_a_smaller_nucleus_is_never_less_certain() -> None:
    uniform = entropy(distribution(0.0))
    assert uniform == pytest.approx(math.log(50_000))
    steps = [entropy(distribution(1.2, top_p=p)) for p in (1.0, 0.99, 0.9, 0.5, 0.1)]
    assert steps == sorted(steps, reverse=True)


def test_measured_compression_never_beats_the_entropy_of_single_samples_by_much() -> None:
    """The table is of the order that information theory allows: ids of ten bits in words of 32."""
    table = compression()
    single = next(r["saved"] for r in table["rows"] if (r["samples"], r["ids"], r["codec"]) == (1, "int32", "zstd-3"))
    assert 1 - 16 / 32 < single < 1 - 0.5 * table["entropy_bits_per_token"] / 32
