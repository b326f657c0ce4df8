"""Measurements out of the spans of a run: nothing is counted twice, nothing is lost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.library import devices
from lab.measurement import (
    OPS,
    QUANTITIES,
    Measurement,
    grad_sync_quantities,
    known_quantities,
    of_spans,
    optimizer_quantities,
    read_jsonl,
    update_quantities,
    write_jsonl,
)
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


@given(st.integers(0, 3), st.integers(1, 8), st.integers(1, 10**9))
def test_what_ranks_do_together_is_counted_only_where_there_are_several(stage: int, ranks: int, size: int) -> None:
    found = {
        "optimizer": optimizer_quantities(size, 4.0 * size, stage, ranks),
        "grad_sync": grad_sync_quantities(4.0 * size, stage, ranks),
        "update_host": update_quantities(4, 100, 2, ranks),
    }
    for op, quantities in found.items():
        assert quantities.keys() <= set(QUANTITIES[op])
        assert all(value > 0 for value in quantities.values())
    gathered = found["optimizer"].get("gathered_bytes", 0.0)
    assert gathered == pytest.approx(4.0 * size * (ranks - 1) / ranks if stage in (1, 2) else 0.0)
    assert found["update_host"].get("peers", 0.0) == ranks - 1


points = st.sampled_from(sorted(OPS)).flatmap(
    lambda op: st.builds(
        Measurement,
        op=st.just(op),
        quantities=st.dictionaries(st.sampled_from(QUANTITIES[op]), st.floats(0, 1e15)),
        seconds=st.floats(1e-9, 9),
        device=st.sampled_from(sorted(devices())),
    )
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
        ('{"op": "forward", "quantities": {}, "seconds": 0.0}', ("seconds:", "0.0 is no time")),
        ('{"op": "forward", "quantities": {}, "seconds": 1, "device": "x"}', ("device:", "'x'", "cpu-core")),
        ('{"op": "forward", "quantities": {}, "seconds": 1, "device": "h100"}', ("device:", "h100-80g-sxm")),
        ('{"op": "reward", "quantities": {"foo": 1}, "seconds": 1}', ("quantities.foo:", "calls, samples, tokens")),
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


@given(st.sampled_from(sorted(OPS)), st.text(max_size=12))
def test_a_quantity_that_an_op_does_not_have_is_named_with_those_it_has(op: str, name: str) -> None:
    point = Measurement(op=op, quantities={name: 1.0}, seconds=1.0)
    if name in QUANTITIES[op]:
        assert known_quantities([point], "run") == [point]
        return
    with pytest.raises(InputError) as caught:
        known_quantities([point], "run")
    assert caught.value.key == f"quantities.{name}" and ", ".join(QUANTITIES[op]) in str(caught.value)


def test_every_term_of_a_formula_is_a_quantity_of_its_op() -> None:
    from profiles.formula import FORMULAS

    assert set(QUANTITIES) == set(OPS)
    for op, terms in FORMULAS.items():
        assert set(terms) - {"each"} <= set(QUANTITIES[op]), op


@pytest.mark.parametrize("op", sorted(OPS))
def test_what_ops_says_of_an_op_names_its_own_quantities(op: str) -> None:
    if "the same" not in OPS[op] and "all but" not in OPS[op]:
        assert all(name in OPS[op] for name in QUANTITIES[op] if not name.startswith("zero")), OPS[op]


def test_a_file_of_measurements_that_is_missing_or_a_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="folder"):
        read_jsonl(tmp_path)
