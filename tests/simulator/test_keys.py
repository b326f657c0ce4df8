"""Every key of a scenario matters: changing it changes the spans of some simulation, or is refused, or the schema marks
it as one that cannot change them. A key that is in neither table fails here."""

import copy
import json
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lab.model import ModelSpec
from lab.scenario import Scenario
from profiles.profile import datasheet
from simulator.run import simulate
from tests.key_cases import CHANGES, MARKED
from tests.keys import SHIPPED, Edits


def leaves(record: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a scenario with its field, the parts of a key separated by `/`."""
    for name, field in record.model_fields.items():
        parts = list(records(field.annotation))
        for part in parts:
            yield from leaves(part, f"{prefix}{field.alias or name}/")
        if not parts:
            yield prefix + (field.alias or name), field


def records(annotation: Any) -> Iterator[type[BaseModel]]:
    if annotation is ModelSpec:
        return  # written out or in a file, a shape is one value
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from records(argument)


def effect(field: FieldInfo) -> str | None:
    extra = field.json_schema_extra
    return str(extra["effect"]) if isinstance(extra, dict) and "effect" in extra else None


KEYS = dict(leaves(Scenario))


def edited(data: dict[str, Any], edits: Edits) -> dict[str, Any]:
    data = copy.deepcopy(data)
    for path, value in edits.items():
        *folders, last = path.split("/")
        place: Any = data
        for folder in folders:
            place = place[int(folder) if folder.isdigit() else folder]
        place[last] = copy.deepcopy(value)
    return data


def spans(data: dict[str, Any]) -> list[tuple[str, float, float, int]] | None:
    """What a simulation shows, names of pools and policy versions aside; None where the scenario is refused."""
    try:
        scenario = Scenario.model_validate_json(json.dumps(data))
    except ValidationError:
        return None
    used = {scenario.hardware.node_of(device).device for devices in scenario.devices.values() for device in devices}
    timeline = simulate(scenario, {device: datasheet(device) for device in used})
    return [(span.span_id, span.start_s, span.end_s, span.tokens) for span in timeline.spans]


@cache
def before_and_after(key: str) -> tuple[Any, Any]:
    case = (CHANGES | MARKED)[key]
    start = edited(SHIPPED[case.base], {"num_steps": 2} | (case.before or {}))
    first = spans(start)
    assert first is not None, "what is changed must be a scenario"
    return first, spans(edited(start, case.change))


def test_every_key_has_its_case_and_every_case_its_key() -> None:
    single = {key for key, field in KEYS.items() if len(typing.get_args(field.annotation)) == 1 and effect(field)}
    marked = {key for key, field in KEYS.items() if effect(field)} - single
    assert set(KEYS) - marked - single == set(CHANGES)
    assert marked == set(MARKED)
    assert not single, "a key with one value has nothing to change; give it a case once it has two"
    assert {effect(field) for field in KEYS.values()} <= {None, "learning", "label", "memory", "resume", "storage"}


@pytest.mark.parametrize("key", CHANGES)
def test_changing_a_key_changes_the_spans_or_is_refused(key: str) -> None:
    first, second = before_and_after(key)
    assert first != second


@pytest.mark.parametrize("key", MARKED)
def test_a_marked_key_changes_no_span(key: str) -> None:
    first, second = before_and_after(key)
    assert first == second


def test_only_what_takes_something_away_is_refused() -> None:
    """Refusal is no excuse for a key without a mechanism."""
    refused = {key for key in CHANGES if before_and_after(key)[1] is None}
    assert refused == {"cluster/sites/nodes/count", "sharing/how"}
