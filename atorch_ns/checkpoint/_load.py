"""Loading: under any strategy, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atorch_ns.checkpoint import _rng
from atorch_ns.checkpoint._check import check_model, check_training, left_out
from atorch_ns.checkpoint._contents import (
    BUFFER,
    EXTRA_STATE,
    RNG,
    STATE,
    WEIGHT,
    extra_states,
    held_by_stages,
    state_specs,
    states_of,
)
from atorch_ns.checkpoint._folder import find
from atorch_ns.checkpoint._groups import restore_groups
from atorch_ns.checkpoint._manifest import Manifest
from atorch_ns.checkpoint._pending import lane_of
from atorch_ns.checkpoint._tensors import describe_tensors, read_tensors
from atorch_ns.checkpoint._values import decode
from atorch_ns.cluster import agree
from atorch_ns.job import OptimizerStates, Result, StateSpec, StepOptimizer, TrainingStates
from atorch_ns.torch_compat import persistent_buffers, plain_name

__all__ = ["load"]

log = logging.getLogger("atorch_ns")


def load(path: str | PathLike[str], result: Result, *, data_position: bool = True) -> dict[str, Any]:
    """Makes ``result`` go on where a checkpoint was saved; collective.

    The strategy and the number of ranks may be others than those it was saved under. Everything is checked
    before anything is changed.

    Hyperparameters (learning rates, betas, …) are those of the checkpoint, parameter by parameter. Random
    states are each rank's own. With more ranks than it was saved by, the additional ones begin states of
    their own, unless all saved ones were equal: then those are equal too.

    Reading uses torch's ``.metadata`` file, a pickle: load checkpoints of people you trust.

    Args:
        path: the folder given to ``save``, for the latest checkpoint in it, or that of one step.
        result: of ``auto_accelerate``, with the same model.
        data_position: ``False`` to begin the data anew, as one must with another global batch size.

    Returns:
        ``step``, ``extra`` as saved, ``path`` of the checkpoint, the ``world_size`` and ``strategy`` it was
        saved under, and ``notes``: what it holds that there is nothing here to restore to, or the reverse.

    Raises:
        CheckpointError: if it is missing, damaged, or of another model, optimizer, scheduler or batch size.
        RankError: if another rank failed.
    """
    lane_of(result.job).wait()
    cluster = result.job.cluster
    folder = _find(Path(path).absolute(), result)
    source = agree(
        lambda: _Source.open(folder, result, data_position=data_position),
        what="checking the checkpoint",
        distributed=cluster.distributed,
    )
    source.read(distributed=cluster.distributed)
    source.restore()
    manifest, notes = source.manifest, source.notes
    if notes and cluster.rank == 0:
        log.warning("%s: %s", folder, "; ".join(notes))
    return {
        "step": manifest.step,
        "extra": manifest.extra,
        "path": folder,
        "world_size": manifest.world_size,
        "strategy": [(part["name"], part["config"]) for part in manifest.strategy],
        "notes": notes,
    }


def _find(path: Path, result: Result) -> Path:
    """The checkpoint that rank 0 finds; collective."""
    cluster = result.job.cluster

    def look() -> str:
        return str(find(path)) if cluster.rank == 0 else ""

    found = [agree(look, what="finding the checkpoint", distributed=cluster.distributed)]
    if cluster.distributed:
        dist.broadcast_object_list(found, src=0)
    return Path(found[0])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A checkpoint that has been found to fit, and the tensors to read it into.

    Attributes:
        folder: where it is.
        manifest: what it holds besides tensors.
        result: what it is loaded into.
        states: of the result.
        weights: the tensors to fill with weights, by name.
        blank: the tensors to fill with the optimizer's states.
        rng: the same for the random states of this rank, or of rank 0.
        buffers: live.
        extras: extra states of modules, to be filled and handed to them.
        notes: what will not be restored.
        data_position: whether the position in the data is.
    """

    folder: Path
    manifest: Manifest
    result: Result
    states: TrainingStates
    weights: dict[str, torch.Tensor]
    blank: dict[str, dict[str, torch.Tensor]]
    rng: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    extras: dict[str, torch.Tensor]
    notes: list[str]
    data_position: bool

    @classmethod
    def open(cls, folder: Path, result: Result, *, data_position: bool) -> _Source:
        """Checks everything and makes room; nothing of ``result`` is changed."""
        manifest, specs = Manifest.read(folder), describe_tensors(folder)
        states = states_of(result)
        weights, job = states.weights(), result.job
        buffers, extras = persistent_buffers(job.module), extra_states(job.module)
        check_model(manifest, *(held_by_stages(job, found) for found in (weights, buffers, extras)))
        check_training(manifest, states, result, data_position=data_position)
        wanted = _wanted_specs(manifest, specs, weights)
        blank_extras = {name: _empty(specs[EXTRA_STATE + name]) for name in extras}
        return cls(
            folder=folder,
            manifest=manifest,
            result=result,
            states=states,
            weights=weights,
            blank=states.blank_states(wanted) if result.optim is not None else {},
            rng=_blank_rng(specs, _rng_source(manifest, result)),
            buffers=buffers,
            extras=blank_extras,
            notes=left_out(manifest, result, data_position=data_position),
            data_position=data_position,
        )

    def read(self, *, distributed: bool) -> None:
        """Fills all tensors; collective."""
        tensors = {WEIGHT + name: tensor for name, tensor in self.weights.items()}
        tensors |= {BUFFER + name: tensor for name, tensor in self.buffers.items()}
        tensors |= {EXTRA_STATE + name: tensor for name, tensor in self.extras.items()}
        for name, entries in self.blank.items():
            tensors |= {f"{STATE}{name}.{entry}": tensor for entry, tensor in entries.items()}
        source = _rng_source(self.manifest, self.result)
        tensors |= {f"{RNG}{source}.{kind}": tensor for kind, tensor in self.rng.items()}
        read_tensors(tensors, self.folder, distributed=distributed)

    def restore(self) -> None:
        """Puts what was read where it belongs; collective for some strategies."""
        manifest, result = self.manifest, self.result
        self.states.set_weights(self.weights)
        for path, child in result.job.module.named_modules():
            if (name := plain_name(path)) in self.extras:
                child.set_extra_state(self.extras[name])
        self._restore_optimizer()
        if manifest.scheduler is not None and result.lr_scheduler is not None:
            result.lr_scheduler.load_state_dict(decode(manifest.scheduler.state))
        if self.data_position and manifest.data is not None and result.dataloader is not None:
            result.dataloader.load_state_dict(manifest.data)
        result.train_step.num_steps = manifest.step
        _rng.restore(self.rng, result.job.device, result.job.randomness)
        rank = result.job.cluster.rank
        if rank >= manifest.world_size and len(set(manifest.rng_digests)) > 1:
            _rng.spread(rank)

    def _restore_optimizer(self) -> None:
        record, optimizer = self.manifest.optimizer, self.result.optim
        if record is None or optimizer is None:
            return
        values = {name: decode(entries) for name, entries in record.values.items()}
        self.states.set_optimizer_states(OptimizerStates(self.blank, values))
        restore_groups(record.groups, self.states.group_names(), optimizer.param_groups)
        optimizer.zero_grad()
        if isinstance(optimizer, StepOptimizer):
            optimizer.num_skipped = record.num_skipped
            if optimizer.scaler is not None and self.manifest.scaler is not None:
                optimizer.scaler.scaler.load_state_dict(decode(self.manifest.scaler))


def _wanted_specs(
    manifest: Manifest, specs: Mapping[str, StateSpec], weights: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, StateSpec]]:
    """The optimizer's tensors, in the dtypes they shall have here: what followed the weight's follows it here."""

    def here(name: str, spec: StateSpec) -> StateSpec:
        saved: torch.dtype = getattr(torch, manifest.weights[name].dtype)
        follows = spec.dtype == saved and spec.shape == manifest.weights[name].shape and name in weights
        return StateSpec(spec.shape, weights[name].dtype) if follows else spec

    return {
        name: {entry: here(name, spec) for entry, spec in entries.items()}
        for name, entries in state_specs(dict(specs)).items()
    }


def _rng_source(manifest: Manifest, result: Result) -> int:
    """Whose random states this rank reads."""
    rank = result.job.cluster.rank
    return rank if rank < manifest.world_size else 0


def _blank_rng(specs: Mapping[str, StateSpec], source: int) -> dict[str, torch.Tensor]:
    prefix = f"{RNG}{source}."
    return {key.removeprefix(prefix): _empty(spec) for key, spec in specs.items() if key.startswith(prefix)}


def _empty(spec: StateSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype)
