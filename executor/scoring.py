"""The scoring workers: log-probs of a frozen reference, and rewards from a rule or a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.experience import Samples
from executor.origin import origin
from executor.recorder import Recorder
from executor.tasks import reward_function
from executor.tokenizer import IDS, PAD
from lab.measurement import pass_quantities
from lab.placement import Score, Worker
from lab.policies.microbatch import pack
from lab.scenario import Scenario

if TYPE_CHECKING:
    import torch

Columns = dict[str, Any]
Info = dict[str, Any]


class Passes:
    """Frozen forward passes over the samples of a step, in groups of similar length."""

    def __init__(self, scenario: Scenario, role: str, score: Score, recorder: Recorder) -> None:
        self._spec, self._role = scenario.spec(role), role
        self._score, self._recorder = score, recorder
        self._max_tokens = scenario.pass_tokens

    def over(
        self, samples: Samples, read: Callable[[torch.Tensor, torch.Tensor], Any], notes: dict[str, Any]
    ) -> dict[int, Any]:
        """`read(input_ids, attention_mask)`, both [B, T], gives one result per row; returned by sample."""
        import torch

        found: dict[int, Any] = {}
        for group in pack(samples.lengths, self._max_tokens, self._score.max_batch_samples):
            ids, mask = pad([samples.tokens[i] for i in group])
            with self._recorder.op("forward") as op, torch.inference_mode():
                found |= dict(zip(group, read(torch.from_numpy(ids), torch.from_numpy(mask)), strict=True))
                op["tokens"] = sum(samples.lengths[i] for i in group)
                op["quantities"] = pass_quantities(self._spec, self._role, *ids.shape)
        tokens = sum(samples.lengths)
        quantities = {"calls": 1.0, "samples": float(len(samples)), "tokens": float(tokens)}
        notes |= {"tokens": tokens, "samples": len(samples), "quantities": quantities}
        return found


def pad(sequences: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-padded token ids and their mask, both [B, T]."""
    longest = max(len(sequence) for sequence in sequences)
    ids = np.full((len(sequences), longest), IDS[PAD], dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return ids, mask


class ReferenceWorker:
    """Log-probs of the response tokens under the weights that the actor started from."""

    def __init__(self, worker: Worker, scenario: Scenario) -> None:
        self.worker, self.scenario = worker, scenario
        self.recorder = Recorder(worker.name, worker.pool)

    def ready(self) -> Info:
        with self.recorder.stage("setup", -1):
            self._model = _frozen(self.scenario, "reference", self.worker.threads)
            score = self.scenario.place.reference_score
            assert score is not None, "refused by lab.coherence"
            self._passes = Passes(self.scenario, "reference", score, self.recorder)
        return {"spans": self.recorder.take()}

    def score(self, step: int, samples: Samples) -> tuple[Columns, Info]:
        """`reference_logprobs`: for each sample one number per response token, at the sampling temperature."""
        with self.recorder.stage("reference", step, samples.policy_version) as notes:
            rows = self._passes.over(samples, self._logprobs, notes)
            columns = [
                rows[i][prompt - 1 : length - 1]
                for i, (prompt, length) in enumerate(zip(samples.num_prompt_tokens, samples.lengths, strict=True))
            ]
        return {"reference_logprobs": columns}, {"spans": self.recorder.take()}

    def _logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> NDArray[np.float32]:
        """Log-prob of each next token, shape [B, T - 1]."""
        import torch

        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits / self.scenario.sampling.fixed, dim=-1)
        found: NDArray[np.float32] = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).numpy()
        return found


class RewardWorker:
    """One reward per sample: from a rule, in a process without torch, or from a frozen model's last token."""

    def __init__(self, worker: Worker, scenario: Scenario) -> None:
        self.worker, self.scenario = worker, scenario
        self.recorder = Recorder(worker.name, worker.pool)

    def ready(self) -> Info:
        place = self.scenario.place.reward_score
        assert place is not None, "refused by lab.coherence"
        with self.recorder.stage("setup", -1):
            if place.function is not None:
                self._rule = reward_function(place.function, self.scenario.data.task)
            else:
                self._model = _frozen(self.scenario, "reward", self.worker.threads)
                self._passes = Passes(self.scenario, "reward", place, self.recorder)
        return {"spans": self.recorder.take()}

    def score(self, step: int, samples: Samples) -> tuple[Columns, Info]:
        """`rewards`, shape [N]."""
        judge = self._by_rule if self.scenario.place.reward_function else self._by_model
        with self.recorder.stage("reward", step, samples.policy_version) as notes:
            rewards = np.asarray(judge(samples, notes), dtype=np.float64)
        return {"rewards": rewards}, {"spans": self.recorder.take()}

    def _by_rule(self, samples: Samples, notes: dict[str, Any]) -> list[float]:
        tokens = sum(samples.lengths)
        quantities = {"calls": 1.0, "samples": float(len(samples)), "tokens": float(tokens)}
        notes |= {"tokens": tokens, "samples": len(samples), "quantities": quantities}
        pairs = zip(samples.tokens, samples.num_prompt_tokens, strict=True)
        return [self._rule(tokens[:prompt].tolist(), tokens[prompt:].tolist()) for tokens, prompt in pairs]

    def _by_model(self, samples: Samples, notes: dict[str, Any]) -> list[float]:
        def last(ids: torch.Tensor, mask: torch.Tensor) -> list[float]:
            values = self._model(ids, mask)
            found: list[float] = values.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1).tolist()
            return found

        found = self._passes.over(samples, last, notes)
        return [found[i] for i in range(len(samples))]


def _frozen(scenario: Scenario, role: str, threads: int) -> Any:
    import torch

    from executor.network import build_actor, build_critic

    torch.set_num_threads(threads)
    start = origin(scenario, role)
    network = build_critic(*start, head_std=1.0) if role == "reward" else build_actor(*start)
    return network.eval().requires_grad_(False)
