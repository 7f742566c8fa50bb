"""Several forwards, several backwards, and gradients taken by hand."""

from __future__ import annotations

import torch
from torch import nn

from .common import Case, loss_of
from .plain import mlp


def batches(count: int):
    return lambda draw: tuple(draw.normal(4, 6) for _ in range(count))


def train_together(model, batch):
    """Several forwards, one backward."""
    losses = [loss_of(model(x)) for x in batch]
    total = sum(losses)
    total.backward()
    return total.detach()


def train_in_turn(model, batch):
    """Several forwards, then the backward of each, the first one first."""
    losses = [loss_of(model(x)) for x in batch]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def train_in_reverse(model, batch):
    losses = [loss_of(model(x)) for x in batch]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def train_one_dropped(model, batch):
    """A forward whose result is never used, between two that are."""
    first = loss_of(model(batch[0]))
    model(batch[1])
    second = loss_of(model(batch[2]))
    (first + second).backward()
    return first.detach(), second.detach()


def train_retained(model, batch):
    """Two backward passes through one graph."""
    loss = loss_of(model(batch[0]))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss.detach()


def train_by_grad(model, batch):
    """torch.autograd.grad in place of backward; a user then sets the gradients."""
    loss = loss_of(model(batch[0]))
    for param, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        param.grad = grad
    return loss.detach()


def train_partial_grad(model, batch):
    """torch.autograd.grad with respect to one weight, then backward through the same graph."""
    loss = loss_of(model(batch[0]))
    grads = torch.autograd.grad(loss, [next(iter(model.parameters()))], retain_graph=True)
    loss.backward()
    return loss.detach(), len(grads)


def train_input_grad(model, batch):
    """The gradient of the input, beside those of parameters."""
    x = batch[0].requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), x.grad


def train_input_grad_only(model, batch):
    """A saliency map between forward and backward: no parameter takes part."""
    x = batch[0].requires_grad_()
    loss = loss_of(model(x))
    (saliency,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return loss.detach(), saliency


def train_edited_output(model, batch):
    """The caller edits the output, a view, in place."""
    out = model(batch[0])
    out += 1
    out[:, 0] *= 2
    loss = loss_of(out)
    loss.backward()
    return loss.detach()


def train_between_evals(model, batch):
    """Forwards under no_grad and inference_mode around a training one."""
    with torch.no_grad():
        before = model(batch[0])
    loss = loss_of(model(batch[1]))
    with torch.inference_mode():
        between = model(batch[0]).clone()
    loss.backward()
    with torch.no_grad():
        after = model(batch[0])
    return loss.detach(), before, between.sum().item(), after


def train_accumulated(model, batch):
    """Micro-batches without no_sync: gradients add up in `.grad`."""
    losses = []
    for x in batch:
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
    return losses


class View(nn.Module):
    """Returns a view of a view."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return self.layer(x).view(-1, 4)[:, 1:]


class KeepsGrad(nn.Module):
    """Returns its input beside the output, and an intermediate that both depend on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.first(x)
        return x, hidden, self.second(hidden.tanh())


CASES = [
    Case("two_forwards", mlp, batches(2), train_together, quick=True),
    Case("three_forwards", mlp, batches(3), train_together),
    Case("backwards_in_turn", mlp, batches(2), train_in_turn),
    Case("backwards_in_reverse", mlp, batches(3), train_in_reverse),
    Case("forward_dropped", mlp, batches(3), train_one_dropped),
    Case("retained_graph", mlp, batches(1), train_retained, quick=True),
    Case("autograd_grad", mlp, batches(1), train_by_grad, micros=(1, 1, 1)),
    Case("autograd_grad_then_backward", mlp, batches(1), train_partial_grad, micros=(1, 1, 1)),
    Case("input_grad", mlp, batches(1), train_input_grad),
    Case("input_grad_only", mlp, batches(1), train_input_grad_only),
    Case("edited_view", View, batches(1), train_edited_output),
    Case("between_evals", mlp, batches(2), train_between_evals, quick=True),
    Case("no_sync_left_out", mlp, batches(2), train_accumulated),
    Case("input_returned", KeepsGrad, batches(1)),
]
