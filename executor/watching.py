"""Watching a run: whoever runs it reports stages and steps here, and a thread of its own passes on what they say.

To Prometheus by HTTP, to MLflow, to `log.jsonl` and `devices.parquet` in the run's folder, and to the line that a
terminal shows. Nothing here slows a run or ends it: what fails is said once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executor import tracking
from executor.devices_watch import Devices
from executor.exposing import Exposition, Port
from executor.journal import FILE as LOG
from executor.journal import Journal
from executor.ledger import finishes, software
from executor.observed import Observed
from executor.tracking import Tracker
from lab import devices
from lab.devices import Reading, Readings
from lab.scenario import Scenario
from lab.timeline import header_of
from lab.wiring import build

FLUSH_S = 120.0
"""between two writes of the devices' readings, of which a killed run keeps the last"""
CLOSE_S = 30.0
_REMEMBERED = 64
"""steps whose numbers are kept, to pass on only what is new"""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a run is watched with."""

    metrics: tuple[str, int] | None = None
    """address that answers Prometheus; None: none"""
    tracking_uri: str | None = None
    """of MLflow; None: it is not told"""
    devices_every_s: float | None = 1.0
    """between two readings of devices and processes; None: none are taken"""


class Watch:
    """`observe`, `row`, `note` and `told` return at once; `close` ends what was begun."""

    def __init__(
        self, scenario: Scenario, folder: Path, watched: Watched, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """`say` is told what cannot be watched, in a sentence each."""
        self.scenario, self.folder, self._watched, self._tell = scenario, folder, watched, say
        self.experiment_id = folder.name
        about = header_of(scenario, "measured")
        self._observed = Observed(finishes(build(scenario)), barrier=about.barrier, batches=about.batches)
        self._lock, self._zero, self._begun = threading.Lock(), time.monotonic(), False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._journal = Journal(folder / LOG, self.experiment_id, self._say_only)
        self._readings, self._earlier = Readings(), devices.read(folder)
        self._failed = set[str]()
        self._told: dict[int, dict[str, float]] = {}
        """by step, of the latest ones, the numbers that were passed on"""
        self._port: Port | None = None
        self._tracker: Tracker | None = None
        self._devices: Devices | None = None
        self._open()
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self._thread.start()

    def begin(self, zero_s: float) -> None:
        """The run's clock: its time zero on the monotonic clock of this machine; again where a run has gone back."""
        self._put(partial(self._begin, zero_s))

    def observe(self, stage: str, step: int, infos: Sequence[Mapping[str, Any]]) -> None:
        """A stage of a step has ended on all of its workers, which said this; `spans` count from the run's time zero."""
        self._put(partial(self._observe, stage, step, list(infos)))

    def row(self, step: int, learning: Mapping[str, Any], num_finished: int | None = None) -> None:
        """What is known of what a step learned; it is finished where `num_finished` steps are."""
        self._put(partial(self._row, step, dict(learning), num_finished))

    def fates(self, counts: Mapping[str, int]) -> None:
        """What has become of the samples so far, by fate, where they are counted one by one."""
        self._put(partial(self._fates, dict(counts)))

    def note(self, event: str, level: str = "info", **said: Any) -> None:
        """A line of the log. A `fault` is counted by its `kind`, and so are the `samples` that it took."""
        self._put(partial(self._note, event, level, said))

    def told(self) -> str:
        """A few numbers for the line that a terminal shows."""
        texts = {
            "{:.3g} samples/s": ("samples_per_second",), "{:.3g} tokens/s": ("generated_tokens_per_second",),
            "reward {:.3g}": ("reward",), "loss {:.3g}": ("loss",), "KL {:.3g}": ("kl",), "lag {:.2g}": ("lag_versions", "mean"),
        }  # fmt: skip
        with self._lock:
            found = [(text, self._observed.number(name, *labels)) for text, (name, *labels) in texts.items()]
        return " · ".join(text.format(number) for text, number in found if number is not None)

    @property
    def address(self) -> tuple[str, int] | None:
        """That answers Prometheus, if any does."""
        return None if self._port is None else self._port.address

    def close(self, status: str = "done", error: str = "") -> None:
        """The run has ended: everything that is known is passed on, and nothing is left behind. May be called twice."""
        if not self._thread.is_alive():
            return
        level = "info" if status == "done" else "warning" if status == "cancelled" else "error"
        self._put(partial(self._note, "ended", level, {"status": status} | ({"error": error} if error else {})))
        self._work.put(None)
        self._thread.join(CLOSE_S)
        self._safely("tracking", partial(self._end_tracking, status))
        self._safely("metrics", self._end_metrics)
        self._safely("devices", self._end_devices)
        self._safely("log", self._journal.close)

    def _end_tracking(self, status: str) -> None:
        if self._tracker is not None:
            self._tracker.close(status)

    def _end_metrics(self) -> None:
        if self._port is not None:
            self._port.close()

    def _end_devices(self) -> None:
        if self._devices is not None:
            self._devices.close()
        self._flush()

    def _open(self) -> None:
        if (address := self._watched.metrics) is not None:
            try:
                self._port = Port(address, Exposition(self.experiment_id, self._series))
            except (OSError, ImportError, UnicodeError) as error:
                place = f"{address[0]}:{address[1]}"
                self._say(f"Prometheus cannot read this run at {place}: {getattr(error, 'strerror', None) or error}")
        if (uri := self._watched.tracking_uri) is not None:
            self._safely("tracking", lambda: self._track(uri))
        if self._watched.devices_every_s is not None:
            self._safely("devices", self._watch_devices)

    def _track(self, uri: str) -> None:
        begin = {
            "uri": uri, "experiment": self.scenario.name, "run": self.experiment_id,
            "parameters": tracking.parameters(self.scenario), "tags": tracking.tags(self.scenario, self.folder, software()),
        }  # fmt: skip
        if uri.startswith("sqlite:"):
            begin["artifacts"] = self.folder.absolute().parent.as_uri()
        self._tracker = Tracker(begin, self._say)

    def _watch_devices(self) -> None:
        self._devices = Devices.of(self.folder)

    def _series(self) -> Any:
        with self._lock:
            return self._observed.copy()

    def _serve(self) -> None:
        """The thread: what is reported, one after the other, and the devices in between."""
        every = self._watched.devices_every_s if self._devices is not None else None
        due, flush = time.monotonic(), time.monotonic() + FLUSH_S
        while True:
            now = time.monotonic()
            if every is not None and now >= due:
                due = now + every
                self._safely("devices", self._read_devices)
            if now >= flush:
                flush = now + FLUSH_S
                self._safely("readings", self._flush)
            try:
                work = self._work.get(timeout=None if every is None else max(due - time.monotonic(), 0.0))
            except queue.Empty:
                continue
            if work is None:
                return
            self._safely("reports", work)

    def _read_devices(self) -> None:
        assert self._devices is not None
        found = self._devices.read()
        self._readings.add(time.monotonic() - self._zero, found)
        with self._lock:
            for reading in found:
                self._seen(reading)
            present = {reading.name for reading in found if reading.kind == "worker"}
            self._observed.forget(("worker_cpu_cores", "worker_memory_bytes"), present)

    def _seen(self, reading: Reading) -> None:
        observed, name = self._observed, reading.name
        if reading.kind == "device":
            observed.set("device_use_ratio", reading.use, name)
            observed.set("device_memory_bytes", reading.memory_bytes, name)
        elif reading.kind == "worker":
            observed.set("worker_cpu_cores", reading.use, name)
            observed.set("worker_memory_bytes", reading.memory_bytes, name)
        else:
            observed.set("network_bytes_total", reading.received_bytes, name, "received")
            observed.set("network_bytes_total", reading.sent_bytes, name, "sent")

    def _begin(self, zero_s: float) -> None:
        if not self._begun:  # what was read before counts from when this watch was made
            self._readings.shift(self._zero - zero_s)
        self._zero, self._begun, self._told = zero_s, True, {}
        self._line("begun", {"num_steps": self.scenario.num_steps})

    def _observe(self, stage: str, step: int, infos: list[Mapping[str, Any]]) -> None:
        with self._lock:
            self._observed.stage(stage, step, infos, self.scenario.workload.samples_per_step)
            self._observed.set("report_timestamp_seconds", time.time())
        whole = [span for info in infos for span in info["spans"] if not span.op]
        workers = {span.worker: round(span.seconds, 6) for span in whole}
        version = max((span.policy_version for span in whole), default=None)
        self._line("stage", {"stage": stage, "seconds": workers}, step=step, version=version)

    def _row(self, step: int, learning: dict[str, Any], num_finished: int | None) -> None:
        with self._lock:
            self._observed.learned(step, learning)
            self._observed.set("report_timestamp_seconds", time.time())
            if num_finished is not None:
                self._observed.finished(num_finished)
            numbers = self._observed.of_step(step)
        event = "learned" if step in self._told else "step"  # an evaluation may come after the end of its step
        self._line(event, {name: value for name, value in learning.items() if name != "step"}, step=step)
        before = self._told.get(step, {})
        self._told = {number: found for number, found in self._told.items() if number > step - _REMEMBERED}
        self._told[step] = numbers
        if self._tracker is not None:
            new = {name: number for name, number in numbers.items() if before.get(name) != number}
            self._tracker.step(step, new, time.time())

    def _fates(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._observed.fates(counts)

    def _note(self, event: str, level: str, said: Mapping[str, Any]) -> None:
        if event == "fault":
            with self._lock:
                self._observed.fault(str(said.get("kind", "unknown")), int(said.get("samples") or 0))
        self._line(event, said, level=level)

    def _line(
        self,
        event: str,
        said: Mapping[str, Any],
        level: str = "info",
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        observed = self._observed
        iteration = observed.iteration if step is None else step
        self._journal.line(event, iteration, observed.model_version if version is None else version, said, level)

    def _flush(self) -> None:
        if self._readings.num_moments:
            self._readings.write(self.folder / devices.FILE, self._earlier)

    def _put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def _say(self, text: str) -> None:
        self._say_only(text)
        self._put(partial(self._line, "warning", {"text": text}, level="warning"))

    def _say_only(self, text: str) -> None:
        try:
            self._tell(text)
        except Exception:  # a closed terminal
            self._tell = lambda text: None

    def _safely(self, name: str, work: Callable[[], object]) -> None:
        """What fails is said the first time, and neither slows the run nor ends it."""
        try:
            work()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                self._say(
                    f"the run goes on, but its {name} are not watched as they should: {type(error).__name__}: {error}"
                )
