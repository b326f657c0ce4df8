from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import Json


def profile(
    quick: Annotated[
        bool, typer.Option("--quick", help="At most two minutes: one architecture, fewer points.")
    ] = False,
    arch: Annotated[
        str, typer.Option("--arch", help="Architecture that is measured, of the model library.")
    ] = "tiny-llama",
    keep: Annotated[
        bool, typer.Option("--keep", help="Measure nothing where this machine has a profile already.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the profile here instead of the user's data folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure how long real operations take on this machine, and fit the profile that `simulate` uses."""
    from lab.cli.execute import executor, progress
    from lab.cli.show import emit, note
    from lab.library import model
    from lab.measurement import write_jsonl
    from profiles.fit import fit
    from profiles.profile import load, local_profile_path, local_source

    path = output or local_profile_path("cpu-core")
    if keep and path.exists():
        found = load(path)
        note(f"this machine has a profile already: {path}")
    else:
        checked(arch, model)
        note("measuring this machine's real engine, scoring and training operations")
        with progress(0) as step:
            measurements = executor("measure").measure(arch, quick, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(measurements, path.with_suffix(".measurements.jsonl"))
        found = fit(measurements, name=path.stem, source=local_source())
        found.save(path)
    emit(described(found, path), json, fit_table(found), [f"profile: {path}"])


def checked(arch: str, model: Any) -> None:
    from lab.errors import InputError

    try:
        model(arch)
    except ValueError as error:
        raise InputError(key="--arch", problem=str(error), remedy="name one of these") from None


def described(found: Any, path: Path) -> dict[str, Any]:
    return {**found.model_dump(mode="json"), "path": str(path)}


def fit_table(found: Any) -> Any:
    """Per op: points, residuals, slowdown beside a busy neighbour."""
    from rich.table import Table

    from lab.cli.show import percent

    table = Table(
        "op",
        "points",
        "median residual",
        "90th percentile",
        "beside a busy core",
        title=f"profile {found.name}",
        title_justify="left",
    )
    for op, part in sorted(found.ops.items()):
        slow = f"× {part.interference[0]:.2f}" if part.interference else "–"
        table.add_row(op, str(part.points), percent(part.residual_median), percent(part.residual_p90), slow)
    return table
