"""Folders of measured op times of one model on one GPU, in the layout of LLMServingSim's profiler (MIT licence).

A folder `…/tp<N>` holds `dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us),
`attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) and, where uneven contexts were measured,
`skew_fit.csv`; `meta.yaml` beside the `tp<N>` folders says how. Times are of one call, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lab.errors import InputError
from lab.measurement import Measurement
from lab.model import ModelSpec
from profiles.iteration import EngineTable, Skews

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Collective = Callable[[Floats], Floats]
"""bytes to seconds"""

COLUMNS = {
    "dense.csv": ("layer", "tokens", "time_us"),
    "per_sequence.csv": ("layer", "sequences", "time_us"),
    "attention.csv": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "skew_fit.csv": ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label", "alpha"),
}
ONCE = frozenset({"embedding", "final_layernorm"})
"""layers that a pass goes through once; two norms per block, one of everything else"""
PER_LAYER = {"layernorm": 2}


def read(folder: Path, name: str) -> pd.DataFrame:
    """One table. Raises InputError naming the file, and the column that is missing or the value that is no time."""
    import pandas as pd

    path = folder / name
    if not path.is_file():
        remedy = f"an op-table folder holds {', '.join(COLUMNS)}"
        raise InputError(file=str(path), problem="there is no such table", remedy=remedy)
    try:
        table = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise InputError(
            file=str(path), problem=f"not a CSV table: {error}", remedy="give a table with a header"
        ) from None
    for column in COLUMNS[name]:
        if column not in table:
            remedy = f"its columns are {', '.join(COLUMNS[name])}"
            raise InputError(file=str(path), key=column, problem="the column is missing", remedy=remedy)
    for column in (column for column in COLUMNS[name] if column != "layer" and not column.endswith("_label")):
        values, least = pd.to_numeric(table[column], errors="coerce"), -np.inf if column == "alpha" else 0.0
        wrong = ~(np.isfinite(values) & (values >= least))
        if wrong.any():
            row = int(np.argmax(wrong))
            problem = f"{table[column].iloc[row]!r} is not a number{' of at least 0' * (least == 0.0)}"
            raise InputError(
                file=str(path), line=row + 2, key=column, problem=problem, remedy="remove or repeat this point"
            )
    return table


def described(folder: Path) -> dict[str, Any]:
    """What `meta.yaml` beside the folder says; empty where there is none. Raises InputError where it is no mapping."""
    import yaml

    path = folder.parent / "meta.yaml"
    if not path.is_file():
        return {}
    try:
        return dict(yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise InputError(
            file=str(path), problem=f"not a YAML mapping: {error}", remedy="restore or remove it"
        ) from None


def measurements(folder: Path, *, device: str, model: str) -> Iterator[Measurement]:
    """Every point of a folder as a Measurement of `layer`, `head` or `attention` ops. Raises InputError."""
    software = described(folder).get("vllm_version", "unknown")
    source = f"LLMServingSim op tables, vLLM {software}, {folder.name}"
    for name, op in (("dense.csv", "layer"), ("per_sequence.csv", "head"), ("attention.csv", "attention")):
        table = read(folder, name)
        counts = [column for column in COLUMNS[name] if column not in ("layer", "time_us")]
        for row in table.to_dict("records"):
            yield Measurement(
                op=op, point=row.get("layer", ""), quantities={column: float(row[column]) for column in counts},
                seconds=row["time_us"] * 1e-6, device=device, model=model, source=source,
            )  # fmt: skip


def engine_table(folder: Path, spec: ModelSpec, all_reduce: Collective | None = None) -> EngineTable:
    """The iteration costs of one engine from a folder.

    `all_reduce` prices the two all-reduces of each layer where the folder is of tensor-parallel shards; it takes the
    bytes of one call. Raises InputError where a table is missing or wrong.
    """
    tokens, seconds = _summed(read(folder, "dense.csv"), "tokens", lambda layer: _times(layer, spec))
    if all_reduce is not None:
        seconds = seconds + 2 * spec.layers * all_reduce(tokens * spec.hidden * 2.0)
    sequences, head = _summed(read(folder, "per_sequence.csv"), "sequences", lambda layer: 1)
    chunks, prefixes, decodes, contexts, attention = _attention(read(folder, "attention.csv"))
    return EngineTable(
        token_grid=tokens, token_seconds=seconds, sequence_grid=sequences, sequence_seconds=head,
        chunk_grid=chunks, prefix_grid=prefixes, decode_grid=decodes, context_grid=contexts,
        attention_seconds=attention * spec.layers, measured=True, **_skews(folder),
    )  # fmt: skip


def _times(layer: str, spec: ModelSpec) -> int:
    return 1 if layer in ONCE else PER_LAYER.get(layer, 1) * spec.layers


def _summed(table: pd.DataFrame, axis: str, times: Callable[[str], int]) -> tuple[Floats, Floats]:
    """Seconds of a whole pass by tokens or sequences; where layers were measured on other grids, interpolated."""
    grid = np.unique(table[axis].to_numpy(dtype=float))
    total = np.zeros(len(grid))
    for layer, part in table.groupby("layer"):
        part = part.sort_values(axis)
        total += times(str(layer)) * np.interp(grid, part[axis], part["time_us"]) * 1e-6
    return grid, total


def _attention(table: pd.DataFrame) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Axes and (P, K, N, C) seconds of one layer; every (chunk, decodes) slice is resampled on the union of the grids."""
    axes = [np.unique(table[c].to_numpy(dtype=float)) for c in COLUMNS["attention.csv"][:-1]]
    chunks, prefixes, decodes, contexts = axes
    values = np.full(tuple(len(axis) for axis in axes), np.nan)
    for (chunk, number), part in table.groupby(["prefill_chunk", "n_decode"]):
        i, k = int(np.flatnonzero(chunks == chunk)[0]), int(np.flatnonzero(decodes == number)[0])
        values[i, :, k, :] = _resampled(part, prefixes, contexts) * 1e-6
    values[0, :, 0, :] = 0.0  # nothing scheduled
    for i in range(len(chunks)):
        for k in range(len(decodes)):
            if np.isnan(values[i, 0, k, 0]):  # not measured: the two slices before it go on
                share = (decodes[k] - decodes[k - 2]) / (decodes[k - 1] - decodes[k - 2])
                values[i, :, k] = values[i, :, k - 2] + share * (values[i, :, k - 1] - values[i, :, k - 2])
    return chunks, prefixes, decodes, contexts, np.maximum(values, 0.0)


def _resampled(part: pd.DataFrame, prefixes: Floats, contexts: Floats) -> Floats:
    """(K, C) microseconds of one slice; points missing from its own grid are interpolated along the context first."""
    grid = part.pivot_table(index="kv_prefill", columns="kv_decode", values="time_us", aggfunc="mean")
    grid = grid.interpolate(axis=1, method="values", limit_direction="both")
    along = np.array([_line(contexts, grid.columns.to_numpy(float), row) for row in grid.to_numpy(float)])
    return np.array([_line(prefixes, grid.index.to_numpy(float), column) for column in along.T]).T


def _line(at: Floats, grid: Floats, values: Floats) -> Floats:
    """Linear interpolation; beyond the last point its slope goes on, before the first the first value holds."""
    found = np.interp(at, grid, values)
    if len(grid) > 1:
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        found = np.where(at > grid[-1], values[-1] + slope * (at - grid[-1]), found)
    return np.asarray(found)


def _skews(folder: Path) -> dict[str, Any]:
    """The folder's correction for uneven contexts, where `meta.yaml` says that it is on."""
    fit = described(folder).get("skew_fit", {})
    if not fit.get("enabled") or not (folder / "skew_fit.csv").is_file():
        return {}
    try:
        return _binned(folder, fit)
    except KeyError as error:
        file, remedy = str(folder.parent / "meta.yaml"), "restore the file, or set skew_fit.enabled to false"
        problem = f"skew_fit lacks {error}, which skew_fit.csv needs"
        raise InputError(file=file, key="skew_fit", problem=problem, remedy=remedy) from None


def _binned(folder: Path, fit: dict[str, Any]) -> dict[str, Any]:
    default = float(fit["per_tp"][int(folder.name.removeprefix("tp"))]["alpha_default"])
    axes, table = fit["bucket_axes"], read(folder, "skew_fit.csv")
    parts = [("n", "n_label"), ("skew_rate", "skew_rate_label"), ("kv_big", "kv_big_label"), ("kp", "kp_label")]
    edges = [np.array(axes[f"{name}_bins"][1:], dtype=float) for name, _ in parts]
    places = [{label: i for i, label in enumerate(axes[f"{name}_labels"])} for name, _ in parts]
    chunks = np.unique(table["pc"].to_numpy(dtype=float))
    shares = np.full((len(chunks), *(len(edge) for edge in edges)), default)
    for row in table.to_dict("records"):
        where = tuple(place[row[column]] for place, (_, column) in zip(places, parts, strict=True))
        shares[(np.searchsorted(chunks, row["pc"]), *where)] = max(float(row["alpha"]), 0.0)
    skews = Skews(chunks=chunks, decodes=edges[0], spread=edges[1], longest=edges[2], prefix=edges[3], shares=shares)
    return {"skew": default, "skews": skews}
