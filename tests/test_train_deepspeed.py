"""zero-fx train --deepspeed-config: the file in place of flags, and flags that contradict it."""

from __future__ import annotations

import json

import pytest
import torch

from tests.test_train import TEXT, TINY, losses_in, output_of, torchrun
from zero_fx.cli import main
from zero_fx.train import TrainOptions, prepare

FILE = {
    "train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "steps_per_print": 7,
    "zero_optimization": {"stage": 2, "sub_group_size": 1e9, "reduce_bucket_size": 5e5}, "bf16": {"enabled": True},
}  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def write(**changes) -> str:
        values = {name: value for name, value in (FILE | changes).items() if value is not None}
        (tmp_path / "ds.json").write_text(json.dumps(values))
        return str(tmp_path / "ds.json")

    return write


def prepared(path: str, given=(), **flags):
    return prepare(TrainOptions(**{**TINY, "keep_whole_below": 4096, **flags, "deepspeed_config": path}), given)


def test_what_the_file_decides(write):
    setup = prepared(write())
    options = setup.options
    assert (options.stage, options.precision, options.clip, options.log_every) == (2, "bf16", 0.5, 7)
    assert (options.batch, options.accumulate) == (2, 3)  # 12 = 2 * 3 * 2 ranks
    assert setup.config.bucket_bytes == 5e5 * 4 and setup.config.lowering == "eager"
    assert setup.scaler == (("enabled", False),)
    fp16 = prepared(write(bf16=None, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 9}))
    assert fp16.config.precision.compute == torch.float16
    assert dict(fp16.scaler) == {"enabled": True, "init_scale": 16.0, "growth_interval": 9}
    off = prepared(write(gradient_clipping=0))
    assert off.options.clip == 0


@pytest.mark.parametrize(
    "whole, micro, steps, flags, expected",
    [
        (12, None, None, {}, (6, 1)),
        (12, None, 3, {}, (2, 3)),
        (None, 5, None, {}, (5, 1)),
        (None, None, None, {"batch": 4}, (4, 1)),
        (12, None, None, {"accumulate": 2}, (3, 2)),
        (12, None, None, {"batch": 2}, (2, 3)),
        (12, 2, 3, {"batch": 2}, (2, 3)),
    ],
)
def test_batches(write, whole, micro, steps, flags, expected):
    path = write(train_batch_size=whole, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps)
    options = prepared(path, given=set(flags), **flags).options
    assert (options.batch, options.accumulate) == expected


@pytest.mark.parametrize(
    "changes, flags, message",
    [
        ({}, "--stage 3", "--stage 3: {path} says 2; leave the flag out, or change the file"),
        ({}, "--precision=fp16", "--precision fp16: {path} says bf16; "),
        ({}, "--batch 4", "--batch 4: {path} says 2; "),
        ({}, "--clip 1", "--clip 1.0: {path} says 0.5; "),
        ({"train_batch_size": 10}, "", "train_batch_size=10 of {path} is not 2 a micro-batch * 2 micro-batches * 2 ranks = 8"),
        ({"train_batch_size": 1, "train_micro_batch_size_per_gpu": None}, "", "train_batch_size=1 of {path} is not 0 a micro-batch"),
        ({"bf17": {}}, "", "DeepSpeed has no key 'bf17'; did you mean 'bf16'?"),
    ],
)
def test_contradictions_are_one_line_and_code_2(write, changes, flags, message, capsys):
    path = write(**changes)
    assert main(["train", "--data", TEXT, "--deepspeed-config", path, *flags.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("zero-fx: " + message.replace("{path}", path)) and shown.err.count("\n") == 1


def test_no_file(capsys):
    assert main(["train", "--deepspeed-config", "nowhere.json"]) == 2
    assert "there is no file nowhere.json" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_run_as_by_flags(write, tmp_path):
    """Loss by loss, to the last bit."""
    path = write(steps_per_print=None)
    base = {"steps": 4, "sample": 0, "data": TEXT}
    launch = ["--standalone", "--nproc-per-node", "2"]
    by_flags = {"stage": 2, "precision": "bf16", "accumulate": 3, "clip": 0.5, "keep_whole_below": 4096}
    output_of(torchrun(launch, **base, **by_flags, loss_log=tmp_path / "flags"))
    left_out = {"keep_whole_below": None, "batch": None}
    out = output_of(torchrun(launch, **base, **left_out, loss_log=tmp_path / "file", deepspeed_config=path))
    assert "zero_optimization.sub_group_size has no effect: " in out
    assert losses_in(tmp_path / "file") == losses_in(tmp_path / "flags")
