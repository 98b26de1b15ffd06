"""Contents of a checkpoint: the states of a training job, and the keys they are stored under."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns._version import __version__
from atorch_ns.capture.random_states import seed_all
from atorch_ns.checkpoint.manifest import (
    Manifest,
    OptimizerRecord,
    SchedulerRecord,
    TensorRecord,
    encode,
    record_groups,
)
from atorch_ns.cluster import gather_values
from atorch_ns.errors import CheckpointError
from atorch_ns.job import (
    Job,
    OptimizerStates,
    Result,
    SharedRandomness,
    StateSpec,
    StepOptimizer,
    TrainingStates,
    on_all_stages,
)
from atorch_ns.torch_compat import persistent_buffers, plain_name

_NUM_WORDS = 624
_PYTHON_VERSION = 3  # format of Python's random states


def capture_rng(device: torch.device, shared: SharedRandomness | None = None) -> dict[str, torch.Tensor]:
    """All random states of this rank by kind: ``cuda`` only on a GPU, ``shared`` if ranks share states."""
    _, words, gauss = random.getstate()  # version, words and position, a second normal draw
    _, numpy_words, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*(int(word) for word in numpy_words), int(position)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(has_gauss), float(numpy_gauss)], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if shared is not None:
        states["shared"] = shared.state()
    return states


def rng_digest(states: Mapping[str, torch.Tensor]) -> str:
    """A digest of random states, to compare those of ranks."""
    total = hashlib.sha256()
    for kind in sorted(states):
        total.update(kind.encode())
        total.update(states[kind].numpy().tobytes())
    return total.hexdigest()[:16]


def restore_rng(
    states: Mapping[str, torch.Tensor], device: torch.device, shared: SharedRandomness | None = None
) -> None:
    """Restores states of :func:`capture_rng`, except of devices and generators that this rank lacks."""
    torch.set_rng_state(states["torch"])
    words, gauss = states["python"].tolist(), float(states["python_gauss"])
    random.setstate((_PYTHON_VERSION, tuple(words), None if math.isnan(gauss) else gauss))
    *numpy_words, position = states["numpy"].tolist()
    has_gauss, numpy_gauss = states["numpy_gauss"].tolist()
    np.random.set_state(
        ("MT19937", np.array(numpy_words, dtype=np.uint32), position, int(has_gauss), numpy_gauss)
    )
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "shared" in states and shared is not None:
        shared.restore(states["shared"])


def spread_rng(rank: int) -> None:
    """Seeds a rank without a saved state from the present state and its number."""
    seed_all((int(torch.randint(2**62, ())) + rank) % 2**62)


WEIGHT = "model."
BUFFER = "buffer."
EXTRA_STATE = "extra_state."
STATE = "optim.state."
RNG = "rng."


@dataclass(frozen=True, kw_only=True)
class Contents:
    """One rank's tensors of a checkpoint, and the manifest.

    Attributes:
        tensors: live tensors by key, or copies of :meth:`copied`.
        manifest: everything else; equal on every rank after :func:`with_all_ranks`.
    """

    tensors: dict[str, torch.Tensor]
    manifest: Manifest

    def copied(self) -> Contents:
        """The same with copies of the tensors in CPU memory, which training does not change."""
        copies = {key: tensor.detach().to("cpu", copy=True) for key, tensor in self.tensors.items()}
        return replace(self, tensors=copies)


def states_of(result: Result) -> TrainingStates:
    """The job's weights and optimizer states by name."""
    return result.job.make_states(result.job, result.optim)


def read_contents(
    result: Result, *, step: int, extra: dict[str, Any], data: dict[str, Any] | None
) -> Contents:
    """Reads this rank's part of every state that a resumed run needs.

    Raises:
        CheckpointError: for a state that has no form in a checkpoint.
    """
    job = result.job
    states = states_of(result)
    weights, optimizer = states.weights(), states.optimizer_states()
    rng = capture_rng(job.device, job.step.randomness)
    buffers, extras = persistent_buffers(job.module), extra_states(job.module)
    records = [held_by_stages(job, mapping) for mapping in (weights, buffers, extras)]  # collective
    # Each rank gives its parts of weights and optimizer states.
    tensors = {WEIGHT + name: tensor for name, tensor in weights.items()}
    group = job.stage_group
    # Every rank has buffers; where they differ, rank 0's count, as in DDP. Of a pipeline, rank 0's stages.
    if job.cluster.rank == 0 if group is None else 0 in dist.get_process_group_ranks(group):
        tensors |= {BUFFER + name: tensor for name, tensor in _first_held(job, buffers).items()}
        tensors |= {EXTRA_STATE + name: tensor for name, tensor in _first_held(job, extras).items()}
    for name, entries in optimizer.tensors.items():
        tensors |= {_state_key(name, entry): tensor for entry, tensor in entries.items()}
    tensors |= {f"{RNG}{job.cluster.rank}.{kind}": tensor for kind, tensor in rng.items()}
    manifest = Manifest(
        step=step,
        world_size=job.cluster.world_size,
        strategy=tuple({"name": part.name, "config": part.config} for part in result.report.strategy),
        versions={"atorch_ns": __version__, "torch": torch.__version__},
        model_class=class_name(job.inputs.model),
        weights=records[0],
        buffers=records[1],
        extra_states=records[2],
        optimizer=_optimizer_record(result, states, optimizer),
        scheduler=_scheduler_record(result.lr_scheduler),
        scaler=_scaler_state(result.optim),
        data=data,
        rng_digests=(rng_digest(rng),),  # with_all_ranks adds the others'
        extra=extra,
    )
    return Contents(tensors=tensors, manifest=manifest)


def with_all_ranks(contents: Contents, job: Job) -> Contents:
    """Adds all ranks' optimizer values and random-state digests to the manifest. Collective."""
    if not job.cluster.distributed:
        return contents
    manifest = contents.manifest
    values = {} if manifest.optimizer is None else manifest.optimizer.values
    of_ranks = gather_values((values, manifest.rng_digests), distributed=True)
    update: dict[str, Any] = {"rng_digests": tuple(digest for _, digests in of_ranks for digest in digests)}
    if manifest.optimizer is not None:
        values_by_parameter = {name: entries for ranks, _ in of_ranks for name, entries in ranks.items()}
        update["optimizer"] = manifest.optimizer.model_copy(update={"values": values_by_parameter})
    return replace(contents, manifest=manifest.model_copy(update=update))


def held_by_stages(job: Job, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Records of all stages' tensors, or of this rank's without a pipeline. Collective over the stages."""
    records = {
        name: record
        for stage in on_all_stages(job, tensor_records(tensors))
        for name, record in stage.items()
    }
    return {name: records[name] for name in job.original.ordered(records)}


def state_specs(tensors: dict[str, StateSpec]) -> dict[str, dict[str, StateSpec]]:
    """The optimizer's tensors among those of a checkpoint: parameter, then entry."""
    specs: dict[str, dict[str, StateSpec]] = {}
    for key, spec in tensors.items():
        if key.startswith(STATE):
            name, _, entry = key.removeprefix(STATE).rpartition(".")  # an entry's name has no dot
            specs.setdefault(name, {})[entry] = spec
    return specs


def extra_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """The extra states of modules, by the module's path.

    Raises:
        CheckpointError: for an extra state that is not a tensor.
    """
    states = {}
    for path, child in module.named_modules():
        if type(child).get_extra_state is nn.Module.get_extra_state:
            continue  # no extra state of its own
        state = child.get_extra_state()
        if not isinstance(state, torch.Tensor):
            raise CheckpointError(
                f"{type(child).__qualname__} at {path or 'the root'} has an extra state of type "
                f"{type(state).__name__}; checkpoints hold only tensors. Return a tensor from get_extra_state."
            )
        states[plain_name(path)] = state
    return states


def class_name(thing: object) -> str:
    """Qualified name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _state_key(name: str, entry: str) -> str:
    if not isinstance(entry, str) or "." in entry or not entry:
        raise CheckpointError(
            f"the optimizer names a state of {name} {entry!r}; state names must be strings without a dot."
        )
    return f"{STATE}{name}.{entry}"


def _first_held(job: Job, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # What several stages hold is written by the first of them. Collective over rank 0's pipeline.
    stages = on_all_stages(job, list(tensors))
    group = job.stage_group
    earlier = {name for stage in stages[: 0 if group is None else group.rank()] for name in stage}
    return {name: tensor for name, tensor in tensors.items() if name not in earlier}


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """Whole shape and dtype of each tensor."""
    return {
        name: TensorRecord(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def _optimizer_record(
    result: Result, states: TrainingStates, read: OptimizerStates
) -> OptimizerRecord | None:
    optimizer = result.optim
    if optimizer is None:
        return None
    values = {
        name: {
            entry: encode(value, what=f"the state {entry!r} of {name}") for entry, value in entries.items()
        }
        for name, entries in read.values.items()
    }
    return OptimizerRecord(
        class_name=states.optimizer_class(),
        groups=record_groups(states.group_names(), optimizer.param_groups),
        values=values,
        num_skipped=int(getattr(optimizer, "num_skipped", 0)),
    )


def _scheduler_record(scheduler: Any) -> SchedulerRecord | None:
    if scheduler is None:
        return None
    state = encode(scheduler.state_dict(), what="the scheduler's state")
    return SchedulerRecord(class_name=class_name(scheduler), state=state)


def _scaler_state(optimizer: torch.optim.Optimizer | None) -> Any:
    if not isinstance(optimizer, StepOptimizer) or optimizer.scaler is None:
        return None
    return encode(optimizer.scaler.state_dict(), what="the loss scaler's state")
