"""What people with a model of their own use: the callback for a trainer, two models compared, docs/measuring.md."""

import json
import logging
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from helpers import refuses, word_tokenizer
from scipy import stats
from small_models import build

import sinkutils as su
from sinkutils.measuring.report import excess, uniform_alpha
from sinkutils.paths import OPEN_LMS, PAPER, ROOT

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(0))
PAGES = ("README.md", "docs/measuring.md", "docs/all_on_the_first_token.md", "docs/engines.md")
README, *DOCS = ((ROOT / name).read_text(encoding="utf-8") for name in PAGES)
SIZES = {"hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}


def small() -> tf.LlamaForCausalLM:
    """With dropout, so that a callback that leaves another mode or other random numbers changes the weights."""
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=64, attention_dropout=0.1, **SIZES))


def trained(tmp_path, *callbacks, steps=4):
    """The log of a short training, and the weights that it ends with."""
    model = small()
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 51).view(4, 12)]
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    quiet |= {"save_strategy": "no", "logging_steps": 1}
    sizes = {"max_steps": steps, "per_device_train_batch_size": 2, "seed": 0}
    options = tf.TrainingArguments(str(tmp_path), **sizes, **quiet)
    trainer = tf.Trainer(model, options, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    return trainer.state.log_history, model.state_dict()


def test_the_callback_logs_the_sink_and_leaves_the_training_as_it_was(tmp_path):
    plain, weights = trained(tmp_path)
    watched, same = trained(tmp_path, su.SinkCallback(IDS, every=3))
    measured = [row for row in watched if "sink/sink_1" in row]
    assert [row["step"] for row in measured] == [0, 3, 4]  # at both ends, too
    names = {"sink/block_1", "sink/later_blocks", "sink/element", "sink/value_ratio"}
    assert names <= set(measured[0])
    losses = [[row["loss"] for row in log if "loss" in row] for log in (plain, watched)]
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[name], same[name]) for name in weights)


class StopAfterEvaluation(tf.TrainerCallback):
    """Stops as EarlyStoppingCallback does: in `on_evaluate`, after the step's own event."""

    def on_evaluate(self, args, state, control, **others):
        control.should_training_stop = state.global_step >= 2


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("best", [False, True])
def test_a_training_that_is_stopped_early_has_its_last_row(tmp_path, strategy, best):
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(3, 51).view(4, 12)]
    options = tf.TrainingArguments(
        str(tmp_path), max_steps=9, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy=strategy, eval_steps=1, save_strategy=strategy,
        save_steps=1, load_best_model_at_end=best, learning_rate=1e-2,
    )  # fmt: skip
    model = small()
    callback = su.SinkCallback(IDS, every=500)
    trainer = tf.Trainer(
        model, options, train_dataset=rows, eval_dataset=rows,
        callbacks=[callback, StopAfterEvaluation()],
    )  # fmt: skip
    trainer.train()
    measured = [row for row in trainer.state.log_history if "sink/sink_1" in row]
    assert [row["step"] for row in measured][:2] == [0, 2] and trainer.state.global_step == 2
    left = su.measure(model, IDS, entropy=True).summary()
    assert measured[-1]["sink/entropy"] == pytest.approx(left["entropy"], rel=1e-6)


def test_entropy_the_sinks_logit_and_kinds_of_layers_are_logged():
    numbers = su.measure(build("gpt_oss"), IDS, entropy=True).summary()
    assert {"entropy", "star", "sink_logit", "excess_full", "excess_window"} <= {*numbers}
    model = build("gpt_oss")
    sinks = [block.self_attn.sinks.mean().item() for block in model.model.layers]
    assert numbers["sink_logit"] == pytest.approx(np.mean(sinks), rel=1e-5)
    hybrid = su.measure(build("bamba"), IDS).summary()
    assert {"element_full", "element_linear", "excess_full"} <= {*hybrid}
    assert "excess_full" not in su.measure(build("llama"), IDS).summary()


def test_what_cannot_be_measured_is_said_and_the_training_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sinkutils"):
        log, _ = trained(tmp_path, su.SinkCallback(IDS + 1000, every=2))
    assert caplog.text.count("the sink was not measured at step 0: ids must be in") == 1
    assert len(caplog.records) == 1
    assert len([row for row in log if "loss" in row]) == 4
    assert not any("sink/sink_1" in row for row in log)
    refuses(r"shape \(samples, T\)", su.SinkCallback, IDS[0])
    refuses("su.measure has no option target", su.SinkCallback, IDS, target=(1,))


def test_a_comparison_is_paired_over_the_texts():
    first, second = (su.measure(build(name), IDS, targets=(1, 2)) for name in ("llama", "qwen2"))
    # (samples, layers)
    difference = (second.alpha - first.alpha)[:, 0].double().mean(dim=-1).numpy()
    table = su.compare(first, second)
    assert table["mean"].to_numpy() == pytest.approx(difference.mean(axis=0))
    for block, row in enumerate(table.itertuples()):
        low, high = stats.ttest_1samp(difference[:, block], 0).confidence_interval()
        assert (row.low, row.high) == pytest.approx((low, high)) and row.n == len(IDS)
    assert su.compare(first, second, by="model")["mean"].item() == pytest.approx(difference.mean())
    assert su.compare(first, second, k=2, by="head").shape[0] == np.prod(first.alpha.shape[2:])


def test_a_comparison_names_the_blocks_where_attention_is():
    report = su.measure(build("llama"), IDS)
    hybrid = replace(report, layers=(2, 5))  # the other blocks have no attention
    assert su.compare(hybrid, hybrid).index.tolist() == [3, 6]
    assert su.compare(hybrid, hybrid, by="head").index.unique("block").tolist() == [3, 6]
    refuses("attention in different blocks", su.compare, report, hybrid)
    assert len(su.compare(report, hybrid, by="model")) == 1


def test_reports_that_are_not_of_the_same_texts_are_not_compared():
    model = build("llama")
    report = su.measure(model, IDS)
    refuses("12 tokens and", su.compare, report, su.measure(model, IDS[:, :10]))
    with pytest.warns(UserWarning, match="different token ids: nothing is paired"):
        table = su.compare(report, su.measure(model, IDS.flip(1)), by="model")
    alphas = [su.measure(model, ids).alpha.double() for ids in (IDS, IDS.flip(1))]
    before, after = (alpha.mean(dim=(1, 2, 3)) for alpha in alphas)
    low, high = stats.ttest_ind(after, before, equal_var=False).confidence_interval()
    assert (table.low.item(), table.high.item()) == pytest.approx((low, high))
    refuses("first must be of type Report, got LlamaForCausalLM", su.compare, model, model)
    refuses("alpha_3 was not measured", su.compare, report, report, k=3)


def test_the_numbers_to_compare_with_are_those_of_the_records_and_of_the_paper():
    curves = su.curves("laptop").query("experiment == 'fixed_1'").groupby("step")
    ours = curves[["sink_1", "excess_1"]].mean()
    before, after = ours.iloc[0], ours.iloc[-1]
    paper = pd.read_csv(PAPER / "open_lms.csv").query("item == 'Table 1 left'")
    paper = paper[paper.input == "natural"].set_index("model").sink_1
    small = pd.read_csv(PAPER / "pretraining.csv").query("experiment == 'base'").sink_1.iloc[0]
    rows = [
        f"| our baseline before its first step | {before.sink_1:.0f} % | {before.excess_1:.2f} |",
        f"| the paper's model of 60M parameters | {small:.0f} % | |",
        f"one fixed token first | {after.sink_1:.0f} % | {after.excess_1:.2f} |",
        f"| GPT2-XL, by the paper | {paper['GPT2-XL']:.0f} % | |",
        f"| LLaMA3-8B, by the paper | {paper['LLaMA3-8B Base']:.0f} % | |",
    ]
    for name, start, words in (
        ("smollm2", "text", "SmolLM2"),
        ("gemma-3-270m", "BOS", "Gemma 3 270M, behind its BOS"),
    ):
        stored = json.loads((OPEN_LMS / f"{name}.json").read_text())
        report = stored["probes"]["natural"][start]
        extra = excess(np.mean(report["alpha"][0]), uniform_alpha(report["T"]))
        rows.append(f"| {words} | {report['sink']['1']['0.3']:.0f} % | {extra:.2f} |")
    assert [row for row in rows if row not in DOCS[0]] == []


@pytest.mark.slow
def test_each_example_of_readme_and_of_the_page_on_measuring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = word_tokenizer(60, ("<s>", "<pad>"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = tf.LlamaConfig(vocab_size=len(tokenizer), **SIZES)
    known = {"su": su, "pd": pd, "torch": torch, "tokenizer": tokenizer}
    known["model"] = tf.LlamaForCausalLM(config)
    load = su.load_lm
    for step in (500, 1000, 1500):
        for part in ("model", "tokenizer"):
            known[part].save_pretrained(f"run/checkpoint-{step}")
    stand_ins = dict.fromkeys(("smollm2", "gemma-3-270m"), (known["model"], tokenizer))
    monkeypatch.setattr(
        su, "load_lm", lambda name, device=None: stand_ins.get(name) or load(name, device)
    )
    for code in re.findall(r"```python\n(.*?)```", README + "".join(DOCS), flags=re.DOTALL):
        exec(code, known)
    assert known["table"].index.tolist() == [500, 1000, 1500]
    assert known["table"].later_blocks.nunique() == 1
