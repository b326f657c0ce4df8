"""A character tokenizer of exactly 64 ids: four special tokens and sixty characters. Nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
CHARACTERS = string.ascii_lowercase + string.digits + " \n" + ".,:;!?'\"()+-*/=<>[]_#%"
IDS: dict[str, int] = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
"""id of every token; plain, so that a process without the tokenizer libraries can use it"""


def encode(text: str) -> list[int]:
    """Ids of a text's characters; unknown ones become `<unk>`."""
    return [IDS.get(character, IDS[UNK]) for character in text]


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
