"""What notebook 01 shows: conditions of the inputs, tables and sentences, kept measurements, scores."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import transformers as tf
from helpers import DONE, own_model

from sinkutils.__main__ import main
from sinkutils.data.packing import DataConfig
from sinkutils.measuring import open_lms, saved
from sinkutils.measuring import scores as downstream
from sinkutils.measuring.measure import measure
from sinkutils.measuring.own import BOS, TEXT, X_FIX, Subject, subject
from sinkutils.measuring.real import window_of
from sinkutils.measuring.report import uniform_alpha
from sinkutils.showing import properties, section_3
from sinkutils.showing import section_3_seen as told
from sinkutils.study.config import RunConfig, TrainConfig
from sinkutils.study.record import write_record
from sinkutils.study.store import Runs

matplotlib.use("agg")


def tiny_model(**options):
    return own_model(1.0, **{"vocab_size": 300, "num_layers": 3, **options}).eval()


def tiny_64():
    """One that reads the metric's 64 tokens."""
    return tiny_model(context_length=64)


def report_of(kind="natural", model="gpt2", **changes):
    """What `measure` says of random ids in the paper's setting, or in a changed one."""
    asked = {"ids": torch.randint(0, 300, (100, 64)), "name": f"{model}, {kind} input", "bos": False}
    return {kind: measure(tiny_64(), **asked | changes)}


def recorded(folder, model, corpus, **changes):
    """The name of a record with weights that nothing trained."""
    run = RunConfig("tiny", "test", model=model.config, **changes)
    write_record(folder, run, DONE, {}, dict(model.state_dict()), corpus.tokenizer)
    return str(folder)


@pytest.fixture
def plain(corpus):
    return Subject("plain", tiny_model(), corpus.tokenizer, corpus=corpus)


@pytest.fixture
def fixed(corpus):
    return Subject("fixed", tiny_model(position="nope"), corpus.tokenizer, 1, corpus)


@pytest.fixture
def learnable(corpus):
    return Subject("learnable", tiny_model(position="learnable"), corpus.tokenizer, corpus=corpus)


@pytest.fixture(autouse=True)
def no_measurements(tmp_path, monkeypatch):
    """An empty data/measurements, and no figure left open."""
    folder = tmp_path / "measurements"
    monkeypatch.setattr(saved, "MEASUREMENTS", folder)
    yield folder
    plt.close("all")


# --- inputs ------------------------------------------------------------------------------------------------------


def test_a_model_trained_with_a_fixed_token_gets_it_where_training_put_it(fixed, corpus):
    assert fixed.firsts == (X_FIX, TEXT, BOS)
    for kind in ("natural", "random"):
        ids, without = (fixed.inputs(kind, 5, 16, first=first) for first in (None, TEXT))
        assert (ids[:, 0] == corpus.fix_id).all()
        assert torch.equal(ids[:, 1:], without[:, 1:])
        assert (without != corpus.fix_id).all()
    assert fixed.inputs("repeat", 5, 16).tolist() == [[corpus.fix_id] * 16]


def test_the_condition_of_the_first_token_is_explicit(plain, corpus):
    assert plain.firsts == (TEXT, BOS)
    assert (plain.inputs("random", 3, 8, first=BOS)[:, 0] == corpus.bos_id).all()
    with pytest.raises(ValueError, match=r"first must be one of text, BOS for plain, got 'x_fix'"):
        plain.inputs("natural", 3, 8, first=X_FIX)


def test_a_record_tells_where_training_fixed_a_token(tmp_path, corpus):
    for position in (None, 2):
        told = {"data": DataConfig(fixed_position=position), "train": TrainConfig(eval_length=32)}
        one = subject(recorded(tmp_path / str(position), tiny_model(), corpus, **told))
        assert (one.name, one.fixed_position, one.context, one.length) == ("tiny", position, 32, 32)


def test_own_models_without_weights_are_named_in_a_line(runs, capsys):
    assert properties.subjects("gpu") == []
    assert "the weights of" in capsys.readouterr().out
    with pytest.raises(ValueError, match="recompute must be 'never' or 'missing'"):
        properties.subjects("laptop", recompute="always")


# --- Section 3 ---------------------------------------------------------------------------------------------------


@pytest.fixture
def live(fixed, corpus, monkeypatch, capsys):
    """Sections of a model that was trained with a fixed token, measured now; without a KV cache there is no surgery."""
    with torch.no_grad():
        for block in fixed.model.blocks[:1]:  # uniform attention in one block: what a threshold makes of that is known
            block.attention.qkv.weight.zero_()
    monkeypatch.setattr(open_lms, "load_corpus", lambda name: corpus)
    monkeypatch.setattr(open_lms, "domain", lambda kind, progress: iter(["sink token head " * 40] * 5))
    monkeypatch.setattr(open_lms, "LENGTHS", {8: 3, 16: 2, 64: 1})
    (sections,) = properties.measured(fixed, 6).values()
    told = capsys.readouterr().out
    assert "left out, first token: surgery needs a causal LM" in told and "measured now, n = 6" in told
    return sections


def test_sections_of_a_live_model_say_what_measure_says(live, fixed):
    assert properties.usual(live) == X_FIX and set(live["probes"]["natural"]) == {X_FIX, TEXT, BOS}
    table = properties.by_input({"fixed": live}).set_index(["model", "first"])
    report = fixed.measure(fixed.inputs("random", 6, 32))
    assert table.loc[("fixed", X_FIX), "random"] == pytest.approx(report.sink())
    assert table.loc[("Mistral-7B", TEXT), "natural"] == 97.49 and table["usual"].sum() == 1
    lengths = properties.by_length(live)
    assert lengths.index.tolist() == [8, 16]  # it reads 32 tokens
    assert lengths["uniform"].round(4).tolist() == [round(uniform_alpha(8), 4), round(uniform_alpha(16), 4)]
    assert (lengths[[0.1, 0.2]] >= 100 / 3 - 0.01).all(axis=None)  # the uniform block's heads count
    assert properties.by_domain(live).index.tolist() == ["docstrings", "python", "c-headers", "licences", "data"]
    natural = fixed.measure(fixed.inputs("natural", 6, 32))
    np.testing.assert_allclose(properties.alphas(live), natural.alpha[:, 0].mean(dim=0), atol=1e-4)


def test_kept_angles_are_those_of_the_maps_that_measure_keeps(live, fixed):
    ids = fixed.inputs("natural", 6, 32)
    kept = fixed.measure(ids, heads=[(1, 0)], keep=("qk",)).kept[1, 0]
    assert live["angles"]["cosine"]["first"][1][0] == pytest.approx(float(kept.cosine[:, 1:, 0].mean()), abs=1e-5)
    below = torch.ones(32, 32).tril().bool()
    below[:, 0] = below[0] = False
    product = kept.norm_product.mean(dim=0)[below].mean()
    assert live["angles"]["norm_product"]["others"][1][0] == pytest.approx(float(product), rel=1e-5)


def test_without_a_sink_the_sentences_say_so_and_sections_that_are_missing_are_left_out(live):
    models = {"fixed": live}
    for report in live["probes"]["natural"].values():
        report["alpha"] = [[[0.1, 0.1]] * 3]
    assert told.angles(models) == ["fixed has no head with a sink, so there is nothing to explain."]
    assert "Blocks without such a head: 1, 2, 3." in told.heads(models)[0]
    assert told.chain(models) == [] and section_3.chain(models) is None
    assert told.scores(properties.sizes(models)) == ["No model has been scored here yet."]


@pytest.fixture(scope="module")
def real():
    """The committed measurements, as notebook 01 takes them."""
    return properties.measured()


def test_sentences_carry_the_numbers_that_were_measured(real):
    for title, of in real.items():
        probes, first = of["probes"], properties.usual(of)
        said = {
            name: " ".join(getattr(told, name)({title: of}))
            for name in ("tokens", "norms", "chain", "angles", "lengths", "repeats", "domains", "heads")
        }
        assert all(title in text for text in said.values())
        assert f"{max(h['alpha_1'] for h in of['maps']['heads']):.2f} of their attention" in said["tokens"]
        seen = [int(t) for t in of["lengths"][first] if int(t) <= window_of(of)]
        longest = of["lengths"][first][f"{max(seen)}"]["sink"]["1"]["0.3"]
        assert re.search(rf"to {longest:.1f} at 0.3", said["lengths"])
        assert ("see 512 keys only" in said["lengths"]) == (title == "Gemma 3 270M")
        sinks = [kind[first]["sink"]["1"]["0.3"] for kind in of["domains"]["by"].values()]
        assert f"between {min(sinks):.1f} %" in said["domains"] and f"{max(sinks):.1f} %" in said["domains"]
        strong = (np.array(probes["natural"][first]["alpha"][0]) > 0.3).sum()
        assert f"{strong} heads with a mean" in said["angles"]
        norms = np.array(probes["natural"][first]["hidden_norms"])[:-1]
        assert f"the most is {(norms[:, 0] / norms[:, 1:].mean(axis=1)).max():.1f} times" in said["norms"]
        scores = " ".join(told.scores(properties.sizes({title: of})))
        assert f"{of['hellaswag']['acc_norm']:.1f} %" in scores and "1,000 questions" in scores


def test_what_notebook_01_says_in_its_own_words_holds_for_the_committed_models(real):
    smol, gemma = real.values()
    assert properties.alphas(smol).size == 270
    for kinds in (of["domains"]["by"] for of in real.values()):
        assert len(kinds) == 12 and sum("here:" in kind for kind in kinds) == 2

    def sink(of, kind, first, eps="0.3"):
        return of["probes"][kind][first]["sink"]["1"][eps]

    assert sink(smol, "natural", TEXT) > 50 < sink(smol, "random", TEXT)  # on any first token, of noise too
    assert sink(gemma, "natural", TEXT) < 1 and sink(gemma, "natural", BOS) > 50  # on its BOS alone
    assert sink(smol, "repeat", TEXT) == 0
    _, natural, repeated = told.repeated_norms(smol)
    assert natural[0] > 100 > 10 > natural[1:].max() and repeated.min() > 100  # all repeated tokens are massive
    # "Where h_1 is not massive, nobody looks": block l reads what block l - 1 wrote.
    largest = np.array(smol["first_token"][TEXT]["over_median"])[:-1, 0]
    looked_at = (properties.alphas(smol)[1:] > 0.3).any(axis=1)
    assert largest[looked_at].min() > largest[~looked_at].max()
    for of in real.values():
        one, first = of["first_token"][properties.usual(of)], properties.usual(of)
        massive = np.flatnonzero(np.array(one["over_median"])[:-1, 0] > 1000) + 1
        share = np.array(one["normed_share"])[massive]
        assert (share[:, 0] > 0.7).all() and (share[:, 0] > share[:, 1]).all()  # few dimensions are left
        assert min(one["cosine_k_1_to_mean"][1:]) > 0.95  # nearly one vector
        values = np.array(of["probes"]["natural"][first]["value_norms"])
        assert np.median(values[:, 0] / values[:, 1:].mean(axis=1)) < 0.5  # a small value


# --- Appendix B --------------------------------------------------------------------------------------------------


def test_a_sink_that_is_attached_to_p_1_moves_with_it(learnable):
    """Positions 2.. share one embedding; queries of both kinds look along the key that p_1 alone has."""
    model, table = learnable.model, learnable.model.position_embedding
    qkv = model.blocks[0].attention.qkv.weight
    with torch.no_grad():
        model.embed.weight.zero_()
        table.zero_()
        table[0, 0], table[1:, 1] = 1, 1
        qkv.zero_()
        qkv[0, :2], qkv[16, 0] = 5, 5
    model.blocks = model.blocks[:1]
    before = table.detach().clone()
    rows = properties.edited_positions(learnable, n=3, length=32).set_index(["operation", "t"])
    assert torch.equal(table, before)
    assert rows.loc[("none", 1), "sink_1"] == 50  # one head of two
    assert rows.loc["replace"]["sink_1"].tolist() == [0] * 6
    assert rows.loc["swap"]["sink_1"].tolist()[:2] == [0, 0]
    assert rows.loc["swap"]["sink_t"].tolist() == [50] * 6
    paper = rows.loc[("swap", 5)]
    assert (rows.loc[("none", 1), "paper_1"], paper["paper_1"], paper["paper_t"]) == (62.28, 1.44, 57.63)


def test_editing_positions_needs_learned_ones_and_without_a_model_the_paper_stands_alone(plain, learnable):
    assert properties.has_positions(learnable) and not properties.has_positions(plain)
    with pytest.raises(ValueError, match="no learned position embeddings"):
        properties.edited_positions(plain, n=2, length=32)
    alone = properties.edited_positions()
    assert alone["paper_1"].notna().all() and alone[["sink_1", "sink_t"]].isna().all(axis=None)


def test_open_models_show_the_papers_values_and_what_was_measured(capsys):
    assert properties.open_lms("Table 1 left")["measured"].isna().all()
    reports = {kind: report_of(kind, "gpt2-xl") for kind in ("natural", "random")}
    for report in reports.values():  # one after the other: neither takes the other's place
        saved.save_measurement("openai-community/gpt2-xl", report)
    table = properties.open_lms("Table 1 left").set_index(["model", "input"])
    assert table.loc[("GPT2-XL", "natural"), "paper"] == 77.00
    assert table.loc[("GPT2-XL", "random"), "measured"] == round(reports["random"]["random"].sink(), 5)
    assert np.isnan(table.loc[("GPT2-XL", "repeat"), "measured"])
    assert set(properties.sizes({}).query("model == 'GPT2-XL'")["source"]) == {"paper", "measured"}
    with pytest.raises(ValueError, match="item must be one of Table 1 left"):
        properties.open_lms("Table 99")


def test_only_measurements_like_the_papers_are_kept(no_measurements):
    domain = report_of()
    assert saved.save_measurement("gpt2", domain, "pile:Github").name == "openai-community%2Fgpt2@Github.json"
    assert saved.measured_domains("GPT2").keys() == {"Github"}
    few, short = torch.randint(0, 300, (99, 64)), torch.randint(0, 300, (100, 32))
    for unlike in ({"ids": few}, {"ids": short}, {"epsilons": (0.2,)}, {"targets": (2,)}, {"bos": True}):
        with pytest.raises(ValueError, match="--save keeps measurements of 100 sequences at T = 64 without BOS"):
            saved.save_measurement("gpt2", report_of(**unlike))
    with pytest.raises(ValueError, match=r"on docstrings or pile:<domain>, not on path:mine"):
        saved.save_measurement("gpt2", domain, "path:mine")
    assert sorted(path.name for path in no_measurements.iterdir()) == ["openai-community%2Fgpt2@Github.json"]


def test_measurements_of_two_models_never_share_a_file_and_only_listed_ones_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-xl").mkdir()
    (tmp_path / "a" / "gpt2-xl").mkdir(parents=True)
    names = ["gpt2-xl", "a/gpt2-xl", "somebody/gpt2-xl", "openai-community/gpt2-xl", "EleutherAI/pythia-14m"]
    names += ["google/gemma-3-270m"]
    paths = [saved.save_measurement(name, report_of()) for name in names]
    assert len(set(paths)) == len(names)
    assert set(saved.measurements()) == {"GPT2-XL", "Pythia-14M"}  # Gemma is judged with its BOS, by data/open_lms
    assert saved.identity("gpt2-xl").startswith("local:gpt2-xl:")  # a folder, whatever it is called
    assert str(tmp_path) not in "".join(path.read_text() + path.name for path in paths)


def test_save_refuses_our_own_records(tmp_path, corpus, capsys, no_measurements):
    name = recorded(tmp_path / "run", tiny_64(), corpus)
    assert main(["measure", name, "--probe", "random", "-n", "2", "--save"]) == 2
    assert "--save is for open language models" in capsys.readouterr().err
    assert not no_measurements.exists()


@pytest.mark.parametrize(
    ("position", "length", "random", "repeat"),
    [
        (1, 5, ", x_fix first", ", x_fix first"),
        (2, 5, ", x_fix at position 2", ", x_fix first"),  # of repeated tokens all are x_fix
        (2, 1, "", ", x_fix first"),
    ],
)
def test_a_measurement_says_where_the_fixed_token_stands(position, length, random, repeat, tmp_path, corpus, capsys):
    name = recorded(tmp_path, tiny_64(), corpus, data=DataConfig(fixed_position=position))
    assert main(["measure", name, "--probe", "random", "repeat", "-n", "2", "-T", str(length), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    for kind, where in (("random", random), ("repeat", repeat)):
        assert reports[kind]["name"].endswith(f"{kind} input{where}")


def test_models_that_stand_in_for_a_preset_say_of_which_they_are(monkeypatch, tmp_path):
    def stand_in(name, device=None, **options):
        return Subject(name.split("/")[1], tiny_64(), None)

    record = SimpleNamespace(weights=tmp_path)
    monkeypatch.setattr(Runs, "get", lambda *_, **__: record)
    monkeypatch.setattr(properties, "subject", stand_in)
    assert all(one.name.endswith(" of laptop") for one in properties.subjects("smoke"))
    assert not any(" of " in one.name for one in properties.subjects("laptop"))


# --- downstream --------------------------------------------------------------------------------------------------


def test_scores_are_kept_and_stand_beside_the_sink(no_measurements):
    assert saved.saved_scores() == {}
    path = saved.save_scores("EleutherAI/pythia-14m", {"task": "hellaswag", "acc": 26.1, "acc_norm": 27.2})
    assert path == no_measurements / "hellaswag" / "EleutherAI%2Fpythia-14m.json"
    assert saved.saved_scores()["Pythia-14M"]["acc"] == 26.1
    assert saved.measurements() == {}  # scores are no measurements of attention
    saved.save_scores("gpt2-xl", {"task": "hellaswag", "acc": 40.0, "acc_norm": 50.9})
    sizes = properties.sizes({}).set_index("model")
    assert sizes.loc["GPT2-XL", "acc_norm"] == 50.9
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"EleutherAI%2Fpythia-14m\.json in data/measurements/hellaswag is not what"):
        saved.saved_scores()


def test_without_lm_eval_the_error_says_what_to_install(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[downstream\]'"):
        downstream.evaluate(plain.model, plain.tokenizer)


QUESTIONS = [
    {"query": "attention sink", "choices": ["token head", "query key value"], "gold": 0},
    {"query": "softmax", "choices": ["norm", "layer model train loss"], "gold": 1},
    {"query": "weight decay", "choices": ["window", "prefix mask"], "gold": 1},
    {"query": "bias", "choices": ["scale proxy score", "paper"], "gold": 0},
]


@pytest.fixture
def local_task(tmp_path):
    """A multiple-choice task of four questions on this disk."""
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = {
        "task": "tiny_questions",
        "dataset_path": "json",
        "output_type": "multiple_choice",
        "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        **{f"doc_to_{what}": key for what, key in (("text", "query"), ("target", "gold"), ("choice", "choices"))},
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    return tmp_path


def by_hand(model, tokenizer):
    """acc and acc_norm from log-likelihoods of whole sequences, one at a time."""
    plain, normed = [], []
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:
            context, whole = (
                tokenizer.encode(text, add_special_tokens=False)
                for text in (question["query"], f"{question['query']} {choice}")
            )
            context, whole = (getattr(ids, "ids", ids) for ids in (context, whole))
            with torch.no_grad():
                output = model(torch.tensor([whole]))
            log_p = getattr(output, "logits", output)[0].log_softmax(dim=-1)
            scores.append(sum(float(log_p[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        lengths = [len(choice) for choice in question["choices"]]
        plain.append(int(np.argmax(scores)) == question["gold"])
        normed.append(int(np.argmax(np.divide(scores, lengths))) == question["gold"])
    return 100 * float(np.mean(plain)), 100 * float(np.mean(normed))


def scored(own, corpus):
    """A model that reads 64 tokens, and its tokenizer."""
    if own:
        return tiny_64().eval(), corpus.tokenizer
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    return model.eval(), tf.PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, eos_token="<eos>")


@pytest.mark.parametrize("own", [True, False])
def test_log_likelihoods_of_a_batch_are_those_of_each_text_alone(own, corpus, monkeypatch):
    model, tokenizer = scored(own, corpus)
    interface = ModuleType("lm_eval.api.model")
    interface.TemplateLM = type("TemplateLM", (), {})
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, interface)
    scorer = downstream._scorer_class.__wrapped__()(model, tokenizer, [1])
    short, long = scorer.tok_encode("attention sink"), [7] * 70
    assert short[0] == 1 and scorer.eot_token_id == corpus.tokenizer.token_to_id("<eos>")
    asked = [("", context, [5] * n) for context, lengths in ((short, (1, 4)), (long, (3, 66, 2))) for n in lengths]
    with torch.no_grad():
        output = model(torch.tensor([short]))
    likely = int(getattr(output, "logits", output)[0, -1].argmax())
    asked += [("", short, [likely])]
    answers = scorer._loglikelihood_tokens(asked)
    for (_, context, choice), (found, greedy) in zip(asked, answers, strict=True):
        whole = torch.tensor([context + choice])[:, -65:]
        with torch.no_grad():
            output = model(whole[:, :-1])
        log_p = getattr(output, "logits", output)[0].log_softmax(dim=-1)[-len(choice) :]
        targets = whole[0, 1:][-len(choice) :]
        expected = float(log_p[range(len(targets)), targets].sum())
        assert found == pytest.approx(expected, abs=1e-4) and greedy == bool((log_p.argmax(-1) == targets).all())
    assert [greedy for _, greedy in answers][-1]


@pytest.mark.parametrize("own", [True, False])
def test_scores_on_a_local_task_are_those_computed_by_hand(own, local_task, corpus, monkeypatch):
    pytest.importorskip("lm_eval", reason="the optional extra `downstream` is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = scored(own, corpus)
    scores = downstream.evaluate(model, tokenizer, "tiny_questions", include_path=local_task)
    assert scores["questions"] == 4
    assert (scores["acc"], scores["acc_norm"]) == by_hand(model, tokenizer)
    with pytest.raises(ValueError, match="task must be one that lm-eval knows"):
        downstream.evaluate(model, tokenizer, "no such task", include_path=local_task)
