from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import RUNS, ClusterFile, Json, Out, ProfileName, ScenarioFile

Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="N",
        help="Play it under N seeds from the scenario's own on, on all cores, and print intervals; keeps no run folder.",
    ),
]

MOST_SEEDS = 10**6


def simulate(
    scenario: ScenarioFile,
    out: Out = RUNS,
    json: Json = False,
    profile: ProfileName = None,
    cluster: ClusterFile = None,
    seeds: Seeds = None,
) -> None:
    """Play a scenario in virtual time and predict how it will run."""
    from lab.cli.show import emit, seeds_table, summary_lines, summary_table
    from lab.load import located

    with located(scenario):
        if seeds is not None:
            result = spread(read(scenario, cluster), seeds, profile)
            emit(result, json, seeds_table(result), [])
            return
        summary = predict(read(scenario, cluster), out, profile)[1]
    emit(summary, json, summary_table(summary), summary_lines(summary))


def read(path: Path, cluster: Path | None) -> Any:
    """The scenario in a file, on another cluster where one is given. Raises InputError."""
    from pydantic import ValidationError

    from lab.cluster import Cluster
    from lab.coherence import Incoherent
    from lab.errors import InputError
    from lab.load import load, read_record

    scenario = load(path)
    if cluster is None:
        return scenario
    try:
        return scenario.replace({"cluster": read_record(cluster, Cluster).model_dump(mode="json", by_alias=True)})
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        problem = cause.problem if isinstance(cause, Incoherent) else str(error)
        remedy = "adapt the scenario's pools to this cluster"
        raise InputError(file=str(cluster), key=getattr(cause, "key", None), problem=problem, remedy=remedy) from None


def profiles_for(scenario: Any, name: str | None) -> Mapping[str, Any]:
    """The profile of every device kind that the scenario uses. Raises InputError for one of a kind that it does not use."""
    from profiles.profile import resolve

    used = {scenario.hardware.node_of(device).device for ids in scenario.devices.values() for device in ids}
    return resolve(used, name)


def predict(scenario: Any, out: Path, profile: str | None) -> tuple[Any, dict[str, Any]]:
    """Simulates and writes the run folder; the timeline and its summary."""
    from lab import runs
    from lab.cli.show import note
    from lab.compiled import cold
    from lab.drawing import assumed
    from lab.publication import idles
    from simulator.run import simulate as play

    profiles = profiles_for(scenario, profile)
    for line in (*doubts(profiles), *assumed(scenario)):
        note(line)
    if cold():
        note("the first simulation on this machine compiles the engine, which takes about half a minute")
    timeline = play(scenario, profiles)
    if said := idles(scenario, timeline.spans):
        note("{}: {}; {}".format(*said))
    return timeline, runs.finish(runs.begin(out, scenario, "simulated"), scenario, timeline)


def spread(scenario: Any, num_seeds: int, profile: str | None) -> dict[str, Any]:
    """Figures of the scenario over so many seeds, with a progress bar on a terminal. Raises InputError."""
    from dataclasses import asdict

    from lab.cli.show import note, progress
    from lab.errors import InputError
    from simulator.studies.seeds import CONFIDENCE, many

    if not 1 <= num_seeds <= MOST_SEEDS:
        problem = f"{num_seeds} is not a number of simulations from 1 to {MOST_SEEDS}"
        raise InputError(key="--seeds", problem=problem, remedy="--seeds 32 is a good start")
    profiles = profiles_for(scenario, profile)
    for line in doubts(profiles):
        note(line)
    seeds = [(scenario.seed + i) % 2**32 for i in range(num_seeds)]
    with progress("seeds", num_seeds) as told:
        found = many(scenario, profiles, seeds, min(num_seeds, len(os.sched_getaffinity(0))), told)
    figures = {name: asdict(interval) for name, interval in found.items()}
    head = {"scenario": scenario.name, "origin": "simulated", "seeds": seeds, "confidence": CONFIDENCE}
    return head | {"figures": figures}


def doubts(profiles: Mapping[str, Any]) -> list[str]:
    """What a person should know before trusting these profiles: of cores, that another machine's were measured."""
    from profiles.profile import machine

    found = profiles.get("cpu-core")
    if found is None or found.source.get("machine") == machine():
        return []
    origin = "a datasheet" if found.kind == "datasheet" else f"another machine ({found.source.get('machine')})"
    return [f"costs of this machine's cores are those of {origin}: `lab profile --quick` measures them"]
