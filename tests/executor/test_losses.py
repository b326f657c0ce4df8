import torch

from executor.algorithms.losses import divergence, policy_loss, value_loss

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
