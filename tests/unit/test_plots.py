"""The shared figures show what they are given; interactive pictures keep a PNG; the page about a model is whole."""

import base64
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import warnings
import zlib
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import own_model, refused, refuses, word_tokenizer

import sinkutils as su
from sinkutils import measure, plots
from sinkutils.paths import ROOT
from sinkutils.plots import theme
from sinkutils.plots.interactive import PALETTE
from sinkutils.plots.report import _row

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def no_figure_left_open():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    sizes = {"num_layers": 2, "num_heads": 3, "hidden_size": 24}
    config = su.LMConfig(vocab_size=50, context_length=48, **sizes)
    return su.TransformerLM(config, 0)


@pytest.fixture
def ids():
    return torch.randint(0, 50, (3, 48), generator=torch.Generator().manual_seed(0))


# --- the theme -------------------------------------------------------------------------------------------------------


def test_a_style_leaves_the_random_numbers_of_a_script_alone():
    np.random.seed(3)  # noqa: NPY002
    expected = np.random.rand()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    su.theme()
    assert np.random.rand() == expected  # noqa: NPY002


def test_the_same_figure_is_saved_as_the_same_small_file(tmp_path, monkeypatch):
    monkeypatch.setattr(theme, "RENDERED", tmp_path)
    colors = su.theme()
    ax = plt.figure().subplots()
    ax.plot([1, 2, 3], color=colors["first"])
    first = su.save(ax, "line").read_bytes()
    assert su.save(ax.figure, "line") == tmp_path / "figures" / "line.png"
    assert su.save(ax, "line").read_bytes() == first
    assert first.startswith(b"\x89PNG")
    assert len(first) < 30_000


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
    by_place = (alpha, None, [1, 1, 2, 2]), (torch.tensor(alpha), (1, 3), [2, 2, 4, 4])
    for heads, layers, blocks in by_place:
        axes = plots.heads_by_block(heads, layers, ax=plt.figure().subplots())
        x, y = axes.collections[0].get_offsets().T
        assert y.tolist() == alpha.ravel().tolist() and np.round(x).tolist() == blocks
    refuses(r"\(layers, heads\), got \(2,\)", plots.heads_by_block, [0.1, 0.2])


def test_a_map_hides_what_a_query_cannot_see_and_frames_the_sink():
    tokens = ["a", "b", "$$", "d"]  # two dollars are no formula
    ax = plots.attention_map(np.full((4, 4), 0.25), tokens, plt.figure().subplots())
    theme.png(ax.figure)
    hidden = np.isnan(np.ma.filled(ax.images[0].get_array(), np.nan))
    assert hidden.tolist() == (~np.tri(4, dtype=bool)).tolist()
    assert ax.patches[0].get_x() == -0.5 and ax.patches[0].get_height() == 4
    assert [label.get_text() for label in ax.get_xticklabels()] == tokens
    refuses(r"\(T, T\), got \(4, 6\)", plots.attention_map, np.ones((4, 6)), tokens, ax)


def test_tokens_are_shown_as_they_are_written():
    words = ["\n\n", " the", " ", "incredibly"]
    tokenizer = SimpleNamespace(decode=lambda ids, **options: words[ids[0]])
    labels = [plots.token_label(token, tokenizer) for token in range(4)]
    assert labels == ["↵↵", "the", "␣", "incredi…"]
    assert plots.token_label(7) == "7"


# --- interactive -----------------------------------------------------------------------------------------------------


def test_a_film_plays_what_it_is_given_and_refuses_other_steps():
    rising = np.multiply.outer((0, 0.25, 0.5), np.ones((2, 3)))
    courses = {"a": rising, "b": 0 * rising}
    data = su.film(courses, [0, 100, 200]).data
    assert [run["name"] for run in data["runs"]] == ["a", "b"] and data["steps"] == [0, 100, 200]
    assert [run["means"] for run in data["runs"]] == [[0, 0.25, 0.5], [0, 0, 0]]
    assert data["runs"][0]["frames"] == courses["a"].reshape(3, 6).tolist()
    still = su.film(courses, [0, 100, 200]).figure  # the last frame
    dots = [ax.collections[0].get_offsets()[:, 1] for ax in still.axes if ax.collections]
    assert [heights.tolist() for heights in dots] == [[0.5] * 6, [0] * 6]
    refuses("'a' was measured 3 times, not at 2 steps", su.film, courses, [0, 100])
    refuses("steps must be several integers, got None", su.film, courses, None)
    refuses("courses must be of type Mapping, got list", su.film, [rising], [0, 100, 200])
    refuses("at least one", su.film, {}, [0, 100, 200])
    refuses(r"the shape \(steps, layers, heads\), got \(2, 3\)", su.film, {"a": rising[0]}, [0, 1])


def test_the_steps_under_a_film_do_not_touch():
    still = su.film({"a": np.zeros((2, 4, 4)), "b": np.zeros((2, 4, 4))}, [0, 12_000]).figure
    with plt.rc_context(theme.STYLE):
        theme.png(still)  # as a page shows it
    labels = [label.get_window_extent() for label in still.axes[-1].get_xticklabels()]
    shown = [box for box in labels if 0 <= box.x0 and box.x1 <= still.bbox.width]
    letter = labels[1].width  # of the step 0
    assert all(right.x0 - left.x1 > letter for left, right in itertools.pairwise(shown))


def test_the_explorer_carries_the_maps_that_measure_gives_of_a_length_that_is_one(model, ids):
    data, T = su.explore(model, ids, "a model").data, 32
    assert data["T"] == T
    assert data["tokens"] == [[str(token) for token in row[:T].tolist()] for row in ids]
    blob = zlib.decompress(base64.b64decode(data["packed"]))
    packed = np.frombuffer(blob, np.uint8).reshape(3, 6, -1)
    report = measure(model, ids[:, :T], heads=[(1, 2)])
    expected = np.sqrt(report.kept[1, 2].map.numpy())[:, *np.tril_indices(T)]
    last = len(PALETTE) - 1
    np.testing.assert_allclose(packed[:, 5] / last, expected, atol=0.51 / last)
    np.testing.assert_allclose(data["alpha"], report.alpha[:, 0].flatten(1), atol=1e-3)
    assert data["head"] == int(report.alpha[0, 0].argmax())
    assert (data["H"], data["blocks"]) == (3, [1, 2])
    chosen = su.explore(model, ids, head=(2, 1))
    assert (
        chosen.data["head"] == 3  # the first of block 2
        and "block 2, head 1" in chosen.figure.get_suptitle()
    )
    with refused(r"head must be \(block, head\), up to \(2, 3\), got \(3, 1\)"):
        su.explore(model, ids, head=(3, 1))
    refuses(r"head must be \(block, head\), up to \(2, 3\), got 3", su.explore, model, ids, head=3)
    films = [su.film({"a": np.zeros((2, 1, 1))}, steps) for steps in ([0, 8], np.array([0, 8]))]
    assert json.dumps(films[0].data) == json.dumps(films[1].data)
    refuses("length must be at least 1, got 0", su.explore, model, ids, length=0)
    refuses("length must be an int", su.explore, model, ids, length="a")
    refuses(r"got torch.int64 of the shape \(48,\)", su.explore, model, ids[0])
    refuses("name must be of type str, got int: 5", su.explore, model, ids, 5)
    refuses("tokenizer must decode tokens, got 'gpt2'", su.explore, model, ids, tokenizer="gpt2")


def test_what_is_interactive_keeps_a_png_and_an_alt_text_for_those_without_scripts(model, ids):
    hostile = SimpleNamespace(decode=lambda ids, **options: "</s> <&")
    many = su.LMConfig(vocab_size=50, context_length=48, num_layers=30, num_heads=9, hidden_size=18)
    explored = (
        su.explore(model, ids),
        su.explore(su.TransformerLM(many, 0), ids, "</script> <&", hostile),
    )
    for picture in (su.film({"a": np.zeros((2, 1, 1))}, [0, 1]), *explored):
        bundle, metadata = picture._repr_mimebundle_()
        assert bundle["text/plain"] == f"[picture: {picture.figure.get_label()}]"
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
        assert metadata["image/png"]["alt"] == picture.figure.get_label()
        html = bundle["text/html"]
        still = re.sub(r"(?s)<script>.*?</script>", "", html)
        assert html.count("</script>") == 1
        assert "run this cell to use the controls" in still
        assert "<img" in still
        assert len(html) < 130_000


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["SlidesExporter", "MarkdownExporter"])
def test_slides_and_markdown_of_a_notebook_keep_its_pictures(exporter):
    nbconvert = pytest.importorskip("nbconvert")
    exporting = getattr(nbconvert, exporter)()
    body, resources = exporting.from_filename(ROOT / "notebooks" / "00_quickstart.ipynb")
    book = json.loads((ROOT / "notebooks" / "00_quickstart.ipynb").read_text())
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert body.count("data:image/png;base64,") + len(resources["outputs"]) >= pictures > 5
    assert exporter == "MarkdownExporter" or body.count("<section") > 5


# --- one page about a model ------------------------------------------------------------------------------------------


def test_a_page_about_a_model_holds_its_measured_numbers_and_nothing_from_outside(corpus):
    small = own_model(vocab_size=corpus.vocab_size)
    texts = ["a first text of some words that goes on for a while, and then a little more " * 4] * 6
    asked = (small, corpus.tokenizer, "<ours> & co", texts)
    html, again = (su.report_model(*asked, n=4, length=16) for _ in range(2))
    assert html == again and "&lt;ours&gt; &amp; co" in html and "<ours>" not in html
    assert not re.search(
        r"""(src|href)=["'](?!data:|#)|@import|<script(?! type="application/json")""", html
    )
    assert html.count("<svg") == html.count('role="img" aria-label="') == 7
    assert 'name="viewport"' in html
    numbers = numbers_of(html)
    assert {*numbers["reports"]} == {
        f"{kind}{bos}" for kind in ("natural", "random", "repeat") for bos in ("", ", BOS first")
    }
    ids = su.probe("random", corpus.tokenizer, 4, 16)
    assert numbers["reports"]["random"]["alpha"] == measure(small, ids).to_dict()["alpha"]


def numbers_of(html):
    return json.loads(re.search(r'id="numbers">(.*?)</script>', html, re.S)[1])


def test_a_page_says_what_a_learned_sink_takes():
    sunk = own_model(attention=su.AttentionSpec(sink_logit="learned"))
    html = su.report_model(sunk, word_tokenizer(57), "ours", ["w1 w2 " * 20] * 3, n=3, length=16)
    share = numbers_of(html)["reports"]["natural"]["sink_star"]["0.3"]
    assert f"{share:.1f} %" in html.partition("Sink*")[2][:30]


def test_a_page_from_reports_alone_leaves_out_what_it_is_not_given(model, ids):
    report = measure(model, ids, norms=False)
    html = su.report_page(report, "ours", beside={"other": report})
    assert "<th>other</th>" in html
    assert f"{report.sink(1):.1f} %" in html
    assert html.count("<svg") == 1
    refuses("about the first token", su.report_page, measure(model, ids, targets=(2,)))
    refuses("two models are called 'ours'", su.report_page, report, "ours", beside={"ours": report})
    for reports in (None, [report], model):
        refuses("reports must be of type Mapping", su.report_page, reports)
    refuses("at least one", su.report_page, {})
    refuses("a value of reports must be of type Report, got NoneType", su.report_page, {"a": None})
    refuses("beside must be of type Mapping, got Report", su.report_page, report, beside=report)
    refuses("name must be of type str, got int: 5", su.report_page, report, 5)
    refuses("facts must be of type Mapping, got int: 5", su.report_page, report, facts=5)


def test_the_excess_of_a_page_is_the_reports_also_with_windows_and_another_epsilon(model, ids):
    windowed = own_model(attention=su.AttentionSpec(window=4))
    for one in (model, windowed):
        report = measure(one, ids[:, :32], epsilons=(0.2,))
        row = _row(report)
        blocks = [float(row["excess in block 1"]), float(row["excess in later blocks"])]
        assert np.mean(blocks) == pytest.approx(report.excess(1), abs=0.01)
        assert su.report_page(report, "ours")
    # of a hybrid model
    assert "excess in block 3" in _row(dataclasses.replace(report, layers=(2, 3)))


def test_a_page_of_a_model_without_a_tokenizer_is_of_random_ids():
    html = su.report_model(own_model(), None, "ours", n=3, length=16)
    assert [*numbers_of(html)["reports"]] == ["random", "repeat"] and html.count("<svg") == 7
    assert "none: there is no tokenizer" in html
    endless = ("words" for _ in itertools.count())
    refuses("there is none", su.report_model, own_model(), None, "ours", endless, n=3)


@pytest.mark.parametrize(
    "texts", ["w1 w2 " * 99, {"w1 w2 " * 99: 1}, {"w1 w2 " * 99}, pd.DataFrame({"w1": [1]})]
)
def test_a_page_refuses_what_is_not_several_texts(texts):
    refuses("several strings", su.report_model, own_model(), word_tokenizer(57), "ours", texts, n=1)


def test_one_long_text_is_windows_of_a_page():
    texts = ["w1 w2 w3 w4 " * 40]
    html = su.report_model(own_model(), word_tokenizer(57), "ours", texts, n=100, length=16)
    assert numbers_of(html)["reports"]["natural"]["samples"] == 10


def test_a_page_reads_a_stream_of_texts_only_as_far_as_it_needs():
    endless = itertools.count()
    texts = (f"w{index % 9} w2 w3 w4 " * 20 for index in endless)
    html = su.report_model(own_model(), word_tokenizer(57), "ours", texts, n=3, length=16)
    assert numbers_of(html)["reports"]["natural"]["samples"] == 3
    assert next(endless) <= 10


def test_a_token_that_opens_a_comment_swallows_nothing(ids):
    tokens = word_tokenizer(58, ("<!--", "<script>"))
    picture = su.explore(own_model(), ids[:, :20] % 3, tokenizer=tokens)
    html = picture._repr_mimebundle_()[0]["text/html"]
    script = html.partition("<script>")[2]
    assert "<!--" not in script and "<script>" not in script and "\\u003c!--" in script


@pytest.mark.parametrize("name", ["$\\undefined$", "$name$", "a $ and a $"])
def test_a_name_with_dollars_is_no_formula(name, model, ids):
    for picture in (su.film({name: np.zeros((2, 1, 1))}, [0, 1]), su.explore(model, ids, name)):
        assert base64.b64decode(picture._repr_mimebundle_()[0]["image/png"]).startswith(b"\x89PNG")


def test_half_a_character_in_a_name_is_a_question_mark_of_a_page_and_a_figure(model, ids):
    name = "cut \ud83d"
    assert "cut ?" in su.report_page(measure(model, ids), name).encode().decode()
    for picture in (su.film({name: np.zeros((2, 1, 1))}, [0, 1]), su.explore(model, ids, name)):
        assert "cut ?" in picture._repr_mimebundle_()[0]["text/html"].encode().decode()


def test_a_map_is_drawn_of_a_tensor_which_stays_as_it_was():
    weights = torch.eye(4).double()
    with warnings.catch_warnings(action="error"):
        plots.attention_map(weights, None, plt.gca())
    assert torch.equal(weights, torch.eye(4).double())


def test_every_tick_of_a_page_has_a_number_of_its_own(model, ids):
    html = su.report_page(measure(model, ids), "untrained")
    figure = html[html.index('aria-label="norm of token 1') :].partition("</svg>")[0]
    written = re.findall(r">(-?[\d.]+)</text>", figure.partition("ytick_1")[2])
    assert len(written) > 2 and len(set(written)) == len(written)
