from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import Json


def calibrate(
    sources: Annotated[list[Path], typer.Argument(help="Folders of measured runs, or files of measurements (.jsonl).")],
    output: Annotated[
        Path | None, typer.Option("--output", help="The profile to write. Default: this machine's own.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit a profile again with what real runs measured, beside the measurements it was fitted to before."""
    from lab.cli.profile import described, fit_table
    from lab.cli.show import emit
    from profiles.fit import fit
    from profiles.profile import local_profile_path, local_source

    path = output or local_profile_path("cpu-core")
    own = path.with_suffix(".measurements.jsonl")
    measurements = [point for source in sources for point in points(source)]
    earlier = points(own) if own.exists() and own not in sources else []
    found = fit(
        [*earlier, *measurements],
        name=path.stem,
        source=local_source() | {"calibrated_with": [str(s) for s in sources]},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    emit(
        described(found, path),
        json,
        fit_table(found),
        [f"{len(earlier)} earlier and {len(measurements)} new measurements", f"profile: {path}"],
    )


def points(source: Path) -> list[Any]:
    """Measurements in a file, or in the spans of a measured run. Raises InputError."""
    from lab import runs
    from lab.errors import InputError
    from lab.measurement import of_spans, read_jsonl

    if source.is_file():
        try:
            return read_jsonl(source)
        except ValueError as error:
            raise InputError(
                file=str(source), problem=str(error), remedy="name a file that `lab profile` wrote"
            ) from None
    timeline, scenario = runs.read(source), runs.read_scenario(source)
    if timeline.header.origin != "measured":
        problem = f"the run is {timeline.header.origin}, and a profile is fitted to measurements only"
        raise InputError(file=str(source), problem=problem, remedy="name a run of `lab execute`")
    device = scenario.hardware.node_of(next(iter(scenario.devices.values()))[0]).device
    return of_spans(
        timeline.spans, model=str(scenario.models.actor.arch), device=device, source=timeline.header.scenario
    )
