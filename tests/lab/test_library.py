"""The library: every entry cites its source and is plausible; wrong entries are refused in one message."""

import re

import pytest

from lab.errors import InputError
from lab.library import Device, Link, Tier, closest, device, devices, entries, link, links, models, tier, tiers
from lab.library import model as library_model
from lab.model import DTYPE_BYTES, ModelSpec

GPUS = {name: entry for name, entry in devices().items() if entry.kind == "gpu"}
ASKED = {
    "t4", "v100-32g-sxm", "a10", "a100-40g-sxm", "a100-80g-sxm", "a100-40g-pcie", "a100-80g-pcie", "a800-80g", "l40s",
    "rtx-4090", "rtx-pro-6000", "a6000", "h20-96g", "h100-80g-sxm", "h100-80g-pcie", "h800-80g", "h200-141g-sxm",
    "b200-sxm", "gb200", "mi300x", "cpu-core",
}  # fmt: skip


def test_the_library_has_what_scenarios_name() -> None:
    assert set(devices()) >= ASKED
    assert set(tiers()) >= {"nvme", "sata-ssd", "hdd", "nfs", "lustre", "object-store"}
    assert {entry.transport for entry in links().values()} == {"bus", "rdma", "tcp", "memory"}


def test_every_entry_cites_its_source() -> None:
    for entry in [*devices().values(), *links().values(), *tiers().values(), *models().values()]:
        assert len(entry.source) > 10
    for entry in devices().values():
        assert entry.price_source is None or re.search(r"list of 20\d\d", entry.price_source)


def test_every_device_is_plausible() -> None:
    for entry in devices().values():
        assert entry.default_link in links()
        assert 1e9 <= entry.memory_bandwidth <= 2e13 and all(1e9 <= flops <= 2e16 for flops in entry.flops.values())
        assert set(entry.flops) - {"fp4"} <= set(DTYPE_BYTES)
        assert entry.usable_bytes is None or 0.9 <= entry.usable_bytes / entry.memory_bytes <= 1


@pytest.mark.parametrize("name", GPUS)
def test_narrower_numbers_are_never_slower(name: str) -> None:
    flops = GPUS[name].flops
    order = ["float32", "bfloat16", "fp8", "fp4"]
    peaks = [flops[dtype] for dtype in order if dtype in flops]
    assert peaks == sorted(peaks)
    assert flops["float16"] == flops.get("bfloat16", flops["float16"])
    assert flops.get("int8", flops["float16"]) >= flops["float16"]


@pytest.mark.parametrize(("newer", "older"), [
    ("h100-80g-sxm", "a100-80g-sxm"), ("b200-sxm", "h200-141g-sxm"), ("a100-80g-sxm", "v100-32g-sxm"),
    ("gb200", "b200-sxm"), ("h200-141g-sxm", "h100-80g-pcie"), ("v100-32g-sxm", "t4"),
])  # fmt: skip
def test_a_newer_device_computes_and_reads_no_slower(newer: str, older: str) -> None:
    assert GPUS[newer].flops["float16"] >= GPUS[older].flops["float16"]
    assert GPUS[newer].memory_bandwidth >= GPUS[older].memory_bandwidth


@pytest.mark.parametrize("series", [
    ["nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5"], ["pcie3", "pcie4", "pcie5"],
    ["ib-edr100", "ib-hdr200", "ib-ndr400"], ["roce-100", "roce-200", "roce-400"],
    ["ethernet-10", "ethernet-25", "ethernet-100"], ["wan-1", "wan-10", "wan-100"],
])  # fmt: skip
def test_links_grow_with_their_generation(series: list[str]) -> None:
    bandwidths = [link(name).bandwidth for name in series]
    assert bandwidths == sorted(set(bandwidths))


def test_a_port_carries_the_bits_that_its_name_says() -> None:
    for name, entry in links().items():
        if match := re.fullmatch(r"(?:ib-[a-z]+|roce-|ethernet-|wan-)(\d+)", name):
            assert entry.bandwidth == float(match[1]) * 1e9 / 8


def test_rdma_is_quicker_than_tcp_and_the_wide_area_is_slowest() -> None:
    latency = {
        kind: [entry.latency for name, entry in links().items() if entry.transport == kind] for kind in ("rdma", "tcp")
    }
    assert max(latency["rdma"]) < min(latency["tcp"])
    assert link("wan-10").latency == max(entry.latency for entry in links().values())


@pytest.mark.parametrize("look", [device, link, tier, library_model])
def test_an_unknown_entry_is_refused_with_those_there_are(look) -> None:
    with pytest.raises(ValueError, match="it has"):
        look("no-such-thing")


def test_an_unknown_entry_names_the_closest() -> None:
    with pytest.raises(ValueError, match=r"did you mean h100-80g-sxm\?"):
        device("h100-80gb-sxm")


GPU = "{kind: gpu, memory_bytes: 1 GiB, memory_bandwidth: 1 GB/s, flops: {float32: 1 TFLOP/s}, source: a datasheet"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {bandwidth: 1 GB/s, latency: 1 us, source: x}\na: {}", "'a' stands twice"),
        ("a: {bandwidth: 1 GB/s, latency: 1 us, latency: 2 us, source: x}", "'latency' stands twice"),
        ("a: {bandwidth: 1 GB/s, latency: 1 us}", "a.source: Field required"),
        ("a: {bandwidth: 1 GB, latency: 1 us, source: x}", "a.bandwidth: '1 GB' is not a number with one"),
        ("a: {bandwidth: -1, latency: 1 us, source: x}", "a.bandwidth: -1"),
        ("a: {bandwidth: .nan, latency: 1 us, source: x}", "a.bandwidth: nan"),
        ("a: {bandwidth: 0, latency: 1 us, source: x}", "a.bandwidth"),
        ("a: {bandwidth: 1 GB/s, latency: 1 us, source: x, speed: 3}", "a.speed: 3: Extra"),
        ("a: 3", "a: 3"),
        ("- a", "no entries"),
        ("", "no entries"),
        ("a: {", "expected"),
    ],
)
def test_a_wrong_entry_is_told_in_one_message(text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        entries(text, Link, file="my-links.yaml")
    assert str(caught.value).startswith("my-links.yaml") and told in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (", price_per_hour: 1.5}", "belong together"),
        (", usable_bytes: 2 GiB}", "above memory_bytes"),
        (", nvml: [6000]}", "nvml"),
    ],
)
def test_a_wrong_device_is_refused(tail: str, told: str) -> None:
    assert entries(f"d: {GPU}}}", Device, file="d.yaml")["d"].memory_bytes == 2**30
    with pytest.raises(InputError, match=told):
        entries(f"d: {GPU}{tail}", Device, file="d.yaml")


def test_a_peak_of_nothing_or_of_an_unknown_format_is_refused() -> None:
    for flops, told in (("{float32: 0}", "peak of 0"), ("{float9: 1 TFLOP/s}", "float9"), ("{}", "flops")):
        with pytest.raises(InputError, match=told):
            entries(f"d: {GPU}}}".replace("{float32: 1 TFLOP/s}", flops), Device, file="d.yaml")


def test_a_wrong_model_is_refused_at_its_line() -> None:
    text = (
        "# shapes\nm:\n  {hidden: 8, layers: 2, heads: 4, kv_heads: 3, head_dim: 2, intermediate: 4, vocabulary: 9}\n"
    )
    with pytest.raises(InputError, match=r"m.yaml:2: m: heads \(4\) is not a multiple"):
        entries(text, ModelSpec, file="m.yaml")


def test_reading_is_no_slower_than_writing() -> None:
    for entry in tiers().values():
        assert isinstance(entry, Tier) and entry.read >= entry.write


@pytest.mark.parametrize("known", [devices(), links(), tiers(), models()])
def test_capitals_organisations_and_missing_endings_do_not_hide_a_name(known: dict[str, object]) -> None:
    for name in known:
        assert closest(name.upper(), known)[0] == name or name in closest(name.upper(), known)
        assert name in closest(f"Org/{name.title()}", known)
    assert closest("zzzzzz", known) == closest("", known) == []


def test_a_beginning_names_those_that_begin_so() -> None:
    assert set(closest("h100", devices())) == {"h100-80g-sxm", "h100-80g-pcie"}
    assert closest("nvlink", links()) and all(name.startswith("nvlink") for name in closest("nvlink", links()))
