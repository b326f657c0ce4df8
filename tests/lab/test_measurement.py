"""Measurements out of the spans of a run: nothing is counted twice, nothing is lost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.measurement import OPS, Measurement, of_spans, read_jsonl, write_jsonl
from lab.timeline import Span


def span(stage: str, op: str, start: float, end: float, number: int = 0, **quantities: float) -> Span:
    span_id = f"{stage}/0/w" + (f"#{number}" if op else "")
    return Span(
        span_id=span_id, resource="w", step=0, stage=stage, op=op, pool="p", worker="w", start_s=start, end_s=end,
        attrs={"quantities": quantities} if quantities else {},
    )  # fmt: skip


@given(st.lists(st.floats(0.001, 10), max_size=20), st.floats(0, 5))
def test_ops_and_host_time_add_up_to_the_stage(durations: list[float], host: float) -> None:
    edges = [sum(durations[:i]) for i in range(len(durations) + 1)]
    ops = [span("rollout", "decode", edges[i], edges[i + 1], i, sequences=1.0) for i in range(len(durations))]
    stage = span("rollout", "", 0, edges[-1] + host, calls=1.0)
    found = of_spans([stage, *ops], model="tiny-llama", device="cpu-core", source="test")
    assert [point.op for point in found] == ["engine_step"] * len(durations) + ["rollout_host"]
    assert sum(point.seconds for point in found) == pytest.approx(stage.seconds)
    assert found[-1].seconds == pytest.approx(host, abs=1e-9)
    assert {point.op for point in found} <= set(OPS)


def test_ops_that_carry_no_quantities_are_part_of_no_measurement() -> None:
    found = of_spans([span("weight_sync", "transfer", 0, 1)], model="m", device="d", source="s")
    assert found == []


points = st.builds(
    Measurement,
    op=st.sampled_from(sorted(OPS)),
    quantities=st.dictionaries(st.text(max_size=3), st.floats(0, 1e15)),
    seconds=st.floats(0, 9),
)


@given(st.lists(points, min_size=1, max_size=5))
def test_files_give_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, found: list[Measurement]) -> None:
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    write_jsonl(found, path)
    assert read_jsonl(path) == found


GOOD = '{"op": "forward", "quantities": {"passes": 1}, "seconds": 0.1}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"op": "forward", "quantities": {}}', ("seconds", "missing")),
        ('{"op": "forward", "quantities": {}, "seconds": -1}', ("seconds:", "-1.0")),
        ('{"op": "forward", "quantities": {}, "seconds": NaN}', ("seconds:", "nan")),
        ('{"op": "forward", "quantities": {}, "seconds": "3 ms"}', ("seconds:", "'3 ms'")),
        ('{"op": "forward", "quantities": {"tokens": NaN}, "seconds": 1}', ("quantities.tokens:", "nan")),
        ('{"op": "forward", "quantities": {"tokens": -4}, "seconds": 1}', ("quantities.tokens:", "-4.0")),
        ('{"op": "forwrd", "quantities": {}, "seconds": 1}', ("op:", "'forwrd'", "did you mean forward")),
        ('{"op": 3}', ("op:", "3")),
        ('{"op": "forward", "quantities": {}, "seconds": 1, "repeats": 0}', ("repeats:", "0")),
        ("[3]", ("object",)),
        ('{"op":', ("JSON",)),
    ],
)
def test_what_is_no_measurement_is_told_with_file_line_field_and_value(
    tmp_path: Path, line: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(InputError) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_without_measurements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n")
    with pytest.raises(InputError, match="no measurement"):
        read_jsonl(path)
