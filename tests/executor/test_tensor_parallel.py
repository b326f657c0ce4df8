"""One engine cut over two processes: vLLM's own multi-process executor, with weights sent to both."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch

from executor.network import build_actor
from executor.origin import origin
from executor.rollout import RolloutWorker
from executor.transfer import WeightSender
from executor.workers import HOST, environment, free_port
from lab.scenario import Scenario

pytestmark = [pytest.mark.real, pytest.mark.full]
CLOSE = 1e-3


def gap(network: torch.nn.Module, samples: Any) -> float:
    worst = 0.0
    for tokens, prompt, theirs in zip(samples.tokens, samples.num_prompt_tokens, samples.logprobs, strict=True):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logits = network(input_ids=ids[None]).logits[0, prompt - 1 : -1]
        ours = torch.log_softmax(logits, -1).gather(-1, ids[prompt:, None]).squeeze(-1).numpy()
        worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst


def test_two_ranks_draw_what_the_whole_network_draws_from_before_and_after_a_sync(
    local_ray: None, scenario: Callable[..., Scenario]
) -> None:
    chosen = scenario("quickstart", place={"actor.generate": [{"pool": "all", "tensor_parallel": 2}]})
    worker = chosen.team("actor", "generate")[0]
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": environment(threads=1)}}
    engine: Any = ray.remote(RolloutWorker).options(**options).remote(worker, 0, chosen)
    network = build_actor(*origin(chosen, "actor"))
    ray.get(engine.ready.remote())
    port, world = free_port(), 1 + 2
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(WeightSender, HOST, port, world)
        ray.get(engine.connect.remote(HOST, port, world))
        sender = sending.result()
    before, info = ray.get(engine.generate.remote(0, 0, range(8)))
    assert gap(network, before) < CLOSE
    assert sum(span.op == "decode" for span in info["spans"]) > 10
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    received = engine.receive_weights.remote(0)
    sender.send(network.named_parameters())
    ray.get(received)
    after, _ = ray.get(engine.generate.remote(1, 1, range(8)))
    assert gap(network, after) < CLOSE
    ray.get(engine.release.remote())
    ray.kill(engine)
