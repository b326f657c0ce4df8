"""Reward functions: the library, a user's own, and every way in which one may fail."""

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.experience import Samples
from executor.rewards import LIBRARY, ByFunction, RewardFailed, reward_function
from executor.tasks import TASKS
from executor.tokenizer import EOS, IDS, encode
from lab.services import REWARDS

RESPONSES = st.lists(st.integers(4, 63), max_size=40)
TEXTS = st.text("abc01 ", min_size=1, max_size=3)


def samples(*responses: list[int], step: int = 4) -> Samples:
    prompt, number = [1, 8, 6, 7], len(responses)
    return Samples(
        step=step, policy_version=step, prompts=np.arange(number), num_prompt_tokens=np.full(number, len(prompt)),
        tokens=[np.asarray(prompt + response) for response in responses],
        logprobs=[np.zeros(len(response), dtype=np.float32) for response in responses],
    )  # fmt: skip


def test_the_library_is_what_scenarios_may_name() -> None:
    assert set(LIBRARY) | {"task"} == set(REWARDS)
    assert reward_function("task", "echo") is TASKS["echo"].reward


@given(st.integers(1, 50))
def test_length_is_best_at_its_target_and_falls_on_both_sides(target: int) -> None:
    found = [LIBRARY["length"]([], [4] * n, target=target) for n in range(60)]
    assert found[target] == 1.0 == max(found)
    assert all(a < b for a, b in pairwise(found[: target + 1]))
    assert all(a > b for a, b in pairwise(found[target:]))


@given(RESPONSES, TEXTS)
def test_contains_is_what_python_finds_in_the_text(response: list[int], text: str) -> None:
    named = {i: token for token, i in IDS.items()}
    written = "".join(named[i] for i in response)
    assert LIBRARY["contains"]([], response, text=text) == float(text in written)
    assert LIBRARY["contains"]([], [*response, *encode(text), *response], text=text) == 1.0


@given(RESPONSES, TEXTS)
def test_share_counts_tokens(response: list[int], text: str) -> None:
    counts = Counter(response)
    wanted = sum(counts[i] for i in set(encode(text)))
    assert LIBRARY["share"]([], response, text=text) * max(len(response), 1) == pytest.approx(wanted)


@given(RESPONSES, st.integers(1, 4))
def test_distinct_is_one_without_and_least_with_nothing_but_repetition(response: list[int], n: int) -> None:
    found = LIBRARY["distinct"]([], response, n=n)
    assert 0 < found <= 1
    assert LIBRARY["distinct"]([], list(range(30)), n=n) == 1.0
    assert LIBRARY["distinct"]([], [5] * 30, n=n) == pytest.approx(1 / (31 - n))


def test_ended_looks_at_the_last_token() -> None:
    end = IDS[EOS]
    assert [LIBRARY["ended"]([], row) for row in ([end], [5, end], [end, 5], [])] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "task", "arguments", "named"),
    [
        ("no_such_module_here:f", "echo", {}, "no_such_module_here"),
        ("operator:no_such_name", "echo", {}, "no_such_name"),
        ("string:digits", "echo", {}, "not a function"),
        ("task", None, {}, "no built-in task"),
        ("contains", "echo", {}, "text"),
        ("length", "echo", {"aim": 3}, "aim"),
        ("task", "echo", {"target": 3}, "target"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_run(
    name: str, task: str | None, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        reward_function(name, task, arguments)


def test_a_module_that_fails_when_it_is_imported_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_judge.py").write_text("def judge(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="broken_judge:judge: SyntaxError"):
        reward_function("broken_judge:judge", None)


def test_numbers_become_rewards_and_dicts_their_sums() -> None:
    rows = samples([5], [5, 6], [5, 6, 7])
    found = ByFunction("mine", lambda p, r, bonus: {"size": len(r), "bonus": np.float32(bonus)}, {"bonus": 0.5})
    columns = found.score(rows, notes := {})
    assert {name: column.tolist() for name, column in columns.items()} == {
        "rewards": [1.5, 2.5, 3.5], "reward_size": [1.0, 2.0, 3.0], "reward_bonus": [0.5, 0.5, 0.5],
    }  # fmt: skip
    assert (notes["samples"], notes["tokens"]) == (3, 18)
    plain = ByFunction("mine", lambda p, r: len(r) > 1).score(rows, {})
    assert list(plain) == ["rewards"] and plain["rewards"].tolist() == [0.0, 1.0, 1.0]


def test_a_batched_function_gets_all_at_once_and_gives_the_same() -> None:
    calls = []

    def together(prompts: list[list[int]], responses: list[list[int]]) -> list[float]:
        calls.append(len(prompts))
        return [float(sum(p) + 2 * sum(r)) for p, r in zip(prompts, responses, strict=True)]

    together.batched = True  # type: ignore[attr-defined]
    rows = samples([5], [9, 10], [40])
    one_by_one = ByFunction("mine", lambda p, r: sum(p) + 2 * sum(r)).score(rows, {})
    assert ByFunction("mine", together).score(rows, {})["rewards"].tolist() == one_by_one["rewards"].tolist()
    assert calls == [3]


class Fails(list[float]):
    def __repr__(self) -> str:
        raise RuntimeError("no text either")


WRONG: dict[str, Any] = {
    "raises": None, "nan": float("nan"), "inf": float("-inf"), "none": None, "string": "1.0", "list": [1.0],
    "complex": 1j, "empty": {}, "named_nan": {"a": 1.0, "b": float("nan")}, "named_string": {"a": "x"},
    "unnamed": {"": 1.0}, "numbered": {1: 1.0}, "unprintable": Fails(),
}  # fmt: skip


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_whatever_is_no_reward_is_told_with_function_sample_and_value(kind: str, batched: bool) -> None:
    def single(prompt: list[int], response: list[int]) -> Any:
        if len(response) < 3:
            return 0.5
        if kind == "raises":
            raise ZeroDivisionError("by zero it was")
        return WRONG[kind]

    def several(prompts: list[list[int]], responses: list[list[int]]) -> list[Any]:
        return [single(p, r) for p, r in zip(prompts, responses, strict=True)]

    several.batched = True  # type: ignore[attr-defined]
    judge = ByFunction("mine:judge", several if batched else single)
    with pytest.raises(RewardFailed) as caught:
        judge.score(samples([5], [6, 7], [7, 8, 9]), {})
    message = str(caught.value)
    assert message.startswith("mine:judge ") and "step 4" in message and len(message) < 300 and "\n" not in message
    if not (batched and kind == "raises"):
        assert "prompt 2 of step 4" in message and "1 8 6 7" in message
    if kind == "raises":
        assert "ZeroDivisionError: by zero it was" in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message, "it travels from process to process"


@pytest.mark.parametrize("given_back", [[], [1.0], [1.0] * 4, 3.0, None])
def test_a_batched_function_that_gives_too_few_or_too_many(given_back: Any) -> None:
    def several(prompts: list[list[int]], responses: list[list[int]]) -> Any:
        return given_back

    several.batched = True  # type: ignore[attr-defined]
    with pytest.raises(RewardFailed, match="mine:judge"):
        ByFunction("mine:judge", several).score(samples([5], [6]), {})


def test_components_that_change_from_sample_to_sample_are_told() -> None:
    judge = ByFunction("mine:judge", lambda p, r: {"a": 1.0} if len(r) == 1 else {"a": 1.0, "b": 2.0})
    with pytest.raises(RewardFailed, match="different components: a, then a, b"):
        judge.score(samples([5], [6, 7]), {})


def test_a_function_cannot_change_the_samples() -> None:
    rows = samples([5, 6], [7])
    before = [row.copy() for row in rows.tokens]
    ByFunction("mine", lambda p, r: float(len(r + p)) * (r.clear() is None)).score(rows, {})
    assert all((a == b).all() for a, b in zip(before, rows.tokens, strict=True))
