"""What of the models and the data that a scenario names cannot be used: folders of weights, tokenizers, files of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from executor.model_folder import problems, too_large
from executor.origin import origin
from executor.prompts import filed
from executor.tokenizer import IDS
from lab.data import tokenizer_folder
from lab.errors import InputError
from lab.model import ModelSpec
from lab.rows import Row
from lab.scenario import Scenario

VALUE_HEAD = "value_head.safetensors"
"""of a critic or a reward model, beside the weights of its trunk"""
MAX_POSITIONS = 4096
"""tokens of the longest sequence that the networks are built for"""

Refusal = tuple[str, str, str]


def roles(scenario: Scenario) -> list[str]:
    """Those that are a network: the reward may be a function."""
    used = scenario.algorithm.roles
    return [role for role in used if role != "reward" or role in scenario.trained or not scenario.place.reward_function]


def models(scenario: Scenario) -> Iterator[Refusal]:
    """Networks that cannot be built or loaded, and vocabularies that do not fit."""
    seen: set[tuple[str, ModelSpec, bool]] = set()
    for role in roles(scenario):
        model, start = scenario.model(role), origin(scenario, role)
        if model.dtype != "float32" and (model.dtype != "int8" or role in scenario.trained):
            yield f"models.{role}.dtype", f"{model.dtype} is not executed on a CPU", "set `dtype: float32`"
        wanted = (start.weights, start.spec, role in ("actor", "reference"))
        if start.weights != "random" and wanted not in seen:
            seen.add(wanted)
            for problem, remedy in problems(Path(start.weights), start.spec, writes=wanted[-1]):
                yield f"models.{role}.weights", problem, remedy
        if role == "reward" and role not in scenario.trained and _headless(start.weights):
            problem = f"{start.weights} has no {VALUE_HEAD}: nothing in it was trained to judge"
            yield f"models.{role}.weights", problem, "name what `algorithm: {name: reward_model}` trained: …/reward-0"
        if start.weights == "random" and (unbuilt := _unbuilt(start.spec)):
            problem = f"networks drawn from a seed have no {', '.join(unbuilt)}"
            yield f"models.{role}.arch", problem, "choose a Llama or Qwen2 shape, or name a folder with `weights`"
        yield from _vocabulary(scenario, role, start.spec)
    yield from _tokenizers(scenario)
    if (tokens := scenario.workload.max_sequence_tokens) > (most := positions(scenario)):
        problem = f"sequences of {tokens} tokens; at most {most} are executed"
        yield "workload.response_tokens", problem, "shorten prompts or responses"


def _tokenizers(scenario: Scenario) -> Iterator[Refusal]:
    """Folders of tokenizers that cannot be read, or have more tokens than the model that names them."""
    for role in roles(scenario):
        if (folder := scenario.model(role).tokenizer) is None:
            continue
        try:
            for problem, remedy in too_large(Path(folder), origin(scenario, role).spec):
                yield f"models.{role}.tokenizer", problem, remedy
        except InputError as error:
            remedy = error.remedy or "name a folder with the model's tokenizer"
            yield f"models.{role}.tokenizer", f"{error.file}: {error.problem}", remedy


def _headless(weights: str) -> bool:
    """Whether a folder with a network says nothing of how it judges."""
    return weights != "random" and Path(weights).is_dir() and not (Path(weights) / VALUE_HEAD).is_file()


def _vocabulary(scenario: Scenario, role: str, spec: ModelSpec) -> Iterator[Refusal]:
    folder = tokenizer_folder(scenario) if scenario.data.source is not None else None
    if folder is None and spec.vocabulary < len(IDS):
        problem = f"a vocabulary of {spec.vocabulary} is smaller than the tokenizer's {len(IDS)}"
        yield f"models.{role}.arch", problem, "choose a larger one, for example tiny-llama"
    for problem, remedy in too_large(Path(folder), spec) if folder is not None else ():
        yield f"models.{role}.arch", problem, remedy


def _unbuilt(spec: ModelSpec) -> list[str]:
    """What a shape has beyond the Llama and Qwen2 networks that are built from a seed."""
    built = {"tied_embeddings", "qkv_bias", "source"}
    own = {name: field.default for name, field in ModelSpec.model_fields.items() if not field.is_required()}
    return [name for name, default in own.items() if name not in built and getattr(spec, name) != default]


def positions(scenario: Scenario) -> int:
    """Tokens of the longest sequence that all networks of a scenario read: one position is kept free."""
    folders = {origin(scenario, role).weights for role in roles(scenario)} - {"random"}
    return min([MAX_POSITIONS, *(_stated(Path(folder)) for folder in folders)]) - 1


def _stated(folder: Path) -> int:
    """The positions that a folder's config.json states."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # told by `problems`
        found = None
    return found if isinstance(found, int) else MAX_POSITIONS


def data(scenario: Scenario) -> Iterator[Refusal]:
    """Rows that the models cannot read, and evaluations that need more rows than were held out.

    Raises InputError where the file is not the one that the scenario was read with.
    """
    if (source := scenario.data.source) is None:
        return
    kept, held_out = filed(scenario)
    most = positions(scenario) - (scenario.workload.response_tokens.max if source == "prompts" else 0)
    for row in _longer([*kept, *held_out], most):
        what = "a prompt" if source == "prompts" else "a prompt and its response"
        remedy = f"shorten it, or set `data.max_tokens: {most}` and `on_broken: skip`"
        raise InputError(
            file=str(scenario.data.file), line=row.line, key=f"data.{source}", remedy=remedy,
            problem=f"{what} of {row.num_tokens} tokens, the models read {most}",
        )  # fmt: skip
    wanted, together = scenario.evaluate, scenario.algorithm.together
    needed = wanted.prompts if source == "prompts" else wanted.num_samples // together
    if wanted.every_steps is not None and needed > len(held_out):
        problem = f"an evaluation of {needed} rows, of the file {len(held_out)} are held out"
        most = len(held_out) if source == "prompts" else len(held_out) * together // wanted.samples_per_prompt
        remedy = f"set it to {most}, or raise data.held_out_share" if most else "remove `evaluate`, or use more rows"
        yield "evaluate.prompts", problem, remedy


def _longer(rows: list[Row], most: int) -> list[Row]:
    """The first row with more tokens, by its place in the file."""
    return sorted((row for row in rows if row.num_tokens > most), key=lambda row: row.line)[:1]
