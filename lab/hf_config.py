"""Hugging Face `config.json` files read as shapes.

Vision towers and multi-token-prediction layers are left out: generation and training of text do not pass them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.errors import InputError
from lab.model import ModelSpec

LARGEST = 2**31
"""No dimension of a network is larger."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The keys of one `config.json`, and where they stand."""

    keys: dict[str, Any]
    file: str
    text: str
    prefix: str = ""

    def wrong(self, key: str, problem: str, remedy: str) -> InputError:
        """An error at `key`, with the line that the key stands on, if any."""
        at = self.text.find(f'"{key}"')
        line = self.text.count("\n", 0, at) + 1 if at >= 0 else None
        return InputError(file=self.file, line=line, key=self.prefix + key, problem=problem, remedy=remedy)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """The whole number at `key`; `default` where it is absent or null. Raises InputError."""
        value = self.keys.get(key)
        value = default if value is None else value
        if value is None:
            remedy = f'add `"{key}": …` as in the config.json that the model was published with'
            raise self.wrong(key, "the key is missing", remedy)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
            shown = json.dumps(value, default=str)[:40]
            raise self.wrong(key, f"{shown} is not a whole number from {least} to 2^31", "correct the value")
        return value

    def optional(self, key: str) -> int | None:
        """As `count`, with None where the key is absent or null."""
        return None if self.keys.get(key) is None else self.count(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false at `key`. Raises InputError."""
        value = self.keys.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, f"{json.dumps(value, default=str)[:40]} is not true or false", "correct the value")
        return default if value is None else value

    def part(self, key: str) -> Config:
        """The configuration nested at `key`. Raises InputError where there is none."""
        value = self.keys.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "the key is missing or holds no keys of its own", f'add `"{key}": {{…}}`')
        return replace(self, keys=value, prefix=f"{self.prefix}{key}.")

    def replacing(self, **keys: Any) -> Config:
        """The same configuration with some keys set."""
        return replace(self, keys=self.keys | keys)

    def refuse(self, key: str, *values: Any) -> None:
        """Raises InputError where `key` has a value that the shape of this architecture has no place for."""
        if key in self.keys and self.keys[key] not in values:
            shown = json.dumps(self.keys[key], default=str)[:40]
            remedy = f"only {' or '.join(json.dumps(value) for value in values)} can be read for this architecture"
            raise self.wrong(key, f"{shown} changes the network in a way that is not modelled", remedy)


Shape = dict[str, Any]


def read(path: str | Path) -> ModelSpec:
    """The shape that a `config.json`, or a folder that holds one, describes.

    Raises InputError naming file, key and remedy, or the architecture where it is none of `ARCHITECTURES`.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = _parse(file)
    name = _architecture(config)
    try:
        return ModelSpec.model_validate(ARCHITECTURES[name](config) | {"source": f"config.json of a {name}"})
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        remedy = "compare with the config.json that the model was published with"
        raise InputError(file=str(file), problem=problem, remedy=remedy) from None


def quantized(path: str | Path) -> InputError | None:
    """What to tell where a `config.json` says that the published weights have fewer bits than a dtype left unsaid.

    The shape is the same; only the scenario's `dtype` says how many bytes a weight takes. Raises InputError as `read`.
    """
    config = _parse(Path(path) / "config.json" if Path(path).is_dir() else Path(path))
    inner = config.keys.get("text_config")
    stored = config.keys.get("quantization_config") or (isinstance(inner, dict) and inner.get("quantization_config"))
    if not stored:
        return None
    method = stored.get("quant_method") if isinstance(stored, dict) else stored
    problem = f"the weights are stored quantized ({json.dumps(method, default=str)[:40]}), and the model has no `dtype`"
    remedy = (
        "add beside `arch`: `dtype: fp8` or `dtype: int8` for 8 bits, `dtype: bfloat16` for weights converted to 16"
    )
    return config.wrong("quantization_config", problem, remedy)


def names_config(text: str) -> bool:
    """Whether a text is the path of a configuration rather than a library entry."""
    return text.endswith(".json") or "/" in text or "\\" in text


def _parse(file: Path) -> Config:
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        problem, remedy = error.strerror or str(error), "name an existing config.json"
        raise InputError(file=str(file), problem=problem, remedy=remedy) from None
    except json.JSONDecodeError as error:
        remedy = "check commas, quotes and brackets"
        raise InputError(
            file=str(file), line=error.lineno, problem=f"not valid JSON: {error.msg}", remedy=remedy
        ) from None
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, a key that stands twice, endless nesting
        remedy = "use the config.json that the model was published with"
        raise InputError(file=str(file), problem=f"cannot be read: {error}", remedy=remedy) from None
    if not isinstance(data, dict):
        remedy = "use the config.json that the model was published with"
        raise InputError(file=str(file), line=1, problem="the file holds no JSON object", remedy=remedy)
    return Config(keys=data, file=str(file), text=text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _architecture(config: Config) -> str:
    """The name of the architecture: the first of `architectures`, else by `model_type`."""
    listed, kind = config.keys.get("architectures"), config.keys.get("model_type")
    name = listed[0] if isinstance(listed, list) and listed else MODEL_TYPES.get(str(kind), kind)
    if name is None:
        remedy = 'add `"architectures": ["LlamaForCausalLM"]` or the like'
        raise config.wrong("architectures", "the key is missing", remedy)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        shown = json.dumps(name, default=str)[:60]
        problem, key = f"the architecture {shown} is unknown", "architectures" if listed else "model_type"
        raise config.wrong(key, problem, f"those that can be read are {', '.join(sorted(ARCHITECTURES))}")
    return name


def _decoder(
    config: Config, *, kv_heads: int | None = None, head_dim: int | None = None, tied: bool = False, heads: int = 0
) -> Shape:
    """What nearly all architectures have in common; the keyword arguments are what a missing key stands for."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads", heads or None)
    _layer_lists(config, config.count("num_hidden_layers"))
    if head_dim is None and config.keys.get("head_dim") is None and hidden % heads:
        problem = f"{heads} does not divide hidden_size {hidden}"
        raise config.wrong("num_attention_heads", problem, "correct one of them, or add `head_dim`")
    return {
        "hidden": hidden,
        "layers": config.count("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.count("num_key_value_heads", kv_heads or heads),
        "head_dim": config.count("head_dim", head_dim or hidden // heads),
        "intermediate": config.count("intermediate_size"),
        "vocabulary": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
    }


LAYER_TYPES = ("full_attention", "sliding_attention")


def _layer_lists(config: Config, layers: int) -> None:
    """Raises InputError where what is listed by layer does not fit the number of layers."""
    types, dense = config.keys.get("layer_types"), config.keys.get("mlp_only_layers")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            problem = f"{len(types) if isinstance(types, list) else 'no list of'} layers, num_hidden_layers is {layers}"
            raise config.wrong("layer_types", problem, f"list {layers} layers, or correct num_hidden_layers")
        other = [kind for kind in types if kind not in LAYER_TYPES]
        if other:
            problem = f"{json.dumps(other[0], default=str)[:40]} changes the network in a way that is not modelled"
            raise config.wrong("layer_types", problem, f"only {' and '.join(LAYER_TYPES)} can be read")
    if dense is not None and not (isinstance(dense, list) and all(_layer(i, layers) for i in dense)):
        problem = f"{json.dumps(dense, default=str)[:40]} is not a list of layers from 0 to {layers - 1}"
        raise config.wrong("mlp_only_layers", problem, "correct it, or num_hidden_layers")


def _layer(index: Any, layers: int) -> bool:
    return isinstance(index, int) and not isinstance(index, bool) and 0 <= index < layers


def _biased(config: Config) -> Shape:
    """`attention_bias`: on q, k, v and on the output."""
    bias = config.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def _windowed(config: Config, layers: int, default: int | None = None) -> Shape:
    """The window: of the layers that `layer_types` lists as sliding, else of `layers` of them."""
    window = config.optional("sliding_window") if "sliding_window" in config.keys else default
    types = config.keys.get("layer_types")
    if isinstance(types, list):
        layers = types.count("sliding_attention")
    return {"sliding_window": window, "window_layers": layers} if window and layers else {}


def _llama(config: Config) -> Shape:
    return _decoder(config) | _biased(config) | {"mlp_bias": config.flag("mlp_bias")}


def _mistral(config: Config) -> Shape:
    return _decoder(config) | _windowed(config, config.count("num_hidden_layers"), 4096)


def _qwen2_window(config: Config) -> Shape:
    """Qwen's layers from `max_window_layers` on are windowed where `use_sliding_window` says so."""
    if not config.flag("use_sliding_window"):
        return {}
    layers = config.count("num_hidden_layers")
    return _windowed(config, max(0, layers - config.count("max_window_layers", 28, least=0)), 4096)


def _qwen2(config: Config) -> Shape:
    return _decoder(config) | {"qkv_bias": True} | _qwen2_window(config)


def _qwen3(config: Config) -> Shape:
    return _decoder(config, head_dim=128) | _biased(config) | {"qk_norm": True} | _qwen2_window(config)


def _qwen_experts(config: Config) -> Shape:
    """Routed experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    layers, step = config.count("num_hidden_layers"), config.count("decoder_sparse_step", 1)
    dense = config.keys.get("mlp_only_layers") or []
    kept = sum(i in dense or (i + 1) % step != 0 for i in range(layers))
    return {
        "num_experts": config.count("num_experts", config.optional("num_local_experts")),  # the name since version 5
        "experts_per_token": config.count("num_experts_per_tok"),
        "intermediate": config.count("moe_intermediate_size"),
        "dense_layers": kept,
    }


def _qwen2_moe(config: Config) -> Shape:
    shared = {"shared_intermediate": config.count("shared_expert_intermediate_size"), "shared_gate": True}
    return _qwen2(config) | {"qkv_bias": config.flag("qkv_bias", True), "moe": _qwen_experts(config) | shared}


def _qwen3_moe(config: Config) -> Shape:
    return _qwen3(config) | {"moe": _qwen_experts(config)}


def _mixtral(config: Config) -> Shape:
    moe = {
        "num_experts": config.count("num_local_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "intermediate": config.count("intermediate_size"),
    }
    return _decoder(config) | _windowed(config, config.count("num_hidden_layers")) | {"moe": moe}


def _gpt_oss(config: Config) -> Shape:
    layers = config.count("num_hidden_layers")
    moe = {
        "num_experts": config.count("num_local_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "intermediate": config.count("intermediate_size"),
    }
    bias = config.flag("attention_bias", True)
    extras = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": True, "attention_sinks": True, "moe": moe}
    return _decoder(config, head_dim=64) | _windowed(config, -(-layers // 2), 128) | extras


def _gemma2(config: Config) -> Shape:
    """Every second layer, the first included, is windowed."""
    shape = _decoder(config, head_dim=256, tied=True) | _biased(config) | {"norms_per_layer": 4}
    return shape | _windowed(config, -(-shape["layers"] // 2), 4096)


def _gemma3(config: Config) -> Shape:
    """All layers but every sixth are windowed. A nested configuration leaves out what equals the defaults."""
    config = config.part("text_config") if "text_config" in config.keys else config
    config = config.replacing(vocab_size=config.count("vocab_size", 262208))
    shape = _decoder(config, heads=8, kv_heads=4, head_dim=256, tied=True) | _biased(config)
    shape |= {"norms_per_layer": 4, "qk_norm": True}
    whole = shape["layers"] // config.count("sliding_window_pattern", 6)
    return shape | _windowed(config, shape["layers"] - whole, 4096)


def _phi3(config: Config) -> Shape:
    return _decoder(config) | _windowed(config, config.count("num_hidden_layers"))


def _opt(config: Config) -> Shape:
    """Positions start at an offset of 2 (`OPTLearnedPositionalEmbedding`)."""
    config.refuse("do_layer_norm_before", True)
    config.refuse("word_embed_proj_dim", config.count("hidden_size"))
    config.refuse("enable_bias", True)
    shape = _decoder(config.replacing(intermediate_size=config.count("ffn_dim"), num_key_value_heads=None), tied=True)
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), True)
    return shape | biases | {"gated": False, "learned_positions": config.count("max_position_embeddings") + 2}


def _gpt_neox(config: Config) -> Shape:
    bias = config.flag("attention_bias", True)
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": True, "norm_bias": True}
    return _decoder(config.replacing(num_key_value_heads=None)) | biases | {"gated": False}


def _deepseek(config: Config, *, router_bias: bool) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("moe_layer_freq", 1)
    expert = config.count("moe_intermediate_size")
    mla = {
        "q_lora_rank": config.optional("q_lora_rank"),
        "kv_lora_rank": config.count("kv_lora_rank"),
        "qk_nope_head_dim": config.count("qk_nope_head_dim"),
        "qk_rope_head_dim": config.count("qk_rope_head_dim"),
        "v_head_dim": config.count("v_head_dim"),
    }
    moe = {
        "num_experts": config.count("n_routed_experts"),
        "experts_per_token": config.count("num_experts_per_tok"),
        "intermediate": expert,
        "shared_intermediate": expert * config.count("n_shared_experts", 0, least=0),
        "dense_layers": config.count("first_k_dense_replace", 0, least=0),
        "router_bias": router_bias,
    }
    shape = _decoder(config, head_dim=mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"])  # type: ignore[operator]
    return shape | {"mla": mla, "moe": moe}


def _deepseek_v2(config: Config) -> Shape:
    return _deepseek(config, router_bias=False)


def _deepseek_v3(config: Config) -> Shape:
    return _deepseek(config, router_bias=True)


def _text_of(read_text: Callable[[Config], Shape]) -> Callable[[Config], Shape]:
    """A model with vision, of which the language model is read."""
    return lambda config: read_text(config.part("text_config"))


ARCHITECTURES: dict[str, Callable[[Config], Shape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3VLForConditionalGeneration": _text_of(_qwen3),
    "Qwen3VLMoeForConditionalGeneration": _text_of(_qwen3_moe),
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "OPTForCausalLM": _opt,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK25ForConditionalGeneration": _text_of(_deepseek_v3),
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration", "phi3": "Phi3ForCausalLM", "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "gpt_oss": "GptOssForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM",
}  # fmt: skip
