"""Time per output token of vLLM on real GPUs, from op tables alone: dense models and MoE models.

Every case is played by the simulated engine on a table built from measured kernels. Three constants of the host are not
in such tables: per iteration, per scheduled sequence, and per layer of an iteration with prefill. They are fitted on
cases of other (system, model) groups than the predicted one. Because all requests wait at time 0, which iterations run
does not depend on what they cost, so a case's time is linear in the constants and one play for each gives its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from profiles.iteration import EngineTable
from simulator.engine import Requests, Settings, TooSmall
from simulator.replay import Replayed, replay
from simulator.studies.accuracy import LARGE_MISS, Row, Rule, Unavailable, ValidationSet, errors
from simulator.studies.silicon_rows import DENSE, Case, Engine, cases, engine_of

Floats = NDArray[np.float64]

RULES = (
    Rule(
        id="near-peak",
        sentence="Llama-3.1-8B-FP8 and Qwen3-32B-FP8 (24 rows in all): by Little's law up to 94 % of the peak FLOP/s end "
        "to end, or quicker than the weights can be read. The rule was made after these rows were seen to be missed; the "
        "notes give the totals with them.",
    ),
    Rule(
        id="contradicts",
        sentence="Four times as many clients or more were served with less time per token than in another row of the same "
        "configuration: `batch_size` is then not what ran.",
    ),
    Rule(id="does-not-fit", sentence="Weights or one sequence exceed the memory of the devices that the row names."),
    Rule(id="not-measured", sentence="The package has no table for the number format on this system."),
)
MEMORY = {
    "a100_sxm": 80e9, "h100_sxm": 80e9, "h200_sxm": 141e9, "b200_sxm": 180e9, "b300_sxm": 270e9, "gb200": 186e9,
    "gb300": 279e9, "l40s": 48e9,
}  # fmt: skip
"""bytes of a device, from the vendor's datasheets"""
RESERVED = 4e9
"""bytes of a device for activations, CUDA graphs and communication (vLLM's start-up logs show 2-6 GB)"""
NUM_CONSTANTS = 3
"""seconds per iteration, per scheduled sequence, per layer of an iteration with prefill"""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A case's mean times, and how much of each one second of a constant would add."""

    case: Case
    engine: Engine
    tpot_s: float
    tpot_per: Floats
    """(3,) for each of the constants"""
    waits: bool
    """for room in the KV cache: not all clients are served at once"""
    notes: tuple[str, ...]

    def tpot(self, constants: Floats) -> float:
        return self.tpot_s + float(self.tpot_per @ constants)


def dense(half: str = "even") -> ValidationSet:
    """Dense models. Raises Unavailable where the extra `silicon` is absent."""
    return _study("silicon-dense", "vLLM on data-centre GPUs, dense models", half, experts=False)


def moe(half: str = "even") -> ValidationSet:
    """MoE models. Raises Unavailable where the extra `silicon` is absent."""
    return _study("silicon-moe", "vLLM on data-centre GPUs, MoE models", half, experts=True)


def _study(name: str, title: str, half: str, *, experts: bool) -> ValidationSet:
    try:
        chosen = [case for case in cases(half) if (case.model not in DENSE) == experts]
        fitting = chosen if half == "even" else [case for case in cases("even") if (case.model not in DENSE) == experts]
    except InputError as absent:
        raise Unavailable(str(absent)) from None
    played = {case.id: play(case) for case in {case.id: case for case in (*fitting, *chosen)}.values()}
    rules = {case.id: rule for part in (chosen, fitting) for case, rule in _ruled(part, played)}
    usable = [part for case in fitting if isinstance(part := played[case.id], Played) and not rules[case.id]]
    constants = {group: fit([part for part in usable if part.case.group != group]) for group in _groups(chosen)}
    rows = [row for case in chosen for row in _rows(case, played[case.id], rules[case.id], constants[case.group])]
    return ValidationSet(name=name, title=title, rows=tuple(rows), rules=RULES, notes=_notes(rows, constants, usable))


def _groups(chosen: Sequence[Case]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(case.group for case in chosen))


def play(case: Case) -> Played | str:
    """The case on its table, or the rule by which it cannot be predicted."""
    from profiles.engine_table import engine_table
    from profiles.silicon_kernels import SiliconKernels

    engine = engine_of(case)
    blocks = kv_blocks(case, engine)
    if blocks * 16 < case.prompt + case.response:
        return "does-not-fit"
    kernels = SiliconKernels(case.system)
    try:
        table = engine_table(
            engine.spec, engine.dtype, engine.kv_dtype, case.tensor_parallel, kernels, _expert_parallel(case),
            expert_dtype=engine.expert_dtype, data_parallel=case.data_parallel, fusion=engine.fusion,
        )  # fmt: skip
        return _played(case, engine, table, blocks, tuple(sorted(kernels.notes)))
    except InputError:
        return "not-measured"
    except TooSmall:
        return "does-not-fit"


def _expert_parallel(case: Case) -> int:
    return case.devices if case.data_parallel > 1 else min(case.expert_parallel, case.devices)


def kv_blocks(case: Case, engine: Engine) -> int:
    """Blocks of 16 tokens of one engine: 90 % of the devices' memory less weights and RESERVED.

    Layers with a window keep only the window, so they are left out.
    """
    from profiles.kernels import WIDTH

    spec, replicas = engine.spec, case.data_parallel
    shared = spec.expert_parameters * WIDTH[engine.expert_dtype]
    own = (spec.matrix_parameters - spec.expert_parameters) * WIDTH[engine.dtype] + spec.embedding_parameters * 2.0
    free = (0.9 * MEMORY[case.system] - RESERVED) * case.devices - shared - own * replicas
    width = "fp8" if engine.kv_dtype == "fp8" else "bfloat16"
    kept = spec.kv_bytes_per_token(width) * (spec.layers - spec.window_layers) / spec.layers
    return max(0, int(free / replicas / kept / 16))


def _played(case: Case, engine: Engine, table: EngineTable, blocks: int, notes: tuple[str, ...]) -> Played:
    prompts, responses = case.lengths()
    requests = Requests(prompt=prompts, response=responses)
    settings = Settings(
        max_num_seqs=case.clients, max_num_batched_tokens=engine.budget, num_blocks=blocks + 1, prefix_caching=False,
        async_scheduling=engine.asynchronous,
    )  # fmt: skip
    base = _tpot(replay(table, settings, requests), responses)
    costed = replace(table, step_s=1.0), replace(table, sequence_s=1.0), replace(table, prefill_step_s=1.0)
    added = [_tpot(replay(own, settings, requests), responses) - base for own in costed]
    share = np.array(added) * np.array([1.0, 1.0, float(engine.spec.layers)])
    held = case.clients * 0.9 * (case.prompt + case.response)
    return Played(
        case=case, engine=engine, tpot_s=base, tpot_per=share, waits=held > blocks * 16, notes=notes,
    )  # fmt: skip


def _tpot(played: Replayed, responses: NDArray[np.int64]) -> float:
    """Mean time per output token."""
    return float(np.nanmean(played.tpot_s(responses)))


def fit(parts: Sequence[Played]) -> Floats:
    """The constants, not negative: robust least squares on relative errors, all groups weighing alike.

    Cases that wait for KV room are left out: their time depends on a capacity that is assumed.
    """
    from scipy.optimize import nnls

    used = [part for part in parts if not part.waits]
    names = [part.case.group for part in used]
    measured = np.array([part.case.tpot_s for part in used])
    rows = np.array([part.tpot_per for part in used]) / measured[:, None]
    left = 1 - np.array([part.tpot_s for part in used]) / measured
    even = np.array([1.0 / names.count(name) for name in names])
    pull, found = even.copy(), np.zeros(NUM_CONSTANTS)
    for _ in range(10):
        root = np.sqrt(pull)
        found, _ = nnls(rows * root[:, None], left * root)
        pull = even * np.minimum(1.0, 0.1 / np.maximum(np.abs(rows @ found - left), 1e-9))
    return np.asarray(found)


def _ruled(part: Sequence[Case], played: dict[str, Played | str]) -> list[tuple[Case, str]]:
    """The rule that takes each case out; empty: none does."""
    return [(case, _rule(case, part, played[case.id])) for case in part]


def _rule(case: Case, part: Sequence[Case], outcome: Played | str) -> str:
    if isinstance(outcome, str):
        return outcome
    if case.model == DENSE[2] or (case.model == DENSE[1] and case.precision == "fp8"):
        return "near-peak"
    return "contradicts" if any(_contradicts(case, other) for other in part) else ""


def _contradicts(case: Case, other: Case) -> bool:
    names = ("model", "system", "precision", "prompt", "response", "devices", "data_parallel", "expert_parallel")
    alike = all(getattr(case, name) == getattr(other, name) for name in names)
    return alike and case.clients >= 4 * other.clients and case.tpot_s < other.tpot_s


def _rows(case: Case, outcome: Played | str, rule: str, constants: Floats) -> list[Row]:
    if isinstance(outcome, str):
        return [Row(case=case.id, quantity="TPOT", predicted=None, measured=case.tpot_s, unit="s", excluded=rule)]
    assumed = outcome.engine.assumed
    tpot = outcome.tpot(constants)
    reason = _reason(outcome, tpot) if not rule else ""
    return [
        Row(
            case=case.id, quantity="TPOT", predicted=tpot, measured=case.tpot_s, unit="s", assumed=assumed, reason=reason,
            excluded=rule,
        )
    ]  # fmt: skip


def _reason(part: Played, predicted: float) -> str:
    """What is known about a case that is missed by a lot."""
    if abs(predicted / part.case.tpot_s - 1) <= LARGE_MISS:
        return ""
    if part.waits:
        return "waits for KV room, whose amount is assumed"
    if not part.case.benchmark:
        return "an engine of another benchmark, release 0.12, without asynchronous scheduling: more host time"
    if part.case.clients >= 256:
        return "the constant per sequence is fitted on fewer clients"
    return "; ".join(part.notes[:2])


def _notes(rows: Sequence[Row], constants: dict[str, Floats], usable: Sequence[Played]) -> tuple[str, ...]:
    whole = errors(row for row in rows if row.predicted is not None)
    bare = errors(
        Row(case=part.case.id, quantity="TPOT", predicted=part.tpot_s, measured=part.case.tpot_s, unit="s")
        for part in usable
    )
    notes = [
        (
            "chosen with the even half in view, as the constants are: which small kernels are fused, per-tensor times for "
            "products with block scales, a budget of 2048 tokens for the runs of another benchmark, and the rules"
        ),
    ]
    notes += [
        f"held out: {group}: {found[0] * 1e3:.2f} ms per iteration, {found[1] * 1e6:.0f} us per sequence, "
        f"{found[2] * 1e6:.0f} us per layer of an iteration with prefill"
        for group, found in constants.items()
    ]
    if whole:
        notes.append(f"with the rows that rules take out, where predicted: n {whole.num}, MAPE {whole.mape:.1%}")
    if bare:
        notes.append(
            f"with no constant at all, on the cases that are fitted: bias {bare.bias:+.1%}, MAPE {bare.mape:.1%}"
        )
    return tuple(notes)
