"""Choosing sets, finding the data, skipping what is absent, and how the result reads."""

import json
from pathlib import Path

import pytest

from lab.errors import InputError
from simulator.studies import validate as module
from simulator.studies.accuracy import Row, Rule, ValidationSet
from simulator.studies.accuracy_page import grid, markdown, number, record
from simulator.studies.validate import DATA_VARIABLE, SETS, Study, Validation, data_folder, provenance, validate


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text("")
    return folder


def test_every_set_can_be_imported() -> None:
    import importlib

    for study in SETS.values():
        name, function = study.place.split(":")
        assert callable(getattr(importlib.import_module(name), function))


def test_an_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="no validation set 'sillicon'") as caught:
        validate(["sillicon"], None)
    assert all(name in str(caught.value) for name in SETS)


def test_an_unknown_half_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no half 'both'"):
        validate(["verl-logs"], tmp_path, "both")  # type: ignore[arg-type]


def test_without_a_folder_one_message_names_option_and_variable() -> None:
    with pytest.raises(InputError, match="no folder with validation data") as caught:
        validate(["verl-logs"], None)
    assert "--data" in str(caught.value) and DATA_VARIABLE in str(caught.value)


@pytest.mark.parametrize("make", [False, True])
def test_a_wrong_folder_is_refused(tmp_path: Path, make: bool) -> None:
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
    with pytest.raises(InputError, match="holds no validation data" if make else "is no folder"):
        data_folder(folder)


def test_the_variable_names_the_folder_and_the_option_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_files(tmp_path, "published_cases.csv")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder(None) == tmp_path
    with pytest.raises(InputError, match="is no folder"):
        data_folder(tmp_path / "other")


def test_a_set_whose_file_is_absent_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = validate(["verl-logs"], with_files(tmp_path, "published_cases.csv"))
    assert done.sets == ()
    assert "verl_log_steps.csv" in done.skipped["verl-logs"]
    assert "`verl-logs`: verl_log_steps.csv is not in" in markdown(done)


def test_a_set_that_needs_no_folder_is_asked_with_the_half_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETS", {"own": Study(place="tests_own_set:judge", split=True)})
    monkeypatch.setitem(__import__("sys").modules, "tests_own_set", type("own", (), {"judge": staticmethod(judge)}))
    assert [part.name for part in validate([], None, "odd").sets] == ["odd"]


def judge(half: str) -> ValidationSet:
    return ValidationSet(name=half, title="the half that was asked for", rows=())


@pytest.fixture
def sample() -> Validation:
    rule = Rule(id="doubtful", sentence="The source doubts it.")
    rows = (
        Row(case="a|b", quantity="TPOT", predicted=0.011, measured=0.01, unit="s", assumed=("dtype",)),
        Row(case="c", quantity="TPOT", predicted=0.02, measured=0.01, unit="s", reason="swapping"),
        Row(case="d", quantity="TPOT", predicted=None, measured=12345.0, unit="s", excluded="doubtful"),
    )
    part = ValidationSet(name="demo", title="a demonstration", rows=rows, rules=(rule,), notes=("two rows only",))
    return Validation(sets=(part,), skipped={"other": "no data"}, provenance=provenance() | {"half": "even"})


def test_the_page_says_everything(sample: Validation) -> None:
    page = markdown(sample)
    assert "| TPOT | 2 | +55.0% | 55.0% | 55.0% | 91.0% | 1, 0 without a reason |" in page
    assert "| c | TPOT | 0.02 s | 0.01 s | +100.0% | swapping |" in page
    assert "- dtype (1 of 2 rows)" in page and "`doubtful` (1 rows): The source doubts it." in page
    assert "two rows only" in page and "`other`: no data" in page
    facts = sample.provenance
    assert all(str(fact) in page for fact in (facts["date"], facts["python"], facts["machine"]["cpu"]))
    assert "numpy" in page


def test_cells_do_not_break_the_table() -> None:
    assert grid(("", "x"), [("a|b", "1")]).splitlines()[-1] == "| a\\|b | 1 |"
    assert [number(value, "s") for value in (None, 12345.6, 0.000123456)] == ["–", "12,346 s", "0.0001235 s"]


def test_the_record_is_json_with_rows_only_where_asked(sample: Validation) -> None:
    whole = json.loads(json.dumps(record(sample), allow_nan=False))
    assert [row["error"] for row in whole["sets"]["demo"]["rows"]] == pytest.approx([0.1, 1.0, None])
    assert whole["sets"]["demo"]["rules"]["doubtful"]["num_rows"] == 1
    assert whole["sets"]["demo"]["accuracy"]["TPOT"]["num"] == 2
    assert "rows" not in record(sample, rows=False)["sets"]["demo"]


def test_what_it_was_computed_on_is_told() -> None:
    facts = provenance()
    assert set(facts) == {"date", "commit", "machine", "python", "packages"}
    assert set(facts["packages"]) >= {"numpy", "pandas", "scipy"}
