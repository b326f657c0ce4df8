from hypothesis import given
from hypothesis import strategies as st

from executor.tokenizer import CHARACTERS, IDS, UNK, build_tokenizer, encode


def test_exactly_64_ids_without_gaps() -> None:
    assert sorted(IDS.values()) == list(range(64))
    assert len(build_tokenizer()) == 64


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_known_characters_survive_encoding_and_decoding(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40))
def test_the_light_encoding_is_the_real_one(text: str) -> None:
    assert encode(text) == build_tokenizer().encode(text)


def test_unknown_characters_become_one_id_each() -> None:
    assert encode("aÉZ") == [IDS["a"], IDS[UNK], IDS[UNK]]
