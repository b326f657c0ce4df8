import json

import numpy as np

from lab.policies.decision import recorded
from lab.policies.stealing import Queues, steals


def queues(waiting: int) -> Queues:
    return Queues(queued=np.array([0, waiting]), free_slots=np.array([4, 0]), speed=np.ones(2))


def test_a_record_holds_what_was_seen_and_what_was_said() -> None:
    record = recorded(steals, queues(8))
    assert record.decided == steals(queues(8))
    plain = {
        "rule": "stealing.steals",
        "observed": {"queued": [0, 8], "free_slots": [4, 0], "speed": [1.0, 1.0], "least": 1},
        "decided": [{"thief": 0, "victim": 1, "num": 4}],
    }
    assert record.plain() == plain and json.loads(json.dumps(plain)) == plain


def test_equal_decisions_are_equal_and_others_are_not() -> None:
    assert recorded(steals, queues(8)).plain() == recorded(steals, queues(8)).plain()
    assert recorded(steals, queues(8)).plain() != recorded(steals, queues(6)).plain()


def test_rules_are_pure() -> None:
    seen = queues(8)
    steals(seen)
    assert seen.queued.tolist() == [0, 8]
