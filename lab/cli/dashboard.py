from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

FILES = ("dashboard.json", "alerts.yml", "prometheus.yml")


def dashboard(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the three files go.")] = Path("docs/watching"),
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="HOST:PORT", help="Where a run says how it is; may be repeated."),
    ] = None,
    kl_cap: Annotated[float, typer.Option("--kl-cap", min=0.0, help="Alert above this KL, nats.")] = 10.0,
    idle_use: Annotated[
        float, typer.Option("--idle", min=0.0, max=1.0, help="Alert below this use of devices.")
    ] = 0.05,
    silence: Annotated[
        float, typer.Option("--silence", min=1.0, help="Alert where a run reports nothing for so many seconds.")
    ] = 300.0,
) -> None:
    """Write a Grafana dashboard, alert rules and a configuration of Prometheus that watch runs."""
    from lab.alerts import METRICS_PORT, Thresholds
    from lab.errors import InputError

    for text in target or []:
        if not _is_address(text):
            remedy = f"give HOST:PORT, for example 127.0.0.1:{METRICS_PORT}, without http:// and path"
            raise InputError(key="--target", problem=f"{text!r} is no address", remedy=remedy)
    limits = Thresholds(kl_cap=kl_cap, idle_use=idle_use, silence_s=silence)
    try:
        for path in written(out, target or [f"127.0.0.1:{METRICS_PORT}"], limits):
            print(path)
    except OSError as error:
        remedy = "name a folder that can be written"
        raise InputError(file=str(out), problem=str(error.strerror or error), remedy=remedy) from None


def _is_address(text: str) -> bool:
    """Whether Prometheus takes it as a target."""
    found = re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 65536


def written(folder: Path, targets: list[str], limits: object) -> list[Path]:
    """Writes the files into a folder, which is made; the paths. Raises OSError."""
    import json

    import yaml

    from lab import alerts
    from lab.dashboard import dashboard as drawn
    from lab.runs import write_atomically

    assert isinstance(limits, alerts.Thresholds)
    contents = (
        json.dumps(drawn(), indent=1),
        yaml.safe_dump(alerts.rules_file(limits), sort_keys=False, width=1000),
        yaml.safe_dump(alerts.prometheus_file(targets, [FILES[1]]), sort_keys=False),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, contents, strict=True):
        write_atomically(folder / name, content.rstrip("\n").encode() + b"\n")
    return [folder / name for name in FILES]
