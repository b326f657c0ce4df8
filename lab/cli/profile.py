from __future__ import annotations

import os
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
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, also where a sweep was interrupted.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the profile here instead of the user's data folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure how long real operations take on this machine, and fit the profile that `simulate` uses."""
    from lab.cli.show import emit, note
    from lab.library import model
    from profiles.profile import load, local_profile_path

    path = output or local_profile_path("cpu-core")
    if keep and path.exists():
        found = load(path)
        note(f"this machine has a profile already: {path}")
    else:
        checked(arch, model)
        found = measured(path, arch, quick, fresh)
    emit(described(found, path), json, fit_table(found), [*fit_lines(found), f"profile: {path}"])


def measured(path: Path, arch: str, quick: bool, fresh: bool) -> Any:
    """Measures, and writes the profile with its measurements, op tables and device states beside it."""
    from lab.cli.execute import executor, progress
    from lab.cli.show import note
    from lab.measurement import write_jsonl
    from profiles.fit import fit
    from profiles.profile import local_source

    source = local_source() | {"load_average": round(os.getloadavg()[0], 2)}
    if source["load_average"] > source["machine"]["cores"] / 2:
        note(f"load average {source['load_average']}: other work on this machine will show in what is measured")
    journal = writable(path.with_suffix(".measuring.jsonl"))
    identity = {key: source[key] for key in ("machine", "software")}
    note("measuring this machine's real engine, scoring and training operations")
    measure = executor("measure")
    if not fresh and (done := measure.num_finished(journal, identity, arch, quick)):
        note(f"going on after {done} of {measure.num_units(arch, quick)} parts in {journal}; --fresh starts anew")
    try:
        with progress(measure.num_units(arch, quick)) as step:
            result = measure.measure(arch, quick, step, journal=journal, identity=identity, fresh=fresh)
    except KeyboardInterrupt:
        note(f"interrupted; what was measured is in {journal}, and the next `lab profile` goes on from there")
        raise
    write_jsonl(result.points, path.with_suffix(".measurements.jsonl"))
    beside(path, result)
    found = fit(result.points, name=path.stem, source=source)
    found = found.model_copy(update={"notes": (*found.notes, *result.notes)})
    found.save(path)
    journal.unlink()
    return found


def writable(path: Path) -> Path:
    """The path of a file that can be written. Raises InputError where it cannot, before minutes are spent."""
    from lab.errors import InputError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise InputError(key="--output", problem=problem, remedy="name a file in a folder of yours") from None
    return path


def beside(path: Path, result: Any) -> None:
    """Op tables of torch.profiler (parquet) and the states of the devices (JSON), beside the profile."""
    import json

    import pandas as pd

    from lab.runs import write_atomically

    pd.DataFrame(result.operators).to_parquet(path.with_suffix(".operators.parquet"), index=False)
    write_atomically(path.with_suffix(".devices.json"), json.dumps(result.states, indent=1).encode())


def checked(arch: str, model: Any) -> None:
    from lab.errors import InputError

    try:
        model(arch)
    except ValueError as error:
        raise InputError(key="--arch", problem=str(error), remedy="name one of these") from None


def described(found: Any, path: Path) -> dict[str, Any]:
    return {**found.model_dump(mode="json"), "path": str(path)}


def fit_table(found: Any) -> Any:
    """Per op: points, residuals beside the noise of repeats, slowdown beside a busy neighbour, speed-up by a second thread."""
    from rich.table import Table

    from lab.cli.show import percent

    table = Table(
        "op",
        "points",
        "residual p50",
        "p90",
        "noise",
        "beside a busy core",
        "two threads",
        title=f"profile {found.name}",
        title_justify="left",
    )
    for op, part in sorted(found.ops.items()):
        slow = f"× {part.interference[0]:.2f}" if part.interference else "–"
        noise = percent(part.spread / 2) if part.spread else "–"
        residuals = percent(part.residual_median), percent(part.residual_p90)
        two = f"× {part.threads[0]:.2f}" if part.threads else "–"
        table.add_row(op, str(part.points), *residuals, noise, slow, two)
    return table


def fit_lines(found: Any) -> list[str]:
    """How well the fit does on what it has not seen, and what it could not determine."""
    from lab.cli.show import percent

    lines = []
    for op, part in sorted(found.ops.items()):
        if (held := part.held_out) is not None:
            lines.append(
                f"{op}, {held.points} points held out: error p50 {percent(held.error_p50)}, p90 {percent(held.error_p90)}, "
                f"bias {percent(held.bias, sign=True)}; noise of their repeats {percent(held.noise_p50)}"
            )
    return lines + [f"not determined: {text}" for text in found.notes]
