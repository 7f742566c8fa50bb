"""Mixed precision: equal to fp32 masters that are cast at each read, in every path; what travels, what is held, refusals."""

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
import worst
from scenarios import precision, scaling
from torch import nn

import zero_fx
from zero_fx import Precision
from zero_fx.config import Config
from zero_fx.precision import cast_floats

pytestmark = pytest.mark.timeout(240)
slow, full = pytest.mark.slow, pytest.mark.full

# Models that together reach each way in which a parameter is read.
NAMES = (
    "tied_head", "graph_break", "lstm", "mlp_some_whole", "batch_norm", "disabled_submodule", "multihead", "lora_checkpoint",
    "lora", "dropout", "changing_lengths", "repeated_layer", "odd_sizes", "unfrozen_later", "group_norm",
    "checkpoint_dropout", "frozen_norm_reentrant", "unused_some_steps", "returns_weight", "hf_llama",
)  # fmt: skip
QUICK = (("tied_head", 3),)
SLOW = (("mlp_some_whole", 1), ("graph_break", 2), ("lstm", 3), ("batch_norm", 0))


def items() -> list:
    pairs = [(name, stage) for name in NAMES for stage in range(4)]
    return [pytest.param(*pair, marks=() if pair in QUICK else slow if pair in SLOW else full) for pair in pairs]


@pytest.mark.parametrize("name, stage", items())
def test_equals_fp32_masters(name, stage):
    worst.note("bf16", f"{name}, stage {stage}", ranks.run(precision.check_parity, name, stage, "eager"))


@full
@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("name", ("odd_sizes", "mlp_some_whole", "lstm", "tied_head"))
def test_equals_fp32_masters_in_other_worlds(name, stage, world):
    ranks.run(precision.check_parity, name, stage, "eager", world=world)


@pytest.mark.parametrize("name, stage", (pytest.param("odd_sizes", 3, marks=full), pytest.param("tied_head", 1, marks=full)))
def test_equals_fp32_masters_with_3_ranks_and_fp16(name, stage):
    ranks.run(precision.check_parity, name, stage, "eager", Precision(torch.float16), world=3)


@full
@pytest.mark.parametrize("name, stage", (("tied_head", 3), ("mlp_some_whole", 1), ("strided", 1), ("multihead", 0)))
def test_inductor(name, stage):
    """Fused kernels round to bf16 (8 bits) less often than eager ones; a gradient is a sum of such."""
    ranks.run(precision.check_parity, name, stage, "inductor", Precision(), 5e-2, 5e-3, timeout_s=220)


@pytest.mark.parametrize("reduce", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name, stage", (pytest.param("mlp", 3, marks=slow), pytest.param("all_disabled", 1, marks=full)))
def test_what_travels(name, stage, reduce):
    for seen in ranks.run(precision.check_sent, stage, reduce, name):
        assert seen == {"gathered": {torch.bfloat16}, "reduced": {reduce}}


@full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_gradients_that_travel_in_bf16(stage):
    """Rounded to 8 bits before they travel, and the mean once more where the transport takes it (whole parameters)."""
    ranks.run(precision.check_parity, "mlp_some_whole", stage, "eager", Precision(reduce=torch.bfloat16), 2e-2, 1e-3)


@full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_as_many_elements_travel(stage):
    ranks.run(precision.check_volume, stage)


@full
@pytest.mark.parametrize("name", ("odd_sizes", "graph_break", "batch_norm"))
def test_stages_agree_bitwise(name):
    ranks.run(precision.check_bitwise, name, world=3)


@pytest.mark.parametrize("world", (pytest.param(1, marks=slow), 2))
@pytest.mark.parametrize("stage, micros", ((2, 1), pytest.param(1, 2, marks=slow), *(pytest.param(*p, marks=full) for p in ((0, 1), (1, 1), (3, 1)))))
def test_memory_is_the_formulas(stage, micros, world):
    for measured, formula in ranks.run(precision.check_memory, stage, micros, world=world):
        assert measured == pytest.approx(formula, rel=0.05)


KEPT = Precision(output=torch.float32, keep_fp32=(nn.LayerNorm,)), Precision(keep_fp32=("nor*",)), Precision(torch.float16)


@pytest.mark.parametrize("index, stage", [pytest.param(i, s, marks=slow if (i, s) == (0, 3) else full) for i in range(3) for s in (1, 3)])
def test_dtypes_in_forward_and_outside(index, stage):
    ranks.run(precision.check_dtypes, stage, KEPT[index])


@full
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_kept_modules_equal_fp32_masters(stage):
    ranks.run(precision.check_parity, "repeated_layer", stage, "eager", Precision(keep_fp32=(nn.LayerNorm,)))
    ranks.run(precision.check_parity, "mlp", stage, "eager", Precision(keep_fp32=("2",)))


@pytest.mark.parametrize("stage", (pytest.param(1, marks=full), pytest.param(3, marks=full)))
def test_checkpointing_outside_of_graphs(stage):
    ranks.run(precision.check_checkpointed_method, stage)
    for use_reentrant in (False, True):
        ranks.run(precision.check_recomputed, stage, use_reentrant)


@pytest.mark.parametrize("clip", (pytest.param(False, marks=full), True))
@pytest.mark.parametrize("fused", (pytest.param(False, marks=slow), True))
@pytest.mark.parametrize("stage", (pytest.param(0, marks=full), pytest.param(1, marks=full), 3))
def test_ranks_skip_and_scale_alike(stage, fused, clip):
    ranks.run(scaling.check_scaler, stage, fused, clip)


@full
def test_overflow():
    ranks.run(scaling.check_overflow, 3)


@slow
def test_scaler_refuses_gradients_that_are_not_reduced():
    for message in ranks.run(scaling.check_partial):
        assert "under no_sync that are not reduced yet" in message


# --- refusals


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("bf-16", ValueError, "precision='bf-16': expected 'bf16', 'fp16' or a zero_fx.Precision"),
        (torch.bfloat16, TypeError, "expected 'bf16', 'fp16', a zero_fx.Precision or None"),
    ],
)
def test_what_the_option_may_not_be(value, error, message):
    with pytest.raises(error, match=message):
        Config(precision=value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compute": torch.int8}, ValueError, r"compute=torch.int8: expected torch.bfloat16 or torch.float16"),
        ({"compute": torch.float32}, ValueError, "to compute in the parameters' own dtype leave precision out"),
        ({"reduce": torch.float16}, ValueError, "expected torch.float32 or torch.bfloat16"),
        ({"output": torch.int32}, ValueError, "expected a floating-point dtype, or None"),
        ({"keep_fp32": "norm"}, TypeError, "expected a tuple"),
        ({"keep_fp32": (int,)}, TypeError, "expected a type of module"),
    ],
)
def test_what_a_precision_may_not_be(options, error, message):
    with pytest.raises(error, match=message):
        Precision(**options)


def test_names_stand_for_a_precision():
    assert Config(precision="bf16").precision == Precision() and Config(precision="fp16").precision.compute == torch.float16
    assert Config().precision is None


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


def refused(model, message, **options):
    with pytest.raises(ValueError, match=message):
        zero_fx.compile(model, lowering="eager", precision=Precision(**options))


def test_what_a_model_may_not_be(alone):
    refused(Parts(), "'haed', which matches no module of the model; near are 'head'", keep_fp32=("haed",))
    refused(Parts(), "RMSNorm, which matches no module of the model; near are 'LayerNorm'", keep_fp32=(nn.RMSNorm,))
    refused(Parts().bfloat16(), "nothing to cast to torch.bfloat16: no float32 parameter .*dtypes: torch.bfloat16")
    refused(Parts(), "nothing to cast", keep_fp32=("*",))
    tied = Parts()
    tied.head.weight = tied.body.weight
    refused(tied, "keeps 'head.weight', but it is tied to 'body.weight', which is not kept", keep_fp32=("head",))
    half = Parts()
    half.norm.half()
    refused(half, "keeps 'norm.weight', which is torch.float16", keep_fp32=("norm",))


def test_other_dtypes_stay(alone):
    model = Parts()
    model.body.bfloat16()
    zero_fx.compile(model, lowering="eager", keep_whole_below=0, precision="bf16")
    assert [param.dtype for param in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 4
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad.dtype == param.dtype for param in model.parameters())
    copied = copy.deepcopy(model)
    assert copied(torch.ones(2, 4)).dtype == torch.bfloat16


def test_casting_leaves_what_has_no_floats():
    cache, mask = [1, {"a": None}], torch.ones(2, dtype=torch.bool)
    value = {"x": (torch.ones(2), mask), "cache": cache}
    cast = cast_floats(value, torch.bfloat16)
    assert cast["cache"] is cache and cast["x"][1] is mask and cast["x"][0].dtype == torch.bfloat16
    assert cast_floats(cast, torch.bfloat16) is cast
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert cast_floats(packed, torch.float16).data.dtype == torch.float16
