"""Census of a model: ties to its parameters that a strategy may break, found before or in the first step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves

from atorch_ns.capture.nests import leaves, tensors_of
from atorch_ns.capture.random_states import BatchNorm
from atorch_ns.errors import InputError, StepError
from atorch_ns.job.gradients import GradientHooks, follow_backward_passes
from atorch_ns.job.job import MODEL, Job
from atorch_ns.job.optimizer.step_optimizer import inner_optimizer
from atorch_ns.sharding.compare import sum_of_bits
from atorch_ns.text import first_few
from atorch_ns.torch_compat import (
    NO_SECOND_DERIVATIVE,
    HookTable,
    extend_dtensor_operators,
    has_user_hooks,
    hook_tables,
    note_inner_hooks,
    plain_name,
    take_hooks,
    traced_modules,
)


class Census:
    """Uses of a model's parameters that break if other tensors take their place.

    Args:
        model: the model, before any method.
    """

    def __init__(self, model: nn.Module) -> None:
        # References take no memory, and their ids are not reused by later tensors.
        self._parameters = {name: ref(parameter) for name, parameter in model.named_parameters()}
        anew = {  # before every pass, by hooks such as spectral_norm's
            f"{path}.{hook.name}".removeprefix(".")
            for path, module in model.named_modules()
            for hook in module._forward_pre_hooks.values()
            if hasattr(hook, "name")
        }
        self._list_names = list(_listed_parameters(model))
        self._shared = [pair for pair in _shared_memory(model) if anew.isdisjoint(pair)]
        self._max_norm_names = [
            name or "the model"
            for name, module in model.named_modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        ]
        self._hooks = [
            (name, *hook_tables(parameter))
            for name, parameter in model.named_parameters()
            if has_user_hooks(parameter)
        ]

    def check(self, job: Job) -> None:
        """Refuses uses that the applied strategy breaks, and carries over gradient hooks.

        Raises:
            InputError: naming the broken use and the remedy.
        """
        if self._max_norm_names and (job.num_data_ranks > 1 or self._is_replaced(job)):
            raise InputError(
                f"{first_few(self._max_norm_names)} has max_norm: its forward pass writes the weight rows that the batch of "
                "this rank uses, but other ranks or weight copies would not see it. Set max_norm=None, and renormalise all rows "
                "after optim.step(), for example with result.optim.register_step_post_hook."
            )
        tensors = dict(_named_tensors(job.module))
        for first, second in self._shared:
            if not _has_overlap(tensors.get(first), tensors.get(second)):
                raise InputError(
                    f"{first} and {second} are two tensors with the same memory, so an update of one changes the other, but "
                    "under this strategy they would have separate memory. Make them one parameter (module.b = module.a), or "
                    "read the parameter where the other is used; ddp and zero1 leave them as they are."
                )
        if self._list_names and self._is_replaced(job):
            raise InputError(
                f"{first_few(self._list_names)} holds a parameter of the model in a list or dictionary, but this strategy replaces "
                "the model's parameters with other tensors. Read the parameter by its name where it is used (self.module.weight), "
                "or use ddp or zero1."
            )
        now = {plain_name(name): parameter for name, parameter in job.module.named_parameters()}
        self._stop_stale_optimizers(now.values())
        if job.cluster.world_size > 1 or job.step.num_micro_batches > 1:
            carry_hooks(job, [(name, now.get(name), early, late) for name, early, late in self._hooks])
        else:
            _warn_of_scale(job, [name for name, *_ in self._hooks])

    def _is_replaced(self, job: Job) -> bool:
        now = {plain_name(name): parameter for name, parameter in job.module.named_parameters()}
        entries = self._parameters.items()
        return bool(job.plan.precision.master_dtype) or any(
            name in now and reference() is not now[name] for name, reference in entries
        )

    def _stop_stale_optimizers(self, now: Iterable[torch.Tensor]) -> None:
        # These are former parameters of the model, so their optimizer would train nothing.
        new_ids = {id(parameter) for parameter in now}
        stale = {id(p) for reference in self._parameters.values() if (p := reference()) is not None} - new_ids

        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            raise StepError(
                f"this {type(optimizer).__name__} was created with the model's parameters before the strategy replaced "
                "them, so it would train nothing. Give its class as optim_func, or create it with result.model.parameters()."
            )

        # These optimizers were never passed in: a script may create one and step it in its own loop.
        things = gc.get_objects() if stale else []
        for optimizer in [thing for thing in things if issubclass(type(thing), torch.optim.Optimizer)]:
            groups = vars(optimizer).get("param_groups", ())
            if any(id(parameter) in stale for group in groups for parameter in group["params"]):
                # An optimizer that never called Optimizer.__init__ has no hooks.
                with suppress(AttributeError):
                    optimizer.register_step_pre_hook(refuse)


def carry_hooks(job: Job, hooks: Iterable[tuple[str, torch.Tensor | None, HookTable, HookTable]]) -> None:
    """Calls users' gradient hooks with the gradients of all ranks. ``hooks`` holds names, current
    parameters and tables of :func:`~atorch_ns.torch_compat.hook_tables`."""
    here = [(name, parameter, early, late) for name, parameter, early, late in hooks if parameter is not None]
    _warn_of_scale(job, [name for name, *_ in here])
    if here and job.optimizer.take_over is not None:
        raise InputError(
            f"{first_few([name for name, *_ in here])} has gradient hooks, which a backend that builds the model and the optimizer "
            "together never calls. Use torch's ddp, zero1, zero2 or fsdp."
        )
    if here:
        job.gradients.sums.call_after(
            [GradientHooks(name, p, take_hooks(early), take_hooks(late)) for name, p, early, late in here]
        )
        job.explain(
            "model",
            f"gradient hooks of {first_few([name for name, *_ in here])} are called with the gradients of all "
            "ranks: once in each train_step, and after each backward pass in your own loop",
        )


def _warn_of_scale(job: Job, names: Sequence[str]) -> None:
    if names and job.precision.loss_scaling is not None:
        job.warn(
            f"{first_few(names)} has gradient hooks, which fp16 calls with the gradient times the loss scale. A hook that "
            "multiplies it is correct, but others (clamp) give wrong results: use bf16, which has no scale."
        )


def carry_late_hooks(job: Job, observe: Callable[..., object]) -> None:
    """Carries over gradient hooks registered later, at the start of a backward pass. Those of a pipeline,
    which only the train_step of ``observe`` runs, are carried over before its passes."""
    if job.cluster.world_size == 1 or job.optimizer.take_over is not None:
        return
    parameters = [(plain_name(name), p) for name, p in job.module.named_parameters()]

    def last() -> list[int]:  # the newest handle number of each table
        return [next(reversed(table)) for _, p in parameters for table in hook_tables(p) if table]

    before, joins = last(), False

    def take(*_: Any) -> None:
        nonlocal before, joins
        if last() != before:
            entries = [(name, p, *hook_tables(p)) for name, p in parameters if has_user_hooks(p)]
            is_first = bool(entries) and not job.gradients.sums
            carry_hooks(job, entries)
            if is_first:
                job.gradients.sums.watch(job.module)
                joins = not job.parts.stages
            before = last()  # with what has been registered here

    def look() -> None:
        take()
        if joins:  # also for each further pass: the output may be older than the hooks
            job.gradients.join_pass(job.module)

    if job.parts.stages:
        observe("forward_backward", look, when="before")
    else:
        # A loss that reads weights may call their hooks before its backward pass reaches the model.
        job.module.register_forward_pre_hook(torch.compiler.disable(take))
        follow = follow_backward_passes(job.module, look)
        job.gradients.follow = job.gradients.follow or follow


class ForwardChanges:
    """Detects changes by forward passes in the user's model that occur once per micro-batch, not per step.

    Compares the second call in the first step with several micro-batches. Changes by the first alone stay.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_done = False
        self._marks: Counter[nn.Module] | None = None
        self._before: dict[tuple[Any, ...], object] = {}
        self._changes: set[str] = set()

    @contextmanager
    def look(self, num_micro_batches: int) -> Iterator[None]:
        """Surrounds the passes of a step. Warns in the first with several micro-batches. Collective."""
        if self._is_done or num_micro_batches == 1:
            yield
            return
        self._is_done, self._marks = True, Counter()
        stages = self._job.parts.stages
        hooks = [stage.register_forward_pre_hook(self.mark) for stage in stages]
        hooks += [stage.register_forward_hook(self.mark) for stage in stages]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._marks = None
        names = sorted(set().union(*self._job.cluster.gathered(self._changes)))
        if names:
            text = (
                f"the forward pass changes {first_few(names)}. With {num_micro_batches} micro-batches it is called as often in a "
                "step, and once in one process on the whole batch, so that values differ from there. Use one micro-batch, or "
                "make the change after the update, as by result.optim.register_step_post_hook"
            )
            self._job.explain(MODEL, text)
            self._job.warn(text)

    def mark(self, root: nn.Module, *_: Any) -> None:
        """Hook before and after a micro-batch passes through the model or a stage."""
        if self._marks is not None:
            self._marks[root] += 1  # 1, 2: around its first pass; 3, 4: around its second
            if self._marks[root] == 3:  # before its second pass
                self._before = self._snapshot_values()
            elif self._marks[root] == 4:
                before, now = self._before, self._snapshot_values()
                self._changes |= {
                    _dotted_name(*key) for key in before.keys() & now if before[key] != now[key]
                }

    def _snapshot_values(self) -> dict[tuple[Any, ...], object]:
        return {
            (plain_name(path), *keys): digest
            for path, module in self._job.module.named_modules()
            # Batch norms have a separate note.
            if not isinstance(module, BatchNorm) and not type(module).__module__.startswith(_OURS)
            for keys, value in leaves(vars(module))
            if keys[0] not in _package_attributes(module) and (digest := _comparable_value(value)) is not None
        }


_OURS = ("atorch_ns.", "opt_lib.")  # package classes may count calls


def _package_attributes(module: nn.Module) -> set[str]:
    ours = [kind for kind in type(module).__mro__ if kind.__module__.startswith(_OURS)]
    return set().union(*(vars(kind).get("__annotations__", ()) for kind in ours))


def _dotted_name(path: str, *keys: Any) -> str:
    return f"{path}.{next(key for key in keys if key not in ('_buffers', '_parameters'))}".removeprefix(".")


def _comparable_value(value: Any) -> object:
    if isinstance(value, (int, float, complex, str)):
        return repr(value)  # for NaN too
    if type(value) not in (torch.Tensor, nn.Parameter) or value.requires_grad or value.is_meta:
        return None
    if isinstance(value, nn.Parameter) and value.is_floating_point():  # frozen parameters: their sum suffices
        return repr(value.sum(dtype=torch.float32).tolist())
    if value.layout != torch.strided:
        return None
    flat = torch.empty(value.numel(), dtype=value.dtype)  # of stride 1, which a view as bytes needs
    flat.copy_(value.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def watch_first_step(job: Job, optimizer: torch.optim.Optimizer | None) -> None:
    """Makes passes refuse second derivatives, and the first also lost weight writes (:class:`StepError`)."""
    note_inner_hooks(job.roots)
    if any(isinstance(parameter, DTensor) for parameter in job.module.parameters()):
        extend_dtensor_operators((job.module, *job.parts.stages))
        job.model.register_forward_hook(_refuse_second_derivatives)
    if job.cluster.world_size == 1:
        return
    if optimizer is not None:
        groups = inner_optimizer(optimizer).param_groups  # masters too
        updated_ids = {id(p) for group in groups for p in group["params"]}
        for root in job.roots:
            inner = traced_modules(root)  # hooks on inner modules would be compiled
            for path, module in root.named_modules():
                if module not in inner and any(True for _ in module.parameters()):
                    _watch_writes(plain_name(path), module, updated_ids)
    if job.num_data_ranks > 1 and not job.parts.stages:
        refuse_new_parameters(job)


def refuse_new_parameters(job: Job) -> None:
    """Makes forward passes refuse later parameters, which each rank would train separately."""
    model = ref(job.module)
    modules = WeakSet(job.module.modules())
    known_ids = {id(parameter) for parameter in job.module.parameters()}
    is_changed = False

    def notice(module: nn.Module, name: str, value: Any) -> None:
        nonlocal is_changed
        is_changed |= module in modules

    def look(*_: Any) -> None:
        nonlocal is_changed
        root = model()
        if not is_changed or root is None:
            return
        is_changed = False
        new = [
            plain_name(name)
            for name, parameter in root.named_parameters()
            if parameter.requires_grad and id(parameter) not in known_ids
        ]
        if new:
            raise StepError(
                f"{first_few(new)} was added to the model after auto_accelerate, so no strategy handles it: each rank would "
                "train it on its own samples. Change the model before the call."
            )

    handles = (
        register_module_parameter_registration_hook(notice),
        register_module_module_registration_hook(notice),
    )
    for handle in handles:  # these hooks are global in torch
        finalize(job.module, handle.remove)
    job.module.register_forward_pre_hook(torch.compiler.disable(look), prepend=True)


def _watch_writes(path: str, module: nn.Module, updated_ids: set[int]) -> None:
    marks: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}

    def mark(parameter: torch.Tensor) -> tuple[int, ...]:
        # A unit gathers again in each pass, and only the bits reveal a write through .data.
        if isinstance(module, FSDPModule) and type(parameter.data) is torch.Tensor:
            return parameter._version, parameter.data_ptr(), int(sum_of_bits(parameter.detach()))
        return (parameter._version,)

    def before(*_: Any) -> None:
        marks.update(
            (name, (parameter, mark(parameter)))
            for name, parameter in module.named_parameters()
            if id(parameter) not in updated_ids
        )

    def after(*_: Any) -> None:
        for handle in handles:  # only the first pass is checked
            handle.remove()
        for name, (parameter, before) in marks.items():
            if mark(parameter) != before:
                raise StepError(
                    f"the forward pass of {path or 'the model'} writes to its parameter {plain_name(name)}, but under this strategy it computes "
                    "with a copy, so the optimizer would continue from the old values. Write after optim.step(), for example with "
                    "result.optim.register_step_post_hook, or compute the bounded value in forward without writing it back "
                    "(torch.nn.utils.parametrize)."
                )
        marks.clear()

    # fully_shard frees gathered weights in a hook of its own.
    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after, prepend=True)]


def _refuse_second_derivatives(module: nn.Module, inputs: Any, output: Any) -> None:
    def look(gradients: Any) -> None:
        if torch.is_grad_enabled():  # grad mode is on with create_graph=True
            raise StepError(NO_SECOND_DERIVATIVE)

    if torch.is_grad_enabled():
        for tensor in tensors_of(output):
            # Hooks on the model itself miss a gradient of the loss with respect to the output.
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(look)


def refuse_hidden_outputs(path: str) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook for a module whose backward pass starts at hooks on its results, which must be visible.

    Raises:
        StepError: if results with gradients are in objects that torch does not look into.
    """

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors_of(output)):
            return
        for leaf in tree_leaves(output):
            hidden = tensors_of(list(vars(leaf).values())) if hasattr(leaf, "__dict__") else []
            # An object that calls a module again exposes its tensors then.
            is_seen = isinstance(leaf, torch.Tensor) or getattr(leaf, "calls_module_again", False)
            if not is_seen and any(tensor.requires_grad for tensor in hidden):
                raise StepError(
                    f"{path or 'the model'} returns an object of the class {type(leaf).__name__}, in which torch cannot find the "
                    "tensors that tell it when a backward pass begins, so gradients would be lost. Return a tensor, a "
                    "tuple, a dictionary or a dataclass, or use ddp or zero1."
                )

    return look


def _shared_memory(model: nn.Module) -> Iterator[tuple[str, str]]:
    entries = [
        (memory, name, tensor) for name, tensor in _named_tensors(model) if (memory := _memory_of(tensor))
    ]
    before: tuple[tuple[int, int, int], str, torch.Tensor] | None = None
    for entry in sorted(entries, key=lambda entry: entry[0]):  # by storage, then address
        memory, name, tensor = entry
        other = tensor if before is None else before[2]
        trains = isinstance(other, nn.Parameter) or isinstance(tensor, nn.Parameter)
        if before is not None and other is not tensor and trains and _has_overlap(other, tensor):
            yield before[1], name
        if before is None or before[0][0] != memory[0] or before[0][2] < memory[2]:
            before = entry


def _listed_parameters(model: nn.Module) -> Iterator[str]:
    parameters = set(model.parameters())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_nest = isinstance(value, (list, tuple, dict)) and not name.startswith("_")
            if is_nest and not parameters.isdisjoint(tensors_of(value)):
                yield f"{plain_name(path)}.{name}".removeprefix(".")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in ("_parameters", "_buffers", ""):  # parameters first, plain attributes last
        for path, module in model.named_modules():
            for name, value in (getattr(module, kind) if kind else vars(module)).items():
                if isinstance(value, torch.Tensor):
                    yield plain_name(f"{path}.{name}" if path else name), value


def _memory_of(tensor: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Storage and its range of element addresses, or ``None`` for tensors without memory of their own."""
    if tensor is None or tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
        return None
    try:
        storage, begin = tensor.untyped_storage()._cdata, tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, subclasses
        return None
    span = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return storage, begin, begin + (span + 1) * tensor.element_size()


def _has_overlap(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    memories = _memory_of(first), _memory_of(second)
    if memories[0] is None or memories[1] is None:
        return False
    storage, begin, end = memories[0]
    other, other_begin, other_end = memories[1]
    return storage == other and begin < other_end and other_begin < end
