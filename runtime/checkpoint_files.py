"""Folders of checkpoints: written aside, marked complete last, chosen and checked when they are read.

    path/step-00000100/            a checkpoint: torch.distributed.checkpoint's files, and MARK
    path/.step-00000200.tmp-3f2a/  one that is being written, or whose save was cut off

A folder is complete when it has MARK, under whichever name: the mark is written after everything else is on disk. It has
the size and the checksum of every file, so that a file which is cut off, changed or missing is found by name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib

MARK = "COMPLETE"
METADATA = ".metadata"  # torch.distributed.checkpoint's own file; a folder that has it is one of its checkpoints
NAME = re.compile(r"\.?step-(\d+)(\.tmp-[0-9a-f]+)?")
CHUNK = 1 << 22  # bytes read at a time


def folder_of(path: str, step: int) -> str:
    return os.path.join(path, f"step-{step:08d}")


def make_aside(path: str, step: int) -> str:
    """A new, empty folder in `path`, which is made if it is not there."""
    os.makedirs(path, exist_ok=True)
    aside = os.path.join(path, f".step-{step:08d}.tmp-{secrets.token_hex(4)}")
    os.mkdir(aside)
    return aside


def checksums(folder: str, names: list[str]) -> dict[str, list[int]]:
    """{name: [bytes, CRC-32]} of files in `folder`."""
    found = {}
    for name in names:
        size = crc = 0
        with open(os.path.join(folder, name), "rb") as file:
            while chunk := file.read(CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        found[name] = [size, crc]
    return found


def finish(aside: str, step: int, world: int, files: dict[str, list[int]], keep: int | None) -> str:
    """Mark `aside` complete, give it its name, and remove what it replaces: an older checkpoint of the same step, what
    saves that were cut off have left, and with `keep` all but the last `keep` checkpoints. Returns the new path."""
    path = os.path.dirname(aside)
    mark = os.path.join(aside, MARK)
    with open(mark + ".part", "w", encoding="utf-8") as file:
        json.dump({"step": step, "world": world, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(aside)
    os.rename(mark + ".part", mark)
    sync_folder(aside)
    # From here on it is complete. Cut off below, there are two of one step, of which the newer one is chosen.
    final = folder_of(path, step)
    if os.path.isdir(final):
        os.rename(final, make_aside(path, step))
    os.rename(aside, final)
    sync_folder(path)
    for name in os.listdir(path):
        if NAME.fullmatch(name) and name.startswith("."):
            remove(os.path.join(path, name))
    if keep is not None:
        complete = sorted(complete_folders(path), key=saved_at)
        for folder in complete[:-keep]:
            remove(folder)
    return final


def remove(folder: str) -> None:
    """Delete a folder; its mark first, so that a deletion which is cut off leaves nothing that looks complete."""
    if has_mark(folder):
        os.unlink(os.path.join(folder, MARK))
    shutil.rmtree(folder)


def sync_folder(folder: str) -> None:
    """Wait until the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_mark(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MARK))


def saved_at(folder: str) -> int:
    return os.stat(os.path.join(folder, MARK)).st_mtime_ns


def step_of(folder: str) -> int:
    return int(NAME.fullmatch(os.path.basename(folder))[1])


def checkpoint_folders(path: str) -> list[str]:
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if NAME.fullmatch(name)]


def complete_folders(path: str) -> list[str]:
    return [folder for folder in checkpoint_folders(path) if has_mark(folder)]


def choose(path: str) -> tuple[str, list[str]]:
    """(folder to load, folders that were passed over because their save was cut off). `path` is a folder of checkpoints,
    whose complete one of the highest step is chosen, or one checkpoint. Raises FileNotFoundError."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {path} to load a checkpoint from")
    if has_mark(path):
        return path, []
    if NAME.fullmatch(os.path.basename(os.path.abspath(path))):
        raise FileNotFoundError(f"{path} is not complete: its save was cut off, or it is still being written; load another one")
    if os.path.isfile(os.path.join(path, METADATA)):
        return path, []  # of another program: nothing tells whether it is complete
    complete = complete_folders(path)
    passed = [folder for folder in checkpoint_folders(path) if folder not in complete]
    if not complete:
        seen = f"only {len(passed)} whose save was cut off, such as {passed[0]}" if passed else "neither there nor inside"
        raise FileNotFoundError(f"{path} has no complete checkpoint: {seen}")
    chosen = max(complete, key=lambda folder: (step_of(folder), saved_at(folder)))
    return chosen, [folder for folder in passed if step_of(folder) > step_of(chosen)]


def read_mark(folder: str) -> dict | None:
    """{"step", "world", "files"}; None for a checkpoint of another program."""
    if not has_mark(folder):
        return None
    with open(os.path.join(folder, MARK), encoding="utf-8") as file:
        try:
            mark = json.load(file)
        except ValueError:
            mark = None
    if not isinstance(mark, dict) or {"step", "world", "files"} - mark.keys():
        raise ValueError(f"{os.path.join(folder, MARK)} is damaged: it is not the JSON object that a save writes")
    return mark


def check_files(folder: str, mark: dict, names: list[str], read: bool = True) -> list[str]:
    """What is wrong with files of a checkpoint, in words. read=False compares sizes only."""
    wrong = []
    for name in names:
        size, crc = mark["files"][name]
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            wrong.append(f"{name} is missing")
        elif os.path.getsize(file) != size:
            wrong.append(f"{name} has {os.path.getsize(file)} bytes and was saved with {size}")
        elif read and checksums(folder, [name])[name] != [size, crc]:
            wrong.append(f"{name} has other content than was saved (checksum)")
    return wrong
