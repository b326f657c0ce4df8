"""The built-in vocabulary: four special tokens and sixty characters, 64 ids in all."""

from __future__ import annotations

import string

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNK)
CHARACTERS = string.ascii_lowercase + string.digits + " \n" + ".,:;!?'\"()+-*/=<>[]_#%"
IDS: dict[str, int] = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
"""id of every token"""


def encode(text: str) -> list[int]:
    """Ids of a text's characters; unknown ones become `<unk>`."""
    return [IDS.get(character, IDS[UNK]) for character in text]
