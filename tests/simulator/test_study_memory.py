"""The published peak memory: what the study reads, and how near it comes."""

import csv
import os
from pathlib import Path

import pytest

from simulator.studies.accuracy import errors
from simulator.studies.memory import GLM_AIR, published_memory

DATA = os.environ.get("LAB_VALIDATION_DATA")
CASE = {
    "case_id": "one", "quantity": "peak memory allocated", "usable": "full", "value": "12.5", "unit": "GiB",
    "actor_model": "Qwen3-0.6B", "algorithm": "trainer microbenchmark: RL Full", "train_gpus": "1.0",
    "train_parallel": "FSDP2 EP1 CP1; AC=Recompute; FA3", "resp_len_max": "16384 (packed seq)",
}  # fmt: skip


def written(folder: Path, *cases: dict[str, str]) -> Path:
    with (folder / "published_cases.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, CASE)
        table.writeheader()
        table.writerows(cases)
    return folder


def test_it_predicts_what_is_stated_in_full_and_says_why_not_the_rest(tmp_path: Path) -> None:
    other = CASE | {"quantity": "step time", "case_id": "time"}
    partial = CASE | {"usable": "partial", "case_id": "two"}
    unknown = CASE | {"actor_model": "Nobody-1B", "case_id": "three"}
    found = published_memory(written(tmp_path, CASE, other, partial, unknown))
    assert [row.excluded for row in found.rows] == ["", "partial", "unknown-model"]
    assert found.judged[0].assumed and found.excluded == {"partial": 1, "unknown-model": 1}


def test_offloaded_activations_and_adapters_need_less_and_more_tokens_more(tmp_path: Path) -> None:
    cases = [
        CASE,
        CASE | {"train_parallel": "FSDP2 EP1 CP1; AC=Offload; FA3"},
        CASE | {"algorithm": "trainer microbenchmark: RL LoRA(r=16)"},
        CASE | {"resp_len_max": "65536 (packed seq)"},
    ]
    rows = published_memory(written(tmp_path, *(case | {"case_id": str(i)} for i, case in enumerate(cases)))).rows
    whole, offloaded, adapters, long = (row.predicted or 0.0 for row in rows)
    assert 0 < adapters < offloaded < whole < long


def test_intellect_3_has_as_many_parameters_as_its_card_says() -> None:
    assert GLM_AIR.parameters == pytest.approx(106.85e9, rel=0.005)
    assert GLM_AIR.active_parameters == pytest.approx(12e9, rel=0.15)


@pytest.mark.skipif(DATA is None, reason="LAB_VALIDATION_DATA names no folder with published measurements")
def test_half_of_the_published_peaks_are_within_fifteen_percent() -> None:
    found = published_memory(Path(str(DATA)))
    statistics = errors(found.judged)
    assert statistics is not None and statistics.num == 42
    assert statistics.p50 <= 0.15 and statistics.num_unexplained == 0
