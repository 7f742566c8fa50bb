"""Bytes of text files to train on: read, split into training and held-out bytes, and cut into batches."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig

import numpy as np
import torch

MAX_BYTES = 16_000_000  # of all files together
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
HELD_OUT_EVERY = 10  # one file, or one block, of so many is held out
BLOCK_BYTES = 16_384  # where files are too few to hold one out
PROBE_BYTES = 4096  # a file with a zero byte among its first ones is no text


@dataclasses.dataclass(frozen=True)
class TextData:
    """`train` and `held_out`: (bytes,) uint8. `source` says in words what was read."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    def batch(self, batch: int, seq: int, seed: int, step: int, micro_batch: int, rank: int):
        """(tokens, targets), each (batch, seq) int64: random windows, decided by the last four arguments alone."""
        random = np.random.default_rng((seed, step, micro_batch, rank))
        starts = random.integers(0, len(self.train) - seq, size=batch)
        return windows(self.train, torch.from_numpy(starts), seq)

    def held_out_batch(self, batch: int, seq: int, index: int, count: int):
        """Part `index` of `count` batches of windows spread evenly over the held-out bytes; shapes as in `batch`."""
        last = len(self.held_out) - seq - 1
        starts = torch.linspace(0, last, batch * count, dtype=torch.float64).long()
        return windows(self.held_out, starts[index::count], seq)


def windows(data: torch.Tensor, starts: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes from each start on, and the same moved on by one: what follows each of them."""
    rows = data[starts[:, None] + torch.arange(seq + 1)].long()  # (batch, seq + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_text(paths: list[str], seq: int, max_bytes: int = MAX_BYTES) -> TextData:
    """Read `paths` (files and folders), or by default the sources of Python's standard library.

    Files are taken in sorted order, up to `max_bytes`, so that every rank reads the same. Every tenth is held out; of
    a handful of files, every tenth block of 16 KiB instead. Raises ValueError where there is nothing to train on, or
    less than a window of `seq` + 1 bytes on either side.
    """
    files = [file for path in paths for file in files_at(path)] if paths else library_files()
    source = ", ".join(paths) if paths else "the sources of Python's standard library"
    texts = read_texts(files, max_bytes)
    total = sum(map(len, texts))
    if total == 0:
        raise ValueError(f"--data: found no text in {source}; name text files, or folders that hold some")
    pieces = texts if len(texts) >= 2 * HELD_OUT_EVERY else blocks(b"".join(texts))
    held_out = pieces[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [piece for i, piece in enumerate(pieces) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    data = TextData(as_tensor(train), as_tensor(held_out), f"{source} ({len(texts)} files)")
    shortest = min(len(data.train), len(data.held_out))
    if shortest < seq + 2:
        raise ValueError(
            f"--data: {source} has {total} bytes, of which {len(data.train)} are to train on and {len(data.held_out)} "
            f"held out; windows of --seq {seq} need at least {seq + 2} in both. Give more text or a shorter --seq"
        )
    return data


def library_files() -> list[pathlib.Path]:
    """The .py files of the standard library of the Python that runs, without its tests and what was installed."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = (path for path in root.rglob("*.py") if not NOT_THE_LIBRARY & set(path.relative_to(root).parts))
    files = sorted(found, key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise ValueError(f"this Python has no .py sources of its library in {root}; name text files with --data")
    return files


def files_at(path: str) -> list[pathlib.Path]:
    """The file itself, or every file below a folder, sorted, without hidden ones."""
    root = pathlib.Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"--data {path}: there is no such file or folder")
    found = [file for file in root.rglob("*") if file.is_file()]
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    return sorted(shown, key=lambda file: file.relative_to(root).as_posix())


def read_texts(files: list[pathlib.Path], max_bytes: int) -> list[bytes]:
    """Contents of the text files among `files`, together at most `max_bytes`; empty ones left out."""
    texts, left = [], max_bytes
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"--data: cannot read {file}: {error.strerror}") from error
        content = b"" if b"\0" in content[:PROBE_BYTES] else content[:left]
        if content:
            texts.append(content)
            left -= len(content)
        if left <= 0:
            break
    return texts


def blocks(text: bytes) -> list[bytes]:
    """`text` in blocks; shorter ones where it would not fill as many as it takes to hold one out."""
    size = max(1, min(BLOCK_BYTES, len(text) // HELD_OUT_EVERY))
    return [text[i : i + size] for i in range(0, len(text), size)]


def as_tensor(pieces: list[bytes]) -> torch.Tensor:
    """(bytes,) uint8."""
    return torch.from_numpy(np.frombuffer(b"".join(pieces), dtype=np.uint8).copy())
