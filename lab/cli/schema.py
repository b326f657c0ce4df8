from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schema(
    output: Annotated[Path, typer.Argument(help="File to write.")] = Path("scenarios/scenario.schema.json"),
) -> None:
    """Write the JSON Schema of scenario files, so that editors complete and check them."""
    import json

    from lab.load import json_schema
    from lab.runs import write_atomically

    write_atomically(output, (json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n").encode())
    print(output)
