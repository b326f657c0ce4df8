"""What lies in the buffer, and what of it is gone when its process is."""

import numpy as np

from lab.collecting import Collecting
from lab.fates import BUFFERED, FATE, IN_FLIGHT, LOST, Fates
from tests.strategies import changed

CHOSEN = changed(
    "grpo-7b-16gpu",
    {
        "schedule": {"mode": "asynchronous"},
        "workload": {"prompts_per_step": 6, "samples_per_prompt": 4},
        "update": {"minibatch_samples": 24},
    },
)


def test_a_buffer_that_is_gone_takes_parts_of_groups_along() -> None:
    """Else a batch would be made of samples that nobody has."""
    fates = Fates(CHOSEN)
    buffer = Collecting(CHOSEN, fates, lambda: None)
    numbers = fates.issue(0, np.arange(8), 0).tolist()
    buffer.issued(numbers, 0)
    for number in numbers[:6]:
        buffer.ended(number)
    assert (buffer.depth, fates.column(FATE).tolist()) == (4, [BUFFERED] * 4 + [IN_FLIGHT] * 4)
    assert buffer.spilt() == numbers[4:6] and buffer.spilt() == []
    (group, lost), *others = buffer.thrown(numbers[4:6])
    assert (lost, group.members, others) == (numbers[4:6], numbers[6:], [])
    versions, ready = buffer.contents()
    assert buffer.drop(ready, versions, LOST).tolist() == numbers[:4]
    replaced = fates.issue(0, [4, 5], 0).tolist()
    buffer.replaced(group, replaced)
    for number, depth in zip([*numbers[6:], *replaced], (0, 0, 0, 4), strict=True):
        buffer.ended(number)
        assert buffer.depth == depth, "the group is complete when all four are there"
