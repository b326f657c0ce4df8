"""`lab claims`: a table for a person, rows for a program, and one message for an unknown claim."""

import json

import pytest

from lab.cli import main

ONE = ["--only", "compressed-ids", "--only", "coupled-memory"]


def test_it_tells_a_person_and_ends_well_whatever_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["claims", *ONE])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "compressed-ids" in told and "partly" in told
    assert "2 claims: 1 holds, 1 partly" in told


def test_a_program_gets_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["claims", *ONE, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in told["claims"]] == ["compressed-ids", "coupled-memory"]
    assert set(told["claims"][0]) >= {"claim", "source", "scenarios", "value", "verdict", "reason", "numbers"}
    assert sum(told["verdicts"].values()) == 2


def test_an_unknown_claim_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["claims", "--only", "compressed-id"])
    assert ended.value.code == 2
    assert "did you mean compressed-ids" in capsys.readouterr().err
