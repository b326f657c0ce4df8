"""What `lab execute` and `lab run` are asked about watching a run, and how they do it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

MetricsPort = Annotated[
    str | None,
    typer.Option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="Where Prometheus may read the run. Default: 9464, this machine alone.",
    ),
]
NoMetrics = Annotated[bool, typer.Option("--no-metrics", envvar="LAB_NO_METRICS", help="Answer no Prometheus.")]
NoTracking = Annotated[
    bool,
    typer.Option(
        "--no-tracking",
        envvar="LAB_NO_TRACKING",
        help="Do not tell MLflow: mlflow.db beside the run, or MLFLOW_TRACKING_URI.",
    ),
]
Trace = Annotated[bool, typer.Option("--trace", help="Trace stages with torch.profiler, which slows them down.")]
TraceSteps = Annotated[
    int, typer.Option("--trace-steps", min=1, help="How many steps from the first one on are traced.")
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a run is to be watched. Its log and the use of its devices are always kept."""

    metrics_port: str | None = None
    no_metrics: bool = True
    no_tracking: bool = True
    trace_steps: int = 0

    def check(self) -> None:
        """Raises InputError where what is asked cannot be."""
        from lab.cli.execute import executor
        from lab.errors import InputError

        executor("exposing").address_of(self.metrics_port)
        if self.no_metrics and self.metrics_port is not None:
            problem, remedy = "a port, and no metrics", "give one of --metrics-port and --no-metrics (LAB_NO_METRICS)"
            raise InputError(key="--metrics-port", problem=problem, remedy=remedy)


@contextmanager
def watch(scenario: Any, folder: Path, asked: Asked) -> Iterator[Any]:
    """A watch over a run that is about to begin; whoever runs it closes it with how it ended."""
    from lab.cli.execute import executor
    from lab.cli.show import note

    watching = executor("watching")
    metrics = None if asked.no_metrics else executor("exposing").address_of(asked.metrics_port)
    uri = None if asked.no_tracking else executor("tracking").address(folder)
    watched = watching.Watched(metrics=metrics, tracking_uri=uri)
    found = watching.Watch(scenario, folder, watched, note)
    if metrics is not None and metrics[1] == 0 and found.address is not None:
        host, port = found.address
        note(f"Prometheus may read this run at http://{f'[{host}]' if ':' in host else host}:{port}/metrics")
    try:
        yield found
    finally:
        found.close("failed")


@contextmanager
def traced(folder: Path, first_step: int, num_steps: int) -> Iterator[None]:
    """Workers that start inside trace so many steps into the run's folder."""
    from lab.cli.execute import executor

    variables = executor("tracing").variables(folder, first_step, num_steps) if num_steps else {}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
