"""What the scripts for a lent GPU send back: whole files, in few archives, whatever ends a script."""

import tarfile

import card_out
import pytest

SIZE = 30_000


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(card_out, "LARGEST", 4 * SIZE)
    root = tmp_path / "runs" / "minute"
    root.mkdir(parents=True)
    paths = [root / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * SIZE)
    return paths


def names(archive):
    with tarfile.open(archive) as tar:
        return tar.getnames()


def test_all_files_come_back_in_four_archives_that_are_small_enough(files, tmp_path, capsys):
    for path in files:
        card_out.add(tmp_path, tmp_path / "runs", [path])
    archives = sorted(tmp_path.glob("files-*.tar"))
    assert len(archives) == card_out.ARCHIVES
    assert max(archive.stat().st_size for archive in archives) <= card_out.LARGEST
    back = [name for archive in archives for name in names(archive)]
    assert back == [f"minute/{number}" for number in range(len(back))] and len(back) == 12
    assert capsys.readouterr().out.count("no room for") == len(files) - len(back)


def test_after_a_kill_the_files_before_can_be_read_and_others_are_added(files, tmp_path):
    card_out.add(tmp_path, tmp_path, files[:2])
    first = tmp_path / "files-0.tar"
    first.write_bytes(first.read_bytes()[: 2 * SIZE])
    card_out.add(tmp_path, tmp_path, files[2:3])
    with tarfile.open(first) as tar:
        assert tar.extractfile(tar.next()).read() == files[0].read_bytes()
    assert names(tmp_path / "files-1.tar") == ["runs/minute/2"]
