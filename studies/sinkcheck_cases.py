"""Make the reference cases of `su.sinkcheck`, in float64, by the dense oracle.

    python studies/sinkcheck_cases.py

The inputs are multiples of 1/64 below 4, so that they are exact in bfloat16 and float16 as well.
The only exception are the sinks of the case `learned_sink_fine`. The file has one JSON entry
"cases" in its metadata, {name: [options of the call, cut, fine]}, and for each case the tensors
NAME.q, .k, .v, .sinks, .. , .out, .lse, .cotangent and the gradients .dq, .dk, .dv, .dsinks, ..
of sum(out * cotangent).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sinkutils.measuring.faults import Call, gradients, oracle
from sinkutils.measuring.sinkcheck import FILE

# Of each case: sizes that differ from these, options of the call, and whether it has a sink
SIZES = {"B": 2, "H": 4, "G": 4, "T": 12, "S": 12, "D": 16, "E": 16}
MLA = {"B": 1, "H": 4, "G": 1, "T": 3, "S": 8, "D": 576, "E": 512}
GROUPED = {"H": 6, "G": 2}
TEXTS = [[0] * 4 + [1] * 5 + [2] * 3, [3] * 7 + [1] * 5]
CASES: dict[str, tuple[dict[str, int], dict[str, Any], str]] = {
    "causal": ({}, {}, ""),
    "not_causal": ({}, {"causal": False}, ""),
    "scale": ({}, {"scale": 0.4}, ""),
    "grouped_queries": (GROUPED, {}, ""),
    "one_key_head": ({"G": 1}, {}, ""),
    "values_of_another_width": ({"E": 8}, {}, ""),
    "mla": (MLA, {"scale": 0.072}, ""),
    "queries_at_the_end": ({"T": 5}, {}, ""),
    "one_query": ({"T": 1}, {}, ""),
    "window": ({}, {"window": 6}, ""),
    "window_of_one": ({}, {"window": 1}, ""),
    "window_first_keys": ({}, {"window": 5, "first_keys": 3}, ""),
    "documents": ({}, {"documents": TEXTS}, ""),
    "documents_window": ({}, {"documents": TEXTS, "window": 3}, ""),
    "learned_sink": ({}, {}, "sinks"),
    "learned_sink_scale": ({}, {"scale": 0.4}, "sinks"),
    "learned_sink_not_causal": ({}, {"causal": False}, "sinks"),
    "learned_sink_grouped": (GROUPED, {}, "sinks"),
    "learned_sink_fine": ({}, {}, "fine sinks"),
    "learned_sink_large": ({}, {}, "large sinks"),
    "learned_sink_large_logits": ({}, {"scale": 6.0}, "sinks"),
    "learned_sink_window": ({}, {"window": 6}, "sinks"),
    "learned_sink_window_grouped": (GROUPED, {"window": 6}, "sinks"),
    "learned_sink_documents": ({}, {"documents": TEXTS}, "sinks"),
    "learned_sink_mla": (MLA, {"scale": 0.072}, "sinks"),
    "learned_sink_queries_at_the_end": ({"T": 4}, {"window": 6}, "sinks"),
    "learned_sink_one_query": (GROUPED | {"T": 1}, {}, "sinks"),
    "sink_key": ({}, {}, "sink_keys"),
    "sink_key_scale": ({}, {"scale": 0.4}, "sink_keys"),
    "split": ({"T": 4}, {"cut": 7}, ""),
    "split_grouped": (GROUPED | {"T": 1}, {"cut": 6}, ""),
    "split_learned_sink": ({"T": 4}, {"cut": 7}, "sinks"),
    "split_learned_sink_mla": (MLA, {"scale": 0.072, "cut": 5}, "sinks"),
}


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    """Normal numbers, rounded to multiples of 1/64 and cut off at 4."""
    x = np.round(rng.standard_normal(shape) * 64) / 64
    return torch.from_numpy(x.clip(-255 / 64, 255 / 64))


def main(path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    for number, (name, (changes, given, sink)) in enumerate(CASES.items()):
        rng = np.random.default_rng(number)
        size = SIZES | changes
        B, H, G, T, S, D, E = size.values()
        inputs = {
            "q": drawn(rng, B, H, T, D),
            "k": drawn(rng, B, G, S, D),
            "v": drawn(rng, B, G, S, E),
        }
        if sink.endswith("sinks"):
            inputs["sinks"] = drawn(rng, H)
            if sink == "fine sinks":  # between two neighbours of bfloat16
                inputs["sinks"] = (torch.linspace(2, 3, H) + 1 / 150).double()
            if sink == "large sinks":  # e^100 overflows float32
                inputs["sinks"] = torch.tensor([100.0, -100.0, 0.0, 12.0]).double()
        if sink == "sink_keys":
            inputs |= {"sink_keys": drawn(rng, H, D), "sink_values": drawn(rng, H, E)}
        fields = {"scale": D**-0.5} | given
        cut = fields.pop("cut", None)
        if "documents" in fields:
            inputs["documents"] = torch.tensor(fields.pop("documents"))
        call = Call(**inputs, **fields)
        cotangent = drawn(rng, B, H, T, E)
        out, lse = oracle(call)
        found = {"out": out, "lse": lse, "cotangent": cotangent}
        found |= {f"d{x}": dx for x, dx in gradients(oracle, call, cotangent).items()}
        # All inputs are exact in float32.
        for part, x in inputs.items():
            found[part] = x if part == "documents" else x.float()
        for part, x in found.items():
            tensors[f"{name}.{part}"] = x.contiguous()
        options[name] = (fields, cut, sink == "fine sinks")
    save_file(tensors, path, {"cases": json.dumps(options)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, default=FILE, help="the file to write")
    main(parser.parse_args().to)
