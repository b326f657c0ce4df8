"""Kernels from op tables: measured points come back, what lies between is bounded, and the rest is noted."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.library import model
from profiles.grids import filled, line, pivot
from profiles.readers import silicon

installed = pytest.mark.skipif(find_spec(silicon.MODULE) is None, reason="the extra `silicon` is not installed")


def test_grids_interpolate_linearly_and_go_on_with_the_last_slope() -> None:
    rows, columns = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0])
    grid = filled(rows, columns, np.add.outer(rows, columns))
    assert float(grid.at(3, 15)) == pytest.approx(18)
    assert float(grid.at(8, 40)) == pytest.approx(48)
    assert float(grid.at(0.5, 5)) == pytest.approx(11), "below the first point its value holds"


def test_empty_cells_follow_the_work_of_their_neighbours() -> None:
    table = np.array([[1.0, 3.0], [2.0, np.nan], [np.nan, np.nan]])
    grid = filled(np.array([1.0, 2.0, 8.0]), np.array([1.0, 2.0]), table)
    assert grid.seconds.tolist() == [[1.0, 3.0], [2.0, 6.0], [8.0, 24.0]]


def test_powers_are_exact_for_power_laws() -> None:
    columns = np.array([1.0, 10.0, 100.0])
    grid = filled(np.array([1.0, 2.0]), columns, np.outer([1.0, 2.0], columns**2))
    assert float(grid.powers(1.5, 30)) == pytest.approx(1.5 * 900)


def test_of_repeated_points_the_least_counts() -> None:
    rows, columns, table = pivot(np.array([1, 1, 2]), np.array([5, 5, 5]), np.array([3.0, 2.0, 4.0]))
    assert (rows.tolist(), columns.tolist(), table.tolist()) == ([1.0, 2.0], [5.0], [[2.0], [4.0]])


def test_a_line_through_points() -> None:
    assert line(np.array([0.0, 1.0, 3.0]), np.array([0.0, 1.0, 2.0]), [0.5, 2.0, 5.0]).tolist() == [0.5, 1.5, 3.0]


def tables(folder: Path) -> Path:
    """A made-up system of the b200's data sheet: products take 1 us per row and unit of width, 8-bit blocks 1 ms."""
    points = [
        (m, n, k, dtype)
        for dtype in ("bfloat16", "fp8", "fp8_block")
        for m in (1, 4)
        for n in (64, 256)
        for k in (64, 256)
    ]
    frame = pd.DataFrame(points, columns=["m", "n", "k", "gemm_dtype"])
    frame["latency"] = np.where(frame["gemm_dtype"] == "fp8_block", 1.0, 1e-3 * frame["m"] * frame["n"] / 64)
    path = folder / "b200_sxm" / "gemm" / "vllm" / "0.1.0" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    frame.to_parquet(path)
    return folder


@installed
def test_products_come_back_as_measured_and_are_cut_where_they_are_larger(tmp_path: Path) -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels = SiliconKernels("b200-sxm", folder=tables(tmp_path))
    assert kernels.gemm("bfloat16", [1, 4], 256, 64) == pytest.approx([4e-6, 16e-6])
    assert float(kernels.gemm("bfloat16", 2.5, 256, 64)) == pytest.approx(10e-6), "linear in rows"
    assert float(kernels.gemm("bfloat16", 4, 1024, 64)) == pytest.approx(64e-6), "four products of 256"
    between = float(kernels.gemm("bfloat16", 4, 128, 64))
    assert 4e-6 < between < 16e-6
    assert not kernels.notes


@installed
def test_launch_bound_block_products_take_the_per_tensor_times_and_absent_formats_are_noted(tmp_path: Path) -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels = SiliconKernels("b200-sxm", folder=tables(tmp_path))
    assert float(kernels.gemm("fp8_block", 4, 256, 64)) == pytest.approx(16e-6)
    assert not kernels.notes
    kernels.gemm("nvfp4", 4, 256, 64)
    assert any("no nvfp4" in note for note in kernels.notes)
    kernels.gemm("bfloat16", 100, 256, 64)
    assert any("more tokens" in note for note in kernels.notes)


@installed
def test_full_tables_return_their_own_rows() -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels, draw = SiliconKernels("a100-80g-sxm"), np.random.default_rng(0)
    rows = silicon.table("a100_sxm", "gemm")
    for at in draw.integers(0, len(rows), 40):
        found = float(kernels.gemm("bfloat16", rows["m"][at], int(rows["n"][at]), int(rows["k"][at])))
        assert found <= rows.seconds[at] * (1 + 1e-9), "filtered: never above the measured time"
    rows = silicon.table("a100_sxm", "generation_attention")
    found, measured = [], []
    for at in draw.integers(0, len(rows), 200):
        shape = [int(rows[name][at]) for name in ("num_heads", "num_key_value_heads", "head_dim")]
        found.append(float(kernels.generation_attention(rows["batch_size"][at], rows["step"][at], *shape, "bfloat16")))
        measured.append(rows.seconds[at])
    assert np.median(np.abs(np.array(found) / measured - 1)) < 0.01
    assert not kernels.notes


@installed
def test_more_work_never_takes_less_time() -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels = SiliconKernels("b200-sxm")
    sizes = np.geomspace(1, 16384, 60)
    assert np.all(np.diff(kernels.gemm("fp8_block", sizes, 3000, 5000)) >= -1e-12)
    assert np.all(np.diff(kernels.generation_attention(sizes[:40], 3000, 32, 8, 128, "fp8")) >= -1e-12)
    assert np.all(np.diff(kernels.generation_attention(32, sizes, 32, 8, 128, "fp8")) >= -1e-12)
    assert np.all(np.diff(kernels.context_attention(1, sizes, 0, 32, 8, 128, "bfloat16")) >= -1e-12)
    for op in ("all_reduce", "fused_all_reduce", "all_gather", "all_to_all"):
        assert np.all(np.diff(kernels.collective(op, sizes * 1000, 8)) >= -1e-12)
    assert float(kernels.collective("all_reduce", 1e6, 1)) == 0.0


@installed
def test_head_counts_that_were_not_measured_stand_for_more_or_fewer_problems() -> None:
    from profiles.silicon_kernels import SiliconKernels

    kernels = SiliconKernels("h100-80g-sxm")
    twice = kernels.generation_attention(16, 2000, 64, 16, 128, "bfloat16")
    assert float(twice) == pytest.approx(float(kernels.generation_attention(32, 2000, 32, 8, 128, "bfloat16")))
    assert not kernels.notes
    kernels.generation_attention(16, 2000, 7, 1, 128, "bfloat16")
    assert any("7 heads on 1" in note for note in kernels.notes)


@installed
def test_a_table_of_a_model_takes_a_fraction_of_a_second_once_tables_are_read() -> None:
    import time

    from profiles.engine_table import engine_table
    from profiles.silicon_kernels import SiliconKernels

    spec = model("llama-3.1-70b")
    first = engine_table(spec, "fp8", "fp8", 4, SiliconKernels("h200-141g-sxm"))
    began = time.perf_counter()
    second = engine_table(spec, "fp8", "fp8", 4, SiliconKernels("h200-141g-sxm"))
    assert time.perf_counter() - began < 0.2
    assert np.array_equal(first.token_seconds, second.token_seconds) and first.measured
