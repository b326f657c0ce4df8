"""EngineTables of an engine from what was measured: coefficients of its iterations, or its device's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from profiles import roofline
from profiles.formula import FORMULAS
from profiles.iteration import EngineTable

if TYPE_CHECKING:
    from profiles.kernels import Kernels
    from profiles.layout import Layout
    from profiles.profile import OpProfile, Profile


def of_fit(layout: Layout, fitted: OpProfile, *, measured: bool) -> EngineTable:
    """The formula of `engine_step` as a table: every term is linear in what the table's axes count.

    Coefficients are of one device; tensor-parallel devices divide its products, attention and reading, and threads by
    the speed-up that was measured.
    The axes and totals end where the measurements did. `measured`: they were made with this model and dtype.
    """
    spec, spread, ranges = layout.spec, layout.worker.parallelism, fitted.ranges
    c = {name: fitted.coefficients.get(name, 0.0) for name in FORMULAS["engine_step"]}
    alone = spread.tensor * spread.pipeline * fitted.speedup(layout.threads)
    per_token = spec.linear_flops(1.0, head_tokens=0.0) + 2.0 * layout.adapter_parameters
    per_sequence = spec.linear_flops(0.0, head_tokens=1.0)
    kept = spec.kv_bytes_per_token(layout.worker.kv_dtype)
    high = {name: ranges[name].high if name in ranges else 0.0 for name in c}
    sequences = max(high["sequences"], 1.0)
    tokens = np.array([0.0, max(high["linear_flops"] / per_token, 1.0)])
    talk = np.array([roofline.engine_talk(layout, float(n)) for n in tokens])
    return EngineTable(
        token_grid=tokens,
        token_seconds=(c["linear_flops"] * per_token + c["activations"] * spec.layers * spec.hidden) / alone * tokens
        + talk,
        sequence_grid=np.array([0.0, sequences]),
        sequence_seconds=c["linear_flops"] * per_sequence / alone * np.array([0.0, sequences]),
        most_pairs=high["attention_flops"] / spec.attention_flops(1.0),
        most_read=high["kv_bytes"] / kept,
        step_s=c["each"] + c["layers"] * spec.layers,
        sequence_s=c["sequences"],
        prefill_step_s=c["prefill_steps"],
        token_context_s=c["attention_flops"] * spec.attention_flops(1.0) / alone,
        context_read_s=c["kv_bytes"] * kept / alone,
        measured=measured and spread.tensor * spread.pipeline == 1 and layout.threads - 1 <= len(fitted.threads),
    )


def kernels_of(profile: Profile) -> Kernels | None:
    """The kernel curves of a profile; None where it has none."""
    if not profile.kernels:
        return None
    from profiles.compact import CompactKernels

    return CompactKernels(profile)


def of_kernels(layout: Layout, kernels: Kernels) -> EngineTable:
    """Composed from single kernels, with the host's fitted time; what pipeline stages or copies add is the datasheet's."""
    from profiles.engine_table import PREFILL_LAYER_S, SEQUENCE_S, STEP_S, engine_table

    worker, spread = layout.worker, layout.worker.parallelism
    expert = spread.expert if spread.data == 1 else 1
    head = "float32" if worker.dtype == "float32" else "bfloat16"
    table = engine_table(
        layout.spec, worker.dtype, worker.kv_dtype, spread.tensor, kernels, expert_parallel=expert, head_dtype=head
    )  # fmt: skip
    prefill = PREFILL_LAYER_S * layout.spec.layers
    table = replace(table, step_s=STEP_S, sequence_s=SEQUENCE_S, prefill_step_s=prefill)
    return pipelined(layout, copied(layout, table, kernels))


def copied(layout: Layout, table: EngineTable, kernels: Kernels) -> EngineTable:
    """The table of one of d equally busy copies, whose tokens meet at the experts of all of them."""
    spread, moe = layout.worker.parallelism, layout.spec.moe
    if spread.data == 1 or moe is None:
        return table
    shape = (layout.spec.hidden, moe.intermediate, moe.experts_per_token, moe.num_experts)
    devices = spread.tensor * spread.data
    own = kernels.moe(layout.worker.dtype, table.token_grid, *shape, spread.tensor, 1)
    met = kernels.moe(
        layout.worker.dtype, table.token_grid * spread.data, *shape, devices // spread.expert, spread.expert
    )
    sent = np.array([roofline.expert_seconds(layout, float(n)) for n in table.token_grid])
    changed = table.token_seconds + layout.spec.moe_layers * (met - own) + sent
    return replace(table, token_seconds=np.maximum(changed, 0.0), measured=False)


def pipelined(layout: Layout, table: EngineTable) -> EngineTable:
    """A table of one stage that holds all layers, for p stages: a round of p batches (`profiles.engine_roofline`)."""
    p = layout.worker.parallelism.pipeline
    if p == 1:
        return table
    hops = np.array([p * roofline.handing_on(layout, float(n)) for n in table.token_grid])
    return replace(
        table,
        token_grid=table.token_grid * p,
        token_seconds=table.token_seconds + hops,
        sequence_grid=table.sequence_grid * p,
        sequence_seconds=table.sequence_seconds * p,
        attention_seconds=table.attention_seconds / p,
        capture_sizes=table.capture_sizes * p,
        step_s=table.step_s * p,
        measured=False,
    )
