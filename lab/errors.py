"""What the lab says when the user's input is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial


@dataclass(kw_only=True, eq=False)
class InputError(Exception):
    """One thing wrong in one file that a user wrote; the command line prints it and exits with status 2.

    Every field but `problem` may be absent: a YAML syntax error has no key, a missing file no line.
    """

    problem: str
    remedy: str | None = None
    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __reduce__(self) -> tuple[Callable[[], InputError], tuple[()]]:
        """So that it travels from one process to another, although it takes no positional arguments."""
        return partial(type(self), **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        head = " ".join(part for part in (f"{place}:" if place else "", f"{self.key}:" if self.key else "") if part)
        tail = f"\n  remedy: {self.remedy}" if self.remedy else ""
        return f"{head} {self.problem}{tail}".strip()


@dataclass(kw_only=True, eq=False)
class WrongValue(ValueError):
    """What a record's validator finds wrong at one place inside it; the reader adds file, line, key and value."""

    path: tuple[str | int, ...]
    """from the record to the value: keys, and places in lists"""
    problem: str
    remedy: str

    def __str__(self) -> str:
        return ": ".join(part for part in (".".join(map(str, self.path)), self.problem) if part)


class RunStuck(Exception):
    """A simulation in which everybody waits for somebody; the message says who for whom. The command exits with 1."""
