"""Messages of samples: what is packed comes out again, compression saves what it can, damage is noticed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.experience import Samples
from executor.packing import CODECS, Damaged, pack, unpack
from lab.experience import Experience


def samples(lengths: list[int], seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    return Samples(
        step=3, policy_version=2, prompts=np.arange(len(lengths)) // 2, num_prompt_tokens=np.full(len(lengths), 2),
        tokens=[draw.integers(0, 5000, 2 + n) for n in lengths],
        logprobs=[draw.normal(size=n).astype(np.float32) for n in lengths], indices=np.arange(len(lengths)) % 2,
    )  # fmt: skip


def assert_same(one: Samples, other: Samples) -> None:
    assert (one.step, one.policy_version, len(one)) == (other.step, other.policy_version, len(other))
    for field in dataclasses.fields(Samples):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, list):
            assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True))
        elif isinstance(mine, np.ndarray):
            assert np.array_equal(mine, theirs)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from(sorted(CODECS)))
def test_what_is_packed_comes_out_again(lengths: list[int], codec: str) -> None:
    given_ = samples(lengths)
    message = pack(given_, Experience(compression=codec))
    assert_same(given_, unpack(message.data))
    assert_same(given_, unpack(memoryview(np.frombuffer(message.data, np.uint8))))
    assert message.num_samples == len(lengths)


def test_compression_saves_most_of_the_zeros_of_ids() -> None:
    many = samples([200] * 20)
    ratios = {codec: pack(many, Experience(compression=codec)).ratio for codec in CODECS}
    assert ratios["none"] == pytest.approx(1.0, abs=1e-3)
    assert ratios["zstd"] < ratios["lz4"] < 0.8
    raw = {pack(many, Experience(compression=codec)).raw_bytes for codec in CODECS}
    assert len(raw) == 1 and raw.pop() > 20 * 200 * (8 + 4)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_what_is_damaged_is_no_message(codec: str) -> None:
    data = pack(samples([5, 6]), Experience(compression=codec)).data
    for broken in (b"", data[:7], b"XXXX" + data[4:], data[:-3], data[:4] + b"\x09" + data[5:]):
        with pytest.raises(Damaged):
            unpack(broken)
