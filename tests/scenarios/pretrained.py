"""Plain weights, in files of all kinds, loaded into compiled models."""

from __future__ import annotations

import json
import os

import torch
from safetensors.torch import save_file
from torch import nn

import zero_fx
from zero_fx import pretrained

from .api import raises
from .checkpoints import Small, assert_equal

SPLIT = ("embed", "body")  # what the first of two files has


def plain(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    model = Small()
    model.body[1].running_mean.fill_(0.5)
    return model


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """As Hugging Face's files have it: of tied weights one name."""
    return {name: value.contiguous() for name, value in model.state_dict().items() if name != "head.weight"}


def write_files(folder: str) -> None:
    """The weights of `plain()` as each kind of source, in a folder or file by the name of the kind."""
    values = untied(plain())
    first = {name: value for name, value in values.items() if name.startswith(SPLIT)}
    second = {name: value for name, value in values.items() if name not in first}
    save_file(values, os.path.join(folder, "one.safetensors"))
    torch.save(plain().state_dict(), os.path.join(folder, "one.pt"))
    torch.save({"model": values, "step": 3}, os.path.join(folder, "nested.pt"))
    torch.save(values, os.path.join(folder, "old.bin"), _use_new_zipfile_serialization=False)
    for kind, end, save in (("model", "safetensors", save_file), ("pytorch_model", "bin", torch.save)):
        inside = os.path.join(folder, f"several_{end}")
        os.mkdir(inside)
        names = [f"{kind}-0000{number}-of-00002.{end}" for number in (1, 2)]
        for name, part in zip(names, (first, second)):
            save(part, os.path.join(inside, name))
        index = {"metadata": {}, "weight_map": {name: names[name in second] for name in values}}
        with open(os.path.join(inside, f"{kind}.{end}.index.json"), "w", encoding="utf-8") as file:
            json.dump(index, file)


KINDS = ("one.safetensors", "one.pt", "nested.pt", "old.bin", "several_safetensors", "several_bin")


def load_each(rank: int, world: int, folder: str, stage: int) -> None:
    expected = dict(plain().state_dict())
    for source in [*(os.path.join(folder, kind) for kind in KINDS), plain().state_dict()]:
        torch.manual_seed(rank)
        model = zero_fx.compile(Small(), stage, lowering="eager", keep_whole_below=10)
        assert zero_fx.load_full_state_dict(model, source) == ([], [])
        assert_equal(dict(zero_fx.full_state_dict(model)), expected, str(source)[:80])
    half = zero_fx.compile(Small().bfloat16(), stage, lowering="eager", keep_whole_below=10)
    zero_fx.load_full_state_dict(half, os.path.join(folder, "one.safetensors"))
    assert_equal(dict(zero_fx.full_state_dict(half)), dict(plain().bfloat16().state_dict()))


def reads_its_rows(rank: int, world: int, folder: str) -> None:
    """At stage 3, of what is sharded."""
    read: dict[str, int] = {}

    def counted(file, name: str):
        entry = sliced(file, name)

        def rows(*owned) -> torch.Tensor:
            found = entry.rows(*owned)
            read[name] = found.numel()
            return found

        return pretrained.Entry(entry.shape, rows)

    sliced, pretrained.sliced = pretrained.sliced, counted
    try:
        model = zero_fx.compile(Small(), 3, lowering="eager", keep_whole_below=10)
        zero_fx.load_full_state_dict(model, os.path.join(folder, "several_safetensors"))
    finally:
        pretrained.sliced = sliced
    own = {name: param._local_tensor.numel() for name, param in model.named_parameters()}
    assert {name: read.get(name, 0) for name in own} == own


def mistakes(rank: int, world: int, folder: str) -> None:
    model = zero_fx.compile(Small(), 3, lowering="eager")
    before = zero_fx.full_state_dict(model)
    values = untied(plain())
    with raises(FileNotFoundError, "no file"):
        zero_fx.load_full_state_dict(model, os.path.join(folder, "nothing.pt"))
    with raises(FileNotFoundError, "has none of model.safetensors.index.json"):
        zero_fx.load_full_state_dict(model, folder)
    with raises(TypeError, "source=3: expected a path, or a state dict"):
        zero_fx.load_full_state_dict(model, 3)
    with raises(TypeError, "zero_fx.compile returned"):
        zero_fx.load_full_state_dict(nn.Linear(2, 2), values)
    with raises(ValueError, "missing there: row; unknown here: rows; strict=False"):
        zero_fx.load_full_state_dict(model, {("rows" if name == "row" else name): value for name, value in values.items()})
    with raises(ValueError, "other shapes: row is (6,) there and (1, 6) here"):
        zero_fx.load_full_state_dict(model, values | {"row": torch.ones(6)}, strict=False)
    with raises(ValueError, "expected plain tensors by name, found row (float)"):
        zero_fx.load_full_state_dict(model, values | {"row": 1.0})
    for name in ("cut.safetensors", "cut.pt"):
        with raises(ValueError, f"{name} is damaged"):
            zero_fx.load_full_state_dict(model, os.path.join(folder, name))
    with raises(FileNotFoundError, "model-00002-of-00002.safetensors, which model.safetensors.index.json names, is not there"):
        zero_fx.load_full_state_dict(model, os.path.join(folder, "incomplete"))
    assert_equal(zero_fx.full_state_dict(model), before)
    assert zero_fx.load_full_state_dict(model, {"row": torch.full((1, 6), 2.0), "x": torch.ones(1)}, strict=False)[1] == ["x"]
    assert_equal(zero_fx.full_state_dict(model), before | {"row": torch.full((1, 6), 2.0)})
