"""Running all stages of a pipeline in one process, one after the other, and a whole model beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch_ns.pipeline import (
    CallGraph,
    CallTracer,
    HowToRun,
    StageModule,
    StageSet,
    StageSettings,
    divide_parameters,
    find_units,
    install_stages,
)
from atorch_ns.torch_compat import plain_name

CPU = torch.device("cpu")
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Passed:
    """A loss and every gradient, by the names of the user's model; ``None`` for no gradient."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]


def trace(model: nn.Module, batch: Any, loss: Loss | None = None, **units: Any) -> CallGraph:
    """The calls of a model."""
    return CallTracer(model, find_units(model, **units), CPU).trace(batch, HowToRun(loss_func=loss))


def whole_pass(model: nn.Module, batch: Any, loss: Loss) -> Passed:
    """Forward and backward of the model as it is."""
    model.zero_grad()
    value = loss(batch, model(batch))
    value.backward()
    return Passed(value.detach(), {name: p.grad for name, p in model.named_parameters()})


def chain_pass(
    model: nn.Module, batch: Any, loss: Loss, cuts: Sequence[int], *, on_rank: int = 1, **units: Any
) -> Passed:
    """Forward and backward of copies of the model cut into stages; ``on_rank`` stages on each rank, in turn."""
    num_ranks = (len(cuts) + 1) // on_rank
    rank_of = [stage % num_ranks for stage in range(len(cuts) + 1)]
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]
    stages: dict[int, StageModule] = {}
    for rank, whole in enumerate(copies):
        found = find_units(whole, **units)
        tracer = CallTracer(whole, found, CPU)
        how = HowToRun(loss_func=loss)
        graph = tracer.trace(batch, how)
        division = divide_parameters(whole, found, graph, cuts, rank_of=rank_of)
        made = install_stages(
            whole, found, division, rank, settings=StageSettings(device=CPU, model_input_format=None)
        )
        stage_set = StageSet(
            made,
            cuts,
            rank_of,
            graph.paths,
            trace=lambda b, *_, t=tracer, h=how: t.trace(b, h),
            draw_seed=lambda: 7,
        )
        stage_set.begin([batch], lambda _, micro_batch, output: loss(micro_batch, output))
        stages.update((stage.number, stage) for stage in made)
    value = _forward_backward([stages[number] for number in range(len(stages))])
    return Passed(value, _sum_of_gradients(model, copies))


def _forward_backward(stages: Sequence[StageModule]) -> torch.Tensor:
    received: list[torch.Tensor] = []
    links: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    for stage in stages:
        sent = stage(*received, index=0)
        links.append((received, (sent,) if stage.is_last else sent))
        received = [t.detach().requires_grad_(t.requires_grad) for t in links[-1][1]]
    grads: list[Any] = [None]
    for inputs, outputs in reversed(links):
        pairs = [(t, g) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
    return links[-1][1][0].detach().reshape(())


def _sum_of_gradients(model: nn.Module, copies: Sequence[nn.Module]) -> dict[str, torch.Tensor | None]:
    total: dict[str, torch.Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for part in copies:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                before = total[plain_name(name)]
                total[plain_name(name)] = parameter.grad if before is None else before + parameter.grad
    return total


def assert_same(whole: Passed, chain: Passed) -> None:
    """Equal losses and gradients, and gradients for the same parameters."""
    torch.testing.assert_close(chain.loss, whole.loss)
    assert whole.grads.keys() == chain.grads.keys()
    for name, grad in whole.grads.items():
        found = chain.grads[name]
        assert (grad is None) == (found is None or not found.any()) or grad is not None, name
        if grad is not None:
            assert found is not None, f"{name} has no gradient"
            torch.testing.assert_close(found, grad, msg=lambda text, name=name: f"{name}: {text}")
