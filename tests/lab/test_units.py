import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lab.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Seconds, "20 ms", 0.02), (Seconds, "1 h", 3600), (Seconds, 3, 3), (Bytes, "64 MiB", 64 * 2**20), (Bytes, "1 GB", 1e9),
        (BytesPerSecond, "200 Gbit/s", 25e9), (BytesPerSecond, "5 GB/s", 5e9), (FlopsPerSecond, "312 TFLOP/s", 312e12),
    ],
)  # fmt: skip
def test_quantities_become_base_units(kind, text, value) -> None:
    assert TypeAdapter(kind).validate_python(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["20 furlongs", "ms", "", "-3 s", "1 2 s", True, None, [1], "1e3", "5 GB", "nan s"])
def test_what_is_no_duration_is_refused(text) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Seconds).validate_python(text)


@given(st.floats(1e-3, 1e9))
def test_a_number_with_a_unit_scales(value: float) -> None:
    assert TypeAdapter(Bytes).validate_python(f"{value!r} KiB") == pytest.approx(value * 1024)
