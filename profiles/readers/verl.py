"""Step logs of verl as Measurements: seconds of every stage of every step, with the step's tokens.

Two forms are read: verl's console log, whose lines hold `step:3 - timing_s/gen:5.3 - …`, and a table (.csv) with a
row for each step and, where it holds several logs, their names in `log`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.errors import InputError
from lab.load import decode
from lab.measurement import LOGGED_STAGES, Measurement

INSIDE = frozenset({"reshard"})
"""timers that run inside another stage, so that a step's stages add up without them"""
MAX_MISSING, MAX_EXCESS = 0.10, 0.01
"""shares of a step: what its stages may leave unsaid (2 % is usual), and by what rounding may exceed it"""
TOTALS = ("perf/total_num_tokens", "total_num_tokens")
_STEP = re.compile(r"\bstep:(\d+)\s+-\s")


class Step(NamedTuple):
    line: int
    log: str
    values: dict[str, float]
    """by verl's own keys; timers without their prefix in `stages`"""
    stages: dict[str, float]


def read(path: Path, device: str, log: str | None = None) -> list[Measurement]:
    """Measurements of one log, a stage of a step each, on machines with this device.

    Raises InputError naming file, line, field and value: where there is no step, where stages do not add up to their
    step, where a number is none, where a step does not say its tokens, and where several logs are in the file but
    `log` chooses none of them.
    """
    steps = _chosen(list(_steps(path)), path, log)
    return [
        Measurement(
            op=f"{stage}_stage", quantities={"steps": 1.0, "tokens": _tokens(step, stage, path)}, seconds=seconds,
            device=device, source=f"log {step.log}",
        )
        for step in steps
        for stage, seconds in step.stages.items()
    ]  # fmt: skip


def _steps(path: Path) -> Iterator[Step]:
    try:
        text = decode(path.read_bytes(), file=str(path))
    except OSError as error:
        raise InputError(file=str(path), problem=error.strerror or str(error), remedy="name an existing file") from None
    rows = _table(text) if path.suffix == ".csv" else _console(text)
    for line, fields in rows:
        step = _step(path, line, fields)
        if step.stages:
            _check(path, step)
            yield step


def _table(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    lines = csv.DictReader(text.splitlines())
    for row in lines:
        yield lines.line_num, {key: value for key, value in row.items() if key and value}


def _console(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if found := _STEP.search(line):
            parts = line[found.start() :].split(" - ")
            yield number, dict(part.strip().rsplit(":", 1) for part in parts if ":" in part)


def _step(path: Path, line: int, fields: dict[str, str]) -> Step:
    values = {
        key: _number(path, line, key, text)
        for key, text in fields.items()
        if key != "log" and (key.startswith("timing") or key in (*TOTALS, *_LENGTHS))
    }
    named = {key.split("/", 1)[1]: value for key, value in values.items() if key.startswith("timing")}
    stages = {stage: named[stage] for stage in LOGGED_STAGES if stage in named}
    return Step(line, fields.get("log", path.name), values | {"step_s": named.get("step", math.nan)}, stages)


_LENGTHS = ("response_length/mean", "prompt_length/mean")


def _number(path: Path, line: int, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        problem = f"{text!r} is not a number of 0 or more"
        raise InputError(file=str(path), line=line, key=key, problem=problem, remedy="restore the log")
    return value


def _check(path: Path, step: Step) -> None:
    """Raises InputError where the stages do not add up to the step, as far as its time is logged."""
    whole, parts = step.values["step_s"], {k: v for k, v in step.stages.items() if k not in INSIDE}
    total = sum(parts.values())
    if math.isnan(whole) or whole * (1 - MAX_MISSING) <= total <= whole * (1 + MAX_EXCESS) + 0.01:
        return
    listed = ", ".join(f"{stage} {seconds:g}" for stage, seconds in parts.items())
    raise InputError(
        file=str(path), line=step.line, key="timing_s/step",
        problem=f"the stages add up to {total:g} s ({listed}), the step took {whole:g} s",
        remedy="restore the log, or leave the step out",
    )  # fmt: skip


def _chosen(steps: list[Step], path: Path, log: str | None) -> list[Step]:
    names = list(dict.fromkeys(step.log for step in steps))
    if not names:
        problem = "no step with timers is in the file (`step:1 - timing_s/gen:… - …`, or a table with those columns)"
        raise InputError(file=str(path), problem=problem, remedy="name a step log of verl")
    if log is None and len(names) > 1:
        problem = f"the file holds {len(names)} logs: {', '.join(names)}"
        raise InputError(file=str(path), key="--log", problem=problem, remedy="choose one of them with --log")
    if log is not None and log not in names:
        problem = f"the file holds no log {log!r}, but {', '.join(names)}"
        raise InputError(file=str(path), key="--log", problem=problem, remedy="choose one of them")
    return [step for step in steps if step.log == (log or names[0])]


def _tokens(step: Step, stage: str, path: Path) -> float:
    """All tokens of the step; of generation, those of the responses where the log says their mean length."""
    total = next((step.values[key] for key in TOTALS if key in step.values), None)
    if total is None:
        problem = f"step on this line has neither {' nor '.join(TOTALS)}"
        raise InputError(
            file=str(path), line=step.line, key=TOTALS[0], problem=problem, remedy="name a log that counts its tokens"
        )
    response, prompt = (step.values.get(key) for key in _LENGTHS)
    if stage != "gen" or response is None or not prompt:
        return total
    return total * response / (response + prompt)
