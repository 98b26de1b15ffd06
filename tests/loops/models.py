"""Pieces of models: blocks of one width, and what users do to a model before they train it."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

WIDTH: Final = 16
_ROWS: Final = 8
"""Of tables that values are looked up in."""


class Plain(nn.Module):
    """Two products, which ranks of tensor parallelism can divide, times a number that loops set."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return x + self.strength * hidden


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def rows_of(x: Tensor) -> Tensor:
    """[B] a row of a table for each sample."""
    return (x.detach().sum(-1).abs() * 10).long() % _ROWS


class Lookup(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(_ROWS, WIDTH, **options), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x) + self.table(rows_of(x)))


class Renormalised(Lookup):
    """The forward pass writes rows of a weight."""

    def __init__(self) -> None:
        super().__init__(max_norm=1.0)


class Clamped(Plain):
    """The forward pass writes a weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Alias(Plain):
    """A buffer shares the storage of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", self.down.weight.data, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        return super().forward(x) + 0.1 * (x @ self.seen.sum(1, keepdim=True))


class Scaled(Plain):
    """A constant and a trained number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.scale * (super().forward(x) - x)


class Boxed:
    """What a block gives that is not a tensor and no container that torch knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxes(Plain):
    def forward(self, x: Any) -> Any:
        return Boxed(super().forward(x))


class Dictionaries(Plain):
    def forward(self, x: Any) -> Any:
        return {"hidden": super().forward(x)}


class Pairs(Plain):
    def forward(self, x: Any) -> Any:
        return super().forward(x), None


class Adapted(Single):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.into, self.out = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x) + self.out(self.into(x)))


class Recomputed(Plain):
    """The user's own recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Idle(Plain):
    """A layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


class Routed(Plain):
    """Some samples take another way: none at all on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = rows_of(x) == 0
        out = super().forward(x)
        return out.index_put((chosen,), torch.tanh(self.other(x[chosen])))


class Functional(nn.Module):
    """A layer whose weights are read and that is never called, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x @ self.mix, self.layer.weight, self.layer.bias))


class InPlace(Plain):
    """Results of operators are changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.9).add_(0.01)


class WeightNormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.down)


class Pruned(Plain):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.down, "weight", amount=0.5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x.unsqueeze(1))[0].squeeze(1)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x.view(len(x), 2, -1)).flatten(1))


class Odd(nn.Module):
    """Sizes that ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH - 1), nn.Linear(2 * WIDTH - 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Sparse(Lookup):
    """Gradients of the table that hold the rows that were used."""

    def __init__(self) -> None:
        super().__init__(sparse=True)


class Attending(nn.Module):
    """Attention over four tokens of a sample."""

    def __init__(self) -> None:
        super().__init__()
        # The bias of keys has no gradient but rounding's.
        self.attention = nn.MultiheadAttention(WIDTH // 4, 2, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(len(x), 4, WIDTH // 4)
        return x + self.attention(tokens, tokens, tokens, need_weights=False)[0].reshape(x.shape)


class Repeated(Plain):
    """Its layers are called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Listed(nn.Module):
    """Parameters in lists and dictionaries of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2))
        self.shifts = nn.ParameterDict({"first": nn.Parameter(torch.zeros(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x * self.scales[0] + self.shifts["first"]) * self.scales[1]


BLOCKS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "plain": Plain,
    "single": Single,
    "norm": Normed,
    "lookup": Lookup,
    "renormalised": Renormalised,
    "clamped": Clamped,
    "alias": Alias,
    "scaled": Scaled,
    "boxes": Boxes,
    "dictionaries": Dictionaries,
    "pairs": Pairs,
    "adapted": Adapted,
    "recomputed": Recomputed,
    "idle": Idle,
    "routed": Routed,
    "functional": Functional,
    "in place": InPlace,
    "weight norm": WeightNormed,
    "pruned": Pruned,
    "recurrent": Recurrent,
    "convolved": Convolved,
    "odd": Odd,
    "sparse": Sparse,
    "attention": Attending,
    "repeated": Repeated,
    "lists": Listed,
}


def unboxed(value: Any) -> Any:
    """The tensor of what a block gives."""
    if isinstance(value, Boxed):
        return value.value
    if isinstance(value, dict):
        return value["hidden"]
    return value[0] if isinstance(value, tuple) else value


class Net(nn.Module):
    """Blocks one after the other, and a head that a method beside ``forward`` uses too."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.detached = False

    def encode(self, x: Tensor) -> Tensor:
        """What the first block makes of samples."""
        hidden: Tensor = unboxed(self.blocks[0](x))
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        if self.detached:
            x = x.detach()
        for block in self.blocks[1:]:
            x = unboxed(block(x))
        out: Tensor = self.head(x)
        return out


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _halve_in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def tie(net: Net) -> None:
    """The last block's first matrix is the first block's of that shape."""
    matrices = [
        (module, name)
        for module in net.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.shape == net.head.weight.shape and weight.requires_grad
    ]
    (source, source_name), (target, target_name) = matrices[0], matrices[-1]
    setattr(target, target_name, getattr(source, source_name))


def detach(net: Net) -> None:
    net.detached = True


def hook_gradients(net: Net) -> None:
    net.head.weight.register_hook(_halve)


def hook_sums(net: Net) -> None:
    net.head.weight.register_post_accumulate_grad_hook(_halve_in_place)


def hook_outputs(net: Net) -> None:
    net.blocks[0].register_forward_hook(_double_output)


def _double_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 2 if isinstance(output, Tensor) else None


def hook_backward(net: Net) -> None:
    net.head.register_full_backward_hook(_halve_input)


def _halve_input(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in of_inputs)


def freeze_first(net: Net) -> None:
    net.blocks[0].requires_grad_(False)


def freeze_biases(net: Net) -> None:
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(False)


def share_block(net: Net) -> None:
    net.blocks[-1] = net.blocks[0]


def hook_inputs(net: Net) -> None:
    net.register_forward_pre_hook(_double_inputs)


def _double_inputs(module: nn.Module, inputs: Any) -> Any:
    return tuple(2 * x for x in inputs)


def replace_forward(net: Net) -> None:
    """As libraries do that wrap a model."""
    plain = type(net).forward
    net.forward = types.MethodType(lambda self, x: plain(self, x) + 0.1, net)  # type: ignore[method-assign]


CHANGES: Final[Mapping[str, Callable[[Net], None]]] = {
    change.__name__: change
    for change in (
        tie,
        detach,
        hook_gradients,
        hook_sums,
        hook_outputs,
        hook_backward,
        freeze_first,
        freeze_biases,
        replace_forward,
        share_block,
        hook_inputs,
    )
}


def build(blocks: Sequence[str], changes: Sequence[str]) -> Net:
    """The model, with the same weights wherever it is built, in float64, in which rounding hides no error."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        net = Net(blocks)
    finally:
        torch.set_default_dtype(before)
    for name in changes:
        CHANGES[name](net)
    return net
