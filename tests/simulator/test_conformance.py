"""The simulated scheduler against vLLM's, iteration by iteration; vLLM lives in a process of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import conformance
from benchmarks.conformance import Case, difference, summary, vllm

Compare = Callable[..., list[Case]]


@pytest.fixture(scope="module")
def compare() -> Iterator[Compare]:
    """Plays workloads of these seeds on both sides, with some settings of the simulator changed."""
    with vllm() as process:
        yield lambda source, seeds, **changed: list(conformance.compare(process, source, seeds, **changed))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[list[Case]], None]:
    """Counts into the output of the test run, also where all is well."""

    def tell(cases: list[Case]) -> None:
        with capsys.disabled():
            print(f"\n{summary(cases)}")

    return tell


def differences(cases: list[Case]) -> dict[int, str]:
    """By seed."""
    return {case.seed: case.difference for case in cases if case.difference}


@pytest.mark.real
@pytest.mark.parametrize(
    ("source", "seeds"),
    [("engine", (105, 108, 109)), ("sync", range(12)), ("async", range(12))],
    ids=["engine", "sync", "async"],
)
def test_every_decision_is_vllms(compare: Compare, told: Any, source: str, seeds: Any) -> None:
    cases = compare(source, seeds)
    told(cases)
    assert differences(cases) == {}
    assert 2 * sum(bool(case.preemptions and case.prefix_hits) for case in cases) >= len(cases)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.parametrize("source", ["engine", "sync", "async"])
def test_every_decision_in_fifty_workloads_is_vllms(compare: Compare, told: Any, source: str) -> None:
    cases = compare(source, range(50))
    told(cases)
    assert differences(cases) == {}
    assert sum(bool(case.preemptions and case.prefix_hits) for case in cases) >= 25


@pytest.mark.real
@pytest.mark.parametrize(
    "changed",
    [{"reuse_uncached_first": False}, {"prefix_caching": False}, {"async_scheduling": True}, {"watermark": 0.1},
     {"max_num_seqs": 3}],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_another_rule_is_noticed(compare: Compare, changed: dict[str, Any]) -> None:
    cases = compare("sync", range(12), **changed)
    assert differences(cases)
    assert all(text.startswith("iteration ") for text in differences(cases).values())


def test_a_difference_names_the_first_iteration_and_what_differs() -> None:
    one = ([(0, 5, 0)], 1, 0, 2, [], [])
    other = ([(0, 5, 0)], 1, 0, 3, [], [0])
    assert difference([one, one], [one, one]) == ""
    assert (
        difference([one, one], [one, other])
        == "iteration 1: blocks 2 in vLLM, 3 simulated; finished [] in vLLM, [0] simulated"
    )
    assert difference([one, one], [one]) == "2 iterations in vLLM, 1 simulated"
