"""Real vLLM runs, replayed by the simulated engine on op times measured on the same kind of GPU.

The data folder's `vllm_runs/<gpu>/<model>` holds a run (requests, prompt blocks, the engine's arguments, the link that
its authors state), `vllm_runs/ops/<gpu>/<model id>` the op tables. Nothing is fitted on a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.library import device as library_device
from lab.library import model as library_model
from lab.model import ModelSpec
from profiles.iteration import EngineTable
from profiles.readers import silicon
from profiles.readers.optables import Collective, engine_table
from simulator.engine import Requests, Settings
from simulator.replay import replay
from simulator.studies.accuracy import Row, Rule, Unavailable, ValidationSet

DEVICES = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000"}
"""folder names of the data to entries of the device library"""
CAPTURE_SIZES = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)], dtype=float)
"""vLLM 0.19's CUDA graph sizes up to 512 tokens, its default; a run that recorded its own uses those"""
BLOCK_TOKENS, MEMORY_SHARE = 16, 0.9
RULES = (
    Rule(
        id="other-link",
        sentence="the same run with all-reduce times of another source, shown for comparison",
        comparison=True,
    ),
    Rule(id="synchronous", sentence="the same run with synchronous scheduling, shown for comparison", comparison=True),
)
NOTES = (
    "no constant is fitted on a run; costs are the op tables of the same model on the same kind of GPU, interpolated",
    (
        "all-reduces were measured elsewhere on the same kind of GPU with the run's version of vLLM; another version is "
        "shown for comparison, and the link stated beside the run, which its authors call calibrated; all were seen before "
        "choosing"
    ),
    "arrivals count from the first request; time to first token and latency from each request's own arrival",
    "the real runs begin cold: their first request waits several times longer for its first token",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One real run."""

    name: str
    folder: Path
    tables: Path
    device: str
    spec: ModelSpec
    meta: dict[str, Any]
    requests: Requests
    first_s: NDArray[np.float64]
    """(n,) measured, from the first request's arrival"""
    last_s: NDArray[np.float64]

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.meta["engine_kwargs"])

    @property
    def tensor_parallel(self) -> int:
        return int(self.arguments["tensor_parallel_size"])

    def resolved(self, part: str, key: str) -> Any:
        """What the engine resolved a setting to; None where the run did not record it."""
        return self.meta.get("resolved_config", {}).get(part, {}).get(key)


def engine_runs(data: Path) -> ValidationSet:
    """Makespan and mean TPOT, TTFT and latency of every run in the folder. Raises Unavailable where there is none."""
    runs = list(_runs(data / "vllm_runs"))
    if not runs:
        raise Unavailable(f"{data / 'vllm_runs'} holds no run")
    rows = [row for run in runs for row in _rows(run)]
    return ValidationSet(
        name="vllm-runs",
        title="Real vLLM 0.19 runs of 300 ShareGPT requests",
        rows=tuple(rows),
        rules=RULES,
        notes=NOTES,
    )


def _runs(folder: Path) -> Iterator[Run]:
    for path in sorted(folder.glob("*/*/requests.jsonl")):
        gpu, meta = path.parent.parent.name, json.loads((path.parent / "meta.json").read_text())
        if gpu not in DEVICES:
            continue
        identity = meta["engine_kwargs"]["model"]
        rows = sorted(_lines(path), key=lambda row: row["arrival_time"])
        blocks = {row["request_id"]: row["prompt_blocks"] for row in _lines(path.parent / "prompt_blocks.jsonl")}
        begun, zero = rows[0]["arrival_time"], min(row["queued_ts"] for row in rows)
        tensor = meta["engine_kwargs"]["tensor_parallel_size"]
        yield Run(
            name=f"{identity.split('/')[-1]} on {tensor} x {DEVICES[gpu]}",
            folder=path.parent, tables=folder / "ops" / gpu / identity / "bf16" / f"tp{tensor}", device=DEVICES[gpu],
            spec=library_model(identity.split("/")[-1].lower()), meta=meta,
            requests=Requests(
                prompt=np.array([row["input_toks"] for row in rows]),
                response=np.array([row["output_toks"] for row in rows]),
                arrival_s=np.array([row["arrival_time"] - begun for row in rows]),
                contents=[blocks[row["request_id"]] for row in rows],
            ),
            first_s=np.array([row["first_token_ts"] for row in rows]) - zero,
            last_s=np.array([row["last_token_ts"] for row in rows]) - zero,
        )  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _rows(run: Run) -> Iterator[Row]:
    settings, assumed = _settings(run)
    links = dict(_links(run)) if run.tensor_parallel > 1 else {"": None}
    judged, *others = links
    notes = (*assumed, judged) if judged else assumed
    yield from _compared(run, _table(run, links[judged]), settings, notes)
    behind = replace(settings, async_scheduling=False)
    yield from _compared(run, _table(run, links[judged]), behind, notes, "synchronous scheduling", "synchronous")
    for name in others:
        yield from _compared(run, _table(run, links[name]), settings, assumed, name, "other-link")


def _compared(
    run: Run, table: EngineTable, settings: Settings, assumed: tuple[str, ...], note: str = "", rule: str = ""
) -> Iterator[Row]:
    found, arrival = replay(table, settings, run.requests), run.requests.arrivals()
    for quantity, of in _QUANTITIES.items():
        predicted, measured = (
            float(of(first, last, arrival, run.requests.response))
            for first, last in ((found.first_token_s, found.last_token_s), (run.first_s, run.last_s))
        )
        case = f"{run.name}, {note}" if note else run.name
        yield Row(
            case=case,
            quantity=quantity,
            predicted=predicted,
            measured=measured,
            unit="s",
            assumed=assumed,
            excluded=rule,
        )


Floats = NDArray[np.float64]
_QUANTITIES: dict[str, Callable[[Floats, Floats, Floats, NDArray[np.int64]], np.floating[Any]]] = {
    "makespan": lambda first, last, arrival, response: last.max(),
    "mean TPOT": lambda first, last, arrival, response: np.mean(
        ((last - first) / np.maximum(response - 1, 1))[response > 1]
    ),
    "mean TTFT": lambda first, last, arrival, response: np.mean(first - arrival),
    "mean latency": lambda first, last, arrival, response: np.mean(last - arrival),
}


def _settings(run: Run) -> tuple[Settings, tuple[str, ...]]:
    """The engine's settings as recorded, and what had to be assumed."""
    assumed = []
    blocks = run.meta.get("kv_cache", {}).get("num_gpu_blocks")
    if blocks is None:
        assumed.append(f"KV blocks from {MEMORY_SHARE:.0%} of the memory; they never run out")
        per_block = BLOCK_TOKENS * run.spec.kv_bytes_per_token("bfloat16") / run.tensor_parallel
        room = MEMORY_SHARE * library_device(run.device).memory_bytes
        blocks = int((room - run.spec.weight_bytes("bfloat16") / run.tensor_parallel) / per_block)
    ahead = run.resolved("scheduler_config", "async_scheduling")
    if ahead is None:
        assumed.append("asynchronous scheduling and full-prompt admission, vLLM's defaults")
    whole = run.resolved("scheduler_config", "scheduler_reserve_full_isl")
    settings = Settings(
        max_num_seqs=run.arguments["max_num_seqs"], max_num_batched_tokens=run.arguments["max_num_batched_tokens"],
        num_blocks=blocks, block_tokens=BLOCK_TOKENS, async_scheduling=ahead is not False,
        reserve_full_isl=whole is not False, reuse_uncached_first=False,
    )  # fmt: skip
    return settings, tuple(assumed)


def _table(run: Run, collective: Collective | None) -> EngineTable:
    sizes = run.resolved("compilation_config", "cudagraph_capture_sizes")
    table = engine_table(run.tables, run.spec, collective)
    return replace(table, capture_sizes=CAPTURE_SIZES if sizes is None else np.array(sizes, dtype=float))


def _links(run: Run) -> Iterator[tuple[str, Collective]]:
    """All-reduce times by source, the one that is judged first: measured with the run's own version of vLLM, if any is."""
    measured = dict(_measured_links(run))
    own = f"all-reduce of vLLM {run.meta['vllm_version']} (aiconfigurator-core)"
    if own in measured:
        yield own, measured.pop(own)
    yield "all-reduce over the link stated beside the run, 1 GB read as 2^30 bytes", _stated_link(run)
    yield from measured.items()


def _stated_link(run: Run) -> Collective:
    """A ring all-reduce over the link of the run's `config.json`: GB/s and nanoseconds, one GB read as 2^30 bytes."""
    config, ranks = json.loads((run.folder / "config.json").read_text()), run.tensor_parallel
    bandwidth, latency = config["link_bw"] * 2.0**30, config["link_latency"] * 1e-9
    return lambda size: 2 * (ranks - 1) * (size / ranks / bandwidth + latency)


def _measured_links(run: Run) -> Iterator[tuple[str, Collective]]:
    """All-reduce times on the same kind of GPU, by version of vLLM, where the extra `silicon` is installed."""
    from lab.errors import InputError

    try:
        folder = silicon.systems_folder() / "data" / silicon.DEVICES[run.device]
    except InputError:
        return
    for path in sorted(folder.glob(silicon.KINDS["custom_allreduce"].pattern)):
        table = silicon.read_table(path, system=folder.name, kind="custom_allreduce")
        chosen = (table["num_gpus"] == run.tensor_parallel) & (table["backend"] == "vllm_graph")
        size = silicon.message_bytes(table, "allreduce_dtype")[chosen]
        order = np.argsort(size)
        yield (
            f"all-reduce of vLLM {table.version} (aiconfigurator-core)",
            partial(_line, size[order], table.seconds[chosen][order]),
        )


def _line(sizes: Floats, seconds: Floats, size: Floats) -> Floats:
    return np.asarray(np.interp(size, sizes, seconds))
