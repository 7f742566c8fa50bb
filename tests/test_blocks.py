"""Which blocks of a model are identical."""

from torch import nn

from zero_fx.blocks import Stack, largest_stack, shorten


class Block(nn.Module):
    def __init__(self, layer_idx: int = 0, dim: int = 4, rate: float = 0.1):
        super().__init__()
        self.layer_idx, self.rate, self.names = layer_idx, rate, ["q", "k"]
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x)


def stack_of(*blocks) -> Stack | None:
    return largest_stack(nn.Sequential(nn.Linear(2, 2), nn.Sequential(*blocks)))


def test_alike():
    assert stack_of(*[Block() for _ in range(4)]) == Stack("1", 0, 4)
    assert stack_of(*[Block(i) for i in range(4)]) == Stack("1", 0, 4), "a number that counts the blocks may differ"
    assert largest_stack(nn.ModuleList([Block(i) for i in range(3)])) == Stack("", 0, 3)


def test_not_alike():
    assert stack_of(Block(), Block(rate=0.2)) is None
    assert stack_of(Block(5), Block(3)) is None
    assert stack_of(Block(), Block().double()) is None
    assert stack_of(Block(), Block().requires_grad_(False)) is None
    assert stack_of(Block(), nn.Linear(4, 4)) is None
    shared = Block()
    assert stack_of(shared, shared, shared) is None, "one block three times has its parameters once"
    tied = [Block() for _ in range(3)]
    for block in tied:
        block.linear.weight = tied[0].linear.weight
    assert stack_of(*tied) is None
    hooked = [Block() for _ in range(3)]
    hooked[1].register_forward_hook(lambda *args: None)
    assert stack_of(*hooked) is None


def test_the_run_with_most_parameters_is_taken():
    model = nn.ModuleDict(
        {
            "small": nn.Sequential(*[Block() for _ in range(5)]),
            "large": nn.Sequential(Block(dim=8), *[Block(dim=16) for _ in range(3)], Block(dim=8)),
        }
    )
    assert largest_stack(model) == Stack("large", 1, 3)
    shorten(model, Stack("large", 1, 3), 2)
    assert [block.linear.in_features for block in model["large"]] == [8, 16, 16, 8]
