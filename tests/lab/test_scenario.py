import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.library import models
from lab.load import dump, load, parse
from lab.scenario import Rollout

QUICK = Path("scenarios/quickstart.yaml").read_text()
BIG = load("scenarios/ppo-7b-16gpu.yaml")


def test_the_digest_ignores_form_and_follows_content() -> None:
    base = parse(QUICK)
    assert parse("# comment\n" + QUICK.replace("seed: 7", "seed:   7")).digest == base.digest
    assert parse(QUICK.replace("sampling", "sampling") + "\nsampling: {temperature: 1.0}").digest == base.digest
    assert parse(QUICK.replace("seed: 7", "seed: 8")).digest != base.digest


def test_workers_stand_on_disjoint_devices_where_pools_are_exclusive() -> None:
    devices = [device for worker in BIG.workers.values() for device in worker.devices]
    assert len(devices) == len(set(devices)) == 11
    assert [worker.devices for worker in BIG.team("actor", "train")] == [
        ("train[0]", "train[1]"), ("train[2]", "train[3]"), ("train[4]", "train[5]")
    ]  # fmt: skip
    assert [worker.devices for worker in BIG.team("actor", "generate")] == [("serve[2]",), ("serve[3]",)]


@pytest.mark.parametrize(("size", "accepted"), [(2, True), (3, False), (4, True)])
def test_groups_of_a_resident_pool_share_all_their_devices_or_none(size: int, accepted: bool) -> None:
    text = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
    text = text.replace(
        'reference: "serve[0]", reward: "serve[1]", rollout: "serve[2:4]"}',
        f'judges: "serve[0:{size}]", rollout: "train[10:12]"}}',
    )
    text = text.replace('spare: "train[7:12]", ', "").replace("place:", "sharing: {judges: {how: resident}}\nplace:")
    for pool in ("reference", "reward"):
        text = text.replace(f"{{pool: {pool},", "{pool: judges, tensor_parallel: 2,")
    if accepted:
        assert parse(text).devices["judges"]
    else:
        with pytest.raises(InputError, match="share only some"):
            parse(text)


def test_like_is_followed() -> None:
    assert BIG.spec("critic") == BIG.spec("actor") and parse(QUICK).spec("reference").hidden == 128


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip


def with_config(folder: Path, arch: str, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "scenario.yaml").write_text(QUICK.replace("arch: tiny-llama", f"arch: {arch}"))
    return folder / "scenario.yaml"


def test_a_configuration_beside_the_scenario_or_in_the_working_folder_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = load(with_config(tmp_path / "a", "./config.json"))
    assert beside.spec("actor").parameters == load("scenarios/quickstart.yaml").spec("actor").parameters
    assert beside.spec("reference") == beside.spec("actor")
    scenario = with_config(tmp_path / "b", "a/config.json").resolve()
    monkeypatch.chdir(tmp_path)
    assert load(scenario).spec("actor") == beside.spec("actor")


def test_the_digest_covers_the_shape_and_not_its_path(tmp_path: Path) -> None:
    one = load(with_config(tmp_path / "a", "config.json"))
    same = load(with_config(tmp_path / "b", f"{tmp_path}/b/config.json"))
    other = load(with_config(tmp_path / "c", "config.json", num_hidden_layers=5))
    assert one.digest == same.digest != other.digest
    (tmp_path / "a" / "config.json").unlink()
    assert parse(dump(one)).digest == one.digest
    assert one.replace({"seed": 8}).spec("actor") == one.spec("actor")


def test_a_wrong_configuration_is_told_with_its_own_file(tmp_path: Path) -> None:
    scenario = with_config(tmp_path / "a", "config.json", hidden_size=None)
    with pytest.raises(InputError) as caught:
        load(scenario)
    assert (caught.value.file, caught.value.key) == (str(tmp_path / "a" / "config.json"), "hidden_size")


@pytest.mark.parametrize("arch", ["absent/config.json", "meta-llama/Llama-3.1-8B", "config.yaml", "llama-9"])
def test_an_architecture_that_is_nowhere_is_refused_at_its_line(arch: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(QUICK.replace("arch: tiny-llama", f"arch: {arch}"))
    assert caught.value.key == "models.actor.arch" and caught.value.line == 7
    assert arch in caught.value.problem


def test_dimensions_may_be_written_out() -> None:
    shape = "{hidden: 128, layers: 4, heads: 4, kv_heads: 2, head_dim: 32, intermediate: 384, vocabulary: 64}"
    written = parse(QUICK.replace("arch: tiny-llama", f"arch: {shape}"))
    assert written.spec("actor").parameters == parse(QUICK).spec("actor").parameters


def test_quantized_weights_need_a_dtype(tmp_path: Path) -> None:
    stored = {"quant_method": "fp8"}
    scenario = with_config(tmp_path / "a", "config.json", quantization_config=stored)
    assert load(scenario).model("actor").dtype == "float32", "the scenario says one"
    scenario.write_text(scenario.read_text().replace("arch: config.json, dtype: float32", "arch: config.json"))
    with pytest.raises(InputError, match="quantized") as caught:
        load(scenario)
    assert (caught.value.file, caught.value.key) == (str(tmp_path / "a" / "config.json"), "quantization_config")
    assert "dtype: fp8" in str(caught.value.remedy)


@pytest.mark.parametrize("arch", ["7", "1.5", "true", "[tiny-llama]"])
def test_an_architecture_is_a_name_a_path_or_dimensions(arch: str) -> None:
    with pytest.raises(InputError, match="neither a name, nor a path, nor dimensions") as caught:
        parse(QUICK.replace("arch: tiny-llama", f"arch: {arch}"))
    assert caught.value.key == "models.actor.arch" and caught.value.line == 7


@pytest.mark.parametrize("cluster", ["7", "nowhere", "null", "[local]"])
def test_a_cluster_is_local_or_described(cluster: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(QUICK.replace("cluster: local", f"cluster: {cluster}"))
    assert caught.value.key == "cluster" and "`local`" in str(caught.value.remedy)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("form", ["Org/{}", "org/{}-Instruct", "{}-Chat"])
def test_a_published_name_leads_to_the_librarys(name: str, form: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(QUICK.replace("arch: tiny-llama", f"arch: {form.format(name.title())}"))
    said = f"{caught.value.problem} {caught.value.remedy}"
    assert caught.value.key == "models.actor.arch" and "did you mean" in said and name in said


def test_async_scheduling_says_what_is_simulated_of_it() -> None:
    assert "the lag alone" in str(Rollout.model_fields["async_scheduling"].description)


@pytest.mark.parametrize(("key", "wrong", "right"), [
    ("cluster.sites[0].nodes[0].device", "device: a100-80g-sxm", "device: a100"),
    ("cluster.sites[0].nodes[0].intra", "intra: nvlink3", "intra: nvlink33"),
    ("cluster.sites[0].fabric.link", "link: ib-hdr200", "link: ib-hdr"),
    ("cluster.sites[0].storage.tier", "storage: {write: 5 GB/s}", "storage: {tier: lustr}"),
])  # fmt: skip
def test_an_unknown_entry_is_told_at_its_own_key_with_the_nearest(key: str, wrong: str, right: str) -> None:
    text = Path("scenarios/ppo-7b-16gpu.yaml").read_text()
    with pytest.raises(InputError) as caught:
        parse(text.replace(wrong, right, 1))
    assert caught.value.key == key and caught.value.line
    assert "did you mean" in caught.value.problem and "{" not in caught.value.problem


@given(st.sampled_from(["exclusive", "resident"]), st.integers(1, 4), st.sampled_from([1, 2]))
def test_a_reward_function_claims_no_gpu(how: str, engines: int, tensor: int) -> None:
    """It fits a pool that the engines fill, and moves nobody else's devices."""
    big = BIG.model_dump(mode="json", by_alias=True)
    size = engines * tensor
    generate = [{"pool": "rollout", "engines": engines, "tensor_parallel": tensor}]
    pools = big["pools"] | {"rollout": f"train[12:{12 + size}]"}
    cluster = big["cluster"]
    nodes = [cluster["sites"][0]["nodes"][0] | {"count": 9}, cluster["sites"][0]["nodes"][1]]
    function = {"pool": "rollout", "kind": "function", "function": "task"}
    changes = {
        "cluster": {"sites": [cluster["sites"][0] | {"nodes": nodes}]},
        "pools": {name: devices for name, devices in pools.items() if name != "spare"},
        "sharing": {"rollout": {"how": how}},
        "place": big["place"] | {"actor.generate": generate, "reward.score": function},
    }
    shared = BIG.replace(changes)
    apart = BIG.replace(changes | {"place": changes["place"] | {"reward.score": function | {"pool": "reward"}}})
    assert shared.team("reward", "score")[0].devices[0] in shared.devices["rollout"]
    for worker in apart.workers.values():
        if worker.role != "reward":
            assert shared.workers[worker.name].devices == worker.devices


def test_a_reward_model_and_a_function_among_cores_claim_devices() -> None:
    with pytest.raises(ValueError, match="devices of their own"):
        BIG.replace({"place": BIG.model_dump(mode="json", by_alias=True)["place"] | {
            "reward.score": {"pool": "reference", "kind": "model"}}})  # fmt: skip
    with pytest.raises(InputError, match="devices of their own"):
        parse(QUICK.replace("how: resident", "how: exclusive"))
