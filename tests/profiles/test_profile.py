"""Profiles as files: they read back equal, bad ones are named, and the right one is found."""

import os
from pathlib import Path

import pytest

from lab.errors import InputError
from profiles.profile import OpProfile, Profile, Range, datasheet, find, load, local_profile_path, machine, shipped

OP = OpProfile(
    coefficients={"each": 0.01, "bytes": 1e-9},
    ranges={"each": Range(low=1, high=1), "bytes": Range(low=10, high=1000)},
    interference=(1.2,),
    points=5,
    residual_median=0.01,
    residual_p90=0.02,
)


def profile(name: str = "p", **changes) -> Profile:
    return Profile(
        name=name, device="cpu-core", kind="measured", source={"machine": machine()}, ops={"weight_sync": OP}, **changes
    )


def test_a_saved_profile_reads_back_equal(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.yaml")
    assert load(tmp_path / "p.yaml") == profile()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("points: 5", "points: many"), "whole number"),
        (("kind: measured", "kind: guessed"), "datasheet"),
        (("device:", "devise:"), "device"),
        (("low: 10", "low: [10"), "YAML"),
    ],
)
def test_a_bad_profile_is_named_with_line_and_key(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "p.yaml"
    profile().save(path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InputError, match=words) as caught:
        load(path)
    assert caught.value.file == str(path) and caught.value.line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("each: 0.01", "each: -5.0"), "each"), (("each: 0.01", "each: 1.0e+308"), "each"), (("- 1.2", "- 0.5"), "below 1"),
        (("low: 10.0", "low: 9999.0"), "empty"),
        (("weight_sync:", "weight_sink:"), "no op"),
        (("device: cpu-core", "device: gpu"), "gpu"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "p.yaml"
    profile().save(path)
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InputError, match=words):
        load(path)


def test_extrapolation_is_what_lies_outside_the_measured_range() -> None:
    assert OP.covers({"each": 1, "bytes": 10}) and OP.covers({"each": 1, "bytes": 1000})
    assert not OP.covers({"each": 1, "bytes": 5}) and not OP.covers({"each": 1, "bytes": 2000})
    assert not OP.covers({"each": 1, "bytes": 100, "samples": 3})


def test_the_local_profile_is_used_on_the_machine_that_measured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_DATA_HOME", str(tmp_path))
    path = local_profile_path("cpu-core")
    path.parent.mkdir(parents=True)
    before = find("cpu-core")
    profile("mine").save(path)
    assert find("cpu-core").name == "mine" != before.name
    profile("elsewhere").model_copy(update={"source": {"machine": {"cpu": "other", "cores": 512}}}).save(path)
    assert find("cpu-core") == before
    assert find("t4") == datasheet("t4")


def test_of_several_local_profiles_the_newest_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_DATA_HOME", str(tmp_path))
    folder = local_profile_path("cpu-core").parent
    folder.mkdir(parents=True)
    for age, name in enumerate(("new", "old")):
        profile(name).save(folder / f"cpu-core-{name}.yaml")
        os.utime(folder / f"cpu-core-{name}.yaml", (1e9 - age, 1e9 - age))
    assert find("cpu-core").name == "new"
    os.utime(folder / "cpu-core-old.yaml", (2e9, 2e9))
    assert find("cpu-core").name == "old"
    assert find("cpu-core", "datasheet").kind == "datasheet"


def test_names_lead_to_the_library_a_file_the_datasheet_or_an_error(tmp_path: Path) -> None:
    profile("filed").save(tmp_path / "filed.yaml")
    assert find("cpu-core", str(tmp_path / "filed.yaml")).name == "filed"
    assert find("cpu-core", "datasheet").kind == "datasheet"
    with pytest.raises(InputError, match="no-such"):
        find("cpu-core", "no-such")


def test_every_shipped_profile_loads_and_says_where_it_comes_from() -> None:
    assert shipped()
    for name, path in shipped().items():
        found = load(path)
        here = bool(found.source.get("machine") and found.source.get("date"))
        assert found.name == name and found.kind == "measured" and (here or found.source["package"])
