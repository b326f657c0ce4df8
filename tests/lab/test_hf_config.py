"""Configurations of Hugging Face read as shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.errors import InputError
from lab.hf_config import ARCHITECTURES, MODEL_TYPES, quantized, read
from lab.library import model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50, "tie_word_embeddings": False,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "vocab_size": 50,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# model_type: keys on top of SMALL; every network that transformers builds from them has as many parameters as is read.
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "llama biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen2_moe listed": EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0, 2]},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS | {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 30, "pad_token_id": 0},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v2 lite": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT,
}


def written(folder: Path, keys: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(keys, indent=1))
    return path


def refusal(folder: Path, keys: dict[str, Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        read(written(folder, keys))
    assert caught.value.file == str(folder / "config.json")
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("case", NETWORKS)
def test_a_shape_has_the_parameters_of_the_network_that_transformers_builds(case: str, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(case.split()[0], **SMALL | NETWORKS[case])
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(network).__name__]
    config.save_pretrained(tmp_path)
    spec = read(tmp_path)
    in_parameters = sum(parameter.numel() for parameter in network.parameters())
    in_buffers = sum(b.numel() for name, b in network.named_buffers() if name.endswith("e_score_correction_bias"))
    assert spec.parameters == in_parameters + in_buffers
    types = getattr(config, "layer_types", None)
    if types and "sliding_attention" in types:
        assert spec.window_layers == types.count("sliding_attention")
    without = json.loads((tmp_path / "config.json").read_text())
    del without["architectures"]
    assert read(written(tmp_path, without)).parameters == spec.parameters


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_key_is_named_with_its_file(key: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, {k: v for k, v in LLAMA.items() if k != key})
    assert error.key == key and error.problem == "the key is missing"


@pytest.mark.parametrize("value", [0, -4, 1.5, "64", True, [64], 2**40, float("nan")])
def test_a_wrong_value_is_named_with_its_line(value: Any, tmp_path: Path) -> None:
    error = refusal(tmp_path, LLAMA | {"intermediate_size": value})
    line = (tmp_path / "config.json").read_text().splitlines()[(error.line or 0) - 1]
    assert error.key == "intermediate_size" and '"intermediate_size"' in line
    assert json.dumps(value) in error.problem


@pytest.mark.parametrize("keys", [{"architectures": ["MambaForCausalLM"]}, {"model_type": "mamba"}])
def test_an_unknown_architecture_is_refused_by_name_with_those_that_are_known(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    error = refusal(tmp_path, {k: v for k, v in LLAMA.items() if k != "architectures"} | keys)
    assert "amba" in error.problem
    assert all(name in str(error.remedy) for name in ARCHITECTURES)


def test_every_model_type_leads_to_a_known_architecture() -> None:
    assert set(MODEL_TYPES.values()) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"architectures": []}, "architectures"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "num_attention_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "text_config"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {}}, "text_config.hidden_size"),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_cannot_be_read_is_refused_at_its_key(keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, LLAMA | keys).key == key


def test_a_shape_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    assert "not a multiple" in refusal(tmp_path, LLAMA | {"num_key_value_heads": 3}).problem


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": 1e}'])
def test_a_file_that_holds_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.file == str(path) and caught.value.remedy


def test_a_missing_file_and_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path / "binary.json"):
        with pytest.raises(InputError) as caught:
            read(path)
        assert caught.value.file == str(path)


def test_a_qwen_window_counts_only_where_it_is_used(tmp_path: Path) -> None:
    keys = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 1}
    assert read(written(tmp_path, keys | {"use_sliding_window": False})).window_layers == 0
    assert read(written(tmp_path, keys | {"use_sliding_window": True})).window_layers == 2


def test_the_text_part_of_a_model_with_vision_is_read(tmp_path: Path) -> None:
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": LLAMA | {"head_dim": 8}}
    flat = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
    assert read(written(tmp_path, nested)).parameters == read(written(tmp_path, flat)).parameters


# Configurations that come with the optional package aiconfigurator-core, and the library entry of the same shape.
BUNDLED = {
    "meta-llama--Meta-Llama-3.1-8B": "llama-3.1-8b", "meta-llama--Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama--Meta-Llama-3.1-405B": "llama-3.1-405b", "mistralai--Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "Qwen--Qwen3-0.6B": "qwen3-0.6b", "Qwen--Qwen3-1.7B": "qwen3-1.7b", "Qwen--Qwen3-8B": "qwen3-8b",
    "Qwen--Qwen3-32B": "qwen3-32b", "Qwen--Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen--Qwen3-235B-A22B": "qwen3-235b-a22b", "deepseek-ai--DeepSeek-V3": "deepseek-v3",
}  # fmt: skip
NAMED = {
    "openai--gpt-oss-20b": (20.9, 3.6 + 0.58), "openai--gpt-oss-120b": (116.8, 5.1 + 0.58),
    "moonshotai--Kimi-K2-Instruct": (1026, 32.9), "mistralai--Mixtral-8x22B-v0.1": (140.6, 39),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480, 35),
}  # fmt: skip


def bundled(name: str) -> Path:
    package = pytest.importorskip("aiconfigurator_core")
    path = Path(package.__path__[0]) / "model_configs" / f"{name}_config.json"
    if not path.exists():
        pytest.skip(f"this release of aiconfigurator-core has no {path.name}")
    return path


@pytest.mark.parametrize("name", BUNDLED)
def test_a_published_configuration_is_the_library_entry(name: str) -> None:
    ignored = {"source": ""}
    assert read(bundled(name)).model_copy(update=ignored) == model(BUNDLED[name]).model_copy(update=ignored)


@pytest.mark.parametrize("name", NAMED)
def test_a_published_configuration_has_the_parameters_of_its_model_card(name: str) -> None:
    spec, (total, active) = read(bundled(name)), NAMED[name]
    assert spec.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert spec.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("case", [case for case in NETWORKS if " " not in case])
@pytest.mark.parametrize(
    "types", [["full_attention"] * 3, ["sliding_attention"] * 5, [], "full_attention", 4, ["linear_attention"] * 4]
)
def test_layers_are_listed_as_often_as_there_are_layers(case: str, types: Any, tmp_path: Path) -> None:
    keys = SMALL | NETWORKS[case] | {"architectures": [MODEL_TYPES[case]]}
    assert read(written(tmp_path, keys | {"layer_types": ["full_attention"] * 4})).window_layers == 0
    error = refusal(tmp_path, keys | {"layer_types": types})
    assert error.key == "layer_types" and error.line
    assert "num_hidden_layers is 4" in error.problem or "linear_attention" in error.problem


@pytest.mark.parametrize("dense", [[4], [-1], [0, 9], 2, ["0"], [True]])
def test_a_dense_layer_is_one_of_the_layers(dense: Any, tmp_path: Path) -> None:
    keys = SMALL | NETWORKS["qwen3_moe"] | {"model_type": "qwen3_moe", "mlp_only_layers": dense}
    error = refusal(tmp_path, keys)
    assert error.key == "mlp_only_layers" and "from 0 to 3" in error.problem


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "mxfp4", "compressed-tensors"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantized_weights_are_told_and_change_no_shape(method: str, nested: bool, tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": method}}
    plain = read(written(tmp_path, LLAMA))
    assert quantized(tmp_path) is None
    path = written(tmp_path, LLAMA | ({"text_config": stored} if nested else stored))
    told = quantized(path)
    assert read(path) == plain
    assert told is not None and told.key == "quantization_config" and told.line and method in told.problem
