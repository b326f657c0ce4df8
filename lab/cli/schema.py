from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schema(
    output: Annotated[Path, typer.Argument(help="File to write.")] = Path("scenarios/scenario.schema.json"),
) -> None:
    """Write the JSON Schema of scenario files, so that editors complete and check them."""
    import json

    from lab.errors import InputError
    from lab.load import json_schema
    from lab.runs import write_atomically

    try:
        write_atomically(output, (json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise InputError(file=str(output), problem=str(error.strerror), remedy="name a file in a folder") from None
    print(output)
