from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.cli.options import RUNS, Json, Out, ProfileName

if TYPE_CHECKING:
    from rich.console import Console

    from simulator.studies.accuracy import ValidationSet
    from simulator.studies.validate import Validation

FORMATS = (".md", ".json")


def validate(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with the measurements. Default: LAB_VALIDATION_DATA.")
    ] = None,
    chosen: Annotated[
        list[str] | None, typer.Option("--set", help="A set to judge; may be given again. Default: all.")
    ] = None,
    half: Annotated[str, typer.Option("--half", help="Of sets split by sha256(id): even, odd or all.")] = "even",
    json: Json = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Also write the result to this file: .md a page, .json with every row."),
    ] = None,
    here: Annotated[
        bool,
        typer.Option("--here", help="Instead execute held-out scenarios on this machine, and judge their predictions."),
    ] = False,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="With --here: a scenario; may be given again. Default: all.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="With --here: real executions of each.")] = 3,
    profile: ProfileName = None,
    out: Out = RUNS,
) -> None:
    """Predict what others measured on real hardware, or what this machine does, and print the errors."""
    from lab.errors import InputError
    from simulator.studies.validate import validate as judge

    formats = FORMATS[:1] if here else FORMATS
    if output is not None and output.suffix not in formats:
        problem, remedy = f"{output} ends in none of {', '.join(formats)}", "end the file's name in .md"
        raise InputError(key="--output", problem=problem, remedy=remedy)
    if here:
        raise typer.Exit(executed(cases or (), repeats, profile, out, output))
    result = judge(chosen or (), data, half)  # type: ignore[arg-type]
    if output is not None:
        write(result, output)
    show(result, json)


def executed(chosen: Sequence[str], repeats: int, profile: str | None, out: Path, output: Path | None) -> int:
    """Held-out scenarios on this machine; 1 where a prediction misses its bound."""
    from rich.console import Console

    from lab.cli.agreement import COLUMNS, Row, cases, judge, page
    from lab.cli.show import note
    from lab.errors import InputError
    from lab.explain import nearest
    from lab.runs import write_atomically

    known = cases()
    for name in chosen:
        if name not in known:
            remedy = nearest(name, known, "held-out scenarios")
            raise InputError(key="--case", problem=f"there is no held-out scenario {name!r}", remedy=remedy)
    console = Console()

    def told(row: Row) -> None:
        console.print(" | ".join(row.cells()), highlight=False, markup=False, soft_wrap=True)

    rows, unfinished = judge(chosen or list(known), repeats, profile, out, told)
    for name, why in unfinished.items():
        note(f"{name} did not end: {why}")
    if output is not None:
        write_atomically(output, page(rows, unfinished, repeats).encode())
    _print_table(console, "predicted and measured on this machine", COLUMNS, [row.cells() for row in rows])
    return int(bool(unfinished) or not all(row.met for row in rows))


def write(result: Validation, path: Path) -> None:
    """The whole result as a page or as a record."""
    import json

    from lab.runs import write_atomically
    from simulator.studies.accuracy_page import markdown, record

    as_json = path.suffix == ".json"
    text = json.dumps(record(result), ensure_ascii=False, allow_nan=False, indent=1) if as_json else markdown(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def show(result: Validation, as_json: bool) -> None:
    """On the terminal: the record, or a table and a few lines for each set."""
    import json

    from rich.console import Console

    from lab.cli.show import note
    from simulator.studies.accuracy_page import record

    if as_json:
        print(json.dumps(record(result, rows=False), ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    for part in result.sets:
        _show_set(console, part)
    for name, why in result.skipped.items():
        note(f"skipped {name}: {why}")


def _show_set(console: Console, part: ValidationSet) -> None:
    from simulator.studies.accuracy import table
    from simulator.studies.accuracy_page import COLUMNS, WORST_COLUMNS, assumptions, cells, exclusions, worst_cells

    title = f"{part.name}: {part.title}"
    _print_table(console, title, COLUMNS, [cells(name, line) for name, line in table(part).items()])
    _print_table(console, f"{part.name}: worst", WORST_COLUMNS, [worst_cells(row) for row in part.worst])
    groups = {"note": part.notes, "assumed": assumptions(part), "not judged": exclusions(part)}
    for head, lines in groups.items():
        for line in lines:
            console.print(f"{head}: {line}", highlight=False, markup=False, soft_wrap=True)


def _print_table(console: Console, title: str, head: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=escape(title), title_justify="left")
    for name in head:
        shown.add_column(name, overflow="fold")
    for line in lines:
        shown.add_row(*map(escape, line))
    console.print(shown)
