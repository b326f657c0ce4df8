"""Hardware and models as data, each entry with its source."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field

from lab.model import ModelSpec
from lab.records import Record
from lab.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds


class Device(Record):
    """What a datasheet says of one accelerator, or of one CPU core."""

    kind: Literal["gpu", "cpu"]
    memory_bytes: Bytes
    memory_bandwidth: BytesPerSecond
    flops: dict[str, FlopsPerSecond] = Field(description="dense peak by dtype")
    default_link: str = "pcie4"
    price_per_hour: float | None = Field(
        default=None, description="US dollars per device-hour, where a list price is public"
    )
    nvml: tuple[str, ...] = Field(default=(), description="words of the product name that NVML reports")
    source: str


class Link(Record):
    """A connection between two devices or machines, one direction."""

    bandwidth: BytesPerSecond
    latency: Seconds
    source: str


Entry = TypeVar("Entry", bound=Record)


def _read(name: str, entry: type[Entry]) -> dict[str, Entry]:
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return {key: entry.model_validate(value, strict=False) for key, value in data.items()}


@cache
def devices() -> dict[str, Device]:
    return _read("devices", Device)


@cache
def links() -> dict[str, Link]:
    return _read("links", Link)


@cache
def models() -> dict[str, ModelSpec]:
    return _read("models", ModelSpec)


def _one(entries: dict[str, Entry], name: str, what: str) -> Entry:
    if name not in entries:
        raise ValueError(f"{name!r} is not in the {what} library; it has {', '.join(sorted(entries))}")
    return entries[name]


def device(name: str) -> Device:
    """The device called `name`. Raises ValueError naming those there are."""
    return _one(devices(), name, "device")


def link(name: str) -> Link:
    """The link called `name`. Raises ValueError naming those there are."""
    return _one(links(), name, "link")


def model(name: str) -> ModelSpec:
    """The model called `name`. Raises ValueError naming those there are."""
    return _one(models(), name, "model")
