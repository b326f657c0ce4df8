"""The scoring workers: log-probs of a frozen reference, and rewards from a function, a service or a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from executor.algorithms.mismatch import mismatched
from executor.experience import Samples
from executor.kept import Kept
from executor.origin import origin
from executor.recorder import Recorder
from executor.remote import ByService
from executor.rewards import ByFunction, Columns, RewardFailed, counted, reward_function, whose
from executor.services import Desk, Score
from executor.tokenizer import IDS, PAD
from lab.measurement import pass_quantities
from lab.placement import RewardScore, Worker
from lab.placement import Score as Placed
from lab.policies.microbatch import pack
from lab.policies.scoring import Batching
from lab.scenario import Scenario

if TYPE_CHECKING:
    import torch

Info = dict[str, Any]
TRUNK = "trunk"
"""what a head needs of its trunk: the last hidden state of each sample, [N, hidden]"""


ALIGNED = 16
"""tokens; rows of a multiple of this length come out of torch's CPU kernels the same to the bit, whatever is beside them:
its attention takes blocks of so many, the rest of a row goes another way"""


class Passes:
    """Frozen forward passes over samples, in groups of similar length.

    Which samples share a pass is a matter of time where they come one by one or a cache knows some. Rows are padded to
    ALIGNED tokens there, so that scores are not, and a resumed run learns what it would have learned.
    """

    def __init__(self, scenario: Scenario, worker: Worker, recorder: Recorder) -> None:
        self._spec, self._role = scenario.spec(worker.role), worker.role
        self._max_samples, self._recorder = placed(scenario, worker.role).max_batch_samples, recorder
        self._max_tokens = scenario.pass_tokens
        part = placed(scenario, worker.role)
        varies = scenario.schedule.scoring == "sample" or (isinstance(part, RewardScore) and part.cache is not None)
        self._multiple = ALIGNED if varies else 1

    def over(
        self, samples: Samples, read: Callable[[torch.Tensor, torch.Tensor, list[int]], Any], notes: dict[str, Any]
    ) -> list[Any]:
        """`read(input_ids, attention_mask, group)`, ids and mask [B, T], gives one result per row; in samples' order."""
        import torch

        found: dict[int, Any] = {}
        for group in pack(samples.lengths, self._max_tokens, self._max_samples):
            ids, mask = pad([samples.tokens[i] for i in group], self._multiple)
            with self._recorder.op("forward") as op, torch.inference_mode():
                found |= dict(zip(group, read(torch.from_numpy(ids), torch.from_numpy(mask), group), strict=True))
                op["tokens"] = sum(samples.lengths[i] for i in group)
                op["quantities"] = pass_quantities(self._spec, self._role, *ids.shape)
        notes |= counted(samples)
        return [found[i] for i in range(len(samples))]


def pad(sequences: Sequence[NDArray[np.int64]], multiple: int = 1) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-padded token ids and their mask, both [B, T], T a multiple of `multiple`."""
    longest = -(-max(len(sequence) for sequence in sequences) // multiple) * multiple
    ids = np.full((len(sequences), longest), IDS[PAD], dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return ids, mask


def placed(scenario: Scenario, role: str) -> Placed:
    """How the scorers of a role are placed. Raises ValueError where none are."""
    for name, part in scenario.scored.items():
        if name == role:
            return part
    raise ValueError(f"nothing scores as {role}")


class Scorer:
    """One worker of a scoring role: it scores its share of a step at once, or as samples come.

    Samples are dealt to the workers of a role in turn.
    """

    def __init__(self, worker: Worker, scenario: Scenario) -> None:
        self.worker, self.scenario = worker, scenario
        self.recorder = Recorder(worker.name, worker.pool)
        team = scenario.team(worker.role, worker.work)
        self._index, self._number = team.index(worker), len(team)
        if f"{worker.role}.score" in scenario.scaling and scenario.schedule.mode != "asynchronous":
            self._number = 1  # all samples come to the first one, which hands batches on
        self.part: Any = None
        """of a step that the first one leads: the stage that is recorded, and its notes"""
        self.started_s = 0.0
        """how long its start took"""

    def ready(self) -> Info:
        with self.recorder.stage("setup", -1):
            self.load()
        spans = self.recorder.take()
        self.started_s = max(span.seconds for span in spans)
        return {"spans": spans}

    def load(self) -> None:
        """Builds what scores."""
        self._score = self._built()
        if self.scenario.schedule.scoring == "sample" and self.scenario.schedule.mode != "asynchronous":
            self.desk = Desk(self.worker.role, self.recorder, self._batching(), self._score, self._num_servers)

    def release(self) -> None:
        """Drops what scores, which is as it came; only models take turns."""
        del self._score

    def _built(self) -> Score:
        raise NotImplementedError

    @property
    def _num_servers(self) -> int:
        return 1

    def _batching(self) -> Batching:
        part = placed(self.scenario, self.worker.role)
        limit = None if isinstance(part, RewardScore) and part.kind != "model" else self.scenario.pass_tokens
        return Batching(max_samples=part.max_batch_samples, max_tokens=limit, max_wait_s=part.max_wait)

    def score(self, step: int, samples: Samples, trunk: Any = None) -> tuple[Columns, Info]:
        """The columns of this worker's share of a step; by index in the step where there are several workers.

        `trunk`: of a head, what `trunk` of the reference's worker gave.
        """
        mine = list(range(self._index, len(samples), self._number))
        share = samples if self._number == 1 else samples.take(mine)
        if trunk is not None:
            share = share.with_columns(**{TRUNK: trunk})
        with self.recorder.stage(self.worker.role, step, samples.policy_version) as notes:
            columns = self._score(share, notes) if mine else {}
        return self._handed_on(step, columns, mine), {"spans": self.recorder.take()}

    def judged(self, samples: Samples) -> Columns:
        """The columns of all these samples, which belong to no stage; leaves no span."""
        return self._score(samples, {})

    def submit(self, step: int, indices: Sequence[int], samples: Samples) -> None:
        """Samples of a step that have just ended; this worker takes those of its share. `indices`: within the step."""
        mine = [row for row, i in enumerate(indices) if i % self._number == self._index]
        if mine:
            self.desk.submit(step, samples.take(mine))

    def begin(self, step: int, policy_version: int, buffer: Any) -> None:
        """Without a barrier: from now on samples are scored as they come, for this step at first. The `buffer` gets what
        they score."""
        from executor.counter import Counter

        def told(numbers: list[int], columns: Columns) -> None:
            buffer.scored.remote(self.worker.role, numbers, columns)

        arguments = (self.worker.role, self.recorder, self._batching(), self._score, told, self._num_servers)
        self._counter = Counter(*arguments)
        self._counter.begin(step, policy_version)

    def take_in(self, numbers: Sequence[int], samples: Samples) -> None:
        """Samples that have just ended, by the number under which they were issued: this worker takes its share."""
        mine = [row for row, number in enumerate(numbers) if number % self._number == self._index]
        if mine:
            self._counter.submit([numbers[row] for row in mine], samples.take(mine))

    def hand_on(self, step: int, policy_version: int, last: bool) -> Info:
        """The batch of the step before is made; what is scored from now on belongs to `step`."""
        return {"spans": self._counter.hand_on(step, policy_version, last=last)}

    def open(self, step: int, policy_version: int, now_s: float = 0.0) -> None:
        """From now on samples of a step are scored as they come; `now_s` by the clock of the run."""
        self.desk.open(step, policy_version, now_s)

    def collect(self, step: int, samples: Samples) -> tuple[Columns, Info]:
        """Like `score`, of samples that have come one by one; those that have not are scored now."""
        numbers = samples.prompts * self.scenario.num_tried + samples.indices
        mine = np.flatnonzero(numbers % self._number == self._index).tolist()
        columns = self.desk.collect(step, samples if self._number == 1 else samples.take(mine))
        return self._handed_on(step, columns, mine), {"spans": self.recorder.take() + self.desk.others()}

    def _handed_on(self, step: int, columns: Columns, mine: Sequence[int]) -> Columns:
        if self._number == 1:
            return columns
        return {name: dict(zip(mine, column, strict=True)) for name, column in columns.items()}


class ReferenceWorker(Scorer):
    """Log-probs of the response tokens under the weights that the actor started from."""

    def _built(self) -> Score:
        self._model = frozen(self.scenario, self.worker)
        self._passes = Passes(self.scenario, self.worker, self.recorder)
        self._trunks: dict[int, Any] = {}
        return self._columns

    def release(self) -> None:
        super().release()
        del self._model, self._passes

    def _columns(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        """`reference_logprobs`: for each sample one number per response token, at the temperature it was drawn at.

        Where the algorithm estimates a KL from mismatched responses, `mismatched_logprobs` [N] is the sum over those.
        """
        rows = self._read(samples, notes)
        columns: Columns = {"reference_logprobs": [row for row, _ in rows]}
        if self.scenario.algorithm.extra_forwards:
            others = self._read(mismatched(samples, self.scenario.update.minibatch_samples), {})
            columns["mismatched_logprobs"] = np.asarray([row.sum(dtype=np.float64) for row, _ in others])
        if self.scenario.place.reward_head:
            columns[TRUNK] = np.stack([hidden for _, hidden in rows])
        return columns

    def trunk(self, step: int) -> Any:
        """What the head needs of a step that was scored here: the last hidden states of its share, [N, hidden]."""
        return self._trunks.pop(step)

    def _handed_on(self, step: int, columns: Columns, mine: Sequence[int]) -> Columns:
        if TRUNK in columns:
            self._trunks[step] = columns.pop(TRUNK)
        return super()._handed_on(step, columns, mine)

    def _read(self, samples: Samples, notes: dict[str, Any]) -> list[tuple[NDArray[np.float32], Any]]:
        """Of each sample the log-probs of its response tokens, and the last hidden state where a head needs it."""

        def read(ids: torch.Tensor, mask: torch.Tensor, group: list[int]) -> list[tuple[Any, Any]]:
            logprobs, hidden = self._logprobs(ids, mask, samples.temperatures[group])
            spans = [(int(samples.num_prompt_tokens[i]) - 1, samples.lengths[i] - 1) for i in group]
            rows = [logprobs[row, start:end].copy() for row, (start, end) in enumerate(spans)]
            return list(zip(rows, hidden if hidden is not None else [None] * len(rows), strict=True))

        return self._passes.over(samples, read, notes)

    def _logprobs(self, ids: torch.Tensor, mask: torch.Tensor, temperatures: NDArray[np.float32]) -> tuple[Any, Any]:
        """Log-prob of each next token, [B, T - 1]; for a head the hidden state of each row's last token, [B, hidden]."""
        import torch

        head = self.scenario.place.reward_head
        found = self._model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=head)
        heat = torch.from_numpy(np.array(temperatures, dtype=np.float32))[:, None, None]
        logprobs = torch.log_softmax(found.logits[:, :-1].float() / heat, dim=-1)
        rows = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).numpy()
        if not head:
            return rows, None
        last = found.hidden_states[-1][torch.arange(len(ids)), mask.sum(1) - 1]
        return rows, last.float().numpy()


class RewardWorker(Scorer):
    """Rewards: of a function or a service, in a process without torch, or of a frozen model's last token."""

    _model: Any
    _passes: Any

    def release(self) -> None:
        super().release()
        self._model = self._passes = None

    def judged(self, samples: Samples) -> Columns:
        """As of any scorer; a head gets a trunk of its own for this, where samples have not passed the reference's."""
        if self._place.shares_trunk and TRUNK not in samples.columns:
            if not hasattr(self, "_trunk"):
                self._trunk = ReferenceWorker(self.scenario.team("reference", "score")[0], self.scenario)
                self._trunk.load()
            samples = samples.with_columns(**{TRUNK: self._trunk.judged(samples)[TRUNK]})
        return super().judged(samples)

    @property
    def _place(self) -> RewardScore:
        part = placed(self.scenario, "reward")
        assert isinstance(part, RewardScore)
        return part

    @property
    def _num_servers(self) -> int:
        return self._place.remote.concurrency if self._place.remote is not None else 1

    def _built(self) -> Score:
        place = self._place
        score = self._source(place)
        return Kept(score, place.cache).score if place.cache is not None else score

    def _source(self, place: RewardScore) -> Score:
        if place.kind == "function":
            assert place.function is not None, "refused by lab.placement"
            function = reward_function(place.function, self.scenario.data.task, place.arguments)
            return ByFunction(place.function, function, place.arguments).score
        if place.kind == "remote":
            assert place.remote is not None and place.remote.url is not None, "refused by executor.limits"
            return ByService(place.remote.url, place.remote, place.max_batch_samples).score
        self._model = frozen(self.scenario, self.worker)
        if place.shares_trunk:
            self._model = self._model.value_head
            return self._by_head
        self._passes = Passes(self.scenario, self.worker, self.recorder)
        return self._by_model

    def _by_model(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        def last(ids: torch.Tensor, mask: torch.Tensor, group: list[int]) -> list[float]:
            values = self._model(ids, mask)
            found: list[float] = values.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1).tolist()
            return found

        return {"rewards": finite(self._passes.over(samples, last, notes), samples)}

    def _by_head(self, samples: Samples, notes: dict[str, Any]) -> Columns:
        """From the hidden states that the reference's passes have left; samples carry them."""
        import torch

        with torch.inference_mode():
            found = self._model(torch.from_numpy(np.array(samples.columns[TRUNK]))).squeeze(-1).tolist()
        notes |= counted(samples)
        return {"rewards": finite(found, samples)}


def finite(rewards: Sequence[float], samples: Samples) -> NDArray[np.float64]:
    """The rewards of a model, [N]. Raises RewardFailed naming the first that is no finite number."""
    found = np.asarray(rewards, dtype=np.float64)
    if (wrong := np.flatnonzero(~np.isfinite(found))).size:
        i = int(wrong[0])
        raise RewardFailed(f"the reward model gave {found[i]}, which is no finite number, for {whose(samples, i)}")
    return found


def frozen(scenario: Scenario, worker: Worker) -> Any:
    """The network that a worker scores with, its weights as the worker's dtype says: float32 or int8."""
    import torch

    from executor.network import build_actor, build_critic

    torch.set_num_threads(worker.threads)
    start = origin(scenario, worker.role)
    network = build_critic(*start, head_std=1.0) if worker.role == "reward" else build_actor(*start)
    if worker.dtype == "int8":
        from executor.quantized import quantize

        network = quantize(network)
    return network.eval().requires_grad_(False)
