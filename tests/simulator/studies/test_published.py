"""Published training figures: how a source is read, which rule takes what out, and laws of the priced times."""

import os
from pathlib import Path

import pandas as pd
import pytest

from lab.errors import InputError
from lab.library import devices, models
from simulator.studies.accuracy import table
from simulator.studies.published import COLUMNS, FILE, exclusion, prediction, published_training, quantity, reading
from simulator.studies.training import Trainer
from simulator.studies.validate import DATA_VARIABLE

MICROBATCH = {
    "case_id": "prl-a", "algorithm": "trainer microbenchmark: RL LoRA(r=16)", "actor_model": "Qwen3-4B-Instruct-2507",
    "gpu_type": "H100 HBM3", "train_gpus": 8.0, "gpus_total": 8, "train_parallel": "FSDP2", "resp_len_max": "16384 (packed)",
    "prompt_len_mean": None, "resp_len_mean": None, "seqs_per_step": None, "optimizer_steps_per_step": None,
    "quantity": "train micro-batch time (1 packed sequence per data rank)", "value": 2.69, "unit": "s", "usable": "full",
    "notes": "trainer only",
}  # fmt: skip
RUN = MICROBATCH | {
    "case_id": "log-pv-05b-grpo", "algorithm": "GRPO", "actor_model": "Qwen2.5-0.5B-Instruct", "prompt_len_mean": 100.0,
    "resp_len_mean": 140.0, "seqs_per_step": 512.0, "optimizer_steps_per_step": "4 (mini-batches)",
    "quantity": "update_actor time",
}  # fmt: skip


def trainer(**changes: object) -> Trainer:
    return Trainer(**{"arch": "qwen3-4b", "device": "h100-80g-sxm", "ranks": 8} | changes)  # type: ignore[arg-type]


def test_the_reading_names_what_the_libraries_have() -> None:
    assert set(reading()["devices"].values()) <= set(devices())
    assert set(reading()["models"].values()) <= set(models())


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, ""),
        ({"usable": "partial"}, "not-full"),
        ({"notes": "INTERNALLY INCONSISTENT: 1 is not 2"}, "inconsistent"),
        ({"quantity": "training MFU"}, "same-measurement"),
        ({"quantity": "peak memory allocated"}, "memory"),
        ({"quantity": "generation time"}, "not-a-training-stage"),
        ({"quantity": "reward time"}, "host-stage"),
        ({"quantity": "training time (actor+critic)"}, "layout-not-stated"),
        ({"actor_model": "Falcon-40B"}, "unknown-model"),
        ({"gpu_type": "TPU v5"}, "unknown-device"),
    ],
)
def test_each_rule_takes_out_what_it_says(changes: dict, rule: str) -> None:
    assert exclusion(MICROBATCH | changes) == rule
    assert rule == "" or rule in reading()["rules"]


def test_brackets_are_no_part_of_a_quantity() -> None:
    assert quantity(MICROBATCH) == "train micro-batch time"


def test_a_microbatch_is_one_step_over_the_packed_length() -> None:
    seconds, assumed = prediction(MICROBATCH)
    assert seconds == pytest.approx(trainer(lora_rank=16).update([[16384]]))
    assert "one sequence fills the packed length" in assumed


def test_a_run_is_read_with_its_steps_and_its_share_of_the_samples() -> None:
    """512 samples of 240 tokens on 8 ranks in 4 optimizer steps: 16 samples a rank and step."""
    seconds, _ = prediction(RUN)
    expected = trainer(arch="qwen2.5-0.5b", pass_tokens=8000).update([[240] * 16] * 4)
    assert seconds == pytest.approx(expected)
    assert prediction(RUN | {"quantity": "old_log_prob time"})[0] < seconds


def test_more_work_takes_longer() -> None:
    one = trainer()
    assert one.update([[8192]]) < one.update([[16384]]) < one.update([[16384], [16384]])
    assert one.update([[16384], [16384]]) == pytest.approx(2 * one.update([[16384]]))
    assert trainer(recompute=False).update([[16384]]) < one.update([[16384]])
    assert one.scoring([16384]) < one.update([[16384]]) / 3


def test_small_passes_cost_more_than_one_large_one() -> None:
    assert trainer(pass_samples=1).scoring([256] * 64) > trainer().scoring([256] * 64)


def test_a_critic_has_no_head_over_the_vocabulary() -> None:
    assert trainer(role="critic").scoring([4096]) < trainer().scoring([4096])


def test_an_absent_column_is_named(tmp_path: Path) -> None:
    pd.DataFrame([MICROBATCH])[[name for name in COLUMNS if name != "gpu_type"]].to_csv(tmp_path / FILE)
    with pytest.raises(InputError, match="gpu_type"):
        published_training(tmp_path)


def test_a_file_of_two_figures_is_judged(tmp_path: Path) -> None:
    pd.DataFrame([MICROBATCH, RUN, RUN | {"quantity": "training MFU"}]).to_csv(tmp_path / FILE)
    part = published_training(tmp_path)
    assert set(table(part)) == {"train micro-batch time", "update_actor time", "all quantities"}
    assert part.excluded["same-measurement"] == 1


def test_every_published_figure_is_judged_or_excluded_and_large_misses_have_reasons() -> None:
    folder = os.environ.get(DATA_VARIABLE)
    if not folder or not (Path(folder) / FILE).exists():
        pytest.skip(f"{DATA_VARIABLE} does not name a folder with {FILE}")
    part = published_training(Path(folder))
    assert len(part.judged) >= 40
    assert len(part.judged) + sum(part.excluded.values()) == len(part.rows)
    assert table(part)["all quantities"].num_unexplained == 0
