import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.policies.dispatch import DISPATCH, Engines, Prompts, least_loaded, length_buckets, round_robin, weighted

speeds = st.lists(st.floats(0.05, 20), min_size=1, max_size=9)
tokens = st.lists(st.integers(1, 5000), min_size=0, max_size=60)


def prompts(lengths: list[int] | list[float], samples: int = 1, buckets: int = 3) -> Prompts:
    return Prompts(predicted_tokens=np.array(lengths, float), samples_per_prompt=samples, num_buckets=buckets)


@st.composite
def loaded(draw: st.DrawFn) -> Engines:
    size = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=size, max_size=size))

    return Engines(
        speed=np.array(column(st.integers(1, 3)), float),
        given=np.array(column(st.integers(0, 9))),
        queued=np.array(column(st.integers(0, 3))),
        running=np.array(column(st.integers(0, 3))),
        free_kv_tokens=np.array(column(st.integers(0, 3)), float) * 1000,
    )


@pytest.mark.parametrize("name", DISPATCH)
@given(tokens, loaded())
def test_every_prompt_goes_to_exactly_one_engine(name: str, lengths: list[int], engines: Engines) -> None:
    assigned = DISPATCH[name](prompts(lengths), engines)
    assert len(assigned) == len(engines)
    assert sorted(i for part in assigned for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in assigned)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7))
def test_round_robin_goes_on_where_it_ended(first: int, second: int, size: int) -> None:
    engines = Engines.idle(np.ones(size))
    parts = DISPATCH["round_robin"](prompts([1] * first), engines)
    assert parts == round_robin(first, size)
    later = DISPATCH["round_robin"](prompts([1] * second), with_given(engines, parts))
    joined = [own + [first + i for i in new] for own, new in zip(parts, later, strict=True)]
    assert joined == round_robin(first + second, size)


def with_given(engines: Engines, parts: list[list[int]]) -> Engines:
    return Engines(**{**vars(engines), "given": engines.given + np.array([len(part) for part in parts])})


@given(speeds, st.integers(1, 300))
def test_weighted_is_at_every_moment_within_one_of_the_share(speed: list[float], num: int) -> None:
    engines = Engines.idle(speed)
    order = np.full(num, -1)
    for engine, part in enumerate(weighted(prompts([1] * num), engines)):
        order[part] = engine
    share = engines.speed / engines.speed.sum()
    counts = np.cumsum(order[:, None] == np.arange(len(speed)), axis=0)
    assert np.abs(counts - np.arange(1, num + 1)[:, None] * share).max() <= 1 + 1e-6


@given(speeds, st.integers(0, 60), st.integers(0, 60))
def test_weighted_in_two_calls_is_weighted_in_one(speed: list[float], first: int, second: int) -> None:
    engines = Engines.idle(speed)
    parts = weighted(prompts([1] * first), engines)
    later = weighted(prompts([1] * second), with_given(engines, parts))
    joined = [own + [first + i for i in new] for own, new in zip(parts, later, strict=True)]
    assert joined == weighted(prompts([1] * (first + second)), engines)


@given(loaded(), st.integers(0, 4000), st.integers(1, 4))
def test_least_loaded_never_takes_an_engine_that_another_beats(engines: Engines, length: int, samples: int) -> None:
    (chosen,) = [e for e, part in enumerate(least_loaded(prompts([length], samples), engines)) if part]
    columns = np.stack([-engines.queued, -engines.running, engines.free_kv_tokens, engines.speed])
    at_least = (columns >= columns[:, [chosen]]).all(axis=0)
    somewhere_more = (columns > columns[:, [chosen]]).any(axis=0)
    assert not (at_least & somewhere_more).any()


@given(loaded(), st.lists(st.integers(1, 2500), max_size=30), st.integers(1, 3))
def test_least_loaded_is_the_first_by_room_then_wait_then_free_kv(
    engines: Engines, lengths: list[int], samples: int
) -> None:
    ahead, room = (engines.queued + engines.running).tolist(), engines.free_kv_tokens.tolist()
    expected: list[list[int]] = [[] for _ in ahead]
    for i, length in enumerate(lengths):
        need = length * samples
        best = min(
            range(len(ahead)), key=lambda e: (room[e] < need, (ahead[e] + samples) / engines.speed[e], -room[e], e)
        )
        expected[best].append(i)
        ahead[best] += samples
        room[best] -= need
    assert least_loaded(prompts(lengths, samples), engines) == expected


def test_least_loaded_prefers_room_to_a_short_queue() -> None:
    engines = Engines(
        speed=np.ones(2), given=np.zeros(2, int), queued=np.array([0, 5]), running=np.zeros(2, int),
        free_kv_tokens=np.array([100.0, 1000.0]),
    )  # fmt: skip
    assert least_loaded(prompts([500]), engines) == [[], [0]]
    assert least_loaded(prompts([50]), engines) == [[0], []]


@given(st.integers(1, 8), st.integers(0, 60))
def test_least_loaded_with_equals_is_balanced(size: int, num: int) -> None:
    counts = [len(part) for part in least_loaded(prompts([10] * num), Engines.idle(np.ones(size)))]
    assert max(counts) - min(counts) <= 1


@given(loaded(), st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 5))
def test_longer_prompts_are_on_engines_that_are_not_slower(engines: Engines, lengths: list[int], buckets: int) -> None:
    assigned = length_buckets(prompts(lengths, buckets=buckets), engines)
    classes = min(buckets, len(engines), len(lengths))
    longest_first = np.argsort(-np.array(lengths), kind="stable")
    bucket_of = {int(i): b for b, part in enumerate(np.array_split(longest_first, classes)) for i in part}
    speed_of = {i: engines.speed[e] for e, part in enumerate(assigned) for i in part}
    slowest = [min(speed_of[i] for i in speed_of if bucket_of[i] == b) for b in range(classes)]
    fastest = [max(speed_of[i] for i in speed_of if bucket_of[i] == b) for b in range(classes)]
    assert all(slowest[b] >= fastest[b + 1] for b in range(classes - 1))


def test_buckets_give_engines_by_work() -> None:
    assigned = length_buckets(prompts([900] * 8 + [100] * 8, buckets=2), Engines.idle(np.ones(10)))
    assert all(max(part, default=0) < 8 for part in assigned[:9])
    assert assigned[9] == list(range(8, 16))


def test_compiled_rules_choose_as_the_plain_ones() -> None:
    from lab.compiled import compiled
    from lab.policies.dispatch import fill_least_loaded, fill_weighted, tournaments

    rng = np.random.default_rng(0)
    fast_weighted, fast_loaded = compiled(fill_weighted), compiled(fill_least_loaded)
    for _ in range(50):
        size, num = rng.integers(1, 9), 40
        share, plain, fast = rng.dirichlet(np.ones(size)), np.empty(num, np.int64), np.empty(num, np.int64)
        fill_weighted(plain, np.zeros(size, np.int64), share)
        fast_weighted(fast, np.zeros(size, np.int64), share)
        assert (plain == fast).all()
        ahead, room = rng.integers(0, 9, size).astype(float), rng.integers(0, 9, size) * 1000.0
        speed, lengths = rng.integers(1, 4, size).astype(float), rng.integers(1, 900, num).astype(float)
        fill_least_loaded(plain, ahead.copy(), room.copy(), speed, lengths, 2, *tournaments(size))
        fast_loaded(fast, ahead.copy(), room.copy(), speed, lengths, 2, *tournaments(size))
        assert (plain == fast).all()


@pytest.mark.parametrize("name", DISPATCH)
def test_many_prompts_are_dealt_as_few_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    many = prompts(rng.integers(1, 900, 500).tolist(), buckets=2)
    engines = Engines.idle(rng.integers(1, 4, 40))
    plain = DISPATCH[name](many, engines)
    monkeypatch.setattr("lab.policies.dispatch.MANY", 0)
    assert DISPATCH[name](many, engines) == plain
