"""Through which weights does weight decay act on the sink? Into data/decay_by_group.json:

    python benchmarks/decay_by_group.py SEED [SEED ..] [--only CASE ..] [--preset laptop]

The baseline of `minute` (or, into data/decay_by_group_laptop.json, of `laptop`) is trained with its
weight decay on one group of weights alone, and on all groups but one. AdamW's decay is decoupled:
before each update a weight is multiplied by 1 - rate * decay. So it is done by hand here, and the
optimiser has none. Two to five minutes a run on one core; a run that is there is not made again.
In the cases with "v_1 zero" the first token's value is zero in every block, from the first step on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from inside import excess, keep
from torch import Tensor

from sinkutils.measuring.measure import measure
from sinkutils.paths import LEDGER
from sinkutils.study import grid
from sinkutils.study.config import learning_rate
from sinkutils.study.corpus import load_corpus
from sinkutils.study.task import reproducible
from sinkutils.study.train import Run

GROUPS = ("embedding", "unembedding", "queries and keys", "values", "FFN", "gains")
CASES = {
    "all": set(GROUPS),
    "none": set(),
    **{group: {group} for group in GROUPS},
    **{f"all but {group}": set(GROUPS) - {group} for group in GROUPS},
    "none, v_1 zero": set(),
    "all, v_1 zero": set(GROUPS),
}


def groups_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the model, or the part of it that belongs to one group."""
    for name, weight in model.named_parameters():
        if name == "embed.weight":
            yield "embedding", weight.detach()
        elif name == "unembed.weight":
            yield "unembedding", weight.detach()
        elif name.endswith("qkv.weight"):  # rows: all queries, then all keys, then all values
            width = weight.shape[1]
            yield "queries and keys", weight.detach()[: 2 * width]
            yield "values", weight.detach()[2 * width :]
        elif name.endswith("attention.out.weight"):
            yield "values", weight.detach()
        elif ".ffn." in name:
            yield "FFN", weight.detach()
        else:
            assert "norm" in name, name
            yield "gains", weight.detach()


def no_first_value(layer: torch.nn.Module, given: Any, out: Tensor) -> Tensor:
    """A hook: queries, keys and values, (B, T, 3 d), with zero for the first token's value."""
    values = 2 * out.shape[-1] // 3
    zero = torch.zeros_like(out[:, :1, values:])
    first = torch.cat([out[:, :1, :values], zero], dim=-1)
    return torch.cat([first, out[:, 1:]], dim=1)


def trained(case: str, seed: int, preset: str) -> dict[str, Any]:
    """The sink and the loss at the end of a run whose decay acts on the groups of the case."""
    base = grid.config("fixed_1", preset, seed)
    decay = base.train.weight_decay
    without = {"train.weight_decay": 0.0}
    config = grid.config("fixed_1", preset, seed, change=without, name="decay")
    run = Run(config, load_corpus(config.data.corpus, config.model.vocab_size), torch.device("cpu"))
    weights = [weight for group, weight in groups_of(run.model) if group in CASES[case]]
    if "v_1 zero" in case:
        for block in run.model.blocks:
            block.attention.qkv.register_forward_hook(no_first_value)
    run.forward = torch.compile(run.task.loss)
    while run.step < config.train.steps:
        rate = learning_rate(config.train, run.step)
        for weight in weights:
            weight.mul_(1 - rate * decay)
        run.advance()
    report = measure(run.model, run.probe)
    by_block = excess(report.alpha[:, 0].mean(dim=(0, 2)), report.length)  # (L,)
    norms: Any = report.value_norms  # (L, T)
    with torch.no_grad():
        loss = run.valid_loss()
    sizes: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    for group, weight in groups_of(run.model):
        sizes[group] += float(weight.square().sum())
    return {
        "sink_1": report.sink(1),
        "block_1": float(by_block[0]),
        "later_blocks": float(by_block[1:].mean()),
        "valid_loss": loss,
        "price": (norms[:, 0] / norms[:, 1:].mean(dim=1)).tolist(),  # length of v_1, by block
        "norms": {group: size**0.5 for group, size in sizes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="+", type=int)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--preset", default="minute", choices=("minute", "laptop"))
    options = parser.parse_args()
    stem = "decay_by_group" + ("_laptop" if options.preset == "laptop" else "")
    file = LEDGER / f"{stem}.json"
    for case in options.only:
        for seed in options.seeds:
            name = f"{case}, seed {seed}"
            if file.exists() and name in json.loads(file.read_text(encoding="utf-8")):
                continue
            with reproducible(torch.device("cpu")):
                keep(stem, name, trained(case, seed, options.preset))


if __name__ == "__main__":
    main()
