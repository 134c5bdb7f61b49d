"""Records: written whole or not at all, every damaged byte is noticed and named, and tidy frames of them."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import DONE, END, made_up, refuses

import sinkutils as su
from sinkutils import config, paths
from sinkutils.measuring.load import ModelUnavailable, load_lm
from sinkutils.study import record as records_module
from sinkutils.study.record import (
    CorruptRecord,
    RunLocked,
    config_dict,
    config_hash,
    partial_folder,
    read_record,
    record_folder,
    run_lock,
    write_record,
)
from sinkutils.study.store import Runs, is_of

FILES = ("config.json", "metrics.json", "provenance.json", "model.safetensors", "tokenizer.json", "SHA256SUMS")


@pytest.fixture
def folder(tiny, corpus, tmp_path):
    target = record_folder("test", "tiny", 0, tmp_path)
    metrics = DONE | {"final": END | {"sink_1": 1.5}}
    write_record(target, tiny, metrics, {}, {"w": torch.ones(3)}, corpus.tokenizer, corpus.identity)
    return target


def test_a_record_reads_back_as_written_also_where_it_was_copied_to(folder, tiny, corpus, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere" / "0")
    for place in (folder, tmp_path / "elsewhere" / "0"):
        record = read_record(place)
        assert record.config == config_dict(tiny) | {"corpus": {"name": "docstrings", "sha256": corpus.fingerprint}}
        assert record.metrics["final"] == END | {"sink_1": 1.5} and record.weights == place / "model.safetensors"
        assert {path.name for path in place.iterdir()} == set(FILES)


@pytest.mark.parametrize("file", [file for file in FILES if file != "model.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_damage_to_any_file_is_noticed_and_the_file_is_named(folder, tiny, tmp_path, file, damage):
    """Every flipped byte and every cut: end_to_end/test_reliability.py."""
    path = folder / file
    path.write_bytes(path.read_bytes()[:-3])
    if damage == "deleted":
        path.unlink()
    refuses(f"record test/tiny/0: {file} is", read_record, folder, kind=CorruptRecord)
    with pytest.warns(UserWarning, match="counts as missing"):
        assert Runs(tmp_path).get(tiny) is None


def test_a_full_disk_leaves_the_old_record_and_no_rubbish_and_a_new_one_replaces_it_whole(folder, tiny, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=full))
        with pytest.raises(OSError, match=r"could not save record test/tiny/0 \(No space .*: free some space"):
            write_record(folder, tiny, DONE, {})
    assert read_record(folder).metrics["final"] == END | {"sink_1": 1.5}
    replaced = write_record(folder, tiny, DONE | {"status": "failed", "reason": "x"}, {})
    assert replaced.status == "failed" and replaced.weights is None
    assert [path.name for path in folder.parent.iterdir()] == ["0"]


def die_before_step(step: int, what) -> bool:
    """Call `what` in a child process that dies, in the middle of a file or before a rename, at its `step`-th write.

    Returns whether `what` came to its end before.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps = itertools.count(1)

    def write_half(path, data, whole=records_module.write_synced):
        if next(steps) == step:
            path.write_bytes(data[: len(data) // 2])
            os._exit(9)
        whole(path, data)

    def rename(source, target, really=os.replace):
        if next(steps) == step:
            os._exit(9)
        really(source, target)

    records_module.write_synced, os.replace = write_half, rename
    try:
        what()
    finally:  # whatever happens, the child must not go on as a second pytest
        os._exit(0 if sys.exc_info()[0] is None else 1)


def test_a_death_at_any_step_of_writing_leaves_a_whole_record_or_none_and_the_next_run_cleans_up(tiny, tmp_path):
    target, left = record_folder("test", "tiny", 0, tmp_path), []
    old, new = DONE | {"status": "failed", "reason": "old"}, DONE
    for step in range(1, 7):  # four files, the rename, and none
        write_record(target, tiny, old, {})
        ended = die_before_step(step, lambda: write_record(target, tiny, new, {}))
        left.append(read_record(target).metrics if target.exists() else "nothing")
    assert ended and left == [old] * 4 + ["nothing", new]  # before the rename the new one is whole under another name
    assert [path.name for path in target.parent.iterdir()] == ["0"]


def test_a_run_is_held_by_one_process_at_a_time_and_what_it_left_unfinished_goes_with_its_record(tiny, tmp_path):
    target = record_folder("test", "tiny", 0, tmp_path)
    with run_lock(target), pytest.raises(RunLocked, match="test/tiny/0 is being trained by another"), run_lock(target):
        pass
    assert partial_folder(target).exists()
    with run_lock(target):
        write_record(target, tiny, DONE, {})
    assert not partial_folder(target).exists()


def test_a_record_is_of_its_own_text_and_another_text_stands_apart(folder, tiny, corpus, tmp_path):
    runs, own = tmp_path, corpus.identity
    other, same_name = ({"name": name, "sha256": "0" * 64} for name in ("path:novels", "docstrings"))
    assert Runs(runs).get(tiny) == Runs(runs).get(tiny, own) is not None
    assert Runs(runs).get(tiny, other) is None and Runs(runs).get(tiny, same_name) is None
    assert Runs(runs).place(tiny) == Runs(runs).place(tiny, own) == folder
    assert Runs(runs).place(tiny, other) == record_folder("test@path-novels-00000000", "tiny", 0, runs)
    assert Runs(runs).place(tiny, same_name) == record_folder("test@docstrings-00000000", "tiny", 0, runs)
    assert Runs(runs / "empty").place(tiny, same_name) == record_folder("test", "tiny", 0, runs / "empty")


def test_numbers_are_kept_to_five_digits_and_a_record_holds_nothing_else(tiny, tmp_path):
    metrics = DONE | {"final": END | {"valid_loss": 1 / 3, "by_block": [(2 / 3, 12345678.0)], "step": 1234567}}
    final = write_record(record_folder("test", "tiny", 0, tmp_path), tiny, metrics, {}).metrics["final"]
    assert (final["valid_loss"], final["by_block"], final["step"]) == (0.33333, [[0.66667, 12346000.0]], 1234567)


def test_a_corrupt_record_is_one_row_that_says_so_and_is_seen_when_it_is_mended(tmp_path):
    for seed in (0, 1):
        made_up(tmp_path, "k_bias", seed)
    assert [entry.status for entry in Runs(tmp_path).entries("smoke")] == ["done", "done"]
    path = record_folder("smoke", "k_bias", 1, tmp_path) / "metrics.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.warns(UserWarning, match=r"record smoke/k_bias/1: metrics\.json is .*delete the folder and train"):
        entries = list(Runs(tmp_path).entries("smoke"))
    assert [entry.status for entry in entries] == ["done", "corrupt"] and "metrics.json" in entries[1].reason
    refuses("smoke/k_bias/1", load_lm, path.parent, "cpu", kind=ModelUnavailable)
    path.write_bytes(whole)
    assert [entry.status for entry in Runs(tmp_path).entries("smoke")] == ["done", "done"]


def test_changed_weights_are_noticed_when_they_are_loaded_and_may_be_deleted_to_save_space(folder, tiny, tmp_path):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"....")
    record = Runs(tmp_path).get(tiny)  # the numbers beside them are whole
    with pytest.raises(CorruptRecord, match=r"record test/tiny/0: model\.safetensors is missing, truncated or changed"):
        record.load_weights()
    refuses(r"model\.safetensors is missing, truncated", load_lm, folder, "cpu", kind=ModelUnavailable)
    path.unlink()
    assert Runs(tmp_path).get(tiny).weights is None


def test_every_committed_record_is_whole_and_of_its_experiment():
    for preset, count in (("laptop", 574), ("minute", 135), ("desk", 4), ("gpu", 4)):
        statuses = [entry.status for entry in Runs(paths.RUNS).entries(preset)]
        assert len(statuses) >= count and set(statuses) <= {"done", "failed"}


def test_a_field_that_came_after_a_record_counts_with_its_default(tmp_path):
    run, record = config("fixed_1", "smoke"), made_up(tmp_path, "fixed_1")
    values = json.loads((record.folder / "config.json").read_text())
    for name in ("gate", "qk_norm", "value_scale", "normalization"):
        del values["model"][name]
    del values["model"]["attention"]["sink_logit"], values["data"]["validation"], values["train"]["optimizer"]
    record = dataclasses.replace(record, config=values)
    assert is_of(record, run)
    for changes in ({"gate": "head"}, {"attention": dataclasses.replace(run.model.attention, window=8)}):
        assert not is_of(record, dataclasses.replace(run, model=dataclasses.replace(run.model, **changes)))
    assert not is_of(record, dataclasses.replace(run, seed=1))
    assert not is_of(dataclasses.replace(record, config={**values, "recipe": 1}), run)


def test_a_field_that_is_retired_changes_neither_what_a_record_is_of_nor_the_hash_of_its_config(tmp_path):
    run, record = config("fixed_1", "smoke"), made_up(tmp_path, "fixed_1")
    assert "bos" not in record.config["data"]
    for value, current in ((False, True), (True, False)):
        values = record.config | {"data": record.config["data"] | {"bos": value}}
        assert is_of(dataclasses.replace(record, config=values), run) == current
    # what the fine-tunings of the study name their start by
    assert config_hash(config("fixed_1", "laptop")).startswith("ed45b225684cd4be")
    assert config("sft_softmax", "laptop", 1).start_sha256.startswith("1f6ad9568091e3ed")


FEW = ("fixed_1", "k_bias", "window_1_64")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A few of the study's records in a folder of their own."""
    root = tmp_path_factory.mktemp("runs")
    for name in FEW:
        (root / "laptop" / name).mkdir(parents=True)
        for seed in (0, 1):
            (root / "laptop" / name / str(seed)).symlink_to(paths.RUNS / "laptop" / name / str(seed))
    return root


def report_of(name: str, seed: int) -> dict:
    return json.loads((paths.RUNS / "laptop" / name / str(seed) / "metrics.json").read_text())["final"]


def test_a_row_per_run_says_what_its_record_says_and_the_mean_of_its_blocks(study):
    table = su.runs("laptop", study).set_index(["experiment", "seed"])
    assert len(table) == 2 * len(FEW) and (table.status == "done").all()
    row, final = table.loc[("k_bias", 1)], report_of("k_bias", 1)
    assert (row.sink_1, row.sink_star, row.valid_loss) == (final["sink_1"], final["sink_star"], final["valid_loss"])
    uniform = sum(1 / i for i in range(1, 65)) / 64
    alpha = np.array(final["report"]["alpha"][0])
    assert row.block_1 == pytest.approx(((alpha[0] - uniform) / (1 - uniform)).mean())
    assert (row.block_1 + 3 * row.later_blocks) / 4 == pytest.approx(row.excess_1, abs=1e-4)
    assert row.element == max(block[0] for block in final["report"]["hidden_peaks"])
    by_block = su.blocks("laptop", study).groupby(["experiment", "seed"])
    for name in ("excess_1", "excess_star"):  # also under a window, and where there is a key of its own
        assert by_block[name].mean().tolist() == pytest.approx(table[name].tolist(), abs=1e-5, nan_ok=True)


def test_blocks_heads_and_curves_are_the_reports_numbers_in_their_order(study):
    final = report_of("k_bias", 0)
    heads = su.heads("laptop", study).query("experiment == 'k_bias' and seed == 0")
    assert heads.alpha_1.tolist() == np.ravel(final["report"]["alpha"][0]).tolist()
    assert heads.alpha_star.tolist() == np.ravel(final["report"]["alpha_star"]).tolist()
    blocks = su.blocks("laptop", study).query("experiment == 'k_bias' and seed == 0")
    norms = final["report"]["value_norms"][2]
    assert blocks.value_ratio.tolist()[2] == pytest.approx(norms[0] / np.mean(norms[1:]))
    curve = su.curves("laptop", study).query("experiment == 'k_bias' and seed == 0")
    assert curve.step.tolist()[-1] == 12_000 and curve.tokens.tolist()[-1] == 12_000 * 32 * 64
    assert curve.valid_loss.tolist()[-1] == final["valid_loss"]
    seen_once = su.blocks("laptop", study).query("experiment == 'window_1_64'")
    assert np.isfinite(seen_once.excess_1).all()


def test_a_preset_without_records_is_an_empty_frame_with_the_columns(tmp_path):
    assert su.runs("smoke", tmp_path).columns[:3].tolist() == ["preset", "experiment", "seed"]
    refuses("preset must be one of", su.runs, "laptp")
