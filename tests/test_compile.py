"""Mistakes at compile and after it, in a world of one rank: each is refused with what to do."""

import copy
import pickle

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_fx


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No torchrun environment, so that compile makes its own world of one rank; and none left behind."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


def compiled(model, **options):
    return zero_fx.compile(model, **{"lowering": "eager", "keep_whole_below": 0} | options)


def train(model, optimizer, x=None):
    loss = model(torch.ones(2, 4) if x is None else x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_world_of_one_without_torchrun():
    model = compiled(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = [train(model, optimizer) for _ in range(4)]
    assert dist.get_world_size() == 1 and losses == sorted(losses, reverse=True)


def test_same_object_and_names():
    model = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 2))
    names = [name for name, _ in model.named_parameters()]
    assert compiled(model) is model
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    assert type(model).__name__ == "Sequential" and isinstance(model[0], nn.Linear)


def test_unknown_stage_and_option():
    with pytest.raises(ValueError, match="stage=5: expected 0, 1, 2 or 3"):
        zero_fx.compile(nn.Linear(4, 3), stage=5)
    with pytest.raises(TypeError, match="no option 'offlaod'"):
        zero_fx.compile(nn.Linear(4, 3), offlaod="cpu")


def test_not_a_module():
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got function"):
        zero_fx.compile(lambda x: x)


def test_compiled_twice():
    model = nn.Sequential(nn.Linear(4, 3))
    compiled(model)
    with pytest.raises(ValueError, match="this model was compiled by zero_fx before"):
        compiled(model)
    with pytest.raises(ValueError, match="submodule 'inner' belongs to a model that was compiled"):
        compiled(nn.ModuleDict({"inner": model[0]}))


def test_wrapped_models():
    with pytest.raises(ValueError, match="given to torch.compile"):
        compiled(torch.compile(nn.Linear(4, 3)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_dtypes_that_cannot_be_trained(dtype):
    model = nn.Linear(4, 3)
    model.extra = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"parameter 'extra' has dtype {dtype}"):
        compiled(model)


def test_sparse_gradients():
    with pytest.raises(ValueError, match="sparse=True"):
        compiled(nn.Sequential(nn.Embedding(4, 3, sparse=True)))


def test_lazy_parameters():
    with pytest.raises(ValueError, match="parameter 'weight' is lazy"):
        compiled(nn.LazyLinear(3))


def test_a_stale_optimizer_raises_and_says_what_to_do():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(model)
    model(torch.ones(2, 4)).sum().backward()
    for action in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(RuntimeError, match=r"'weight' from before zero_fx.compile.*optimizer=optimizer"):
            action()


def test_an_optimizer_that_is_passed_goes_on():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "weight_decay": 0.0}])
    compiled(model, optimizer=optimizer)
    assert [group["params"] for group in optimizer.param_groups] == [[p] for p in model.parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[1]["weight_decay"] == 0.0
    before = zero_fx.full_state_dict(model)
    train(model, optimizer)
    assert all(not torch.equal(before[name], now) for name, now in zero_fx.full_state_dict(model).items())


def test_optimizers_that_do_not_fit():
    with pytest.raises(ValueError, match="holds no parameter of this model"):
        compiled(nn.Linear(4, 3), optimizer=torch.optim.SGD(nn.Linear(4, 3).parameters(), 0.1))
    with pytest.raises(TypeError, match="expected a torch.optim.Optimizer"):
        compiled(nn.Linear(4, 3), optimizer="adam")


def test_an_optimizer_that_was_stepped_keeps_its_momenta():
    torch.manual_seed(0)
    plain_model = nn.Linear(4, 3)
    model = copy.deepcopy(plain_model)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (plain_model, model)]
    for m, optimizer in zip((plain_model, model), optimizers):
        train(m, optimizer)
    compiled(model, optimizer=optimizers[1])
    for m, optimizer in zip((plain_model, model), optimizers):
        train(m, optimizer)
        train(m, optimizer)
    for name, value in zero_fx.full_state_dict(model).items():
        torch.testing.assert_close(value, plain_model.state_dict()[name])


def test_a_stale_parameter_in_other_code():
    model = nn.Linear(4, 3)
    weight = model.weight
    compiled(model)
    with pytest.raises(RuntimeError, match="parameter 'weight' from before zero_fx.compile"):
        torch.ones(2, 4) @ weight.t()


def test_parameters_added_or_replaced_after_compile():
    model = compiled(nn.Sequential(nn.Linear(4, 3)))
    model.add_module("extra", nn.Linear(3, 2))
    with pytest.raises(ValueError, match="parameter 'weight' of a Linear was added or replaced after"):
        model(torch.ones(2, 4))
    model = compiled(nn.Sequential(nn.Linear(4, 3)))
    model[0].weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match="parameter 'weight' of a Linear was added or replaced after"):
        model(torch.ones(2, 4))


def test_a_weight_edited_in_forward():
    class Masked(nn.Linear):
        def forward(self, x):
            self.weight.data.mul_(0.5)
            return super().forward(x)

    model = compiled(Masked(4, 3), stage=3)
    with pytest.raises(Exception, match="forward edits parameter 'weight' in place"):
        model(torch.ones(2, 4))


def test_moving_and_casting_after_compile():
    model = compiled(nn.Sequential(nn.Linear(4, 3)))
    assert model.to("cpu").float() is model
    with pytest.raises(RuntimeError, match="'0.weight' would change from torch.float32"):
        model.to(torch.bfloat16)


def test_no_sync_nested_and_left_by_an_exception():
    model = compiled(nn.Linear(4, 3), stage=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.no_sync():
        with pytest.raises(RuntimeError, match="already active"), model.no_sync():
            pass
        assert not model._zero_fx_model.is_syncing
    with pytest.raises(ZeroDivisionError), model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
        raise ZeroDivisionError
    optimizer.zero_grad()  # drops the gradient of the failed micro-batch, as without zero_fx
    reference = copy.deepcopy(plain(model))
    loss = reference(torch.ones(2, 4)).square().sum()
    loss.backward()
    model(torch.ones(2, 4)).square().sum().backward()
    torch.testing.assert_close(model._parameters["weight"].grad.full_tensor(), reference.weight.grad)


def test_clipping_inside_no_sync():
    model = compiled(nn.Linear(4, 3), stage=1)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="called while gradients of micro-batches under no_sync are not reduced"):
            model.clip_grad_norm_(1.0)


def step_between_micro_batches(rank, world):
    model = compiled(nn.Linear(4, 3), stage=1)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model._parameters["weight"].add_(1.0)
        with pytest.raises(RuntimeError, match="'weight' changed between micro-batches"):
            model(torch.ones(2, 4))


def test_a_step_between_micro_batches():
    """With one rank nothing is gathered, so that nothing can be out of date."""
    ranks.run(step_between_micro_batches)


def test_pickling_is_refused_with_the_way_to_save():
    model = compiled(nn.Linear(4, 3))
    with pytest.raises(pickle.PicklingError, match="zero_fx.full_state_dict"):
        pickle.dumps(model)


def test_full_state_dict_and_back():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compiled(model)
    full = zero_fx.full_state_dict(model)
    assert list(full) == list(values) and all(type(t) is torch.Tensor for t in full.values())
    for name, tensor in full.items():
        torch.testing.assert_close(tensor, values[name])
    assert full["0.weight"].data_ptr() == full["1.weight"].data_ptr()
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in full.items()})
    assert torch.equal(zero_fx.full_state_dict(model)["0.weight"], torch.ones(5, 3))
    with pytest.raises(TypeError, match="expected a model that zero_fx.compile returned"):
        zero_fx.full_state_dict(nn.Linear(2, 2))


def test_the_mesh_must_fit():
    with pytest.raises(TypeError, match="expected a torch.distributed.device_mesh.DeviceMesh"):
        compiled(nn.Linear(4, 3), mesh="dp")
    compiled(nn.Linear(4, 3))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1))
    with pytest.raises(ValueError, match="mesh has 2 dimensions"):
        compiled(nn.Linear(4, 3), mesh=mesh)


def test_a_model_without_parameters():
    assert compiled(nn.ReLU())(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_are_changed_through_attributes_from_outside(stage):
    model = compiled(nn.Linear(4, 3), stage=stage)
    (weight, bias) = model.parameters()
    nn.init.constant_(model.weight, 2.0)
    with torch.no_grad():
        model.weight.mul_(0.5)
        model.weight[0] = 3.0
        model.bias.copy_(torch.arange(3.0))
        model.bias *= torch.full((3,), 2.0)
    expected = torch.ones(3, 4)
    expected[0] = 3.0
    assert torch.equal(weight.full_tensor(), expected) and bias.full_tensor().tolist() == [0.0, 2.0, 4.0]
    model.weight.data.fill_(5.0)
    model.bias.data = torch.ones(3)
    assert model.weight.eq(5).all() and torch.equal(model.bias.detach() @ torch.ones(3), torch.tensor(3.0))
    seen = []
    model.weight.register_hook(lambda grad: seen.append(grad))
    model.bias.requires_grad = False
    model(torch.ones(2, 4)).sum().backward()
    assert len(seen) == 1 and model.weight.grad is weight.grad and bias.grad is None and not bias.requires_grad
    model.weight.grad = None
    assert weight.grad is None


def test_attributes_outside_are_the_full_values_to_compute_with():
    model = compiled(nn.Linear(4, 3))
    expected = zero_fx.full_state_dict(model)["weight"]
    x = torch.randn(2, 4, requires_grad=True)
    torch.testing.assert_close(x @ model.weight.t(), x @ expected.t())
    (x @ model.weight.t()).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), x.detach().sum(0).expand(3, 4))
    torch.testing.assert_close(nn.functional.linear(x, model.weight, model.bias), model(x))
    assert model.weight.shape == (3, 4) and type(model.weight * 1) is torch.Tensor


def test_hooks_of_modules_registered_after_the_first_call():
    model = compiled(nn.Sequential(nn.Linear(4, 3)))
    x = torch.ones(2, 4)
    before = model(x)
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    torch.testing.assert_close(model(x), before * 2)
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0,))
    torch.testing.assert_close(model(x), model(x * 0))
    handle.remove()
    assert not torch.equal(model(x), before)


def test_a_call_method_of_the_models_own():
    class Tripled(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 3

    torch.manual_seed(0)
    model = Tripled(4, 3)
    expected = model(torch.ones(2, 4))
    torch.testing.assert_close(compiled(model)(torch.ones(2, 4)), expected)


def test_functional_call_in_forward():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            new = {"weight": self.inner.weight * 2, "bias": self.inner.bias}
            return torch.func.functional_call(self.inner, new, (x,))

    model = Scaled()
    plain_model = copy.deepcopy(model)
    compiled(model)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), plain_model(x))
    model(x).sum().backward()
    plain_model(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain_model.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_load_state_dict_with_assign_copies():
    model = compiled(nn.Linear(4, 3))
    params = list(model.parameters())
    model.load_state_dict({"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, assign=True)
    assert all(a is b for a, b in zip(model.parameters(), params)) and params[0].full_tensor().eq(1).all()
    model(torch.ones(2, 4))


def plain(model):
    """An unsharded copy of a compiled Linear."""
    copy_ = nn.Linear(4, 3)
    copy_.load_state_dict(zero_fx.full_state_dict(model))
    return copy_


def test_attributes_of_parameters_stay():
    model = nn.Linear(4, 3)
    model.weight.no_decay = True
    compiled(model)
    assert [getattr(p, "no_decay", False) for p in model.parameters()] == [True, False]


def test_hooks_from_before_are_refused():
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match="parameter 'weight' has hooks.*register them after"):
        compiled(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hooks_see_the_gradient_once_also_after_micro_batches(stage):
    model = compiled(nn.Linear(4, 3, bias=False), stage=stage)
    seen = []
    (param,) = model.parameters()
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor().clone()))
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(seen[-1], torch.full((3, 4), 8.0)) and len(seen) == (1 if stage < 2 else 2)


def test_under_the_users_own_torch_compile():
    torch.manual_seed(0)
    model = compiled(nn.Linear(4, 3))
    x = torch.randn(2, 4)
    expected = plain(model)(x)
    loss_of = torch.compile(lambda x: model(x * 1.0).mul(2), backend="eager")
    torch.testing.assert_close(loss_of(x), expected * 2)
    loss_of(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
