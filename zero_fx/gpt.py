"""A small GPT over bytes: the model of `zero-fx train`. Plain PyTorch that knows nothing of ZeRO."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256  # bytes
INIT_STD = 0.02
ROTARY_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """layers: blocks. dim: width of the residual stream. heads: of attention. seq: longest context, in bytes."""

    layers: int = 3
    dim: int = 128
    heads: int = 4
    seq: int = 128

    def __post_init__(self):
        for name in ("layers", "dim", "heads", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected 1 or more")
        if self.dim % (2 * self.heads):
            multiple = 2 * self.heads
            raise ValueError(
                f"dim={self.dim} with heads={self.heads}: expected a multiple of 2 * heads = {multiple}, since each "
                f"head rotates pairs of its channels; try dim={(self.dim // multiple + 1) * multiple}"
            )


class GPT(nn.Module):
    """Pre-norm transformer, causal, rotary positions, no dropout; one matrix both embeds bytes and scores them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.seq = config.seq
        self.embed = nn.Embedding(VOCAB, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        cos, sin = rotary_angles(config.seq, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(config.layers)

    def init_weights(self, layers: int) -> None:
        for name, param in self.named_parameters():
            if param.dim() < 2:
                continue  # gains of norms, which start at 1
            ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
            # 2 * layers branches add up in the residual stream; scaled so that its variance does not grow with them.
            nn.init.normal_(param, std=INIT_STD * (2 * layers) ** -0.5 if ends_branch else INIT_STD)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte: (batch, length) int64 -> (batch, length, VOCAB)."""
        length = tokens.shape[1]
        if length > self.seq:
            raise ValueError(f"got {length} bytes of context; this model was made for at most seq={self.seq}")
        hidden = self.embed(tokens)  # (batch, length, dim)
        for block in self.blocks:
            hidden = block(hidden, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(hidden), self.embed.weight)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Without `targets` (batch, length) the logits; with them the mean loss, a 0-dim tensor, in nats per byte."""
        logits = self.logits(tokens)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int, temperature: float = 1.0, generator=None) -> torch.Tensor:
        """`tokens` (batch, length) followed by `count` sampled bytes: (batch, length + count).

        Runs operator by operator, since each length would be a graph of its own. Under ZeRO it is collective: every
        rank must call it, with the same tokens and an equally seeded `generator`.
        """
        for _ in range(count):
            scores = self.logits(tokens[:, -self.seq :])[:, -1]
            if temperature > 0:
                chances = (scores.float() / temperature).softmax(-1)
                chosen = torch.multinomial(chances, 1, generator=generator)
            else:
                chosen = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens


class Block(nn.Module):
    """Attention, then the MLP, each added to the stream that it read through a norm."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config.dim, config.heads)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config.dim)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Attention(nn.Module):
    """Causal self-attention; queries and keys are rotated by their positions (arXiv 2104.09864)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, dim/heads)
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class MLP(nn.Module):
    """dim -> 4 dim -> dim."""

    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden)))


def rotary_angles(seq: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (seq, head_dim/2) of the angle by which a position turns each pair of channels."""
    rates = ROTARY_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq).float(), rates)
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channels i and i + head_dim/2 of (batch, heads, length, head_dim) together by the position's angle."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(heads.dtype)  # the angles stay float32 in mixed precision
