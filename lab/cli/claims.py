from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lab.cli.options import Json

if TYPE_CHECKING:
    from simulator.studies.claims import Claim, Judgement

COLORS = {"holds": "green", "partly": "yellow", "does not hold": "red", "cannot be judged": "dim"}


def claims(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ID", help="A claim to judge; may be given again. Default: all."),
    ] = None,
    json: Json = False,
) -> None:
    """Judge what the founding documents claim in numbers: the claim, the simulated value, the verdict and why."""
    from dataclasses import asdict
    from json import dumps

    from lab.cli.show import progress
    from simulator.studies.claims import Bench, chosen, judge

    wanted, bench = chosen(only or ()), Bench()
    found = []
    with progress("claims", len(wanted)) as told:
        for claim in wanted:
            found.append((claim, judge(claim, bench)))
            told(len(found))
    if json:
        rows = [
            {"id": claim.id, "claim": claim.claim, "source": claim.source, "scenarios": list(claim.scenarios)}
            | asdict(one)
            for claim, one in found
        ]
        print(dumps({"claims": rows, "verdicts": _counted(found)}, ensure_ascii=False, allow_nan=False))
        return
    _show(found)


def _counted(found: list[tuple[Claim, Judgement]]) -> dict[str, int]:
    from simulator.studies.claims import VERDICTS

    return {verdict: sum(one.verdict == verdict for _, one in found) for verdict in VERDICTS}


def _show(found: list[tuple[Claim, Judgement]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("claim", "simulated", "verdict", "reason", show_lines=True)
    table.columns[2].no_wrap = True
    for claim, one in found:
        color = COLORS[one.verdict]
        text = f"[bold]{claim.id}[/]\n{escape(claim.claim)}\n[dim]{escape(claim.source)}[/]"
        table.add_row(text, escape(one.value), f"[{color}]{one.verdict}[/]", escape(one.reason))
    console = Console()
    console.print(table)
    counts = [f"{number} {verdict}" for verdict, number in _counted(found).items() if number]
    console.print(f"{len(found)} claim{'s' if len(found) != 1 else ''}: {', '.join(counts)}", highlight=False)
