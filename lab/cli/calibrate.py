from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import Json


def calibrate(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of measured runs, files of measurements (.jsonl), step logs of verl (other files)."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", help="The profile to write. Default: this machine's own.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Of a step log: the device that its run used, of the device library.")
    ] = None,
    log: Annotated[str | None, typer.Option("--log", help="Which log, where a table holds several.")] = None,
    json: Json = False,
) -> None:
    """Fit a profile again with what real runs measured, beside the measurements it was fitted to before."""
    from lab.cli.profile import described, fit_lines, fit_table
    from lab.cli.show import emit
    from lab.measurement import read_jsonl
    from profiles.fit import fit
    from profiles.profile import local_profile_path

    measurements = [point for source in sources for point in points(source, device, log)]
    path = output or local_profile_path(measurements[0].device)
    own = path.with_suffix(".measurements.jsonl")
    earlier = read_jsonl(own) if own.exists() and own not in sources else []
    found = fit([*earlier, *measurements], name=path.stem, source=origin(sources, device))
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    counted = f"{len(earlier)} earlier and {len(measurements)} new measurements"
    emit(described(found, path), json, fit_table(found), [counted, *fit_lines(found), f"profile: {path}"])


def points(source: Path, device: str | None = None, log: str | None = None) -> list[Any]:
    """Measurements in a file, in a step log, or in the spans of a measured run. Raises InputError."""
    from lab.load import present
    from lab.measurement import known_quantities, read_jsonl
    from profiles.readers import runs, verl

    present(source, "a run folder, a file of measurements or a step log")
    if not source.is_file():
        return known_quantities(runs.read(source), str(source))
    if source.suffix == ".jsonl":
        return read_jsonl(source)
    return verl.read(source, _known(device, source), log)


def origin(sources: list[Path], device: str | None) -> dict[str, Any]:
    """Where the profile comes from; a log of another machine says nothing of this one."""
    from profiles.profile import local_source

    named = {"calibrated_with": [str(source) for source in sources]}
    return named | ({"date": local_source()["date"]} if device else local_source())


def _known(device: str | None, source: Path) -> str:
    from lab.errors import InputError
    from lab.library import device as library_device

    if device is None:
        problem = "a step log does not say on which device its run was"
        raise InputError(file=str(source), key="--device", problem=problem, remedy="name it, as in the device library")
    try:
        library_device(device)
    except ValueError as error:
        raise InputError(key="--device", problem=str(error), remedy="name one of these") from None
    return device
