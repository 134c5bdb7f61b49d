"""What notebook 05 shows: the block diagram, norms at x*, the records of a table, figures with holes in them."""

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from helpers import made_up

from sinkutils.ledger.trials import sink_token_ratios
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.showing import comparisons, diagrams, figures, notebook

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


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


@torch.no_grad()
def test_the_norm_at_the_sink_token_does_not_depend_on_the_text():
    model = tiny(sink_token=True)
    states = [next(iter(dense_states(model, torch.full((1, 6), token)))) for token in (3, 4)]
    assert torch.equal(states[0][:, 0], states[1][:, 0])
    assert not torch.equal(states[0][:, 1], states[1][:, 1])


def test_norms_at_the_sink_token_need_one():
    with pytest.raises(ValueError, match=r"a sink token: LMConfig\(sink_token=True\)"):
        sink_token_ratios(tiny(), torch.zeros(1, 4, dtype=torch.int64))


def test_what_is_missing_is_named_once_by_its_name_with_the_command(runs, capsys):
    made_up(runs, "fixed_1", final={"sink_1": 20.0})
    notebook.ensure(["Table 12 left", "Table 4"], "smoke", recompute="never")
    assert capsys.readouterr().out == (
        "Not recorded yet: 8 heads; 4 heads; 1 head; heads added, not concatenated; a learnable sink token\n"
        "x*; KV biases; K biases; V biases, seed 0. To make what is missing:\n"
        "    python -m sinkutils sweep --preset smoke\n"
    )
    notebook.ensure(["Figure 8 right"], "smoke", recompute="never")  # 1B is not of this preset
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="item must be one of"):
        notebook.ensure(["Table 99"], "smoke", recompute="never")


def test_a_curve_without_the_quantity_has_no_line_in_its_panel():
    steps = range(3)
    runs = {
        "with": [[{"step": s, "sink_star": 5.0, "sink_1": 0.0} for s in steps]],
        "without": [[{"step": s, "sink_1": 20.0} for s in steps]],
    }
    star, first = figures.along_training(runs, {"sink_star": "Sink_*", "sink_1": "Sink_1"}).axes
    drawn = [[line.get_ydata().tolist() for line in axis.lines] for axis in (star, first)]
    assert drawn == [[[5.0] * 3], [[0.0] * 3, [20.0] * 3]]


def test_a_figure_of_nothing_is_not_drawn_and_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RENDERED", tmp_path / "rendered")
    nothing = pd.DataFrame(index=["a"], columns=[1, 2], dtype=float)
    empty = [
        figures.by_block({"a": "failed", "b": "not run"}, "ratio"),
        figures.along_training({"a": []}, {"x": "x"}),
        comparisons.comparison([]),
        comparisons.effects(nothing[:0], "x"),
        comparisons.destinations({}),
        figures.alpha_heatmaps({}),
        figures.sink_by_position(nothing),
        figures.sink_by_position(pd.DataFrame()),
    ]
    for figure in empty:
        assert figure is None
        figures.save(figure, "nothing")
    assert not plt.get_fignums() and not (tmp_path / "rendered").exists()
