"""Records: what a step was trained on, sample by sample, so that it can be looked at, exported and recomputed.

`records/step-000007.parquet` below a run's folder, one row for each sample, complete or absent. Numbers are kept as they
were: float32 and float64, no rounding. Whoever writes them does it beside the run; whoever reads gets `Samples` again.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from executor.origin import origin
from lab.errors import InputError
from lab.scenario import Scenario
from lab.wiring import batches

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER, SCHEMA_VERSION = "records", 1
REMEDY = "restore the file from a copy, or run the scenario again"


def path_of(folder: Path, step: int) -> Path:
    """The record of a step of the run in `folder`."""
    return folder / FOLDER / f"step-{step:06d}.parquet"


def steps_of(folder: Path) -> list[int]:
    """The steps of which the run in `folder` keeps records, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / FOLDER).glob("step-*.parquet"))


def write(folder: Path, scenario: Scenario, samples: Samples, created_at: datetime | None = None) -> Path:
    """Writes the record of `samples.step` below the run's `folder` in one move; an earlier one is replaced.

    `created_at`: when the samples were generated or read, now where nothing is said. Raises OSError where the file
    system refuses, with nothing half-written left behind.
    """
    import pyarrow.parquet as pq

    path = path_of(folder, samples.step)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    try:
        table = _table(scenario, samples, created_at or datetime.now(UTC))
        pq.write_table(table, part, compression="zstd", write_page_checksum=True)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return path


def _table(scenario: Scenario, samples: Samples, created_at: datetime) -> pa.Table:
    import pyarrow as pa

    columns = _identity(scenario, samples, created_at) | _tokens(samples) | _sampling(scenario, samples)
    columns |= {name: _column(values) for name, values in samples.columns.items()}
    about = {"schema_version": SCHEMA_VERSION, "digest": scenario.digest, "scenario": scenario.name}
    about |= {"step": samples.step, "policy_version": samples.policy_version, "columns": list(samples.columns)}
    table = pa.table(columns)
    return table.replace_schema_metadata({"record": json.dumps(about), "sha256": _seal(table, json.dumps(about))})


def _seal(table: pa.Table, about: str) -> str:
    """SHA-256 over every name and number of a record: pages have checksums of their own, the file's footer has none."""
    found = hashlib.sha256(about.encode())
    for field in table.schema:
        found.update(field.name.encode())
        if _is_text(field):
            found.update("\0".join(table.column(field.name).to_pylist()).encode())
            continue
        values = _values(table, field.name)
        rows = values if isinstance(values, list) else [values]
        found.update(f"{rows[0].dtype} {[len(row) for row in rows]}".encode() if rows else b"")
        found.update(np.concatenate(rows).tobytes() if rows else b"")
    return found.hexdigest()


def _identity(scenario: Scenario, samples: Samples, created_at: datetime) -> dict[str, Any]:
    """Who made a sample: ids, and the weights behind it and behind its scores."""
    import pyarrow as pa

    number, step = len(samples), samples.step
    places = zip(samples.prompts.tolist(), samples.indices.tolist(), strict=True)
    versions = samples.columns.get("versions", np.full(number, samples.policy_version))
    return {
        "rollout_id": [f"{scenario.digest}/{step}/{prompt}/{index}" for prompt, index in places],
        "prompt_id": prompt_ids(samples),
        "step": np.full(number, step),
        "policy_version": versions,
        "created_at": pa.array([created_at] * number, pa.timestamp("us", tz="UTC")),
    } | _behind(scenario, versions)


def _behind(scenario: Scenario, versions: NDArray[np.int64]) -> dict[str, Any]:
    """By role, the weights behind each sample, of which a batch that was made without a barrier has several."""
    import pyarrow as pa

    known, rows = np.unique(versions, return_inverse=True)
    said = [checkpoints(scenario, int(version)) for version in known]
    found = {}
    for role in said[0] if said else ():
        texts, places = np.unique([roles[role] for roles in said], return_inverse=True)
        chosen = pa.array(places[rows].astype(np.int32))
        found[f"{role}_checkpoint"] = pa.DictionaryArray.from_arrays(chosen, pa.array(texts.tolist()))
    return found


def checkpoints(scenario: Scenario, policy_version: int) -> dict[str, str]:
    """By role, the weights behind the samples of a version, as one line.

    The first weights are `FOLDER#HASH` or `random:SEED` (see executor.origin); version n + 1 of the actor is
    `DIGEST/step-n`, what step n of this scenario made of them and what its checkpoint of that step holds; so of a reward
    model under training. A reward that is a function is `function:NAME`. Roles that the scenario does not have are left out.
    """
    found = {role: _origin(scenario, role) for role in scenario.algorithm.roles if _has_model(scenario, role)}
    if policy_version > 0:
        made = f"{scenario.digest}/step-{policy_version * batches(scenario) - 1:06d}"
        found |= {role: made for role in scenario.algorithm.trains if role in found}
    place = scenario.place.reward_score
    if "reward" not in found and "reward" in scenario.algorithm.roles and place is not None:
        found["reward"] = f"{place.kind}:{place.function or ''}"
    return {role: found[role] for role in ("actor", "reference", "reward") if role in found}


def _has_model(scenario: Scenario, role: str) -> bool:
    return role != "reward" or role in scenario.algorithm.trains or not scenario.place.reward_function


def _origin(scenario: Scenario, role: str) -> str:
    start = origin(scenario, role)
    return f"random:{start.seed}" if start.weights == "random" else f"{start.weights}#{_content(Path(start.weights))}"


@cache
def _content(folder: Path) -> str:
    """16 hex digits of SHA-256 over the weight files of a folder, read once."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def prompt_ids(samples: Samples) -> list[str]:
    """Of each sample, 16 hex digits of SHA-256 over its prompt's tokens: the same prompt has the same id in every step."""
    parts = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
    prompts = [tokens[:length].astype("<i8").tobytes() for tokens, length in parts]
    return [hashlib.sha256(prompt).hexdigest()[:16] for prompt in prompts]


def _tokens(samples: Samples) -> dict[str, Any]:
    """Tokens of prompt and response; the mask is 1 at each of them, for rows are stored without padding."""
    return {
        "prompt": samples.prompts,
        "index": samples.indices,
        "num_prompt_tokens": samples.num_prompt_tokens,
        "tokens": _ragged([tokens.astype(np.int32) for tokens in samples.tokens]),
        "attention_mask": _ragged([np.ones(length, dtype=np.int8) for length in samples.lengths]),
        "token_log_probs": _ragged(samples.logprobs),
    }


def _sampling(scenario: Scenario, samples: Samples) -> dict[str, Any]:
    config = json.dumps(scenario.sampling.model_dump(mode="json", by_alias=True))
    return {
        "sampling": _repeated(config, len(samples)),
        "temperature": samples.temperatures,
        "seed": samples.seeds,
    }


def _repeated(text: str, number: int) -> Any:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(number, dtype=np.int32)), pa.array([text]))


def _column(values: Any) -> Any:
    return _ragged(values) if isinstance(values, list) else np.asarray(values)


def _ragged(rows: list[NDArray[Any]]) -> Any:
    """One list per sample. An empty list of rows has no type of its own and becomes float32."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    flat = np.concatenate([np.asarray(row) for row in rows]) if rows else np.empty(0, dtype=np.float32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))


def read(path: Path, digest: str | None = None) -> Samples:
    """The samples of a record, bit for bit as they were trained on.

    Raises InputError where the file is missing, damaged (every page has a checksum), or of another scenario than `digest`.
    """
    table, about = load(path)
    if digest is not None and about["digest"] != digest:
        problem = f"it is of the scenario with digest {about['digest']}, not {digest}"
        raise InputError(file=str(path), problem=problem, remedy=REMEDY)
    try:
        return _samples(table, about)
    except (KeyError, ValueError) as error:
        raise InputError(file=str(path), problem=f"it is no record: {error}", remedy=REMEDY) from None


def load(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """The rows of a record, and what it says about itself. Raises InputError as `read` does."""
    import pyarrow.parquet as pq

    if not path.is_file():
        steps = steps_of(path.parent.parent)
        kept = f"there are records of steps {steps[0]} to {steps[-1]}" if steps else "the run keeps no records"
        raise InputError(file=str(path), problem="there is no such record", remedy=f"name another step: {kept}")
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        text = (table.schema.metadata or {})[b"record"].decode()
        about = json.loads(text)
        if _seal(table, text) != table.schema.metadata[b"sha256"].decode():
            raise ValueError("its content is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # pyarrow's errors are among them
        raise InputError(file=str(path), problem=f"it is damaged: {error}", remedy=REMEDY) from None
    if about.get("schema_version") != SCHEMA_VERSION:
        problem = f"it has schema version {about.get('schema_version')}, this program reads {SCHEMA_VERSION}"
        raise InputError(file=str(path), problem=problem, remedy="read it with the version that wrote it")
    return table, about


def _samples(table: pa.Table, about: dict[str, Any]) -> Samples:
    return Samples(
        step=about["step"], policy_version=about["policy_version"],
        prompts=_array(table, "prompt"), num_prompt_tokens=_array(table, "num_prompt_tokens"),
        tokens=[row.astype(np.int64) for row in _rows(table, "tokens")], logprobs=_rows(table, "token_log_probs"),
        indices=_array(table, "index"), temperatures=_array(table, "temperature"), seeds=_array(table, "seed"),
        columns={name: _values(table, name) for name in about["columns"]},
    )  # fmt: skip


def _values(table: pa.Table, name: str) -> Any:
    import pyarrow as pa

    return _rows(table, name) if pa.types.is_list(table.schema.field(name).type) else _array(table, name)


def _array(table: pa.Table, name: str) -> NDArray[Any]:
    found: NDArray[Any] = table.column(name).to_numpy()
    return found


def _rows(table: pa.Table, name: str) -> list[NDArray[Any]]:
    """One array per sample, each with memory of its own."""
    column = table.column(name).combine_chunks()
    flat, ends = column.flatten().to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [flat[start:end].copy() for start, end in pairwise(ends.tolist())]


def export(path: Path, target: Path) -> None:
    """Writes the raw experience of a record to `target`: .parquet as it is, .jsonl one object a sample, .npz arrays with
    an `NAME.ends` beside each ragged one. Raises InputError for another ending, or where `target` cannot be written.
    """
    table, about = load(path)
    if target.suffix not in EXPORTS:
        problem = f"no format is known by the ending {target.suffix or 'of this name'}"
        raise InputError(file=str(target), problem=problem, remedy=f"end it in {', '.join(EXPORTS)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        EXPORTS[target.suffix](table, about, target)
    except OSError as error:
        remedy = "name a file that can be written"
        raise InputError(file=str(target), problem=str(error.strerror or error), remedy=remedy) from None


def _parquet(table: pa.Table, about: dict[str, Any], target: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, target, compression="zstd", write_page_checksum=True)


def _jsonl(table: pa.Table, about: dict[str, Any], target: Path) -> None:
    with target.open("w") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in table.to_pylist())


def _npz(table: pa.Table, about: dict[str, Any], target: Path) -> None:
    found: dict[str, Any] = {}
    for field in table.schema:
        is_text = _is_text(field)
        values = np.asarray(table[field.name].to_pylist(), dtype=str) if is_text else _values(table, field.name)
        if isinstance(values, list):
            found[f"{field.name}.ends"] = np.cumsum([len(row) for row in values])
            values = np.concatenate(values)
        found[field.name] = values
    with target.open("wb") as file:
        np.savez_compressed(file, **found)


def _is_text(field: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(field.type) or pa.types.is_dictionary(field.type))


EXPORTS = {".parquet": _parquet, ".jsonl": _jsonl, ".npz": _npz}
