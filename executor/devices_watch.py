"""What devices and processes do while a run goes on: cores and processes by psutil, GPUs by NVIDIA's management library."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from executor import processes
from lab.devices import Reading


class Cores:
    """The cores that this process may use; their memory is the machine's."""

    def __init__(self) -> None:
        self._mine = sorted(os.sched_getaffinity(0))
        psutil.cpu_percent(percpu=True)

    def read(self) -> Iterator[Reading]:
        used, every = psutil.virtual_memory().used, psutil.cpu_percent(percpu=True)
        for core in self._mine:
            if core < len(every):
                yield Reading(kind="device", name=f"core{core}", use=every[core] / 100, memory_bytes=float(used))


class Gpus:
    """The GPUs of this machine; none where there is no driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        with suppress(Exception):  # no library, no driver, no permission: then there is no GPU to watch
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> Iterator[Reading]:
        for i, handle in enumerate(self._handles):
            with suppress(self._nvml.NVMLError):
                rates, memory = (
                    self._nvml.nvmlDeviceGetUtilizationRates(handle),
                    self._nvml.nvmlDeviceGetMemoryInfo(handle),
                )
                yield Reading(kind="device", name=f"gpu{i}", use=rates.gpu / 100, memory_bytes=float(memory.used))

    def close(self) -> None:
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


class Processes:
    """The processes of a run on this machine, by worker name: whoever `processes.json` names at the moment."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._stamp = -1
        self._known: dict[str, psutil.Process] = {}
        self._before: dict[int, tuple[float, float]] = {}

    def read(self) -> Iterator[Reading]:
        self._refresh()
        for name, process in self._known.items():
            with suppress(psutil.Error):
                with process.oneshot():
                    spent, memory = sum(process.cpu_times()[:2]), process.memory_info().rss
                if memory == 0:  # it has ended, and nobody has asked how
                    continue
                now, (then, before) = self._clock(), self._before.get(process.pid, (0.0, 0.0))
                self._before[process.pid] = (now, spent)
                use = (spent - before) / (now - then) if then and now > then else 0.0
                yield Reading(kind="worker", name=name, use=use, memory_bytes=float(memory))

    def _refresh(self) -> None:
        stamp = 0
        with suppress(OSError):
            stamp = (self._folder / processes.FILE).stat().st_mtime_ns
        if stamp != self._stamp:
            pids = processes.read(self._folder) | {processes.DRIVER: os.getpid()}
            self._stamp = stamp
            self._known = {name: process for name, pid in pids.items() if (process := _process(pid)) is not None}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except (psutil.Error, ValueError, TypeError):
        return None


class Network:
    """Bytes through the interfaces of this machine since this began."""

    def __init__(self) -> None:
        self._first = psutil.net_io_counters(pernic=True)

    def read(self) -> Iterator[Reading]:
        for name, now in psutil.net_io_counters(pernic=True).items():
            first = self._first.get(name)
            if first is not None and (now.bytes_recv or now.bytes_sent):
                received, sent = now.bytes_recv - first.bytes_recv, now.bytes_sent - first.bytes_sent
                yield Reading(
                    kind="network", name=name, received_bytes=float(max(received, 0)), sent_bytes=float(max(sent, 0))
                )


@dataclass(frozen=True, kw_only=True)
class Devices:
    """All of it at once."""

    cores: Cores
    gpus: Gpus
    processes: Processes
    network: Network

    @classmethod
    def of(cls, folder: Path) -> Devices:
        """Of this machine and of the run in `folder`."""
        return cls(cores=Cores(), gpus=Gpus(), processes=Processes(folder), network=Network())

    def read(self) -> list[Reading]:
        """One reading of every device, process and interface; a core is a device where there is no GPU."""
        devices = list(self.gpus.read()) or list(self.cores.read())
        return [*devices, *self.processes.read(), *self.network.read()]

    def close(self) -> None:
        self.gpus.close()
