"""Models of published sizes have the published numbers of parameters."""

import pytest
import torch

from zero_fx.shapes import NAMES, build

PUBLISHED = {
    # As the released checkpoints count them. GPT-3: the paper says 175.0B.
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496, "llama-405b": 405_853_388_800, "vit-h": 632_045_800,
    "mixtral-8x7b-dense": 7_241_732_096,  # Mistral 7B, which it is without seven of the experts
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_published_model(name):
    model, args = build(name, 2, None)
    count = sum(p.numel() for p in model.parameters())
    assert count == PUBLISHED[name] if name in PUBLISHED else round(count / 1e9, 0) == 175
    assert all(p.is_meta for p in model.parameters()) and all(a.is_meta and len(a) == 2 for a in args)


@pytest.mark.parametrize("name", ["gpt2-small", "vit-h"])
def test_they_run(name):
    model, args = build(name, 2, None if name == "vit-h" else 8, torch.float32)
    assert model(*args).shape == ()


@pytest.mark.parametrize(
    "options, message",
    [
        (("gpt2-smal", 1, None), "did you mean 'gpt2-small'"),
        (("vit-h", 1, 8), "seq=8 has no effect on vit-h"),
        (("llama-8b", 0, None), "batch=0: expected 1 or more"),
        (("llama-8b", 1, -1), "seq=-1: expected 1 or more"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(*options)
