"""Curve: how long a kind of kernel takes over a few sizes, as values on a coarse grid; what shipped profiles hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, field_serializer, field_validator, model_validator

from lab.errors import WrongValue
from lab.records import Record

Floats = NDArray[np.float64]


DIGITS = 3
"""of a value in a file"""


class Range(Record):
    """Smallest and largest measured value of a quantity."""

    low: float
    high: float

    def check(self, *place: str) -> None:
        """Raises WrongValue, at this place of the record that holds the range, where it is empty."""
        if not self.low <= self.high:
            problem = f"the range of {place[-1]} is empty: low is {self.low!r}, high is {self.high!r}"
            raise WrongValue(path=(*place, "low"), problem=problem, remedy="write the smaller one as `low`")


class Curve(Record):
    """Values on a grid of sizes, interpolated in the logarithms of sizes and values.

    With `unit: s` the values are seconds; with `unit: x roofline` they are multiples of the roofline that
    `profiles.compact` names for the kernel, so that what lies between or beyond the grid follows the roofline.
    """

    axes: dict[str, tuple[float, ...]] = Field(
        min_length=1, description="sizes by name, rising; the last varies fastest"
    )
    values: tuple[float, ...] = Field(
        min_length=1, description="above 0, flat in the order of the axes; in a file a list, or one text with spaces"
    )
    unit: Literal["s", "x roofline"]
    points: int = Field(ge=1, description="measurements that were fitted")
    held_out: int = Field(default=0, ge=0, description="measurements that were not; the residuals are theirs")
    residual_median: float = Field(ge=0, description="median of |predicted / measured - 1|")
    residual_p90: float = Field(ge=0)
    ranges: dict[str, Range] = Field(description="measured range of each axis")
    source: dict[str, Any] = Field(default_factory=dict, description="package, versions, licence, table")

    @field_validator("values", mode="before")
    @classmethod
    def _numbers(cls, given: Any) -> Any:
        """A text of numbers: thousands of them read and write fifty times faster than a list in YAML."""
        if not isinstance(given, str):
            return given
        return _words(given)

    @field_validator("axes", mode="before")
    @classmethod
    def _rows(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: _axis(name, axis) for name, axis in given.items()}

    @field_serializer("values")
    def _text(self, values: tuple[float, ...]) -> str:
        return " ".join(f"{value:.{DIGITS}g}" for value in values)

    @field_serializer("axes")
    def _texts(self, axes: dict[str, tuple[float, ...]]) -> dict[str, str]:
        return {name: " ".join(f"{value:.12g}" for value in axis) for name, axis in axes.items()}

    @model_validator(mode="after")
    def _possible(self) -> Curve:
        for name, axis in self.axes.items():
            _rising(name, axis)
        wanted = math.prod(len(axis) for axis in self.axes.values())
        if len(self.values) != wanted:
            sizes = " × ".join(f"{len(axis)} of {name}" for name, axis in self.axes.items())
            problem = f"there are {len(self.values)} values where the axes make {wanted}"
            raise WrongValue(path=("values",), problem=problem, remedy=f"write a value for each size: {sizes}")
        for number, value in enumerate(self.values, start=1):
            if not 0 < value < math.inf:
                problem = f"the value {value} is no time (it is number {number}): each must be a number above 0"
                raise WrongValue(path=("values",), problem=problem, remedy="measure it again, or fit without it")
        for name in self.axes:
            if name not in self.ranges:
                remedy = f"add `{name}: {{low: …, high: …}}`"
                raise WrongValue(path=("ranges", name), problem=f"the range of {name} is missing", remedy=remedy)
            self.ranges[name].check("ranges", name)
        return self

    @cached_property
    def _grid(self) -> tuple[tuple[Floats, ...], Floats]:
        axes = tuple(np.log(np.array(axis)) for axis in self.axes.values())
        return axes, np.log(np.array(self.values)).reshape([len(axis) for axis in axes])

    def at(self, **sizes: ArrayLike) -> Floats:
        """Values at broadcast sizes; beyond the grid its end holds."""
        axes, table = self._grid
        places = [np.asarray(sizes[name], dtype=float) for name in self.axes]
        if all(place.size == 1 for place in places):
            value = self._at_one([float(place.flat[0]) for place in places])
            return np.full(max((place.shape for place in places), key=len), value)
        asked = np.broadcast_arrays(*places)
        cells = [cell(axis, np.log(np.maximum(x, 1e-300))) for axis, x in zip(axes, asked, strict=True)]
        total = np.zeros(asked[0].shape)
        for corner in np.ndindex(*(2,) * len(axes)):
            weight = np.ones(asked[0].shape)
            index = []
            for (low, share), side, axis in zip(cells, corner, axes, strict=True):
                weight = weight * (share if side else 1 - share)
                index.append(np.minimum(low + side, len(axis) - 1))
            total = total + weight * table[tuple(index)]
        return np.asarray(np.exp(total))

    def _at_one(self, sizes: list[float]) -> float:
        """The same for one size; without arrays that takes a twentieth of the time."""
        terms = [(1.0, 0)]
        for axis, stride, size in zip(*self._lines, sizes, strict=True):
            low, share = _place(axis, math.log(max(size, 1e-300)))
            ends = ((low, 1.0 - share), (low + 1, share)) if share > 0.0 else ((low, 1.0),)
            terms = [(weight * part, at + stride * place) for weight, at in terms for place, part in ends]
        return math.exp(sum(weight * self._flat[at] for weight, at in terms))

    @cached_property
    def _lines(self) -> tuple[list[list[float]], list[int]]:
        """Logarithms of every axis, and how far apart neighbours on it stand in `_flat`."""
        axes = [axis.tolist() for axis in self._grid[0]]
        return axes, [math.prod(map(len, axes[number + 1 :])) for number in range(len(axes))]

    @cached_property
    def _flat(self) -> list[float]:
        return list(self._grid[1].ravel().tolist())

    def covers(self, **sizes: ArrayLike) -> bool:
        """Whether all sizes lie in the measured range (1 % beyond is not called extrapolation)."""
        return all(
            np.min(sizes[name]) >= self.ranges[name].low * 0.99 and np.max(sizes[name]) <= self.ranges[name].high * 1.01
            for name in self.axes
        )


def cell(axis: Floats, x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The interval that holds x, and the place in it from 0 to 1."""
    if len(axis) == 1:
        return np.zeros(x.shape, dtype=np.int64), np.zeros(x.shape)
    low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    return low, np.clip((x - axis[low]) / (axis[low + 1] - axis[low]), 0.0, 1.0)


def _place(axis: list[float], x: float) -> tuple[int, float]:
    """As `cell`, of one number."""
    if len(axis) == 1:
        return 0, 0.0
    low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return low, min(max((x - axis[low]) / (axis[low + 1] - axis[low]), 0.0), 1.0)


def _axis(name: str, given: Any) -> Any:
    return _words(given, name) if isinstance(given, str) else given


def _words(text: str, *place: str) -> tuple[float, ...]:
    """The numbers in a text. Raises WrongValue naming the first word that is none, and its position."""
    found = []
    for number, word in enumerate(text.split(), start=1):
        try:
            found.append(float(word))
        except ValueError:
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            problem = f"{word!r} is no finite number (it is number {number})"
            raise WrongValue(path=place, problem=problem, remedy="write numbers with spaces between them")
    return tuple(found)


def _rising(name: str, axis: tuple[float, ...]) -> None:
    """Raises WrongValue for an axis that holds no sizes or falls."""
    for number, size in enumerate(axis, start=1):
        if not 0 < size < math.inf:
            problem = f"axis {name} must hold sizes above 0, and number {number} is {size:g}"
            raise WrongValue(path=("axes", name), problem=problem, remedy="leave it out, with its values")
    if not axis:
        raise WrongValue(path=("axes", name), problem=f"axis {name} must hold sizes above 0", remedy="add one")
    for low, high in pairwise(axis):
        if low >= high:
            problem = f"axis {name} does not rise: {high:g} follows {low:g}"
            raise WrongValue(path=("axes", name), problem=problem, remedy="write every size once, smallest first")
