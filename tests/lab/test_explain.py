"""Whatever stands in the place of a value, its error names line, key and value, and says what would be right."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError, WrongValue
from lab.explain import nearest, value_at
from lab.library import devices, links, models
from lab.load import content, parse, parse_record, present
from lab.measurement import OPS
from lab.records import Record
from lab.scenario import Scenario

EMPTY_WORDS = ("a value that fits", "in the schema", "correct the value")
WRONG = (math.nan, -math.inf, -1, 10**12, "junk", None, [], {"junk": 1})
CASES = [*(("quickstart", wrong) for wrong in WRONG), ("ppo-7b-16gpu", math.nan), ("ppo-7b-16gpu", "junk")]


def leaves(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything but the file itself."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def with_value(data: Any, path: tuple, value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = with_value(data[path[0]], path[1:], value)
    return copy


def block(data: Any) -> str:
    """YAML with every key on a line of its own."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=False)


@pytest.mark.parametrize(("name", "wrong"), CASES)
def test_every_value_that_is_refused_is_placed_named_and_put_right(name: str, wrong: Any) -> None:
    text = Path(f"scenarios/{name}.yaml").read_text()
    data = parse(text).model_dump(mode="json", by_alias=True, exclude_unset=True)
    refused = 0
    for path in leaves(data):
        changed = block(with_value(data, path, wrong))
        try:
            parse(changed)
        except InputError as error:
            refused += 1
            assert error.line and error.key and error.remedy
            assert not any(words in error.remedy for words in EMPTY_WORDS), str(error)
            told_of(error, path, wrong, changed)
    assert refused > 20


def told_of(error: InputError, path: tuple, wrong: Any, text: str) -> None:
    """The line holds a part of the key, and where the key is the changed one, its value is told."""
    row = text.splitlines()[(error.line or 0) - 1]
    words = re.findall(r"[^.\[\]]+", str(error.key))
    item = str(error.key).endswith("]") and row.strip().startswith("- ")
    assert item or any(f"{word}:" in row for word in words), (str(error), row)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if error.key == dotted and isinstance(wrong, float):
        assert str(wrong) in error.problem.lower(), str(error)


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (("lr: 1e-3", "lr: .inf"), "optimizer.lr", ("Infinity is not a finite number", "above 0")),
        (("64 MiB", "1e400 MiB"), "rollout.kv_bytes", ("1e400 MiB", "finite", "above 0")),
        (("64 MiB", "64 MX"), "rollout.kv_bytes", ("'64 MX'", "for example `64 MiB`")),
        (("64 MiB", "-64 MiB"), "rollout.kv_bytes", ("-64 MiB", "0 or more")),
        (("seed: 7", "seed: -7"), "seed", ("-7", "from 0 to 4294967295")),
        (("num_steps: 24", "num_steps: many"), "num_steps", ('"many"', "whole number from 1 to 1000000")),
        (("mode: synchronous", "mode: sync"), "schedule.mode", ('"sync"', "did you mean synchronous?")),
        (("name: quickstart", "name: a/b"), "name", ('"a/b"', "A-Za-z0-9")),
        (("arch: tiny-llama", "arch: tiny-lama"), "models.actor.arch", ("'tiny-lama'", "write tiny-llama")),
    ],
)
def test_remedies_give_the_range_the_unit_or_the_nearest_name(
    change: tuple[str, str], key: str, words: tuple[str, ...]
) -> None:
    text = Path("scenarios/quickstart.yaml").read_text()
    assert text.count(change[0]) == 1
    with pytest.raises(InputError) as caught:
        parse(text.replace(*change))
    assert caught.value.key == key
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(st.sampled_from(sorted({*devices(), *links(), *models(), *OPS})), st.data())
def test_a_name_without_one_letter_leads_back_to_it(name: str, data: st.DataObject) -> None:
    names = next(known for known in (devices(), links(), models(), OPS) if name in known)
    at = data.draw(st.integers(0, len(name) - 1))
    typo = name[:at] + name[at + 1 :]
    if typo and typo not in names:
        assert nearest(typo, names, "names").startswith("did you mean")


class Inner(Record):
    sizes: dict[str, tuple[int, ...]]

    def model_post_init(self, context: Any) -> None:
        for name, row in self.sizes.items():
            for i, size in enumerate(row):
                if size % 2:
                    raise WrongValue(path=("sizes", name, i), problem="is odd", remedy=f"write {size + 1}")


class Outer(Record):
    parts: tuple[Inner, ...]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_validator_s_own_finding_is_placed_below_where_it_was_found(rows: list[list[int]]) -> None:
    data = {"parts": [{"sizes": {"a.b": row}} for row in rows]}
    odd = [(i, j) for i, row in enumerate(rows) for j, size in enumerate(row) if size % 2]
    if not odd:
        assert parse_record(block(data), Outer, file="f")
        return
    with pytest.raises(InputError) as caught:
        parse_record(block(data), Outer, file="f")
    (i, j), error = odd[0], caught.value
    assert error.key == f"parts[{i}].sizes.a.b[{j}]"
    assert error.problem == f"{rows[i][j]}: is odd" and error.remedy == f"write {rows[i][j] + 1}"
    assert block(data).splitlines()[(error.line or 0) - 1].split("- ")[-1] == str(rows[i][j])


def test_what_a_file_holds_at_a_path() -> None:
    data = {"a": [{"b.c": 1}]}
    assert value_at(data, ("a", 0, "b.c")) == 1 and value_at(data, ()) == data
    assert all(value_at(data, path) is None for path in (("a", 1), ("a", 0, "b"), ("a", "b"), ("z", 0)))


def test_missing_files_folders_and_dead_links_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run-one").mkdir()
    (tmp_path / "dead").symlink_to("nowhere")
    cases = {"run-oen": ("no such file", "run-one"), "dead": ("a link to nowhere",), "q" * 300: ("no such file",)}
    for name, words in cases.items():
        with pytest.raises(InputError) as caught:
            present(tmp_path / name, "a run")
        assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(InputError, match="this is a folder"):
        content(tmp_path / "run-one")
    assert present(tmp_path / "run-one") == tmp_path / "run-one"


def test_a_record_is_read_where_nothing_is_wrong() -> None:
    assert isinstance(parse(Path("scenarios/quickstart.yaml").read_text()), Scenario)
