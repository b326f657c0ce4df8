"""What a reward may be asked of beside a model on the lab's own devices: a service elsewhere, or a cache of scores."""

from __future__ import annotations

import math
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from lab.policies import scoring as policy
from lab.records import Record
from lab.units import Seconds
from lab.workload import possible

REWARDS = {
    "task": "the reward of the built-in task",
    "length": "1 - |n - target| / max(n, target) of a response of n tokens; arguments: target (16)",
    "contains": "1 where the response holds `text`, else 0; arguments: text",
    "share": "share of the response's tokens that are characters of `text`; arguments: text",
    "distinct": "different n-grams of the response over all of them; arguments: n (2)",
    "ended": "1 where the response ends with the end-of-text token, else 0",
}
"""reward functions by name: what they give"""


class RemoteService(Record):
    """A service that others run, called once for every batch; what it costs is waiting.

    A simulation draws how it answers from latency, latency_p95 and failure_share; a real run asks it at its `url`, and
    reports what it did. Timeout, retries and concurrency hold in both.
    """

    url: str | None = Field(
        default=None,
        description="http://host:port/path that a real run sends each batch to, as JSON; null: it can be simulated only",
        json_schema_extra={"effect": "learning"},
    )

    latency: Seconds = Field(gt=0, description="mean time from a call to its answer")
    latency_p95: Seconds | None = Field(
        default=None, description="95th percentile of lognormal latencies, drawn from the seed; null: all take the mean"
    )
    timeout: Seconds | None = Field(
        default=None, gt=0, description="an answer that takes longer is given up; null: none"
    )
    failure_share: float = Field(default=0.0, ge=0, lt=1, description="share of answers that are errors")
    retries: int = Field(default=2, ge=0, le=100, description="further attempts of a call that failed, each at once")
    concurrency: int = Field(default=1, ge=1, le=10**5, description="calls under way together, of each worker")

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            address = urlsplit(value)
            good = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
            good = good and value.isascii() and value.isprintable() and " " not in value
        except ValueError:
            good = False
        if not good:
            raise ValueError("this is no address of the form http://host:port/path")
        return value

    @model_validator(mode="after")
    def _drawn(self) -> RemoteService:
        if self.latency_p95 is not None:
            possible(self.latency, self.latency_p95)
        elif self.timeout is not None and self.timeout < self.latency:
            raise ValueError(f"every call takes {self.latency:g} s and is given up after {self.timeout:g} s")
        return self

    @property
    def rule(self) -> policy.Remote:
        timeout = math.inf if self.timeout is None else self.timeout
        return policy.Remote(
            latency_s=self.latency, p95_s=self.latency_p95, timeout_s=timeout, failure_share=self.failure_share,
            retries=self.retries,
        )  # fmt: skip


class ScoreCache(Record):
    """Scores that are kept by (version of the reward model, prompt, response); looking one up costs nothing here.

    A simulation draws which samples are known; a real run finds out, and reports its hits.
    """

    hit_share: float = Field(
        gt=0, le=1, description="share of samples whose score is known, as a simulation reckons with it"
    )
    version_steps: int | None = Field(
        default=None,
        ge=1,
        description="steps after which the reward model has a new version: nothing is known in the first of each; "
        "null: it never changes, and its scores are there from the start",
    )

    def share(self, step: int) -> float:
        """Of the samples of a step, how many are known."""
        return 0.0 if self.version_steps is not None and step % self.version_steps == 0 else self.hit_share
