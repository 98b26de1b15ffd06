"""Source of a load: a checkpoint checked against a job, and the tensors of the job that it is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from atorch_ns.checkpoint.contents import (
    BUFFER,
    EXTRA_STATE,
    RNG,
    STATE,
    WEIGHT,
    class_name,
    extra_states,
    held_by_stages,
    restore_rng,
    spread_rng,
    state_specs,
    states_of,
)
from atorch_ns.checkpoint.files import check_files, check_sizes
from atorch_ns.checkpoint.manifest import (
    GroupRecord,
    Manifest,
    TensorRecord,
    check_groups,
    decode,
    restore_groups,
)
from atorch_ns.checkpoint.tensors import INDEX, describe_tensors, files_read, read_tensors
from atorch_ns.errors import CheckpointError
from atorch_ns.job import OptimizerStates, Result, StateSpec, StepOptimizer, TrainingStates
from atorch_ns.text import first_few
from atorch_ns.torch_compat import persistent_buffers, plain_name


def check_model(
    manifest: Manifest,
    weights: Mapping[str, TensorRecord],
    buffers: Mapping[str, TensorRecord],
    extra_states: Mapping[str, TensorRecord],
) -> None:
    """Compares names, shapes and kinds of dtype of the whole model here with those of the checkpoint.

    Raises:
        CheckpointError: naming the first few tensors that are missing, unexpected or different.
    """
    problems = [
        *_compare_records("parameter", manifest.weights, weights),
        *_compare_records("buffer", manifest.buffers, buffers),
        *_compare_names("extra state", manifest.extra_states.keys(), extra_states.keys()),
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint is of another model ({manifest.model_class} at step {manifest.step}):\n  "
            + "\n  ".join(problems)
        )


def check_training(
    manifest: Manifest, states: TrainingStates, result: Result, *, data_position: bool
) -> None:
    """Compares optimizer, parameter groups, scheduler and batches, where both sides have them.

    Raises:
        CheckpointError: saying what differs.
    """
    _check_optimizer(manifest, states, result)
    _check_scheduler(manifest, result)
    if data_position:
        _check_data(manifest, result)


def left_out(manifest: Manifest, result: Result, *, data_position: bool) -> list[str]:
    """States that only the checkpoint or only the job has; a sentence each."""
    optimizer = result.optim
    scaler = optimizer.scaler if isinstance(optimizer, StepOptimizer) else None
    rows: list[tuple[str, object, object]] = [
        ("optimizer", manifest.optimizer, optimizer),
        ("lr_scheduler", manifest.scheduler, result.lr_scheduler),
        ("loss scaler", manifest.scaler, scaler),
    ]
    if data_position:
        rows.append(("data position", manifest.data, result.dataloader))
    notes = []
    for what, record, present in rows:
        if record is not None and present is None:
            notes.append(f"its {what} is not used: this job has none")
        elif record is None and present is not None:
            notes.append(f"it holds no {what}: the one here begins anew")
    if manifest.world_size != result.job.cluster.world_size:
        notes.append(
            f"saved by {manifest.world_size} rank(s) and loaded by {result.job.cluster.world_size}: random numbers "
            "drawn during training (dropout) do not continue exactly"
        )
    return notes


def _check_optimizer(manifest: Manifest, states: TrainingStates, result: Result) -> None:
    record, optimizer = manifest.optimizer, result.optim
    if record is None or optimizer is None:
        return
    if record.class_name != states.optimizer_class():
        raise CheckpointError(
            f"the checkpoint holds states of {record.class_name}, but this job trains with "
            f"{states.optimizer_class()}. Use the same optimizer, or import_state_dict for the weights alone."
        )
    is_ordered = manifest.scheduler is not None and result.lr_scheduler is not None  # schedulers count groups
    names = _names_to_restore(record.groups, states, result)
    check_groups(record.groups, names, optimizer.param_groups, ordered=is_ordered)


def _names_to_restore(
    groups: Iterable[GroupRecord], states: TrainingStates, result: Result
) -> list[list[str]]:
    # Without those that are frozen and unknown to the checkpoint, whose optimizer may not have had them.
    names = {name for group in groups for name in group.params}
    parameters = result.job.module.named_parameters(remove_duplicate=False)
    names |= {plain_name(name) for name, parameter in parameters if parameter.requires_grad}
    return [[name for name in members if name in names] for members in states.group_names()]


def _check_scheduler(manifest: Manifest, result: Result) -> None:
    record, scheduler = manifest.scheduler, result.lr_scheduler
    if record is not None and scheduler is not None and record.class_name != class_name(scheduler):
        raise CheckpointError(
            f"the checkpoint holds the state of {record.class_name}, but this job has {class_name(scheduler)}. "
            "Use the same lr_scheduler_cls, or omit it and create a new scheduler after loading."
        )


def _check_data(manifest: Manifest, result: Result) -> None:
    loader, position = result.dataloader, manifest.data
    if loader is None or position is None:
        return
    if position.get("global_batch_size") != loader.global_batch_size:
        raise CheckpointError(
            f"the checkpoint counts batches of {position.get('global_batch_size')} samples, but the global batch here "
            f"has {loader.global_batch_size}, so the position in the data does not carry over. Use the batch_size "
            "it was saved with, or load(..., data_position=False) to start a new epoch."
        )


def _compare_records(
    what: str, saved_records: Mapping[str, TensorRecord], records: Mapping[str, TensorRecord]
) -> list[str]:
    problems = _compare_names(what, saved_records.keys(), records.keys())
    changes = []
    for name in records.keys() & saved_records.keys():
        shape, saved_shape = records[name].shape, saved_records[name].shape
        dtype: torch.dtype = getattr(torch, records[name].dtype)
        old_dtype: torch.dtype = getattr(torch, saved_records[name].dtype)
        if shape != saved_shape:
            changes.append(f"{name} is {shape} here and {saved_shape} in the checkpoint")
        elif (
            dtype.is_floating_point != old_dtype.is_floating_point or dtype.is_complex != old_dtype.is_complex
        ):
            changes.append(f"{name} is {dtype} here and {old_dtype} in the checkpoint")
    if changes:
        problems.append(f"{len(changes)} {what}(s) differ: {first_few(sorted(changes))}")
    return problems


def _compare_names(what: str, saved_names: Set[str], present: Set[str]) -> list[str]:
    problems = []
    if missing := present - saved_names:
        problems.append(f"{len(missing)} {what}(s) missing in the checkpoint: {first_few(sorted(missing))}")
    if extra := saved_names - present:
        problems.append(f"{len(extra)} {what}(s) that this model does not have: {first_few(sorted(extra))}")
    return problems


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that has been found to fit, and the tensors to read it into.

    Attributes:
        folder, manifest: those of the checkpoint.
        result: the job to load into.
        states: the job's weights and optimizer states by name.
        weights: tensors to fill with weights, by name.
        blank: tensors to fill with optimizer states, by parameter and entry.
        rng: tensors to fill with the random states of this rank, or of rank 0, by kind.
        buffers: live buffers, by name.
        extras: tensors to fill with extra states of modules, by path.
        notes: sentences on states that are not restored.
        data_position: whether the position in the data is restored.
        files: files that this rank will read, with the least size of each in bytes.
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
    files: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, result: Result, *, data_position: bool) -> Source:
        """Checks everything and allocates the tensors to fill. ``result`` does not change."""
        manifest = Manifest.read(folder)
        records = manifest.files or {}
        check_files(folder, records, [INDEX])  # before it is unpickled
        specs = describe_tensors(folder)
        states = states_of(result)
        weights, job = states.weights(), result.job
        buffers, extras = persistent_buffers(job.module), extra_states(job.module)
        check_model(manifest, *(held_by_stages(job, mapping) for mapping in (weights, buffers, extras)))
        check_training(manifest, states, result, data_position=data_position)
        target_specs = _wanted_specs(manifest, specs, weights)
        blank_extras = {name: _empty_tensor(specs[EXTRA_STATE + name]) for name in extras}
        source = cls(
            folder=folder,
            manifest=manifest,
            result=result,
            states=states,
            weights=weights,
            blank=states.blank_states(target_specs) if result.optim is not None else {},
            rng=_blank_rng(specs, _rng_source(manifest, result)),
            buffers=buffers,
            extras=blank_extras,
            notes=left_out(manifest, result, data_position=data_position),
            data_position=data_position,
        )
        source._check_values()
        # Sizes of the files that this rank will read are checked, by records or else by the index.
        files = files_read(source._target_tensors(), folder, whole_chunks=source._whole_chunks())
        check_sizes(folder, {name: records[name].size for name in files if name in records})
        check_sizes(
            folder, {name: least for name, least in files.items() if name not in records}, at_least=True
        )
        return replace(source, files=files)

    def read(self, *, distributed: bool) -> None:
        """Fills all tensors. Collective."""
        read_tensors(
            self._target_tensors(), self.folder, distributed=distributed, whole_chunks=self._whole_chunks()
        )

    def _check_values(self) -> None:
        # A value of unknown form is refused before anything is changed.
        record, scheduler = self.manifest.optimizer, self.manifest.scheduler
        decode(self.manifest.scaler)
        decode(None if scheduler is None else scheduler.state)
        for entries in () if record is None else record.values.values():
            decode(entries)

    def _target_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {WEIGHT + name: tensor for name, tensor in self.weights.items()}
        tensors |= {BUFFER + name: tensor for name, tensor in self.buffers.items()}
        tensors |= {EXTRA_STATE + name: tensor for name, tensor in self.extras.items()}
        tensors |= {
            f"{STATE}{name}.{entry}": tensor
            for name, entries in self.blank.items()
            for entry, tensor in entries.items()
        }
        source = _rng_source(self.manifest, self.result)
        return tensors | {f"{RNG}{source}.{kind}": tensor for kind, tensor in self.rng.items()}

    def _whole_chunks(self) -> frozenset[str]:
        record = self.manifest.optimizer
        if record is None or not record.class_name.startswith("torchao."):  # quantised in blocks
            return frozenset()
        return frozenset(f"{STATE}{name}.{entry}" for name in self.blank for entry in self.blank[name])

    def restore(self) -> None:
        """Sets the states of the job from the tensors read. Collective for some strategies."""
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
        restore_rng(self.rng, result.job.device, result.job.step.randomness)
        rank = result.job.cluster.rank
        if rank >= manifest.world_size and len(set(manifest.rng_digests)) > 1:  # else all drew alike
            spread_rng(rank)

    def _restore_optimizer(self) -> None:
        record, optimizer = self.manifest.optimizer, self.result.optim
        if record is None or optimizer is None:
            return
        values = {name: decode(entries) for name, entries in record.values.items()}
        self.states.set_optimizer_states(OptimizerStates(self.blank, values))
        names = _names_to_restore(record.groups, self.states, self.result)
        restore_groups(record.groups, names, optimizer.param_groups)
        optimizer.zero_grad()  # gradients belong to the replaced weights
        if isinstance(optimizer, StepOptimizer):
            optimizer.num_skipped = record.num_skipped
            if optimizer.scaler is not None and self.manifest.scaler is not None:
                optimizer.scaler.load_state_dict(decode(self.manifest.scaler))


def _wanted_specs(
    manifest: Manifest, specs: Mapping[str, StateSpec], weights: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, StateSpec]]:
    # A state that was saved in its weight's dtype, such as a momentum, gets the weight's dtype here.

    def adapt_spec(name: str, spec: StateSpec) -> StateSpec:
        saved_dtype: torch.dtype = getattr(torch, manifest.weights[name].dtype)
        follows = spec.dtype == saved_dtype and spec.shape == manifest.weights[name].shape and name in weights
        return StateSpec(spec.shape, weights[name].dtype) if follows else spec

    return {
        name: {entry: adapt_spec(name, spec) for entry, spec in entries.items()}
        for name, entries in state_specs(dict(specs)).items()
    }


def _rng_source(manifest: Manifest, result: Result) -> int:
    rank = result.job.cluster.rank
    return rank if rank < manifest.world_size else 0  # additional ranks read rank 0's


def _blank_rng(specs: Mapping[str, StateSpec], source: int) -> dict[str, torch.Tensor]:
    prefix = f"{RNG}{source}."
    return {
        key.removeprefix(prefix): _empty_tensor(spec) for key, spec in specs.items() if key.startswith(prefix)
    }


def _empty_tensor(spec: StateSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype)
