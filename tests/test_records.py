"""Records: written whole or not at all, and every damaged byte is noticed and named."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import pickle
import shutil
import sys

import filelock
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from sinkutils.ledger.claims import claims
from sinkutils.measuring.load import ModelUnavailable, load_lm
from sinkutils.measuring.measure import measure
from sinkutils.model.decoder import TransformerLM
from sinkutils.showing.tables import records
from sinkutils.study.grid import config
from sinkutils.study.record import (
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

records_module = sys.modules["sinkutils.study.record"]  # sinkutils.study.record is the function
FILES = ("config.json", "metrics.json", "provenance.json", "model.safetensors", "tokenizer.json", "SHA256SUMS")
DONE = {"status": "done", "reason": None, "curve": [], "final": {}}


def store(folder):
    return Runs(folder.parents[2])


@pytest.fixture
def folder(tiny, corpus, tmp_path):
    target = record_folder("test", "tiny", 0, tmp_path)
    metrics = DONE | {"final": {"sink_1": 1.5}}
    write_record(target, tiny, metrics, {"device": "cpu"}, {"w": torch.ones(3)}, corpus.tokenizer,
                 corpus.identity)  # fmt: skip
    return target


def test_a_record_reads_back_as_written(folder, tiny, corpus):
    record = read_record(folder)
    assert record.config == config_dict(tiny) | {"corpus": {"name": "docstrings", "sha256": corpus.fingerprint}}
    assert record.metrics["final"] == {"sink_1": 1.5}
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert record.weights == folder / "model.safetensors"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip first", "flip middle", "flip last", "empty", "delete"])
def test_damage_to_any_file_is_noticed_and_the_file_is_named(folder, tiny, file, damage):
    path = folder / file
    blob = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        blob[{"first": 0, "middle": len(blob) // 2, "last": -1}[damage.split()[1]]] ^= 1
    path.write_bytes({"truncate": blob[:-3], "empty": b""}.get(damage, bytes(blob)))
    if damage == "delete":
        path.unlink()
    with pytest.raises(CorruptRecord, match=f"record test/tiny/0: {file} is"):
        read_record(folder)
    with pytest.warns(UserWarning, match="counts as missing"):
        assert store(folder).get(tiny) is None


def test_a_record_of_another_config_is_stale(folder, tiny):
    assert store(folder).get(tiny) is not None
    other = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, steps=9))
    assert store(folder).get(other) is None


def test_a_full_disk_leaves_the_old_record_and_no_rubbish(folder, tiny, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_record(folder, tiny, DONE, {})
    assert read_record(folder).metrics["final"] == {"sink_1": 1.5}
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
    left, deaths = set(), 0
    for step in itertools.count(1):
        if there == "another record":
            write_record(target, tiny, old, {})
        with run_lock(target):  # what the worker before left is gone
            assert {path.name for path in target.parent.iterdir()} <= {"0", "0.partial"}
        ended = die_before_step(step, lambda: write_record(target, tiny, new, {}))
        left.add(read_record(target).metrics["reason"] if target.exists() else "nothing")
        if ended:
            break
        deaths += 1
    assert read_record(target).metrics == new
    if there == "no record":  # four files and a rename
        assert deaths == 5 and left == {"nothing", None}
    else:  # and one more to put the old one away; between the two there is none, and the run is trained again
        assert deaths == 6 and left == {"old", "nothing", None}


def test_a_lock_on_a_file_that_its_last_owner_removed_is_taken_again(tmp_path, monkeypatch):
    target, removed = record_folder("test", "tiny", 0, tmp_path), []

    def lock(descriptor, really=filelock._unix.lock_fd_nonblocking):
        if not removed:  # the owner before ends here, after the file was opened and before it is locked
            removed.append(shutil.rmtree(partial_folder(target)))
        return really(descriptor)

    monkeypatch.setattr(filelock._unix, "lock_fd_nonblocking", lock)
    with run_lock(target), pytest.raises(RunLocked, match="test/tiny/0"), run_lock(target):
        pass
    assert removed


def test_a_new_record_replaces_an_old_one_whole(folder, tiny):
    write_record(folder, tiny, DONE | {"status": "failed", "reason": "x"}, {})
    record = read_record(folder)
    assert record.status == "failed" and record.weights is None
    assert [path.name for path in folder.parent.iterdir()] == ["0"]


def test_the_hash_depends_on_every_field_and_on_nothing_else(tiny):
    assert config_hash(tiny) == config_hash(dataclasses.replace(tiny))
    others = [
        dataclasses.replace(tiny, seed=1),
        dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, adam_eps=1e-7)),
        dataclasses.replace(tiny, data=dataclasses.replace(tiny.data, share=0.5)),
    ]
    assert len({config_hash(config) for config in [tiny, *others]}) == 4


def test_the_hash_is_the_digest_of_config_json_but_for_the_corpus(folder, tiny):
    values = json.loads((folder / "config.json").read_text())
    assert values.pop("corpus") and values["experiment"] == "tiny"
    assert hashlib.sha256(as_json(values).encode()).hexdigest() == config_hash(tiny)


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


def test_tensors_and_their_json_come_back_exactly(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(7, dtype=torch.int64), "c": torch.randn(2).bfloat16()}
    write_tensors(tmp_path / "x.safetensors", tensors, {"step": 3, "curve": [0.1 + 0.2]})
    back, extra = read_tensors(tmp_path / "x.safetensors")
    assert extra == {"step": 3, "curve": [0.1 + 0.2]}
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_every_flipped_byte_of_a_checkpoint_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(2)}, {"step": 1})
    blob = path.read_bytes()
    for index in range(len(blob)):
        damaged = bytearray(blob)
        damaged[index] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorruptRecord, match=r"x\.safetensors"):
            read_tensors(path)


def test_a_copied_record_is_still_whole(folder, tmp_path):
    copy = tmp_path / "elsewhere" / "0"
    shutil.copytree(folder, copy)
    assert read_record(copy).metrics == read_record(folder).metrics


def sign(folder, more=""):
    """Give every file of a record the digest that it has now."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files) + more
    own = hashlib.sha256(sums.encode()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sums}{own}  SHA256SUMS\n", encoding="utf-8")


def changed(file, *keys, to):
    """A way of being bad: the value at `keys` of a JSON file is another one."""

    def damage(folder):
        path = folder / f"{file}.json"
        value = inner = json.loads(path.read_text(encoding="utf-8"))
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        path.write_text(json.dumps(value), encoding="utf-8")

    return damage


def lacks(file, *keys):
    def damage(folder):
        path = folder / f"{file}.json"
        value = inner = json.loads(path.read_text(encoding="utf-8"))
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        path.write_text(json.dumps(value), encoding="utf-8")

    return damage


def holds(file, content):
    return lambda folder: (folder / file).write_bytes(content)


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


BAD = {
    "metrics without final": lacks("metrics", "final"),
    "metrics without curve": lacks("metrics", "curve"),
    "metrics without status": lacks("metrics", "status"),
    "metrics a list": holds("metrics.json", b"[]"),
    "metrics null": holds("metrics.json", b"null"),
    "metrics empty": holds("metrics.json", b""),
    "metrics a folder": a_folder,
    "metrics not UTF-8": holds("metrics.json", json.dumps(DONE).encode("utf-16")),
    "metrics nested": holds("metrics.json", b"[" * 100_000 + b"]" * 100_000),
    "a number of 10,000 digits": holds("metrics.json", b'{"status": ' + b"9" * 10_000 + b"}"),
    "another status": changed("metrics", "status", to="well"),
    "a reason that is none": changed("metrics", "reason", to=["x"]),
    "final a list": changed("metrics", "final", to=[1]),
    "a curve that is none": changed("metrics", "curve", to={"sink_1": 1}),
    "a point that is none": changed("metrics", "curve", to=[3]),
    "text for a number": changed("metrics", "final", "sink_1", to="24 %"),
    "true for a number": changed("metrics", "final", "sink_1", to=True),
    "a sink of nan": changed("metrics", "final", "sink_1", to=float("nan")),
    "a sink of 1e9": changed("metrics", "final", "sink_1", to=1e9),
    "a sink below 0": changed("metrics", "final", "sink_star", to=-1),
    "an excess of 2": changed("metrics", "final", "excess_1", to=2),
    "an infinite loss": changed("metrics", "curve", to=[{"step": 1, "valid_loss": float("inf")}]),
    "a loss of nan elsewhere": changed("metrics", "final", "something", to=float("nan")),
    "an infinity in digits": holds("provenance.json", b'{"device": 1e999}'),
    "gradients without losses": changed("metrics", "curve", to=[{"gradient_norms": [1.0]}]),
    "a report that is none": changed("metrics", "final", "report", to=[]),
    "a report without layers": lacks("metrics", "final", "report", "layers"),
    "a report's sink as text": changed("metrics", "final", "report", "sink", "1", to="none"),
    "a report's alpha ragged": changed("metrics", "final", "report", "alpha", to=[[[0.1], [0.1, 0.2]]]),
    "a report's alpha of 7": changed("metrics", "final", "report", "alpha", to=[[[7.0, 0.0]] * 2]),
    "a report's alpha of other layers": changed("metrics", "final", "report", "alpha", to=[[[0.1, 0.1]]]),
    "norms as text": changed("metrics", "final", "report", "hidden_norms", to=[["1", "2"]]),
    "provenance a text": holds("provenance.json", b'"laptop"'),
    "a time below 0": changed("provenance", "wall_seconds", to=-3),
    "a config that is none": holds("config.json", b"{}"),
    "a model that is none": changed("config", "model", to=5),
    "a model of 10**7": changed("config", "model", "hidden_size", to=10**7),
    "a context of 10**9": changed("config", "model", "context_length", to=10**9),
    "no heads": changed("config", "model", "num_heads", to=0),
    "steps as text": changed("config", "train", "steps", to="many"),
    "a seed below 0": changed("config", "seed", to=-1),
    "weights cut short": cut,
    "weights pickled": holds("model.safetensors", pickle.dumps({"w": 1})),
    "a tokenizer of nothing": holds("tokenizer.json", b"{}"),
    "no provenance at all": lambda folder: (folder / "provenance.json").unlink(),
    "a digest of a file elsewhere": elsewhere,
}  # fmt: skip


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two whole records of smoke, with weights and a report as runs write them."""
    runs = tmp_path_factory.mktemp("two")
    run = config("k_bias", "smoke")
    model = TransformerLM(run.model)
    report = measure(model, torch.arange(64)[None]).to_dict()
    final = {"step": 60, "sink_1": 1.5, "sink_star": 20.0, "valid_loss": 5.0, "train_loss": 5.0, "report": report}
    tokenizer = Tokenizer(WordLevel({"w": 0}, unk_token="w"))
    for seed in (0, 1):
        metrics = DONE | {"curve": [{"step": 60, "sink_1": 1.5, "valid_loss": 5.0}], "final": final}
        write_record(record_folder("smoke", "k_bias", seed, runs), dataclasses.replace(run, seed=seed), metrics,
                     {"wall_seconds": 1.0}, dict(model.state_dict()), tokenizer)  # fmt: skip
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


def test_the_ledger_is_made_with_a_bad_record_among_the_good(two_runs, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(two_runs, runs)
    bad = record_folder("smoke", "k_bias", 1, runs)
    BAD["metrics a list"](bad)
    sign(bad)
    with pytest.warns(UserWarning, match="smoke/k_bias/1"):
        assert len(claims("smoke", runs)) > 20


def test_weights_that_are_not_those_of_the_config_are_refused_before_any_memory_is_taken(two_runs, tmp_path):
    folder = tmp_path / "smoke" / "k_bias" / "0"
    shutil.copytree(record_folder("smoke", "k_bias", 0, two_runs), folder)
    changed("config", "model", "intermediate_size", to=2**18)(folder)
    changed("config", "model", "num_layers", to=1024)(folder)
    sign(folder)
    with pytest.raises(ModelUnavailable, match="holds another model than config"):
        load_lm(folder, "cpu")


def test_a_field_that_came_after_a_record_counts_with_its_default(tmp_path):
    run = config("fixed_1", "smoke")
    target = record_folder("smoke", "fixed_1", 0, tmp_path)
    write_record(target, run, {"status": "failed", "reason": "made up", "curve": [], "final": {}}, {})
    values = json.loads((target / "config.json").read_text())
    del values["model"]["attention"]["window"], values["data"]["validation"]  # as if they were new
    record = dataclasses.replace(read_record(target), config=values)
    assert is_of(record, run)
    spec = dataclasses.replace(run.model.attention, window=8)
    assert not is_of(record, dataclasses.replace(run, model=dataclasses.replace(run.model, attention=spec)))
    assert not is_of(dataclasses.replace(record, config={**values, "recipe": 1}), run)
    del values["recipe"]
    assert not is_of(dataclasses.replace(record, config=values), run)
