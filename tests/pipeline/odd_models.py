"""Models that pass tensors between their parts in every way that a pipeline must follow. Legend: B, T, D, V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
VOCAB = 11


def tokens(rows: int = 4, length: int = 6) -> Tensor:
    """[B, T] integers."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (rows, length), generator=generator)


def mean_loss(batch: Any, output: Any) -> Tensor:
    """Mean square of the output."""
    return output.float().square().mean()


class Block(nn.Module):
    """A residual branch without its residual: [B, T, D] to [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = "full"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = torch.tanh(self.linear(self.norm(x)))
        return out if mask is None else out * mask[..., None]


class Base(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)


class ResidualInParent(Base):
    """The sum of the residual stream is made by the parent."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


class InPlaceInParent(Base):
    """The parent adds in place and works on views."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) * 1.5
        for block in self.blocks:
            h += block(h.transpose(0, 1).contiguous()).transpose(0, 1)
        h[:, 0].mul_(2.0)
        return self.head(h)


class ChangesOutputs(Base):
    """The parent changes what blocks return in place, and goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
            h += 0.5
            h.sigmoid_()
        return self.head(h)


class ParametersInParent(Base):
    """Parameters of the root, one used before all cuts, one everywhere, one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.full((VOCAB,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.position.tanh()
        h = self.embed(x) + bias
        for block in self.blocks:
            h = h + self.scale * block(h) + bias
        return self.head(h) + self.shift


class SavedInParent(Base):
    """The parent's code keeps its results for the backward pass, whole and as views."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = (self.scale * (h + block(h))).relu()
            if number == 2:
                h = h.exp().transpose(0, 1).contiguous().transpose(0, 1)
        return self.head(h)


class TiedByFunction(Base):
    """The head is a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return F.linear(h, self.embed.weight)


class OwnHead(nn.Embedding):
    """An embedding with a second method that uses its weight, and what it inherits."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)

    def attend(self, h: Tensor) -> Tensor:
        return h @ self.weight.T + super().forward(torch.zeros(1, dtype=torch.int64)).sum()


class TiedByMethod(Base):
    """The head is another method of the embedding than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = OwnHead(VOCAB, WIDTH)
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.embed.attend(h)


class SharedBlock(Base):
    """One block is called again and again, between others."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks[1:]:
            h = h + self.blocks[0](h)
            h = h + block(h)
        return self.head(h)


class SkipConnections(Base):
    """Early outputs are used late, as in a U-Net, in nests, by keyword and under ``torch.vmap``."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = (x > 2).float()
        kept = []
        for block in self.blocks[:2]:
            h = block(h, mask=mask)
            kept.append(h)
        for block in self.blocks[2:]:
            h = block(h + 0.5 * torch.vmap(torch.vmap(torch.relu))(kept.pop()), mask=mask)
        return self.head(h)


@dataclass
class State:
    """What a block of :class:`NestedOutputs` takes and gives."""

    hidden: Tensor
    memory: dict[str, Tensor]


class NestBlock(nn.Module):
    """A state to a state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: State, *, step: int) -> State:
        out = self.inner(state.hidden) / (step + 1)
        return State(out, {"last": state.hidden, "sum": state.memory["sum"] + out})


class NestedOutputs(nn.Module):
    """Blocks pass dataclasses with dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(NestBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        state = State(h, {"sum": torch.zeros_like(h)})
        for step, block in enumerate(self.blocks):
            state = block(state, step=step)
        return self.head(state.memory["sum"] + state.memory["last"])


class Attributes(Base):
    """The parent reads attributes and dtypes of its blocks, also of those that are elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).to(self.blocks[-1].linear.weight.dtype)
        for block in self.blocks:
            if block.kind == "full":
                h = h + block(h)
        return self.head(h)


class Dropouts(Base):
    """Dropout between blocks, whose result is used by all blocks, and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        for block in self.blocks:
            block.linear = nn.Sequential(block.linear, nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.drop(self.embed(x))
        h = memory
        for block in self.blocks:
            h = F.dropout(block(h), 0.3) + memory
        return self.head(h)


class LooksAtValues(Base):
    """After the second block, the code goes on according to what it computed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            h = block(h)
            if number == 1 and float(h.detach().abs().max()) > 100:
                h = h / 2
        return self.head(h)


class FrozenStart(Base):
    """The embedding and the first block do not train."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, self.blocks[0]):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Tower(nn.Module):
    """Tells its dtype by its parameters, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Towers(nn.Module):
    """Asks parts of other stages for their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.first, self.second = Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).to(self.first.dtype)
        h = self.second(self.first(h).to(self.second.dtype))
        return self.head(h.to(self.first.dtype))


class Unused(Base):
    """A block that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Rotation(nn.Module):
    """[B, T, D / 2] complex hidden states to such, from [B, T, D] real ones first, and to them at the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number = number

    def forward(self, h: Tensor) -> Tensor:
        h = torch.view_as_complex(h.unflatten(-1, (-1, 2))) if self.number == 0 else h
        turned = self.linear(torch.view_as_real(h).flatten(-2)).unflatten(-1, (-1, 2))
        h = h + torch.view_as_complex(turned)
        return torch.view_as_real(h).flatten(-2) if self.number == 3 else h


class ComplexStates(Base):
    """Hidden states between blocks are complex, and a block that does not train passes their gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rotation(number) for number in range(4))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


FOLLOWED = (
    ComplexStates,
    ResidualInParent,
    InPlaceInParent,
    ChangesOutputs,
    ParametersInParent,
    SavedInParent,
    TiedByFunction,
    TiedByMethod,
    SharedBlock,
    SkipConnections,
    NestedOutputs,
    Attributes,
    FrozenStart,
    Towers,
    Unused,
)
"""Models that can be cut anywhere and draw no random numbers."""


def build(kind: type[nn.Module]) -> nn.Module:
    """Equal on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return kind()
