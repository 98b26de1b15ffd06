"""A model divided by hand, over tensor ranks and over two stages: what a job offers to methods, without theirs.

Legend: B batch, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch_ns.apply import apply_strategy
from atorch_ns.cluster import Cluster
from atorch_ns.data import Passed, StepWork
from atorch_ns.job import Inputs, Job, Result, first_loss
from atorch_ns.method import Method, MethodConfig, Phase, Registry, load_registry, resolve
from atorch_ns.sharding import Packing
from atorch_ns.sharding.collectives import copy_to, reduce_from
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import Case, SyntheticDataset, get_case
from atorch_ns.testing.parity import ADAMW

WIDTH = 32


class Gated(nn.Module):
    """``x + down(silu(gate) * up)`` of ``scale * x + shift``, with gate and up in one layer; [B, D] to [B, D]."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.gate_up = nn.Linear(WIDTH, 2 * hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.dropout(self.down(self._between(x * self.scale + self.shift)))
        # The input is whole, and each rank's gradients of scale and shift are those of its own features.
        inside = copy_to(x, self.group) * self.scale + copy_to(self.shift, self.group)
        out = reduce_from(F.linear(self._between(inside), local(self.down.weight)), self.group)
        return x + self.dropout(out + self.down.bias)

    def _between(self, x: Tensor) -> Tensor:
        both = F.linear(x, local(self.gate_up.weight), local(self.gate_up.bias))
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


class GatedNet(nn.Module):
    """Features to outputs through two blocks that share one parameter; has a buffer."""

    def __init__(self, *, hidden: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Gated(hidden, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)
        self.blocks[1].shift = self.blocks[0].shift
        self.register_buffer("counter", torch.arange(3.0))

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def local(parameter: Tensor) -> Tensor:
    """This rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def build(**options: Any) -> nn.Module:
    """Equal on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = GatedNet(**options)
        nn.init.normal_(model.blocks[0].shift, std=0.1)
    return model.train()


CASE = Case(
    name="gated",
    build=build,
    make_batch=get_case("mlp").make_batch,
    loss_func=get_case("mlp").loss_func,
    model_input_format="unpack_sequence",
    block="Gated",
)


class NoConfig(MethodConfig):
    """Nothing to set."""


@final
class HandTensor(Method[NoConfig]):
    """Divides the features inside blocks over the tensor axis."""

    name = "hand_tensor"
    phase = Phase.SHARD_LAYERS
    Config = NoConfig
    provides = ("axis:tensor",)
    default_for = "axis:tensor"
    needs_process_group = True

    def apply(self, job: Job, config: NoConfig) -> None:
        """Fused layers are packed; ``scale`` is whole and has partial gradients."""
        assert job.mesh is not None
        mesh = job.mesh.axis("tensor")
        for path, block in job.module.named_modules():
            if not isinstance(block, Gated):
                continue
            block.group = mesh.get_group()
            for name in ("gate_up.weight", "gate_up.bias"):
                whole = block.get_parameter(name)
                packing = Packing(dim=0, sizes=(whole.size(0) // 2,) * 2, ranks=mesh.size())
                job.parts.packings[f"{path}.{name}"] = packing
                setattr(block.gate_up, name.split(".")[1], _shared_out(packing.pack(whole.data), mesh, 0))
            block.down.weight = _shared_out(block.down.weight.data, mesh, 1)
            job.gradients.sums.add([f"{path}.scale"], mesh.get_group())


def _shared_out(whole: Tensor, mesh: Any, dim: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))


class Stage(nn.Module):
    """One of two halves of a :class:`GatedNet`: holds its parts, and calls the model, which has lost the others."""

    def __init__(self, model: GatedNet, index: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [model.stem, model.blocks[0]] if index == 0 else [model.blocks[1], model.head]
        )
        self._model = (model,)  # in a tuple, so that it is not part of this module

    def forward(self, x: Tensor) -> Tensor:
        """Apply the half; what travels is float32."""
        out: Tensor = self._model[0](x)
        return out.float()


@final
class HandPipeline(Method[NoConfig]):
    """Gives each of two stages its half; the other half is gone."""

    name = "hand_pipeline"
    phase = Phase.CUT
    Config = NoConfig
    provides = ("axis:pipeline",)
    default_for = "axis:pipeline"
    needs_process_group = True

    def apply(self, job: Job, config: NoConfig) -> None:
        """The parameter of both blocks is on both stages, and counted on the first."""
        group, model = job.stage_group, job.module
        assert group is not None
        assert isinstance(model, GatedNet)
        index = group.rank()
        if index == 1:
            model.blocks[1].shift = nn.Parameter(model.blocks[1].shift.data.clone())
            model.stem, model.blocks[0] = nn.Identity(), nn.Identity()
            job.gradients.remote_norm_names.add("blocks.1.shift")
        else:
            model.blocks[1], model.head = nn.Identity(), nn.Identity()
        job.gradients.sums.add(["blocks.0.shift", "blocks.1.shift"], group)
        job.parts.stages = (Stage(model, index),)
        job.step.make_runner = lambda job, loss_func: _Runner(
            job.parts.stages[0], group, loss_func, job.gradients.skip_sync
        )


class _Runner:
    """Sends every micro-batch through both stages and back, one after the other."""

    def __init__(
        self, stage: nn.Module, group: dist.ProcessGroup, loss_func: Callable[..., Any], skip_sync: Any
    ) -> None:
        self._stage, self._group, self._loss_func, self._skip_sync = stage, group, loss_func, skip_sync
        self._last = group.rank() == 1
        self._other = dist.get_process_group_ranks(group)[0 if self._last else 1]

    def forward_backward(self, work: StepWork) -> Passed:
        last = len(work.micro_batches) - 1
        losses = []
        for number in range(last + 1):
            with nullcontext() if number == last else self._skip_sync():
                losses.append(self._one(work, number))
        return self._told(losses)

    def forward(self, work: StepWork) -> Passed:
        losses = []
        for batch in work.micro_batches:
            if self._last:
                received = torch.empty(len(batch[0]), WIDTH)
                dist.recv(received, self._other, group=self._group)
                losses.append(first_loss(self._loss_func(batch, self._stage(received))).detach())
            else:
                dist.send(self._stage(batch[0]).detach(), self._other, group=self._group)
                losses.append(torch.zeros(()))
        return self._told(losses)

    def _one(self, work: StepWork, number: int) -> Tensor:
        batch = work.micro_batches[number]
        if not self._last:
            sent = self._stage(batch[0])
            dist.send(sent.detach(), self._other, group=self._group)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, self._other, group=self._group)
            sent.backward(gradient)
            return torch.zeros(())
        received = torch.empty(len(batch[0]), WIDTH)
        dist.recv(received, self._other, group=self._group)
        received.requires_grad_()
        loss = first_loss(self._loss_func(batch, self._stage(received)))
        work.share(number, loss).backward()
        assert received.grad is not None
        dist.send(received.grad, self._other, group=self._group)
        return loss.detach().float()

    def _told(self, losses: list[Tensor]) -> Passed:
        rows = torch.stack(losses)
        dist.broadcast(rows, src=dist.get_process_group_ranks(self._group)[1], group=self._group)
        return Passed(losses=rows)


def registry() -> Registry:
    """The methods of the package, with those of this file for the axes."""
    own = {"axis:tensor": HandTensor, "axis:pipeline": HandPipeline}
    others = [type(method) for method in load_registry() if method.default_for not in own]
    return Registry([*others, *own.values()])


def make(
    axes: dict[str, int],
    methods: Sequence[Any] = (),
    *,
    steps: int = 5,
    case: Case = CASE,
    optim_args: dict[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """The job on a mesh, with more methods; on all ranks."""
    cluster = Cluster.detect()
    strategy = Strategy.load([("parallel_mode", (list(axes.items()), None)), *methods])
    inputs = Inputs(
        model=case.build(),
        optim_func=torch.optim.AdamW,
        optim_args=dict(ADAMW) if optim_args is None else optim_args,
        dataset=SyntheticDataset(case, steps * 8),
        dataloader_args={"batch_size": 8},
        loss_func=case.loss_func,
        model_input_format=case.model_input_format,
        **arguments,
    )
    return apply_strategy(inputs, cluster, resolve(strategy, cluster, registry()))


def norm_of(gradients: Sequence[Tensor], norm_type: float) -> float:
    """Of all gradients as one vector."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
    return float(flat.abs().max() if norm_type == math.inf else flat.norm(norm_type))
