"""Are predictions of whole steps true on this machine? PPO, GRPO, DPO and the colocated schedule, simulated, then executed.

    lab profile && .venv/bin/python benchmarks/predicted.py --repeats 3 --output benchmarks/predicted.md

The workloads are none that a profile is calibrated on. Bounds: of the step's error max(10 %, twice its spread), of a stage
that takes over 5 % of the step max(15 %, twice its spread); the spread is (max - min) / median over the repeats. The
prediction is written before the execution begins. A row whose spread is over 15 % settles nothing: repeat when
nothing else runs. Exit code 1: a bound is not met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.load import dump, load

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600
UNSETTLED = 0.15
LENGTHS = {"dist": "lognormal", "mean": 20, "p95": 36, "max": 44}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo-tiny", {
        "workload": {"prompts_per_step": 10, "samples_per_prompt": 4, "response_tokens": LENGTHS},
        "update": {"minibatch_samples": 20}, "schedule": {"mode": "synchronous"}, "num_steps": 12,
    }),
    "grpo": ("grpo-learns", {
        "workload": {"prompts_per_step": 10, "samples_per_prompt": 6, "response_tokens": LENGTHS},
        "update": {"minibatch_samples": 30}, "num_steps": 16,
    }),
    "dpo": ("dpo-learns", {
        "models": {"actor": {"arch": "tiny-llama", "dtype": "float32"}},
        "workload": {"prompts_per_step": 24, "samples_per_prompt": 2, "response_tokens": LENGTHS},
        "update": {"minibatch_samples": 48}, "num_steps": 16,
    }),
    "colocated": ("colocated-tiny", {
        "workload": {"prompts_per_step": 24, "samples_per_prompt": 8, "response_tokens": LENGTHS}, "num_steps": 4,
    }),
}  # fmt: skip
"""by name, a shipped scenario and what of it is replaced"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of one scenario; seconds of a steady step."""

    case: str
    quantity: str
    predicted: float
    measured: float
    error: float
    spread: float
    bound: float

    @property
    def met(self) -> bool:
        return abs(self.error) <= self.bound

    def line(self) -> str:
        verdict = "yes" if self.met else "no"
        times = f"{self.predicted:.4f} s | {self.measured:.4f} s | {self.error:+.1%} | {self.spread:.1%}"
        settled = "" if self.spread <= UNSETTLED else " (spread too large)"
        return f"| {self.case} | {self.quantity} | {times} | {self.bound:.0%} | {verdict}{settled} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--profile", help="a cost profile; default: this machine's own")
    parser.add_argument("--output", type=Path, help="write the table to this file")
    chosen = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lab-predicted-") as folder:
        for case in chosen.cases:
            rows += (found := judged(case, compared(case, Path(folder), chosen.repeats, chosen.profile)))
            print("\n".join(row.line() for row in found), flush=True)
    if chosen.output:
        chosen.output.write_text(page(rows, chosen.repeats))
    return int(not all(row.met for row in rows))


def compared(case: str, folder: Path, repeats: int, profile: str | None) -> dict[str, Any]:
    """What `lab run` says of a case. Raises RuntimeError where it does not end well."""
    name, changes = CASES[case]
    original = load(ROOT / f"scenarios/{name}.yaml")
    data = original.model_dump(mode="json", by_alias=True)
    parts = {key: data[key] | part if isinstance(part, dict) else part for key, part in changes.items()}
    file = folder / f"{case}.yaml"
    file.write_text(dump(original.replace(parts | {"name": f"{case}-held-out", "seed": 101})))
    command = [sys.executable, "-c", "from lab.cli import main; main()", "run", str(file), "--json"]
    command += ["--out", str(folder), "--repeats", str(repeats), *(["--profile", profile] if profile else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def judged(case: str, found: dict[str, Any]) -> list[Row]:
    """The step, and its stages that take over 5 % of it."""
    step = found["step"]
    large = {name: row for name, row in found["stages"].items() if (row["measured"] or 0) > 0.05 * step["measured"]}
    return list(_rows(case, {"step": step} | large))


def _rows(case: str, found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    for name, row in found.items():
        spread, least = row["noise"] or 0.0, 0.10 if name == "step" else 0.15
        predicted = row["predicted"] or 0.0
        yield Row(
            case=case, quantity=name, predicted=predicted, measured=row["measured"], spread=spread,
            error=predicted / row["measured"] - 1, bound=max(least, 2 * spread),
        )  # fmt: skip


def page(rows: Sequence[Row], repeats: int) -> str:
    """The table, and how it was made."""
    from executor.ledger import host, software

    machine = host()
    said = ", ".join(f"{name} {version}" for name, version in software().items())
    met = sum(row.met for row in rows)
    made = f"Made by `benchmarks/predicted.py`, {datetime.now(UTC):%Y-%m-%dT%H:%M} UTC, {repeats} repeats."
    return "\n".join([
        "# Predicted and measured steps", "", made, f"Machine: {machine['cpu']}, {machine['cores']} cores. {said}.", "",
        *(__doc__ or "").strip().splitlines()[4:], "",
        f"{met} of {len(rows)} within their bounds.", "",
        "| case | quantity | predicted | measured | error | spread | bound | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |", *(row.line() for row in rows), "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
