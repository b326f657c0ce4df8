"""Rewards of a service elsewhere: one HTTP POST for each batch, with a deadline, further attempts, several under way.

What is sent is JSON: `{"step": 3, "samples": [{"prompt": [ids], "response": [ids]}]}`. The answer is
`{"rewards": [0.5]}`, one entry for each sample in the same order: a number, or an object of numbers whose sum it is.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from executor.experience import Samples
from executor.rewards import Columns, Parts, RewardFailed, columns, counted, parts
from lab.services import RemoteService

_AGAIN = frozenset({408, 425, 429, *range(500, 600)})
"""statuses after which another attempt may do better (RFC 9110 §15, RFC 6585 §4, RFC 8470 §5.2)"""
_SHOWN_BYTES = 200


class Unanswered(Exception):
    """An attempt that brought no answer; another one may."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one call."""

    rewards: list[Parts]
    attempts: int
    seconds: float
    """from the first attempt to the answer"""


class ByService:
    """Rewards that a service gives."""

    def __init__(self, url: str, service: RemoteService, max_batch_samples: int) -> None:
        self.url, self._service, self._size = url, service, max_batch_samples
        self._pool = ThreadPoolExecutor(service.concurrency, thread_name_prefix="reward-call")

    def score(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        """`rewards` and `reward_…`, shape [N] each; notes calls, retries and the time of all calls together.

        Raises RewardFailed where a call gets no answer in all its attempts, or one that is not what was asked for.
        """
        batches = [
            samples.take(range(i, min(i + self._size, len(samples)))) for i in range(0, len(samples), self._size)
        ]
        futures = [self._pool.submit(self.call, batch) for batch in batches]
        try:
            answers = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
        counts = counted(samples)
        del counts["quantities"]  # the time of others is no measurement of this machine
        notes |= counts | {
            "calls": len(answers), "retries": sum(answer.attempts - 1 for answer in answers), "unanswered": 0,
            "called_s": sum(answer.seconds for answer in answers),
        }  # fmt: skip
        return columns([reward for answer in answers for reward in answer.rewards], self.url)

    def call(self, samples: Samples) -> Answer:
        """One batch, with as many attempts as it takes and the scenario grants."""
        body, start, attempts = _body(samples), time.monotonic(), self._service.retries + 1
        for attempt in range(1, attempts + 1):
            try:
                status, answer = post(self.url, body, self._service.timeout)
                rewards = self._read(status, answer, samples)
                return Answer(rewards=rewards, attempts=attempt, seconds=time.monotonic() - start)
            except Unanswered as error:
                problem = str(error)
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        what = f"{len(samples)} samples of step {samples.step}"
        raise RewardFailed(f"{self.url} gave no rewards for {what} in {tried}, the last one: {problem}")

    def _read(self, status: int, answer: bytes, samples: Samples) -> list[Parts]:
        if status in _AGAIN:
            raise Unanswered(f"status {status}{_text(answer)}")
        if status != 200:
            raise RewardFailed(f"{self.url} answered with status {status}{_text(answer)}")
        try:
            found = json.loads(answer)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RewardFailed(f'{self.url} answered with no JSON object {{"rewards": […]}}{_text(answer)}') from None
        if not isinstance(found, list) or len(found) != len(samples):
            number = f"{len(found)} rewards" if isinstance(found, list) else "no list of rewards"
            raise RewardFailed(f"{self.url} gave {number} for {len(samples)} samples of step {samples.step}")
        return [parts(value, self.url, samples, i) for i, value in enumerate(found)]


def _body(samples: Samples) -> bytes:
    rows = [
        {"prompt": row[:prompt].tolist(), "response": row[prompt:].tolist()}
        for row, prompt in zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    ]
    return json.dumps({"step": samples.step, "samples": rows}, separators=(",", ":")).encode()


def _text(answer: bytes) -> str:
    text = " ".join(answer[:_SHOWN_BYTES].decode(errors="replace").split())
    return f": {text}" if text else ""


def post(url: str, body: bytes, timeout_s: float | None) -> tuple[int, bytes]:
    """Status and body of the answer. Raises Unanswered where there is none after `timeout_s`, however slowly it drips."""
    address = urlsplit(url)
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=timeout_s)
    target = (address.path or "/") + (f"?{address.query}" if address.query else "")
    with contextlib.closing(connection), _deadline(connection, timeout_s) as late:
        try:
            connection.request("POST", target, body, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            found = answer.read()
            if not late.is_set():  # a cut body of unknown length reads like a whole one
                return answer.status, found
            problem = ""
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and timeout_s is not None:
                late.set()
    raise Unanswered(f"no answer within {timeout_s:g} s" if late.is_set() else problem)


@contextlib.contextmanager
def _deadline(connection: HTTPConnection, timeout_s: float | None) -> Iterator[threading.Event]:
    """Cuts the connection when the time is over, whoever waits for it; the event tells that it did."""
    late, kept = threading.Event(), list[socket.socket]()

    def cut() -> None:
        late.set()
        for end in [connection.sock, *kept]:
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    connect = connection.connect

    def connected() -> None:
        connect()
        kept.append(connection.sock)  # an answer with `Connection: close` takes it over

    connection.connect = connected  # type: ignore[method-assign]
    timer = threading.Timer(timeout_s, cut) if timeout_s is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield late
    finally:
        if timer is not None:
            timer.cancel()
