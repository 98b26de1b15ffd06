"""DeepSpeed's pipeline engine on the mesh of a job."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from atorch_ns.cluster import Mesh
from atorch_ns.job import Job
from opt_lib import _deepspeed

__all__ = ["make_engine"]

_NEVER = 2**31
"""Steps between two lines that DeepSpeed prints."""

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
    """A pipeline engine around this rank's stage; collective.

    Args:
        job: gives mesh, device and the number of micro-batches.
        layer: all that this rank runs of the model.
        optimizer: of parameters of ``layer``.
        zero_stage: 0 or 1.
        settings: more of DeepSpeed's configuration, by its keys.
    """
    assert job.mesh is not None
    deepspeed = _deepspeed.start(job.cluster.device_type)
    from deepspeed.runtime.pipe import PipelineModule

    stages = [_elsewhere] * job.mesh.size("pipeline")
    stages[job.mesh.axis("pipeline").get_local_rank()] = layer
    # It prints its configuration.
    with _local_rank(job.cluster.local_rank), contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(layers=stages, topology=_topology(job.mesh), partition_method="uniform")
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=_config(job.num_micro_batches, zero_stage, settings),
            dist_init_required=False,
        )
    return engine


def _elsewhere(_: Any) -> Any:
    """Stands for a stage of another rank; never called."""


def _topology(mesh: Mesh) -> Any:
    """DeepSpeed's axes pipe, data and model with the ranks as the mesh has them."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    device_mesh = mesh.device_mesh
    names = device_mesh.mesh_dim_names or ()
    groups = [[name for name in names if name in axes] for axes in (_PIPE, _DATA, _MODEL)]
    order = [names.index(name) for group in groups for name in group]
    sizes = [torch.Size([mesh.size(name) for name in group]).numel() for group in groups]
    num_pipe, num_data, num_model = sizes
    ranks = device_mesh.mesh.permute(order).flatten().tolist()
    topology = PipeModelDataParallelTopology(num_pp=num_pipe, num_mp=num_model, num_dp=num_data)
    topology.mapping = {coordinates: ranks[position] for coordinates, position in topology.mapping.items()}
    return topology


def _config(num_micro_batches: int, zero_stage: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    # With the norm, steps with infinite gradients are skipped unasked.
    zero = {**settings.get("zero_optimization", {}), "stage": zero_stage}
    if zero_stage:
        zero["compute_grad_norm"] = False
    return {
        "steps_per_print": _NEVER,
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
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


@contextlib.contextmanager
def _local_rank(rank: int) -> Iterator[None]:
    """DeepSpeed reads the local rank from the environment only."""
    name = "LOCAL_RANK"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(rank)
    try:
        yield
    finally:
        del os.environ[name]
