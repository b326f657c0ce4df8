"""Step logs of verl: both forms read alike, and what is wrong in one is told by line, field and value."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from profiles.fit import fit
from profiles.readers.verl import read

STAGES = ("gen", "old_log_prob", "ref", "adv", "update_actor")


def values(step: int, seconds: dict[str, float], tokens: int = 1000, **more: object) -> dict[str, object]:
    timers = {f"timing_s/{stage}": value for stage, value in seconds.items()}
    whole = {"timing_s/step": sum(seconds.values()), "perf/total_num_tokens": tokens}
    return {"step": step} | timers | whole | more


def console(path: Path, steps: list[dict[str, object]]) -> Path:
    lines = [" - ".join(f"{key}:{value}" for key, value in step.items()) for step in steps]
    path.write_text("(main_task pid=7) starting: all well\n" + "\n".join(f"(main_task pid=7) {x}" for x in lines))
    return path


def table(path: Path, steps: list[dict[str, object]]) -> Path:
    columns = list(dict.fromkeys(key for step in steps for key in step))
    rows = [",".join(str(step.get(column, "")) for column in columns) for step in steps]
    path.write_text("\n".join([",".join(columns), *rows]))
    return path


seconds = st.fixed_dictionaries({stage: st.integers(1, 99).map(float) for stage in STAGES})


@given(st.lists(seconds, min_size=1, max_size=4))
def test_both_forms_give_the_same_measurements_and_lose_no_second(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, float]]
) -> None:
    folder = tmp_path_factory.mktemp("verl")
    rows = [values(i, step) for i, step in enumerate(steps, start=1)]
    found = read(console(folder / "x.log", rows), "h100-80g-sxm")
    strip = [(point.op, point.quantities, point.seconds) for point in found]
    assert strip == [(p.op, p.quantities, p.seconds) for p in read(table(folder / "x.csv", rows), "h100-80g-sxm")]
    assert sum(point.seconds for point in found) == pytest.approx(sum(sum(step.values()) for step in steps))
    assert {point.op for point in found} == {f"{stage}_stage" for stage in STAGES}


def test_generation_counts_the_tokens_of_responses_only(tmp_path: Path) -> None:
    step = values(1, {"gen": 2.0, "ref": 1.0}, 4000, **{"response_length/mean": 300.0, "prompt_length/mean": 100.0})
    gen, ref = read(console(tmp_path / "x.log", [step]), "h100-80g-sxm")
    assert (gen.quantities["tokens"], ref.quantities["tokens"]) == (3000.0, 4000.0)


def test_a_planted_log_is_fitted_exactly(tmp_path: Path) -> None:
    rows = [
        values(i, {"gen": 3 + 1e-3 * tokens, "ref": 2e-4 * tokens}, tokens)
        for i, tokens in enumerate((1000, 1500, 2500))
    ]
    ops = fit(read(console(tmp_path / "x.log", rows), "h100-80g-sxm"), name="p", source={}).ops
    assert ops["gen_stage"].coefficients == pytest.approx({"each": 3.0, "tokens": 1e-3}, rel=1e-6)
    assert ops["ref_stage"].coefficients["tokens"] == pytest.approx(2e-4, rel=1e-6)


GOOD = values(1, {"gen": 5.0, "update_actor": 4.0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timing_s/step": 20.0}, ("timing_s/step:", "add up to 9 s", "gen 5", "20 s")),
        ({"timing_s/step": 8.0}, ("timing_s/step:", "add up to 9 s", "8 s")),
        ({"timing_s/gen": -1.0}, ("timing_s/gen:", "'-1.0'")),
        ({"timing_s/gen": "nan"}, ("timing_s/gen:", "'nan'")),
        ({"timing_s/gen": "5 s"}, ("timing_s/gen:", "'5 s'")),
    ],
)
def test_wrong_values_are_told_with_file_line_field_and_value(
    tmp_path: Path, change: dict[str, object], words: tuple[str, ...]
) -> None:
    for path in (console(tmp_path / "x.log", [GOOD, GOOD | change]), table(tmp_path / "x.csv", [GOOD, GOOD | change])):
        with pytest.raises(InputError) as caught:
            read(path, "h100-80g-sxm")
        assert str(caught.value).startswith(f"{path}:3: ")
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_log_without_steps_or_tokens_or_of_two_runs_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("nothing here\n")
    uncounted = {key: value for key, value in GOOD.items() if key != "perf/total_num_tokens"}
    two = table(tmp_path / "two.csv", [GOOD | {"log": "a"}, GOOD | {"log": "b"}])
    for path, words in (
        (empty, "no step"), (console(tmp_path / "u.log", [uncounted]), "total_num_tokens"), (two, "2 logs: a, b"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            read(path, "h100-80g-sxm")
    assert len(read(two, "h100-80g-sxm", "b")) == 2
