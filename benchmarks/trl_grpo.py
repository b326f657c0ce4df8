"""GRPO here and in TRL's GRPOTrainer: the same network, prompts, lengths and settings, one after the other, in turns.

    python3 -m venv TRL && TRL/bin/pip install -r benchmarks/requirements-trl.txt
    .venv/bin/python benchmarks/trl_grpo.py --trl TRL/bin/python --threads 1 2

A 3.2 M parameter Llama, 8 prompts x 8 samples, 10 + 24 tokens, AdamW at 1e-3, KL 0.01 to a reference. TRL generates with
transformers, its default. A repeat is a whole run of each side; who comes first alternates. The first step of a run is
left out (warming up), as is starting. With --pin both sides may use only as many cores as they have threads, all
their processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab.load import dump, load
from lab.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
NETWORK = {
    "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 768, "vocabulary": 64,
}  # fmt: skip
PROMPT_TOKENS, RESPONSE_TOKENS = 10, 24
TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One run of one side."""

    side: str
    threads: int
    samples_per_s: float
    reward: float
    """of the last step"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="the Python of the environment that has TRL")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="of each run")
    parser.add_argument("--pin", action="store_true", help="as many cores as threads for each side")
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    chosen = parser.parse_args()
    rates: list[Rate] = []
    for threads in chosen.threads:
        rates += beside(chosen.trl, threads, chosen.repeats, chosen.steps, chosen.pin)
        print(verdict([rate for rate in rates if rate.threads == threads], threads), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([vars(rate) for rate in rates], indent=1))
    return 0


def beside(trl: Path, threads: int, repeats: int, steps: int, pin: bool) -> list[Rate]:
    """Both sides in turns."""
    rates: list[Rate] = []
    with tempfile.TemporaryDirectory(prefix="lab-trl-") as name:
        folder = Path(name)
        work = describe(folder, steps)
        for repeat in range(repeats):
            sides = [
                lambda seed: ours(folder, threads, steps, seed, pin),
                lambda seed: theirs(trl, work, threads, seed, pin),
            ]
            for side in sides if repeat % 2 == 0 else sides[::-1]:
                rates.append(side(repeat))
                rate = rates[-1]
                said = f"{rate.samples_per_s:7.1f} samples/s, reward {rate.reward:.2f}"
                print(f"{threads} threads, repeat {repeat}: {rate.side:5}{said}", flush=True)
    return rates


def scenario(threads: int, steps: int, seed: int) -> Scenario:
    """grpo-learns with the network and the lengths of this comparison.

    Every stage has all threads while it runs: small batches are generated faster by an engine on each core than by one
    engine on all, passes of the trainer and the reference by one process. An update is one pass, in which the samples of a
    prompt share its tokens.
    """
    cores = f"local[0:{len(os.sched_getaffinity(0))}]"
    place: dict[str, Any] = {
        "actor.generate": [{"pool": "all", "engines": threads, "threads": 1}],
        "actor.train": {"pool": "all", "data_parallel": 1, "zero_stage": 0, "threads": threads},
        "reference.score": {"pool": "all", "max_batch_samples": 64, "threads": threads},
        "reward.score": {"pool": "all", "kind": "function", "function": "task", "threads": 1},
    }
    workload = {
        "prompts_per_step": 8, "samples_per_prompt": 8, "prompt_tokens": {"dist": "fixed", "value": PROMPT_TOKENS},
        "response_tokens": {"dist": "fixed", "value": RESPONSE_TOKENS},
    }  # fmt: skip
    models = {"actor": {"arch": NETWORK, "dtype": "float32"}, "reference": {"like": "actor", "dtype": "float32"}}
    update = {"minibatch_samples": 64, "microbatch_tokens": 4096, "pack": "shared"}
    changes = {"name": "beside-trl", "seed": seed, "models": models, "place": place, "workload": workload}
    changes |= {"update": update}
    return load(ROOT / "scenarios/grpo-learns.yaml").replace(
        changes | {"num_steps": steps, "pools": {"all": cores}, "checkpoint": {"every_steps": None}}
    )


def describe(folder: Path, steps: int) -> Path:
    """Writes the network of seed 0 and the prompts of seed 0, and says what the work is; the path of what is said."""
    from executor.network import build_actor, save
    from executor.origin import origin
    from executor.tokenizer import IDS

    chosen = scenario(1, steps, 0)
    save(build_actor(*origin(chosen, "actor")), str(folder / "network"))
    letters = {token: text for text, token in IDS.items()}
    prompts = [
        "".join(letters[token] for token in prompt) for step in range(steps) for prompt in _prompts(chosen, step)
    ]
    settings = {
        "num_steps": steps, "prompts_per_step": 8, "samples_per_prompt": 8, "response_tokens": RESPONSE_TOKENS,
        "kl_coef": 0.01, "clip": 0.2, "lr": chosen.optimizer.lr, "grad_clip": chosen.optimizer.grad_clip,
    }  # fmt: skip
    work = {"network": str(folder / "network"), "folder": str(folder / "out"), "prompts": prompts, "settings": settings}
    (folder / "work.json").write_text(json.dumps(work))
    return folder / "work.json"


def _prompts(chosen: Scenario, step: int) -> list[list[int]]:
    from executor.tasks import TASKS

    task = TASKS[chosen.data.task]
    return [task.prompt(chosen.seed, step, prompt, PROMPT_TOKENS) for prompt in range(chosen.workload.prompts_per_step)]


def ours(folder: Path, threads: int, steps: int, seed: int, pin: bool) -> Rate:
    file = folder / "ours.yaml"
    with _cores(threads if pin else None):
        file.write_text(dump(scenario(threads, steps, seed)))
        command = [sys.executable, "-c", "from lab.cli import main; main()", "execute", str(file), "--json"]
        summary = json.loads(_output([*command, "--out", str(folder / "runs")], threads))
    rate = 64 / summary["step_s"]["mean"]
    return Rate(side="lab", threads=threads, samples_per_s=rate, reward=summary["reward"]["last"])


def theirs(trl: Path, work: Path, threads: int, seed: int, pin: bool) -> Rate:
    said = json.loads(work.read_text())
    said["settings"]["seed"] = seed
    work.write_text(json.dumps(said))
    with _cores(threads if pin else None):
        found = json.loads(
            _output([str(trl), str(ROOT / "benchmarks/trl_side.py"), str(work)], threads).splitlines()[-1]
        )
    assert found["response_tokens"] == [RESPONSE_TOKENS], "both sides generate as many tokens"
    ends = found["ends"]
    rate = 64 * (len(ends) - 1) / (ends[-1] - ends[0])
    return Rate(side="TRL", threads=threads, samples_per_s=rate, reward=found["rewards"][-1])


def _output(command: Sequence[str], threads: int) -> str:
    """What a program prints. Raises RuntimeError with the end of what it said otherwise."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


class _cores:
    """A context in which this process and those it starts may use the first cores only; None: all of them."""

    def __init__(self, number: int | None) -> None:
        self._number, self._all = number, os.sched_getaffinity(0)

    def __enter__(self) -> None:
        if self._number is not None:
            os.sched_setaffinity(0, sorted(self._all)[: self._number])

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._all)


def verdict(rates: Sequence[Rate], threads: int) -> str:
    """Medians with their spread, (max - min) / median, and their ratio."""
    found: dict[str, list[float]] = {}
    for rate in rates:
        found.setdefault(rate.side, []).append(rate.samples_per_s)
    middle = {side: median(values) for side, values in found.items()}
    spread = {side: (max(values) - min(values)) / middle[side] for side, values in found.items()}
    parts = [
        f"{side} {middle[side]:.1f} samples/s (spread {spread[side]:.0%} of {len(found[side])})" for side in middle
    ]
    return f"{threads} threads: {', '.join(parts)}; {middle['lab'] / middle['TRL']:.2f} times TRL"


if __name__ == "__main__":
    sys.exit(main())
