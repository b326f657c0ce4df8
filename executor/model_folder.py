"""Whether a folder holds the weights of a network, told before anything starts. Plain numpy: no torch in the driver."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab import hf_config
from lab.errors import InputError
from lab.hf_config import MODEL_TYPES
from lab.load import present
from lab.model import ModelSpec
from lab.tokenizing import FILE as TOKENIZER
from lab.tokenizing import tokenizer

Problem = tuple[str, str]
"""what is wrong, and what would be right"""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHAPE = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "tied_embeddings")
BYTES = {
    "F64": 8,
    "F32": 4,
    "I64": 8,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
}
"""of one number, by safetensors' names of types"""
NOT_FINITE = {
    "F64": (np.uint64, 0x7FF0000000000000), "F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80), "F8_E4M3": (np.uint8, 0x7F), "F8_E5M2": (np.uint8, 0x7C),
}  # fmt: skip
"""bits that are all set in numbers that are NaN or infinite, by type (E4M3 has no infinity)"""
_CHUNK = 1 << 24
_NOT_PARAMETERS = ("rotary_emb.inv_freq",)
HEAD = "value_head"
KNOWN = ("llama", "qwen2")
"""kinds of networks whose tensors are compared by name"""
POSITIVE = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
"""of a config.json: numbers that its shape does not say"""
_OTHER = ("adapter*.safetensors", "*.bin", "*.pt")
_OTHER_SAID = {
    ".safetensors": "adapters alone start no network",
    ".bin": "pickled weights are not read",
    ".pt": "pickled weights are not read",
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An entry of a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    """of its bytes in the file"""
    end: int

    @property
    def number(self) -> int:
        """Of its elements."""
        return math.prod(self.shape)

    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite; whole numbers always are."""
        if self.dtype not in NOT_FINITE or self.number == 0:
            return True
        kind, bits = NOT_FINITE[self.dtype]
        held: NDArray[Any] = np.memmap(self.file, dtype=kind, mode="r", offset=self.begin, shape=(self.number,))
        parts = (held[i : i + _CHUNK] for i in range(0, self.number, _CHUNK))
        return not any(bool(np.any((part & kind(bits)) == kind(bits))) for part in parts)


def problems(folder: Path, spec: ModelSpec, *, writes: bool = True) -> Iterator[Problem]:
    """What keeps a folder from being the weights of a network of this shape; `writes`: one that needs logits."""
    remedy = "name a folder with config.json and safetensors, as Hugging Face and `lab execute` write it"
    try:
        if not present(folder, "a folder with weights").is_dir():
            yield f"{folder} is no folder", remedy
            return
        if not (folder / "config.json").is_file():
            yield f"{folder} has no config.json", remedy
            return
        yield from _shape(folder, spec)
        yield from _tensors(folder, spec, writes)
        yield from _vocabulary(folder, spec)
    except InputError as error:
        place = ":".join(str(part) for part in (error.file, error.line, error.key) if part is not None)
        yield f"{place}: {error.problem}", error.remedy or remedy
    except OSError as error:
        yield f"{folder} cannot be read: {error.strerror or error}", remedy


def _shape(folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    found, said = hf_config.read(folder / "config.json"), json.loads((folder / "config.json").read_text("utf-8"))
    for name in POSITIVE:
        value = said.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            problem = f"{folder / 'config.json'}: {name} is {json.dumps(value)[:40]}, which is no number above 0"
            yield problem, "use the config.json that the model was published with"
    kind, listed = said.get("model_type"), said.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else None
    if kind in KNOWN and named not in (None, MODEL_TYPES[kind]):
        problem = f"{folder / 'config.json'}: model_type is {kind}, and architectures names {named}"
        yield problem, "use the config.json that the model was published with"
    for name in SHAPE:
        if getattr(found, name) != getattr(spec, name):
            problem = f"{folder} has {name} {getattr(found, name)}, the architecture has {getattr(spec, name)}"
            yield problem, f"set `arch: {folder}/config.json`, or name another folder"


def _tensors(folder: Path, spec: ModelSpec, writes: bool) -> Iterator[Problem]:
    tensors = [tensor for file in _files(folder) for tensor in read_header(file)]
    own = [tensor for tensor in tensors if not tensor.file.name.startswith(HEAD) and _is_parameter(tensor.name)]
    number, head = sum(tensor.number for tensor in own), spec.vocabulary * spec.hidden
    possible = {spec.parameters} | ({spec.parameters + head} if spec.tied_embeddings else set())
    possible |= set() if writes or spec.tied_embeddings else {spec.parameters - head}
    embeddings = [tensor for tensor in own if tensor.name.endswith("embed_tokens.weight")]
    for tensor in embeddings:
        if tensor.shape != (spec.vocabulary, spec.hidden):
            problem = f"{tensor.name} in {tensor.file} is {list(tensor.shape)}"
            yield problem, f"its config.json says {[spec.vocabulary, spec.hidden]}: save config and weights together"
            return
    for tensor in own:
        if tensor.dtype not in NOT_FINITE:
            yield f"{tensor.name} in {tensor.file} has numbers of type {tensor.dtype}", "save all weights as floats"
            return
    if number not in possible:
        problem = f"{folder} holds {number} parameters, the architecture has {spec.parameters}"
        problem += ": it has no LM head, as a critic's" if number == spec.parameters - head else ""
        yield problem, "name a folder with all weights of this architecture"
    if number in possible and (odd := _odd(own, folder, spec)):
        yield odd, "save config and weights together, with the names of Hugging Face"
    for tensor in tensors:
        if not tensor.is_finite():
            problem = f"{tensor.name} in {tensor.file} has numbers that are NaN or infinite"
            yield problem, "name weights from before the training diverged"
            return


def _odd(own: list[Tensor], folder: Path, spec: ModelSpec) -> str | None:
    """The first tensor that the network of this shape does not have, or has in another shape; None of other kinds of
    networks than those whose names are known."""
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") not in KNOWN:
        return None
    expected = _expected(spec)
    for tensor in own:
        name = tensor.name.split("layers.", 1)[-1].removeprefix("model.").removeprefix("trunk.")
        shape = expected.get(name.split(".", 1)[-1] if "layers." in tensor.name else name)
        if shape is None:
            return f"{tensor.name} in {tensor.file} is no part of this architecture"
        if tensor.shape != shape:
            return f"{tensor.name} in {tensor.file} is {list(tensor.shape)}, the architecture has {list(shape)}"
    return None


def _expected(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices and vectors of Llama and Qwen2 networks, those of a layer without its place."""
    hidden, queries, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (spec.vocabulary, hidden), "lm_head.weight": (spec.vocabulary, hidden),
        "norm.weight": (hidden,), "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (spec.intermediate, hidden), "mlp.up_proj.weight": (spec.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, spec.intermediate),
    }  # fmt: skip
    for name, width in (("q", queries), ("k", keys), ("v", keys)) if spec.qkv_bias else ():
        found[f"self_attn.{name}_proj.bias"] = (width,)
    return found


def _is_parameter(name: str) -> bool:
    return not name.startswith(f"{HEAD}.") and not name.endswith(_NOT_PARAMETERS)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one. Raises InputError where there is none."""
    if (folder / INDEX).is_file():
        try:
            found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in found.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(file=str(folder / INDEX), problem=f"cannot be read: {error}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(file=str(folder / missing[0]), problem="the index names it, and there is no such file")
        return [folder / name for name in names]
    if not (folder / WEIGHTS).is_file():
        others = sorted(path for name in _OTHER for path in folder.glob(name))
        problem = f"{others[0].name}: {_OTHER_SAID[others[0].suffix]}" if others else f"it has no {WEIGHTS}"
        raise InputError(file=str(folder), problem=problem, remedy="save all weights as safetensors")
    return [folder / name for name in (WEIGHTS, f"{HEAD}.safetensors") if (folder / name).is_file()]


def read_header(file: Path) -> list[Tensor]:
    """The entries of a safetensors file. Raises InputError where it is none, or is cut off."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, 100_000_000):
                raise ValueError("the header is longer than the file")
            entries = json.loads(opened.read(length))
        entries.pop("__metadata__", None)
        tensors = [_entry(file, name, about, 8 + length, size) for name, about in entries.items()]
        _gapless(tensors, 8 + length, size)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        remedy = "copy or save the file again"
        raise InputError(file=str(file), problem=f"no whole safetensors file: {error}", remedy=remedy) from None


def _gapless(tensors: list[Tensor], start: int, size: int) -> None:
    """Raises ValueError where the tensors do not follow each other up to the end of the file, as the format has it."""
    for tensor in sorted(tensors, key=lambda one: (one.begin, one.end)):
        if tensor.begin != start:
            raise ValueError(f"{tensor.name} begins at byte {tensor.begin}, what is before it ends at {start}")
        start = tensor.end
    if start != size:
        raise ValueError(f"the tensors end at byte {start}, the file at {size}")


def _entry(file: Path, name: str, about: dict[str, Any], start: int, size: int) -> Tensor:
    first, last = about["data_offsets"]
    tensor = Tensor(
        name=name, dtype=about["dtype"], shape=tuple(about["shape"]), file=file, begin=start + first, end=start + last
    )  # fmt: skip
    if start + last > size:
        raise ValueError(f"it ends within {name}")
    if last - first != tensor.number * BYTES.get(tensor.dtype, (last - first) // max(tensor.number, 1)):
        raise ValueError(f"{name} has {last - first} bytes for {list(tensor.shape)} of {tensor.dtype}")
    return tensor


def _vocabulary(folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    """Whether the folder's own tokenizer fits."""
    if (folder / TOKENIZER).is_file():
        yield from too_large(folder, spec)


def too_large(folder: Path, spec: ModelSpec) -> Iterator[Problem]:
    """What a tokenizer's folder and a network's vocabulary have against each other."""
    number = tokenizer(str(folder)).vocabulary
    if number > spec.vocabulary:
        problem = f"the tokenizer in {folder} has {number} tokens, the model a vocabulary of {spec.vocabulary}"
        yield problem, "use the tokenizer that the model was trained with"
