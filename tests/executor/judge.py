"""A reward service on this machine, for tests."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Answers = Callable[[int, Body], tuple[int, bytes]]
"""(how many calls came before, what was sent) -> status and body"""


class Judge(ThreadingHTTPServer):
    """A service with a log of its calls; as a context it runs and ends."""

    daemon_threads = True

    def __init__(self, answers: Answers) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.answers, self.lock, self.release = answers, threading.Lock(), threading.Event()
        self.sent: list[Body] = []
        self.inside = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score?of=mine"

    def __enter__(self) -> "Judge":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.release.set()
        self.shutdown()
        self.server_close()


class Calls(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.sent.append(body)
            number, self.server.inside = len(self.server.sent) - 1, self.server.inside + 1
            self.server.most = max(self.server.most, self.server.inside)
        status, answer = self.server.answers(number, body)
        with self.server.lock:
            self.server.inside -= 1
        with suppress(ConnectionError):  # whoever asked may have given up meanwhile
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


def sums(_: int, body: Body) -> tuple[int, bytes]:
    """Each reward depends on all ids of its sample."""
    rewards = [sum(row["prompt"]) - 2 * sum(row["response"]) for row in body["samples"]]
    return 200, json.dumps({"rewards": rewards}).encode()
