"""The numbers that claims need of kept weights, written to data/trials.csv.

    python benchmarks/trials.py [PRESET [FOLDER OF RECORDS]]

Of windowed models the attention to each window's first key (Figure 6 middle), of models with a sink token the norm of
its state (Figure 7 middle), of models with K biases what removing them does (Section 7.3). About a minute on one core.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import sinkutils as su
from sinkutils import paths
from sinkutils.measuring.probes import Subject
from sinkutils.model.decoder import TransformerLM
from sinkutils.names import subject

SEQUENCES = 50


def window_first(own: Subject) -> dict[str, float]:
    """Mean excess of the first key that each query t > w sees, t - w + 1, at T = C; even attention gives it 1 / w."""
    shape: Any = own.model.config
    window = shape.attention.window
    heads = [(layer, head) for layer in range(shape.num_layers) for head in range(shape.num_heads)]
    report = own.measure(
        own.inputs("random", SEQUENCES, shape.context_length), norms=False, heads=heads
    )
    maps = torch.stack([kept.map for kept in report.kept.values()])
    first = maps.diagonal(offset=1 - window, dim1=-2, dim2=-1)[..., 1:]
    return {"window_first": float((first.mean() - 1 / window) / (1 - 1 / window))}


def sink_token_norm(model: TransformerLM, ids: torch.Tensor) -> float:
    """|h| at x* over the mean of x_1 to x_T: its maximum over the blocks before the last."""
    ratios: list[float] = []

    def see(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        norms = torch.linalg.vector_norm(output[0], dim=-1).mean(dim=0)
        ratios.append(float(norms[0] / norms[1:].mean()))

    hooks = [block.register_forward_hook(see) for block in model.blocks]
    with torch.no_grad():
        model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return max(ratios[:-1])


def star_hidden(own: Subject) -> dict[str, float]:
    """That norm over the untrained model's, where x* stands out a little too because it sees only itself."""
    ids = own.inputs("random", SEQUENCES, own.length)
    trained, untrained = (
        sink_token_norm(model, ids) for model in (own.model, TransformerLM(own.model.config))
    )
    return {"star_hidden": trained / max(1.0, untrained)}


def without_bias(own: Subject) -> dict[str, float]:
    """Excess of alpha_1, and the loss that is added in nats per token, once the trained biases are taken away."""
    shape: Any = own.model.config
    plain = TransformerLM(
        dataclasses.replace(shape, attention=dataclasses.replace(shape.attention, bias="none"))
    )
    plain.load_state_dict(own.model.state_dict(), strict=False)
    ids = own.inputs("natural", SEQUENCES, own.length)
    losses = []
    with torch.no_grad():
        for model in (plain.eval(), own.model):
            losses.append(
                float(
                    F.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
                )
            )
    report = dataclasses.replace(own, model=plain).measure(ids, norms=False)
    # In blocks 2 to L, as the ledger's excess is.
    alpha, uniform = np.asarray(report.alpha[:, 0, 1:]), np.mean(1 / np.arange(1, own.length + 1))
    return {
        "without_bias": float((alpha.mean() - uniform) / (1 - uniform)),
        "loss_without_bias": losses[0] - losses[1],
    }


TRIALS = {"window_1_4": window_first, "sink_token_default": star_hidden, "k_bias": without_bias}


KEY = ("preset", "experiment", "seed", "quantity")


def key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def main(preset: str = "laptop", folder: str | None = None) -> None:
    """Write the trials of every record that keeps its weights. All other rows stay.

    folder: the records, by default data/runs. Some records there have lost their weights to save
    room; they were tried where they were trained.
    """
    torch.set_num_threads(1)
    path = paths.ROOT / "data" / "trials.csv"
    with path.open(encoding="utf-8") as file:
        rows = {key(row): row for row in csv.DictReader(file)}
    for run in su.runs(preset, folder).itertuples():
        if run.experiment not in TRIALS:
            continue
        record = su.record(run.experiment, preset, run.seed, folder)
        if record.weights is None:
            continue
        for quantity, value in TRIALS[record.experiment](
            subject(str(record.folder), "cpu")
        ).items():
            row = {"preset": preset, "experiment": record.experiment, "seed": str(record.seed)}
            row |= {"quantity": quantity, "value": f"{value:.6g}"}
            rows[key(row)] = row
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*KEY, "value"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
