"""Records hold what was trained on, bit for bit, or are refused."""

import asyncio
import json
import pickle
import resource
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import records
from executor.experience import Samples
from executor.recording import Recording
from lab.errors import InputError
from lab.scenario import Scenario

Make = Callable[..., Scenario]
MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def samples(seed: int = 0, lengths: tuple[int, ...] = (3, 1, 7, 5), step: int = 3, prompt: int = 4) -> Samples:
    """Two responses to each prompt, of these lengths, with every column that a step may have."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=n).astype(np.float32) for n in lengths]
    names = ("reference_logprobs", "values", "advantages", "returns", "old_logprobs")
    heads = [rng.integers(4, 64, prompt) for _ in range((len(lengths) + 1) // 2)]
    return Samples(
        step=step, policy_version=max(step - 1, 0), prompts=np.arange(len(lengths)) // 2,
        num_prompt_tokens=np.full(len(lengths), prompt),
        tokens=[np.concatenate([heads[i // 2], rng.integers(0, 64, n)]) for i, n in enumerate(lengths)],
        logprobs=rows, temperatures=rng.uniform(0.6, 1, len(lengths)).astype(np.float32),
        seeds=rng.integers(0, 2**31, len(lengths)),
        columns={"rewards": rng.normal(size=len(lengths)), "reward_length": rng.normal(size=len(lengths))}
        | {name: [rng.normal(size=n).astype(np.float32) for n in lengths] for name in names},
    )  # fmt: skip


def assert_same(a: Samples, b: Samples) -> None:
    """Every number of the same type and with the same bits."""
    assert (a.step, a.policy_version, list(a.columns)) == (b.step, b.policy_version, list(b.columns))
    for name in ("prompts", "num_prompt_tokens", "indices", "temperatures", "seeds", "tokens", "logprobs"):
        assert_equal(getattr(a, name), getattr(b, name))
    for name, column in a.columns.items():
        assert_equal(column, b.columns[name])


def assert_equal(a: Any, b: Any) -> None:
    for one, other in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 99))
def test_what_is_read_is_what_was_written(
    scenario: Make, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    original, folder = samples(seed, tuple(lengths), step=seed), tmp_path_factory.mktemp("run")
    chosen = scenario("grpo-learns")
    path = records.write(folder, chosen, original)
    assert path == folder / "records" / f"step-{seed:06d}.parquet"
    assert_same(records.read(path, chosen.digest), original)
    assert_same(pickle.loads(pickle.dumps(original, protocol=5)), original)


def test_every_sample_says_where_it_comes_from(scenario: Make, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    chosen, given = scenario("ppo-tiny", sampling={"temperature": 0.9}), samples()
    rows = pq.read_table(records.write(tmp_path, chosen, given, MOMENT)).to_pylist()
    assert len({row["rollout_id"] for row in rows}) == len(rows)
    ids = [row["prompt_id"] for row in rows]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    first = rows[0]
    assert first["actor_checkpoint"] == f"{chosen.digest}/step-000001", "version 2 is what step 1 made"
    assert first["reference_checkpoint"] == f"random:{chosen.seed}"
    assert first["reward_checkpoint"] == "function:task"
    assert json.loads(first["sampling"])["temperature"] == 0.9
    assert first["created_at"] == MOMENT
    assert first["tokens"] == given.tokens[0].tolist()
    assert first["attention_mask"] == [1] * len(given.tokens[0])
    assert first["token_log_probs"] == given.logprobs[0].tolist()
    assert (first["seed"], first["temperature"]) == (int(given.seeds[0]), float(given.temperatures[0]))
    assert first["reward_length"] == given.columns["reward_length"][0]


def test_the_first_policy_is_its_origin(scenario: Make, tmp_path: Path) -> None:
    """A folder of weights is named with a hash of what lies in it."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    models = {"actor": {"arch": "tiny-llama", "dtype": "float32", "weights": str(tmp_path)}}
    chosen = scenario("grpo-learns", models=models)
    found = records.checkpoints(chosen, 0)
    assert found["actor"].startswith(f"{tmp_path}#")
    assert found["actor"] == found["reference"], "the reference starts from the same folder"
    assert records.checkpoints(chosen, 5)["reference"] == found["reference"]


def test_the_weights_of_a_reward_model_under_training_are_those_of_its_steps(scenario: Make) -> None:
    chosen = scenario("reward-model-learns")
    assert list(records.checkpoints(chosen, 0)) == ["reward"]
    assert records.checkpoints(chosen, 0)["reward"].startswith("random:")
    assert records.checkpoints(chosen, 3) == {"reward": f"{chosen.digest}/step-000002"}


def test_a_damaged_record_is_refused_or_unharmed(scenario: Make, tmp_path: Path) -> None:
    """One flipped bit at each of many places: never a wrong number."""
    chosen, given = scenario("grpo-learns"), samples()
    path = records.write(tmp_path, chosen, given)
    content, refused = path.read_bytes(), 0
    for place in np.random.default_rng(0).integers(0, len(content), 60):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            assert_same(records.read(path, chosen.digest), given)
        except InputError as error:
            refused += str(path) in str(error)
    assert refused > 40
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="damaged"):
        records.read(path)


def test_records_that_are_not_there_or_of_another_scenario(scenario: Make, tmp_path: Path) -> None:
    chosen = scenario("grpo-learns")
    with pytest.raises(InputError, match="keeps no records"):
        records.read(records.path_of(tmp_path, 0))
    path = records.write(tmp_path, chosen, samples())
    with pytest.raises(InputError, match="steps 3 to 3"):
        records.read(records.path_of(tmp_path, 0))
    with pytest.raises(InputError, match="digest"):
        records.read(path, scenario("grpo-learns", seed=4).digest)


def test_a_write_that_fails_leaves_nothing_and_is_told(scenario: Make, tmp_path: Path) -> None:
    """The record of step 3 does not fit below a limit on file sizes; the one of step 4 is not begun."""

    async def run() -> None:
        recording = Recording(scenario("grpo-learns"), tmp_path)
        recording.obtained(3)
        await recording.begin(3, given(samples(lengths=(900,) * 8)))
        with pytest.raises(OSError):
            await recording.begin(4, given(samples(step=4)))

    def given(value: Samples) -> Callable[[], Awaitable[Samples]]:
        async def give() -> Samples:
            return value

        return give

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "records").iterdir()) == []


def test_recording_writes_every_step_once_with_the_time_it_was_generated(scenario: Make, tmp_path: Path) -> None:
    reads: list[int] = []

    def given(step: int) -> Callable[[], Awaitable[Samples]]:
        async def give() -> Samples:
            reads.append(step)
            return samples(step=step)

        return give

    async def run() -> None:
        recording = Recording(scenario("grpo-learns"), tmp_path)
        for step in range(3):
            recording.obtained(step)
            await recording.begin(step, given(step))
            await recording.begin(step, given(step))  # the critic's update of the same step
        await recording.finish()

    asyncio.run(run())
    assert reads == [0, 1, 2]
    assert records.steps_of(tmp_path) == [0, 1, 2]
    assert_same(records.read(records.path_of(tmp_path, 1)), samples(step=1))


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".npz"])
def test_raw_experience_is_exported(scenario: Make, tmp_path: Path, ending: str) -> None:
    given = samples()
    path, target = records.write(tmp_path, scenario("grpo-learns"), given), tmp_path / "out" / f"step{ending}"
    records.export(path, target)
    if ending == ".parquet":
        assert_same(records.read(target), given)
    elif ending == ".jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
        assert [row["rewards"] for row in rows] == given.columns["rewards"].tolist()
        assert [row["tokens"] for row in rows] == [tokens.tolist() for tokens in given.tokens]
    else:
        found = np.load(target)
        assert found["advantages.ends"].tolist() == np.cumsum([3, 1, 7, 5]).tolist()
        assert found["advantages"].tobytes() == np.concatenate(given.columns["advantages"]).tobytes()


def test_an_export_in_no_known_format_is_refused(scenario: Make, tmp_path: Path) -> None:
    path = records.write(tmp_path, scenario("grpo-learns"), samples())
    with pytest.raises(InputError, match="jsonl"):
        records.export(path, tmp_path / "step.csv")
    with pytest.raises(InputError, match="can be written"):
        records.export(path, Path("/proc/step.jsonl"))
