import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.characters import BOS, EOS, IDS
from lab.errors import InputError
from lab.rows import FIELDS, Row, Rows, Source, read
from lab.tokenizing import tokenizer

CHARACTERS = tokenizer(None)
PAIR = {"prompt": "ab", "chosen": "aa", "rejected": "b"}


def written(folder: Path, lines: list[Any], raw: bytes = b"") -> Path:
    path = folder / "data.jsonl"
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + raw)
    return path


def rows(path: Path, source: Source = "preferences", **said: Any) -> Rows:
    return read(path, source, CHARACTERS, **({"max_tokens": None, "skip": False} | said))


def test_a_pair_is_read_into_ids(tmp_path: Path) -> None:
    found = rows(written(tmp_path, [PAIR | {"topic": "letters", "other": 3}])).rows
    ids = [IDS[character] for character in "ab"]
    assert found[0].prompt == [IDS[BOS], *ids]
    assert found[0].responses == [[ids[0], ids[0], IDS[EOS]], [ids[1], IDS[EOS]]]
    assert found[0].about == {"topic": "letters"}
    assert found[0].num_tokens == 6


@pytest.mark.parametrize("source", FIELDS)
def test_every_kind_of_file_asks_for_its_fields(tmp_path: Path, source: Source) -> None:
    whole = {name: name for name in FIELDS[source]} | {"label": True}
    assert len(rows(written(tmp_path, [whole, whole]), source).rows) == 2
    for name in FIELDS[source]:
        with pytest.raises(InputError) as told:
            rows(written(tmp_path, [whole, {key: value for key, value in whole.items() if key != name}]), source)
        assert (told.value.line, told.value.key) == (2, name)


BROKEN: list[tuple[bytes, str | None, str]] = [
    (b'{"prompt": "a"', None, "not valid JSON"),
    (b"[1, 2]", None, "not a JSON object"),
    (b'{"prompt": "\xff", "chosen": "a", "rejected": "b"}', None, "byte 12 of the line is not UTF-8"),
    (b'{"prompt": "", "chosen": "a", "rejected": "b"}', "prompt", "empty"),
    (b'{"prompt": "  ", "chosen": "a", "rejected": "b"}', "prompt", "empty"),
    (b'{"prompt": 3, "chosen": "a", "rejected": "b"}', "prompt", "3 is not text"),
    (b'{"prompt": "a", "chosen": null, "rejected": "b"}', "chosen", "null is not text"),
    (b'{"prompt": "a", "chosen": "b", "rejected": "b"}', "rejected", "the same"),
    (b'{"prompt": "\\ud800", "chosen": "a", "rejected": "b"}', "prompt", "not Unicode"),
    (b'{"prompt": "a", "chosen": "aaaaaaaaa", "rejected": "b"}', None, "12 tokens, at most 8"),
    (b'{"prompt": "a", "chosen": "aa", "rejected": "b", "topic": 1}', "topic", "not text"),
    (b'{"prompt": "a", "chosen": "aa", "rejected": "b", "kind": "odd"}', "kind", "'odd' is unknown"),
    (b"[" * 100_000, None, "not valid JSON"),
]


@pytest.mark.parametrize(("line", "key", "problem"), BROKEN)
def test_a_broken_line_is_told_with_its_number(tmp_path: Path, line: bytes, key: str | None, problem: str) -> None:
    path = written(tmp_path, [PAIR], b"\n" + line + b"\n" + json.dumps(PAIR).encode())
    with pytest.raises(InputError) as told:
        rows(path, max_tokens=8)
    assert (told.value.file, told.value.line, told.value.key) == (str(path), 3, key)
    assert problem in told.value.problem
    assert "data.on_broken: skip" in str(told.value.remedy)
    found = rows(path, max_tokens=8, skip=True)
    assert [row.line for row in found.rows] == [1, 4]
    assert list(found.skipped) == [3]


@pytest.mark.parametrize("label", [None, 2, "yes", 0.5, 1.0])
def test_a_label_is_true_or_false(tmp_path: Path, label: Any) -> None:
    fine = {"prompt": "a", "response": "b", "label": False}
    assert [row.label for row in rows(written(tmp_path, [fine, fine | {"label": 1}]), "labels").rows] == [0, 1]
    with pytest.raises(InputError, match="is no label"):
        rows(written(tmp_path, [fine | {"label": label}]), "labels")


@pytest.mark.parametrize("held", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, held: bytes) -> None:
    with pytest.raises(InputError, match="the file is empty"):
        rows(written(tmp_path, [], held))


def test_a_file_of_broken_lines_alone_is_refused_although_they_may_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all 1 lines are broken"):
        rows(written(tmp_path, [3]), skip=True)


def test_a_missing_file_is_told_with_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, [PAIR])
    with pytest.raises(InputError) as told:
        rows(tmp_path / "date.jsonl")
    assert "data.jsonl" in str(told.value.remedy)


@given(number=st.integers(1, 60), share=st.floats(0, 0.5), seed=st.integers(0, 99))
def test_what_is_held_out_is_never_trained_on(number: int, share: float, seed: int) -> None:
    every = [Row(line=i, prompt=[i], responses=[]) for i in range(number)]
    kept, apart = Rows(rows=every, sha256="", skipped={}).split(share, seed)
    assert sorted(row.line for row in [*kept, *apart]) == list(range(number))
    assert kept
    assert len(apart) == 0 or share > 0
    assert abs(len(apart) - share * number) <= 1


@given(
    prompts=st.lists(st.integers(0, 8), min_size=2, max_size=60), share=st.floats(0.01, 0.5), seed=st.integers(0, 99)
)
def test_no_prompt_is_trained_on_and_held_out(prompts: list[int], share: float, seed: int) -> None:
    every = [Row(line=i, prompt=[1, prompt], responses=[]) for i, prompt in enumerate(prompts)]
    kept, apart = Rows(rows=every, sha256="", skipped={}).split(share, seed)
    assert sorted(row.line for row in [*kept, *apart]) == list(range(len(prompts)))
    assert not {row.prompt[1] for row in kept} & {row.prompt[1] for row in apart}
    assert kept
    assert bool(apart) == (len(set(prompts)) > 1)
    rarest = min(prompts.count(prompt) for prompt in prompts)
    assert len(apart) <= max(share * len(prompts) + 1, rarest), "a common prompt is no reason to hold out most rows"


def test_the_seed_says_what_is_held_out() -> None:
    every = Rows(rows=[Row(line=i, prompt=[i], responses=[]) for i in range(100)], sha256="", skipped={})
    first, second = ({row.line for row in every.split(0.2, seed)[1]} for seed in (0, 1))
    assert first != second
    assert first == {row.line for row in every.split(0.2, 0)[1]}
