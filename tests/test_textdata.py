"""Text: which files, a split without overlap, batches that depend on their coordinates only, clear refusals."""

import pathlib
import sysconfig

import pytest
import torch

from zero_fx.textdata import HELD_OUT_EVERY, library_files, load_text

SEQ = 16


def write(folder: pathlib.Path, **contents: str | bytes) -> str:
    for name, content in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def test_the_standard_library_is_the_default():
    files = library_files()
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    names = [file.relative_to(root).as_posix() for file in files]
    assert "ast.py" in names and "json/decoder.py" in names and names == sorted(names)
    assert all(name.endswith(".py") and not {"site-packages", "test"} & set(name.split("/")) for name in names)
    data = load_text([], SEQ, max_bytes=300_000)
    assert len(data.train) + len(data.held_out) == 300_000
    assert "standard library" in data.source


def test_of_many_files_every_tenth_is_held_out(tmp_path):
    texts = {f"{i:02d}.txt": f"{i:02d}" * 50 for i in range(2 * HELD_OUT_EVERY)}
    data = load_text([write(tmp_path, **texts)], SEQ)
    assert bytes(data.held_out.tolist()).decode() == texts["09.txt"] + texts["19.txt"]
    kept = [text for name, text in texts.items() if name not in ("09.txt", "19.txt")]
    assert bytes(data.train.tolist()).decode() == "".join(kept)


def test_of_one_file_every_tenth_block_is_held_out(tmp_path):
    text = bytes(i // 40 % 256 for i in range(400))  # block b is 40 times byte b
    write(tmp_path, book=text.replace(b"\0", b"x"))
    data = load_text([str(tmp_path / "book")], SEQ)
    assert set(data.held_out.tolist()) == {9} and len(data.held_out) == 40
    assert 9 not in data.train.tolist() and len(data.train) == 360


def test_a_folder_gives_its_text_files(tmp_path):
    ignored = {"pic": b"\x89PNG\0" + b"z" * 300, "empty": "", ".git__y": "y" * 300}
    folder = write(tmp_path, b__x="x" * 300, a="a" * 300, **ignored)
    data = load_text([folder], SEQ)
    assert bytes(sorted(set(data.train.tolist()) | set(data.held_out.tolist()))) == b"ax"
    assert bytes(data.train[:1].tolist()) == b"a"  # sorted
    assert "2 files" in data.source


def test_batches_depend_on_their_coordinates_alone(tmp_path):
    data = load_text([write(tmp_path, a=bytes(range(1, 256)) * 40)], SEQ)
    first = data.batch(4, SEQ, seed=1, step=2, micro_batch=3, rank=0)
    again = data.batch(4, SEQ, seed=1, step=2, micro_batch=3, rank=0)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for other in ({"seed": 2}, {"step": 3}, {"micro_batch": 0}, {"rank": 1}):
        differs = data.batch(4, SEQ, **{"seed": 1, "step": 2, "micro_batch": 3, "rank": 0} | other)
        assert not torch.equal(first[0], differs[0]), other


def test_targets_are_the_bytes_that_follow(tmp_path):
    data = load_text([write(tmp_path, a=bytes(range(1, 256)) * 40)], SEQ)
    for tokens, targets in (data.batch(4, SEQ, 0, 0, 0, 0), data.held_out_batch(4, SEQ, 0, 2)):
        assert tokens.shape == targets.shape == (4, SEQ) and tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_held_out_batches_cover_all_of_it_once(tmp_path):
    data = load_text([write(tmp_path, a=bytes(i * i % 251 + 1 for i in range(20_000)))], SEQ)
    batches = [data.held_out_batch(4, SEQ, i, 3)[0] for i in range(3)]
    rows = {tuple(row.tolist()) for batch in batches for row in batch}
    assert len(rows) == 12
    assert tuple(data.held_out[:SEQ].tolist()) in rows and tuple(data.held_out[-SEQ - 1 : -1].tolist()) in rows


def test_the_shortest_text_that_will_do(tmp_path):
    """Windows of 16 + 1 bytes and a place to choose: 18 bytes held out, so ten blocks of 18."""
    data = load_text([write(tmp_path, a="a" * 180)], SEQ)
    assert data.batch(2, SEQ, 0, 0, 0, 0)[0].shape == data.held_out_batch(2, SEQ, 0, 1)[0].shape == (2, SEQ)
    with pytest.raises(ValueError, match=r"179 bytes.*--seq 16 need at least 18 in both.*shorter --seq"):
        load_text([write(tmp_path, a="a" * 179)], SEQ)


def test_refusals_name_what_was_given(tmp_path):
    with pytest.raises(ValueError, match=r"--data .*/nowhere: there is no such file or folder"):
        load_text([str(tmp_path / "nowhere")], SEQ)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"found no text in .*/empty"):
        load_text([str(empty)], SEQ)
    with pytest.raises(ValueError, match=r"found no text in .*/binary"):
        load_text([write(tmp_path / "binary", pic=b"\0" * 500)], SEQ)
