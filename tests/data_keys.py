"""Keys of data and tokenizers: with a file once it is read, lengths stand in the workload, so no span changes."""

from tests.keys import BIG, DPO, JUDGED, KTO, QUICK, Case, Edits


def _file(name: str) -> Edits:
    return {"data": {"task": None, name: "/data/a.jsonl", "sha256": "0" * 64}}


SFT: Edits = {"algorithm": {"name": "sft"}, "workload/samples_per_prompt": 1, "update/minibatch_samples": 96}
MARKED: dict[str, Case] = {
    "data/task": Case(QUICK, _file("prompts")),
    "data/prompts": Case(QUICK, {"data/prompts": "/data/b.jsonl"}, _file("prompts")),
    "data/demonstrations": Case(DPO, {"data/demonstrations": "/data/b.jsonl"}, SFT | _file("demonstrations")),
    "data/preferences": Case(JUDGED, {"data/preferences": "/data/b.jsonl"}, _file("preferences")),
    "data/labels": Case(KTO, {"data/labels": "/data/b.jsonl"}, _file("labels")),
    "data/on_broken": Case(QUICK, {"data/on_broken": "skip"}, _file("prompts")),
    "data/max_tokens": Case(QUICK, {"data/max_tokens": 99}, _file("prompts")),
    "data/held_out_share": Case(QUICK, {"data/held_out_share": 0.2}, _file("prompts")),
    "data/skipped": Case(QUICK, {"data/skipped": 3}, _file("prompts")),
    "data/sha256": Case(QUICK, {"data/sha256": "1" * 64}, _file("prompts")),
} | {
    f"models/{role}/tokenizer": Case(BIG, {f"models/{role}/tokenizer": "folder"})
    for role in ("actor", "critic", "reference", "reward")
}
_listed = {"dist": "listed", "values": "12 15x3", "held_out": "12 20x2"}
_rows: Edits = {"workload/prompt_tokens": _listed, "workload/response_tokens": _listed | {"values": "30x31 64"}}
_judged: Edits = _rows | {"evaluate/every_steps": 1, "evaluate/prompts": 3}
CHANGES: dict[str, Case] = {
    "workload/prompt_tokens/held_out": Case(QUICK, {"workload/prompt_tokens/held_out": "12 20 28"}, _judged),
    "workload/response_tokens/held_out": Case(QUICK, {"workload/response_tokens/held_out": "12 20 28"}, _judged),
    "evaluate/response_tokens/held_out": Case(
        QUICK, {"evaluate/response_tokens/held_out": "12 20 28"}, _judged | {"evaluate/response_tokens": _listed}
    ),
}
