"""The shared figures show what they are given; interactive pictures keep a PNG; the page about a model is whole."""

import base64
import json
import re
import subprocess
import sys
import zlib

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import made_up, own_model

import sinkutils as su
from sinkutils import plots
from sinkutils.measuring.measure import measure
from sinkutils.plots import theme
from sinkutils.plots.interactive import NOTHING_MATCHES, PALETTE, Interactive
from sinkutils.plots.report import _row

matplotlib.use("agg")
STEPS = (0, 100, 200)


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    config = su.LMConfig(vocab_size=50, context_length=48, num_layers=2, num_heads=3, hidden_size=24)
    return su.TransformerLM(config, 0)


@pytest.fixture
def ids():
    return torch.randint(0, 50, (3, 48), generator=torch.Generator().manual_seed(0))


# --- the theme -------------------------------------------------------------------------------------------------------


def test_the_same_figure_is_saved_as_the_same_small_file_and_only_a_refresh_writes_into_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(theme, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(theme, "RENDERED", tmp_path / "rendered")
    colors = su.theme()
    ax = plt.figure().subplots()
    ax.plot([1, 2, 3], color=colors["first"])
    first = su.save(ax, "line").read_bytes()
    assert su.save(ax.figure, "line").read_bytes() == first and first.startswith(b"\x89PNG") and len(first) < 30_000
    assert not (tmp_path / "figures").exists()
    monkeypatch.setenv(theme.COMMITTED, "1")
    assert su.save(ax, "line") == tmp_path / "figures" / "line.png"
    with pytest.raises(ValueError, match="save takes a figure or its axes, got str"):
        su.save("line", "line")


def test_the_text_for_those_who_cannot_see_is_the_label_or_what_stands_on_the_figure():
    figure, ax = plt.subplots()
    ax.set_title("The sink\ngoes", loc="left")
    ax.set(xlabel="step", ylabel="sink")
    assert theme.alt_text(figure) == "The sink goes; step; sink"
    figure.set_label("A falling line")
    assert theme.alt_text(figure) == "A falling line"


IN_A_SHELL = """
import os
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import sinkutils as su, matplotlib.pyplot as plt
su.theme()
ax = plt.figure().subplots()
ax.set_title("A finding")
bundle, metadata = shell.display_formatter.format(ax.figure)
assert metadata["image/png"]["alt"] == "A finding" and 500 < metadata["image/png"]["width"] < 700, metadata
assert bundle["text/plain"] == "[figure: A finding]" and len(bundle["image/png"]) < 40_000
"""


@pytest.mark.slow
def test_a_figure_in_a_notebook_is_a_small_png_with_an_alt_text():
    subprocess.run([sys.executable, "-c", IN_A_SHELL], check=True)


# --- the shared figures ----------------------------------------------------------------------------------------------


def test_every_head_is_a_dot_at_its_alpha_over_its_block():
    alpha = np.array([[0.1, 0.9], [0.4, 0.2]])
    for heads in (alpha, torch.tensor(alpha)):
        x, y = plots.heads_by_block(heads, ax=plt.figure().subplots()).collections[0].get_offsets().T
        assert y.tolist() == alpha.ravel().tolist() and np.round(x).tolist() == [1, 1, 2, 2]
    with pytest.raises(ValueError, match=r"\(layers, heads\), got \(2,\)"):
        plots.heads_by_block([0.1, 0.2])


def test_a_map_hides_what_a_query_cannot_see_and_frames_the_sink():
    tokens = ["a", "b", "$$", "d"]  # two dollars are no formula
    ax = plots.attention_map(np.full((4, 4), 0.25), tokens, plt.figure().subplots())
    theme.png(ax.figure)
    hidden = np.isnan(np.ma.filled(ax.images[0].get_array(), np.nan))
    assert hidden.tolist() == (~np.tri(4, dtype=bool)).tolist()
    assert ax.patches[0].get_x() == -0.5 and ax.patches[0].get_height() == 4
    assert [label.get_text() for label in ax.get_xticklabels()] == tokens
    with pytest.raises(ValueError, match=r"\(T, T\), got \(4, 6\)"):
        plots.attention_map(np.ones((4, 6)), tokens, ax)


def test_tokens_are_shown_as_they_are_written():
    class Tokenizer:
        def decode(self, ids, **options):
            return {0: "\n\n", 1: " the", 2: " ", 3: "incredibly"}[ids[0]]

    assert [plots.token_label(token, Tokenizer()) for token in range(4)] == ["↵↵", "the", "␣", "incredi…"]
    assert plots.token_label(7) == "7"


# --- interactive -----------------------------------------------------------------------------------------------------


def record(folder, name, sinks, star=None, steps=STEPS):
    """A run whose heads all give token 1 what `sinks` says in percent, and k* what `star` says."""
    columns = [sinks] if star is None else [sinks, star]
    curve = [{"step": step, "valid_loss": 3.0, "sink_1": sink} for step, sink in zip(steps, sinks, strict=True)]
    for point, value in zip(curve, star or (), strict=bool(star)):
        point["sink_star"] = value
    alpha = torch.tensor(columns).T[:, :, None, None].expand(-1, -1, 2, 3).half() / 100
    return made_up(folder, name, kept={"arrays": {"curve": alpha}}, curve=curve, final=dict(curve[-1]))


def test_a_film_plays_records_and_refuses_what_it_cannot(tmp_path):
    base = record(tmp_path, "fixed_1", (0.0, 25.0, 50.0))
    biased = record(tmp_path, "k_bias", (0.0, 0.0, 0.0), star=(5.0, 40.0, 75.0))
    data = su.film({"base": base, "biased": biased}).data
    assert [run["name"] for run in data["runs"]] == ["base", "biased"] and data["steps"] == list(STEPS)
    assert data["runs"][0]["means"] == pytest.approx([0, 0.25, 0.5], abs=1e-3) and data["runs"][1]["means"] == [0] * 3
    assert np.array(data["runs"][0]["frames"][2]) / (len(PALETTE) - 1) == pytest.approx(0.5, abs=0.02)
    assert su.film({"k": biased}, k="*").data["runs"][0]["means"][2] == pytest.approx(0.75, abs=1e-3)
    other = record(tmp_path, "sigmoid", (0.0, 1.0, 2.0), steps=(0, 1, 2))
    for runs, k, message in (
        ({}, 1, "nothing to play"),
        ({"base": base}, "*", "keeps attention to the keys"),
        ({"base": base, "other": other}, 1, "the same steps"),
    ):
        with pytest.raises(ValueError, match=message):
            su.film(runs, k)


def test_the_explorer_carries_the_maps_that_measure_gives(model, ids):
    data, T = su.explore(model, ids, "a model").data, 32
    assert data["T"] == T and data["tokens"] == [[str(token) for token in row[:T].tolist()] for row in ids]
    packed = np.frombuffer(zlib.decompress(base64.b64decode(data["packed"])), np.uint8).reshape(3, 6, -1)
    report = measure(model, ids[:, :T], heads=[(1, 2)], keep=("map",))
    expected = np.sqrt(report.kept[1, 2].map.numpy())[:, *np.tril_indices(T)]
    np.testing.assert_allclose(packed[:, 5] / (len(PALETTE) - 1), expected, atol=0.51 / (len(PALETTE) - 1))
    np.testing.assert_allclose(data["alpha"], report.alpha[:, 0].flatten(1), atol=1e-3)
    assert data["head"] == int(report.alpha[0, 0].argmax()) and data["columns"] == 3


@pytest.mark.parametrize(("length", "message"), [(0, "must be at least 1, got 0"), ("a", "must be an int")])
def test_a_length_that_is_none_is_refused_in_a_line(model, ids, length, message):
    with pytest.raises(ValueError, match=message):
        su.explore(model, ids, length=length)


def test_what_is_interactive_keeps_a_png_an_alt_text_and_says_what_to_do_without_its_script(model, ids):
    class Hostile:
        def decode(self, ids, **options):
            return "</s> <&"

    many = su.LMConfig(vocab_size=50, context_length=48, num_layers=30, num_heads=9, hidden_size=18)
    hostile = su.explore(su.TransformerLM(many, 0), ids, "</script> <&", Hostile())
    for picture in (su.logits(), su.explore(model, ids), hostile):
        bundle, metadata = picture._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "image/png", "text/html"}
        assert (
            base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG") and metadata["image/png"]["alt"] == picture.alt
        )
        html = bundle["text/html"]
        still = re.sub(r"(?s)<script>.*?</script>", "", html)
        assert html.count("</script>") == 1 and "run this cell to use the controls" in still and "<img" in still
        assert len(html) < 130_000


def test_logits_begin_where_nothing_matches():
    assert su.logits().data["logits"] == NOTHING_MATCHES and max(NOTHING_MATCHES[1:]) < 0 < NOTHING_MATCHES[0]


@pytest.mark.slow
def test_an_exported_notebook_keeps_a_picture():
    nbconvert, nbformat = pytest.importorskip("nbconvert"), pytest.importorskip("nbformat")
    bundle, metadata = su.logits()._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", bundle, metadata=metadata)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("su.logits()", outputs=[output])])
    latex, resources = nbconvert.LatexExporter().from_notebook_node(book)
    assert "includegraphics" in latex and any(name.endswith(".png") for name in resources["outputs"])
    for exporter in (nbconvert.SlidesExporter(), nbconvert.MarkdownExporter()):
        assert "data:image/png;base64," in exporter.from_notebook_node(book)[0]


# --- one page about a model ------------------------------------------------------------------------------------------


def test_a_page_about_a_model_holds_its_numbers_as_they_were_measured_and_nothing_from_outside(corpus):
    small = own_model(vocab_size=corpus.vocab_size)
    texts = ["a first text of some words that goes on for a while, and then a little more " * 4] * 6
    html = su.report_model(small, corpus.tokenizer, "<ours> & co", texts=texts, n=4, length=16)
    assert "&lt;ours&gt; &amp; co" in html and "<ours>" not in html
    assert not re.search(r"""(src|href)=["'](?!data:|#)|@import|<script(?! type="application/json")""", html)
    assert html.count("<svg") == html.count('role="img" aria-label="') == 7 and 'name="viewport"' in html
    numbers = json.loads(re.search(r'id="numbers">(.*?)</script>', html, re.S)[1])
    assert {*numbers["reports"]} == {
        f"{kind}{bos}" for kind in ("natural", "random", "repeat") for bos in ("", ", BOS first")
    }
    ids = su.probe("random", corpus.tokenizer, 4, 16)
    assert numbers["reports"]["random"]["alpha"] == measure(small, ids).to_dict()["alpha"]


def test_a_page_from_reports_alone_leaves_out_what_it_is_not_given(model, ids):
    report = measure(model, ids, norms=False)
    html = su.report_page(report, "ours", beside={"other": report})
    assert "<td>other</td>" in html and f"{report.sink(1):.1f} %" in html and html.count("<svg") == 1
    with pytest.raises(ValueError, match="about the first token"):
        su.report_page(measure(model, ids, targets=(2,)))


def test_the_excess_of_a_page_is_that_of_the_report(model, ids):
    report = measure(model, ids)
    row = _row(report.to_dict())
    blocks = [float(row["excess in block 1"]), float(row["excess in later blocks"])]
    assert np.mean(blocks) == pytest.approx(report.excess(1), abs=0.01)


def test_a_picture_is_its_alt_text_where_there_is_only_text():
    assert repr(Interactive("film", {}, b"", "A film", "")) == "[picture: A film]"
