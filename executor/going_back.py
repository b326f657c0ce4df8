"""The way back to a checkpoint within one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.earlier import Earlier
from executor.ledger import Ledger
from executor.loss import Loss
from executor.resume import resume
from lab.scenario import Scenario


def go_back(scenario: Scenario, folder: Path, ledger: Ledger, loss: Loss) -> Earlier:
    """Puts the folder in order for another attempt, which goes on from the last checkpoint.

    Everything since then is lost: what was trained, and what was generated for steps that did not end. Raises InputError
    where no checkpoint is whole.
    """
    ledger.running()
    begun, zero, obtained = ledger.begun_s, ledger.zero_s, ledger.num_obtained
    earlier = resume(scenario, folder)
    found: dict[str, Any] = dict(earlier.faults[-1])
    first, kept = earlier.first_step, len({step for _, step in earlier.kept})
    known = earlier.faults[:-1]
    own = next(i for i, fault in enumerate(known) if fault["at_s"] == loss.record["at_s"])
    record = loss.record | {key: found[key] for key in ("from_s", "lost_s", "lost_tokens")} | {
        "step": first, "steps": max(obtained - first - kept, 0), "until_s": found["until_s"],
    }  # fmt: skip
    faults = (*known[:own], *known[own + 1 :], record)
    return replace(earlier, faults=faults, clock=(begun, zero), samples=ledger.past)
