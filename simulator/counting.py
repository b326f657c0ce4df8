"""An engine by counting whose requests come and go: the growing arrays around `simulator.counted`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.blocks import Ints
from simulator.counted import (
    END,
    ENDED,
    FIRST,
    FREE,
    GIVEN,
    HELD,
    HITS,
    ITERATIONS,
    LAST,
    LONGEST,
    NEVER,
    NEXT,
    NUM_WINDOWS,
    PARTS,
    PIECES,
    SEQS,
    SHORTEST,
    SOONEST,
    START,
    TOTAL,
    WAITS,
    Count,
    look,
    needed,
)
from simulator.engine import Settings, TooSmall
from simulator.stretch import ROUNDING, dry, stretch
from simulator.whole import Tables

KEPT = ("count", "decoding", "short", "final", "who", "phase", "part", "done", "live", "safe", "clock", "window")
"""what a snapshot holds: of the rest, what was there stays as it is"""
BY_REQUEST = ("prompt", "response", "group", "shared", "live", "safe")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A request that is not at its end."""

    row: int
    generated: int
    """tokens, those before it was put back included"""


class Counting:
    """One engine. Rows are its requests, in the order in which they came or were put back."""

    def __init__(self, settings: Settings, tables: Tables, now: float) -> None:
        self._settings, self._tables = settings, tables
        slots = settings.max_num_seqs
        reserved = -(-settings.contiguous_tokens // settings.block_tokens)
        setting = [
            slots, settings.max_num_batched_tokens, settings.block_tokens, settings.async_scheduling,
            settings.reserve_full_isl, int(settings.watermark * settings.num_blocks), reserved,
        ]  # fmt: skip
        self._slots, self._setting, self._reserved = slots, np.array(setting, np.int64), reserved
        self._start(now, 64)

    def _start(self, now: float, room: int) -> None:
        """An empty engine."""
        slots = self._slots
        self._all: dict[str, Ints] = {name: np.zeros(room, np.int64) for name in BY_REQUEST}
        self._all["live"][:] = -1
        self._before = np.zeros(room, np.int64)
        self.state = Count(
            setting=self._setting, count=np.zeros(10, np.int64), decoding=np.zeros(5, np.int64),
            short=np.zeros(slots, np.int64), final=np.zeros(slots, np.int64), who=np.zeros(slots, np.int64),
            phase=np.zeros(self._settings.block_tokens, np.int64), part=np.zeros(slots, np.int64),
            done=np.zeros(slots, np.int64), due=np.zeros((2, room), np.int64), clock=np.full(2, now),
            window=np.zeros((2 * NUM_WINDOWS + 1, 17)), feature=np.zeros(10), ended=np.zeros(room),
            prompt=self._all["prompt"], response=self._all["response"], group=self._all["group"],
            shared=self._all["shared"], live=self._all["live"], safe=self._all["safe"],
        )  # fmt: skip
        self.state.count[FREE] = self._settings.num_blocks - 1
        self.state.window[-1, END] = 1
        self.state.decoding[[LONGEST, SHORTEST, SOONEST]] = -NEVER, NEVER, NEVER
        self.num_rows = self._num_groups = 0
        self._view()

    def _view(self) -> None:
        """The compiled part sees the rows that there are."""
        rows = slice(self.num_rows)
        self.state = self.state._replace(prompt=self._all["prompt"][rows], response=self._all["response"][rows])

    def add(self, prompt: Ints, response: Ints, groups: Ints, before: Ints | None = None) -> range:
        """More requests wait, those of a group behind each other; `before`: of the prompt, tokens that were generated.
        Returns their rows. Raises TooSmall where one can never fit the KV cache."""
        longest = int((prompt + response).max(initial=0))
        blocks = -(-max(longest, self._settings.contiguous_tokens) // self._settings.block_tokens)
        if blocks > self._settings.num_blocks - 1:
            raise TooSmall(f"a sequence of {longest} tokens does not fit {self._settings.num_blocks - 1} KV blocks")
        rows = range(self.num_rows, self.num_rows + len(prompt))
        room = max(rows.stop, self._num_groups + len(prompt))  # groups are numbered on where rows have left
        if room > len(self._before):
            self._grow(max(room, 2 * len(self._before)))
        at = slice(rows.start, rows.stop)
        own = np.zeros(len(prompt), np.int64) if before is None else before
        numbers = np.cumsum(np.diff(groups, prepend=groups[:1]) != 0)
        fresh = np.bincount(numbers, own == 0) > 0  # who has no token yet computes the last one of its prompt itself
        shared = (prompt - own - fresh[numbers]) // self._settings.block_tokens * self._settings.prefix_caching
        numbers += self._num_groups
        self._all["prompt"][at], self._all["response"][at], self._before[at] = prompt, response, own
        self._all["group"][at], self._all["shared"][at] = numbers, shared
        self._num_groups = int(numbers[-1]) + 1
        self.num_rows = rows.stop
        self._view()
        return rows

    def _grow(self, room: int) -> None:
        had = len(self._before)
        for name, array in self._all.items():
            self._all[name] = np.full(room, -1 if name == "live" else 0, np.int64)
            self._all[name][:had] = array
        due, ended = np.zeros((2, room), np.int64), np.zeros(room)
        due[:, :had], ended[:had] = self.state.due, self.state.ended
        self._before = np.concatenate([self._before, np.zeros(room - had, np.int64)])
        self.state = self.state._replace(
            due=due, ended=ended, group=self._all["group"], shared=self._all["shared"], live=self._all["live"],
            safe=self._all["safe"],
        )  # fmt: skip

    def stretch(self, until_s: float = np.inf, most: int = NEVER, stop_dry: bool = False) -> int:
        """Plays on; see `simulator.stretch`."""
        return int(stretch(self.state, self._tables.packed, self._tables.decode, until_s, most, stop_dry))

    @property
    def clock(self) -> float:
        return float(self.state.clock[0])

    def wait_until(self, now: float) -> None:
        """Nothing happened until now, or an iteration is under way still."""
        idle = self.clock <= now * (1 + ROUNDING) and not self.busy
        self.state.clock[0] = max(self.clock, now)
        if idle:
            self.land()

    def land(self) -> None:
        """Nothing is under way any more: all ends are seen."""
        count, due = self.state.count, self.state.due[0]
        due[count[FIRST] : count[LAST]] = np.minimum(due[count[FIRST] : count[LAST]], count[NEXT])

    @property
    def num_waiting(self) -> int:
        return self.num_rows - int(self.state.count[WAITS])

    @property
    def dry(self) -> bool:
        """Whether nobody waits and somebody could join."""
        return bool(dry(self.state))

    @property
    def dry_at(self) -> float:
        """Where a stretch was dry."""
        return float(self.state.clock[1])

    @property
    def busy(self) -> bool:
        """Whether somebody runs or waits."""
        count = self.state.count
        return bool(count[WAITS] < self.num_rows or count[PARTS] or self.state.decoding[SEQS])

    def ended(self, first: int) -> list[tuple[float, int]]:
        """Seconds and row of those that ended, from the first so many on; of one iteration in the order of their rows."""
        rows = self.state.due[1, first : self.state.count[LAST]]
        return sorted(zip(self.state.ended[rows].tolist(), rows.tolist(), strict=True))

    @property
    def num_ended(self) -> int:
        return int(self.state.count[ENDED])

    def snapshot(self) -> tuple[int, int, list[NDArray[Any]]]:
        """What `restore` needs to take back what comes now."""
        return self.num_rows, self._num_groups, [getattr(self.state, name).copy() for name in KEPT]

    def restore(self, kept: tuple[int, int, list[NDArray[Any]]]) -> None:
        """What was played and who came since the snapshot never happened."""
        self.num_rows, self._num_groups, arrays = kept
        for name, array in zip(KEPT, arrays, strict=True):
            target = getattr(self.state, name)
            target[: len(array)] = array
            if name == "live":
                target[len(array) :] = -1
        self._view()

    def running(self) -> list[Held]:
        """Those that hold blocks and are not at their end, in the order in which they joined."""
        count, seqs = self.state.count, int(self.state.decoding[SEQS])
        who, final = self.state.who[:seqs], self.state.final[:seqs]
        made = count[NEXT] - (final - self.state.response[who] + 1) + self._before[who]
        found = [Held(row=row, generated=tokens) for row, tokens in zip(who.tolist(), made.tolist(), strict=True)]
        parts = self.state.part[: count[PARTS]]
        found += [Held(row=row, generated=int(self._before[row])) for row in parts.tolist()]
        return sorted(found, key=lambda held: held.row)

    def waiting(self) -> list[Held]:
        """Those that have not joined, in order."""
        return [
            Held(row=row, generated=int(self._before[row]))
            for row in range(int(self.state.count[WAITS]), self.num_rows)
        ]

    def again(self, held: Sequence[Held]) -> tuple[int, int]:
        """Where these start again, tokens that are computed anew, and those that they find as one of their group did."""
        first = {int(self.state.group[one.row]): one.row for one in reversed(held)}
        found = [one for one in held if first[int(self.state.group[one.row])] != one.row]
        tokens = sum(int(self.state.prompt[one.row] - self._before[one.row]) + one.generated for one in held)
        known = sum(int(self.state.shared[one.row]) for one in found) * self._settings.block_tokens
        return tokens - known, known

    def back(self, now: float, held: Sequence[Held]) -> list[int]:
        """All start again in an empty engine, what they have generated to be computed again; returns the rows that they
        had, in the order of those that they have."""
        rows = np.array([one.row for one in held], np.int64)
        made = np.array([one.generated for one in held], np.int64) - self._before[rows]
        prompt, response = self._all["prompt"][rows] + made, self._all["response"][rows] - made
        groups, before = self._all["group"][rows], self._before[rows] + made
        self._start(now, max(64, 2 * len(rows)))
        if len(rows):
            self.add(prompt, response, groups, before)
        return [one.row for one in held]

    def leave(self, row: int) -> bool:
        """A request that runs or waits goes, with its blocks; returns whether the rows after it move up."""
        state, count = self.state, self.state.count
        if row >= count[WAITS]:
            for name in ("prompt", "response", "group", "shared"):
                self._all[name][row : self.num_rows - 1] = self._all[name][row + 1 : self.num_rows]
            self._before[row : self.num_rows - 1] = self._before[row + 1 : self.num_rows]
            self.num_rows -= 1
            self._view()
            return True
        places = np.flatnonzero(state.who[: state.decoding[SEQS]] == row)
        tokens = self._undecoded(int(places[0])) if len(places) else self._unparted(row)
        group = state.group[row]
        count[HELD] -= 1
        state.live[group] -= 1
        blocks = needed(state, tokens) - (state.shared[row] if state.live[group] > 0 else 0)
        state.safe[group] = count[GIVEN]  # taken so far, and all that are free
        count[FREE] += blocks
        count[GIVEN] += blocks
        return False

    def _undecoded(self, place: int) -> int:
        """One who decodes is taken out; returns the tokens in its blocks."""
        state, decoding = self.state, self.state.decoding
        short, last = int(state.short[place]), int(decoding[SEQS]) - 1
        decoding[SEQS] -= 1
        decoding[TOTAL] -= short
        state.phase[short % self._settings.block_tokens] -= 1
        for array in (state.short, state.final, state.who):
            array[place] = array[last]
        look(state)
        return short + int(state.count[NEXT])

    def _unparted(self, row: int) -> int:
        state, number = self.state, int(self.state.count[PARTS])
        place = int(np.flatnonzero(state.part[:number] == row)[0])
        tokens = int(state.done[place])
        for array in (state.part, state.done):
            array[place : number - 1] = array[place + 1 : number]
        state.count[PARTS] -= 1
        return tokens

    def summed(self) -> list[float] | None:
        """What was done since this was asked last, as one window of `simulator.counted`; None: nothing."""
        window = self.state.window
        rows = window[:-1][window[:-1, PIECES] > 0]
        if not len(rows):
            return None
        found = [rows[0, START], rows[-1, END], *rows[:, ITERATIONS:7].sum(axis=0), *rows[:, 7:].max(axis=0)]
        window[:] = 0.0
        window[-1, END] = 1
        return [float(number) for number in found]

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the cache since the engine was empty."""
        return int(self.state.count[HITS])
