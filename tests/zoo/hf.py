"""Small Hugging Face models, built from configurations; nothing is downloaded."""

from __future__ import annotations

from torch import nn

from .common import Case, Draw, loss_of


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=None,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8,
            patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Output(nn.Module):
    """A user's module that returns a ModelOutput."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self.layer(x), hidden_states=(x, self.layer(x).tanh()))


def token_batch(draw: Draw):
    tokens = draw.tokens(37, 2, 6)
    return {"input_ids": tokens, "labels": tokens}


def image_batch(draw: Draw):
    return {"pixel_values": draw.normal(3, 3, 8, 8), "labels": draw.tokens(5, 3)}


def train_with_loss(model, batch):
    """The model's own loss, with something of the logits beside it."""
    output = model(**batch)
    loss = output.loss + 0.1 * loss_of(output.logits)
    loss.backward()
    return loss.detach()


def train_checkpointed(model, batch):
    if not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return train_with_loss(model, batch)


CASES = [
    Case("hf_llama", llama, token_batch, train_with_loss, micros=(1, 2, 1)),
    Case("hf_llama_checkpoint", llama, token_batch, train_checkpointed, micros=(1, 2, 1)),
    Case("hf_gpt2", gpt2, token_batch, train_with_loss, micros=(1, 2, 1)),
    Case("hf_vit", vit, image_batch, train_with_loss, micros=(1, 2, 1)),
    Case("hf_model_output", Output, lambda draw: draw.normal(3, 6), micros=(1, 2, 1)),
]
