from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lab.cli.options import Json


def recheck(
    run: Annotated[Path, typer.Argument(help="The folder of a measured run.")],
    step: Annotated[int, typer.Option("--step", min=0, help="The step whose record is recomputed.")],
    export: Annotated[
        Path | None, typer.Option("--export", help="Also write the step's raw experience: .parquet, .jsonl or .npz.")
    ] = None,
    losses: Annotated[bool, typer.Option(help="Do the updates again, from the checkpoint before the step.")] = True,
    json: Json = False,
) -> None:
    """Recompute a step of a run from its record, and say whether the run's numbers match."""
    from lab.cli.execute import executor
    from lab.cli.show import emit
    from lab.load import present

    folder = present(run, "the folder of a run")
    records, rechecking = executor("records"), executor("recheck")
    if export is not None:
        records.export(records.path_of(folder, step), export)
    found = rechecking.recheck(folder, step, losses=losses)
    emit(plain(found) | {"run_dir": str(folder)}, json, table(found), lines(found, export))
    if not found.matches:
        raise typer.Exit(1)


def plain(found: Any) -> dict[str, Any]:
    """What came of it, for a program."""
    checks = [check.plain() for check in found.checks]
    return {"step": found.step, "matches": found.matches, "checks": checks, "skipped": found.skipped}


def table(found: Any) -> Any:
    """One row for each quantity."""
    from rich.table import Table

    shown = Table("quantity", "by", "recorded", "recomputed", "largest difference", "", title=f"step {found.step}")
    shown.title_justify = "left"
    for check in found.checks:
        numbers = (f"{check.recorded:.8g}", f"{check.recomputed:.8g}", f"{check.difference:.2g}")
        verdict = "differs" if not check.matches else "matches" if check.difference else "the same"
        shown.add_row(check.quantity, check.how, *numbers, verdict)
    return shown


def lines(found: Any, export: Path | None) -> list[str]:
    """What could not be computed again, where the export lies, and the verdict."""
    wrong = [check.quantity for check in found.checks if not check.matches]
    verdict = f"differs in {', '.join(wrong)}" if wrong else f"all {len(found.checks)} quantities match"
    skipped = [f"not recomputed: {quantity}: {why}" for quantity, why in found.skipped.items()]
    return [*skipped, *([f"raw experience: {export.resolve()}"] if export else []), f"step {found.step}: {verdict}"]
