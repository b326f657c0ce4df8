"""Published cases of whole steps, read into runs: one reader for each framework, with its stated defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from simulator.studies.published import Case, entry
from simulator.studies.published import reading as training_settings
from simulator.studies.published_scenario import Run


@cache
def reading() -> dict[str, Any]:
    """How sources are read: `published_steps.yaml`."""
    import yaml

    text = resources.files("simulator.studies").joinpath("published_steps.yaml").read_text(encoding="utf-8")
    record: dict[str, Any] = yaml.safe_load(text)
    return record


def run_of(case: Case) -> Run:
    """The run that a case's row describes. Raises KeyError for a framework without a reader."""
    return READERS[family(case)](case, reading()[family(case)])


def family(case: Case) -> str:
    """The framework's key in READERS; empty where there is no reader."""
    name = str(case["case_id"])
    return next((key for key, pattern in FAMILIES.items() if re.match(pattern, name)), "")


def _number(value: Any) -> float:
    """The first number in a cell."""
    found = re.search(r"\d+(\.\d+)?", str(value))
    if found is None:
        raise ValueError(f"{value!r} holds no number")
    return float(found[0])


def _brackets(text: str) -> list[int]:
    """Numbers in the last pair of brackets that holds any: a layout such as [TP,PP]=[4,1]."""
    inside = [part for part in re.findall(r"\[([^\]]*)\]", text) if re.search(r"\d", part)][-1]
    return [int(part) for part in inside.split(",") if part.strip().isdigit()]


def _common(case: Case) -> dict[str, Any]:
    device = entry(case, "devices", "gpu_type")
    where = reading()["devices"][device]
    return {
        "device": device, **where,
        "prompts": int(_number(case["prompts_per_step"])), "samples": int(_number(case["samples_per_prompt"])),
        "spread": reading()["spread"],
    }  # fmt: skip


def nemo(case: Case, table: Mapping[str, Any]) -> Run:
    """NeMo RL: Megatron trains, vLLM generates, on the same GPUs in turn or on two halves of them."""
    arch = entry(case, "models", "actor_model")
    own = table["models"][arch]
    total, shared = int(_number(case["gpus_total"])), case["placement"] == "colocated"
    width = total if shared else int(case["train_gpus"] or total / 2)
    serving = total if shared else total - width
    tensor, pipeline = _brackets(case["gen_parallel"])
    tp, cp, ep, *_, pp = _brackets(case["train_parallel"])
    prompt, longest = int(_number(case["prompt_len_mean"])), int(_number(case["resp_len_max"]))
    data = width // (tp * cp * pp)
    samples = int(_number(case["seqs_per_step"]))
    return Run(
        arch=arch,
        **_common(case),
        engines=serving // (tensor * pipeline),
        tensor=tensor,
        pipeline=pipeline,
        engine_dtype="fp8" if case["precision"] == "FP8" else None,
        trainer={
            "data_parallel": data, "tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp,
            "expert_parallel": min(ep, data * cp), "zero_stage": 1,
        },
        prompt=prompt,
        response=float(case["resp_len_mean"]),
        longest=longest - prompt,
        fraction=table["fraction"]["shared" if shared else "split"],
        max_num_seqs=table["max_num_seqs"],
        scored=table["scored"],
        pass_tokens=longest * cp,
        score_tokens=longest * own["score"] * cp,
        minibatch=math.ceil(samples / _number(case["optimizer_steps_per_step"])),
        recompute=own["recompute"],
        overlapped=not shared,
        assumed=tuple(table["assumed"]),
    )  # fmt: skip


def verl(case: Case, table: Mapping[str, Any]) -> Run:
    """verl: FSDP trains and vLLM generates on the same GPUs in turn; a critic, where there is one, trains there too."""
    settings = training_settings()["runs"][case["case_id"]]
    total, prompt, response = (_number(case[name]) for name in ("gpus_total", "prompt_len_mean", "resp_len_mean"))
    length, said = prompt + response, str(case["gen_parallel"])
    tensor = int((re.search(r"TP(\d+)", said) or [0, 1])[1])
    share = re.search(r"mem (\d\.\d+)", said)
    data = {"data_parallel": int(total), "zero_stage": 3}
    critic = settings.get("critic")
    samples, steps = _number(case["seqs_per_step"]), _number(case["optimizer_steps_per_step"])
    return Run(
        arch=shape(case),
        **_common(case),
        engines=int(total) // tensor,
        tensor=tensor,
        eager="eager" in said,
        trainer=data,
        critic_trainer=data if critic else None,
        prompt=round(prompt),
        response=response,
        longest=int(_number(case["resp_len_max"])),
        fraction=float(share[1]) if share else table["fraction"],
        max_num_seqs=table["max_num_seqs"],
        scored=table["scored"],
        pass_tokens=_pass_tokens(settings["actor"], length),
        score_tokens=_pass_tokens(settings["actor"], length),
        critic_tokens=_pass_tokens(critic, length) if critic else 0,
        minibatch=math.ceil(samples / steps),
        recompute=settings["actor"]["recompute"],
        assumed=(*table["assumed"], *settings["assumed"]),
    )


def _pass_tokens(settings: Mapping[str, Any], length: float) -> int:
    """Tokens of a pass whose size is stated in tokens, or in samples of this mean length."""
    return int(settings.get("pass_tokens") or math.ceil(settings["pass_samples"] * length))


def orb(case: Case, table: Mapping[str, Any]) -> Run:
    """OpenRLHF's comparison: every model on GPUs of its own, or all on all of them."""
    ratio = re.search(r'GPU ratio string "([^"]+)"', str(case["notes"]))
    parts = [int(part) for part in ratio[1].split(":")] if ratio and ":" in ratio[1] else []
    actor, critic = (parts[2], parts[3]) if parts else (int(_number(case["gpus_total"])),) * 2
    engines, longest = (parts[4] if len(parts) > 4 else 0), int(_number(case["resp_len_max"]))
    length = table["prompt"] + longest
    samples, steps = int(_number(case["seqs_per_step"])), _number(case["optimizer_steps_per_step"])
    return Run(
        arch=shape(case),
        **_common(case) | {"spread": table["spread"]},
        engines=engines,
        trainer=table["trainer"] | {"data_parallel": actor},
        critic_trainer=table["trainer"] | {"data_parallel": critic},
        critic_apart=bool(parts),
        prompt=table["prompt"],
        response=float(longest),
        longest=longest,
        fraction=table["fraction"],
        max_num_seqs=table["max_num_seqs"],
        scored=1 if parts else 3,
        scorers=parts[0] if parts else 0,
        pass_tokens=table["pass_samples"] * length,
        score_tokens=table["score_samples"] * length,
        critic_tokens=table["pass_samples"] * length,
        minibatch=math.ceil(samples / steps),
        recompute=table["recompute"],
        generate_batch=0 if engines else table["generate_batch"],
        assumed=(*table["assumed"], *([] if engines else [table["generating"]])),
    )


def shape(case: Case) -> str | dict[str, Any]:
    """The library's entry of a case's model, or its dimensions where the library has none; empty: not known."""
    known = entry(case, "models", "actor_model")
    return known or next(
        (dict(s) for name, s in reading()["shapes"].items() if str(case["actor_model"]).startswith(name)), ""
    )


FAMILIES = {"nemo": "nemo-", "verl": "log-|br-", "orb": "orb-"}
"""by framework: the cases it has"""
READERS: dict[str, Callable[[Case, Mapping[str, Any]], Run]] = {"nemo": nemo, "verl": verl, "orb": orb}
"""by framework: a case's row to a run"""
