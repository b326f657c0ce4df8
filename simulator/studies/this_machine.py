"""Engine iterations and other ops that `lab profile` measured on this machine and that no fit has used."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.measurement import HELD_OUT, Measurement, read_jsonl
from profiles.formula import terms
from profiles.profile import Profile, load, local_profile_path, machine
from simulator.studies.accuracy import LARGE_MISS, Row, Rule, Unavailable, ValidationSet

DEVICE = "cpu-core"
REMEDY = "measure it with `lab profile`"
RULES = (
    Rule(id="unfitted", sentence="The profile has no formula for this op: its measurements cannot identify one."),
    Rule(id="busy", sentence="The op was measured beside busy cores; interference is judged by whole runs."),
)


def this_machine() -> ValidationSet:
    """One row per held-out point. Raises Unavailable where this machine has no profile with such points."""
    path = local_profile_path(DEVICE)
    profile, points = _profile(path), _held_out(path.with_suffix(".measurements.jsonl"))
    noise = float(np.median([point.spread / 2 for point in points]))
    notes = (
        (
            f"profile {profile.name}, measured {profile.source.get('date', 'at an unknown date')} on this machine; the points "
            "lie between those that were fitted"
        ),
        f"noise: half the spread of a point's repeats is {noise:.1%} at the median",
    )
    rows = tuple(_row(profile, point) for point in points)
    return ValidationSet(
        name="this-machine", title="this machine's ops, not fitted", rows=rows, rules=RULES, notes=notes
    )


def _profile(path: Path) -> Profile:
    """This machine's own profile."""
    if not path.exists():
        raise Unavailable(f"this machine has no profile of its own; {REMEDY}")
    profile = load(path)
    if profile.source.get("machine") != machine():
        raise Unavailable(f"{path} was measured on another machine; {REMEDY}")
    return profile


def _held_out(path: Path) -> list[Measurement]:
    """The points that are kept from every fit."""
    if not path.exists():
        raise Unavailable(f"{path} is absent; {REMEDY}")
    points = [point for point in read_jsonl(path) if point.source == HELD_OUT]
    if not points:
        raise Unavailable(f"{path} has no held-out points; {REMEDY}")
    return points


def _row(profile: Profile, point: Measurement) -> Row:
    fitted = profile.ops.get(point.op)
    predicted = fitted.seconds(terms(point.op, point.quantities)) if fitted else None
    return Row(
        case=_case(point),
        quantity=point.op,
        predicted=predicted,
        measured=point.seconds,
        unit="s",
        reason=_reason(point, predicted),
        excluded="busy" if point.neighbours else "" if fitted else "unfitted",
    )


def _case(point: Measurement) -> str:
    """The point by its small quantities, which tell points apart: sequences, tokens, samples."""
    shown = ("sequences", "tokens", "kv_bytes", "samples", "calls", "bytes")
    parts = [f"{name} {point.quantities[name]:.6g}" for name in shown if name in point.quantities]
    return ", ".join([point.model, *parts] if point.model else parts)


def _reason(point: Measurement, predicted: float | None) -> str:
    """Says so where the repeats of a badly predicted point differ as much as that."""
    if predicted is None or point.seconds <= 0 or abs(predicted / point.seconds - 1) <= LARGE_MISS:
        return ""
    return f"its repeats spread over {point.spread:.0%}" if point.spread > LARGE_MISS else ""
