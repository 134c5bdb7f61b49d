"""The interactive pictures: what stands in the still one, and what the script is given, is what was measured.

How they answer to hands is tried in a browser: tests/end_to_end/test_book.py.
"""

import base64
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from helpers import made_up

from sinkutils.measuring.measure import measure
from sinkutils.model.attention import AttentionSpec
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.showing import interactive
from sinkutils.showing.diagrams import regions
from sinkutils.showing.explorer import explore, label, maps
from sinkutils.showing.svg import PALETTE

STEPS = (0, 100, 200)


def record(folder, name, sinks, star=None, steps=STEPS):
    """A run whose heads all give token 1 what `sinks` says in percent, and k* what `star` says."""
    columns = [sinks] if star is None else [sinks, star]
    curve = [{"step": step, "valid_loss": 3.0, "sink_1": sink} for step, sink in zip(steps, sinks, strict=True)]
    for point, value in zip(curve, star or (), strict=bool(star)):
        point["sink_star"] = value
    alpha = torch.tensor(columns).T[:, :, None, None].expand(-1, -1, 2, 3).half() / 100
    return made_up(folder, name, kept={"arrays": {"curve": alpha}}, curve=curve, final=dict(curve[-1]))


def test_a_film_of_a_token_or_of_k_star_shows_what_records_keep_and_names_what_is_missing(tmp_path):
    runs = {
        "base": record(tmp_path, "fixed_1", (0.0, 25.0, 50.0)),
        "K biases": record(tmp_path, "k_bias", (0.0, 0.0, 0.0), star=(5.0, 40.0, 75.0)),
        "sigmoid": None,
    }
    film, star = interactive.film(runs), interactive.film(runs, k="*")
    assert "base, 0 % before the first step and 50 % at the end" in film.caption
    assert "Not recorded yet: sigmoid" in film.caption and len(film.data["runs"]) == 2
    assert np.array(film.data["runs"][0]["frames"][2]) / (len(PALETTE) - 1) == pytest.approx(0.5, abs=0.02)
    assert "K biases, 5 % before the first step and 75 % at the end" in star.caption
    assert "Without k∗: base." in star.caption and len(star.data["runs"]) == 1
    assert np.array(star.data["runs"][0]["frames"][1]) / (len(PALETTE) - 1) == pytest.approx(0.4, abs=0.02)
    assert interactive.film({"sigmoid": None}) is None
    other = record(tmp_path, "sigmoid", (0.0, 1.0, 2.0), steps=(0, 50, 100))
    with pytest.raises(ValueError, match="the same steps"):
        interactive.film({"base": runs["base"], "sigmoid": other})


def test_a_threshold_reads_what_was_measured():
    report = {"floor": 0.1, "samples": 9, "alpha": [[[0.5, 0.1], [0.9, 0.2]]]}
    measured = {T: report | {"T": T, "sink": {"1": {"0.2": 75.0, "0.3": 50.0}}} for T in (8, 64)}
    picture = interactive.threshold(measured, "a model")
    assert "75.0 % at ε = 0.2" in picture.caption and "from 50.0 % at T = 8 to 50.0 % at T = 64" in picture.caption
    assert [row["T"] for row in picture.data["lengths"]] == [8, 64]
    with pytest.raises(ValueError, match=r"one of \[8, 64\]"):
        interactive.threshold(measured, "a model", length=16)


def test_logits_sum_as_each_operation_must():
    caption = interactive.logits().caption
    s = torch.tensor(interactive.NOTHING)
    assert f"sigmoid gives {s[1:].sigmoid().sum():.2f} in all" in caption
    assert f"{s.softmax(0)[0]:.2f} goes there and {s.softmax(0)[1:].sum():.2f} to the text" in caption


def test_masks_are_those_that_attention_sees():
    picture = interactive.masks(window=3, length=5)
    for kind in ("window", "prefix"):
        for value, digits in enumerate(picture.data["masks"][kind], 1):
            assert [int(digit) for digit in digits] == regions(5, AttentionSpec(**{kind: value})).ravel().tolist()
    assert "12 pairs of a query and a key are seen" in picture.caption


@pytest.fixture(scope="module")
def model():
    return TransformerLM(LMConfig(vocab_size=50, context_length=48, num_layers=2, num_heads=3, hidden_size=24), 0)


def test_the_explorer_carries_the_maps_that_measure_gives(model):
    ids = torch.randint(0, 50, (3, 48), generator=torch.Generator().manual_seed(0))
    picture = explore(model, ids, "a model")
    data, T = picture.data, 32
    assert data["T"] == T and data["tokens"] == [[str(token) for token in row[:T].tolist()] for row in ids]
    packed = np.frombuffer(zlib.decompress(base64.b64decode(data["packed"])), np.uint8).reshape(3, 6, -1)
    report = measure(model, ids[:, :T], heads=[(1, 2)], keep=("map",))
    expected = np.sqrt(report.kept[1, 2].map.numpy())[:, *np.tril_indices(T)]
    np.testing.assert_allclose(packed[:, 5] / (len(PALETTE) - 1), expected, atol=0.51 / (len(PALETTE) - 1))
    np.testing.assert_allclose(data["alpha"], report.alpha[:, 0].flatten(1), atol=1e-3)
    layer, head = data["names"][data["head"]]
    assert (layer - 1, head - 1) == divmod(int(report.alpha[0, 0].argmax()), 3)
    assert f"block {layer}, head {head}" in picture.alt


def test_what_a_picture_says_stands_in_its_page_and_its_text_and_both_are_small(model):
    weights = torch.rand(1, 270, 23, 23, generator=torch.Generator().manual_seed(0)).tril().softmax(-1).numpy()
    pairs = [(layer, head) for layer in range(30) for head in range(9)]
    hostile = maps(weights, pairs, [['<"a" & b>'] * 23], "</script> & co", 9)
    for picture in (interactive.logits(), interactive.masks(), hostile):
        page = picture._repr_html_()
        assert len(page.encode()) < 130_000 and page.count("</script>") == 1  # of random weights, which do not pack
        assert all(len(line) <= 100 for line in repr(picture).splitlines())
        image = page.partition("base64,")[2].partition('"')[0]
        assert base64.b64decode(image).startswith(b"<svg")


def test_tokens_are_shown_as_they_are_written():
    class Tokenizer:
        def decode(self, ids, **options):
            return {0: "\n\n", 1: " the", 2: " ", 3: "incredibly"}[ids[0]]

    assert [label(token, Tokenizer()) for token in range(4)] == ["↵↵", "the", "␣", "incredi…"]


FRESH = """
import torch, transformers, sinkutils as su
model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2))
assert "mean of the 4 heads" in su.explore(model.eval(), torch.randint(0, 64, (2, 16))).caption
"""


@pytest.mark.slow
def test_the_explorer_works_first_thing_in_an_interpreter_and_through_eager_weights():
    subprocess.run([sys.executable, "-c", FRESH], check=True)
