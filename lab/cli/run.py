from __future__ import annotations

from typing import Annotated

import typer

from lab.cli.options import RUNS, ClusterFile, Json, Out, ProfileName, ScenarioFile
from lab.cli.watching import Asked, MetricsPort, NoMetrics, NoTracking


def run(
    scenario: ScenarioFile,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Real executions; three or more give the spread.")
    ] = 1,
    out: Out = RUNS,
    json: Json = False,
    profile: ProfileName = None,
    cluster: ClusterFile = None,
    metrics_port: MetricsPort = None,
    no_metrics: NoMetrics = False,
    no_tracking: NoTracking = False,
) -> None:
    """Simulate a scenario, then execute it for real, then compare the two."""
    from pathlib import Path

    from lab.cli.compare import lines, side_by_side
    from lab.cli.execute import beside, executor, measure
    from lab.cli.show import comparison_table, emit, note, unfinished
    from lab.cli.simulate import predict, read
    from lab.load import located

    asked = Asked(metrics_port=metrics_port, no_metrics=no_metrics, no_tracking=no_tracking)
    asked.check()
    with located(scenario):
        chosen = read(scenario, cluster)
        beside(scenario)
        executor("limits").refuse(chosen)
        predicted, summary = predict(chosen, out, profile)
    note(f"predicted step: {summary['step_s']['mean']:.3f} s ({summary['run_dir']})")
    measured = []
    for repeat in range(repeats):
        note(f"executing for real ({repeat + 1}/{repeats}): {chosen.num_steps} steps on Ray, vLLM and DeepSpeed")
        timeline, summary = measure(chosen, out, asked=asked)
        if timeline.header.status != "done":
            unfinished(Path(summary["run_dir"]), timeline.header.status, timeline.header.error)
            raise typer.Exit(1)
        measured.append(timeline)
    result = side_by_side(predicted, measured, out)
    emit(result, json, comparison_table(result), lines(result))
