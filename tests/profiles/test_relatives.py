"""Devices without kernels of their own take those of a relative, and so can be compared with it."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from lab.library import device, devices
from lab.load import parse
from profiles.compact import CompactKernels
from profiles.cost import CostModel
from profiles.iteration import EngineTable
from profiles.profile import datasheet, find
from profiles.relatives import RELATIVES

BIG = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
TWINS = [("a800-80g", "a100-80g-sxm"), ("h800-80g", "h100-80g-sxm")]


def engine(name: str, profile: str | None = None) -> EngineTable:
    scenario = parse(BIG.replace("a100-80g-sxm", name))
    model = CostModel(scenario, {name: find(name, profile)})
    return model.engine_table(scenario.team("actor", "generate")[0])


@pytest.mark.parametrize(("own", "other"), TWINS)
def test_an_engine_on_one_device_is_that_of_its_twin_but_extrapolated(own: str, other: str) -> None:
    mine, twin = engine(own), engine(other)
    assert np.allclose(mine.token_seconds, twin.token_seconds, rtol=1e-3)
    assert np.allclose(mine.attention_seconds, twin.attention_seconds, rtol=1e-3)
    assert twin.measured and not mine.measured


@pytest.mark.parametrize(("own", "other"), TWINS)
def test_collectives_of_half_the_link_are_slower_where_bytes_count_and_never_quicker(own: str, other: str) -> None:
    mine, twin = CompactKernels(find(own)), CompactKernels(find(other))
    sizes = np.geomspace(1e3, 1e8, 12)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        ratio = mine.collective(op, sizes, 8) / twin.collective(op, sizes, 8)
        assert np.all(ratio > 1 - 1e-6) and ratio[-1] > 1.05 and ratio[0] < 1.1


def test_every_gpu_has_kernels_of_its_own_or_a_relative_that_was_measured() -> None:
    for name in devices():
        if device(name).kind != "gpu":
            continue
        found = find(name)
        assert found.kernels and found.device == name
        assert (found.kind == "datasheet") == (name in RELATIVES)
        assert not found.ops


def test_more_bandwidth_and_flops_are_quicker_whether_measured_or_not() -> None:
    tables = [engine(name) for name in ("a100-80g-pcie", "a100-80g-sxm", "h100-80g-pcie", "h800-80g")]
    for slower, quicker in itertools.pairwise(tables):
        assert slower.token_seconds[0] > quicker.token_seconds[0] * (1 - 1e-6)


def test_the_header_says_which_device_stands_for_which() -> None:
    scenario = parse(BIG.replace("a100-80g-sxm", "a800-80g"))
    model = CostModel(scenario, {"a800-80g": find("a800-80g")})
    model.engine_table(scenario.team("actor", "generate")[0])
    [note] = model.header_profiles()["a800-80g"]["notes"]
    assert "a800-80g" in note and "a100-80g-sxm" in note


@pytest.mark.parametrize("name", ["a100-80g-sxm", "h100-80g-sxm", "b200-sxm"])
def test_the_bare_datasheet_is_near_the_measured_kernels(name: str) -> None:
    """Decoding of a 7B model: within 20 %, neither always quicker nor always slower than over all devices."""
    scenario = parse(BIG.replace("a100-80g-sxm", name))
    worker = scenario.team("actor", "generate")[0]
    bare = CostModel(scenario, {name: datasheet(name)}).engine_table(worker)
    measured = CostModel(scenario, {name: find(name)}).engine_table(worker)
    for tokens in (1.0, 16.0, 64.0):
        one, other = (
            np.interp(tokens, t.token_grid, t.token_seconds) + np.interp(tokens, t.sequence_grid, t.sequence_seconds)
            + t.step_s + t.sequence_s * tokens
            for t in (bare, measured)
        )  # fmt: skip
        assert one == pytest.approx(other, rel=0.2)
