"""When a preset cannot show a claim: the criteria of "not visible" and of a base that is not run.

A claim about what changes the sink on x_1 (or the massive activations that go with it) says nothing at a preset whose
base has none; a window w < T keeps alpha_1 at w / T, which may be below eps; and with a fixed first token as base, the
sink is tied to that token and no prefix can move it. A gate gives the verdict and why, or None where it is open.
"""

from __future__ import annotations

from collections.abc import Callable

from sinkutils.ledger import open_models
from sinkutils.ledger.evidence import EMERGED, EPSILON, MASSIVE, NOT_RUN, NOT_VISIBLE, Results
from sinkutils.study.grid import config, largest_alpha, unavailable

Gate = Callable[[Results], tuple[str, str] | None]


def sink_of(name: str, results: Results) -> tuple[str, str] | None:
    """A claim about a sink needs a run that has one."""
    value, label = results.mean(name), results.label(name)
    if value is None:
        state = "failed to train" if results.failed(name) else "is not recorded"
        return NOT_RUN, f"{label}, whose sink it compares with, {state}"
    if value < EMERGED:
        return NOT_VISIBLE, f"{label} has a Sink_1 of {value:.1f} %, under {EMERGED:g} %, at this scale"
    return None


def massive(results: Results) -> tuple[str, str] | None:
    """A claim about massive activations needs a base that has them."""
    ratio = results.mean("base", "hidden")
    if ratio is not None and ratio < MASSIVE:
        label = results.label("base")
        return NOT_VISIBLE, f"{label} has no massive activations: ||h_1|| at most {ratio:.1f} times the others"
    return sink_of("base", results)


def movable(results: Results) -> tuple[str, str] | None:
    """A claim about where the sink goes needs a base whose sink is not tied to a token."""
    if config("base", results.preset).data.fixed_position:
        return (
            NOT_VISIBLE,
            "the base's sink is tied to its fixed token on x_1: no prefix or position moves it",
        )
    return sink_of("base", results)


def or_measured(gate: Gate, kind: str) -> Gate:
    """The gate of our own model, which does not stand in the way of measured open models."""
    return lambda results: None if open_models.measurements(kind) else gate(results)


def any_sink(*names: str) -> Gate:
    """Some of these runs must show a sink on some position."""

    def gate(results: Results) -> tuple[str, str] | None:
        found = [results.mean(name, "largest_sink") for name in names]
        seen = [value for value in found if value is not None]
        if len(seen) == len(names) and max(seen) < EMERGED:
            return NOT_VISIBLE, f"neither of {', '.join(names)} has a Sink_k of {EMERGED:g} % at this scale"
        return None

    return gate


def windows(results: Results, names: tuple[str, ...]) -> list[str]:
    """The windows under which alpha_1 can exceed eps at this preset."""
    held = [name for name in names if name not in unavailable(results.preset)]
    return [name for name in held if largest_alpha(config(name, results.preset)) > EPSILON]


def any_window(names: tuple[str, ...]) -> Gate:
    """One of these windows must leave room for a sink, and there must be one without a window."""

    def gate(results: Results) -> tuple[str, str] | None:
        if not windows(results, names):
            return NOT_VISIBLE, f"these windows keep alpha_1 at or below {EPSILON}, or are not of this preset"
        return sink_of("window_none", results)

    return gate
