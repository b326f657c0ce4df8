"""What the cases of `tests/simulator/test_keys.py` are made of."""

from pathlib import Path
from typing import Any, NamedTuple

from lab.load import load

BIG, TINY, QUICK = "ppo-7b-16gpu", "ppo-tiny", "quickstart"
DPO, KTO, JUDGED = "dpo-7b", "kto-7b", "reward-model-7b"
SHIPPED = {
    name: load(Path("scenarios") / f"{name}.yaml").model_dump(mode="json", by_alias=True)
    for name in (BIG, TINY, QUICK, DPO, KTO, JUDGED)
}
Edits = dict[str, Any]
"""values by path; the parts of a path are separated by `/`"""

LENGTHS = {"dist": "lognormal", "mean": 20, "p95": 40, "max": 64}


class Case(NamedTuple):
    """A scenario, what is set before, and the one change that must show."""

    base: str
    change: Edits
    before: Edits | None = None


def like(role: str) -> Edits:
    return {"arch": None, "like": role, "dtype": "float32", "weights": "random"}
