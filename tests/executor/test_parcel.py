"""Samples that lie in a file come back as they were."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import parcel
from executor.experience import Samples

RESPONSES = st.lists(st.integers(0, 6), min_size=1, max_size=6)


def samples(responses: list[int], seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(
        step=3, policy_version=2, prompts=np.arange(len(responses)), num_prompt_tokens=np.full(len(responses), 2),
        tokens=[rng.integers(0, 64, 2 + n) for n in responses],
        logprobs=[rng.normal(size=n).astype(np.float32) for n in responses],
        temperatures=rng.uniform(size=len(responses)).astype(np.float32), seeds=rng.integers(0, 2**31, len(responses)),
        columns={"rewards": rng.normal(size=len(responses)), "values": [rng.normal(size=n) for n in responses]},
    )  # fmt: skip


@given(responses=RESPONSES, seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_samples_come_back_bit_for_bit(tmp_path_factory, responses: list[int], seed: int) -> None:
    path = tmp_path_factory.mktemp("samples") / parcel.name(3)
    written = samples(responses, seed)
    parcel.write(path, written)
    found = parcel.read(path)
    assert (found.step, found.policy_version) == (3, 2)
    for name in (*parcel.ARRAYS, "rewards"):
        ours, theirs = (one.columns.get(name, getattr(one, name, None)) for one in (written, found))
        assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype, name
    for name in ("tokens", "logprobs", "values"):
        pairs = list(zip(*(one.columns.get(name, getattr(one, name, None)) for one in (written, found)), strict=True))
        assert len(pairs) == len(responses)
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs), name
