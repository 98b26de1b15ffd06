"""ddp: every rank holds the whole model; gradients are averaged."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch_ns.capture.nests import unique_tensors_of
from atorch_ns.cluster import Cluster
from atorch_ns.costs.collectives import DEFAULT_BUCKET_BYTES
from atorch_ns.errors import InputError, Problem, StepError
from atorch_ns.job import Job
from atorch_ns.job.batch_norm import synchronise_batch_norms
from atorch_ns.job.reducer import GradientReducer, require_dense_gradients, sparse_tables
from atorch_ns.method import Flag, Method, MethodConfig, Need, Phase
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan
from atorch_ns.text import count_noun, first_few
from atorch_ns.torch_compat import (
    SetsInside,
    after_backward,
    reduced_parameters,
    replicate,
    unreached_parameters,
)
from opt_lib._config_checks import SyncBatchNorm
from opt_lib._sharded.fully_shard import skip_sync
from opt_lib._sharded.gather import ShardsBetweenPasses, gather_for_methods
from opt_lib._sharded.idle import reduce_idle_parameters
from opt_lib._sharded.units import (
    average_ignored,
    broadcast_from_first,
    broadcast_together,
    expert_parameters,
    parameters_kept_whole,
    replicate_experts,
)


class DdpConfig(MethodConfig):
    """Arguments of ``DistributedDataParallel`` or of the project's own reducer."""

    reducer: Literal["torch", "own"] | None = Field(
        default=None,
        description="What averages gradients: own for buckets that result.reducer can watch, scale and synchronise when told, "
        "with no wrapper around the model; torch for DistributedDataParallel, which averages in the first backward pass after "
        "a forward pass of its wrapper alone. null for the buckets of own in a wrapper with the names of torch's, or torch "
        "where find_unused_parameters, static_graph or gradient_as_bucket_view is set, which are torch's.",
    )
    predivide: float | None = Field(
        default=None,
        gt=0,
        description="What reducer 'own' divides gradients by before it sums them, against overflows in 16 bits; the "
        "rest of the division by the number of ranks comes afterwards. null for all of it before, as torch does.",
    )

    find_unused_parameters: Flag | None = Field(
        default=None,
        description="Have torch look for parameters without a gradient before every backward pass (true), or "
        "never look for them (false); null to find after each pass which parameters it has not reached.",
    )
    bucket_cap_mb: float | None = Field(default=None, gt=0, description="Size of a gradient bucket, in MiB.")
    static_graph: Flag = Field(default=False, description="The graph is the same in every step.")
    gradient_as_bucket_view: Flag = Field(
        default=True, description="Gradients are views of the buckets, which saves one copy of them."
    )
    broadcast_buffers: Flag = Field(
        default=True, description="Buffers follow rank 0 at the start of every forward pass."
    )
    sync_batchnorm: SyncBatchNorm = False

    @property
    def torch_reduces(self) -> bool:
        """True if DistributedDataParallel averages gradients, chosen by name or by its own argument."""
        arguments = (
            self.find_unused_parameters is not None,
            self.static_graph,
            not self.gradient_as_bucket_view,
        )
        return self.reducer == "torch" or (self.reducer is None and any(arguments))


@final
class Ddp(Method[DdpConfig]):
    """Replicates the model and averages gradients over the ranks that see different data."""

    name = "ddp"
    aliases = ("auto_ddp",)
    phase = Phase.SHARD_DATA
    Config = DdpConfig
    provides = ("gradient_sync",)
    default_for = "gradient_sync"
    needs_process_group = True

    def needs(self, config: DdpConfig, cluster: Cluster) -> Iterable[Need]:
        """A mesh to average over."""
        return (Need("mesh", "ddp averages gradients over a group of ranks"),)

    def check(self, config: DdpConfig, cluster: Cluster, profile: Profile | None) -> list[Problem]:
        """torch's reducer takes what it knows."""
        messages = []
        if profile is not None and profile.num_trainable == 0 and config.torch_reduces:
            messages.append("torch's reducer needs a parameter that requires a gradient")
        if config.predivide is not None and config.torch_reduces:
            messages.append("torch's reducer knows no predivide")
        way = "leave out reducer: torch and arguments that are torch's"
        return [Problem(message=f"{message}; {way}", method=self.name) for message in messages]

    def plan(self, plan: Plan, config: DdpConfig) -> Plan:
        """Gradients are all-reduced."""
        return plan.changed(
            gradient_sync="all_reduce",
            sharding={"bucket_bytes": _bucket_bytes(config), "bucket_views": _bucket_views(config)},
        )

    def options(self, profile: Profile, cluster: Cluster) -> Iterable[DdpConfig]:
        """The default config on several ranks."""
        return (DdpConfig(),) if cluster.world_size > 1 else ()

    def apply(self, job: Job, config: DdpConfig) -> None:
        """Wraps the model. Collective."""
        assert job.mesh is not None
        job.place()
        if config.sync_batchnorm:
            synchronise_batch_norms(job)
        # Parts of a divided model are averaged by torch's replication, unless the own reducer is named.
        by_buckets = config.reducer == "own" or not (config.torch_reduces or job.mesh.divides_model)
        if by_buckets and not expert_parameters(job):
            _reduce_by_buckets(job, config)
            return
        if config.predivide is not None:
            raise InputError(
                "predivide applies only to ddp's own reducer, but gradients of a model with experts on several ranks are "
                "averaged by torch's. Leave out predivide or expert_parallel."
            )
        if job.mesh.divides_model:
            _replicate_parts(job, self.name)
            return
        _reduce_by_torch(job, config)


def _reduce_by_torch(job: Job, config: DdpConfig) -> None:
    assert job.mesh is not None
    if tables := sparse_tables(job.model):
        raise InputError(
            f"{first_few(list(tables.values()))} has sparse=True, so torch's DistributedDataParallel averages other gradients "
            "wrongly over gloo: leave out reducer and torch's arguments, or create it with sparse=False."
        )
    find_unused = config.find_unused_parameters
    model = DistributedDataParallel(
        job.model,
        device_ids=[job.device] if job.device.type == "cuda" else None,
        process_group=job.mesh.data_group,
        find_unused_parameters=(job.inputs.find_unused_parameters if find_unused is None else find_unused),
        bucket_cap_mb=config.bucket_cap_mb,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        **_buffer_option(config.broadcast_buffers),
    )
    if find_unused is None and not (model.find_unused_parameters or model.static_graph):
        # find_unused_parameters of torch searches every graph, and fails if a loss uses parameters itself.
        watch = _Unreached(model)
        job.explain("ddp", watch.text)
    model.register_forward_pre_hook(_narrow_gradients)
    job.wrap(model)
    job.gradients.skip_sync = model.no_sync


def _narrow_gradients(model: nn.Module, _: Any) -> None:
    # A further pass adds to gradients that were prepared in fp32, but DDP takes only its buckets' dtype.
    for parameter in model.parameters() if torch.is_grad_enabled() else ():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(parameter.dtype)


class ReplicatedModel(SetsInside, nn.Module):
    """A model of which every rank has a copy; the gradients of its parameters are averaged over the ranks.

    It has the model's methods and attributes: ``result.model.encode(x)`` does what ``model.encode(x)`` did. A
    deep copy, as for an average of weights, communicates with nobody.

    Args:
        module: the model.
        buffer_group: ranks whose buffers follow the first rank's at each forward pass; ``None`` for none.

    Attributes:
        module: the model.
    """

    inside = "module"

    def __init__(self, module: nn.Module, buffer_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.module = module
        self._buffer_group = buffer_group
        self._reducer: GradientReducer | None = None
        self._follow: Callable[[Any], None] | None = None
        self.training = module.training  # a new module is in training

    def reduce_by(self, reducer: GradientReducer, follow: Callable[[Any], None]) -> None:
        """Has :meth:`no_sync` keep gradients from ``reducer``, and ``follow`` get the outputs of methods."""
        self._reducer, self._follow = reducer, follow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        if self._buffer_group is not None:
            broadcast_together(self.module.buffers(), self._buffer_group)
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside add to this rank's gradients and communicate nothing."""
        return nullcontext() if self._reducer is None else self._reducer.no_sync()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the names of :meth:`state_dict`, which begin with ``module.``, or those of the model."""
        is_wrapped = any(name.startswith("module.") for name in state_dict)
        load = super().load_state_dict if is_wrapped else self.module.load_state_dict
        return load(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before __init__ has set it
                raise
            attribute = getattr(self.module, name)
        if self._follow is None or not inspect.ismethod(attribute):
            return attribute
        return wraps(attribute)(partial(_call_method, attribute, self._follow))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedModel:
        return ReplicatedModel(copy.deepcopy(self.module, memo), None)  # it communicates with nobody


def _call_method(
    method: Callable[..., Any], follow: Callable[[Any], None], /, *args: Any, **kwargs: Any
) -> Any:
    output = method(*args, **kwargs)
    follow(output)
    return output


class _Unreached:
    """Lets DDP's averages finish if a backward pass misses parameters. Collective, as they are."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = reduced_parameters(model)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._idle_names: dict[str, None] = {}
        self._is_queued = self._is_due = False
        model.register_forward_hook(self._watch_outputs)

    def text(self) -> str:
        """The findings so far, for the report."""
        what = "parameters that some step has not used, and whose gradients are none then: "
        return what + first_few(list(self._idle_names)) if self._idle_names else ""

    def _watch_outputs(self, model: DistributedDataParallel, inputs: Any, output: Any) -> None:
        self._is_queued = False  # also where the last backward pass has failed
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            # DDP averages in one backward pass after a forward pass outside of no_sync.
            self._is_due = True
            for tensor in unique_tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if not self._is_queued:
            if not self._is_due and self._model.require_backward_grad_sync:
                raise StepError(
                    "DistributedDataParallel averages the gradients of only one backward pass after each forward pass, but this is "
                    "another one: its gradients would stay on their ranks. Add the losses up and call backward() once, or leave "
                    "out ddp's reducer: torch."
                )
            self._is_queued = True
            after_backward(self._reduce_unreached)

    def _reduce_unreached(self) -> None:
        self._is_queued = self._is_due = False
        idle: list[torch.Tensor] = []
        # torch lists a hundred at most, so ask until none is left.
        while places := unreached_parameters(self._model):
            some = [self._parameters[index] for index in places]
            # A sum is -0.0 only if every summand is: a gradient that some rank has is never taken for none.
            torch.autograd.backward(some, [torch.full_like(parameter, -0.0) for parameter in some])
            idle += some
        # -0.0 everywhere: no rank has reached it, so that it has no gradient, as in one process.
        for parameter in idle:
            gradient = parameter.grad
            if gradient is not None and not gradient.any() and bool(gradient.signbit().all()):
                parameter.grad = None
                self._idle_names[self._names[id(parameter)]] = None


def _bucket_bytes(config: DdpConfig) -> int:
    return DEFAULT_BUCKET_BYTES if config.bucket_cap_mb is None else max(1, int(config.bucket_cap_mb * 2**20))


def _bucket_views(config: DdpConfig) -> str:
    # torch's gradients become views of its buckets when these are first reduced.
    if not config.torch_reduces:
        return "always"
    return "reduced" if config.gradient_as_bucket_view else "never"


def _reduce_by_buckets(job: Job, config: DdpConfig) -> None:
    assert job.mesh is not None
    group = job.mesh.data_group
    broadcast_from_first(job, [*job.model.parameters(), *job.model.buffers()])
    follows = config.broadcast_buffers and any(True for _ in job.model.buffers())
    # Parameters that several stages of this rank share are summed once a step instead.
    shared = parameters_kept_whole(job)
    parameters = [parameter for parameter in job.model.parameters() if parameter not in shared]
    if config.reducer is None:
        model: nn.Module = ReplicatedModel(job.model, group if follows else None)
        job.wrap(model)
    else:
        model = job.model
        if follows:
            model.register_forward_pre_hook(lambda *_: broadcast_together(model.buffers(), group))
    reducer = GradientReducer(
        model, group, parameters, bucket_bytes=_bucket_bytes(config), predivide=config.predivide
    )
    if isinstance(model, ReplicatedModel):
        model.reduce_by(reducer, partial(job.gradients.follow_call, job.module))
    if job.parts.stages:
        reducer.wait_until_told()  # micro-batches come in the order of a schedule
    job.gradients.reducer, job.gradients.skip_sync = reducer, reducer.no_sync
    job.explain(
        "ddp", f"gradients are averaged in {count_noun(reducer.num_buckets, 'bucket')} of result.reducer"
    )


def _replicate_parts(job: Job, method: str) -> None:
    """Averages gradients over the data ranks that hold the same part. Collective."""
    assert job.mesh is not None
    if job.num_data_ranks > 1:
        require_dense_gradients(job.module, method)
    replicate_experts(job)
    experts = expert_parameters(job)
    ignored_params = experts | parameters_kept_whole(job)
    scalars = {p for root in job.roots for p in root.parameters() if p.ndim == 0} - ignored_params
    if job.num_data_ranks > 1:
        for root in job.roots:
            shared = [parameter for parameter in root.parameters() if parameter not in experts]
            broadcast_from_first(job, [*shared, *root.buffers()])
            # DistributedDataParallel is wrong in a pipeline that also shards layers; this composes with both.
            replicate(root, mesh=job.mesh.data, ignored=ignored_params | scalars)  # which it refuses
        passes = [ShardsBetweenPasses(root, job) for root in job.roots]
        gather_for_methods(job, passes)
        reduce_idle_parameters(job, method, ignored_params | scalars)
    job.gradients.skip_sync = skip_sync(job.roots)
    average_ignored(job, scalars)
    job.explain(method, "torch's replicate, since ranks hold parts of the model")


def _buffer_option(value: bool) -> dict[str, Any]:
    # torch has renamed the argument, and warns of the old name.
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": value}
