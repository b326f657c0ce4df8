import math

import pytest
import torch

from executor.algorithms.losses import (
    divergence,
    imitation_loss,
    importance_weights,
    label_loss,
    pair_loss,
    policy_loss,
    value_loss,
)
from executor.algorithms.objectives import reported

SHAPE = (3, 7)
MASK = (torch.arange(21).reshape(SHAPE) % 3 > 0).float()


def numbers(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def test_at_equal_policies_the_gradient_is_that_of_the_plain_policy_gradient() -> None:
    old, advantages = numbers(0), numbers(1)
    new = old.clone().requires_grad_()
    loss = policy_loss(new, old, advantages, MASK, clip=0.2, reference=None, kl_coef=0.0)
    loss.total.backward()
    torch.testing.assert_close(new.grad, -advantages * MASK)
    assert loss.sums["clip_fraction"] == 0


def test_no_gradient_where_clipping_holds_the_policy_back() -> None:
    old, advantages = numbers(0), torch.ones(SHAPE)
    new = (old + 0.5).requires_grad_()  # every ratio is beyond 1.2 and the advantage asks for more
    loss = policy_loss(new, old, advantages, MASK, clip=0.2, reference=None, kl_coef=0.0)
    loss.total.backward()
    assert not new.grad.any()
    assert loss.sums["clip_fraction"] == MASK.sum()


def test_the_divergence_is_zero_only_at_the_reference() -> None:
    new = numbers(0)
    assert divergence(new, new, MASK) == 0
    assert divergence(new, numbers(1), MASK) > 0


def test_the_penalty_draws_towards_the_reference() -> None:
    old, reference = numbers(0), numbers(1)
    new = old.clone().requires_grad_()
    policy_loss(new, old, torch.zeros(SHAPE), MASK, clip=0.2, reference=reference, kl_coef=1.0).total.backward()
    assert ((new.grad * (new.detach() - reference))[MASK > 0] > 0).all()


def test_values_near_the_old_ones_have_the_squared_error() -> None:
    old, returns = numbers(0), numbers(1)
    new = (old + 0.1).requires_grad_()
    loss = value_loss(new, old, returns, MASK, clip=0.2)
    torch.testing.assert_close(loss.total.detach(), (0.5 * (new.detach() - returns) ** 2 * MASK).sum())
    loss.total.backward()
    torch.testing.assert_close(new.grad, (new.detach() - returns) * MASK)


def test_values_that_ran_ahead_of_the_clip_towards_the_return_get_no_gradient() -> None:
    old = torch.zeros(SHAPE)
    new = torch.full(SHAPE, 0.5, requires_grad=True)
    loss = value_loss(new, old, torch.ones(SHAPE), MASK, clip=0.2)
    torch.testing.assert_close(loss.total.detach(), 0.5 * 0.8**2 * MASK.sum())
    loss.total.backward()
    assert not new.grad.any()


def test_what_is_masked_does_not_count() -> None:
    old, advantages, reference = numbers(0), numbers(1), numbers(2)
    noise = numbers(3) * (1 - MASK)
    losses = [
        policy_loss(old + shift, old, advantages, MASK, clip=0.2, reference=reference, kl_coef=0.1).total
        for shift in (torch.zeros(SHAPE), noise)
    ]
    torch.testing.assert_close(*losses)


def test_what_is_masked_may_be_arbitrarily_unlikely() -> None:
    new = torch.where(MASK > 0, numbers(0), torch.tensor(-1e4)).requires_grad_()
    reference = numbers(1) * MASK
    loss = policy_loss(new, numbers(2) * MASK, numbers(3) * MASK, MASK, clip=0.2, reference=reference, kl_coef=0.1)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(new.grad).all()
    assert not new.grad[MASK == 0].any()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_clipped_surrogate_token_by_token_with_weights_and_a_cap() -> None:
    new, old, advantages, behaviour = numbers(0, 0.5), numbers(1, 0.5), numbers(2), numbers(3, 0.5)
    weights = importance_weights(old, behaviour, MASK, cap=1.5)
    loss = policy_loss(new, old, advantages, MASK, clip=0.2, reference=None, kl_coef=0.0, weights=weights, cap=1.3)
    total, drawn = 0.0, []
    for at in MASK.nonzero().tolist():
        i, t = at
        ratio = math.exp(float(new[i, t]) - float(old[i, t]))
        weight = min(math.exp(float(old[i, t]) - float(behaviour[i, t])), 1.5)
        kept, a = min(ratio, 1.3), float(advantages[i, t])
        total -= weight * min(kept * a, min(max(ratio, 0.8), 1.2) * a)
        drawn.append(weight * kept)
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    expected = sum(drawn) ** 2 / (len(drawn) * sum(weight**2 for weight in drawn))
    means = {name: value / len(drawn) for name, value in loss.sums.items()}
    assert reported(means)["effective_sample_size"] == pytest.approx(expected, rel=1e-5)


def test_fresh_samples_are_all_as_good_as_drawn_and_stale_ones_are_fewer() -> None:
    old = numbers(0)
    sizes = []
    for shift in (0.0, 0.5, 2.0):
        new = old + shift * numbers(1)
        sums = policy_loss(new, old, numbers(2), MASK, clip=0.2, reference=None, kl_coef=0.0).sums
        sizes.append(
            reported({name: value / float(MASK.sum()) for name, value in sums.items()})["effective_sample_size"]
        )
    assert sizes[0] == pytest.approx(1.0)
    assert sizes[0] > sizes[1] > sizes[2] > 0


def test_a_cap_bounds_what_a_stale_sample_that_went_wrong_can_push() -> None:
    """With a negative advantage the clip lets a ratio grow without bound; truncated, it pushes no more."""
    old, advantages = torch.full(SHAPE, -8.0), -torch.ones(SHAPE)
    new = (old + 3.0).requires_grad_()
    free = policy_loss(new, old, advantages, MASK, clip=0.2, reference=None, kl_coef=0.0)
    capped = policy_loss(new, old, advantages, MASK, clip=0.2, reference=None, kl_coef=0.0, cap=2.0)
    assert float(free.total.detach()) == pytest.approx(math.exp(3.0) * float(MASK.sum()), rel=1e-4)
    assert float(capped.total.detach()) == pytest.approx(2.0 * float(MASK.sum()))
    capped.total.backward()
    assert not new.grad.any()


def test_imitation_is_the_negative_log_likelihood_of_what_counts() -> None:
    new = numbers(0).requires_grad_()
    loss = imitation_loss(new, MASK)
    loss.total.backward()
    expected = sum(-float(new[i, t].detach()) for i, t in MASK.nonzero().tolist())
    assert float(loss.total.detach()) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(new.grad, -MASK)


def test_pairs_one_by_one() -> None:
    chosen, rejected = numbers(0)[0], numbers(1)[0]
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    loss = pair_loss(chosen, rejected, weights)
    margins = [float(a) - float(b) for a, b, w in zip(chosen, rejected, weights, strict=True) if w]
    assert float(loss.total) == pytest.approx(sum(-math.log(sigmoid(margin)) for margin in margins), rel=1e-5)
    found = reported({name: value / len(margins) for name, value in loss.sums.items()})
    assert found["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))
    assert found["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found["margin"] == pytest.approx(found["chosen_score"] - found["rejected_score"], rel=1e-4)


def test_equal_scores_cost_log_2_and_are_half_right() -> None:
    scores = numbers(0)[0].requires_grad_()
    loss = pair_loss(scores, scores.detach().clone())
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(7 * math.log(2), rel=1e-6)
    assert loss.sums["accuracy"] == pytest.approx(3.5)
    torch.testing.assert_close(scores.grad, torch.full((7,), -0.5))


def test_pairs_far_apart_leave_the_loss_finite() -> None:
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = pair_loss(chosen, -chosen.detach())
    loss.total.backward()
    assert float(loss.total.detach()) == pytest.approx(1000.0)
    assert torch.isfinite(chosen.grad).all()


@pytest.mark.parametrize("drift", [0.0, 0.7])
def test_labels_one_by_one(drift: float) -> None:
    scores, labels = numbers(0)[0], torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    loss = label_loss(scores, labels, drift)
    expected = [
        1 - sigmoid(float(s) - drift) if y else 1 - sigmoid(drift - float(s))
        for s, y in zip(scores, labels, strict=True)
    ]
    assert float(loss.total) == pytest.approx(sum(expected), rel=1e-5)
    found = reported({name: value / 7 for name, value in loss.sums.items()})
    assert found["chosen_score"] == pytest.approx(float(scores[labels > 0].mean()), rel=1e-4)
    assert found["rejected_score"] == pytest.approx(float(scores[labels == 0].mean()), rel=1e-4)
    assert found["margin"] == pytest.approx(found["chosen_score"] - found["rejected_score"])


def test_desired_responses_are_drawn_up_and_others_down() -> None:
    scores, labels = numbers(0)[0].requires_grad_(), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    label_loss(scores, labels, 0.3).total.backward()
    assert ((scores.grad < 0) == (labels > 0)).all()
