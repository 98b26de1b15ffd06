"""The job of a MerakTrainer: its model divided, from a strategy or a search."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from atorch_ns.apply import make_job, resolve_alike
from atorch_ns.cluster import Cluster
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs, Job, Result
from atorch_ns.merak.losses import Sample
from atorch_ns.pipeline import get_schedule
from atorch_ns.report import TrainingReport
from atorch_ns.search import SearchOutcome
from atorch_ns.strategy import Strategy

Loss = Callable[[Sample, Any], torch.Tensor]


def build_job(
    model: nn.Module,
    strategy: Strategy,
    loss: Loss,
    sample: Sample,
    *,
    notes: list[str],
    outcome: SearchOutcome | None = None,
    optimizer_is_trusted: bool = False,
) -> Result:
    """Creates a job for a model under a given or found strategy, without an optimizer. Collective."""
    inputs = Inputs(
        model=model,
        loss_func=loss,
        model_input_format="unpack_first",
        sample_batch=sample,
        sample_is_micro_batch=True,
        optimizer_is_trusted=optimizer_is_trusted,
    )
    cluster = Cluster.detect()
    with cluster.sharing_failures("MerakTrainer"):
        return make_job(
            inputs,
            cluster,
            resolve_alike(inputs, cluster, strategy),
            notes=notes,
            report=partial(TrainingReport.of_job, search=outcome),
        )


def num_micro_batches(job: Job, count: int, usual: int) -> int:
    """A number supported by the schedule. The last step of an epoch may have fewer than usual."""
    ranks = 1 if job.mesh is None else job.mesh.size("pipeline")
    if ranks == 1:
        return count
    plan = job.plan.pipeline
    problem = get_schedule(plan.schedule).problem(ranks, count, plan.stages_per_rank)
    return max(count, usual) if problem else count


def arguments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The arguments for another optimizer of its class, from its defaults, which may hold more."""
    parameters = inspect.signature(type(optimizer)).parameters
    open_ = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in optimizer.defaults.items() if open_ or name in parameters}


# Methods that subclasses of Merak's and of older Trainers override, and their replacements.
_HOOKS = {
    "get_loss_fn": "give loss_fn=..., a function of logits and labels, or override compute_loss(model, inputs)",
    "prepare_data": "give data_collator=..., or override _prepare_inputs",
    "create_dataloader": "override get_train_dataloader and get_eval_dataloader",
    "create_lr_scheduler": "override create_scheduler(num_training_steps, optimizer)",
    "get_train_sampler": "override _get_train_sampler(dataset)",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
}


def refuse_hooks(trainer: type) -> None:
    """Refuses a subclass whose methods would never be called.

    Raises:
        InputError: naming each of them, and the method to override instead.
    """
    odd = [
        f"{name} ({way})"
        for name, way in _HOOKS.items()
        if getattr(trainer, name, None) is not getattr(Trainer, name, None)  # overridden
    ]
    if odd:
        raise InputError(f"{trainer.__name__} has methods that training does not call: {'; '.join(odd)}.")


def check_recipe(name: str, make: Any, arguments: Mapping[str, Any]) -> None:
    """Refuses an optimizer made from the whole model, of which a rank holds a part.

    Raises:
        InputError: for a factory, and for arguments that are parts of a model.
    """
    odd = {"params", "model", "optimizer_dict"} & set(arguments)  # of GaLore, LOMO and layer-wise optimizers
    if odd or not isinstance(make, type) or not issubclass(make, torch.optim.Optimizer):
        raise InputError(
            f"optim={name}: it is made for the whole model ({', '.join(odd) or 'by a factory'}), but a rank holds only a part. "
            "Use a torch optimizer, such as adamw_torch."
        )


def options_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The options of each parameter of an optimizer that was made for the undivided model.

    Raises:
        InputError: if it has parameters of another model, or has stepped.
    """
    if optimizer.state:
        raise InputError(
            "optimizers: the optimizer has stepped already, and its states belong to the undivided model. Give a new one."
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    result: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if parameter not in names:
                raise InputError("optimizers: the optimizer has parameters that are not the model's.")
            result[names[parameter]] = options
    return result
