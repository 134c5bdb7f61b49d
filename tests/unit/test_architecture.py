"""What notebook 05 shows: the block diagram, norms at x*, the records of a table."""

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from helpers import made_up

from sinkutils.ledger.trials import sink_token_ratios
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.showing import diagrams, notebook

matplotlib.use("agg")


def tiny(**options):
    shape = LMConfig(
        vocab_size=50, context_length=12, num_layers=3, num_heads=2, hidden_size=16, intermediate_size=24, **options
    )
    return TransformerLM(shape, 0).double().eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_the_diagram_taken_step_by_step_computes_what_the_block_computes(norm):
    block = tiny(norm=norm, position="nope").blocks[0]
    for gain, start in ((block.norm_1.weight, 0.5), (block.norm_2.weight, 2.0)):  # so that no LN can stand for another
        gain.copy_(torch.linspace(start, start + 1, 16))
    modules = {
        "LN": iter((block.norm_1, block.norm_2)),
        "MHSA": iter((lambda x: block.attention(x, {}),)),
        "FFN": iter((block.ffn,)),
    }
    h = start = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    residual = start
    for index, step in enumerate(diagrams.BLOCKS[norm]):
        if index in diagrams.BRANCHES:
            residual = h
        h = h + residual if step == "+" else next(modules[step])(h)
    torch.testing.assert_close(h, block(start, {})[0])


def test_the_diagram_shows_every_step_of_both_blocks():
    for axis, (norm, steps) in zip(diagrams.block_diagram().axes, diagrams.BLOCKS.items(), strict=True):
        texts = [text.get_text() for text in axis.texts]
        assert axis.get_title().startswith(f"{norm}-norm")
        for step in set(steps):
            assert texts.count(step) == steps.count(step)
        assert any("before LN" in text for text in texts) == (norm == "post")
    plt.close("all")


def dense_states(model, ids):
    """h^l of a NoPE, pre-norm, SwiGLU model with a sink token, x* first, from its weights and the formulas alone."""
    shape, weights = model.config, model.state_dict()
    h = torch.cat([weights["sink"].expand(len(ids), 1, -1), weights["embed.weight"][ids]], dim=1)
    seen = torch.ones(h.shape[1], h.shape[1]).tril().bool()
    normed = lambda x, gain: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain  # noqa: E731
    for layer in range(shape.num_layers):
        own = {name.removeprefix(f"blocks.{layer}."): w for name, w in weights.items()}
        q, k, v = (normed(h, own["norm_1.weight"]) @ own["attention.qkv.weight"].T).split(shape.hidden_size, dim=-1)
        heads = []
        for part in range(shape.num_heads):
            chosen = slice(part * shape.head_dim, (part + 1) * shape.head_dim)
            scores = q[..., chosen] @ k[..., chosen].mT / shape.head_dim**0.5
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[..., chosen])
        h = h + torch.cat(heads, dim=-1) @ own["attention.out.weight"].T
        gate, up = (normed(h, own["norm_2.weight"]) @ own["ffn.up.weight"].T).split(shape.intermediate_size, dim=-1)
        h = h + (gate * torch.sigmoid(gate) * up) @ own["ffn.down.weight"].T
        yield h


@torch.no_grad()
def test_the_norm_ratio_at_the_sink_token_is_that_of_plain_dense_computation():
    model = tiny(sink_token=True, position="nope")
    model.sink *= 50
    ids = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(2))
    expected = []
    for h in dense_states(model, ids):
        norms = h.square().sum(-1).sqrt().mean(dim=0)  # over the samples, then the ratio
        expected.append(float(norms[0] / norms[1:].mean()))
    assert sink_token_ratios(model, ids) == pytest.approx(expected, rel=1e-9)
    assert len(expected) == 3 and abs(expected[0] - 1) > 0.1
    with pytest.raises(ValueError, match=r"a sink token: LMConfig\(sink_token=True\)"):
        sink_token_ratios(tiny(), ids)


def test_what_is_missing_is_named_once_by_its_name_with_the_command(runs, capsys):
    made_up(runs, "fixed_1", final={"sink_1": 20.0})
    notebook.ensure(["Table 12 left", "Table 4"], "smoke", recompute="never")
    assert capsys.readouterr().out == (
        "Not recorded yet: 8 heads; 4 heads; 1 head; heads added, not concatenated; a learnable sink token\n"
        "x*; KV biases; K biases; V biases, seed 0. To make what is missing:\n"
        "    python -m sinkutils sweep --preset smoke\n"
    )
    notebook.recorded({"K biases": "k_bias"}, "smoke", 7, "never")  # a seed that no plan has
    assert capsys.readouterr().out.endswith("sinkutils sweep --preset smoke --seeds 7 --only k_bias\n")
    notebook.recorded({"base": "base", "K biases": "k_bias"}, "smoke", 0, "never", weights=True)
    command = "    python -m sinkutils train {} --preset smoke --seed 0 --keep-weights\n"
    assert capsys.readouterr().out.endswith(f"missing:\n{command.format('fixed_1')}{command.format('k_bias')}")
    notebook.ensure(["Figure 8 right"], "smoke", recompute="never")  # 1B is not of this preset
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="item must be one of"):
        notebook.ensure(["Table 99"], "smoke", recompute="never")
