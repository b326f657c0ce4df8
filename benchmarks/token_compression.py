"""How far do Zstandard and LZ4 shrink token ids? Measured on the documentation of the packages that are installed.

A byte-level BPE of 32,000 tokens is trained on the docstrings of some packages; the docstrings of others, and the long
descriptions of all, are then tokenised and compressed: as one sample of 800 tokens, and as batches of 64 and 1,024.
Prints YAML; `lab/library/token_compression.yaml` holds the result, from which claims are judged.
"""

from __future__ import annotations

import ast
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

VOCABULARY = 32_000
TRAINED_ON = ("pandas", "scipy", "sklearn", "torch", "transformers", "sympy", "networkx", "vllm", "ray")
HELD_OUT = ("numpy", "matplotlib", "plotly", "pyarrow", "numba", "streamlit", "altair", "pydantic", "simpy")
SAMPLE_TOKENS = 800
BATCHES = (1, 64, 1024)
WIDTHS = {"int64": np.int64, "int32": np.int32, "uint16": np.uint16}
CODECS = {"zstd-1": ("zstd", 1), "zstd-3": ("zstd", 3), "zstd-19": ("zstd", 19), "lz4": ("lz4", None)}


def docstrings(package: str) -> Iterator[str]:
    """Docstrings of a package's modules, classes and functions, of 200 characters and more."""
    for folder in sys.path:
        for file in sorted((Path(folder) / package).rglob("*.py")) if folder else ():
            try:
                tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
            except (SyntaxError, ValueError, RecursionError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 200:
                        yield text


def descriptions() -> list[str]:
    """The long descriptions of all installed packages, each once."""
    found = {str(one.metadata["Name"]): (one.metadata.get_payload() or "") for one in distributions()}
    return [str(text) for _, text in sorted(found.items()) if len(str(text)) >= 200]


def trained(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def saved(data: bytes, codec: str, level: int | None) -> tuple[float, float]:
    """Share of the bytes that compression saves, and the bytes a second that one core compresses."""
    chosen = pa.Codec(codec, level) if level is not None else pa.Codec(codec)
    begun = time.perf_counter()
    small = chosen.compress(data, asbytes=True)
    return 1 - len(small) / len(data), len(data) / (time.perf_counter() - begun)


def measured(tokens: np.ndarray, text_bytes: float) -> list[dict[str, Any]]:
    """Rows of batch, width and codec; of small batches the median of up to 21."""
    rows = []
    for batch in BATCHES:
        size = batch * SAMPLE_TOKENS
        parts = [tokens[i * size : (i + 1) * size] for i in range(min(21, len(tokens) // size))]
        for width, kind in WIDTHS.items():
            for name, (codec, level) in CODECS.items():
                found = np.array([saved(part.astype(kind).tobytes(), codec, level) for part in parts])
                share, speed = np.median(found, axis=0)
                rows.append({"samples": batch, "ids": width, "codec": name, "saved": round(float(share), 4),
                             "MB_per_s": round(float(speed) / 1e6)})  # fmt: skip
    return rows


def main() -> None:
    train = [text for package in TRAINED_ON for text in docstrings(package)]
    tokenizer = trained(train)
    held = [text for package in HELD_OUT for text in docstrings(package)] + descriptions()
    np.random.default_rng(0).shuffle(held)
    ids = [np.array(one.ids) for one in tokenizer.encode_batch(held)]
    tokens, size = np.concatenate(ids), sum(len(text.encode()) for text in held)
    _, counts = np.unique(tokens, return_counts=True)
    entropy = float(-(counts / counts.sum() * np.log2(counts / counts.sum())).sum())
    text = "".join(held).encode()
    print(yaml.safe_dump({
        "what": "share of bytes that compression saves on token ids of English documentation",
        "source": "benchmarks/token_compression.py", "measured": time.strftime("%Y-%m-%d"),
        "software": {name: version(name) for name in ("tokenizers", "pyarrow", "numpy")} | {"python": platform.python_version()},
        "vocabulary": tokenizer.get_vocab_size(), "trained_on_bytes": sum(len(one.encode()) for one in train),
        "tokens": len(tokens), "text_bytes_per_token": round(size / len(tokens), 3),
        "entropy_bits_per_token": round(entropy, 3),
        "text": {name: round(saved(text, *how)[0], 4) for name, how in CODECS.items()},
        "rows": measured(tokens, size),
    }, sort_keys=False, width=120))  # fmt: skip


if __name__ == "__main__":
    main()
