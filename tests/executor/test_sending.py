"""Samples over real connections: from a sender's threads into an inbox, in this process."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from executor.experience import Samples, joined
from executor.inbox import Inbox
from executor.sending import FRAME, SHARED, Line, Sender, SharedMemory, Stream, sweep
from lab.experience import Experience

HOST, MARK = "127.0.0.1", f"lab-test{os.getpid()}"


def samples(places: list[int], step: int = 0) -> Samples:
    return Samples(
        step=step, policy_version=1, prompts=np.array(places) // 4, num_prompt_tokens=np.full(len(places), 2),
        tokens=[np.array([1, 2, place, 7]) for place in places],
        logprobs=[np.array([-0.5, -place], dtype=np.float32) for place in places], indices=np.array(places) % 4,
    )  # fmt: skip


def stream(port: int) -> Line:
    return Stream(HOST, port)


def memory(port: int) -> Line:
    return SharedMemory(HOST, port, MARK)


LINES: dict[str, Callable[[int], Line]] = {"rpc": stream, "shared_memory": memory}


@pytest.mark.parametrize("way", sorted(LINES))
def test_all_samples_arrive_in_the_order_of_prompts(way: str) -> None:
    inbox = Inbox(num_tried=4)
    port = inbox.listen(HOST)
    shares = [[5, 4, 0, 12], [3, 13, 1, 2]]
    senders = [Sender(0, Experience(batch_samples=3, compression="zstd"), LINES[way](port)) for _ in shares]
    for sender, share in zip(senders, shares, strict=True):
        sender.put(samples(share[:1]))
        sender.put(samples(share[1:]))
    sent = [sender.finish() for sender in senders]
    assert [one.samples for one in sent] == [4, 4] and all(one.messages >= 2 for one in sent)
    assert all(one.bytes > FRAME.size and one.raw_bytes > 0 for one in sent)
    found = inbox.collect(0, 8)
    assert [int(tokens[2]) for tokens in found.tokens] == [0, 1, 2, 3, 4, 5, 12, 13]
    assert [float(row[1]) for row in found.logprobs] == [0, -1, -2, -3, -4, -5, -12, -13]
    assert list(SHARED.glob(f"{MARK}-*")) == []


def test_a_whole_message_waits_for_its_samples_and_the_rest_for_the_end() -> None:
    inbox = Inbox(num_tried=4)
    sender = Sender(2, Experience(batch_samples=4), Stream(HOST, inbox.listen(HOST)), whole=True)
    for place in range(6):
        sender.put(samples([place], step=2))
    sent = sender.finish()
    assert (sent.messages, sent.samples) == (2, 6)
    assert len(inbox.collect(2, 6)) == 6


def test_what_has_not_come_is_said() -> None:
    inbox = Inbox()
    with pytest.raises(RuntimeError, match="0 of 3 samples of step 1 arrived"):
        inbox.collect(1, 3)


def test_an_inbox_that_breaks_off_is_told_by_the_sender(tmp_path: Path) -> None:
    """It sends a message that is none."""
    inbox = Inbox()
    line = Stream(HOST, inbox.listen(HOST))
    line._hand_over(0, b"no message")
    with pytest.raises((ConnectionError, OSError)):
        line.settle()
    with pytest.raises(RuntimeError, match="Damaged"):
        inbox.collect(0, 1)


def test_what_killed_processes_leave_is_swept() -> None:
    left = SHARED / f"{MARK}-1-x"
    left.write_bytes(b"x")
    sweep(MARK)
    assert not left.exists()


def test_nobody_waits_after_the_end() -> None:
    inbox = Inbox(num_tried=4)
    before = threading.active_count()
    line = Stream(HOST, inbox.listen(HOST))
    sender = Sender(0, Experience(), line)
    sender.put(joined([samples([0]), samples([1])]))
    sender.finish()
    assert sender._threads and not any(thread.is_alive() for thread in sender._threads)
    line.close()
    assert threading.active_count() <= before + 2
