"""Attention: PyTorch's modules, which read weights of their children themselves, and a hand-written one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .common import Case, sequences


class SelfAttention(nn.Module):
    """MultiheadAttention between two layers."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.attend = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        x = self.first(x)
        return self.attend(x, x, x)


class CrossAttention(nn.Module):
    """Keys and values of other widths: separate projection weights."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)

    def forward(self, x):
        return self.attend(x, x[..., :6], x[..., :4], need_weights=False)[0]


class Rotary(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.RMSNorm(8)
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(2) / 2), persistent=False)

    def forward(self, x):
        batch, length, _ = x.shape
        h = self.norm(x)
        q = self.turn(self.q(h).view(batch, length, 2, 4).transpose(1, 2))
        k, v = self.kv(h).view(batch, length, 2, 1, 4).unbind(2)
        k, v = self.turn(k.transpose(1, 2)), v.transpose(1, 2)
        k, v = k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, 8))

    def turn(self, x):
        angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), self.frequencies)
        cos, sin = angle.cos(), angle.sin()
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def encoder_layer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)


def dropout_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x, x.flip(1))


def eval_mode(model, optimizer, step: int) -> None:
    model.eval()


def eval_later(model, optimizer, step: int) -> None:
    model.train(step < 2)


CASES = [
    Case("multihead", SelfAttention, sequences(8)),
    Case("multihead_no_bias", lambda: SelfAttention(bias=False, add_bias_kv=True), sequences(8)),
    Case("multihead_eval", SelfAttention, sequences(8), between=eval_mode),
    Case("cross_attention", CrossAttention, sequences(8)),
    Case("rotary", Rotary, sequences(8)),
    Case("encoder_layer", encoder_layer, sequences(8)),
    Case("encoder_layer_norm_first", lambda: encoder_layer(norm_first=True), sequences(8)),
    Case("encoder_layer_eval", encoder_layer, sequences(8), between=eval_later),
    Case("encoder_layer_dropout", dropout_layer, sequences(8)),
    Case("encoder", lambda: nn.TransformerEncoder(encoder_layer(), 2), sequences(8)),
    Case("encoder_decoder", EncoderDecoder, sequences(8)),
]
