from __future__ import annotations

from typing import Annotated

import typer


def ui(port: Annotated[int, typer.Option("--port", help="Port on this machine.")] = 8501) -> None:
    """Open the Streamlit lab in a browser."""
    import importlib.util
    import os
    import sys
    from pathlib import Path

    from lab.errors import InputError

    app = Path(__file__).parents[2] / "app.py"
    if importlib.util.find_spec("streamlit") is None or not app.exists():
        problem = "the page needs the `ui` extra and a clone of the repository"
        raise InputError(problem=problem, remedy="run `make setup` in a clone, or see `lab doctor`")
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    os.execv(
        sys.executable,
        [
            *command,
            "--browser.gatherUsageStats",
            "false",
            "--server.fileWatcherType",
            "none",
            "--client.toolbarMode",
            "minimal",
        ],
    )
