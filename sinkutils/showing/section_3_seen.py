"""What is seen in the pictures of Section 3: sentences made from the measurements that are drawn, whatever they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.ledger.results import EPSILON, EPSILONS
from sinkutils.measuring.own import BOS, TEXT, X_FIX
from sinkutils.measuring.real import window_of
from sinkutils.measuring.report import norm_ratio
from sinkutils.showing.properties import Sections, alphas, by_domain, by_length, report, usual
from sinkutils.showing.seen import capital

Models = Mapping[str, Sections]
MASSIVE = 1000  # times the median dimension
SHOWN_TOKENS = 18  # of a map
FIRSTS = {TEXT: "no BOS", BOS: "BOS first", X_FIX: "its fixed token first"}


def of_each(section: str) -> Callable:
    """Makes of what is said of one model, by title and sections, a list for all models that have this section."""

    def of_models(say: Callable[[str, Sections], str]) -> Callable[[Models], list[str]]:
        @wraps(say)
        def passages(models: Models) -> list[str]:
            return [say(title, of) for title, of in models.items() if section in of]

        return passages

    return of_models


def head_name(head: Mapping[str, Any]) -> str:
    """A recorded head by its numbers, which count from 1."""
    return f"head {head['head'] + 1} of block {head['layer'] + 1}"


@of_each("maps")
def tokens(title: str, of: Sections) -> str:
    """Who gets the attention of the two heads that `section_3.token_maps` draws."""
    _, middling, *_, strongest = of["maps"]["heads"]
    rows, first = strongest["rows"], of["maps"]["tokens"][0].strip()
    others = [np.mean([row[k] for row in rows[k:]]) for k in range(1, min(SHOWN_TOKENS, len(rows) // 2))]
    most = f"{max(others):.2f}" if max(others) >= 0.005 else "0.005"
    return (
        f"In {title} the queries of {head_name(strongest)} give the first token, “{first}”, {strongest['alpha_1']:.2f} "
        f"of their attention in the mean, and none of the next {len(others)} tokens more than {most}. "
        f"{capital(head_name(middling))}, on the right, gives it {middling['alpha_1']:.2f}."
    )


@of_each("probes")
def norms(title: str, of: Sections) -> str:
    """How much ||h_1|| exceeds the others', from where to where, and how ||k_1|| and ||v_1|| compare."""
    kept = report(of)
    ratio = np.array(norm_ratio(kept["hidden_norms"][:-1]))  # the last block's reflects the prediction
    large, where = np.flatnonzero(ratio > 2) + 1, "nowhere twice the others'"
    if len(large):
        all_of = "each" if len(large) == len(ratio) else f"{len(large)}"
        where = f"over twice the others' after {all_of} of the first {len(ratio)} blocks, from block {large[0]} on"
    text = f"In {title} ‖h₁‖ is {where}; the most is {ratio.max():.1f} times, after block {1 + int(ratio.argmax())}."
    if "key_norms" in kept:
        key, value = (np.array(norm_ratio(kept[name])) for name in ("key_norms", "value_norms"))
        text += (
            f" ‖k₁‖ is smaller than the others' in {(key < 1).sum()} of {len(key)} blocks (median ratio "
            f"{np.median(key):.2f}), ‖v₁‖ in {(value < 1).sum()} ({np.median(value):.2f})."
        )
    return text


@of_each("first_token")
def chain(title: str, of: Sections) -> str:
    """Section 3.1's steps in numbers, those of LN at the layer after the largest massive activation."""
    first, middle = of["first_token"][usual(of)], of["first_token"]["middle"]
    sizes = np.array(first["over_median"])[:-1, 0]
    peak = int(sizes.argmax())
    behind = (np.flatnonzero(sizes > MASSIVE) if (sizes > MASSIVE).any() else np.array([peak])) + 1
    share, rest = (np.median(np.array(first[f"normed_{key}"])[behind], axis=0) for key in ("share", "rest"))
    near, control = first["cosine_k_1_to_mean"], first["cosine_k_middle_to_mean"]
    key = "The same token stands first in every text, so that its key is one vector in any case"
    if usual(of) == TEXT:
        key = "From text to text another token stands first, and still the cosine of k₁ to its mean is "
        key += f"{near[0]:.2f} in block 1 and {min(near[1:]):.2f} or more after it"
        idle = np.flatnonzero((alphas(of) <= EPSILON).all(axis=1))
        idle = idle[idle > 0]
        if len(idle):
            blocks = ", ".join(str(block + 1) for block in idle)
            key += f" (also in blocks {blocks}, which have no head with a sink: alone it does not make one)"
    return (
        f"In {title} the largest dimension of h₁ is number {first['dimensions'][peak][0]} after block {peak + 1}, "
        f"{sizes[peak]:,.0f} times the median. In the {len(behind)} blocks that read a dimension over "
        f"{min(MASSIVE, sizes[peak]):,.0f} times the median, three dimensions hold {100 * share[0]:.0f} % of the "
        f"squared length of LN(h₁) ({100 * share[1]:.0f} % for the other tokens; medians over blocks), and its median "
        f"dimension is {rest[0] / rest[1]:.2f} times theirs. {key}; at token {middle} it is {min(control):.2f} to "
        f"{max(control):.2f}."
    )


@of_each("angles")
def angles(title: str, of: Sections) -> str:
    """Cosines and products of norms in the heads with a sink, and the cosines in those without."""
    strong = alphas(of) > EPSILON
    if not strong.any():
        return f"{title} has no head with a sink, so there is nothing to explain."
    kinds = [np.array(of["angles"][key][which]) for key in ("cosine", "norm_product") for which in ("first", "others")]
    first, others, product, rest = (values[strong].mean() for values in kinds)
    text = (
        f"In {title}'s {strong.sum()} heads with a mean α₁ > {EPSILON} the cosine of queries to the first key is "
        f"{first:.2f} on average and to other keys {others:.2f}; the product of norms is {product:.0f} for the first "
        f"key and {rest:.0f} for others."
    )
    if not strong.all():
        first, others = (values[~strong].mean() for values in kinds[:2])
        text += f" In its {(~strong).sum()} other heads the cosines are {first:.2f} and {others:.2f}."
    return text


@of_each("lengths")
def lengths(title: str, of: Sections) -> str:
    """What is left of Sink_1 at the longest T, by eps."""
    table = by_length(of)
    window = window_of(of)
    hidden, table = table[table.index > window], table[(table["uniform"] < 0.2) & (table.index <= window)]
    if len(table) < 2:
        return f"{title} reads too few tokens for a comparison of lengths."
    short, long = table.index[0], table.index[-1]
    told = ", ".join(f"{table[eps][short]:.1f} to {table[eps][long]:.1f} at {eps:g}" for eps in EPSILONS)
    texts = "1 text" if table["texts"][long] == 1 else f"{table['texts'][long]:.0f} texts"
    text = f"In {title}, from T = {short} to {long} ({texts} there), Sink₁ goes from {told} (in %, by ε)."
    if len(hidden):
        text += f" Most of its blocks see {window} keys only: beyond, their α₁ falls by the mask alone."
    return text


def inputs(table: pd.DataFrame) -> list[str]:
    """Each model's three numbers in words, as trained and otherwise; `properties.by_input`."""
    parts = [
        f"{capital(row['model'])}, {FIRSTS[row['first']]}{' (as it was trained)' if row['usual'] else ''}: "
        f"{row['natural']:.1f} % on natural text ({row['interval']} over texts), {row['random']:.1f} on random tokens, "
        f"{row['repeat']:.1f} on one token repeated."
        for _, row in table[table["of"] == "ours"].iterrows()
    ]
    rotary = table[(table["of"] == "paper") & (table["model"] != "GPT2-XL")]
    if len(rotary):
        low, high = (rotary[["natural", "random", "repeat"]].agg(what) for what in ("min", "max"))
        spans = [f"{low[kind]:.1f} to {high[kind]:.1f}" for kind in ("natural", "random")]
        parts.append(f"The paper's three rotary models, no BOS: {spans[0]}, {spans[1]} and {high['repeat']:.1f}.")
    return parts


def repeated_norms(of: Sections) -> tuple[int, np.ndarray, np.ndarray]:
    """Without BOS: the block (from 0) whose h_1 is largest on natural text, ||h_t|| there by position on natural text
    and on one token repeated, both over natural text's mean of t > 1.
    """
    natural, repeated = (np.array(report(of, kind, TEXT)["hidden_norms"]) for kind in ("natural", "repeat"))
    peak = int(np.argmax(norm_ratio(natural[:-1])))
    ordinary = natural[peak, 1:].mean()
    return peak, natural[peak] / ordinary, repeated[peak] / ordinary


@of_each("probes")
def repeats(title: str, of: Sections) -> str:
    """Which tokens are massive on natural text and which on one token repeated."""
    peak, natural, repeated = repeated_norms(of)
    low, high = (f"{value:.1f}" for value in (repeated.min(), repeated.max()))
    spread = f"{low} at every position" if low == high else f"{low} to {high}"
    return (
        f"In {title}, after block {peak + 1} and without a BOS, natural text has {natural[0]:.1f} times the usual norm "
        f"at its first token and at most {natural[1:].max():.1f} behind it; one token repeated has {spread}."
    )


@of_each("domains")
def domains(title: str, of: Sections) -> str:
    """The range over kinds of text at each eps."""
    table = by_domain(of)
    at, span, off = table[EPSILON], table.max() - table.min(), (table - table.mean()).abs().max()
    return (
        f"In {title}, over {len(table)} kinds of text, Sink₁ at ε = {EPSILON} is between {at.min():.1f} % "
        f"({at.idxmin()}) and {at.max():.1f} % ({at.idxmax()}): {span[0.3]:.1f} points, beside {span[0.2]:.1f} at 0.2 "
        f"and {span[0.4]:.1f} at 0.4. From the mean over kinds the furthest lies {off[EPSILON]:.1f} points off, at 0.4 "
        f"{off[0.4]:.1f}."
    )


@of_each("probes")
def heads(title: str, of: Sections) -> str:
    """Where in depth the heads with a sink are."""
    alpha = alphas(of)
    early = max(1, len(alpha) // 4)
    layer, head = divmod(int(alpha.argmax()), alpha.shape[1])
    shares = [100 * (part > EPSILON).mean() for part in (alpha[:early], alpha[early:])]
    without = [str(block) for block, row in enumerate(alpha, 1) if (row <= EPSILON).all()]
    text = (
        f"In {title} {shares[0]:.0f} % of the heads of the first {early} blocks have a mean α₁ above {EPSILON}, and "
        f"{shares[1]:.0f} % of the later ones; the strongest is head {head + 1} of block {layer + 1} with "
        f"{alpha.max():.2f}."
    )
    return text + (f" Blocks without such a head: {', '.join(without)}." if without else "")


def scores(table: pd.DataFrame) -> list[str]:
    """The scored models, each with its sink and its accuracy; `properties.sizes`."""
    scored = table.dropna(subset=["acc", "acc_norm"])
    if scored.empty:
        return ["No model has been scored here yet."]
    parts = [
        f"{row['model']}: Sink₁ {row['sink_1']:.1f} %, HellaSwag accuracy {row['acc']:.1f} %, normalised by length "
        f"{row['acc_norm']:.1f} % (standard error {row['acc_norm_stderr']:.1f}, {row['questions']:,.0f} questions)."
        for _, row in scored.iterrows()
    ]
    return [*parts, "Guessing gives 25 %."]
