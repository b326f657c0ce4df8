"""What would make a scenario fit, or what makes it fit: measures, their effect in bytes, and the least that is enough.

A measure is a change of one key. Those that a scenario has not taken are tried on it; those that it has taken are
undone, to see what each is worth and what else would do in its place. Effects are differences of the whole model, not
sums of formulas, so that measures that work on the same bytes are not counted twice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lab.coherence import Incoherent, check
from lab.library import device as library_device
from lab.lora import Lora
from lab.scenario import Scenario
from profiles.memory import PoolMemory, pools

MOST_TOGETHER = 3
"""Measures of one combination at most."""
LORA_RANK = 16
"""Of the adapters that are proposed where a scenario has none."""
LEAST_EFFECT = 1e-3
"""Share of a device's memory below which an effect is not told."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A change of one key: `label` says which, `role` whose models it touches (empty: all)."""

    label: str
    key: str
    value: Any
    role: str = ""

    @property
    def yaml_key(self) -> str:
        """The key as a scenario file spells it: place.actor.train.offload, place.actor.generate[0].tensor_parallel."""
        path = re.sub(r"^place/([a-z]+)_(train|score|generate)", r"place/\1/\2", self.key)
        return re.sub(r"/(\d+)", r"[\1]", path).replace("/", ".")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A measure on one pool: bytes of the fullest device with and without it, and whether each fits."""

    measure: Measure
    saved_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A measure that the scenario has taken: what it saves, whether the pool fits without it, and what else then would.

    `instead` is empty where the pool fits anyway or nothing does.
    """

    measure: Measure
    saved_bytes: float
    fits_without: bool
    instead: tuple[Measure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PoolAnswer:
    """One pool: what lies on it, the measures in order of their effect, and the fewest that make it fit.

    `least` is empty where it fits, None where no combination of three measures does.
    """

    memory: PoolMemory
    possible: tuple[Effect, ...]
    taken: tuple[Taken, ...]
    least: tuple[Measure, ...] | None = ()


def answer(scenario: Scenario) -> dict[str, PoolAnswer]:
    """By pool. The order of equals is that of `possible_measures`: what costs least comes first."""
    trial = _Trial(scenario)
    return {pool: _pool(trial, memory) for pool, memory in trial.now.items()}


def changed(record: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy with one value changed, however deep; not validated again, so that hundreds can be tried."""
    name, rest = str(path[0]), path[1:]
    inner = getattr(record, name)
    if not rest:
        new: Any = value
    elif isinstance(rest[0], int):
        new = tuple(changed(one, rest[1:], value) for one in inner)
    else:
        new = changed(inner, rest, value)
    fields = {field: getattr(record, field) for field in type(record).model_fields}
    return type(record).model_construct(**fields | {name: new})


class _Trial:
    """A scenario, and what it would need with other measures; each combination is computed once."""

    def __init__(self, scenario: Scenario, measures: Sequence[Measure] = ()) -> None:
        self.scenario, self.measures = _with(scenario, measures), tuple(measures)
        self._known: dict[tuple[Measure, ...], dict[str, PoolMemory] | None] = {}

    @cached_property
    def now(self) -> dict[str, PoolMemory]:
        return pools(self.scenario)

    @cached_property
    def taken(self) -> tuple[tuple[Measure, _Trial], ...]:
        """Every measure that the scenario has taken, and the scenario without it."""
        trials = ((measure, _Trial(self.scenario, undo)) for measure, undo in _alone_and_together(self.scenario))
        return tuple((measure, without) for measure, without in trials if _sound(without.scenario))

    @cached_property
    def possible(self) -> tuple[Measure, ...]:
        return tuple(measure for measure in possible_measures(self.scenario) if self.after(measure) is not None)

    def after(self, *measures: Measure) -> dict[str, PoolMemory] | None:
        """By pool, with these measures; None where the scenario would contradict itself."""
        if measures not in self._known:
            self._known[measures] = self._computed(measures)
        return self._known[measures]

    def _computed(self, measures: tuple[Measure, ...]) -> dict[str, PoolMemory] | None:
        found = _with(self.scenario, measures)
        return pools(found) if _sound(found) else None


def _alone_and_together(scenario: Scenario) -> Iterator[tuple[Measure, list[Measure]]]:
    """Each measure that is taken with what undoes it; then those of one kind together, then all of them."""
    found = list(taken_measures(scenario))
    yield from ((measure, [undo]) for measure, undo in found)
    for kind in dict.fromkeys(measure.label.partition(" of the ")[0] for measure, _ in found):
        alike = [pair for pair in found if pair[0].label.partition(" of the ")[0] == kind]
        if 1 < len(alike) < len(found):
            roles = " and ".join(measure.role for measure, _ in alike)
            yield Measure(label=f"{kind} of {roles}", key="", value=None), [undo for _, undo in alike]
    if len(found) > 1:
        yield Measure(label="all of these", key="", value=None), [undo for _, undo in found]


def _sound(scenario: Scenario) -> bool:
    """Whether no key contradicts another; DeepSpeed moves an optimizer to the host only where ZeRO divides it."""
    if any(train.offload != "none" and train.zero_stage == 0 for _, train in _trained(scenario)):
        return False
    try:
        check(scenario)
    except Incoherent:
        return False
    return True


def _with(scenario: Scenario, measures: Sequence[Measure]) -> Scenario:
    found = scenario
    for measure in measures:
        found = changed(found, _path(measure.key), measure.value)
    for kept in ("hardware", "devices"):  # measures leave the devices alone
        found.__dict__[kept] = getattr(scenario, kept)
    return found


def _path(key: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in key.split("/"))


def _pool(trial: _Trial, memory: PoolMemory) -> PoolAnswer:
    effects = [_effect(trial, measure, memory) for measure in trial.possible]
    told = [effect for effect in effects if effect is not None and effect.saved_bytes > _told(memory)]
    least = () if memory.fits else _least(trial, memory.pool, [effect.measure for effect in told])
    useful = sorted(_mildest(told), key=lambda effect: -effect.saved_bytes)
    return PoolAnswer(memory=memory, possible=tuple(useful), taken=tuple(_taken(trial, memory)), least=least)


def _told(memory: PoolMemory) -> float:
    return LEAST_EFFECT * memory.capacity_bytes


def _effect(trial: _Trial, measure: Measure, memory: PoolMemory) -> Effect | None:
    after = trial.after(measure)
    if after is None:
        return None
    pool = after[memory.pool]
    return Effect(measure=measure, saved_bytes=_saved(pool, memory), fits=pool.fits)


def _saved(after: PoolMemory, before: PoolMemory) -> float:
    """The most that any device of the pool is relieved of."""
    return max((before.peaks[device] - after.peaks[device] for device in before.peaks), default=0.0)


def _mildest(effects: Sequence[Effect]) -> Iterator[Effect]:
    """Of several values of one key the mildest that is enough, else the strongest."""
    by_key: dict[str, list[Effect]] = {}
    for effect in effects:
        by_key.setdefault(effect.measure.key, []).append(effect)
    for steps in by_key.values():
        yield next((effect for effect in steps if effect.fits), steps[-1])


def _taken(trial: _Trial, memory: PoolMemory) -> Iterator[Taken]:
    """What each measure that is taken is worth, and several of them together where that is another amount."""
    worth: list[float] = []
    for measure, without in trial.taken:
        saved = _worth(without, memory)
        if saved > _told(memory) and (measure.key or not any(abs(saved - other) < 1.0 for other in worth)):
            worth.append(saved)
            yield _without(without, memory, measure)


def _worth(without: _Trial, memory: PoolMemory) -> float:
    return _saved(memory, without.now[memory.pool])


def _without(without: _Trial, memory: PoolMemory, measure: Measure) -> Taken:
    pool = without.now[memory.pool]
    undone = {undo.key for undo in without.measures}
    others = [other for other in without.possible if other.key not in undone]
    instead = () if pool.fits else _least(without, memory.pool, others) or ()
    return Taken(
        measure=measure, saved_bytes=_worth(without, memory), fits_without=pool.fits, instead=instead
    )  # fmt: skip


def _least(trial: _Trial, pool: str, measures: Sequence[Measure]) -> tuple[Measure, ...] | None:
    """The first combination of the fewest measures with which the pool fits."""
    for count in range(1, MOST_TOGETHER + 1):
        for chosen in itertools.combinations(measures, count):
            if len({measure.key for measure in chosen}) < count:
                continue
            after = trial.after(*chosen)
            if after is not None and after[pool].fits:
                return chosen
    return None


def possible_measures(scenario: Scenario) -> Iterator[Measure]:
    """Those that the scenario has not taken, what costs least first: time, then devices, then what is learned."""
    update, rollout = scenario.update, scenario.rollout
    if update.recompute != "full":
        yield Measure(label="recompute every layer in the backward pass", key="update/recompute", value="full")
    for tokens in _fewer_tokens(scenario):
        yield Measure(label=f"micro-batches of {tokens} tokens", key="update/microbatch_tokens", value=tokens)
    for rule in (_zero, _offload, _eight_bits):
        yield from rule(scenario)
    for fraction in (0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        if rollout.kv_bytes is None and fraction < rollout.kv_memory_fraction:
            label = f"{fraction:.0%} of the memory for the engine"
            yield Measure(label=label, key="rollout/kv_memory_fraction", value=fraction)
    if rollout.kv_bytes is not None:
        yield Measure(label="half the KV cache", key="rollout/kv_bytes", value=rollout.kv_bytes / 2)
    if rollout.max_num_seqs > 1:
        half = rollout.max_num_seqs // 2
        yield Measure(label=f"{half} sequences at once in an engine", key="rollout/max_num_seqs", value=half)
    for rule in (_tensor, _merged, _adapters):
        yield from rule(scenario)


def taken_measures(scenario: Scenario) -> Iterator[tuple[Measure, Measure]]:
    """Those that the scenario has taken, each with the change that undoes it."""
    undo: list[tuple[str, str, Any, str]] = []
    if scenario.update.recompute == "full":
        undo.append(("recompute every layer in the backward pass", "update/recompute", "none", ""))
    for role, train in _trained(scenario):
        if train.zero_stage and train.data_parallel * train.context_parallel > 1:
            undo.append((f"ZeRO stage {train.zero_stage} of the {role}", f"place/{role}_train/zero_stage", 0, role))
        if train.offload != "none":
            undo.append((f"the {role}'s optimizer in host memory", f"place/{role}_train/offload", "none", role))
        if scenario.model(role).lora is not None:
            undo.append((f"adapters (LoRA) of the {role}", f"models/{role}/lora", None, role))
    for role, place in _frozen(scenario):
        if place.dtype in ("int8", "fp8"):
            undo.append((f"{place.dtype} weights of the {role}", f"place/{role}_score/dtype", "bfloat16", role))
    for label, key, value, role in undo:
        measure = Measure(label=label, key=key, value=None, role=role)
        yield measure, Measure(label=f"without {label}", key=key, value=value, role=role)


def _fewer_tokens(scenario: Scenario) -> Iterator[int]:
    """Halves of the micro-batch, down to the longest sequence."""
    tokens, least = scenario.pass_tokens, scenario.workload.max_sequence_tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield tokens


def _zero(scenario: Scenario) -> Iterator[Measure]:
    for role, train in _trained(scenario):
        for stage in range(train.zero_stage + 1, 4):
            if train.data_parallel * train.context_parallel > 1:
                label = f"ZeRO stage {stage} of the {role}"
                yield Measure(label=label, key=f"place/{role}_train/zero_stage", value=stage, role=role)


def _offload(scenario: Scenario) -> Iterator[Measure]:
    for role, train in _trained(scenario):
        if train.offload == "none":
            label = f"the {role}'s optimizer in host memory"
            yield Measure(label=label, key=f"place/{role}_train/offload", value="optimizer", role=role)


def _eight_bits(scenario: Scenario) -> Iterator[Measure]:
    for role, place in _frozen(scenario):
        kind = library_device(scenario.hardware.node_of(scenario.devices[place.pool][0]).device)
        own = place.dtype or scenario.model(role).dtype
        for dtype in ("int8", "fp8"):
            if own not in ("int8", "fp8") and dtype in kind.flops:
                label = f"{dtype} weights of the {role}"
                yield Measure(label=label, key=f"place/{role}_score/dtype", value=dtype, role=role)


def _tensor(scenario: Scenario) -> Iterator[Measure]:
    parts: list[tuple[str, str, int]] = [
        (role, f"place/{role}_train/tensor_parallel", train.tensor_parallel) for role, train in _trained(scenario)
    ]
    parts += [(role, f"place/{role}_score/tensor_parallel", place.tensor_parallel) for role, place in _frozen(scenario)]
    if len(scenario.place.actor_generate) == 1:
        engine = scenario.place.actor_generate[0]
        parts.append(("engines", "place/actor_generate/0/tensor_parallel", engine.tensor_parallel))
    for who, key, width in parts:
        yield Measure(label=f"tensor parallelism {2 * width} of the {who}", key=key, value=2 * width, role=who)


def _merged(scenario: Scenario) -> Iterator[Measure]:
    """Fewer and wider engines on the same devices."""
    placed = scenario.place.actor_generate
    for i, part in enumerate(placed):
        for times in (2, 4, 8):
            if part.engines % times == 0:
                wider = {"engines": part.engines // times, "tensor_parallel": part.tensor_parallel * times}
                label = f"{wider['engines']} engines of tensor parallelism {wider['tensor_parallel']}"
                label += f" on {part.pool} instead of {part.engines} of {part.tensor_parallel}"
                value = (*placed[:i], part.model_copy(update=wider), *placed[i + 1 :])
                yield Measure(label=label, key="place/actor_generate", value=value, role="engines")


def _adapters(scenario: Scenario) -> Iterator[Measure]:
    for role, _ in _trained(scenario):
        if scenario.model(role).lora is None:
            label = f"adapters (LoRA, rank {LORA_RANK}) of the {role}"
            yield Measure(label=label, key=f"models/{role}/lora", value=Lora(rank=LORA_RANK), role=role)


def _trained(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    yield from scenario.trained.items()


def _frozen(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    for role, score in scenario.scored.items():
        if role != "reward" or not scenario.place.reward_function:
            yield role, score
