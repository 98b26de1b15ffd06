"""Pipeline jobs that DeepSpeed's engine runs, and the messages between its stages.

The engine gives every floating tensor that arrives a gradient, wants it back, and runs one backward pass for
each floating tensor that leaves. So all tensors that need gradients travel as one, and everything else as
bytes, with a header that says how to take them apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from atorch_ns.capture.nests import leaves
from atorch_ns.cluster import Mesh
from atorch_ns.data import Passed, StepWork
from atorch_ns.errors import InputError, StepError
from atorch_ns.job import Job, first_loss, make_user_optimizer, on_all_stages, parameter_names
from atorch_ns.pipeline import StageModule, StageSet, signature
from opt_lib._deepspeed import zero as zero_module
from opt_lib._deepspeed.optimizer import DeepSpeedOptimizer
from opt_lib._deepspeed.zero import environment_default, require_elementwise, require_fp32, states
from opt_lib._sharded.units import broadcast_from_first


class StageLayer(nn.Module):
    """Calls a stage with the received inputs and packs its results.

    The engine runs the micro-batches of a batch forward in order, on every stage.

    Args:
        stage: the stage. Its modules are not registered here, or the engine would repeat its setup.
        parameters: the parameters that the engine may know.
        device: the device on which the stage computes.
    """

    def __init__(
        self, stage: StageModule, *, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        super().__init__()
        self.known = nn.ParameterList(parameters)
        self._stage = [stage]  # in a list, so that it is not a child
        self._device = device
        self._count = 0
        self._entries: tuple[TensorHeader, ...] | None = None

    def begin(self, *, reset: bool) -> None:
        """Announces that the next forward pass runs the first micro-batch of a batch.

        Args:
            reset: whether shapes exchanged between stages may differ from the last batch.
        """
        self._count = 0
        if reset:
            self._entries = None

    def forward(self, message: torch.Tensor | Wire) -> torch.Tensor | Wire:
        """Runs one micro-batch on the previous stage's packed output and packs the result for the next.

        Args:
            message: packed inputs; ignored on the first stage.
        """
        # The engine numbers micro-batches for the first and the last stage alone, so every stage counts.
        index = torch.tensor(self._count, device=self._device)
        self._count += 1
        # A first stage is called with a tensor, the number of the micro-batch; later ones with a tuple.
        inputs = self._unpack_wire(message) if isinstance(message, tuple) else []
        output = self._stage[0](*inputs, index=index)
        with_grad = message[0] if isinstance(message, tuple) and message[0].requires_grad else None
        if self._stage[0].is_last:
            loss: torch.Tensor = output.reshape(())
            return loss if with_grad is None else anchor(loss, with_grad)
        wire = pack([output] if isinstance(output, torch.Tensor) else output)
        # Under no_grad no gradient comes back, so the output need not depend on the received tensor.
        if with_grad is None or not wire[0].requires_grad:
            return wire
        return (anchor(wire[0], with_grad), *wire[1:])

    def _unpack_wire(self, wire: Wire) -> list[torch.Tensor]:
        if self._entries is None:
            self._entries = read_header(wire)
        return unpack(wire, self._entries)


Wire = tuple[torch.Tensor, ...]
"""The tensor with gradients, if there is one, then the header, then the bytes, if there are any."""

_ALIGNMENT = 16  # bytes; a multiple of the size of every dtype, so that a piece can be read in its own


class TensorHeader(NamedTuple):
    """One tensor: whether it needs a gradient, its dtype and its shape."""

    needs_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(tensors: Sequence[torch.Tensor]) -> Wire:
    """Packs a stage's outputs into the form that is sent to the next stage."""
    entries = [TensorHeader(t.requires_grad, t.dtype, tuple(t.shape)) for t in tensors]
    # The engine sends tensors alone: the header is JSON, one byte an element.
    text = json.dumps([(needs_grad, str(dtype), shape) for needs_grad, dtype, shape in entries])
    header = torch.tensor(list(text.encode()), dtype=torch.uint8, device=tensors[0].device)
    with_grad = [t for t, entry in zip(tensors, entries, strict=True) if entry.needs_grad]
    rest = [t for t, entry in zip(tensors, entries, strict=True) if not entry.needs_grad]
    wire = [header]
    if with_grad:
        wire.insert(0, _join_tensors(with_grad))
    if rest:
        wire.append(torch.cat([_padded_bytes(tensor) for tensor in rest]))
    return tuple(wire)


def read_header(wire: Wire) -> tuple[TensorHeader, ...]:
    """The entries that a header names; waits for the device."""
    # The header is uint8: a floating tensor in its place is the one with gradients.
    header = wire[0] if not wire[0].is_floating_point() else wire[1]
    return tuple(
        TensorHeader(needs_grad, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))
        for needs_grad, dtype, shape in json.loads(bytes(header.tolist()))
    )


def unpack(wire: Wire, entries: Sequence[TensorHeader]) -> list[torch.Tensor]:
    """Restores the tensors given to :func:`pack`. Those that need gradients are parts of one leaf."""
    with_grad = iter(_split_tensors([entry for entry in entries if entry.needs_grad], wire[0]))
    pieces = iter(_from_bytes([entry for entry in entries if not entry.needs_grad], wire[-1]))
    return [next(with_grad) if entry.needs_grad else next(pieces) for entry in entries]


def anchor(output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns ``output``, linked so that ``source`` gets a zero gradient even if it was not used."""
    result: torch.Tensor = _Anchor.apply(output, source)  # type: ignore[no-untyped-call]
    return result


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.like = (source.shape, source.dtype, source.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros((), dtype=dtype, device=device).expand(shape)  # one element's memory


def _join_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    # The engine gives gradients to floating tensors alone: complex numbers travel as two real ones.
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    if len(tensors) == 1:
        return tensors[0].contiguous()
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))  # exact for every one of them
    return torch.cat([tensor.reshape(-1).to(widest) for tensor in tensors])


def _split_tensors(entries: Sequence[TensorHeader], tensor: torch.Tensor) -> list[torch.Tensor]:
    # One tensor travels as it is, in its own dtype; without any, ``tensor`` is the header.
    pieces: Sequence[torch.Tensor] = [tensor][: len(entries)]
    shapes = [(*entry.shape, 2) if entry.dtype.is_complex else entry.shape for entry in entries]
    if len(entries) > 1:
        flat = tensor.split([math.prod(shape) for shape in shapes])
        pieces = [
            piece.to(entry.dtype.to_real()).view(shape)
            for piece, entry, shape in zip(flat, entries, shapes, strict=True)
        ]
    return [
        torch.complex(piece[..., 0], piece[..., 1]) if entry.dtype.is_complex else piece
        for piece, entry in zip(pieces, entries, strict=True)
    ]


def _padded_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT))


def _from_bytes(entries: Sequence[TensorHeader], buffer: torch.Tensor) -> list[torch.Tensor]:
    tensors, start = [], 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        tensors.append(buffer[start : start + size].view(entry.dtype).view(entry.shape))
        start += size + (-size % _ALIGNMENT)  # past the padding
    return tensors


_NEVER = 2**31  # steps between two lines that DeepSpeed prints

_PIPE, _DATA, _MODEL = ("pipeline",), ("data", "zero", "expert"), ("sequence", "tensor")
"""Axes of the mesh, outermost first, that are one axis of DeepSpeed's topology."""


def make_engine(
    job: Job,
    layer: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    zero_stage: int,
    settings: Mapping[str, Any],
) -> Any:
    """Makes a pipeline engine around ``layer``, this rank's part of the model. Collective."""
    assert job.mesh is not None
    deepspeed = zero_module.start(job.cluster.device_type)
    from deepspeed.runtime.pipe import PipelineModule

    # PipelineModule wants a layer for each stage, and builds those of its own stage alone.
    stages = [_other_stage] * job.mesh.size("pipeline")
    stages[job.mesh.axis("pipeline").get_local_rank()] = layer
    # It prints its configuration.
    with environment_default("LOCAL_RANK", job.cluster.local_rank), contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(layers=stages, topology=_build_topology(job.mesh), partition_method="uniform")
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=_engine_config(job.step.num_micro_batches, zero_stage, settings),
            dist_init_required=False,
        )
    return engine


def _other_stage(_: Any) -> Any:
    """Stands for a stage of another rank; never called."""


def _build_topology(mesh: Mesh) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    device_mesh = mesh.device_mesh
    names = device_mesh.mesh_dim_names or ()
    # The mesh's axes for each of DeepSpeed's: pipe, data, model.
    groups = [[name for name in names if name in axes] for axes in (_PIPE, _DATA, _MODEL)]
    order = [names.index(name) for group in groups for name in group]
    sizes = [torch.Size([mesh.size(name) for name in group]).numel() for group in groups]  # 1 for no axis
    num_pipe, num_data, num_model = sizes
    # Row-major over (pipe, data, model), as positions in DeepSpeed's mapping are.
    ranks = device_mesh.mesh.permute(order).flatten().tolist()
    topology = PipeModelDataParallelTopology(num_pp=num_pipe, num_mp=num_model, num_dp=num_data)
    topology.mapping = {coordinates: ranks[position] for coordinates, position in topology.mapping.items()}
    return topology


def _engine_config(num_micro_batches: int, zero_stage: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    # With the norm, steps with infinite gradients are skipped unasked.
    zero = {**settings.get("zero_optimization", {}), "stage": zero_stage}
    if zero_stage:
        zero["compute_grad_norm"] = False
    return {
        "steps_per_print": _NEVER,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,  # an optimizer of the user's
        "zero_force_ds_cpu_optimizer": False,
        **settings,
        # Sizes of batches only count samples here.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_optimization": zero,
        # Cut over tensor ranks on the way, activations would need a form of their own when nothing trains.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


@dataclass(kw_only=True)
class DsPipelineRunner:
    """Runs micro-batches by DeepSpeed's schedule (one forward, one backward), without its optimizer step.

    Attributes:
        job: the job.
        engine: DeepSpeed's pipeline engine.
        layer: this rank's stage as the engine calls it.
        stage_set: the stages, which get the micro-batches of a batch before their forward passes.
        loss_func: ``(micro-batch, output) -> loss``.
        reduce: completes the gradients after the last backward pass of a batch. Collective.
    """

    job: Job
    engine: Any
    layer: StageLayer
    stage_set: StageSet
    loss_func: Callable[[Any, Any], Any]
    reduce: Callable[[], object]
    _shapes: object = None

    def forward_backward(self, work: StepWork) -> Passed:
        """See :class:`atorch_ns.data.BatchRunner`."""
        num = len(work.micro_batches)
        losses = self._begin_pass(work, training=True)
        # The divisor of gradients. Batches with other rows than the first have other micro-batches.
        self.engine.set_train_batch_size(num * self.engine.dp_world_size)
        # Each rank keeps its share of gradients that are summed already, so that the next sum is right.
        self.job.gradients.sums.expect(self.job.module)
        self._run_schedule(_training_schedule(self.engine, num))
        self.job.gradients.sums.run(self.job.module)
        self.reduce()
        return self._broadcast_losses(losses)

    @torch.no_grad()
    def forward(self, work: StepWork) -> Passed:
        """See :class:`atorch_ns.data.BatchRunner`."""
        losses = []
        for _, alike in groupby(enumerate(work.micro_batches), lambda item: signature(item[1])):
            # Within a run all exchanges between stages have one shape.
            numbers, micro_batches = zip(*alike, strict=True)
            dummies = frozenset(index for index, number in enumerate(numbers) if number in work.dummies)
            shares = [work.shares[number] for number in numbers]
            part = replace(work, micro_batches=micro_batches, shares=shares, dummies=dummies)
            losses.append(self._begin_pass(part, training=False))
            self._run_schedule(self.engine._inference_schedule(len(numbers)))
        return self._broadcast_losses(torch.cat(losses))

    def _begin_pass(self, work: StepWork, *, training: bool) -> torch.Tensor:
        from deepspeed.runtime.pipe import p2p

        engine = self.engine
        p2p.init_process_groups(engine.grid)  # where the last engine of the process was another one
        if work.askers:
            raise StepError(f"{_BACKEND} returns no outputs. Use outputs=False, or pipeline_parallel.")
        micro_batches, num = work.micro_batches, len(work.micro_batches)
        # [m], filled on the rank of the last stage; a broadcast gives it to the others.
        losses = torch.zeros(num, device=self.job.device)

        def share_of(number: int, micro_batch: Any, output: Any) -> torch.Tensor:
            loss = first_loss(self.loss_func(micro_batch, output)).reshape(())
            if number not in work.dummies:
                losses[number] = loss.detach()
            share = work.share(number, loss) * num  # the engine divides by it
            # The engine runs the backward pass of the scaled loss itself.
            return share.as_subclass(torch.Tensor)

        # Without gradients the wire has another form, so evaluation counts as other shapes.
        shapes = (training, [_leaf_signature(leaf) for _, leaf in leaves(micro_batches[0])])
        reset = shapes != self._shapes
        self._shapes = shapes
        if reset:
            engine.reset_activation_shape()
        engine.module.train(training)
        # train_batch and eval_batch, which are not called here, begin with this.
        engine.total_loss = None
        engine._compute_loss = True
        engine.set_dataiterator(_micro_batch_indices(len(micro_batches), self.job.device))
        self.layer.begin(reset=reset)
        self.stage_set.begin(micro_batches, share_of)
        return losses

    def _run_schedule(self, schedule: Any) -> None:
        try:
            self.engine._exec_schedule(schedule)
        finally:
            self.stage_set.finish()

    def _broadcast_losses(self, losses: torch.Tensor) -> Passed:
        group = self.job.stage_group
        dist.broadcast(losses, group=group, group_src=dist.get_world_size(group) - 1)  # the last stage
        return Passed(losses=losses)


def _training_schedule(engine: Any, num_micro_batches: int) -> Any:
    from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceGrads, ReduceTiedGrads, TrainSchedule

    # train_step reduces gradients and steps, and may clip in between.
    left_out = (OptimizerStep, ReduceGrads, ReduceTiedGrads)

    class WithoutStep(TrainSchedule):  # type: ignore[misc]
        def steps(self) -> Iterator[list[Any]]:
            for commands in super().steps():
                yield [command for command in commands if not isinstance(command, left_out)]

    return WithoutStep(micro_batches=num_micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)


def _micro_batch_indices(count: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for index in range(count):
        number = torch.tensor(index, device=device)
        # The first stage takes it for data, the last for labels; both have the micro-batches themselves.
        yield number, number


def _leaf_signature(leaf: Any) -> object:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


_BACKEND = "DeepSpeed's pipeline engine"


def run_by_deepspeed(job: Job, stage_set: StageSet, *, zero_stage: int, settings: Mapping[str, Any]) -> None:
    """Lets DeepSpeed run this rank's stage and average or shard over data ranks.

    Args:
        job: the job, already cut and on its device.
        stage_set: a set of one stage.
        zero_stage: 0, or 1 to shard optimizer states over the data ranks.
        settings: more of DeepSpeed's configuration, by its keys.

    Raises:
        InputError: if there is no optimizer, without which the engine does not run.
    """
    if job.inputs.optim_func is None:
        raise InputError(f"{_BACKEND} runs only with an optimizer, so auto_accelerate needs optim_func.")
    if zero_stage:
        require_elementwise(job)
    # The engine sends only the parameters that it knows, which may be a stand-in.
    broadcast_from_first(job, [t for root in job.parts.stages for t in (*root.parameters(), *root.buffers())])

    (stage,) = stage_set.stages

    def take_over(groups: list[dict[str, Any]]) -> tuple[nn.Module, torch.optim.Optimizer]:
        make = _make_sharded_engine if zero_stage else _make_unsharded_engine
        engine, layer, optimizer = make(job, stage, groups, settings)
        job.step.make_runner = partial(_make_runner, engine, layer, stage_set, optimizer)
        return job.model, optimizer

    job.optimizer.take_over = take_over
    job.optimizer.takes_frozen = False


def _make_runner(
    engine: Any,
    layer: StageLayer,
    stage_set: StageSet,
    optimizer: torch.optim.Optimizer,
    job: Job,
    loss_func: Callable[[Any, Any], Any],
) -> DsPipelineRunner:
    reduce: Callable[[], object] = partial(_average_gradients, job, engine)
    if isinstance(optimizer, DeepSpeedOptimizer):  # it reduces when gradients are clipped or stepped
        reduce, job.gradients.clip = (lambda: None), optimizer.clip_gradients
    return DsPipelineRunner(
        job=job, engine=engine, layer=layer, stage_set=stage_set, loss_func=loss_func, reduce=reduce
    )


_Made = tuple[Any, StageLayer, torch.optim.Optimizer]  # engine, layer, and the optimizer that the user steps


def _make_unsharded_engine(
    job: Job, stage: StageModule, groups: list[dict[str, Any]], settings: Mapping[str, Any]
) -> _Made:
    """Every data rank has the optimizer states of its stage; DeepSpeed averages the gradients."""
    # A placeholder for all parameters, so these may be anything, including shards of layers.
    stand_in = nn.Parameter(torch.zeros(1, device=job.device))
    layer = StageLayer(stage, parameters=[stand_in], device=job.device)
    engine = make_engine(job, layer, torch.optim.SGD([stand_in], lr=0.0), zero_stage=0, settings=settings)
    return engine, layer, make_user_optimizer(job, groups)


def _make_sharded_engine(
    job: Job, stage: StageModule, groups: list[dict[str, Any]], settings: Mapping[str, Any]
) -> _Made:
    require_fp32(job)
    _require_all_groups(job, groups)
    layer = StageLayer(stage, parameters=list(stage.parameters()), device=job.device)
    engine = make_engine(job, layer, make_user_optimizer(job, groups), zero_stage=1, settings=settings)
    names = {parameter: aliases[0] for parameter, aliases in parameter_names(job.module).items()}
    assert job.mesh is not None
    optimizer = DeepSpeedOptimizer(
        engine,
        group=job.mesh.data_group,
        skip_if_nonfinite=job.precision.skip_if_nonfinite,
        stages=dist.group.WORLD,  # norms are over all stages
        remote=[parameter for parameter, name in names.items() if name in job.gradients.remote_norm_names],
        names=names,
    )
    job.optimizer.use_optim_backward = True
    job.make_states = partial(states, engine.optimizer)
    return engine, layer, optimizer


def _require_all_groups(job: Job, groups: list[dict[str, Any]]) -> None:
    # DeepSpeed drops groups that are empty on a stage, and would number the others differently there.
    counts = on_all_stages(job, [len(group["params"]) for group in groups])  # [stage][group]
    for stage, sizes in enumerate(counts):
        if 0 in sizes:
            raise InputError(
                f"stage {stage} of {len(counts)} has no parameter of group {sizes.index(0)} of optim_param_func, but "
                "DeepSpeed's ZeRO needs one of every group on every stage. Use zero_stage 0 or fewer stages."
            )


@torch.no_grad()
def _average_gradients(job: Job, engine: Any) -> None:
    if job.num_data_ranks == 1:
        return
    assert job.mesh is not None
    parameters = [p for root in job.parts.stages for p in root.parameters() if p.requires_grad]
    # The ranks must reduce the same gradients; a parameter that none of them used keeps none.
    use_flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=job.device)
    dist.all_reduce(use_flags, op=dist.ReduceOp.MAX, group=job.mesh.data_group)
    grads = []
    for parameter, is_used in zip(parameters, use_flags.tolist(), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # other ranks used it
        grad = parameter.grad
        # Data ranks hold the same part of a divided layer; it is averaged as a plain tensor.
        grads.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    engine.buffered_allreduce_fallback(grads=grads)
