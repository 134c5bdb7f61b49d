"""Records: written whole or not at all, and every damaged byte is noticed and named."""

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import shutil
import sys

import pytest
import torch

from sinkutils.study.record import (
    CorruptRecord,
    RunLocked,
    as_json,
    config_dict,
    config_hash,
    find_record,
    partial_folder,
    read_record,
    read_tensors,
    record_folder,
    run_folder,
    run_lock,
    write_record,
    write_tensors,
)

records_module = sys.modules["sinkutils.study.record"]  # sinkutils.study.record is the function
FILES = ("config.json", "metrics.json", "provenance.json", "model.safetensors", "tokenizer.json", "SHA256SUMS")


@pytest.fixture
def folder(tiny, corpus, tmp_path):
    target = record_folder("test", "tiny", 0, tmp_path)
    metrics = {"status": "done", "reason": None, "curve": [], "final": {"sink_1": 1.5}}
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
        assert find_record(folder, tiny) is None


def test_a_record_of_another_config_is_stale(folder, tiny):
    assert find_record(folder, tiny) is not None
    assert find_record(folder, dataclasses.replace(tiny, seed=1)) is None


def test_a_full_disk_leaves_the_old_record_and_no_rubbish(folder, tiny, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_record(folder, tiny, {"status": "done"}, {})
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
    old, new = {"status": "failed", "reason": "old"}, {"status": "done", "reason": None}
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

    def flock(file, how, really=fcntl.flock):
        if not removed:  # the owner before ends here, after the file was opened and before it is locked
            removed.append(shutil.rmtree(partial_folder(target)))
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_lock(target), pytest.raises(RunLocked, match="test/tiny/0"), run_lock(target):
        pass
    assert removed


def test_a_new_record_replaces_an_old_one_whole(folder, tiny):
    write_record(folder, tiny, {"status": "failed", "reason": "x"}, {})
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
    import hashlib

    values = json.loads((folder / "config.json").read_text())
    assert values.pop("corpus") and values["experiment"] == "tiny"
    assert hashlib.sha256(as_json(values).encode()).hexdigest() == config_hash(tiny)


def test_a_record_is_of_its_own_text_and_another_text_stands_apart(folder, tiny, corpus):
    runs, own = folder.parents[2], corpus.identity
    other, same_name = ({"name": name, "sha256": "0" * 64} for name in ("path:novels", "docstrings"))
    assert find_record(folder, tiny) == find_record(folder, tiny, own) is not None
    assert find_record(folder, tiny, other) is None and find_record(folder, tiny, same_name) is None
    assert run_folder(tiny, runs) == run_folder(tiny, runs, own) == folder
    assert run_folder(tiny, runs, other) == record_folder("test@path-novels-00000000", "tiny", 0, runs)
    assert run_folder(tiny, runs, same_name) == record_folder("test@docstrings-00000000", "tiny", 0, runs)
    assert run_folder(tiny, runs / "empty", same_name) == record_folder("test", "tiny", 0, runs / "empty")


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
