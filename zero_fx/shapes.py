"""Models of published sizes, on the meta device: to look at, not to train. Written plainly; only their shapes matter.

    model, args = build("llama-8b", batch=1, seq=8192)
"""

from __future__ import annotations

import dataclasses
import difflib

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class LlamaSize:
    """layers: blocks. dim: width of the residual stream. hidden: of the gated MLP. heads, kv_heads: of attention."""

    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int


# Llama 3 (arXiv 2407.21783, table 3). Mixtral 8x7B (arXiv 2401.04088, table 1) with one expert a layer in place of eight: the
# dense part, and what one expert adds.
LLAMA = {
    "llama-8b": LlamaSize(32, 4096, 14336, 32, 8, 128256),
    "llama-70b": LlamaSize(80, 8192, 28672, 64, 8, 128256),
    "llama-405b": LlamaSize(126, 16384, 53248, 128, 8, 128256),
    "mixtral-8x7b-dense": LlamaSize(32, 4096, 14336, 32, 8, 32000),
}


class LlamaBlock(nn.Module):
    """Pre-norm; grouped queries, rotary positions, a gated MLP; no biases."""

    def __init__(self, size: LlamaSize):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.dim // size.heads
        kv_dim = self.kv_heads * self.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)
        self.query, self.out = nn.Linear(size.dim, size.dim, bias=False), nn.Linear(size.dim, size.dim, bias=False)
        self.key, self.value = nn.Linear(size.dim, kv_dim, bias=False), nn.Linear(size.dim, kv_dim, bias=False)
        self.gate, self.up = nn.Linear(size.dim, size.hidden, bias=False), nn.Linear(size.dim, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x, cos, sin):
        normed = self.norm1(x)
        query, key, value = (
            linear(normed).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for linear, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        key, value = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (rotate(key, cos, sin), value))
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotate(x, cos, sin):
    """Turn pairs of channels by the position's angles: (batch, heads, length, channels)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(nn.Module):
    """Returns the mean loss."""

    def __init__(self, size: LlamaSize, seq: int):
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.dim), nn.Linear(size.dim, size.vocab, bias=False)
        half = size.dim // size.heads // 2
        self.register_buffer("cos", torch.empty(seq, half), persistent=False)
        self.register_buffer("sin", torch.empty(seq, half), persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)  # buffers stay fp32 in mixed precision
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def llama(size: LlamaSize, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16):
    """(model, args) on the meta device: parameters in `dtype`, tokens and targets (batch, seq)."""
    with torch.device("meta"):
        model = Llama(size, seq).to(dtype)
        tokens = torch.empty(batch, seq, dtype=torch.long)
    return model, (tokens, tokens)


@dataclasses.dataclass(frozen=True)
class TransformerSize:
    """layers: blocks. dim: width of the residual stream; the MLP is four times as wide. heads: of attention."""

    layers: int
    dim: int
    heads: int


# GPT-2 (Radford et al. 2019, table 2) and GPT-3 (arXiv 2005.14165, table 2.1).
GPT = {
    "gpt2-small": TransformerSize(12, 768, 12),
    "gpt2-medium": TransformerSize(24, 1024, 16),
    "gpt2-large": TransformerSize(36, 1280, 20),
    "gpt2-xl": TransformerSize(48, 1600, 25),
    "gpt3-175b": TransformerSize(96, 12288, 96),
}
GPT_VOCAB = 50257
VIT = {"vit-h": TransformerSize(32, 1280, 16)}  # arXiv 2010.11929, table 1
PATCH, IMAGE, CLASSES = 14, 224, 1000  # of ViT-H/14, pixels


class TransformerBlock(nn.Module):
    """Pre-norm; attention and MLP with biases, of GPT (causal) and ViT."""

    def __init__(self, size: TransformerSize, causal: bool):
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x):
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """Learned positions; one matrix both embeds tokens and scores them. Returns the mean loss."""

    def __init__(self, size: TransformerSize, seq: int):
        super().__init__()
        self.embed, self.positions = nn.Embedding(GPT_VOCAB, size.dim), nn.Embedding(seq, size.dim)
        self.blocks = nn.ModuleList(TransformerBlock(size, causal=True) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1).float(), targets.flatten())


class ViT(nn.Module):
    """A class token before the patches. Returns the mean loss."""

    def __init__(self, size: TransformerSize):
        super().__init__()
        self.patches = nn.Conv2d(3, size.dim, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.empty(1, 1, size.dim))
        self.positions = nn.Parameter(torch.empty((IMAGE // PATCH) ** 2 + 1, size.dim))
        self.blocks = nn.ModuleList(TransformerBlock(size, causal=False) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, CLASSES)

    def forward(self, pixels, targets):
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), targets)


NAMES = (*GPT, *LLAMA, *VIT)


def build(name: str, batch: int | None, seq: int | None, dtype: torch.dtype = torch.bfloat16):
    """(model, args) of one of NAMES, on the meta device. batch, seq: of one rank; None for 1, and for the context that
    the model was published with. Raises ValueError for what the model has not."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model {name!r}{hint}: expected one of {', '.join(NAMES)}, or module:function")
    for what, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise ValueError(f"{what}={value}: expected 1 or more")
    batch = batch or 1
    if name in LLAMA:
        return llama(LLAMA[name], batch, seq or 8192, dtype)
    with torch.device("meta"):
        if name in VIT:
            if seq is not None:
                raise ValueError(f"seq={seq} has no effect on {name}, whose images are {IMAGE} pixels wide")
            args = torch.empty(batch, 3, IMAGE, IMAGE, dtype=dtype), torch.empty(batch, dtype=torch.long)
            return ViT(VIT[name]).to(dtype), args
        seq = seq or (1024 if name.startswith("gpt2") else 2048)
        tokens = torch.empty(batch, seq, dtype=torch.long)
        return GPT2(GPT[name], seq).to(dtype), (tokens, tokens)
