"""What a checkpoint is judged by."""

import pytest

from executor.store import scores


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
    assert scores({7: row}) == {7: expected}


def test_what_was_evaluated_is_not_compared_with_the_samples_of_other_steps() -> None:
    rows = {0: {"reward": 0.9}, 1: {"reward": 0.4, "evaluation_reward": 0.5}, 2: {"evaluation_reward": 0.6, "loss": 1}}
    assert scores(rows) == {0: None, 1: 0.5, 2: 0.6}
    assert scores({0: {"reward": 0.9}, 1: {"loss": 0.1, "reward": 0.95}}) == {0: 0.9, 1: 0.95}
    assert scores({}) == {}
