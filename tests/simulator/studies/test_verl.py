"""Step logs: a log that follows the cost law is predicted exactly; what happens once is called that."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.errors import InputError
from simulator.studies.accuracy import table
from simulator.studies.verl import FILE, NUM_CALIBRATION_STEPS, one_off, verl_logs


def log(name: str = "a.log", num_steps: int = 60, noise: float = 0.0) -> pd.DataFrame:
    """A run whose stages cost exactly what the formulas can express; every tenth step is validated."""
    random = np.random.default_rng(0)
    response = random.uniform(100, 300, num_steps)
    longest, prompt = response * 2 + random.uniform(0, 100, num_steps), np.full(num_steps, 100.0)
    stages = {
        "timing_s/gen": 2 + 0.01 * response + 0.002 * longest,
        "timing_s/ref": 0.5 + 0.002 * (prompt + response),
        "timing_s/update_actor": 1 + 0.01 * (prompt + response) + 1e-5 * (prompt + response) ** 2,
    }
    stages = {stage: seconds * random.normal(1, noise, num_steps) for stage, seconds in stages.items()}
    testing = np.where(np.arange(num_steps) % 10 == 9, 30.0, np.nan)
    step = sum(stages.values()) + np.nan_to_num(testing) + 0.3
    lengths = {"prompt_length/mean": prompt, "response_length/mean": response, "response_length/max": longest}
    return pd.DataFrame(
        {
            "log": name,
            "step": range(1, num_steps + 1),
            **lengths,
            **stages,
            "timing_s/testing": testing,
            "timing_s/step": step,
        }
    )


def written(folder: Path, *logs: pd.DataFrame) -> Path:
    pd.concat(logs).to_csv(folder / FILE, index=False)
    return folder


def test_a_log_that_follows_the_law_is_predicted_exactly(tmp_path: Path) -> None:
    part = verl_logs(written(tmp_path, log()))
    assert len(part.judged) == 4 * (60 - NUM_CALIBRATION_STEPS)
    assert {row.quantity for row in part.rows} == {"generation", "reference log-prob", "actor update", "step"}
    assert max(abs(row.error or 0) for row in part.rows) < 1e-6


def test_only_the_first_steps_are_seen(tmp_path: Path) -> None:
    """What comes after the calibration changes no prediction, only the errors."""
    changed = log()
    later = changed["step"] > NUM_CALIBRATION_STEPS
    changed.loc[later, "timing_s/gen"] *= 2
    part = verl_logs(written(tmp_path, changed))
    errors = [row.error for row in part.rows if row.quantity == "generation"]
    assert errors == pytest.approx([-0.5] * len(errors), abs=1e-6)


def test_noise_is_told_and_bounds_the_error(tmp_path: Path) -> None:
    part = verl_logs(written(tmp_path, log(noise=0.02), log("b.log", noise=0.02)))
    assert 0.005 < table(part)["all quantities"].mape < 0.05
    assert any("differ by" in note for note in part.notes)


def test_a_log_without_the_time_of_whole_steps_is_judged_by_stage(tmp_path: Path) -> None:
    old = log().drop(columns=["timing_s/step", "timing_s/testing"])
    old.columns = [name.replace("timing_s/", "timing/") for name in old.columns]
    part = verl_logs(written(tmp_path, old))
    assert {row.quantity for row in part.rows} == {"generation", "reference log-prob", "actor update"}


def test_one_slow_step_is_called_a_one_off() -> None:
    seconds = np.full(50, 2.0)
    seconds[30] = 8.0
    assert one_off(seconds, 30) == "a one-off: 4.0 times its neighbours' median"
    assert one_off(seconds, 31) == one_off(seconds, 2) == ""


def test_a_log_too_short_to_judge_gives_no_rows(tmp_path: Path) -> None:
    assert verl_logs(written(tmp_path, log(num_steps=NUM_CALIBRATION_STEPS), log("b.log"))).judged


def test_an_absent_column_is_named(tmp_path: Path) -> None:
    written(tmp_path, log().drop(columns="response_length/mean"))
    with pytest.raises(InputError, match="response_length/mean"):
        verl_logs(tmp_path)
