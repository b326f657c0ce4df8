"""Says how a run is to whoever asks by HTTP, in the format of Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from executor.observed import Value
from lab.alerts import METRICS_PORT
from lab.errors import InputError
from lab.watched import LABELS, METRICS, Metric

Series = Mapping[tuple[str, tuple[str, ...]], Value]


def address_of(text: str | None) -> tuple[str, int]:
    """HOST:PORT, or a port of this machine alone. Raises InputError for anything else."""
    host, _, port = (text or str(METRICS_PORT)).rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise InputError(
            key="--metrics-port", problem=f"{text} is no port",
            remedy="give a number below 65536, or HOST:PORT (0.0.0.0:9464 for whoever can reach this machine)",
        )  # fmt: skip
    return host.strip("[]") or "127.0.0.1", int(port)


class Exposition:
    """The collector of one run: it makes its series anew each time somebody asks, so none stays behind."""

    def __init__(self, experiment_id: str, series: Callable[[], Series]) -> None:
        self._experiment_id, self._series = experiment_id, series

    def collect(self) -> Iterator[Any]:
        """Every metric that has a value, with all its labels."""
        found: dict[str, list[tuple[tuple[str, ...], Value]]] = {}
        for (name, labels), value in self._series().items():
            found.setdefault(name, []).append((labels, value))
        for metric in METRICS:
            if metric.name in found:
                yield self._family(metric, found[metric.name])

    def _family(self, metric: Metric, rows: list[tuple[tuple[str, ...], Value]]) -> Any:
        from prometheus_client import metrics_core

        kinds = {
            "gauge": metrics_core.GaugeMetricFamily, "counter": metrics_core.CounterMetricFamily,
            "histogram": metrics_core.HistogramMetricFamily,
        }  # fmt: skip
        family = kinds[metric.kind](metric.full_name, metric.help, labels=[*LABELS, *metric.labels])
        for own, value in rows:
            labels = [self._experiment_id, str(value.iteration), str(value.model_version), *own]
            if metric.kind == "histogram":
                family.add_metric(labels, _buckets(metric, value.number.counts), value.number.total)
            else:
                family.add_metric(labels, value.number)
        return family


def _buckets(metric: Metric, counts: tuple[int, ...]) -> list[tuple[str, float]]:
    ends = [*(str(edge) for edge in metric.edges), "+Inf"]
    return [(end, float(sum_)) for end, sum_ in zip(ends, itertools.accumulate(counts), strict=True)]


class Port:
    """Answers at an address until it is closed. Raises OSError where it cannot be had."""

    def __init__(self, address: tuple[str, int], exposition: Exposition) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(exposition)
        self._server, self._thread = start_http_server(address[1], addr=address[0], registry=registry)
        self.address = (address[0], int(self._server.server_port))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
