"""What notebook 01 shows: conditions of the inputs, the tables, the explorer, kept measurements and scores."""

import json
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from sinkutils import paths
from sinkutils.__main__ import main
from sinkutils.data.corpus import Corpus
from sinkutils.data.packing import DataConfig
from sinkutils.measuring import saved
from sinkutils.measuring import scores as downstream
from sinkutils.measuring.measure import measure
from sinkutils.measuring.own import BOS, TEXT, X_FIX, Subject, subject
from sinkutils.measuring.report import uniform_alpha
from sinkutils.model.decoder import LMConfig, TransformerLM
from sinkutils.showing import figures, properties
from sinkutils.study.config import RunConfig, TrainConfig
from sinkutils.study.record import write_record
from sinkutils.study.store import Runs

matplotlib.use("agg")


def tiny_model(**options) -> TransformerLM:
    config = LMConfig(vocab_size=300, context_length=32, num_layers=3, num_heads=2, hidden_size=16,
                      intermediate_size=32, **options)  # fmt: skip
    return TransformerLM(config, 0).eval()


@pytest.fixture
def plain(corpus: Corpus) -> Subject:
    return Subject("plain", tiny_model(), corpus.tokenizer, corpus=corpus)


@pytest.fixture
def fixed(corpus: Corpus) -> Subject:
    return Subject("fixed", tiny_model(position="nope"), corpus.tokenizer, 1, corpus)


@pytest.fixture
def learnable(corpus: Corpus) -> Subject:
    return Subject("learnable", tiny_model(position="learnable"), corpus.tokenizer, corpus=corpus)


@pytest.fixture(autouse=True)
def no_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data/measurements, and no figure left open."""
    folder = tmp_path / "measurements"
    monkeypatch.setattr(saved, "MEASUREMENTS", folder)
    yield folder
    plt.close("all")


# --- inputs ------------------------------------------------------------------------------------------------------


def test_a_model_trained_with_a_fixed_token_gets_it_where_training_put_it(fixed: Subject, corpus: Corpus) -> None:
    assert fixed.firsts == (X_FIX, TEXT, BOS)
    for kind in ("natural", "random"):
        ids, without = (fixed.inputs(kind, 5, 16, first=first) for first in (None, TEXT))
        assert (ids[:, 0] == corpus.fix_id).all()
        assert torch.equal(ids[:, 1:], without[:, 1:])
        assert (without != corpus.fix_id).all()
    assert fixed.inputs("repeat", 5, 16).tolist() == [[corpus.fix_id] * 16]


def test_the_condition_of_the_first_token_is_explicit(plain: Subject, corpus: Corpus) -> None:
    assert plain.firsts == (TEXT, BOS)
    assert (plain.inputs("random", 3, 8, first=BOS)[:, 0] == corpus.bos_id).all()
    with pytest.raises(ValueError, match=r"first must be one of text, BOS for plain, got 'x_fix'"):
        plain.inputs("natural", 3, 8, first=X_FIX)


def test_a_record_tells_where_training_fixed_a_token(tmp_path: Path, corpus: Corpus) -> None:
    for position in (None, 2):
        run = RunConfig("tiny", "test", model=tiny_model().config, data=DataConfig(fixed_position=position),
                        train=TrainConfig(eval_length=32))  # fmt: skip
        folder = tmp_path / str(position)
        metrics = {"status": "done", "reason": None, "curve": [], "final": {}}
        write_record(folder, run, metrics, {}, dict(tiny_model().state_dict()), corpus.tokenizer)
        one = subject(str(folder))
        assert (one.name, one.fixed_position, one.context, one.length) == ("tiny", position, 32, 32)


def test_without_weights_a_line_names_the_models_and_an_untrained_one_stands_in(
    tmp_path: Path, monkeypatch, capsys, corpus: Corpus
) -> None:
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    monkeypatch.setattr(properties, "load_corpus", lambda name, vocab_size: corpus)
    (one,) = properties.subjects("gpu")
    assert capsys.readouterr().out == (
        "not recorded yet: fixed_1, learnable, k_bias, sigmoid "
        "(python -m sinkutils train NAME --preset laptop --seed 0 --keep-weights)\n"
    )
    assert (one.name, one.firsts[0], one.length) == ("untrained fixed_1", X_FIX, 64)
    with pytest.raises(ValueError, match="recompute must be 'never' or 'missing'"):
        properties.subjects("laptop", recompute="always")


# --- Section 3 ---------------------------------------------------------------------------------------------------


def test_by_input_agrees_with_measure_under_each_condition(plain: Subject, fixed: Subject) -> None:
    table = properties.by_input([plain, fixed], n=6, length=16)
    assert list(zip(table["model"], table["first"], strict=True)) == [
        ("plain", TEXT), ("plain", BOS), ("fixed", X_FIX), ("fixed", TEXT), ("fixed", BOS)]  # fmt: skip
    expected = measure(fixed.model, fixed.inputs("random", 6, 16)).sink()
    assert table.loc[2, "random"] == expected
    # Proposition 1: without positions repeated tokens get 1/t, so alpha_1 = H_16 / 16 = 0.21 in every head.
    assert uniform_alpha(16) < 0.3
    assert table.loc[2, "repeat"] == 0


def test_uniform_attention_passes_a_threshold_only_below_the_floor(fixed: Subject) -> None:
    with torch.no_grad():
        for block in fixed.model.blocks:
            block.attention.qkv.weight.zero_()
    table = properties.by_length(fixed, (8, 16), (0.2, 0.3, 0.4), n=3)
    assert table["uniform"].round(4).tolist() == [round(uniform_alpha(8), 4), round(uniform_alpha(16), 4)]
    assert table[[0.2, 0.3, 0.4]].to_numpy().tolist() == [[100, 100, 0], [100, 0, 0]]


def test_the_strongest_heads_are_those_with_the_largest_alpha(plain: Subject) -> None:
    report = plain.measure(plain.inputs("random", 4, 16))
    alpha = report.alpha[:, 0].mean(dim=0)
    strongest = properties.strongest_heads(report)
    assert [layer for layer, _ in strongest] == [0, 1, 2]
    assert all(alpha[layer, head] == alpha[layer].max() for layer, head in strongest)
    most, least = properties.extreme_heads(report)
    assert alpha[most] == alpha.max() and alpha[least] == alpha.min()
    assert [layer for layer, _ in properties.strongest_heads(report, 2)] == [0, 2]


def test_domains_count_the_texts_that_are_long_enough(plain: Subject) -> None:
    texts = {"long": ["sink token " * 40] * 3, "mixed": ["sink", "attention head " * 40]}
    table = properties.by_domain([plain], texts, (0.2, 0.3), n=2, length=16)
    assert table.groupby("domain")["texts"].first().to_dict() == {"long": 2, "mixed": 1}
    assert len(table) == 4
    with pytest.raises(ValueError, match="none of at least 16 tokens in the domain 'short'"):
        properties.by_domain([plain], {"short": ["sink"]}, length=16)


def test_revisions_give_a_curve_in_the_order_of_their_steps(plain: Subject, monkeypatch) -> None:
    monkeypatch.setattr(properties, "subject", lambda name, device, revision: plain)
    table = properties.by_revision("any", ("step1000", "step0", "step16"), n=2, length=8)
    assert table["step"].tolist() == [0, 16, 1000]
    with pytest.raises(ValueError, match="revisions must have their step"):
        properties.by_revision("any", ("main",), n=2, length=8)


# --- Appendix B --------------------------------------------------------------------------------------------------


def test_a_sink_that_is_attached_to_p_1_moves_with_it(learnable: Subject) -> None:
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


def test_editing_positions_needs_learned_ones(plain: Subject, learnable: Subject) -> None:
    assert properties.has_positions(learnable) and not properties.has_positions(plain)
    with pytest.raises(ValueError, match="no learned position embeddings"):
        properties.edited_positions(plain, n=2, length=32)


def test_open_models_show_the_papers_values_and_what_was_measured(plain: Subject, capsys) -> None:
    assert properties.open_lms("Table 1 left")["measured"].isna().all()
    reports = {kind: measure(tiny_wide(), torch.randint(0, 300, (2, 64)), name=f"gpt2-xl, {kind} input", bos=False)
               for kind in ("natural", "random")}  # fmt: skip
    saved.save_measurement("openai-community/gpt2-xl", reports)
    table = properties.open_lms("Table 1 left").set_index(["model", "input"])
    assert table.loc[("GPT2-XL", "natural"), "paper"] == 77.00
    assert table.loc[("GPT2-XL", "random"), "measured"] == round(reports["random"].sink(), 5)
    assert np.isnan(table.loc[("GPT2-XL", "repeat"), "measured"])
    sizes = properties.model_sizes([plain_wide(plain)], n=5)
    assert set(sizes.query("model == 'GPT2-XL'")["source"]) == {"paper", "measured"}
    assert sizes.loc[0, "family"] == "ours" and sizes["acc"].isna().all()
    with pytest.raises(ValueError, match="item must be one of Table 1 left"):
        properties.open_lms("Table 99")


def tiny_wide() -> TransformerLM:
    config = LMConfig(
        vocab_size=300, context_length=64, num_layers=1, num_heads=2, hidden_size=16, intermediate_size=32
    )
    return TransformerLM(config, 0).eval()


def plain_wide(plain: Subject) -> Subject:
    return Subject("plain", tiny_wide(), plain.tokenizer, corpus=plain.corpus)


def test_only_measurements_like_the_papers_are_kept(no_measurements: Path, capsys, tmp_path: Path) -> None:
    ids = torch.randint(0, 300, (2, 64))
    domain = {"natural": measure(tiny_wide(), ids, name="gpt2, natural input", bos=False)}
    assert saved.save_measurement("gpt2", domain, "pile:Github").name == "openai-community%2Fgpt2@Github.json"
    assert saved.measured_domains("GPT2").keys() == {"Github"}
    for other in (measure(tiny_wide(), ids[:, :32]), measure(tiny_wide(), ids, epsilons=(0.2,)),
                  measure(tiny_wide(), ids, (2,)), measure(tiny_wide(), ids, bos=True)):  # fmt: skip
        with pytest.raises(ValueError, match="--save keeps measurements at T = 64 without BOS"):
            saved.save_measurement("gpt2", {"natural": other})
    assert sorted(path.name for path in no_measurements.iterdir()) == ["openai-community%2Fgpt2@Github.json"]


def test_measurements_of_two_models_never_share_a_file_and_only_listed_ones_count(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-xl").mkdir()
    (tmp_path / "a" / "gpt2-xl").mkdir(parents=True)
    report = {"natural": measure(tiny_wide(), torch.randint(0, 300, (2, 64)), bos=False)}
    names = ("gpt2-xl", "a/gpt2-xl", "somebody/gpt2-xl", "openai-community/gpt2-xl", "EleutherAI/pythia-14m", "smollm2")
    paths = [saved.save_measurement(name, report) for name in names]
    assert len(set(paths)) == len(names)
    assert set(saved.measurements()) == {"GPT2-XL", "Pythia-14M", "smollm2"}
    assert saved.identity("gpt2-xl").startswith("local:gpt2-xl:")  # a folder, whatever it is called
    assert str(tmp_path) not in "".join(path.read_text() + path.name for path in paths)


def test_save_refuses_our_own_records(tmp_path: Path, corpus: Corpus, capsys, no_measurements: Path) -> None:
    run = RunConfig("tiny", "test", model=tiny_wide().config)
    metrics = {"status": "done", "reason": None, "curve": [], "final": {}}
    write_record(tmp_path / "run", run, metrics, {}, dict(tiny_wide().state_dict()), corpus.tokenizer)
    assert main(["measure", str(tmp_path / "run"), "--probe", "random", "-n", "2", "--save"]) == 2
    assert "--save is for open language models" in capsys.readouterr().err
    assert not no_measurements.exists()


# --- figures ------------------------------------------------------------------------------------


def test_every_figure_of_the_notebook_draws(plain: Subject, fixed: Subject) -> None:
    ids = plain.inputs("random", 3, 16)
    report = plain.measure(ids, heads=[(0, 1), (2, 0)])
    figure = figures.qk_maps({f"{pair}": kept for pair, kept in report.kept.items()}, "title", ("cosine", "map"))
    assert [axis.get_title() for axis in figure.axes[:2]] == ["(0, 1)", "(2, 0)"]
    shown = np.asarray(figure.axes[0].images[0].get_array().filled(np.nan))
    expected = report.kept[0, 1].cosine.mean(dim=0).numpy()
    below = np.tril_indices(16)
    np.testing.assert_allclose(shown[below], expected[below], rtol=1e-4, atol=1e-6)
    assert np.isnan(shown[np.triu_indices(16, 1)]).all()
    assert len(figures.alpha_heatmaps({"a": report.alpha[0, 0], "b": report.alpha[1, 0]}).axes) == 3
    figures.sink_by_length(properties.by_length(fixed, (8, 16), n=2))
    table = pd.DataFrame({"model": "a", "domain": ["x", "y"] * 2, "eps": [0.2, 0.2, 0.3, 0.3], "sink_1": [1, 2, 3, 4]})
    assert len(figures.sink_by_domain(table).axes) == 2
    sizes = pd.DataFrame({"family": ["Pythia"] * 3, "parameters": [1e7, 1e8, 1e9], "sink_1": [1.0, 2.0, 3.0],
                          "source": ["measured", "measured", "paper"], "acc": [25.0, 30.0, np.nan]})  # fmt: skip
    figure = figures.by_size(sizes, {"sink_1": "sink", "acc": "acc"})
    assert figure.axes[1].lines[1].get_ydata().tolist() == [25, 30]


def test_models_that_stand_in_for_a_preset_say_of_which_they_are(monkeypatch, tmp_path: Path) -> None:
    def stand_in(name: str, device=None, **options) -> Subject:
        return Subject(name.split("/")[1], tiny_wide(), None)

    record = SimpleNamespace(weights=tmp_path)
    monkeypatch.setattr(Runs, "get", lambda *_, **__: record)
    monkeypatch.setattr(properties, "subject", stand_in)
    assert all(one.name.endswith(" of laptop") for one in properties.subjects("smoke"))
    assert not any(" of " in one.name for one in properties.subjects("laptop"))


# --- downstream --------------------------------------------------------------------------------------------------


def test_scores_are_kept_and_stand_beside_the_sink(no_measurements: Path) -> None:
    assert saved.saved_scores() == {}
    path = saved.save_scores("EleutherAI/pythia-14m", {"task": "hellaswag", "acc": 26.1, "acc_norm": 27.2})
    assert path == no_measurements / "hellaswag" / "EleutherAI%2Fpythia-14m.json"
    assert saved.saved_scores()["Pythia-14M"]["acc"] == 26.1
    assert saved.measurements() == {}  # scores are no measurements of attention
    saved.save_scores("gpt2-xl", {"task": "hellaswag", "acc": 40.0, "acc_norm": 50.9})
    sizes = properties.model_sizes().set_index("model")
    assert sizes.loc["GPT2-XL", "acc_norm"] == 50.9
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"EleutherAI%2Fpythia-14m\.json in data/measurements/hellaswag is not what"):
        saved.saved_scores()


def test_without_lm_eval_the_error_says_what_to_install(plain: Subject, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[downstream\]'"):
        downstream.evaluate(plain.model, plain.tokenizer)


QUESTIONS = [
    {"query": "attention sink", "choices": ["token head", "query key value"], "gold": 0},
    {"query": "softmax", "choices": ["norm", "layer model train loss"], "gold": 1},
    {"query": "weight decay", "choices": ["window", "prefix mask"], "gold": 1},
    {"query": "bias", "choices": ["scale proxy score", "paper"], "gold": 0},
]


@pytest.fixture
def local_task(tmp_path: Path) -> Path:
    """A multiple-choice task of four questions on this disk."""
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "tiny.yaml").write_text(json.dumps({
        "task": "tiny_questions", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "doc_to_text": "query", "doc_to_target": "gold", "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}))  # fmt: skip
    return tmp_path


def by_hand(model, tokenizer) -> tuple[float, float]:
    """acc and acc_norm from log-likelihoods of whole sequences, one at a time."""
    plain, normed = [], []
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:
            context, whole = (tokenizer.encode(text, add_special_tokens=False)
                              for text in (question["query"], f"{question['query']} {choice}"))  # fmt: skip
            context, whole = (getattr(ids, "ids", ids) for ids in (context, whole))
            with torch.no_grad():
                output = model(torch.tensor([whole]))
            log_p = getattr(output, "logits", output)[0].log_softmax(dim=-1)
            scores.append(sum(float(log_p[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        lengths = [len(choice) for choice in question["choices"]]
        plain.append(int(np.argmax(scores)) == question["gold"])
        normed.append(int(np.argmax(np.divide(scores, lengths))) == question["gold"])
    return 100 * float(np.mean(plain)), 100 * float(np.mean(normed))


@pytest.mark.parametrize("own", [True, False])
def test_scores_on_a_local_task_are_those_computed_by_hand(
    own: bool, local_task: Path, corpus: Corpus, monkeypatch
) -> None:
    pytest.importorskip("lm_eval", reason="the optional extra `downstream` is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if own:
        model, tokenizer = tiny_wide(), corpus.tokenizer
    else:
        import transformers as tf

        torch.manual_seed(0)
        model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=64))
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, eos_token="<eos>")
    scores = downstream.evaluate(model.eval(), tokenizer, "tiny_questions", include_path=local_task)
    assert scores["questions"] == 4
    assert (scores["acc"], scores["acc_norm"]) == by_hand(model, tokenizer)
    with pytest.raises(ValueError, match="task must be one that lm-eval knows"):
        downstream.evaluate(model, tokenizer, "no such task", include_path=local_task)
