"""Profiles as files: they read back equal, bad ones are named, and the right one is found."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.errors import InputError
from lab.explain import value_at
from lab.library import devices
from profiles.curve import Curve
from profiles.profile import (
    OpProfile,
    Profile,
    Range,
    find,
    load,
    local_profile_path,
    machine,
    resolve,
    shipped,
)

OP = OpProfile(
    coefficients={"each": 0.01, "bytes": 1e-9},
    ranges={"each": Range(low=1, high=1), "bytes": Range(low=10, high=1000)},
    interference=(1.2,),
    points=5,
    residual_median=0.01,
    residual_p90=0.02,
)


CURVE = Curve(
    axes={"m": (1.0, 8.0), "n": (2.0, 4.0)}, values=(1.0, 2.0, 3.0, 4.0), unit="s", points=9, residual_median=0.1,
    residual_p90=0.2, ranges={"m": Range(low=1, high=8), "n": Range(low=2, high=4)},
)  # fmt: skip


def profile(name: str = "p", **changes) -> Profile:
    parts = {"device": "cpu-core", "source": {"machine": machine()}, "ops": {"weight_sync": OP}}
    return Profile(name=name, kind="measured", **parts | changes)


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
    assert find("t4").kind == "datasheet"


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


def changed(folder: Path, change: Callable[[dict], None]) -> Path:
    """A file of a profile with an op and a kernel, changed; every key on a line of its own."""
    profile(kernels={"gemm.bfloat16": CURVE}).save(folder / "changed.yaml")
    data = yaml.safe_load((folder / "changed.yaml").read_text())
    change(data)
    (folder / "changed.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / "changed.yaml"


def places(data: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, key))


def put(data: Any, path: tuple, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


def numbers(data: dict) -> list[tuple]:
    kept = [path for path in places(data) if path and path[0] in ("ops", "kernels")]
    return [path for path in kept if isinstance(value_at(data, path), int | float)]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -5, "junk", None, [], {"junk": 1}], ids=repr)
def test_every_wrong_number_of_a_profile_is_told_where_it_stands(tmp_path: Path, wrong: Any) -> None:
    refused = 0
    for path in numbers(yaml.safe_load(changed(tmp_path, lambda data: None).read_text())):
        file = changed(tmp_path, lambda data, path=path: put(data, path, wrong))
        try:
            load(file)
        except InputError as error:
            refused += 1
            told = str(error)
            row = file.read_text().splitlines()[(error.line or 0) - 1]
            assert error.file == str(file) and error.remedy
            assert any(isinstance(part, str) and part in str(error.key) for part in path[-2:]), told
            assert f"{str(error.key).rsplit('.', 1)[-1]}:" in row or row.strip().startswith("-"), (told, row)
            assert error.key not in ("", "ops", "kernels", "ops.weight_sync", "kernels.gemm.bfloat16"), told
            if isinstance(wrong, float):
                assert "NaN" in told or "Infinity" in told
            assert "{" not in told or wrong == {"junk": 1}, told
    assert refused > 10


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (lambda data: data["ops"].update(lunch=data["ops"]["weight_sync"]), "ops.lunch", "the ops are"),
        (lambda data: data["ops"].update(weight_sink=data["ops"].pop("weight_sync")), "ops.weight_sink", "weight_sync"),
        (lambda data: data["ops"]["weight_sync"]["coefficients"].update(byte=1.0), "ops.weight_sync.coefficients.byte", "bytes"),
        (
            lambda data: data["ops"]["weight_sync"]["ranges"].update(byte={"low": 1.0, "high": 2.0}),
            "ops.weight_sync.ranges.byte", "bytes",
        ),
        (lambda data: data["ops"]["weight_sync"].update(coefficients={}), "ops.weight_sync.coefficients", "fitted"),
        (lambda data: data["ops"]["weight_sync"].update(points=0), "ops.weight_sync.points", "1 or more"),
        (lambda data: data["ops"]["weight_sync"].update(interference=[1.5, 0.5]), "ops.weight_sync.interference[1]", "0.5"),
        (lambda data: data["kernels"].update({"gem.x": data["kernels"].pop("gemm.bfloat16")}), "kernels.gem.x", "gemm"),
        (lambda data: data["kernels"]["gemm.bfloat16"].update(values="1 2 3"), "kernels.gemm.bfloat16.values", "2 of m × 2 of n"),
        (lambda data: data["kernels"]["gemm.bfloat16"].update(values="1 2 x 4"), "kernels.gemm.bfloat16.values", "'x'"),
        (lambda data: data["kernels"]["gemm.bfloat16"].update(values="1 2 nan 4"), "kernels.gemm.bfloat16.values", "number 3"),
        (lambda data: data["kernels"]["gemm.bfloat16"]["axes"].update(m="8 1"), "kernels.gemm.bfloat16.axes.m", "1 follows 8"),
        (lambda data: data["kernels"]["gemm.bfloat16"]["ranges"].pop("n"), "kernels.gemm.bfloat16.ranges.n", "missing"),
        (lambda data: data["kernels"]["gemm.bfloat16"].update(points=0), "kernels.gemm.bfloat16.points", "1 or more"),
        (lambda data: data.update(device="h1000"), "device", "h1000"),
        (lambda data: data.update(ops={}, kernels={}), "kind", "no ops and no kernels"),
        (lambda data: data.update(kind="datasheet"), "kind", "measured"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_told_where_it_stands(
    tmp_path: Path, change: Callable[[dict], None], key: str, words: str
) -> None:
    file = changed(tmp_path, change)
    with pytest.raises(InputError) as caught:
        load(file)
    error = caught.value
    assert error.key == key and words in str(error), str(error)
    row = file.read_text().splitlines()[(error.line or 0) - 1]
    assert "ranges:" in row if words == "missing" else row.strip().split(":")[0] in f"{key}:" or row.strip() == "- 0.5"


def test_a_named_profile_is_of_a_device_that_is_used(tmp_path: Path) -> None:
    for device in devices():
        profile("mine", device=device).save(tmp_path / "mine.yaml")
        for used in (["cpu-core"], ["h100-80g-sxm"], ["cpu-core", "h100-80g-sxm"]):
            if device in used:
                found = resolve(used, str(tmp_path / "mine.yaml"))
                assert sorted(found) == sorted(used) and found[device].name == "mine"
                assert all(part.device == name for name, part in found.items())
                continue
            with pytest.raises(InputError) as caught:
                resolve(used, str(tmp_path / "mine.yaml"))
            told = str(caught.value)
            assert told.startswith("--profile") and all(name in told for name in ("'mine'", device, *used)), told
    assert {part.kind for part in resolve(["cpu-core", "t4"], "datasheet").values()} == {"datasheet"}


def test_two_profiles_of_one_name_are_refused_across_devices_and_against_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_DATA_HOME", str(tmp_path))
    folder = local_profile_path("cpu-core").parent
    folder.mkdir(parents=True)
    for device in ("cpu-core", "t4"):
        profile("twin", device=device).save(folder / f"{device}-twin.yaml")
        assert resolve([device])[device].name == "twin"
    with pytest.raises(InputError, match=r"cpu-core and t4 are both named 'twin'"):
        resolve(["cpu-core", "t4"])
    for name in shipped():
        profile(name).save(folder / "cpu-core-twin.yaml")
        for asked in (None, str(folder / "cpu-core-twin.yaml")):
            with pytest.raises(InputError, match=f"the library has another profile '{name}'") as caught:
                resolve(["cpu-core"], asked)
            assert caught.value.file == str(folder / "cpu-core-twin.yaml") and caught.value.line == 1


def test_a_copy_of_a_profile_in_the_library_is_that_profile(tmp_path: Path) -> None:
    for name in ("cpu-core-epyc", "rtx-4090"):
        (tmp_path / "copy.yaml").write_bytes(shipped()[name].read_bytes())
        device = load(shipped()[name]).device
        assert resolve([device], str(tmp_path / "copy.yaml"))[device] == load(shipped()[name])


def test_the_library_holds_every_name_once() -> None:
    names = [load(path).name for path in shipped().values()]
    assert len(names) == len(set(names)) > 5


def test_a_missing_profile_a_folder_and_an_unknown_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    profile().save(tmp_path / "folder" / "p.yaml")
    cases = {
        str(tmp_path / "folder"): ("folder", "p.yaml"),
        str(tmp_path / "folder" / "q.yaml"): ("no such file", "p.yaml"),
        str(tmp_path / "pipe"): ("not a regular file",),
        "rtx-409": ("there is no profile 'rtx-409'", "did you mean rtx-4090?"),
        "x" * 300: ("there is no profile", "datasheet"),
    }
    for name, words in cases.items():
        with pytest.raises(InputError) as caught:
            find("cpu-core", name)
        assert caught.value.key == "--profile" and all(word in str(caught.value) for word in words), str(caught.value)
