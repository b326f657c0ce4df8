"""Hardware and models as data, each entry with its source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from lab.errors import InputError
from lab.model import ModelSpec
from lab.records import Record
from lab.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

PEAKS = ("float32", "bfloat16", "float16", "fp8", "int8", "fp4")
"""number formats that a device may state a peak for"""


class Device(Record):
    """What a datasheet says of one accelerator, or of one CPU core."""

    kind: Literal["gpu", "cpu"]
    memory_bytes: Bytes = Field(gt=0, description="nominal size")
    usable_bytes: Bytes | None = Field(default=None, gt=0, description="what the driver leaves to programs, if known")
    memory_bandwidth: BytesPerSecond = Field(gt=0)
    flops: dict[str, FlopsPerSecond] = Field(min_length=1, description="dense peak by dtype")
    default_link: str = "pcie4"
    price_per_hour: float | None = Field(
        default=None, gt=0, description="US dollars per device-hour, where a list price is public"
    )
    price_source: str | None = Field(default=None, description="whose list price, and of when")
    nvml: tuple[str, ...] = Field(default=(), description="words of the product name that NVML reports")
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _told(self) -> Device:
        unknown = [name for name in self.flops if name not in PEAKS]
        if unknown:
            raise ValueError(f"flops: {unknown[0]!r} is none of {', '.join(PEAKS)}")
        if not all(self.flops.values()):
            raise ValueError("flops: a peak of 0; leave out what the device cannot compute")
        if (self.price_per_hour is None) != (self.price_source is None):
            raise ValueError("price_per_hour and price_source belong together")
        if self.usable_bytes is not None and self.usable_bytes > self.memory_bytes:
            raise ValueError("usable_bytes is above memory_bytes")
        return self


class Link(Record):
    """A connection between two devices or machines, one direction."""

    bandwidth: BytesPerSecond = Field(gt=0)
    latency: Seconds
    transport: Literal["bus", "rdma", "tcp", "memory"] = Field(
        default="bus", description="how bytes travel: past the CPU (bus, rdma), or through it"
    )
    source: str = Field(min_length=1)


class Tier(Record):
    """A kind of storage as one machine sees it."""

    read: BytesPerSecond = Field(gt=0)
    write: BytesPerSecond = Field(gt=0)
    latency: Seconds
    total: BytesPerSecond | None = Field(default=None, gt=0, description="of all machines together, each way, if bound")
    in_machine: bool = Field(default=False, description="stands in every machine, and is not reached over the network")
    source: str = Field(min_length=1)


Entry = TypeVar("Entry", bound=Record)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML whose mappings hold every key once."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if str(key.value) in seen:
            problem = f"the key {key.value!r} stands twice"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        seen.add(str(key.value))
    found: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def entries(text: str, entry: type[Entry], *, file: str) -> dict[str, Entry]:
    """The entries of a library file by name. Raises InputError naming file, entry, key and value."""
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise InputError(file=file, line=line, problem=str(error.problem), remedy="correct the file") from None
    if not isinstance(data, dict):
        raise InputError(file=file, problem="the file holds no entries", remedy="write `name: {…, source: …}`")
    return {str(name): _entry(str(name), value, entry, text, file) for name, value in data.items()}


def _entry(name: str, value: Any, entry: type[Entry], text: str, file: str) -> Entry:
    try:
        return entry.model_validate(value, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *(str(part) for part in first["loc"])])
        told, value = first["msg"].removeprefix("Value error, "), repr(first["input"])
        line = next((i for i, row in enumerate(text.splitlines(), start=1) if row.startswith(f"{name}:")), None)
        problem = told if isinstance(first["input"], dict) or value in told else f"{value}: {told}"
        remedy = f"the keys of an entry are {', '.join(entry.model_fields)}"
        raise InputError(file=file, line=line, key=key, problem=problem, remedy=remedy) from None


def _read(name: str, entry: type[Entry]) -> dict[str, Entry]:
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return entries(text, entry, file=f"lab/library/{name}.yaml")


@cache
def devices() -> dict[str, Device]:
    return _read("devices", Device)


@cache
def links() -> dict[str, Link]:
    return _read("links", Link)


@cache
def tiers() -> dict[str, Tier]:
    return _read("storage", Tier)


@cache
def models() -> dict[str, ModelSpec]:
    return _read("models", ModelSpec)


def closest(name: str, known: Collection[str]) -> list[str]:
    """The entries a name may have meant, best first: those that begin with it, else the most alike.

    Capitals and what stands before a slash do not count: `Qwen/Qwen2.5-7B` means `qwen2.5-7b`.
    """
    plain = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
    begin = sorted(entry for entry in known if plain and entry.lower().startswith(plain))
    by_plain = {entry.lower(): entry for entry in known}
    return begin[:3] or [by_plain[match] for match in difflib.get_close_matches(plain, by_plain, n=1)]


def _one(known: dict[str, Entry], name: str, what: str) -> Entry:
    if name not in known:
        close = closest(name, known)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ValueError(f"{name!r} is not in the {what} library{hint}; it has {', '.join(sorted(known))}")
    return known[name]


def device(name: str) -> Device:
    """The device called `name`. Raises ValueError naming those there are."""
    return _one(devices(), name, "device")


def link(name: str) -> Link:
    """The link called `name`. Raises ValueError naming those there are."""
    return _one(links(), name, "link")


def tier(name: str) -> Tier:
    """The storage tier called `name`. Raises ValueError naming those there are."""
    return _one(tiers(), name, "storage")


def model(name: str) -> ModelSpec:
    """The model called `name`. Raises ValueError naming those there are."""
    return _one(models(), name, "model")
