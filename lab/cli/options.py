"""Arguments that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ScenarioFile = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file, for example scenarios/quickstart.yaml.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder in which run folders are made.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary alone, as JSON.")]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="A cost profile: a name in the library or a file. Default: this machine's own, else the library's.",
    ),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="A file with a cluster that replaces the scenario's.")
]
RUNS = Path("runs")
