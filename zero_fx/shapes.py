"""Models of published sizes, on the meta device: to look at, not to train. Written plainly; only their shapes matter.

    model, args = llama(LLAMA["llama-8b"], batch=1, seq=8192)
"""

from __future__ import annotations

import dataclasses

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


# Llama 3 (arXiv 2407.21783, table 3).
LLAMA = {
    "llama-8b": LlamaSize(32, 4096, 14336, 32, 8, 128256),
    "llama-70b": LlamaSize(80, 8192, 28672, 64, 8, 128256),
    "llama-405b": LlamaSize(126, 16384, 53248, 128, 8, 128256),
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
