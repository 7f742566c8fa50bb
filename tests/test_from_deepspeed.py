"""from_deepspeed: every key of DeepSpeed's configuration is mapped, listed as ignored with a reason, or refused."""

from __future__ import annotations

import json
import re

import pytest
import torch

import zero_fx
from zero_fx.deepspeed_keys import IGNORED, KNOWN, REFUSED

MAPPED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print",
    "communication_data_type", "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm",
    "zero_optimization.allgather_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold", "fp16.enabled", "bf16.enabled", "fp16.loss_scale",
    "fp16.initial_scale_power", "fp16.loss_scale_window",
}  # fmt: skip
USUAL = {  # as Hugging Face's users write it
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "none"}, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": 2e6, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 1e4,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 50, "wall_clock_breakdown": False, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}  # fmt: skip


def test_usual(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(USUAL))
    config = zero_fx.from_deepspeed(path, lowering="eager")
    assert config == zero_fx.from_deepspeed(USUAL, lowering="eager")
    assert (config.stage, config.lowering, config.keep_whole_below, config.bucket_bytes) == (3, "eager", 10_000, 8_000_000)
    assert config.precision == zero_fx.Precision(torch.bfloat16)
    assert (config.gradient_clipping, config.gradient_accumulation_steps, config.micro_batch_size) == (0.5, 4, 2)
    assert (config.train_batch_size, config.steps_per_print) == (None, 50)
    ignored = dict(config.ignored)
    assert {"optimizer", "zero_optimization.contiguous_gradients", "zero_optimization.stage3_prefetch_bucket_size"} < set(ignored)
    assert "Trainer" in ignored["train_batch_size"] and all(ignored.values())
    assert isinstance(config, zero_fx.Config) and hash(config)


def test_it_compiles():
    config = zero_fx.from_deepspeed({"zero_optimization": {"stage": 2}}, lowering="eager")
    report = zero_fx.inspect(torch.nn.Linear(8, 8), torch.ones(2, 8), world_size=2, config=config)
    assert report.config.stage == 2


def test_every_key_is_accounted_for():
    keys = {name if inside is None else f"{name}.{key}" for name, inside in KNOWN.items() for key in inside or ("",)}
    for key in keys:
        group = key.partition(".")[0]
        kinds = (key in MAPPED, key in IGNORED or group in IGNORED, key in REFUSED or group in REFUSED)
        assert sum(kinds) == 1 or group == "bfloat16", (key, kinds)
    assert MAPPED <= keys


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_optimisation": {}}, "no key 'zero_optimisation'; did you mean 'zero_optimization'"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'zero_optimization.overlap_comm'"),
        ({"overlap_comm": True}, "no key 'overlap_comm'; did you mean 'zero_optimization.overlap_comm'"),
        ({"zero_optimization": 3}, "zero_optimization=3: expected an object"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4: expected 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=True: expected an integer"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm='yes': expected true or false"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "reduce_bucket_size=0.5: expected an integer"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_fx does not offload yet"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights=True: it changes what is trained"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8: it changes"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "use torch.utils.checkpoint"),
        ({"torch_autocast": {"enabled": True}}, "use torch.autocast"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "are both true: turn one off"),
        ({"communication_data_type": "fp16"}, "without bf16 or fp16"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp16"}, "communication_data_type='fp16': expected 'fp32' or 'bf16'"),
        ({"zero_optimization": {"mics_shard_size": 1}}, "mics_shard_size=1: it changes what is trained"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping=inf: expected a number of 0 or more"),
        ({"steps_per_print": float("nan")}, "steps_per_print=nan: expected an integer"),
        ({"bfloat16": {"enabled": True}}, "write bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale=128: a fixed scale is not supported"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "train_batch_size=30 is no multiple of"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: expected 1 or more"),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged"),
    ],
)
def test_refused(values, message):
    with pytest.raises(ValueError, match="(?s)" + re.escape(message)):
        zero_fx.from_deepspeed(values)


@pytest.mark.parametrize(
    "values",
    [
        {"zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "zero_quantized_weights": False}},
        {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, {"bfloat16": {"enabled": False}},
        {"gradient_allreduce_op": "mean", "sequence_parallel_size": 1}, {"zero_optimization": {"offload_param": {"device": "none", "buffer_count": 5}}},
    ],
)  # fmt: skip
def test_what_is_off_is_no_error(values):
    assert zero_fx.from_deepspeed(values).stage == 0


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        zero_fx.from_deepspeed(tmp_path / "none.json")
    for text, message in (("{", "is not JSON"), ("[]", "expected a JSON object"), ('{"bf16": {}, "bf16": {}}', "stands twice")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            zero_fx.from_deepspeed(tmp_path / "x.json")
    with pytest.raises(TypeError, match="source=3"):
        zero_fx.from_deepspeed(3)


def test_options_go_before_the_file():
    config = zero_fx.from_deepspeed(USUAL, stage=1, precision="fp16")
    assert (config.stage, config.precision.compute) == (1, torch.float16) and dict(config.scaler)["enabled"]
    assert zero_fx.from_deepspeed(USUAL, precision=None).precision is None
    with pytest.raises(TypeError, match="from_deepspeed has no option 'stag'; did you mean 'stage'"):
        zero_fx.from_deepspeed(USUAL, stag=1)


def test_fp16_has_a_scaler():
    config = zero_fx.from_deepspeed({"fp16": {"enabled": True, "initial_scale_power": 10}, "zero_optimization": {"overlap_comm": False}})
    assert zero_fx.GradScaler("cpu", **dict(config.scaler)).get_scale() == 1024
    assert not zero_fx.GradScaler("cpu", **dict(zero_fx.from_deepspeed({}).scaler)).is_enabled()
    assert config.passes == ("bucket_collectives",) and config.gradient_clipping == 1.0
