"""Works that take turns for real: nothing is lost between turns, memory is given back, and both worlds move the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor import parcel
from executor.experience import Samples
from executor.switching import Switching
from executor.turns import Turn, give_back, limits, loaded_bytes, resident_bytes
from lab.dataflow import conforms
from lab.load import load
from lab.scenario import Scenario
from lab.timeline import Span, Timeline
from lab.wiring import build
from profiles.memory import worker_footprint
from profiles.profile import datasheet
from profiles.slices import loaded_bytes as simulated_bytes
from profiles.slices import spilled_bytes
from simulator.run import simulate
from tests.executor.ranks import Ranks
from tests.executor.test_ranks import LORA, samples, scenario_of, weights_of

Make = Callable[..., Scenario]
TINY = "colocated-tiny"


class Stand:
    """What a worker's bytes are computed from."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.scenario, self.worker = scenario, scenario.workers[name]


@pytest.mark.parametrize(
    "changes", [{}, {"place": {"actor.train": {"pool": "all", "zero_stage": 2, "data_parallel": 2}}}]
)
def test_a_switch_is_charged_for_the_same_bytes_in_both_worlds(scenario: Make, changes: dict[str, Any]) -> None:
    chosen = scenario(TINY, **changes)
    for name, worker in chosen.workers.items():
        if worker.role != "reward":
            expected = simulated_bytes(worker, worker_footprint(chosen, worker))
            assert loaded_bytes(Stand(chosen, name)) == pytest.approx(expected)


def test_samples_take_on_disk_what_is_predicted(scenario: Make, tmp_path: Path) -> None:
    chosen = scenario(TINY)
    workload = chosen.workload
    known, lengths = workload.prompt_lengths(chosen.seed, 1), workload.response_lengths(chosen.seed, 1).ravel()
    prompts = np.repeat(np.arange(len(known)), workload.samples_per_prompt)
    drawn = Samples(
        step=1, policy_version=1, prompts=prompts, num_prompt_tokens=known[prompts],
        tokens=[np.zeros(known[p] + n, dtype=np.int64) for p, n in zip(prompts, lengths, strict=True)],
        logprobs=[np.zeros(n, dtype=np.float32) for n in lengths],
    )  # fmt: skip
    parcel.write(tmp_path / "samples", drawn)
    size = (tmp_path / "samples").stat().st_size
    assert 0 < size - spilled_bytes(chosen, 1) < 2048, "beside the arrays a file has a header"


def test_who_is_loaded_first_is_whose_turn_comes_first(scenario: Make, tmp_path: Path) -> None:
    chosen = scenario(TINY)
    switching = Switching(chosen, build(chosen), {}, tmp_path)
    waits = {name: switching.waits(worker) for name, worker in chosen.workers.items()}
    assert waits == {
        "actor.generate[0]": False, "reference.score[0]": True, "reward.score[0]": False, "actor.train[0]": True,
    }  # fmt: skip
    resident = scenario("quickstart")
    others = Switching(resident, build(resident), {}, tmp_path)
    assert not any(others.takes_turns(worker) for worker in resident.workers.values())


def test_what_cores_cannot_do_is_refused_by_name() -> None:
    data = load(f"scenarios/{TINY}.yaml")
    assert list(limits(data)) == []
    for how in ("sleep", "offload"):
        sharing = {"all": data.sharing["all"].model_dump(mode="json") | {"switch": how}}
        found = list(limits(data.replace({"sharing": sharing})))
        assert [key for key, _, _ in found] == ["sharing.all.switch"]
        assert how in found[0][1]
    judged = data.model_dump(mode="json", by_alias=True)
    judged["models"]["reward"] = {"arch": "tiny-llama", "dtype": "float32"}
    judged["place"]["reward.score"] = {"pool": "all"}
    judged["sharing"]["all"]["slices"][1].append("reward.score")
    assert [key for key, _, _ in limits(data.replace(judged))] == ["evaluate.every_steps"]
    judged["sharing"]["all"]["slices"] = [["actor.generate", "reward.score"], ["reference.score", "actor.train"]]
    assert list(limits(data.replace(judged))) == []


def test_memory_goes_back_to_the_system() -> None:
    held = [bytes(1000) for _ in range(150_000)]
    full = resident_bytes()
    held.clear()
    give_back()
    assert full - resident_bytes() > 100e6


def straight(rank: int, world: int, chosen: Scenario, role: str) -> Any:
    trainer = trainer_of(rank, world, chosen, role)
    return [trainer.update(step, samples(step))["learning"] for step in range(3)], weights_of(trainer)


def in_turns(rank: int, world: int, chosen: Scenario, role: str, folder: Path) -> Any:
    """The same updates, the trainer giving way after each."""
    from executor.turns import come, leave

    trainer, learned, spans = trainer_of(rank, world, chosen, role), [], list[Span]()
    for step in range(3):
        learned.append(trainer.update(step, samples(step))["learning"])
        turn = Turn(node="switch:all:1", step=step, policy_version=step + 1, folder=folder)
        spans += leave(trainer, turn)["spans"]
        assert not hasattr(trainer, "learner")
        if world > 1:
            from deepspeed import comm

            comm.barrier()  # nobody comes before all have left
        spans += come(trainer, turn)[1]["spans"]
    return learned, weights_of(trainer), spans


def trainer_of(rank: int, world: int, chosen: Scenario, role: str) -> Any:
    from tests.executor.test_ranks import trainer_of as made

    return made(rank, world, chosen, role)


@pytest.mark.real
@pytest.mark.parametrize(("ranks", "stage", "lora"), [(1, 0, LORA), pytest.param(2, 2, None, marks=pytest.mark.full)])
def test_a_trainer_goes_on_in_its_next_turn_to_the_bit(
    scenario: Make, tmp_path: Path, ranks: int, stage: int, lora: Any
) -> None:
    chosen = scenario_of(scenario, ranks, stage, "actor", lora)
    with Ranks(ranks) as fleet:
        alone = fleet.run(straight, chosen, "actor")
        turned = fleet.run(in_turns, chosen, "actor", tmp_path)
    for (learned, weights), (again, after, spans) in zip(alone, turned, strict=True):
        assert learned == again
        assert all(np.array_equal(weights[name], after[name]) for name in weights)
        assert [span.op for span in spans if span.op] == ["save", "drop", "restore"] * 3
        left = [span.attrs for span in spans if "resident_before" in span.attrs]
        assert len(left) == 6


def moved(timeline: Timeline) -> dict[str, list[tuple[str, float]]]:
    """By span of a switch: its ops in order, and the bytes of each, headers of files aside."""
    found: dict[str, list[tuple[str, float]]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        if span.stage == "switch":
            ops = found.setdefault(span.span_id.split("#")[0], [])
            ops += [(span.op, span.bytes)] if span.op else []
    return found


@pytest.mark.real
@pytest.mark.full
def test_a_run_in_turns_does_what_is_simulated(local_ray: None, scenario: Make, tmp_path: Path) -> None:
    from executor.run import execute

    one = {key: part.model_dump(mode="json") | {"threads": 1} for key, part in (
        ("actor.train", load(f"scenarios/{TINY}.yaml").place.actor_train),
        ("reference.score", load(f"scenarios/{TINY}.yaml").place.reference_score),
    ) if part is not None}  # fmt: skip
    workload = {"prompts_per_step": 8}
    chosen = scenario(
        TINY, num_steps=2, place=one | {"actor.generate": [{"pool": "all", "threads": 1}]}, workload=workload,
        evaluate={"prompts": 4},
    )  # fmt: skip
    timeline = execute(chosen, tmp_path)
    assert (timeline.header.status, timeline.header.error) == ("done", "")
    assert conforms(build(chosen), timeline) == []
    expected, found = moved(simulate(chosen, {"cpu-core": datasheet("cpu-core")})), moved(timeline)
    assert expected.keys() == found.keys()
    for name, ops in expected.items():
        assert [op for op, _ in ops] == [op for op, _ in found[name]]
        for (op, size), (_, measured) in zip(ops, found[name], strict=True):
            assert measured == pytest.approx(size, rel=0.1, abs=40_000 if op == "save" else 2048)
    stopped = [span for span in timeline.stages() if "generate" in span.worker and span.node == "switch:all:0"]
    assert all(span.attrs["resident_before"] - span.attrs["resident_after"] > 30e6 for span in stopped)
    assert all(row["logprob_gap"] < 1e-3 for row in timeline.header.learning)
    assert "evaluation_win_rate" in timeline.header.learning[1]
    assert not list((tmp_path / "turns").glob("samples-*")), "samples on disk have served"


def test_trained_models_of_different_slices_are_not_saved_together(scenario: Make) -> None:
    """A checkpoint holds both, and a model that is not loaded has left no checkpoint of its own."""
    adapted = {"arch": "tiny-llama", "dtype": "float32", "lora": {"rank": 2}}
    parts: dict[str, Any] = {
        "models": {"actor": adapted, "critic": adapted}, "schedule": {"mode": "synchronous"},
        "checkpoint": {"every_steps": 2}, "sharing": {"all": {"how": "time_sliced", "switch": "reload"}},
    }  # fmt: skip
    assert [key for key, _, _ in limits(scenario("ppo-tiny", **parts))] == ["checkpoint.every_steps"]
    together = [["actor.generate"], ["reference.score", "critic.train", "actor.train"]]
    parts["sharing"]["all"]["slices"] = together
    assert list(limits(scenario("ppo-tiny", **parts))) == []


def test_adapters_do_not_come_to_engines_of_both_kinds(scenario: Make) -> None:
    pools = {"pools": {"all": "local[0]", "one": "local[1]"}, "place": {"actor.generate": [{"pool": "one"}]}}
    sharing = {"all": {"how": "time_sliced", "switch": "reload", "slices": [["actor.train"], ["reference.score"]]}}
    chosen = scenario(TINY, **pools, sharing=sharing)
    assert [key for key, _, _ in limits(chosen)] == ["models.actor.lora"]
