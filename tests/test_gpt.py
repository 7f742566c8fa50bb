"""The demo's model: causal, tied, relative positions, and generation, compiled or not."""

import math

import pytest
import torch
import torch.distributed as dist

import zero_fx
from zero_fx.gpt import GPT, GPTConfig, rotary_angles, rotate

CONFIG = GPTConfig(layers=2, dim=16, heads=2, seq=12)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def test_a_fresh_model_knows_nothing():
    tokens = torch.randint(0, 256, (4, 12))
    assert model()(tokens, tokens.roll(1)).item() == pytest.approx(math.log(256), abs=0.05)


def test_a_byte_sees_only_those_before_it():
    gpt, tokens = model(), torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] += 1 - 2 * (changed[0, 7] == 255)
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_embedding_and_head_are_one_matrix():
    assert sum(param.numel() for param in model().parameters()) == 256 * 16 + 2 * (12 * 16 * 16 + 2 * 16) + 16


def test_rotation_depends_on_distances_only():
    cos, sin = rotary_angles(12, 8)
    query, key = torch.randn(2, 1, 1, 1, 8)
    products = rotate(query.expand(1, 1, 12, 8), cos, sin) @ rotate(key.expand(1, 1, 12, 8), cos, sin).mT
    torch.testing.assert_close(products[0, 0, 3, 1], products[0, 0, 10, 8])
    torch.testing.assert_close(products[0, 0, 5, 5], (query * key).sum())


def test_greedy_generation_takes_the_likeliest_byte():
    gpt, tokens = model(), torch.randint(0, 256, (1, 10))
    text = gpt.generate(tokens, 4, temperature=0)
    assert text.shape == (1, 14) and torch.equal(text[:, :10], tokens)
    for end in range(10, 14):  # the last one with a context cut to seq
        assert text[0, end] == gpt(text[:, max(0, end - 12) : end])[0, -1].argmax()


def test_a_compiled_model_generates_the_same(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tokens = torch.randint(0, 256, (1, 5))

    def generated(gpt) -> list[int]:
        return gpt.generate(tokens, 6, generator=torch.Generator().manual_seed(1))[0].tolist()

    plain = generated(model())
    try:
        assert generated(zero_fx.compile(model(), stage=3, lowering="eager", keep_whole_below=64)) == plain
    finally:
        dist.destroy_process_group()


def test_refusals():
    with pytest.raises(ValueError, match=r"dim=30 with heads=4: expected a multiple of 2 \* heads = 8.*try dim=32"):
        GPTConfig(dim=30, heads=4)
    with pytest.raises(ValueError, match="layers=0: expected 1 or more"):
        GPTConfig(layers=0)
    with pytest.raises(ValueError, match="13 bytes of context.*at most seq=12"):
        model()(torch.zeros(1, 13, dtype=torch.int64))
