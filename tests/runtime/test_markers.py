"""The operators keep their promises to the compiler (torch.library.opcheck), on a group of one rank."""

import pytest
import torch
import torch.distributed as dist

import zero_fx  # noqa: F401
from zero_fx.runtime.layout import chunk_rows, owned_rows, pad_rows

zfx = torch.ops.zero_fx


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("lifetime", ["use", "step", "whole"])
@pytest.mark.parametrize("is_local", [False, True])
def test_gather_param(group, lifetime, is_local):
    shard = torch.randn(4, 3, requires_grad=True)
    local = torch.zeros(()).expand(4, 3).detach().requires_grad_() if is_local else None
    torch.library.opcheck(zfx.gather_param.default, (shard, None, local, [4, 3], lifetime, 1, "w", group))


@pytest.mark.parametrize("lifetime", ["use", "whole"])
@pytest.mark.parametrize("is_local", [False, True])
def test_mixed_precision(group, lifetime, is_local):
    shard = torch.randn(4, 3, requires_grad=True)
    local = torch.zeros(()).expand(4, 3).detach().requires_grad_() if is_local else None
    dtypes = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    torch.library.opcheck(zfx.gather_param.default, (shard, None, local, [4, 3], lifetime, 1, "w", group), dtypes)
    full = zfx.gather_param(shard, None, local, [4, 3], lifetime, 1, "w", group, **dtypes)
    assert full.dtype == torch.bfloat16 and torch.equal(full, shard.bfloat16())
    full.sum().backward()
    grad = local.grad if is_local else shard.grad
    assert grad.dtype == torch.float32 and torch.equal(grad, torch.ones(4, 3))
    grad = torch.randn(4, 3, dtype=torch.bfloat16)
    dtypes = {"reduce_dtype": torch.float32, "shard_dtype": torch.float32}
    torch.library.opcheck(zfx.reduce_grad.default, (grad, 4, lifetime == "whole", 1, "w", group), dtypes)


@pytest.mark.parametrize("whole", [False, True])
def test_reduce_grad(group, whole):
    torch.library.opcheck(zfx.reduce_grad.default, (torch.randn(4, 3), 4, whole, 1, "w", group))


def test_collectives(group):
    shard = torch.randn(4, 3)
    checks = ("test_schema", "test_faketensor")  # autograd never sees them: they exist after partitioning only
    torch.library.opcheck(zfx.all_gather.default, (shard, 1, group, "w"), test_utils=checks)
    torch.library.opcheck(zfx.reduce_scatter.default, (shard, 1, group, "w"), test_utils=checks)
    torch.library.opcheck(zfx.all_reduce.default, (shard, group, "w"), test_utils=checks)
    started = zfx.all_gather(shard, 1, group, "w")
    torch.testing.assert_close(zfx.wait(started, shard, "w"), shard)


def test_gather_held_gathers_once_and_keeps_old_values_for_who_has_them(group):
    from zero_fx.runtime.collectives import is_held, release, without_storage

    held = without_storage((4, 3), torch.float32, "cpu")
    shard = torch.randn(4, 3)
    zfx.gather_held(held, shard, 1, group, "w")
    zfx.wait(held, shard, "w")
    assert is_held(held) and torch.equal(held, shard)
    kept = held.data
    zfx.gather_held(held, shard + 1, 1, group, "w")  # held already: no collective
    assert torch.equal(held, shard)
    release(held)
    assert not is_held(held) and held.shape == (4, 3) and torch.equal(kept, shard)
    zfx.gather_held(held, shard + 1, 1, group, "w")
    zfx.wait(held, shard, "w")
    assert torch.equal(held, shard + 1) and torch.equal(kept, shard)


def test_gradient_flows_to_the_shard_or_stays_local(group):
    shard = torch.randn(4, 3, requires_grad=True)
    local = torch.zeros(()).expand(4, 3).detach().requires_grad_()
    zfx.gather_param(shard, None, None, [4, 3], "use", 1, "w", group).sum().backward()
    assert torch.equal(shard.grad, torch.ones(4, 3))
    shard.grad = None
    for _ in range(2):
        zfx.gather_param(shard, None, local, [4, 3], "use", 1, "w", group).sum().backward()
    assert shard.grad is None and torch.equal(local.grad, torch.full((4, 3), 2.0))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 8, 101])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_rows_are_cut_as_torch_chunk_cuts_them(rows, world):
    full = torch.arange(rows)
    chunks = list(full.chunk(world)) if rows else []
    for rank in range(world):
        first, count = owned_rows(rows, world, rank)
        mine = chunks[rank] if rank < len(chunks) else full[:0]
        assert torch.equal(full[first : first + count], mine)
        assert pad_rows(mine, chunk_rows(rows, world)).shape[0] == chunk_rows(rows, world)
