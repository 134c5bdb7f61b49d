"""Records: written whole or not at all, and every damaged byte or senseless value is noticed and named."""

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import pickle
import shutil
import sys
from unittest.mock import Mock

import filelock
import pytest
import torch
from helpers import DONE, END, made_up
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sinkutils.ledger.claims import claims
from sinkutils.measuring.load import ModelUnavailable, load_lm
from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import TransformerLM
from sinkutils.showing.tables import records
from sinkutils.study import record as records_module
from sinkutils.study.grid import config
from sinkutils.study.record import (
    OLD,
    CorruptRecord,
    RunLocked,
    as_json,
    config_dict,
    config_hash,
    partial_folder,
    read_record,
    read_tensors,
    record_folder,
    run_lock,
    write_record,
    write_tensors,
)
from sinkutils.study.store import Runs, is_of

FILES = ("config.json", "metrics.json", "provenance.json", "model.safetensors", "tokenizer.json", "SHA256SUMS")


def store(folder):
    return Runs(folder.parents[2])


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
    values = dict(record.config)
    assert values.pop("corpus") and hashlib.sha256(as_json(values).encode()).hexdigest() == config_hash(tiny)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip first", "flip middle", "flip last", "empty", "delete"])
def test_damage_to_any_file_is_noticed_and_the_file_is_named(folder, tiny, file, damage):
    path = folder / file
    blob = bytearray(path.read_bytes())
    if (file, damage) == ("model.safetensors", "delete"):  # to save space: the rest still counts
        path.unlink()
        assert read_record(folder).weights is None and store(folder).get(tiny) is not None
        assert store(folder).get(tiny, weights=True) is None
        return
    if damage.startswith("flip"):
        blob[{"first": 0, "middle": len(blob) // 2, "last": -1}[damage.split()[1]]] ^= 1
    path.write_bytes({"truncate": blob[:-3], "empty": b""}.get(damage, bytes(blob)))
    if damage == "delete":
        path.unlink()
    with pytest.raises(CorruptRecord, match=f"record test/tiny/0: {file} is"):
        read_record(folder)
    with pytest.warns(UserWarning, match="counts as missing"):
        assert store(folder).get(tiny) is None


def test_a_record_counts_for_its_own_config_only_and_the_hash_depends_on_every_field(folder, tiny):
    assert store(folder).get(tiny) is not None and config_hash(tiny) == config_hash(dataclasses.replace(tiny))
    others = [
        dataclasses.replace(tiny, seed=1),
        dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, adam_eps=1e-7)),
        dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, share=0.5)),
    ]
    assert len({config_hash(other) for other in [tiny, *others]}) == 4
    assert all(store(folder).get(other) is None for other in others)


def test_a_full_disk_leaves_the_old_record_and_no_rubbish_and_a_new_one_replaces_it_whole(folder, tiny, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")

    def rename(source, target, really=os.replace):
        if source.name.endswith(".tmp") and not source.name.endswith(OLD):
            raise full
        really(source, target)

    for name, fails in (("fsync", Mock(side_effect=full)), ("replace", rename)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match=r"could not save record test/tiny/0 \(No space .*: free some space"):
                write_record(folder, tiny, DONE, {})
        assert read_record(folder).metrics["final"] == END | {"sink_1": 1.5}
        assert [path.name for path in folder.parent.iterdir()] == ["0"]
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

    def write_half(path, data, whole=records_module._write_synced):
        if next(steps) == step:
            path.write_bytes(data[: len(data) // 2])
            os._exit(9)
        whole(path, data)

    def rename(source, target, really=os.replace):
        if next(steps) == step:
            os._exit(9)
        really(source, target)

    records_module._write_synced, os.replace = write_half, rename
    try:
        what()
    finally:  # whatever happens, the child must not go on as a second pytest
        os._exit(0 if sys.exc_info()[0] is None else 1)


@pytest.mark.parametrize("there", ["no record", "another record"])
def test_a_death_at_any_step_of_writing_leaves_a_whole_record_or_none_and_the_next_run_cleans_up(tiny, tmp_path, there):
    target = record_folder("test", "tiny", 0, tmp_path)
    old, new = DONE | {"status": "failed", "reason": "old"}, DONE
    left, found = [], []

    def state():
        return read_record(target).metrics["reason"] if target.exists() else "nothing"

    for step in (1, 2, 3, 4, 5, *[6] * 8, 7):  # of the sixth often, as the order of a folder's files is any
        shutil.rmtree(target, ignore_errors=True)
        if there == "another record":
            write_record(target, tiny, old, {})
        ended = die_before_step(step, lambda: write_record(target, tiny, new, {}))
        left.append(state())
        if ended:
            break
        with run_lock(target):  # what the worker before left is gone, or in its place
            assert {path.name for path in target.parent.iterdir()} <= {"0", "0.partial"}
            found.append(state())
    assert read_record(target).metrics == new
    if there == "no record":  # four files and a rename, before which the record is whole
        assert left == ["nothing"] * 5 + [None] and found == ["nothing"] * 4 + [None]
    else:  # and one more to put the old one away; between the two there is none, and the lock puts the new one there
        assert left == ["old"] * 5 + ["nothing"] * 8 + [None] and found == ["old"] * 5 + [None] * 8


def test_a_lock_on_a_file_that_its_last_owner_removed_is_taken_again(tmp_path, monkeypatch):
    target, removed = record_folder("test", "tiny", 0, tmp_path), []

    def lock(descriptor, really=filelock._unix.lock_fd_nonblocking):
        if not removed:  # the owner before ends here, after the file was opened and before it is locked
            removed.append(shutil.rmtree(partial_folder(target)))
        return really(descriptor)

    monkeypatch.setattr(filelock._unix, "lock_fd_nonblocking", lock)
    with run_lock(target), pytest.raises(RunLocked, match="test/tiny/0 is being trained by another"), run_lock(target):
        pass
    assert removed


def test_a_record_is_of_its_own_text_and_another_text_stands_apart(folder, tiny, corpus):
    runs, own = folder.parents[2], corpus.identity
    other, same_name = ({"name": name, "sha256": "0" * 64} for name in ("path:novels", "docstrings"))
    assert Runs(runs).get(tiny) == Runs(runs).get(tiny, own) is not None
    assert Runs(runs).get(tiny, other) is None and Runs(runs).get(tiny, same_name) is None
    assert Runs(runs).place(tiny) == Runs(runs).place(tiny, own) == folder
    assert Runs(runs).place(tiny, other) == record_folder("test@path-novels-00000000", "tiny", 0, runs)
    assert Runs(runs).place(tiny, same_name) == record_folder("test@docstrings-00000000", "tiny", 0, runs)
    assert Runs(runs / "empty").place(tiny, same_name) == record_folder("test", "tiny", 0, runs / "empty")


def test_a_record_names_no_folder_of_the_machine(tiny, tmp_path):
    data = dataclasses.replace(tiny.data, corpus=f"path:{tmp_path}/novels/", validation=f"path:{tmp_path}/news")
    values = config_dict(dataclasses.replace(tiny, data=data))["data"]
    assert (values["corpus"], values["validation"]) == ("path:novels", "path:news")


def test_tensors_and_their_json_come_back_exactly_and_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(7, dtype=torch.int64), "c": torch.randn(2).bfloat16()}
    write_tensors(path, tensors, {"step": 3, "curve": [0.1 + 0.2]})
    back, extra = read_tensors(path)
    assert extra == {"step": 3, "curve": [0.1 + 0.2]}
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    blob = path.read_bytes()
    for index in range(len(blob)):
        path.write_bytes(blob[:index] + bytes([blob[index] ^ 1]) + blob[index + 1 :])
        with pytest.raises(CorruptRecord, match=r"x\.safetensors"):
            read_tensors(path)


def sign(folder, more=""):
    """Give every file of a record the digest that it has now."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files) + more
    own = hashlib.sha256(sums.encode()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sums}{own}  SHA256SUMS\n", encoding="utf-8")


def damaged(where, value):
    """A way of being bad: what stands at `where`, a JSON file and keys in it, is another value, or GONE."""

    def damage(folder):
        file, *keys, last = where.split()
        whole = inner = json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))
        for key in keys:
            inner = inner[key]
        inner.pop(last) if value is GONE else inner.update({last: value})
        (folder / f"{file}.json").write_text(json.dumps(whole), encoding="utf-8")

    return damage


def holds(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def shares(name, values):
    return lambda folder: save_file({name: values}, folder / "alpha.safetensors")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def elsewhere(folder):
    (folder.parent / "x").write_bytes(b"")
    sums = f"{hashlib.sha256(b'').hexdigest()}  ../x\n"
    sign(folder, sums)


def a_folder(folder):
    (folder / "metrics.json").unlink()
    (folder / "metrics.json").mkdir()


GONE = object()
POINT = {"step": 60, "sink_1": 1.5, "valid_loss": 5.0}
CHANGES = [{"valid_loss": math.inf}, {"gradient_norms": [1.0]}, {"peak_1": [1.0, -2.0]}, {"value_ratio_1": 0.5}]
DEEP, LONG = b"[" * 100_000 + b"]" * 100_000, b'{"status": ' + b"9" * 10_000 + b"}"
VALUES = {  # what a field must not hold
    "metrics status": [GONE, "well"],
    "metrics reason": [["x"]],
    "metrics curve": [GONE, {"sink_1": 1}, [3], [{"sink_1": 1.5, "valid_loss": 5.0}], *([POINT | c] for c in CHANGES)],
    "metrics final": [GONE, {}, [1]],
    "metrics final sink_1": [GONE, "24 %", True, math.nan, 1e9],
    "metrics final sink_star": [-1],
    "metrics final excess_1": [2],
    "metrics final something": [math.nan],
    "metrics final report": [[]],
    "metrics final report T": [GONE, "long", -5],
    "metrics final report layers": [GONE],
    "metrics final report excess 1": ["much"],
    "metrics final report sink 1": ["none"],
    "metrics final report alpha": [[[[0.1], [0.1, 0.2]]], [[[7.0, 0.0]] * 2], [[[0.1, 0.1]]]],  # the last: few layers
    "metrics final report hidden_norms": [[["1", "2"]]],
    "metrics final report key_norms": [[[1.0], [1.0]]],  # of one position
    "provenance wall_seconds": [-3],
    "config model": [5],
    "config model hidden_size": [10**7],
    "config model context_length": [10**9],
    "config model num_heads": [0],
    "config train steps": ["many"],
    "config seed": [-1],
}
CONTENTS = {  # what a file must not hold
    "metrics.json": [b"[]", b"null", b"", json.dumps(DONE).encode("utf-16"), DEEP, LONG],
    "provenance.json": [b'"laptop"', b'{"device": 1e999}'],
    "config.json": [b"{}"],
    "model.safetensors": [pickle.dumps({"w": 1})],
    "tokenizer.json": [b"{}"],
}
BAD = {
    **{f"{where} {n}": damaged(where, value) for where, values in VALUES.items() for n, value in enumerate(values)},
    **{f"{file} {n}": holds(file, content) for file, wrong in CONTENTS.items() for n, content in enumerate(wrong)},
    "metrics a folder": a_folder,
    "alpha along the curve of nan": shares("curve", torch.full((1, 2, 2, 2), torch.nan)),
    "alpha by text of 7": shares("final", torch.full((3, 2, 2, 2), 7.0)),
    "alpha flat": shares("final", torch.zeros(3)),
    "alpha of more points than the curve": shares("curve", torch.zeros(9, 2, 2, 2)),
    "weights cut short": cut,
    "no provenance at all": lambda folder: (folder / "provenance.json").unlink(),
    "a digest of a file elsewhere": elsewhere,
}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two whole records of smoke, with weights and a report as runs write them."""
    runs = tmp_path_factory.mktemp("two")
    model = TransformerLM(config("k_bias", "smoke").model)
    report = measure(model, torch.arange(64)[None]).to_dict()
    final = POINT | {"sink_star": 20.0, "train_loss": 5.0, "report": report}
    kept = {"weights": dict(model.state_dict()), "tokenizer": Tokenizer(WordLevel({"w": 0}, unk_token="w"))}
    for seed in (0, 1):
        made_up(runs, "k_bias", seed, kept=kept, curve=[POINT], final=final)
    return runs


@pytest.mark.parametrize("way", BAD)
def test_a_signed_record_that_makes_no_sense_is_one_corrupt_row(two_runs, tmp_path, way):
    runs = tmp_path / "runs"
    shutil.copytree(two_runs, runs)
    bad = record_folder("smoke", "k_bias", 1, runs)
    BAD[way](bad)
    if BAD[way] is not elsewhere:
        sign(bad)
    with pytest.warns(UserWarning, match="record smoke/k_bias/1: .*delete the folder and train the run again"):
        table = records("smoke", runs)
    assert table["seed"].tolist() == [0, 1] and table["status"][1] == "corrupt"
    assert table["status"][0] != "corrupt" and table["sink_1"][0] == 1.5
    assert "\n" not in table["reason"][1] and len(table["reason"][1]) < 400
    with pytest.raises(ModelUnavailable, match="smoke/k_bias/1"):
        load_lm(bad, "cpu")


@pytest.mark.slow
def test_one_bad_record_stops_neither_the_ledger_nor_takes_the_memory_of_another_model(two_runs, tmp_path):
    shutil.copytree(two_runs, tmp_path / "runs")
    good, bad = (record_folder("smoke", "k_bias", seed, tmp_path / "runs") for seed in (0, 1))
    holds("metrics.json", b"[]")(bad)
    sign(bad)
    with pytest.warns(UserWarning, match="smoke/k_bias/1"):
        assert len(claims("smoke", tmp_path / "runs")) > 20
    damaged("config model intermediate_size", 2**18)(good)
    damaged("config model num_layers", 1024)(good)
    sign(good)
    with pytest.raises(ModelUnavailable, match="holds another model than config"):
        load_lm(good, "cpu")


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
    assert not is_of(dataclasses.replace(record, config={**values, "recipe": 1}), run)
    del values["recipe"]
    assert not is_of(dataclasses.replace(record, config=values), run)
