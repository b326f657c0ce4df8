"""Profiles that ship: complete, small, true to what they were fitted from, and honest about what they lack."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lab.errors import InputError
from lab.library import model
from profiles.compact import CompactKernels
from profiles.engine_table import engine_table
from profiles.profile import Profile, distinct, find, load, shipped
from profiles.readers import silicon

installed = pytest.mark.skipif(find_spec(silicon.MODULE) is None, reason="the extra `silicon` is not installed")
FULL = ("a100-80g-sxm", "h100-80g-sxm", "h200-141g-sxm", "b200-sxm", "gb200", "l40s", "rtx-pro-6000")
GPUS = (*FULL, "rtx-4090")


@pytest.mark.parametrize("device", GPUS)
def test_every_gpu_has_a_profile_with_source_ranges_and_residuals(device: str) -> None:
    path = shipped()[device]
    profile = find(device)
    assert profile.name == device and path.stat().st_size < 300_000
    assert {"package", "licence", "frameworks", "peaks"} <= set(profile.source)
    assert profile.notes, "what was not measured is said"
    gemms = [curve for name, curve in profile.kernels.items() if name.startswith("gemm.")]
    assert gemms and all(curve.residual_median < 0.08 and curve.held_out > 100 for curve in gemms)
    for curve in profile.kernels.values():
        assert curve.residual_median <= curve.residual_p90 and curve.source


def test_all_that_ship_have_names_of_their_own() -> None:
    assert set(GPUS) < set(distinct(shipped().values()))


def test_two_profiles_of_one_name_are_refused_by_file(tmp_path: Path) -> None:
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text(shipped()["rtx-4090"].read_text())
    with pytest.raises(InputError, match="'rtx-4090' is also in") as caught:
        distinct(sorted(tmp_path.glob("*.yaml")))
    assert caught.value.file == str(tmp_path / "two.yaml") and caught.value.key == "name"
    assert str(tmp_path / "one.yaml") in caught.value.problem


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("unit: x roofline", "unit: hours", "x roofline"),
        ("    unit: x roofline\n", "", "unit"),
        ("values: ", "values: -1 ", "values where the axes make"),
        ("low: 1.0", "low: 99999.0", "empty"),
        ("gemm.bfloat16", "gem.bfloat16", "no kernel 'gem.bfloat16'"),
        ("points: ", "points: -", "points"),
    ],
)
def test_a_bad_curve_in_a_file_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = shipped()["rtx-4090"].read_text()
    assert old in text
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=words) as caught:
        load(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("word", ["nan", "-0.5", "0", "inf"])
def test_a_value_that_is_no_time_is_refused(tmp_path: Path, word: str) -> None:
    text = shipped()["rtx-4090"].read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("values:"))
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace(line, " ".join([*line.split(" ")[:-1], word])))
    with pytest.raises(InputError, match="number") as caught:
        load(path)
    assert caught.value.file == str(path) and caught.value.line


@installed
@pytest.mark.parametrize("device", FULL)
def test_compact_tables_are_near_full_ones(device: str) -> None:
    """Dense model, one device: median within 5 % for what depends on tokens, 8 % for decode attention."""
    from profiles.silicon_kernels import SiliconKernels

    spec = model("llama-3.1-8b")
    full = engine_table(spec, "bfloat16", "bfloat16", 1, SiliconKernels(device))
    own = engine_table(spec, "bfloat16", "bfloat16", 1, CompactKernels(find(device)))
    assert np.array_equal(own.token_grid, full.token_grid) and own.measured
    assert np.median(np.abs(own.token_seconds / full.token_seconds - 1)) < 0.05
    assert np.median(np.abs(own.sequence_seconds[1:] / full.sequence_seconds[1:] - 1)) < 0.05
    decode, wanted = own.attention_seconds[0, 0, 1:], full.attention_seconds[0, 0, 1:]
    assert np.median(np.abs(decode / wanted - 1)) < 0.08


def test_what_a_profile_lacks_is_noted() -> None:
    kernels = CompactKernels(find("rtx-4090"))
    engine_table(model("llama-3.1-8b"), "bfloat16", "bfloat16", 1, kernels)
    assert not kernels.notes
    engine_table(model("qwen3-30b-a3b"), "fp8", "fp8", 2, kernels)
    said = " ".join(kernels.notes)
    assert all(part in said for part in ("experts were not measured", "all_reduce was not measured", "no gemm in fp8"))


def test_a_profile_without_products_makes_no_kernels() -> None:
    whole = find("rtx-4090")
    part = Profile.model_validate(
        {**dict(whole), "kernels": {name: c for name, c in whole.kernels.items() if not name.startswith("gemm")}}
    )
    with pytest.raises(ValueError, match="no curve of gemm"):
        CompactKernels(part)


def test_more_ranks_than_measured_are_scaled_and_noted() -> None:
    kernels = CompactKernels(find("h100-80g-sxm"))
    eight, sixteen = kernels.collective("all_reduce", 1e8, 8), kernels.collective("all_reduce", 1e8, 16)
    assert float(sixteen) == pytest.approx(float(eight) * (15 / 16) / (7 / 8))
    assert any("16 ranks" in note for note in kernels.notes)


def test_float32_is_priced_by_its_own_roofline_and_noted() -> None:
    """Few rows: twice the bytes. Many rows: the vector units' rate, 989/67 slower than the tensor units' on an H100."""
    kernels = CompactKernels(find("h100-80g-sxm"))
    few, many = (
        float(kernels.gemm("float32", m, 8192, 8192) / kernels.gemm("bfloat16", m, 8192, 8192)) for m in (1, 8192)
    )
    assert 1.9 < few <= 2.0 and many == pytest.approx(989 / 67, rel=0.02)
    decode = kernels.generation_attention(64, 8000, 32, 8, 128, "float32")
    assert 1.8 < float(decode / kernels.generation_attention(64, 8000, 32, 8, 128, "bfloat16")) <= 2.0
    assert any("gemm in float32" in note and "ratio of their rooflines" in note for note in kernels.notes)


@installed
def test_full_tables_price_float32_as_compact_ones_do() -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels = SiliconKernels("a100-80g-sxm")
    few, many = (
        float(kernels.gemm("float32", m, 8192, 8192) / kernels.gemm("bfloat16", m, 8192, 8192)) for m in (1, 8192)
    )
    assert few == pytest.approx(2.0, rel=0.01) and many == pytest.approx(16.0, rel=0.01)


def test_a_float32_engine_is_slower_than_a_bfloat16_one() -> None:
    kernels, spec = CompactKernels(find("a100-80g-sxm")), model("llama-3.1-8b")
    narrow = engine_table(spec, "bfloat16", "bfloat16", 1, kernels)
    wide = engine_table(spec, "float32", "float32", 1, kernels, head_dtype="float32")
    ratio = wide.token_seconds / narrow.token_seconds
    assert np.all(ratio > 1.7) and np.all(ratio < 17) and not wide.measured
