"""What a checkpoint is judged by."""

import pytest

from executor.store import score


@pytest.mark.parametrize(("row", "expected"), [
    ({"reward": 0.2, "evaluation_reward": 0.7, "evaluation_win_rate": 0.9}, 0.7),
    ({"loss": 0.5, "accuracy": 0.75}, 0.75),
    ({"loss": 0.5, "evaluation_loss": 2.0}, -2.0),
    ({"loss": 0.5}, -0.5),
    ({"step": 3, "kl": 0.1, "sampling": {"reward": 1}}, None),
])  # fmt: skip
def test_an_evaluation_counts_before_the_samples_of_the_step_and_less_loss_is_better(
    row: dict[str, object], expected: float | None
) -> None:
    assert score(row) == expected
