"""How much of the validation text stands in the training text too, and what that does to the loss.

    python benchmarks/shared_text.py        writes data/shared_text.json; a minute on one core

A run of n tokens is *shared* if the training text of `laptop` holds the same n tokens anywhere.
A chunk is dropped if it has a shared run of 32 tokens, half a context. The loss is then that of
the chunks that are left. It needs weights, so it is given for every record that keeps them.
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.nn.functional as F

import sinkutils as su
from sinkutils import paths
from sinkutils.study.config import DataConfig
from sinkutils.study.record import Record
from sinkutils.study.task import Chunks

LENGTHS = (16, 32)
CHUNKS = 128  # of the validation text, as the records' own loss has them
PRIME = np.uint64(1_099_511_628_211)


def hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """A 64-bit hash of the run of `length` tokens that begins at each place."""
    value = np.zeros(len(tokens) - length + 1, dtype=np.uint64)
    for offset in range(length):
        value = (
            value * PRIME + tokens[offset : offset + len(value)].astype(np.uint64) + np.uint64(1)
        )
    return value


def shared(valid: np.ndarray, train: np.ndarray, length: int) -> np.ndarray:
    """For each place of the validation text, whether the training text has its run of tokens."""
    return np.isin(hashes(valid, length), np.unique(hashes(train, length)))


def losses(record: Record, chunks: torch.Tensor) -> np.ndarray:
    """The mean loss of each chunk (n, C + 1) in nats a token, as the record's own loss scores it."""
    config = record.config
    prefix = config["model"]["attention"]["prefix"]
    unscored = {*range(1, prefix), *config["data"].get("unscored", ())}
    scored = [t for t in range(chunks.shape[1] - 1) if t + 1 not in unscored]
    model = record.load_model()
    with torch.no_grad():
        logits = model(chunks[:, :-1]).float()
    each = F.cross_entropy(logits.flatten(0, 1), chunks[:, 1:].flatten(), reduction="none")
    return each.view(len(chunks), -1)[:, scored].mean(dim=1).numpy()


def main() -> None:
    torch.set_num_threads(1)
    corpus = su.load_corpus("docstrings", 1024)
    train, valid = (np.asarray(corpus.tokens(split)) for split in ("train", "valid"))
    result: dict[str, object] = {"preset": "laptop", "corpus": corpus.name}
    by_length = {n: shared(valid, train, n) for n in LENGTHS}
    result["shared_runs_percent"] = {
        n: round(100 * float(s.mean()), 1) for n, s in by_length.items()
    }
    length = su.config("base", "laptop").model.context_length
    starts = np.arange(CHUNKS) * length
    dropped = np.array([by_length[32][at : at + length + 1 - 32 + 1].any() for at in starts])
    result["chunks"] = {"all": CHUNKS, "dropped": int(dropped.sum())}
    rows = []
    for row in su.runs("laptop").itertuples():
        record = su.record(row.experiment, "laptop", row.seed)
        if record.status != "done" or record.weights is None or "start" in record.config:
            continue
        data = DataConfig(fixed_position=record.config["data"]["fixed_position"])
        chunks = Chunks(corpus, "valid", length, data).take(np.arange(CHUNKS))
        each = losses(record, chunks)
        rows.append(
            {
                "experiment": row.experiment,
                "seed": int(row.seed),
                "all": round(float(each.mean()), 4),
                "kept": round(float(each[~dropped].mean()), 4),
                "dropped": round(float(each[dropped].mean()), 4),
                "record": round(float(row.valid_loss), 4),
            }
        )
        print(rows[-1])
    result["losses"] = rows
    text = json.dumps(result, indent=1)
    (paths.ROOT / "data" / "shared_text.json").write_text(text + "\n", encoding="utf-8")
    print(result["shared_runs_percent"], result["chunks"])


if __name__ == "__main__":
    main()
