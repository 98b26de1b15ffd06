"""Units that some ranks do not call: experts and encoders that take plain data, from which no gradient leads on."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.testing.workers import run_ranks

pytestmark = pytest.mark.processes

X: Final = torch.randn(8, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ROUTES: Final = (
    [[0, 0, 1, 1, 0, 0, 2, 2]] * 2 + [[3] * 8],
    [[0, 0, 1, 1, 2, 2, 3, 3]] * 3,
    [[0, 0, 1, 1, 1, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 1, 1, 2, 2]] * 2,
    [[3, 2, 1, 0, 0, 0, 0, 0], [0] * 8, [1, 1, 0, 0, 2, 3, 2, 3]],
)
"""For each sample of a batch its expert; the first four are those of rank 0."""


class Experts(nn.Module):
    """Experts on the input, beside a layer for all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(6, 4).double() for _ in range(4))
        self.shared = nn.Linear(6, 4).double()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.shared(x)
        for place in places.unique().tolist():
            chosen = places == place
            out = out.index_add(0, chosen.nonzero()[:, 0], self.experts[place](x[chosen]))
        return out


def _train_model(routes: list[list[int]], model: Any, optimizer: Any, part: slice) -> None:
    for x, places in zip(X, routes, strict=False):
        optimizer.zero_grad()
        model(x[part], torch.tensor(places)[part]).square().mean().backward()
        optimizer.step()


def _on_ranks(strategy: str) -> list[dict[str, Tensor]]:
    first = 4 * torch.distributed.get_rank()
    found = []
    for routes in ROUTES:
        _, result, _ = auto_accelerate(
            Experts(),
            torch.optim.SGD,
            optim_args={"lr": 0.1},
            sample_batch=(X[0], torch.zeros(8, dtype=torch.long)),
            model_input_format="unpack_sequence",
            load_strategy=[strategy],
        )
        assert result is not None
        _train_model(routes, result.model, result.optim, slice(first, first + 4))
        found.append(checkpoint.export_state_dict(result))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_ranks_may_call_different_units_with_plain_data(strategy: str) -> None:
    found = run_ranks(_on_ranks, 2, args=(strategy,), timeout_s=90)[0]
    for routes, weights in zip(ROUTES, found, strict=True):
        model = Experts()
        _train_model(routes, model, torch.optim.SGD(model.parameters(), lr=0.1), slice(0, 8))
        expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.testing.assert_close(weights, expected, msg=lambda m, r=routes: f"{r}: {m}")
