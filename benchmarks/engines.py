"""Attention kernels that run on a CPU, put through `su.sinkcheck`.

    pip install jax mlx[cpu] onnx onnxruntime   # what is not installed is left out
    python benchmarks/engines.py

Prints the table of docs/engines.md and writes benchmarks/results/engines.csv. Each kernel is called
as it is, by a wrapper of a few lines that renames its arguments and, where the kernel takes a mask,
makes the mask. What a kernel has no argument for is left out of its wrapper, and so "not supported".
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import sinkutils as su
from sinkutils.measuring.sinkcheck import Checked

RESULTS = Path(__file__).parent / "results" / "engines.csv"
# Families of transformers whose eager attention has a learned sink
FAMILIES = (
    "gpt_oss mimo_v2_flash granite_swa flint hy_v4 inkling2 deepseek_v4 openai_privacy_filter"
).split()
KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {}  # name -> (package, wrapper)


def kernel(name: str, package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        if importlib.util.find_spec(package):
            KERNELS[name] = package, function
        return function

    return add


def seen(
    q: Tensor, k: Tensor, causal: bool, window: int | None, first: int, documents: Tensor | None
) -> Tensor:
    """Which keys a query sees, (T, S) or (B, 1, T, S)."""
    S = k.shape[2]
    rows = torch.arange(S - q.shape[2], S)[:, None]
    columns = torch.arange(S)
    mask = columns <= rows if causal else torch.ones(q.shape[2], S, dtype=torch.bool)
    if window is not None:
        mask = mask & ((rows - columns < window) | (columns < first))
    if documents is not None:
        mask = mask & (documents[:, -q.shape[2] :, None] == documents[:, None])[:, None]
    return mask


@kernel("torch scaled_dot_product_attention, is_causal", "torch")
def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


@kernel("torch scaled_dot_product_attention, with a mask", "torch")
def sdpa_mask(q, k, v, scale, causal=True, window=None, first_keys=0, documents=None):
    mask = seen(q, k, causal, window, first_keys, documents)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


@kernel("torch causal_lower_right", "torch")
def sdpa_lower_right(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=grouped)


@kernel("torch flash kernel for CPUs (private), with its log-sum-exp", "torch")
def sdpa_flash(q, k, v, scale, causal=True, return_lse=False):
    if (
        q.shape[1] != k.shape[1]
        or q.shape[3] != v.shape[3]
        or (q.shape[2] != k.shape[2] and causal)
    ):
        raise NotImplementedError("one shape for q, k and v")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, scale=scale)
    return (out, lse) if return_lse else out


@kernel("torch flex_attention", "torch")
def flex(
    q, k, v, scale, causal=True, window=None, first_keys=0, sinks=None, documents=None,
    return_lse=False,
):  # fmt: skip
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask = seen(q, k, causal, window, first_keys, documents)
    mask = mask.expand(len(q), 1, q.shape[2], k.shape[2])
    blocks = create_block_mask(
        lambda b, h, i, j: mask[b, 0, i, j], len(q), None, *mask.shape[2:], device="cpu"
    )
    grouped = q.shape[1] != k.shape[1]
    out, aux = flex_attention(
        q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse
    if sinks is not None:  # as its documentation has it: the output is scaled by the log-sum-exp
        total = torch.logaddexp(lse, sinks[:, None].to(lse))
        out = out * torch.exp(lse - total)[..., None].to(out)
        lse = total
    return (out, lse) if return_lse else out


def eager(family: str) -> Callable[..., Tensor]:
    """The eager attention function of a family of transformers."""

    def function(
        q, k, v, scale, causal=True, window=None, first_keys=0, sinks=None, documents=None
    ):
        if sinks is None:
            raise NotImplementedError("it always has a sink")
        place = f"transformers.models.{family}.modeling_{family}"
        attention = importlib.import_module(place).eager_attention_forward
        mask = seen(q, k, causal, window, first_keys, documents)
        added = torch.zeros(mask.shape).to(q).masked_fill(~mask, torch.finfo(q.dtype).min)
        module = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=False
        )
        given = {}
        if family == "inkling2":  # its module makes the column of sinks
            given["sinks"] = sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        added = added if added.ndim == 4 else added[None, None]
        out, _ = attention(module, q, k, v, added, scaling=scale, **given)
        return out.transpose(1, 2)

    return function


for family in FAMILIES:
    kernel(f"transformers eager, {family}", "transformers")(eager(family))


@kernel("transformers sdpa, given the sinks of gpt-oss", "transformers")
def transformers_sdpa(q, k, v, scale, causal=True, window=None, sinks=None):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1], training=False, is_causal=causal
    )
    mask = seen(q, k, causal, window, 0, None)[None, None].expand(len(q), 1, -1, -1)
    out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=scale, s_aux=sinks)
    return out.transpose(1, 2)


def numpy_of(x: Any) -> Any:
    return None if x is None else x.detach().numpy()


@kernel("jax.nn.dot_product_attention", "jax")
def jax_attention(q, k, v, scale, causal=True, window=None, return_lse=False):
    import jax
    import jax.numpy as jnp

    arrays = [jnp.array(numpy_of(x.transpose(1, 2))) for x in (q, k, v)]  # (B, T, H, D)
    if q.shape[3] != v.shape[3]:
        raise NotImplementedError("values as wide as keys")
    given = {} if window is None else {"local_window_size": (window - 1, 0)}
    result = jax.nn.dot_product_attention(
        *arrays, scale=scale, is_causal=causal, return_residual=return_lse, **given
    )
    if return_lse:
        out, lse = (torch.from_dlpack(x) for x in result)
        return out.transpose(1, 2), lse.transpose(1, 2)
    return torch.from_dlpack(result).transpose(1, 2)


@kernel("mlx.core.fast.scaled_dot_product_attention", "mlx")
def mlx_attention(
    q, k, v, scale, causal=True, window=None, first_keys=0, sinks=None, documents=None
):
    import mlx.core as mx

    plain = window is None and documents is None
    mask: Any = "causal" if causal else None
    if not plain:
        mask = mx.array(numpy_of(seen(q, k, causal, window, first_keys, documents)))
    given = {} if sinks is None else {"sinks": mx.array(numpy_of(sinks))}
    arrays = [mx.array(numpy_of(x)) for x in (q, k, v)]
    out = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask, **given)
    return torch.from_numpy(np.array(out))


@cache
def onnx_session(H: int, G: int, causal: bool, scale: float, masked: bool) -> Any:
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    names = ["q", "k", "v"] + (["mask"] if masked else [])
    node = helper.make_node("Attention", names, ["out"], is_causal=int(causal), scale=scale)
    kinds = [TensorProto.FLOAT] * 3 + [TensorProto.BOOL]
    inputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(names, kinds, strict=False)
    ]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    file = io.BytesIO()
    onnx.save(model, file)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(file.getvalue(), options)


def onnx_attention(q, k, v, scale, causal, mask):
    session = onnx_session(q.shape[1], k.shape[1], causal, scale, mask is not None)
    given = {"q": numpy_of(q), "k": numpy_of(k), "v": numpy_of(v)}
    if mask is not None:
        given["mask"] = numpy_of(mask)
    return torch.from_numpy(session.run(None, given)[0])


@kernel("onnxruntime Attention (opset 23), is_causal", "onnxruntime")
def onnx_causal(q, k, v, scale, causal=True):
    return onnx_attention(q, k, v, scale, causal, None)


@kernel("onnxruntime Attention (opset 23), with a mask", "onnxruntime")
def onnx_mask(q, k, v, scale, causal=True, window=None, first_keys=0, documents=None):
    mask = seen(q, k, causal, window, first_keys, documents)
    return onnx_attention(q, k, v, scale, False, mask)


def main(only: str) -> None:
    rows = []
    for name, (package, function) in KERNELS.items():
        if only not in name:
            continue
        checked: Checked = su.sinkcheck.run(function, name=name)
        print(checked, flush=True)
        counts = {verdict: len(checked.of(verdict)) for verdict in ("right", "wrong", "broken")}
        sinks = {o.verdict for o in checked.outcomes if o.case.startswith("learned_sink")}
        rows.append(
            {"kernel": name, "version": f"{package} {version(package)}"}
            | counts
            | {"learned sinks": "no" if "right" not in sinks else "yes"}
            | {"what is wrong": "; ".join(checked.faults)}
        )
    table = pd.DataFrame(rows)
    if only:  # the other rows stay as they were
        before = pd.read_csv(RESULTS, keep_default_na=False)
        table = pd.concat([before[~before.kernel.isin(table.kernel)], table])
    table.to_csv(RESULTS, index=False)
    print("\n| " + " | ".join(table.columns) + " |")
    for row in table.itertuples(index=False):
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a word in the names of the kernels to run")
    main(parser.parse_args().only)
