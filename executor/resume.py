"""Going on with a run that ended early: which checkpoint it goes back to, and what of its past stays.

The folder is put in order first, so that a resumption that is killed itself can be repeated: `run.json` tells of the
interruption, then the spans and learning rows of what is lost are rewritten as such. Only whole files are replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import msgspec

from executor.checkpoint import DRIVER, Damaged, Rank, folder_of, read_json, set_aside, steps, tidy, verify
from executor.earlier import CHECKPOINTS, LEARNING, SPANS, Earlier, Interruption, counted, rows_of, spans_of
from executor.trail import REMEMBERED, Trail
from lab import runs
from lab.errors import InputError
from lab.scenario import Scenario
from lab.timeline import Header


def ranks(scenario: Scenario) -> list[Rank]:
    """Everybody who has a part in a checkpoint."""
    teams = {role: len(scenario.team(role, "train")) for role in scenario.algorithm.trains}
    return [Rank(role=role, rank=rank, world=world) for role, world in teams.items() for rank in range(world)]


def resume(scenario: Scenario, folder: Path) -> Earlier:
    """Puts the folder of a run that ended early in order and says how to go on.

    Raises InputError where it is no such run, is done, or is of another scenario.
    """
    header = _header(folder, scenario)
    tidy(folder / CHECKPOINTS)
    checkpoint, notes = _last_whole(folder / CHECKPOINTS, scenario)
    driver = {} if checkpoint is None else read_json(checkpoint / DRIVER)
    first_step = 0 if checkpoint is None else int(driver["step"]) + 1
    with runs.replacing(folder / LEARNING) as rows, runs.replacing(folder / SPANS) as spans:
        try:
            earlier = _past(folder, header, checkpoint, driver, first_step, notes, spans, rows)
        except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            problem, remedy = f"its {SPANS} or {LEARNING} cannot be read: {error}", "put the file back from a copy"
            raise InputError(file=str(folder), key="--resume", problem=problem, remedy=remedy) from None
        going = msgspec.structs.replace(
            header, status="running", error="", faults=list(earlier.faults), learning=[], wall_s=0.0
        )
        runs.mark(folder, scenario, going)
    return earlier


def _header(folder: Path, scenario: Scenario) -> Header:
    """Of the run. Raises InputError where it cannot be gone on with by this scenario."""
    try:
        header = msgspec.convert(json.loads((folder / "run.json").read_bytes())["header"], Header)
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        remedy = "name a folder that `lab execute` wrote"
        raise InputError(file=str(folder), key="--resume", problem=f"not a run: {error}", remedy=remedy) from None
    if header.origin != "measured":
        problem, remedy = f"a {header.origin} run has nothing to go on from", "name a folder that `lab execute` wrote"
    elif header.digest != scenario.digest:
        problem = (
            f"the run is of scenario {header.scenario} ({header.digest}), not of {scenario.name} ({scenario.digest})"
        )
        remedy = f"go on with {folder / 'scenario.yaml'}, or leave --resume out to begin a new run"
    elif header.status == "done":
        problem, remedy = (
            f"the run is done, all {header.num_steps} steps of it",
            "leave --resume out to begin a new run",
        )
    else:
        return header
    raise InputError(file=str(folder), key="--resume", problem=problem, remedy=remedy)


def _last_whole(root: Path, scenario: Scenario) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with newer ones, which are set aside.

    Raises InputError where there are checkpoints and none of them is whole.
    """
    if root.exists() and not root.is_dir():
        problem, remedy = "no folder, so no checkpoint can lie in it", "move it away"
        raise InputError(file=str(root), key="--resume", problem=problem, remedy=remedy)
    found, wrong = steps(root), list[tuple[int, str]]()
    for step in reversed(found):
        try:
            manifest = verify(folder_of(root, step), ranks(scenario))
            if manifest["digest"] != scenario.digest:
                raise Damaged(f"{folder_of(root, step)} is of scenario {manifest['digest']}, not {scenario.digest}")
        except Damaged as error:
            wrong.append((step, str(error)))
            continue
        notes = [f"{problem}; set aside as {set_aside(root, number).name}" for number, problem in wrong]
        return folder_of(root, step), notes
    if wrong:
        remedy = f"put the file back from a copy; or move {root} away to begin anew"
        raise InputError(
            file=str(root), key="--resume", problem=f"no checkpoint is whole: {wrong[0][1]}", remedy=remedy
        )
    return None, ["there is no complete checkpoint: it begins anew"]


def _past(
    folder: Path,
    header: Header,
    checkpoint: Path | None,
    driver: dict[str, Any],
    first_step: int,
    notes: list[str],
    spans: IO[bytes],
    rows: IO[bytes],
) -> Earlier:
    """What still counts; spans and learning rows are written into files as they are from now on, one at a time."""
    saved = driver.get("spans", [])
    kept, again = frozenset((stage, step) for stage, step in driver.get("kept", [])), {one["span_id"] for one in saved}
    trail, cost = Trail(), Interruption(first_step=first_step)
    for before in spans_of(folder, saved):
        after = counted(before, first_step, kept, again)
        trail.add(after)
        cost.add(before, after)
        spans.write(msgspec.json.encode(after) + b"\n")
    learning = {row["step"]: row for row in driver.get("learning", [])}
    latest: dict[int, dict[str, Any]] = {}
    for row in rows_of(folder, learning, first_step):
        rows.write(json.dumps(row).encode() + b"\n")
        if row["step"] >= first_step - REMEMBERED:
            latest[row["step"]] = row
    known = header.faults and header.faults[-1].get("at_s") == cost.ended_s
    faults = [*header.faults] if known else [*header.faults, cost.record]
    return Earlier(
        attempt=len(faults), first_step=first_step, checkpoint=checkpoint, stages=driver.get("stages", {}), kept=kept,
        trail=trail, learning=tuple(row for _, row in sorted((latest | learning).items())), faults=tuple(faults),
        startup_s=header.startup_s or None, notes=tuple(notes),
    )  # fmt: skip
