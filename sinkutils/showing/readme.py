"""README's parts, the pages of docs/ and README's picture, from records, measurements and benchmarks.

`python -m sinkutils readme` writes them anew. Where records are missing they say so.
"""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from fractions import Fraction
from functools import reduce
from math import isnan
from operator import getitem
from typing import Any

import numpy as np
import pandas as pd

from sinkutils.ledger import claims as ledger
from sinkutils.ledger import effects, frozen, rules
from sinkutils.ledger import later as later_claims
from sinkutils.ledger.results import QUANTITIES, results
from sinkutils.measuring.open_lms import recorded
from sinkutils.paths import BENCHMARKS, ROOT
from sinkutils.showing import cards, names, record_page
from sinkutils.showing.explorer import kept_map, side_by_side
from sinkutils.showing.pages import markdown, written
from sinkutils.showing.scale import scope
from sinkutils.showing.tables import records
from sinkutils.study.grid import plan

PRESET = "laptop"
FILE = re.compile(r"(?<![\w`/.])(\w+(?:/\w+)+(?:\.\w+)?|\w+\.(?:py|json)|\w+\(\))(?![\w`/])")  # in a reason
COUNT = re.compile(r"([^.:]*\bchecks? holds?\b[^.:]*)\. ?")  # a reason's first sentence, where it is only that
HEADLINES = ("universal", "emerges", "fixed_token", "weight_decay", "key_biases", "no_normalisation")
# By the column of a card, the ledger's primary outcome for the same position.
EXCESS = {f"ours: {names.human(f'Sink_{k} %')}": f"excess_{k}" for k in (1, 2, 3)} | {"ours: Sink* %": "excess_star"}
DIFFERENCES = 8  # that README lists; the ledger has them all


def scope_part() -> str:
    """At which scale each kind of sink is seen, in two lines."""
    return "\n".join(f"- {line}" for line in scope())


def headlines_part() -> str:
    """The verdicts of six conclusions of the paper, a line each to unfold, and how many of all claims have which."""
    table = ledger.claims(PRESET).set_index("id", drop=False)
    lines = [_folded(row, row["claim"], _numbers(row)) for row in table.loc[list(HEADLINES)].to_dict("records")]
    counts = ", ".join(f"{n} {verdict}" for verdict, n in table["verdict"].value_counts().sort_index().items())
    more = f"Of all {len(table)} claims: {counts}. Each with its numbers: [the ledger](docs/ledger.md)."
    return "\n".join([*lines, "", more])


def differences_part() -> str:
    """Claims that our runs do not bear out, or not all of, and why; those with the fewest checks that hold first."""
    table = ledger.claims(PRESET)
    rows = table[table["verdict"].isin((rules.NOT_REPRODUCED, rules.PARTLY))].to_dict("records")
    rows.sort(key=lambda row: Fraction(row["holds"].replace(" of ", "/")))
    lines = [_folded(row, f"{row['claim']} ({row['source']})", []) for row in rows[:DIFFERENCES]]
    if len(rows) > DIFFERENCES:
        lines.append(f"- and {len(rows) - DIFFERENCES} more in [the ledger](docs/ledger.md)")
    return "\n".join(lines) or "Of what is recorded so far, nowhere."


def _folded(row: dict[str, Any], claim: str, numbers: list[str]) -> str:
    """A claim with its verdict as a line; how many checks hold, and behind it the numbers and why, to unfold."""
    why = _why(row)
    count = COUNT.match(why)
    counted, rest = (f"{count[1]}: ", why[count.end() :]) if count else ("", why)
    behind = " and ".join([*(["the numbers"] if numbers else []), *(["why"] if rest else [])])
    more = " <br> ".join([*numbers, rest] if rest else numbers)
    return f"- {_chip(row)} {claim} <details><summary>{counted}{behind}</summary>{more}</details>"


def _numbers(row: dict[str, Any]) -> list[str]:
    """Of a claim that was judged: the share of heads with a sink in each of its runs, in brackets the mean excess and
    the paper's share.
    """
    if row["verdict"] == rules.NOT_RUN:
        return []
    table, _, facts = cards.figures(row, PRESET)
    experiments = {label: name for name, label in cards.called_runs(row, PRESET).items()}
    lines = [f"{fact}." for fact in facts]
    for column in (name for name in table if name.startswith("ours: Sink")):
        printed = table.get(column.replace("ours", "paper"), {})
        default = names.title("default")  # what the paper's tables change, where ours change the base
        alone = "Table 10 right" in row["source"] or not printed.get(default)
        cells = []
        for run, ours in table[column].items():
            excess = results(PRESET).values(experiments[run], EXCESS[column]).mean()
            known = [] if isnan(excess) else [f"{excess:.3f}".replace("-", "\N{MINUS SIGN}")]
            paper = f"the paper {printed[run]}" if printed.get(run) else ""
            if run == "the base" and not alone:
                paper = f"the paper's, which meets any first token, {printed[default]}"
            if ours and (alone or run != default):
                beside = "; ".join([*known, *filter(None, [paper])])
                cells.append(f"{run}: {ours} ({beside})" if beside else f"{run}: {ours}")
        what = column.removeprefix("ours: ")
        lines.append(f"{what} ({names.human(QUANTITIES[EXCESS[column]].heading)}): {'; '.join(cells)}.")
    return lines


def _chip(row: dict[str, Any]) -> str:
    return f"{cards.CHIPS[row['verdict']][2]} **{row['verdict']}**"


def _why(row: dict[str, Any]) -> str:
    return cards.reason(row, ledger.checks(row["id"], PRESET), PRESET)


def notebooks_part() -> str:
    """The notebooks of docs/chapters.csv, a row each, with a picture once there is one and what was found.

    In braces stands where a finding's number is: of our records, or of data/open_lms.
    """
    frame, rows = _recorded(), []

    def number(match: re.Match[str]) -> str:
        name, *path = match[1].split("/")
        if len(path) > 1:
            return f"{reduce(getitem, path, recorded(name)):.1f} %"
        values = frame.loc[(frame["experiment"] == name) & (frame["status"] == "done"), path[0]].dropna()
        if values.empty:
            return "not recorded yet"
        return f"{values.mean():.1f} % ({len(values)} seed{'s' if len(values) > 1 else ''})"

    with open(ROOT / "docs" / "chapters.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            stem, title, picture = row["notebook"], row["title"], row["picture"]
            thumbnail = f'<img src="{picture}" width="150" alt="{title}">' if (ROOT / picture).exists() else ""
            finding = re.sub("{(.+?)}", number, row["finding"])
            rows.append([thumbnail, f"[{stem[:2]} {title}](notebooks/{stem}.ipynb)", finding])
    return markdown(["", "notebook", "what it finds"], rows)


def hero() -> str:
    """README's picture: a head of a real model with a sink and one without, on one text with its tokens; SVG."""
    recording, shown, pictures = recorded("smollm2")["maps"], 22, {}
    without, _, sink, _ = recording["heads"]  # by alpha_1
    for head, what in ((sink, "a sink"), (without, "no sink")):
        weights = kept_map(head, shown)
        title = f"block {head['layer'] + 1}, head {head['head'] + 1}, {what}: α₁ = {weights[:, 0].mean():.2f}"
        pictures[title] = weights
    tokens = [token.strip() for token in recording["tokens"][:shown]]
    below = "SmolLM2-135M: a row a query, a column a key, darker for more attention"
    return ET.tostring(side_by_side(pictures, tokens, "", "", below).drawing, "unicode")


def ledger_page() -> str:
    """docs/ledger.md: every claim, later papers' apart, the rules, and since when they stand."""
    entries = json.loads(frozen.PATH.read_text(encoding="utf-8"))
    since = [
        f"{number}. `{entry['sha256'][:16]}`: " + FILE.sub(r"`\1`", entry["reason"])
        for number, entry in enumerate(entries, 1)
    ]
    return written(
        *(f"# The ledger: every conclusion of the paper on the records of `{PRESET}`", _claims("paper")),
        *("## Claims of later papers", later_claims.__doc__ or "", _claims("later")),
        *("## The rules", rules.__doc__ or "", "## The statistics", effects.__doc__ or ""),
        *("## Since when they stand", frozen.__doc__ or "", "\n".join(since)),
    )


def _claims(part: str) -> str:
    """A part of the ledger as a table, above it how many of its claims have which verdict."""
    rows = []
    for row in ledger.claims(PRESET, part=part).to_dict("records"):
        effect = "" if isnan(row["effect"]) else f"{row['effect']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        numbers = [_cells(row[column]) for column in ("paper", "ours", "interval")]
        claim = names.human(row["claim"])  # its words stand for themselves: sigmoid, relative
        rows.append([row["source"], claim, *numbers, _chip(row), row["holds"], effect, _why(row)])
    counts = ", ".join(f"{chip}: {n}" for chip, n in sorted(Counter(row[5] for row in rows).items()))
    columns = ["source", "claim", "paper", "ours", "95 %", "verdict", "holds", "effect", "reason"]
    about = (
        "*Holds*: how many of a claim's checks do. *Effect*, with its 95 % interval: its first difference of an excess "
        "between two runs, or that of its first run from what it is compared with; of other claims the level. "
        "Differences are taken seed by seed, over the seeds that two runs share (the base has six), so they need "
        "not be those of the means beside them.\n\n"
        "α_k: the mean attention to token k; excess: 0 for even attention, 1 for all of it; Sink_k: the share of heads "
        "whose α_k is above ε = 0.3. h, k, v: hidden state, key, value, of the first token with a 1; x*, k*: a learned "
        "token, a learned key; the base: the model whose texts all begin with one fixed token, which each setting "
        "changes."
    )
    return f"{counts}\n\n{about}\n\n{markdown(columns, rows)}"


def _cells(text: str) -> str:
    """A cell of the ledger: a line a quantity, the runs' numbers after their names."""
    lines = []
    for heading, values in cards.parsed(text):
        called = cards.labels(list(values), PRESET)
        runs = "; ".join(f"{called[name]}: {value}" for name, value in values.items())
        lines.append(names.human(heading, PRESET) + (f": {runs}" if runs else ""))
    return " <br> ".join(lines)


def state_part() -> str:
    """Which experiments are recorded at the laptop preset and elsewhere, and what is missing."""
    return record_page.state()


def minutes_part() -> str:
    """How long a run of the laptop preset takes."""
    return record_page.minutes()


def _recorded() -> pd.DataFrame:
    frame = records(PRESET)
    return frame[frame["status"].isin(["done", "failed"])]


# The operations of benchmarks/attention_ops.py as people call them.
OPERATIONS = {
    "softmax": "softmax",
    "kv_bias": "softmax, KV biases",
    "v_bias": "softmax, V biases",
    "window": "softmax, window",
    "prefix": "softmax, prefix",
    "alibi": "softmax, ALiBi",
    "relative": "softmax, relative positions",
    "p_norm": "softmax, p-normalised",
    "sigmoid": "sigmoid",
    "sigmoid_sum": "sigmoid, normalised",
    "sigmoid_p_norm": "sigmoid, p-normalised",
    "elu": "elu plus one",
    "elu_sum": "elu plus one, normalised",
    "kernel_identity": "identity kernel",
    "kernel_elu": "elu kernel",
    "kernel_mlp": "MLP kernel",
}


def benchmark(name: str) -> Any:
    """What a benchmark last measured."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text(encoding="utf-8"))


def training_part() -> str:
    """Training speed beside the peer, and what the whole study takes at that."""
    rows, measured = [], benchmark("training")["rows"]
    for row in measured:
        shape, peak = f"d {row['d']}, L {row['layers']}, C {row['context']}", 100 * row["share_of_matmul_peak"]
        rows.append([shape, row["who"], f"{row['tokens_per_second']:,}", f"{row['times_llama']:.2f}", f"{peak:.0f} %"])
    table = markdown(["shape", "who", "tokens/s", "times llama", "of the matmul peak of its precision"], rows)
    runs = plan(PRESET)
    hours = (
        sum(run.train.steps * run.train.batch_size * run.model.context_length for run in runs)
        / record_page.base_rate()
        / 3600
    )
    whole = (
        f"The base's compiled step alone is {hours:.0f} core-hours over the {len(runs)} runs of the study at "
        f"`{PRESET}`; evaluations and dearer variants come on top: [the records](records.md#what-the-study-takes) say "
        "what the whole study takes."
    )
    return f"{table}\n\n{whole}"


def measure_part() -> str:
    """What measuring costs beside a plain forward pass and the published procedure."""
    cells, rows = benchmark("measure"), []
    forward = {(cell["samples"], cell["length"]): cell for cell in cells if cell["way"] == "forward"}
    for cell in cells:
        plain = forward.get((cell["samples"], cell["length"]))
        row = [f"{cell['samples']} x {cell['length']}", cell["way"]]
        for key, number in (("seconds", f"{cell['seconds']:.1f} s"), ("peak_gib", f"{cell['peak_gib']:.2f} GiB")):
            row += [number, f"{cell[key] / plain[key]:.2f}" if plain else ""]
        rows.append(row)
    table = markdown(["texts x T", "way", "time", "times forward", "peak memory", "times forward"], rows)
    real = benchmark("measure_smollm2")[0]
    return (
        f"{table}\n\n`measure` of SmolLM2 ({real['samples']} x {real['length']}, {real['threads']} threads) takes "
        f"{real['ratio']:.2f} times its blocks, the median of {len(real['blocks_seconds'])} rounds in turns."
    )


def reading_part() -> str:
    """What reading costs, beside the last commit of recipe 1."""
    rows = []
    for row in benchmark("reading"):
        rows.append([row["what"], str(row["records"]), f"{row['now']:.2f} s", f"{row['before']:.2f} s"])
    return markdown(["what", "records", "now", "with recipe 1's code"], rows)


def attention_part() -> str:
    """A training step of each attention operation beside softmax's."""
    rows = []
    for row in benchmark("attention_ops")["rows"]:
        name = OPERATIONS[row["operation"]]
        rows.append([name, f"{row['times_softmax']:.1f}", f"{row['memory_times_softmax']:.2f}"])
    return markdown(["operation", "time, times softmax", "memory, times softmax"], rows)


def reliability_part() -> str:
    """Kills, damage and random inputs, counted, and what a second worker gains."""
    data = benchmark("reliability")
    kills, twice, damage, gain = (data[part] for part in ("kills", "twice", "damage", "efficiency"))
    hit = ", ".join(f"{what} {n}" for what, n in sorted(kills["hit"].items()))
    whole = f"all {kills['records']} records there, whole, and equal to an unbroken sweep's"
    places = f"each byte flipped in each of the {damage['files']} files of a record, each length cut to"
    unseen = f"{damage['missed']} not noticed, {damage['unnamed']} without the file's name"
    rows = [
        [f"sweeps of two workers killed at random instants ({hit})", f"{kills['kills']}", whole],
        ["runs of two sweeps started at once", f"{twice['runs']}", f"{twice['trained_once']} trained once"],
        [places, f"{damage['flipped'] + damage['cut']:,}", unseen],
    ]
    for what, counts in data["inputs"].items():
        right, refused = counts.get("answered", 0), counts.get("refused", 0)
        outcome = f"{right:,} right, {refused:,} refused by a ValueError that names the argument"
        rows.append([f"random inputs: {what}", f"{right + refused:,}", outcome])
    beside = f"two workers beside one, {gain['runs']} runs at `{gain['preset']}`"
    return markdown(["what", "times", "outcome"], [*rows, [beside, "1", f"efficiency {gain['efficiency']:.2f}"]])


def digits_part() -> str:
    """Whether a machine with fewer instructions computes the same, to the last digit, and what a step takes there."""
    rows = []
    for row in benchmark("digits"):
        differs = row["first_step_with_another_loss"]
        same = f"all {row['steps']} losses the same" if differs is None else f"another loss from step {differs} on"
        rows.append([row["precision"], row["instructions"], same, f"{row['loss']:.4f}", f"{row['time']:.1f}"])
    columns = ["precision", "instructions", "beside all instructions", "last loss", "time, times bf16 as it is"]
    return markdown(columns, rows)


def again_part() -> str:
    """Where records end that were trained again on machines of other kinds, beside how far seeds lie apart."""
    keys = {"sink_1": ("Sink₁ %", 1), "excess_1": ("excess of α₁", 3), "valid_loss": ("validation loss", 3)}
    rows, said, found = [], [], pd.DataFrame(benchmark("again"))
    for row in found.to_dict("records"):
        ends = [" and ".join(f"{end:.{digits}f}" for end in row[key]) for key, (_, digits) in keys.items()]
        rows.append([row["record"], record_page.machine(row["made_on"]), record_page.machine(row["again_on"]), *ends])
    for kind, group in found.groupby(found["again_on"].map(record_page.machine), sort=False):
        moved = []
        for key, (label, digits) in keys.items():
            made, anew = np.array(group[key].tolist()).T
            least, most = (f"{end:+.{digits}f}".replace("-", "−") for end in ((anew - made).min(), (anew - made).max()))
            moved.append(f"{label} by {least} to {most} (seeds lie {np.ptp(made):.{digits}f} apart)")
        said.append(f"The machine with {kind} moves {'; '.join(moved)}.")
    table = markdown(["record", "made with", "again with", *(label for label, _ in keys.values())], rows)
    margins = f"{100 * rules.MARGIN:.0f} % of the base's excess, {100 * rules.LOSS:.1f} % of its loss"
    ledger_says = f"The ledger's margins, below which it calls a difference none, are {margins}."
    return "\n\n".join([table, *said, ledger_says])


PAGES = {"ledger": ledger_page, "records": record_page.page}  # of docs/
WITH_PARTS = ("README.md", "docs/speed.md", "docs/scaling.md", "docs/reliability.md")
OF_RECORDS = (scope_part, state_part, minutes_part, headlines_part, differences_part, notebooks_part)
OF_BENCHMARKS = (training_part, measure_part, reading_part, attention_part, reliability_part, digits_part, again_part)
PARTS = {part.__name__.removesuffix("_part"): part for part in (*OF_RECORDS, *OF_BENCHMARKS)}


def render(text: str) -> str:
    """A page with the parts that it marks made anew. Raises ValueError for a part that there is not."""

    def anew(match: re.Match[str]) -> str:
        if match[2] not in PARTS:
            raise ValueError(f"there is no part {match[2]!r}: {', '.join(PARTS)}")
        return f"{match[1]}{PARTS[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", anew, text, flags=re.DOTALL)


def generated() -> dict[str, str]:
    """Every file that is generated, or has generated parts, by its path in the checkout, as it should read."""
    pages = {name: render((ROOT / name).read_text(encoding="utf-8")) for name in WITH_PARTS}
    return pages | {f"docs/{name}.md": make() for name, make in PAGES.items()} | {"docs/hero.svg": hero()}
