"""Claims about how tokens are drawn. Work and entropy can be computed; what the model learns from it cannot."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from simulator.studies.claims import Bench, Judgement
from simulator.studies.claims.rollout import generated

VOCABULARY = 50_000
STEEPNESS = (0.8, 1.2, 2.0)
"""exponents of Zipf's law that next-token distributions are stood in for with: flat, usual, peaked"""


def distribution(exponent: float, temperature: float = 1.0, top_p: float = 1.0) -> NDArray[np.float64]:
    """Probabilities of the tokens that are drawn from, the likeliest first."""
    logits = -exponent * np.log(np.arange(1, VOCABULARY + 1)) / temperature
    found = np.exp(logits - logits.max())
    found /= found.sum()
    kept = int(np.searchsorted(np.cumsum(found), top_p)) + 1 if top_p < 1 else VOCABULARY
    return np.asarray(found[:kept] / found[:kept].sum(), np.float64)


def entropy(probabilities: NDArray[np.float64]) -> float:
    """In nats."""
    return float(-(probabilities * np.log(probabilities)).sum())


def lower_top_p(bench: Bench) -> Judgement:
    """Entropy when the nucleus is made smaller."""
    found = {p: [entropy(distribution(steep, top_p=p)) for steep in STEEPNESS] for p in (1.0, 0.95, 0.9, 0.8)}
    falls = all(
        a > b
        for high, low in ((1.0, 0.95), (0.95, 0.9), (0.9, 0.8))
        for a, b in zip(found[high], found[low], strict=True)
    )
    told = ", ".join(f"{rows[1]:.2f} nats at top-p {p:g}" for p, rows in found.items())
    return Judgement(
        value=told, verdict="does not hold" if falls else "holds", numbers={f"{p:g}": rows[1] for p, rows in found.items()},
        reason="Cutting the tail and renormalising always makes the rest more certain, whatever the distribution (Zipf's law "
        "stands in for it here): a lower top-p lowers the entropy further. To raise it, raise top-p or the temperature.",
    )  # fmt: skip


def hotter_is_faster(bench: Bench) -> Judgement:
    """Rollout time at temperatures 0.7 and 1.2 when responses grow, stay or shrink with it."""
    found = {}
    for name, slope in (("grow", 0.5), ("stay", 0.0), ("shrink", -0.5)):
        times = []
        for heat in (0.7, 1.2):
            said = {
                "sampling/temperature": heat,
                "sampling/lengths/temperature": slope,
                "workload/response_tokens/max": 4000,
            }
            times.append(generated(bench, 256, said).busy_s("rollout"))
        found[name] = times[1] / times[0]
    return Judgement(
        value=f"rollout takes {found['grow']:.2f}× as long at 1.2 as at 0.7 if responses grow with the temperature "
        f"(by e^0.5 a unit), {found['stay']:.2f}× if they do not, {found['shrink']:.2f}× if they shrink",
        verdict="does not hold" if found["stay"] == 1 and found["grow"] > 1 else "partly", numbers=found,
        reason="The temperature changes no cost of a token. Only if responses became shorter with it would sampling be "
        "faster, and nothing says that they do; the slopes here are assumed. It is no means against slow sampling.",
    )  # fmt: skip


def usual_nucleus(bench: Bench) -> Judgement:
    """What a nucleus of 0.9 to 0.95 leaves out."""
    kept = {p: len(distribution(1.2, top_p=p)) / VOCABULARY for p in (0.9, 0.95)}
    lost = {p: 1 - entropy(distribution(1.2, top_p=p)) / entropy(distribution(1.2)) for p in kept}
    return Judgement(
        value=f"{1 - kept[0.9]:.1%} to {1 - kept[0.95]:.1%} of the tokens are cut, 5 to 10 % of the probability, "
        f"{lost[0.95]:.0%} to {lost[0.9]:.0%} of the entropy",
        verdict="partly" if lost[0.9] > 0.1 else "holds", numbers={"kept_90": kept[0.9], "kept_95": kept[0.95], "lost": lost[0.9]},
        reason="Of a Zipf-shaped distribution over 50,000 tokens, a stand-in. It does cut a long tail of unlikely tokens "
        "and keeps most of the mass. But the policy that is trained "
        "is the whole one: log-probabilities of the engine then belong to another distribution, unless they are taken "
        "before the cut.",
    )  # fmt: skip


def temperature_advice(bench: Bench) -> Judgement:
    """Temperatures of 0.8 to 1.0 first and 0.6 to 0.8 later: entropy, and work."""
    found = {heat: entropy(distribution(1.2, temperature=heat)) for heat in (1.0, 0.8, 0.6)}
    moving = {"sampling/temperature": {"start": 1.0, "end": 0.6, "schedule": "linear"}, "num_steps": 3}
    same = generated(bench, 64, moving).step_s / generated(bench, 64, {"num_steps": 3}).step_s
    return Judgement(
        value=f"entropy {found[1.0]:.2f}, {found[0.8]:.2f} and {found[0.6]:.2f} nats at 1.0, 0.8 and 0.6; {same:.2f}× the "
        "step time",
        verdict="cannot be judged", numbers={f"{heat:g}": value for heat, value in found.items()} | {"time": same},
        reason="Which diversity helps learning is not simulated. It costs no time. At a temperature other than 1 samples are "
        "not the policy's own, which PPO's ratio must take into account.",
    )  # fmt: skip


def low_entropy(bench: Bench) -> Judgement:
    """Where an entropy of 0.5 lies."""
    sharp = entropy(distribution(2.0, temperature=0.6))
    return Judgement(
        value=f"0.5 nats are {0.5 / np.log(2):.2f} bits, {np.exp(0.5):.1f} equally likely tokens; a peaked distribution at "
        f"temperature 0.6 has {sharp:.2f}",
        verdict="cannot be judged", numbers={"sharp": sharp},
        reason="The unit is not said, and code or mathematics lie there without any collapse: a threshold must be relative "
        "to where the run began.",
    )  # fmt: skip


def repetition_penalty(bench: Bench) -> Judgement:
    """What a penalty of 1.1 costs."""
    ratio = generated(bench, 64, {"sampling/repetition_penalty": 1.1}).step_s / generated(bench, 64).step_s
    return Judgement(
        value=f"{ratio:.2f}× the step time", verdict="cannot be judged", numbers={"time": ratio},
        reason="Whether it keeps a policy from gaming its reward is a matter of learning. It also makes samples those of "
        "another distribution than the policy's.",
    )  # fmt: skip


def beam_search(bench: Bench) -> Judgement:
    """Rollout time of beam search with eight beams against eight samples."""
    beams = generated(bench, 64, {"sampling/beams": 8, "workload/samples_per_prompt": 8})
    ratio = beams.busy_s("rollout") / generated(bench, 64).busy_s("rollout")
    return Judgement(
        value=f"eight beams take {ratio:.2f}× the time of eight samples", verdict="cannot be judged", numbers={"time": ratio},
        reason="That beams resemble each other is a property of the model. What can be said is the cost: all beams of a prompt "
        "run to the longest of them, and none ends early.",
    )  # fmt: skip


JUDGES: dict[str, Callable[[Bench], Judgement]] = {
    "lower-top-p": lower_top_p,
    "hotter-is-faster": hotter_is_faster,
    "usual-nucleus": usual_nucleus,
    "temperature-advice": temperature_advice,
    "low-entropy": low_entropy,
    "repetition-penalty": repetition_penalty,
    "beam-search": beam_search,
}
