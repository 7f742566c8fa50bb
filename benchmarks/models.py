"""The models that the suite trains: ordinary modules that return their loss, and their batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Workload:
    """One model with its data.

    build: makes the model; called under a fixed seed. Its forward takes a batch and returns the loss.
    batch: one rank's arguments of forward, drawn from a generator.
    blocks: class of the repeated block, by which FSDP2 and per-block compilation wrap the model.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]]
    blocks: type[nn.Module]


class Block(nn.Module):
    """Pre-norm attention and MLP of width `dim`."""

    def __init__(self, dim: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, untied head."""

    def __init__(self, layers: int, dim: int, vocab: int, seq: int):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """Patches of 4 pixels, mean pooling."""

    def __init__(self, layers: int, dim: int, size: int, classes: int = 100):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros((size // 4) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, dim // 64, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, pixels, targets):
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), targets)


class ConvBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)

    def forward(self, x):
        return x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


class ConvNet(nn.Module):
    """Residual convolutions with group normalisation."""

    def __init__(self, layers: int, channels: int, classes: int = 100):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(layers))
        self.head = nn.Linear(channels, classes)

    def forward(self, pixels, targets):
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


class Narrow(nn.Module):
    """A block of the many-small-parameters model: a two-layer MLP with a gain."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ManySmall(nn.Module):
    """Many parameters of a few thousand elements each: latency decides."""

    def __init__(self, layers: int, dim: int, classes: int = 100):
        super().__init__()
        self.blocks = nn.ModuleList(Narrow(dim) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def forward(self, x, targets):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), targets)


def text_batch(batch: int, seq: int, vocab: int):
    def draw(generator):
        tokens = torch.randint(0, vocab, (batch, seq + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def image_batch(batch: int, size: int, classes: int = 100):
    def draw(generator):
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return pixels, torch.randint(0, classes, (batch,), generator=generator)

    return draw


def vector_batch(batch: int, dim: int, classes: int = 100):
    def draw(generator):
        return torch.randn(batch, dim, generator=generator), torch.randint(0, classes, (batch,), generator=generator)

    return draw


class CausalLM(nn.Module):
    """A Hugging Face Llama that returns its loss."""

    def __init__(self, layers: int, dim: int, vocab: int, seq: int):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=dim, intermediate_size=dim * 8 // 3 // 32 * 32, num_hidden_layers=layers,
            num_attention_heads=dim // 64, num_key_value_heads=dim // 128, max_position_embeddings=seq, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama() -> Workload:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return Workload("llama", lambda: CausalLM(4, 384, 4096, 128), text_batch(4, 128, 4096), LlamaDecoderLayer)


def workload(name: str) -> Workload:
    """One of NAMES. `gpt` is the model of the published figures: about 27 million parameters."""
    if name == "llama":
        return llama()
    return {
        "gpt": Workload("gpt", lambda: GPT(6, 512, 8192, 128), text_batch(4, 128, 8192), Block),
        "vit": Workload("vit", lambda: ViT(6, 384, 32), image_batch(8, 32), Block),
        "conv": Workload("conv", lambda: ConvNet(6, 128), image_batch(4, 32), ConvBlock),
        "small": Workload("small", lambda: ManySmall(120, 48), vector_batch(64, 48), Narrow),
    }[name]


NAMES = ("gpt", "llama", "vit", "conv", "small")
