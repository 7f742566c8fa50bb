"""Models that were built on the meta device, given their values by zero_fx.compile."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import re
import threading

import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Twin
from safetensors.torch import save_file
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD

import zero_fx
from zero_fx.shapes import GPT2, TransformerSize

OPTIONS = {"lowering": "eager", "keep_whole_below": 10, "timeout_s": 30}
SEED = 5


class Scale(nn.Module):
    """Has no reset_parameters, and a buffer that no checkpoint has."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("table", torch.arange(dim) / dim, persistent=False)

    def forward(self, x):
        return x * self.weight + self.table


class Block(nn.Module):
    """Children of its own, a parameter, and what an init of the whole block sets."""

    def __init__(self, dim: int, layer: int):
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.up, self.out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.out(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Default inits only, in the order in which modules are built: those of its constructor and of `apply` are one."""

    def __init__(self, dim: int = 12, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(20, dim, padding_idx=3)
        self.conv = nn.Sequential(nn.Conv1d(dim, dim, 3, padding=1), nn.BatchNorm1d(dim))
        self.blocks = nn.ModuleList(Block(dim, layer) for layer in range(layers))
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, 20, bias=False)

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.rnn(x)[0])


class Scaled(Net):
    """Tied weights, and a module without reset_parameters."""

    def __init__(self, dim: int = 12):
        super().__init__(dim)
        self.scale = Scale(dim)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.scale(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def init_scaled(module: nn.Module) -> None:
    """As people write it: by kinds of modules, and a block's last layer by the block's number."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, Scale):
        module.weight.data = torch.linspace(0.5, 1, len(module.weight))
        module.table.copy_(torch.arange(len(module.table)) / len(module.table))
    elif isinstance(module, Block):
        module.out.weight.data.mul_((2 * module.layer + 2) ** -0.5)
        nn.init.xavier_uniform_(module.attention.in_proj_weight)
        nn.init.ones_(module.attention.in_proj_bias)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if getattr(module, "bias", None) is not None and isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def on_meta(kind: type, *args) -> nn.Module:
    with torch.device("meta"):
        return kind(*args)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    values = zero_fx.full_state_dict(model)
    for name, expected in plain.state_dict().items():
        assert torch.equal(values[name], expected), name
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def same_as_constructor(rank: int, world: int, stage: int, sync: bool) -> None:
    """And the random numbers that follow are the same ones. Ranks other than the first are seeded otherwise, if they sync."""
    torch.manual_seed(SEED)
    plain, after = Net(), torch.rand(3)
    torch.manual_seed(SEED + (rank if sync else 0))
    model = zero_fx.compile(on_meta(Net), stage, sync_module_states=sync, **OPTIONS)
    assert rank and sync or torch.equal(torch.rand(3), after)
    assert_same(model, plain)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def same_as_apply(rank: int, world: int, stage: int, precision) -> None:
    """By a function; then both train alike, the optimizer having been built before."""
    torch.manual_seed(SEED)
    plain = Scaled()
    torch.manual_seed(SEED)
    with torch.no_grad():
        plain.apply(init_scaled)
    torch.manual_seed(SEED)
    model = on_meta(Scaled)
    optimizer = SGD(model.parameters(), lr=0.1)
    model = zero_fx.compile(model, stage, init=init_scaled, optimizer=optimizer, precision=precision, **OPTIONS)
    assert_same(model, plain)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    if precision is not None:
        return
    other = Twin(plain, copy.deepcopy(plain), optimizer=lambda params: SGD(params, lr=0.1), stage=stage, lowering="eager")
    for step in range(2):
        tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        for one in (plain, model):
            F.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()).backward()
        other.average_grads()
        for one in (other.optimizers[0], optimizer):
            one.step()
            one.zero_grad()
    values = zero_fx.full_state_dict(model)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(values[name], expected, rtol=parity.RTOL, atol=parity.ATOL)


def loaded(rank: int, world: int, stage: int, folder: str) -> None:
    """init="load": nothing has a value until it is loaded, from weights or from a checkpoint."""
    torch.manual_seed(SEED)
    plain = Net()
    before = torch.get_rng_state()
    tokens = torch.arange(12).view(2, 6)
    model = zero_fx.compile(on_meta(Net), stage, init="load", **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before), "random numbers were drawn"
    with pytest.raises(ValueError, match="'embed.weight' and"):
        model(tokens)
    values = plain.state_dict()
    zero_fx.load_full_state_dict(model, {k: v for k, v in values.items() if not k.startswith("blocks.1")}, strict=False)
    with pytest.raises(ValueError, match="'blocks.1.norm.weight' and 9 more"):
        model(tokens)
    zero_fx.load_full_state_dict(model, values)
    assert_same(model, plain)
    assert torch.isfinite(model(tokens)).all()
    zero_fx.save_checkpoint(os.path.join(folder, f"{stage}"), model, step=1)
    again = zero_fx.compile(on_meta(Net), 3 - stage, init="load", **OPTIONS)
    zero_fx.load_checkpoint(os.path.join(folder, f"{stage}"), again)
    assert_same(again, model_values(model))


def model_values(model: nn.Module) -> nn.Module:
    plain = Net()
    plain.load_state_dict(zero_fx.full_state_dict(model))
    return plain


class Reaching(nn.Module):
    """Sets what is in its blocks."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return self.blocks[0](x)

    def reset_parameters(self):
        if self.how == "data":
            self.blocks[1].weight.data.normal_()
        elif self.how == "init":
            for block in self.blocks:
                nn.init.zeros_(block.bias)
        else:
            self.blocks[2].weight.data.copy_(self.blocks[0].weight)


def reshape(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.zeros(3, 3))


def fail(module: nn.Module) -> None:
    raise RuntimeError("no disk")


def mistakes(rank: int, world: int) -> None:
    for how in ("data", "init", "copy"):
        with pytest.raises(ValueError, match=r"reset_parameters of the model \(Reaching\) writes to a tensor of shape \(6"):
            zero_fx.compile(on_meta(Reaching, how), **OPTIONS)
    with pytest.raises(ValueError, match=r"buffer 'scale.table' of a Scale .*device='cpu'.* init="):
        zero_fx.compile(on_meta(Scaled), **OPTIONS)
    with pytest.raises(ValueError, match="buffer 'scale.table'"):
        zero_fx.compile(on_meta(Scaled), init="load", **OPTIONS)
    with pytest.raises(TypeError, match="init='lode': expected None, 'load', or a function"):
        zero_fx.compile(on_meta(Net), init="lode", **OPTIONS)
    with pytest.raises(ValueError, match="has an effect on a model on the meta device only"):
        zero_fx.compile(Net(), init=init_scaled, **OPTIONS)
    with pytest.raises(ValueError, match=r"left a tensor of shape \(3, 3\), .* as '0.weight': expected a tensor of shape \(4, 2\)"):
        zero_fx.compile(nn.Sequential(nn.Linear(2, 4, device="meta")), init=reshape, **OPTIONS)
    model = on_meta(Net)
    with pytest.raises(RuntimeError, match="no disk"):
        zero_fx.compile(model, init=fail, **OPTIONS)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]), "the model was left half made"
    zero_fx.compile(model, **OPTIONS)


def some_on_meta(rank: int, world: int) -> None:
    """What has values keeps them; a parameter that nothing set is named at the first forward, and may be set by hand."""
    model = nn.Sequential(nn.Linear(4, 4), Scale(4), nn.Linear(4, 12, device="meta"))
    model[1].weight = nn.Parameter(torch.empty(4, device="meta"))
    kept = model[0].weight.detach().clone()
    model = zero_fx.compile(model, **OPTIONS)
    assert torch.equal(zero_fx.full_state_dict(model)["0.weight"], kept)
    for call in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="'1.weight' of this model, which was on the meta device, is NaN"):
            call(torch.ones(2, 4))
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(1.0)
    assert torch.isfinite(model(torch.ones(2, 4))).all()


# --- memory


def anonymous_bytes(kind: str = "RssAnon") -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(re.search(rf"{kind}:\s+(\d+) kB", file.read())[1]) * 1024


class Peak:
    """A context: `bytes` that the process came to hold in it, more than before. Pages of files that are mapped do not count:
    the system takes them back when it needs them."""

    def __enter__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be used again, uncounted
        self.before, self.bytes, self.done = anonymous_bytes(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes() - self.before)

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()


class Large(nn.Module):
    """`layers` equal blocks of 4 * dim**2 elements."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(4))) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def peak_of_init(rank: int, world: int, stage: int, init) -> tuple[float, float]:
    """(bytes that compile took at its peak, full/N + the largest block)"""
    dim, layers = 1024, 12
    zero_fx.compile(on_meta(Large, 8, 2), stage, **OPTIONS)  # what is loaded and connected at the first time
    model = on_meta(Large, dim, layers)
    with Peak() as peak:
        model = zero_fx.compile(model, stage, init=init, **OPTIONS)
    block = 4 * 4 * dim * dim
    return peak.bytes, layers * block / world + block


# --- a model of 1.3 billion parameters, from files

SIZE, SEQ = TransformerSize(24, 2048, 16), 16  # of GPT-3 XL (arXiv 2005.14165, table 2.1)
FILES = 4


def values_of(number: int, shape) -> torch.Tensor:
    """Of the parameter of this number, bfloat16."""
    generator = torch.Generator().manual_seed(number)
    return torch.empty(shape).uniform_(-0.04, 0.04, generator=generator).bfloat16()


def write_billion(folder: str) -> int:
    """Sharded safetensors with an index, as Hugging Face writes them; number of parameters."""
    params = list(on_meta(GPT2, SIZE, SEQ).named_parameters())
    where = {}
    for file in range(FILES):
        name = f"model-{file + 1:05}-of-{FILES:05}.safetensors"
        mine = {key: values_of(number, param.shape) for number, (key, param) in enumerate(params) if number % FILES == file}
        save_file(mine, os.path.join(folder, name))
        where |= dict.fromkeys(mine, name)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": where}, file)
    return sum(param.numel() for _, param in params)


def load_billion(rank: int, world: int, folder: str) -> tuple[int, int, float]:
    """(bytes at the peak of compiling and loading, the same of a training step, loss)"""
    zero_fx.compile(on_meta(Large, 8, 2), **OPTIONS)
    with Peak() as loading:
        model = zero_fx.compile(on_meta(GPT2, SIZE, SEQ), init="load", **OPTIONS)
        assert zero_fx.load_full_state_dict(model, folder) == ([], [])
    for number, state in enumerate(model._zero_fx_model.params.values()):
        rows = state.rows_of(values_of(number, state.shape)).float()
        assert torch.equal(state.param._local_tensor, rows), state.name
    with Peak() as step:
        optimizer = SGD(model.parameters(), lr=0.01)
        tokens = torch.randint(50257, (1, SEQ), generator=torch.Generator().manual_seed(rank))
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    return loading.bytes, step.bytes, loss.item()
