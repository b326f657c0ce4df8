"""Rewards of a service: a real one on this machine, and every way in which it may fail."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from executor.remote import ByService, Unanswered, post
from executor.rewards import RewardFailed
from lab.services import RemoteService
from tests.executor.judge import Answers, Judge, sums
from tests.executor.judged import samples


@pytest.fixture
def service() -> Iterator[Callable[[Answers], Judge]]:
    """Starts services, and ends them with the test."""
    started: list[Judge] = []

    def start(answers: Answers) -> Judge:
        started.append(server := Judge(answers))
        return server.__enter__()

    yield start
    for server in started:
        server.__exit__()


def asked(url: str, size: int = 4, **more: Any) -> ByService:
    service = RemoteService.model_validate({"latency": 0.01, "url": url, "retries": 1} | more)
    return ByService(url, service, size)


@pytest.mark.parametrize(("size", "concurrency"), [(1, 1), (4, 3), (100, 8)])
def test_every_sample_gets_its_own_reward(service: Any, size: int, concurrency: int) -> None:
    judge, rows = service(sums), samples(10, step=3)
    columns = asked(judge.url, size, concurrency=concurrency).score(rows, notes := {})
    expected = [int(row[:12].sum() - 2 * row[12:].sum()) for row in rows.tokens]
    assert columns["rewards"].tolist() == expected
    assert {body["step"] for body in judge.sent} == {3}
    assert max(len(body["samples"]) for body in judge.sent) <= size
    assert notes["calls"] == -(-10 // size) == len(judge.sent)
    assert (notes["retries"], notes["samples"], notes["tokens"]) == (0, 10, sum(rows.lengths))


def test_components_come_as_columns(service: Any) -> None:
    judge = service(lambda _, body: (200, json.dumps({"rewards": [{"help": 0.5, "safe": -1}] * 10}).encode()))
    columns = asked(judge.url, 10).score(samples(10), {})
    assert columns["rewards"].tolist() == [-0.5] * 10
    assert columns["reward_help"].tolist() == [0.5] * 10 and columns["reward_safe"].tolist() == [-1.0] * 10


def test_so_many_calls_are_under_way_and_no_more(service: Any) -> None:
    together = threading.Barrier(3)

    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
        together.wait(timeout=10)  # each waits for two others
        return sums(number, body)

    judge = service(answers)
    asked(judge.url, 1, concurrency=3, timeout=20.0).score(samples(9), {})
    assert judge.most == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_call_that_fails_is_made_again(service: Any, status: int) -> None:
    judge = service(lambda number, body: (status, b"busy") if number % 2 == 0 else sums(number, body))
    columns = asked(judge.url, 5, retries=1).score(rows := samples(10), notes := {})
    assert columns["rewards"].tolist() == [int(row[:12].sum() - 2 * row[12:].sum()) for row in rows.tokens]
    assert (notes["calls"], notes["retries"]) == (2, 2)


FAILURES: dict[str, tuple[Answers, str, int]] = {
    "busy": (lambda n, b: (503, b"come\nlater"), "in 3 attempts, the last one: status 503: come later", 3),
    "refuses": (lambda n, b: (403, b"not you"), "answered with status 403: not you", 1),
    "no_json": (lambda n, b: (200, b"<html>"), "no JSON object", 1),
    "no_rewards": (lambda n, b: (200, b'{"scores": [1]}'), "no JSON object", 1),
    "no_list": (lambda n, b: (200, b'{"rewards": 3}'), "no list of rewards for 4 samples", 1),
    "too_few": (lambda n, b: (200, b'{"rewards": [1, 2, 3]}'), "3 rewards for 4 samples", 1),
    "too_many": (lambda n, b: (200, b'{"rewards": [1, 2, 3, 4, 5]}'), "5 rewards for 4 samples", 1),
    "nan": (lambda n, b: (200, b'{"rewards": [1, NaN, 3, 4]}'), "gave nan, which is no finite number, for sample 0", 1),
    "inf": (lambda n, b: (200, b'{"rewards": [1, 1e999, 3, 4]}'), "gave inf", 1),
    "null": (lambda n, b: (200, b'{"rewards": [1, null, 3, 4]}'), "gave None", 1),
    "string": (lambda n, b: (200, b'{"rewards": [1, "2", 3, 4]}'), "gave '2'", 1),
    "part": (lambda n, b: (200, b'{"rewards": [{"a": 1}, {"a": null}, {"a": 1}, {"a": 1}]}'), "None as 'a'", 1),
    "parts": (lambda n, b: (200, b'{"rewards": [{"a": 1}, {"a": 1}, {"b": 1}, {"a": 1}]}'), "different components", 1),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_service_that_gives_no_reward_is_told(service: Any, kind: str) -> None:
    answers, message, calls = FAILURES[kind]
    judge = service(answers)
    with pytest.raises(RewardFailed) as caught:
        asked(judge.url, retries=2).score(samples(4), {})
    assert message in str(caught.value) and judge.url in str(caught.value) and "\n" not in str(caught.value)
    assert len(judge.sent) == calls


def test_a_service_that_hangs_is_given_up_in_time(service: Any) -> None:
    def hangs(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
        judge.release.wait(30)
        return 500, b""

    judge = service(hangs)
    start = time.monotonic()
    with pytest.raises(RewardFailed, match=r"in 2 attempts, the last one: no answer within 0.2 s"):
        asked(judge.url, timeout=0.2, latency=0.1).score(samples(4), {})
    assert 0.4 <= time.monotonic() - start < 5
    assert len(judge.sent) == 2


@pytest.mark.parametrize("drips", [b"x", b"HTTP/1.0 200 OK\r\nA: ", b"HTTP/1.0 200 OK\r\n\r\n["])
def test_a_service_that_drips_is_given_up_in_time(drips: bytes) -> None:
    """One byte at a time restarts the clock of every single read, but not that of the call."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def serve() -> None:
            end, _ = listening.accept()
            with end:
                end.recv(65536)
                end.sendall(drips)
                while not stop.wait(0.02):
                    try:
                        end.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        start = time.monotonic()
        with pytest.raises(Unanswered, match=r"no answer within 0.3 s"):
            post(f"http://127.0.0.1:{listening.getsockname()[1]}/", b"{}", 0.3)
        assert time.monotonic() - start < 5
        stop.set()
        thread.join(5)


def test_nobody_there_is_told() -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RewardFailed, match="in 2 attempts, the last one: ConnectionRefusedError"):
        asked(f"http://127.0.0.1:{port}/score").score(samples(4), {})


@pytest.mark.parametrize("url", ["ftp://a/b", "judge.local/score", "http://", "http://a:b/c", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address of the form"):
        RemoteService.model_validate({"latency": 0.1, "url": url})


def test_an_answer_may_be_large(service: Any) -> None:
    judge = service(sums)
    rows = samples(2000, seed=5)
    found = asked(judge.url, 2000).score(rows, {})["rewards"]
    assert np.array_equal(found, [row[:12].sum() - 2 * row[12:].sum() for row in rows.tokens])
