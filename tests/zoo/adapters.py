"""Frozen bases with adapters, checkpointed blocks, and parameters that are frozen or unfrozen between steps."""

from __future__ import annotations

from torch import nn
from torch.utils.checkpoint import checkpoint

from .common import Case, rows


class LoraLinear(nn.Module):
    """A frozen layer and a trainable product of two thin matrices."""

    def __init__(self, width: int, rank: int = 2):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.norm, self.lora, self.out = nn.LayerNorm(width), LoraLinear(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.out(self.lora(self.norm(x)).tanh())


class Stack(nn.Module):
    """Blocks, each checkpointed if `reentrant` is not None."""

    def __init__(self, reentrant: bool | None, freeze: tuple[str, ...] = (), dropout: float = 0.0):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        for name, param in self.named_parameters():
            if any(part in name for part in freeze):
                param.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(lambda y, block=block: self.dropout(block(y)), x, use_reentrant=self.reentrant)
        return x


class LoraOnly(nn.Module):
    """Everything but the adapters is frozen, so that the first block's input needs no gradient."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(LoraLinear(6) for _ in range(3)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x.tanh()
        return x


def unfreeze(model, optimizer, step: int) -> None:
    """From step 2 on the base is trained too."""
    if step == 2:
        base = [param for name, param in model.named_parameters() if "base" in name]
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for param in base:
            param.requires_grad_(True)
        fresh = [param for param in base if id(param) not in known]
        if fresh:
            optimizer.add_param_group({"params": fresh, "lr": 0.1})


def unfreeze_and_freeze(model, optimizer, step: int) -> None:
    unfreeze(model, optimizer, step)
    if step == 3:
        for name, param in model.named_parameters():
            param.requires_grad_("out" not in name)


def alternate(model, optimizer, step: int) -> None:
    """Another half of the parameters is trained in each step."""
    for i, param in enumerate(model.parameters()):
        param.requires_grad_(i % 2 == step % 2)


MICROS = (1, 2, 1, 2, 1)

CASES = [
    Case("lora", lambda: Stack(None), rows(6)),
    Case("lora_only", lambda: LoraOnly(None), rows(6)),
    Case("lora_checkpoint", lambda: Stack(False), rows(6), quick=True),
    Case("lora_checkpoint_reentrant", lambda: Stack(True), rows(6)),
    Case("lora_only_checkpoint", lambda: LoraOnly(False), rows(6)),
    Case("lora_only_some_whole", lambda: LoraOnly(False), rows(6), options={"keep_whole_below": 13}),
    Case("frozen_norm_checkpoint", lambda: Stack(False, freeze=("norm",)), rows(6)),
    Case("frozen_norm_reentrant", lambda: Stack(True, freeze=("norm",)), rows(6)),
    Case("checkpoint_dropout", lambda: Stack(False, dropout=0.5), rows(6)),
    Case("unfrozen_later", lambda: Stack(None), rows(6), between=unfreeze, micros=MICROS, quick=True),
    Case("unfrozen_later_checkpoint", lambda: Stack(False), rows(6), between=unfreeze, micros=MICROS),
    Case("unfrozen_and_frozen", lambda: Stack(None), rows(6), between=unfreeze_and_freeze, micros=MICROS),
    Case("alternating_halves", lambda: Stack(None), rows(6), between=alternate, micros=MICROS),
]
