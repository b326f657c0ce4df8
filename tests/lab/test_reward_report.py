import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from lab import runs
from lab.cli import app
from lab.load import load
from lab.reward_report import FILE, accuracy, bucket, kind_of, lines, read, report, sentence
from profiles.profile import datasheet
from simulator.run import simulate

KINDS = ["natural", "length_matched", "adversarial"] * 100
RNG = np.random.default_rng(0)


def pairs(kinds: list[str]) -> NDArray[np.int64]:
    """Lengths [pairs, 2] of pairs of these kinds; of natural ones the chosen is longer in four of five."""
    longer, shorter = 20, 10
    tokens = {"length_matched": (longer, longer), "adversarial": (shorter, longer)}
    natural = [(shorter, longer) if i % 5 == 0 else (longer, shorter) for i in range(len(kinds))]
    return np.asarray([tokens.get(kind, natural[i // 3]) for i, kind in enumerate(kinds)], dtype=np.int64)


def test_a_model_that_only_counts_tokens_fails() -> None:
    lengths = pairs(KINDS)
    found = report(lengths[:, 0].astype(float), lengths[:, 1].astype(float), lengths, {"kind": KINDS})
    kinds = found["groups"]["kind"]
    assert kinds["natural"]["accuracy"] == pytest.approx(0.8)
    assert kinds["length_matched"]["accuracy"] == 0.5
    assert kinds["adversarial"]["accuracy"] == 0.0
    assert found["prefers_longer"]["accuracy"] == 1.0
    assert found["verdict"] == "fails"
    assert len(found["reasons"]) == 2


def test_a_model_that_reads_and_also_likes_length_fails_where_length_wins() -> None:
    """Right on natural pairs, but a fifth of the adversarial ones go by length."""
    lengths, right = pairs(KINDS), np.ones(300)
    adversarial = np.flatnonzero(np.asarray(KINDS) == "adversarial")
    right[adversarial[:20]] = -1
    found = report(right, np.zeros(300), lengths, {"kind": KINDS})
    assert found["verdict"] == "fails"
    assert "20% less often" in found["reasons"][0]
    right[adversarial[10:20]] = 1
    assert report(right, np.zeros(300), lengths, {"kind": KINDS})["verdict"] == "passes"


def test_a_coin_fails() -> None:
    found = report(RNG.normal(size=300), RNG.normal(size=300), pairs(KINDS), {"kind": KINDS})
    assert found["verdict"] == "fails"


def test_without_length_matched_pairs_nothing_is_decided() -> None:
    kinds = ["natural"] * 100
    found = report(np.ones(100), np.zeros(100), pairs(kinds), {"kind": kinds})
    assert found["verdict"] == "undecided"
    assert found["reasons"][0].startswith("0 length-matched pairs are too few")


def test_a_group_that_is_judged_the_wrong_way_round_fails() -> None:
    margins = np.where(np.arange(300) % 30 < 3, -1.0, 1.0)
    languages = ["de" if margin < 0 else "en" for margin in margins]
    found = report(margins, np.zeros(300), pairs(KINDS), {"kind": KINDS, "language": languages})
    assert found["groups"]["language"]["de"]["accuracy"] == 0.0
    assert found["groups"]["language"]["en"]["accuracy"] == 1.0
    assert any("language de" in reason for reason in found["reasons"])


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=200))
def test_accuracy_and_its_interval(right: list[float]) -> None:
    found, n = accuracy(np.asarray(right)), len(right)
    p = sum(right) / n
    assert found["pairs"] == n
    assert found["accuracy"] == pytest.approx(p)
    assert found["error"] == pytest.approx(math.sqrt(p * (1 - p) / n))
    for bound in (found["low"], found["high"]):  # Wilson: where the score test is just rejected
        if 0 < bound < 1:
            assert (p - bound) ** 2 == pytest.approx(1.959963984540054**2 * bound * (1 - bound) / n, abs=1e-12)
    assert found["low"] - 1e-12 <= p <= found["high"] + 1e-12


@given(chosen=st.integers(1, 500), rejected=st.integers(1, 500))
def test_a_pair_that_does_not_state_its_kind_has_one_by_its_lengths(chosen: int, rejected: int) -> None:
    kind = kind_of(chosen, rejected)
    if kind == "length_matched":
        assert abs(chosen - rejected) <= 0.1 * max(chosen, rejected)
    else:
        assert (kind == "adversarial") == (rejected > chosen)


def test_lengths_are_grouped_by_doubling() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)] == [
        "1",
        "2",
        *["3–4"] * 2,
        *["5–8"] * 2,
        *["9–16"] * 2,
        "17–32",
    ]


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        report(np.asarray([math.nan]), np.asarray([0.0]), np.asarray([[3, 3]]), {})
    with pytest.raises(ValueError, match="no pair"):
        report(np.empty(0), np.empty(0), np.empty((0, 2), dtype=np.int64), {})


def test_a_report_is_told_in_rows_and_in_a_line(tmp_path: Path) -> None:
    found = report(np.ones(300), np.zeros(300), pairs(KINDS), {"kind": KINDS, "topic": ["a"] * 300})
    rows = lines(found)
    assert rows[0] == ("all pairs", "", 300, 1.0, 0.0)
    assert ("topic", "a", 300, 1.0, 0.0) in rows
    assert sentence(found).startswith("reward model passes: right on 100.0% of 300 held-out pairs")
    assert read(tmp_path) is None
    (tmp_path / FILE).write_text("{")
    assert read(tmp_path) is None


def test_the_page_and_the_command_show_it(tmp_path: Path) -> None:
    """A run folder that has a report beside its spans; the run itself is a simulated one."""
    scenario = load("scenarios/quickstart.yaml").replace({"num_steps": 2})
    folder = runs.begin(tmp_path, scenario, "simulated")
    lengths = pairs(KINDS)
    found = report(lengths[:, 0].astype(float), lengths[:, 1].astype(float), lengths, {"kind": KINDS})
    (folder / FILE).write_text(json.dumps(found))
    summary = runs.finish(folder, scenario, simulate(scenario, {"cpu-core": datasheet("cpu-core")}))
    assert summary["reward_report"] == found
    (folder / "report.html").unlink()
    told = CliRunner().invoke(app, ["report", str(folder)])
    assert told.exit_code == 0
    assert "reward model: fails" in told.output
    assert "length_matched" in told.output
    assert "no better than a coin" in told.output
    page = (folder / "report.html").read_text()
    assert "Reward model: fails" in page
    assert found["reasons"][0] in page
