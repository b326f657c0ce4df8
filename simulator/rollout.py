"""The rollout engine: continuous batching, iteration by iteration, with closed-form jumps in between.

Scheduling follows vLLM V1 (https://docs.vllm.ai, v1/core/sched/scheduler.py): running requests first, in order of
admission; then waiting ones, in chunks of what the token budget leaves, where sequences and KV blocks allow;
preemption by recomputation from the tail of the running ones; full blocks of a prompt are shared by its samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lab.scenario import Rollout

_NO_LIMIT = 1 << 60


class TooSmall(Exception):
    """A sequence does not fit the KV cache."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate."""

    group: int
    """its prompt"""
    prompt: int
    """tokens"""
    response: int
    """tokens"""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`iterations` consecutive iterations with the same requests; context grows by a token per sequence in each."""

    iterations: int
    sequences: int
    tokens: int
    """scheduled in each iteration"""
    prefill_tokens: int
    token_context: tuple[int, int]
    """sum over scheduled tokens of what each attends to, in the first and in the last iteration"""
    context_read: tuple[int, int]
    """sum over sequences of the context read, in the first and in the last iteration"""
    preempted: int = 0
    recomputed_tokens: int = 0


@dataclass(eq=False)
class _State:
    """What the engine keeps of a request."""

    request: Request
    computed: int = 0
    """tokens whose keys and values are in the cache"""
    generated: int = 0
    highest: int = 0
    """largest `computed` so far: beyond it nothing is computed twice"""
    blocks: int = 0
    """blocks of its own; those shared with its group are the group's"""
    shared: int = 0
    """tokens in blocks shared with its group"""

    @property
    def length(self) -> int:
        return self.request.prompt + self.generated


@dataclass(eq=False)
class _Group:
    """The full prompt blocks that a prompt's samples share while at least one of them runs."""

    tokens: int = 0
    members: int = 0


@dataclass(eq=False)
class Engine:
    """One engine; call `pieces` to play it until all requests are done."""

    rollout: Rollout
    num_blocks: int
    max_jump: int = _NO_LIMIT
    """1 steps through every iteration"""
    waiting: deque[_State] = field(default_factory=deque)
    running: list[_State] = field(default_factory=list)
    free: int = 0
    cached_tokens: int = 0
    _groups: dict[int, _Group] = field(default_factory=dict)

    def pieces(self, requests: Sequence[Request]) -> Iterator[Piece]:
        """Iterations until every request has its response. Raises TooSmall where one cannot fit the KV cache."""
        self.free = self.num_blocks - 1  # vLLM keeps one block for itself
        longest = max(request.prompt + request.response for request in requests)
        if self._blocks(longest) > self.free:
            raise TooSmall(f"a sequence of {longest} tokens does not fit {self.free} KV blocks")
        self.waiting.extend(_State(request=request) for request in requests)
        while self.waiting or self.running:
            jump = self._jump_length()
            yield self._decode(jump) if jump else self._iterate()
            self._retire()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.rollout.block_tokens)

    def _iterate(self) -> Piece:
        """One iteration: running requests, then admissions."""
        budget = self.rollout.max_num_batched_tokens
        scheduled: dict[int, tuple[_State, int]] = {}
        preempted = position = 0
        while position < len(self.running) and budget > 0:
            state = self.running[position]
            tokens = min(state.length - state.computed, budget)
            while not self._allocate(state, tokens):
                victim = self.running.pop()
                budget += scheduled.pop(id(victim), (victim, 0))[1]
                self._preempt(victim)
                preempted += 1
                if victim is state:
                    break
            else:
                scheduled[id(state)] = (state, tokens)
                budget -= tokens
                position += 1
                continue
            break
        if not preempted:
            self._admit(budget, scheduled)
        return self._compute(list(scheduled.values()), preempted)

    def _admit(self, budget: int, scheduled: dict[int, tuple[_State, int]]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.rollout.max_num_seqs:
            state = self.waiting[0]
            cached = self._cached(state)
            tokens = min(state.length - cached, budget)
            needed = self._blocks(state.length) - cached // self.rollout.block_tokens
            if needed > self.free:
                return
            self.waiting.popleft()
            self._join(state, cached)
            self._allocate(state, tokens)
            self.running.append(state)
            scheduled[id(state)] = (state, tokens)
            budget -= tokens

    def _cached(self, state: _State) -> int:
        """Tokens in full blocks of its prompt that another sample's admission has put into the cache."""
        group = self._groups.get(state.request.group)
        if not self.rollout.prefix_caching or group is None or not group.members:
            return 0
        block = self.rollout.block_tokens
        return min(group.tokens, (state.length - 1) // block * block)

    def _join(self, state: _State, cached: int) -> None:
        group = self._groups.setdefault(state.request.group, _Group())
        group.members += 1
        state.computed = state.shared = cached
        state.blocks = 0
        self.cached_tokens += cached if not state.highest else 0  # as vLLM reports it: of the first admission

    def _allocate(self, state: _State, tokens: int) -> bool:
        """Takes the blocks for `tokens` more tokens; the first sample of a prompt computes what the others share."""
        needed = self._blocks(state.computed + tokens) - state.shared // self.rollout.block_tokens - state.blocks
        if needed > self.free:
            return False
        self.free -= max(needed, 0)
        state.blocks += max(needed, 0)
        group, block = self._groups[state.request.group], self.rollout.block_tokens
        full = min(state.computed + tokens, state.request.prompt) // block * block
        if self.rollout.prefix_caching and full > group.tokens:
            grown = (full - group.tokens) // block  # its own blocks become the group's
            group.tokens, state.shared, state.blocks = full, full, state.blocks - grown
        return True

    def _leave(self, state: _State) -> None:
        """Gives blocks back; the shared ones when the last sample of the prompt leaves."""
        group = self._groups[state.request.group]
        group.members -= 1
        self.free += state.blocks
        state.blocks = state.shared = 0
        if not group.members:
            self.free += group.tokens // self.rollout.block_tokens
            group.tokens = 0

    def _preempt(self, victim: _State) -> None:
        self._leave(victim)
        victim.computed = 0
        self.waiting.appendleft(victim)

    def _compute(self, scheduled: list[tuple[_State, int]], preempted: int) -> Piece:
        context = read = prefill = recomputed = total = 0
        for state, tokens in scheduled:
            before, after = state.computed, state.computed + tokens
            context += tokens * before + tokens * (tokens + 1) // 2
            read += after
            total += tokens
            recomputed += max(min(state.highest, after) - before, 0)
            prefill += tokens if before < max(state.request.prompt, state.highest) else 0
            state.computed, state.highest = after, max(state.highest, after)
            state.generated += after == state.length
        return Piece(
            iterations=1, sequences=len(scheduled), tokens=total, prefill_tokens=prefill, token_context=(context, context),
            context_read=(read, read), preempted=preempted, recomputed_tokens=recomputed,
        )  # fmt: skip

    def _retire(self) -> None:
        done = [state for state in self.running if state.generated >= state.request.response]
        if done:
            self.running = [state for state in self.running if state.generated < state.request.response]
            for state in done:
                self._leave(state)

    def _jump_length(self) -> int:
        """Iterations that only decode and change no membership; 0 where the next one has to be scheduled in full."""
        if self.max_jump <= 1 or not self.running or len(self.running) > self.rollout.max_num_batched_tokens:
            return 0
        decoding = all(state.computed == state.length - 1 >= state.request.prompt for state in self.running)
        if not decoding or self._can_admit():
            return 0
        most = min(min(state.request.response - state.generated for state in self.running), self.max_jump)
        computed = np.array([state.computed for state in self.running])
        held = self._held(computed)
        if self._held(computed + most) - held <= self.free:
            return most
        low, high = 0, most  # the last length whose blocks are free
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._held(computed + middle) - held <= self.free else (low, middle)
        return low

    def _held(self, computed: NDArray[np.int64]) -> int:
        return int((-(-computed // self.rollout.block_tokens)).sum())

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.rollout.max_num_seqs:
            return False
        if len(self.running) >= self.rollout.max_num_batched_tokens:
            return False
        state = self.waiting[0]
        return self._blocks(state.length) - self._cached(state) // self.rollout.block_tokens <= self.free

    def _decode(self, iterations: int) -> Piece:
        """So many iterations in which every running request gets one token."""
        number = len(self.running)
        first = sum(state.computed + 1 for state in self.running)
        for state in self.running:
            needed = self._blocks(state.computed + iterations) - self._blocks(state.computed)
            self.free -= needed
            state.blocks += needed
            state.computed += iterations
            state.generated += iterations
            state.highest = max(state.highest, state.computed)
        ends = (first, first + number * (iterations - 1))
        return Piece(
            iterations=iterations,
            sequences=number,
            tokens=number,
            prefill_tokens=0,
            token_context=ends,
            context_read=ends,
        )
