"""A real engine in a Ray actor, and a sender in this process that plays the trainer's part of the weight sync."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from executor.beams import search
from executor.evaluating import answers
from executor.experience import Samples, merge
from executor.inference import Request
from executor.network import build_actor, save
from executor.origin import origin
from executor.rollout import RolloutWorker
from executor.transfer import WeightSender
from executor.transformers_engine import TransformersBackend, distributions
from executor.workers import HOST, environment, free_port
from lab.scenario import Scenario
from lab.timeline import Span
from tests.executor.pairs import EVERY, Pair

pytestmark = pytest.mark.real
CLOSE = 1e-3


@pytest.fixture(scope="module")
def pair(local_ray: None, scenario: Callable[..., Scenario]) -> Iterator[Pair]:
    """Prompts of 40 tokens fill a block of 32 and are cut by the token budget; eight sequences do not fit the KV cache."""
    blocks = 14
    chosen = scenario(
        "quickstart",
        workload={"prompt_tokens": {"dist": "fixed", "value": 40}},
        rollout={"max_num_seqs": 8, "max_num_batched_tokens": 100, "kv_bytes": blocks * 32 * 2048},
        sampling={"temperature": 0.7},
    )
    assert chosen.spec("actor").kv_bytes_per_token("float32") == 2048
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": environment(threads=1)}}
    engine = ray.remote(RolloutWorker).options(**options).remote(chosen.team("actor", "generate")[0], 0, chosen)
    network = build_actor(*origin(chosen, "actor"))
    ray.get(engine.ready.remote())
    port = free_port()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(WeightSender, HOST, port, 2)
        ray.get(engine.connect.remote(HOST, port, 2))
        yield Pair(chosen, engine, network, sending.result())
    ray.kill(engine)


def stage(spans: list[Span]) -> Span:
    return next(span for span in spans if not span.op)


def test_lengths_are_the_drawn_ones_and_samples_of_a_prompt_adjacent(pair: Pair) -> None:
    samples, _ = pair.generate(3)
    workload, seed = pair.scenario.workload, pair.scenario.seed
    responses = workload.response_lengths(seed, 3).ravel()
    assert [len(logprobs) for logprobs in samples.logprobs] == responses.tolist()
    assert samples.lengths == (40 + responses).tolist()
    assert samples.prompts.tolist() == np.repeat(np.arange(8), 4).tolist()
    heads = [tuple(tokens[:40]) for tokens in samples.tokens]
    assert all(heads[i] == heads[i // 4 * 4] for i in range(32))
    assert len({tuple(tokens) for tokens in samples.tokens}) == 32


def test_seeds_belong_to_step_prompt_and_sample_whichever_engine_draws(pair: Pair) -> None:
    whole, _ = pair.generate(4)
    parts = [pair.generate(4, EVERY[engine::2])[0] for engine in range(2)]
    joined = merge(parts)
    assert joined.prompts.tolist() == whole.prompts.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(joined.tokens, whole.tokens, strict=True))
    other, _ = pair.generate(5)
    assert not any(np.array_equal(a[40:48], b[40:48]) for a, b in zip(other.tokens, whole.tokens, strict=True))


def test_iterations_account_for_every_token(pair: Pair) -> None:
    samples, spans = pair.generate(6)
    total, ops = stage(spans), [span for span in spans if span.op]
    attrs = total.attrs
    assert len(ops) == attrs["iterations"]
    assert {span.op for span in ops} == {"prefill", "decode"}
    fed = sum(samples.lengths) - len(samples)  # the last token of a response is never fed back
    assert sum(span.tokens for span in ops) == fed - attrs["cached_tokens"] + attrs["recomputed_tokens"]
    assert attrs["preemptions"] == sum(span.attrs["preemptions"] for span in ops) > 0
    assert attrs["recomputed_tokens"] > 0
    assert attrs["cached_tokens"] > 0
    assert total.tokens == sum(samples.lengths)


def test_iterations_keep_within_the_engine_s_limits(pair: Pair) -> None:
    _, spans = pair.generate(6)
    total, ops = stage(spans), [span for span in spans if span.op]
    assert all(total.start_s <= span.start_s <= span.end_s <= total.end_s for span in ops)
    assert all(one.end_s <= two.start_s for one, two in pairwise(ops))
    assert max(span.attrs["running"] for span in ops) == 8
    assert max(span.attrs["waiting"] for span in ops) > 0
    assert all(span.tokens <= 128 and 0 <= span.attrs["kv_usage"] <= 1 for span in ops)
    for span in ops:
        found, spec = span.attrs["quantities"], pair.scenario.spec("actor")
        assert found["tokens"] == span.tokens >= found["sequences"] == span.attrs["sequences"]
        assert found["linear_flops"] == spec.linear_flops(span.tokens, head_tokens=found["sequences"])
        assert (span.tokens == found["sequences"]) or span.op == "prefill"


def test_another_policy_version_is_refused(pair: Pair) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="policy version"):
        ray.get(pair.engine.generate.remote(0, pair.version + 1, [0]))


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(pair: Pair) -> None:
    samples, _ = pair.generate(7)
    assert pair.gap(samples) < CLOSE


def test_after_a_sync_the_engine_holds_the_trainer_s_weights(pair: Pair) -> None:
    for _ in range(2):
        pair.change()
        spans = pair.sync()
        samples, _ = pair.generate(8)
        assert pair.gap(samples) < CLOSE
        assert samples.policy_version == pair.version
        assert [span.op for span in spans if span.op] == ["transfer"]


def load(worker: Any, named: dict[str, torch.Tensor]) -> None:
    worker.backend.load_weights(iter(named.items()))
    worker.forget()


def test_weights_that_were_fetched_are_loaded_like_those_that_are_pushed(pair: Pair) -> None:
    pair.generate(8, (0, 1))
    pair.change()
    named = {name: parameter.detach() for name, parameter in pair.network.named_parameters()}
    ray.get(pair.engine.__ray_call__.remote(load, named))
    samples, _ = pair.generate(8, (0, 1))
    assert pair.gap(samples) < CLOSE


def broken_off(worker: Any, named: dict[str, torch.Tensor], after: int) -> None:
    """A load whose sender is gone after so many tensors."""

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named.items())[:after]
        raise RuntimeError("another end has left")

    with pytest.raises(RuntimeError, match="has left"):
        worker.backend.load_weights(items())


def test_after_a_load_that_broke_off_the_next_one_counts_alone(pair: Pair) -> None:
    """Also where it broke off between tensors that the engine keeps as one: of a matrix that it has of query, key and
    value, or of gate and up."""
    names = [name for name, _ in pair.network.named_parameters()]
    layer = [i for i, name in enumerate(names) if ".layers.0." in name]
    for after in range(layer[0], layer[-1] + 2):
        pair.change()
        named = {name: parameter.detach().clone() for name, parameter in pair.network.named_parameters()}
        ray.get(pair.engine.__ray_call__.remote(broken_off, named, after))
        pair.change()
        pair.sync()
        samples, _ = pair.generate(8, (0, 1))
        assert pair.gap(samples) < CLOSE, names[after - 1]


def test_the_check_fails_when_the_sync_is_skipped(pair: Pair) -> None:
    before, _ = pair.generate(9)
    assert pair.gap(before) < CLOSE
    pair.change()
    after, _ = pair.generate(9)
    assert pair.gap(after) > CLOSE
    pair.sync()


def test_the_check_fails_when_the_prefix_cache_is_not_reset(pair: Pair) -> None:
    few = (0, 1)
    pair.generate(10, few)
    pair.change()
    pair.sync(reset_prefix_cache=False)
    stale, spans = pair.generate(10, few)
    assert stage(spans).attrs["cached_tokens"] >= 8 * 32  # every sample hits, also the first of each prompt
    assert pair.gap(stale) > CLOSE
    pair.sync()
    fresh, spans = pair.generate(10, few)
    assert stage(spans).attrs["cached_tokens"] == 6 * 32  # the first sample of each prompt fills the cache anew
    assert pair.gap(fresh) < CLOSE


def started(worker: RolloutWorker, step: int, passes: int) -> dict[int, int]:
    """The samples of two prompts after so many passes: their numbers and the tokens that they have."""
    requests = worker.requests_of([step] * 8, list(range(8)))
    worker.backend.submit(requests, [100 + i for i in range(8)])
    for _ in range(passes):
        worker.backend.advance()
    return {one.sample: one.response_tokens for one in worker.backend.running()}


def held(worker: RolloutWorker, forget: bool) -> None:
    worker.backend.hold()
    worker.backend.receive_weights()
    worker.backend.go_on(forget)


def rest(worker: RolloutWorker, step: int) -> tuple[Samples, list[int], int]:
    """What ends, its numbers, and the tokens that were computed again."""
    ended, again = list[Any](), 0
    while worker.backend.unfinished:
        progress = worker.backend.advance()
        ended += progress.ended
        again += sum(found.recomputed_tokens for found in progress.iterations)
    requests = worker.requests_of([step] * len(ended), [one.index - 100 for one in ended])
    return worker._samples(step, requests, ended), [one.index for one in ended], again


@pytest.mark.parametrize("forget", [True, False])
def test_tokens_before_new_weights_are_of_the_old_ones_and_those_after_of_the_new(pair: Pair, forget: bool) -> None:
    """Whoever keeps the old keys and values draws from neither; whoever comes later finds none of them."""
    call, step = pair.engine.__ray_call__, 13
    had = ray.get(call.remote(started, step, 6))
    old = [parameter.detach().clone() for parameter in pair.network.parameters()]
    pair.change()
    holding = call.remote(held, forget)
    pair.sender.send(pair.network.named_parameters())
    pair.version += 1
    ray.get(holding)
    samples, numbers, again = ray.get(call.remote(rest, step))
    new = [parameter.detach().clone() for parameter in pair.network.parameters()]
    after = cut(samples, [had.get(number, 0) for number in numbers], None)
    assert pair.gap(after) < CLOSE if forget else pair.gap(after) > CLOSE
    assert again > sum(had.values()) if forget else True
    assign(pair, old)
    before = cut(samples, None, [had.get(number, 0) for number in numbers])
    assert sum(len(row) for row in before.logprobs) > 20
    assert pair.gap(before) < CLOSE < pair.gap(samples)
    assign(pair, new)
    ray.get(call.remote(entered, pair.version))
    fresh, spans = pair.generate(step, (0, 1))
    found = stage(spans).attrs["cached_tokens"]
    assert found == 8 * 32 if forget else found == 6 * 32  # what was computed anew is found; what was kept is not
    assert pair.gap(fresh) < CLOSE


def entered(worker: RolloutWorker, version: int) -> None:
    worker.receiver.enter(version)


def assign(pair: Pair, values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(pair.network.parameters(), values, strict=True):
            parameter.copy_(value)


def cut(samples: Samples, first: list[int] | None, last: list[int] | None) -> Samples:
    """Only response tokens from `first` on are counted as such, or those before `last`."""
    known = samples.num_prompt_tokens + np.asarray(first or [0] * len(samples))
    ends = [len(row) for row in samples.tokens] if last is None else (samples.num_prompt_tokens + last).tolist()
    rows = [row[start:] for row, start in zip(samples.logprobs, first or [0] * len(samples), strict=True)]
    rows = rows if last is None else [row[:end] for row, end in zip(rows, last, strict=True)]
    kept = [i for i, row in enumerate(rows) if len(row)]
    return replace(
        samples, num_prompt_tokens=known, tokens=[row[:end] for row, end in zip(samples.tokens, ends, strict=True)],
        logprobs=rows,
    ).take(kept)  # fmt: skip


def left(worker: RolloutWorker, step: int) -> tuple[dict[int, int], list[int]]:
    """Six of eight leave after some passes, two of them unknown or gone already."""
    started(worker, step, 5)
    made = worker.backend.abort([100, 102, 103, 104, 106, 99])
    return made, sorted(rest(worker, step)[1])


def test_what_is_aborted_leaves(pair: Pair) -> None:
    made, ended = ray.get(pair.engine.__ray_call__.remote(left, 14))
    assert sorted(made) == [100, 102, 103, 104, 106]
    assert ended == [101, 105, 107]
    assert max(made.values()) > 0
    samples, _ = pair.generate(14)
    assert len(samples) == 32


def test_an_evaluation_leaves_nothing_in_the_prefix_cache(pair: Pair) -> None:
    """A resumed run does not evaluate again, and its next rollout has to compute what it would have."""
    pair.generate(12, (0, 1))
    _, known = pair.generate(12, (0, 1))
    (first, _), (again, _) = ray.get(
        [pair.engine.__ray_call__.remote(answers, 12, pair.version, (0, 1)) for _ in range(2)]
    )
    _, anew = pair.generate(12, (0, 1))
    assert stage(anew).attrs["cached_tokens"] < stage(known).attrs["cached_tokens"]
    assert [tokens.tolist() for tokens in first.tokens] == [tokens.tolist() for tokens in again.tokens]


def test_a_probe_is_short_and_leaves_no_span(pair: Pair) -> None:
    samples = ray.get(pair.engine.probe.remote(11))
    assert [len(logprobs) for logprobs in samples.logprobs] == [8, 8]
    assert pair.gap(samples) < CLOSE
    _, spans = pair.generate(11, (0,))
    assert {span.stage for span in spans} == {"rollout"}


def ask(pair: Pair, requests: Sequence[Request], **how: bool) -> Samples:
    """Requests of our own, whatever the scenario would ask for."""
    return ray.get(pair.engine.__ray_call__.remote(lambda worker: worker._run(0, requests, {}, **how)))


def test_draws_of_every_kind_stand_side_by_side_with_the_logprobs_they_were_drawn_from(pair: Pair) -> None:
    kinds = [
        {}, {"temperature": 0.5}, {"temperature": 1.4, "top_p": 0.7}, {"top_p": 0.4}, {"repetition_penalty": 1.6},
        {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 0.7},
    ]  # fmt: skip
    requests = [
        Request(prompt_index=i, sample=0, prompt=[1, 5, 6, 7 + i, 7], num_tokens=12, seed=i, **kind)
        for i, kind in enumerate(kinds)
    ]
    samples = ask(pair, requests)
    assert samples.temperatures.tolist() == pytest.approx([request.temperature or 1.0 for request in requests])
    for request, tokens, theirs in zip(requests, samples.tokens, samples.logprobs, strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logits = pair.network(input_ids=ids[None]).logits[0, 4:-1]
        responses = [tokens[5 : 5 + i].tolist() for i in range(12)]
        ours = distributions(logits, [request] * 12, responses).gather(1, ids[5:, None])[:, 0].numpy()
        assert np.abs(ours - theirs).max() < CLOSE
        if request.temperature == 0:
            assert logits.argmax(-1).tolist() == ids[5:].tolist()


def test_responses_end_where_the_model_ends_them(pair: Pair) -> None:
    stop = (5, 6, 7, 8, 9, 10)
    asked = [Request(prompt_index=i, prompt=[1], num_tokens=20, seed=i, stop=stop) for i in range(16)]
    responses = [tokens[1:].tolist() for tokens in ask(pair, asked).tokens]
    assert min(map(len, responses)) < 20
    for tokens in responses:
        assert not set(tokens[:-1]) & set(stop)
        assert tokens[-1] in stop or len(tokens) == 20


def test_both_backends_find_the_same_beams(pair: Pair, tmp_path: Path) -> None:
    requests = [
        Request(prompt_index=prompt, sample=i, prompt=[1, 5 + prompt, 6, 7], num_tokens=6 + prompt, seed=0)
        for prompt in range(2)
        for i in range(4)
    ]
    save(pair.network, tmp_path)
    other = TransformersBackend(pair.scenario, pair.scenario.team("actor", "generate")[0], tmp_path)
    expected = {one.index: one for progress in search(other, requests) for one in progress.ended}
    found = ask(pair, requests, searches=True)
    assert len(found) == 2 * 4
    for i, (tokens, logprobs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        assert tokens[4:].tolist() == expected[i].tokens
        assert np.abs(logprobs - expected[i].logprobs).max() < CLOSE
    assert (found.seeds == -1).all()


class Collector:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int], Samples]] = []

    def submit(self, step: int, indices: list[int], samples: Samples) -> None:
        self.told.append((step, indices, samples))

    def all(self) -> list[tuple[int, list[int], Samples]]:
        return self.told


def test_samples_are_handed_on_as_they_end(pair: Pair) -> None:
    sink: Any = ray.remote(num_cpus=0)(Collector).remote()
    whole, _ = ray.get(pair.engine.generate.remote(12, pair.version, (3, 5), sinks=[sink]))
    told: list[tuple[int, list[int], Samples]] = []
    while sum(len(indices) for _, indices, _ in told) < len(whole):  # calls of two processes come in any order
        told = ray.get(sink.all.remote())
    assert len(told) > 1
    assert {step for step, _, _ in told} == {12}
    places = [index for _, indices, _ in told for index in indices]
    assert sorted(places) == [*range(12, 16), *range(20, 24)]
    mine = {index: part.tokens[i] for _, indices, part in told for i, index in enumerate(indices)}
    for prompt, sample, tokens in zip(whole.prompts, whole.indices, whole.tokens, strict=True):
        assert np.array_equal(mine[int(prompt) * 4 + int(sample)], tokens)
    ray.kill(sink)
