import itertools

from hypothesis import given
from hypothesis import strategies as st

from lab.policies.dispatch import round_robin
from lab.policies.microbatch import deal, imbalance, minibatches, pack, pack_shared, pack_tight, shared_tokens


def padded_tokens(lengths: list[int], group: list[int]) -> int:
    return len(group) * max(lengths[i] for i in group)


lengths = st.lists(st.integers(1, 200), min_size=1, max_size=60)


@given(lengths, st.integers(1, 2000), st.none() | st.integers(1, 9))
def test_packing_loses_no_sample_and_keeps_the_budget(lengths: list[int], budget: int, most: int | None) -> None:
    groups = pack(lengths, budget, most)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or padded_tokens(lengths, group) <= budget
        assert most is None or len(group) <= most


@given(lengths, st.integers(200, 2000))
def test_no_two_neighbouring_groups_would_fit_together(lengths: list[int], budget: int) -> None:
    groups = pack(lengths, budget)
    for first, second in itertools.pairwise(groups):
        assert padded_tokens(lengths, [*first, second[0]]) > budget


@given(st.integers(1, 100), st.integers(1, 8))
def test_dealing_is_a_balanced_partition(samples: int, ranks: int) -> None:
    for parts in (deal(samples, ranks), round_robin(samples, ranks)):
        assert sorted(i for part in parts for i in part) == list(range(samples))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 20), st.integers(1, 20))
def test_minibatches_cover_the_samples_in_order(number: int, size: int) -> None:
    parts = minibatches(number * size, size)
    assert [i for part in parts for i in part] == list(range(number * size)) and len(parts) == number


@given(lengths, st.integers(1, 2000), st.none() | st.integers(2, 9), st.sampled_from([1, 2]))
def test_without_padding_the_sum_keeps_the_budget(
    lengths: list[int], budget: int, most: int | None, together: int
) -> None:
    groups = pack_tight(lengths, budget, most, together)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= together or sum(lengths[i] for i in group) <= budget
        assert most is None or len(group) <= most


@given(lengths, st.integers(400, 2000))
def test_first_fit_decreasing_leaves_at_most_one_group_less_than_half_full(lengths: list[int], budget: int) -> None:
    filled = [sum(lengths[i] for i in group) for group in pack_tight(lengths, budget)]
    assert sum(2 * size <= budget for size in filled) <= 1


@given(lengths, st.integers(1, 2000), st.integers(1, 4))
def test_pairs_are_never_parted(lengths: list[int], budget: int, ranks: int) -> None:
    paired = lengths[: len(lengths) // 2 * 2]
    parts = [*pack(paired, budget, together=2), *pack_tight(paired, budget, together=2)]
    for part in [*parts, *deal(len(paired), ranks, 2)]:
        assert {i // 2 for i in part if i % 2} == {i // 2 for i in part if not i % 2}


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=9))
def test_imbalance_is_what_the_fullest_has_above_the_mean(loads: list[float]) -> None:
    found = imbalance(loads)
    assert found + 1e-9 >= 0 and found <= len(loads) - 1 + 1e-9
    assert imbalance([3.0, 1.0]) == 0.5 and imbalance([2.0] * 5) == 0.0 and imbalance([]) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=30),
    st.integers(1, 60),
    st.integers(1, 6),
)
def test_sharing_keeps_the_order_and_counts_each_prompt_once(
    samples: list[tuple[int, int]], max_tokens: int, max_samples: int
) -> None:
    """The prompt of number p has 3 p tokens."""
    prompts = sorted(prompt for prompt, _ in samples)
    tokens, lengths = [3 * p for p in prompts], [3 * p + n for p, (_, n) in zip(prompts, samples, strict=True)]
    groups = pack_shared(lengths, prompts, tokens, max_tokens, max_samples)
    assert [i for group in groups for i in group] == list(range(len(samples)))
    for group in groups:
        held = sum(lengths[i] - tokens[i] for i in group) + sum(3 * p for p in {prompts[i] for i in group})
        assert held == shared_tokens(group, lengths, prompts, tokens)
        assert len(group) <= max_samples
        assert held <= max_tokens or len(group) == 1
