"""A character tokenizer of exactly 64 ids: four special tokens and sixty characters. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.characters import BOS, CHARACTERS, EOS, IDS, PAD, SPECIAL, UNK, encode

__all__ = ["BOS", "CHARACTERS", "EOS", "IDS", "PAD", "SPECIAL", "UNK", "build_tokenizer", "encode", "save_tokenizer"]


def build_tokenizer() -> Any:
    """The same vocabulary as a `transformers.PreTrainedTokenizerFast`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(vocab=IDS, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer in Hugging Face's layout."""
    build_tokenizer().save_pretrained(str(folder))
