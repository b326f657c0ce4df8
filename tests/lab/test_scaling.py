"""What scaling cannot go with is refused by its key."""

import pytest
from pydantic import ValidationError

from lab.load import load
from lab.scaling import LOSSES

BASE = load("scenarios/ppo-7b-16gpu.yaml")
TARGETS = {"worker_lost": "actor.generate[0]", "scorer_lost": "reference.score[0]", "node_lost": "serve/0"}


@pytest.mark.parametrize("work", ["actor.generate", "reference.score"])
@pytest.mark.parametrize("kind", TARGETS)
def test_workers_that_may_be_lost_are_not_scaled(work: str, kind: str) -> None:
    changes = {
        "schedule": {"mode": "synchronous", "scoring": "sample"},
        "scaling": {work: {"min": 1}},
        "faults": [{"kind": kind, "at": 20.0, "target": TARGETS[kind]}],
    }
    if kind in LOSSES[work.split(".")[1]]:
        with pytest.raises(ValidationError, match="is not replaced by one that is down"):
            BASE.replace(changes)
    else:
        assert BASE.replace(changes).scaling
