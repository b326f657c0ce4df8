"""Op tables of real GPUs: what is absent or wrong is named; noise goes away; rows read as measurements."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.measurement import OPS
from profiles.readers import silicon

installed = pytest.mark.skipif(find_spec(silicon.MODULE) is None, reason="the extra `silicon` is not installed")

GEMM = {
    "gemm_dtype": ["bfloat16"] * 4, "m": [1, 8, 1, 8], "n": [64, 64, 128, 128], "k": [64] * 4,
    "latency": [0.01, 0.02, 0.015, 0.03],
}  # fmt: skip


def write(folder: Path, columns: dict, *, version: str = "0.24.0") -> Path:
    path = folder / "toy" / "gemm" / "vllm" / version / "gemm_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns).to_parquet(path)
    return path


def test_the_newest_version_is_read_and_times_are_seconds(tmp_path: Path) -> None:
    write(tmp_path, GEMM, version="0.9.0")
    write(tmp_path, GEMM | {"latency": [1.0, 2.0, 3.0, 4.0]}, version="0.24.0")
    table = silicon.table("toy", "gemm", tmp_path)
    assert table.version == "0.24.0"
    assert table.seconds.tolist() == [1e-3, 2e-3, 3e-3, 4e-3]


@pytest.mark.parametrize("column", ["m", "gemm_dtype", "latency"])
def test_a_table_without_a_column_is_refused_by_file_and_column(tmp_path: Path, column: str) -> None:
    path = write(tmp_path, {name: values for name, values in GEMM.items() if name != column})
    with pytest.raises(InputError) as caught:
        silicon.read_table(path, system="toy", kind="gemm")
    assert (caught.value.file, caught.value.key) == (str(path), column)


@pytest.mark.parametrize("latency", [0.0, -1.0, float("nan"), float("inf")])
def test_a_row_that_is_no_time_is_named(tmp_path: Path, latency: float) -> None:
    path = write(tmp_path, GEMM | {"latency": [0.01, latency, 0.015, 0.03]})
    with pytest.raises(InputError, match="row 2") as caught:
        silicon.read_table(path, system="toy", kind="gemm")
    assert caught.value.key == "latency"


def test_a_system_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no gemm table"):
        silicon.table("nothing", "gemm", tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silicon, "MODULE", "a_package_that_nobody_has")
    with pytest.raises(InputError, match="not installed") as caught:
        silicon.systems_folder()
    assert "silicon" in str(caught.value.remedy)


@given(st.lists(st.floats(1e-6, 1.0) | st.just(float("nan")), min_size=1, max_size=30))
def test_filtered_times_never_fall_and_never_exceed_what_was_measured(times: list[float]) -> None:
    given = np.array(times)
    filtered = silicon.monotone(given)
    there = ~np.isnan(given)
    assert np.array_equal(np.isnan(filtered), ~there)
    assert np.all(filtered[there] <= given[there])
    assert np.all(np.diff(filtered[there]) >= 0)
    if there.any():
        assert np.nanmin(filtered) == np.nanmin(given)


def test_versions_order_as_releases_do() -> None:
    names = ["0.9.0", "0.24.0", "1.3.0rc10", "1.3.0rc20", "0.14.0"]
    assert sorted(names, key=silicon._release) == ["0.9.0", "0.14.0", "0.24.0", "1.3.0rc10", "1.3.0rc20"]


@installed
def test_every_kind_of_the_package_reads_as_measurements_of_known_ops() -> None:
    for kind in silicon.KINDS:
        first = next(silicon.measurements("a100_sxm", (kind,)))
        assert first.op in OPS and first.device == "a100-80g-sxm"
        assert 1e-6 < first.seconds < 1.0
        named = OPS[first.op]
        assert all(name in named for name in first.quantities)
        assert silicon.PACKAGE in first.source


@installed
def test_the_devices_of_the_library_are_systems_of_the_package() -> None:
    from lab.library import devices

    assert set(silicon.DEVICES) <= set(devices())
    assert set(silicon.DEVICES.values()) <= set(silicon.systems())
