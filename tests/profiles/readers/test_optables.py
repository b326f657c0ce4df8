"""Folders of op times: the table is the closed form they were written from, and every fault is named."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from lab.errors import InputError
from lab.library import model
from lab.measurement import faults
from profiles.iteration import EngineTable, Iteration
from profiles.readers.optables import engine_table, measurements

SPEC = model("tiny-llama")
TOKENS, SEQUENCES = (1, 2, 4, 16, 64), (1, 2, 8)
CHUNKS, PREFIXES, DECODES, CONTEXTS = (0, 16, 64), (0, 32, 128), (0, 1, 4, 8), (0, 16, 64, 256)
DENSE = {"embedding": (1.0, 0.1), "layernorm": (0.5, 0.02), "qkv_proj": (3.0, 0.3), "final_layernorm": (0.25, 0.01)}
"""microseconds of one call, and for each token"""


def dense_us(tokens: float) -> float:
    """Embedding and last norm once; two norms and one projection in each layer."""
    calls = {"embedding": 1, "layernorm": 2 * SPEC.layers, "qkv_proj": SPEC.layers, "final_layernorm": 1}
    return sum(calls[layer] * (fixed + each * tokens) for layer, (fixed, each) in DENSE.items())


def attention_us(chunk: float, prefix: float, decodes: float, context: float) -> float:
    """Multilinear, and nothing where nothing is scheduled."""
    return chunk * (2 + 0.01 * prefix) + decodes * (1 + 0.02 * context)


def attention_rows() -> list[dict[str, float]]:
    """As such folders have it: no prefix without a chunk, no context without a decode, and no empty iteration."""
    rows = []
    for chunk, prefix, decodes, context in product(CHUNKS, PREFIXES, DECODES, CONTEXTS):
        if (
            (chunk or not prefix)
            and (decodes or not context)
            and (chunk or decodes)
            and not (chunk == 64 and decodes == 8)
        ):
            time_us = attention_us(chunk, prefix, decodes, context)
            point = {"prefill_chunk": chunk, "kv_prefill": prefix, "n_decode": decodes, "kv_decode": context}
            rows.append({**point, "time_us": time_us})
    return rows


def rows() -> dict[str, list[dict[str, Any]]]:
    return {
        "dense.csv": [
            {"layer": layer, "tokens": tokens, "time_us": fixed + each * tokens}
            for layer, (fixed, each) in DENSE.items()
            for tokens in TOKENS
            if (layer, tokens) != ("layernorm", 4)  # one layer lacks a point that others have
        ],
        "per_sequence.csv": [
            {"layer": layer, "sequences": number, "time_us": each * number}
            for layer, each in (("lm_head", 7.0), ("sampler", 2.0))
            for number in SEQUENCES
        ],
        "attention.csv": attention_rows(),
    }


META = {
    "vllm_version": "0.19.0",
    "skew_fit": {
        "enabled": True,
        "per_tp": {1: {"alpha_default": 0.1}},
        "bucket_axes": {
            "n_bins": [0, 4, 8], "n_labels": ["few", "many"], "skew_rate_bins": [0, 1.0], "skew_rate_labels": ["any"],
            "kv_big_bins": [0, 64, 256], "kv_big_labels": ["short", "long"], "kp_bins": [-1, 0, 512],
            "kp_labels": ["kp=0", "kp>0"],
        },
    },
}  # fmt: skip
SKEW = [
    {"pc": 0, "n_label": "few", "skew_rate_label": "any", "kv_big_label": "short", "kp_label": "kp=0", "alpha": 0.5},
    {"pc": 0, "n_label": "many", "skew_rate_label": "any", "kv_big_label": "long", "kp_label": "kp=0", "alpha": -0.2},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tp1"
    made.mkdir()
    for name, table in rows().items():
        pd.DataFrame(table).to_csv(made / name, index=False)
    return made


def mixed(chunk: int, prefix: int, decodes: int, context: int, longest: int | None = None) -> Iteration:
    return Iteration(
        tokens=chunk + decodes, sequences=decodes + (chunk > 0), prefill_tokens=chunk, prefix=prefix, decodes=decodes,
        context_sum=decodes * context, context_max=longest or context,
    )  # fmt: skip


def expected_us(it: Iteration) -> float:
    attention = attention_us(it.prefill_tokens, it.prefix, it.decodes, it.mean_context)
    return dense_us(it.tokens) + 9.0 * it.sequences + SPEC.layers * attention


@given(st.integers(0, 200), st.integers(0, 300), st.integers(0, 20), st.integers(0, 600))
@effort(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_iteration_is_the_closed_form_inside_and_beyond_the_grid(
    folder: Path, chunk: int, prefix: int, decodes: int, context: int
) -> None:
    if chunk + decodes:
        it = mixed(chunk, prefix if chunk else 0, decodes, context if decodes else 0)
        assert table(folder).seconds(it) == pytest.approx(expected_us(it) * 1e-6, rel=1e-6)


_tables: dict[Path, EngineTable] = {}


def table(folder: Path) -> EngineTable:
    if folder not in _tables:
        _tables[folder] = engine_table(folder, SPEC)
    return _tables[folder]


def test_the_ends_of_the_tables_are_what_was_measured(folder: Path) -> None:
    found = engine_table(folder, SPEC)
    assert found.covers(mixed(60, 128, 4, 256)) and not found.covers(mixed(16, 0, 9, 16))
    assert not found.covers(mixed(65, 0, 0, 0)) and not found.covers(mixed(0, 0, 4, 300))


def test_shards_add_two_all_reduces_of_the_activations_in_each_layer(folder: Path) -> None:
    sharded = engine_table(folder, SPEC, all_reduce=lambda size: 1e-6 + size * 1e-11)
    for tokens in TOKENS:
        it = mixed(0, 0, tokens, 16)
        more = sharded.seconds(it) - engine_table(folder, SPEC).seconds(it)
        assert more == pytest.approx(2 * SPEC.layers * (1e-6 + tokens * SPEC.hidden * 2 * 1e-11))


def skewed(folder: Path, **changes: Any) -> EngineTable:
    (folder.parent / "meta.yaml").write_text(yaml.safe_dump(META | changes))
    pd.DataFrame(SKEW).to_csv(folder / "skew_fit.csv", index=False)
    return engine_table(folder, SPEC)


@pytest.mark.parametrize(
    ("it", "share"),
    [(mixed(0, 0, 4, 20, longest=60), 0.5), (mixed(0, 0, 4, 20, longest=65), 0.1), (mixed(0, 0, 5, 20, longest=65), 0.0),
     (mixed(0, 0, 9, 20, longest=65), 0.1), (mixed(16, 0, 4, 20, longest=60), 0.1)],
    ids=["its bin", "a bin without a fit", "a negative fit", "beyond the bins", "another chunk"],
)  # fmt: skip
def test_uneven_contexts_cost_the_share_of_their_bin(folder: Path, it: Iteration, share: float) -> None:
    extra_us = SPEC.layers * share * it.decodes * 0.02 * (it.context_max - it.mean_context)
    assert skewed(folder).seconds(it) == pytest.approx((expected_us(it) + extra_us) * 1e-6, rel=1e-9)


def test_a_fit_of_skew_counts_only_where_it_is_switched_on(folder: Path) -> None:
    off = skewed(folder, skew_fit={"enabled": False})
    assert off.skews is None and off.skew == 0.0


def test_every_point_is_a_measurement_with_its_time(folder: Path) -> None:
    skewed(folder)
    points = list(measurements(folder, device="a100-80g-sxm", model="tiny-llama"))
    assert len(points) == sum(len(part) for part in rows().values())
    assert sum(point.seconds for point in points) == pytest.approx(
        sum(row["time_us"] for part in rows().values() for row in part) * 1e-6
    )
    for point in points:
        assert list(faults(point)) == []
        assert (point.device, point.model) == ("a100-80g-sxm", "tiny-llama")
        assert point.source == "LLMServingSim op tables, vLLM 0.19.0, tp1"
    first, last = points[0], points[-1]
    assert (first.op, first.point, first.quantities) == ("layer", "embedding", {"tokens": 1.0})
    assert last.op == "attention" and set(last.quantities) == {"prefill_chunk", "kv_prefill", "n_decode", "kv_decode"}


COUNTS = {
    "dense.csv": ("tokens", "time_us"),
    "per_sequence.csv": ("sequences", "time_us"),
    "attention.csv": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
}
CELLS = [(name, column) for name, columns in COUNTS.items() for column in columns]


@pytest.mark.parametrize("wrong", ["nan", "-1", "inf", "fast"])
@pytest.mark.parametrize(("name", "column"), CELLS)
def test_a_number_that_is_none_is_named(folder: Path, name: str, column: str, wrong: str) -> None:
    lines = (folder / name).read_text().splitlines()
    cells = lines[3].split(",")
    cells[lines[0].split(",").index(column)] = wrong
    (folder / name).write_text("\n".join([*lines[:3], ",".join(cells), *lines[4:]]))
    with pytest.raises(InputError) as caught:
        engine_table(folder, SPEC)
    assert (caught.value.file, caught.value.line, caught.value.key) == (str(folder / name), 4, column)


@pytest.mark.parametrize(("name", "column"), [*CELLS, ("dense.csv", "layer"), ("per_sequence.csv", "layer")])
def test_a_missing_column_is_named(folder: Path, name: str, column: str) -> None:
    pd.read_csv(folder / name).drop(columns=column).to_csv(folder / name, index=False)
    for reading in (lambda: engine_table(folder, SPEC), lambda: list(measurements(folder, device="d", model="m"))):
        with pytest.raises(InputError, match="missing") as caught:
            reading()
        assert (caught.value.file, caught.value.key) == (str(folder / name), column)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_a_missing_or_empty_table_is_named(folder: Path, name: str) -> None:
    for content in (None, b"", b"\xff\xfe\x00", b'layer,tokens\n"'):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(InputError) as caught:
            engine_table(folder, SPEC)
        assert caught.value.file == str(folder / name)


def test_a_wrong_description_is_named(folder: Path) -> None:
    skewed(folder)
    for content, problem in (
        ("- 1", "not a YAML mapping"), ("{", "not a YAML mapping"), ("", "not a YAML mapping"),
        (yaml.safe_dump(META | {"skew_fit": {"enabled": True}}), "lacks 'per_tp'"),
    ):  # fmt: skip
        (folder.parent / "meta.yaml").write_text(content)
        with pytest.raises(InputError, match=problem) as caught:
            engine_table(folder, SPEC)
        assert caught.value.file == str(folder.parent / "meta.yaml")


def test_points_of_one_layer_and_grid_need_no_order(folder: Path) -> None:
    shuffled = folder.parent / "shuffled" / "tp1"
    shuffled.mkdir(parents=True)
    for name in COUNTS:
        pd.read_csv(folder / name).sample(frac=1, random_state=1).to_csv(shuffled / name, index=False)
    one, other = engine_table(folder, SPEC), engine_table(shuffled, SPEC)
    for field in ("token_grid", "token_seconds", "sequence_seconds", "context_grid", "attention_seconds"):
        np.testing.assert_allclose(getattr(one, field), getattr(other, field))
