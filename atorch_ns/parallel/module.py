"""ParallelModule: a module on the ranks of its scale unit, called as the plain one or step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from atorch_ns.capture.nests import map_tensors
from atorch_ns.errors import InputError, StepError
from atorch_ns.job import Result
from atorch_ns.parallel.config import ComputeConfig
from atorch_ns.parallel.pieces import PIECES, Pieces, load_pieces, localise
from atorch_ns.torch_compat import plain_name

INNER = "_parallelized"
"""The attribute that holds the inner module. State dicts and :func:`plain_name` leave it out."""

STEP = "a step of a parallel module"
"""Label under which failures of a loop's forward passes and synchronisations are shared."""


class ParallelModule(nn.Module):
    """A module that :func:`~atorch_ns.parallelize` has divided over the ranks of a scale unit.

    Call it like the plain module, or with :meth:`train_step` and :meth:`infer_step` if end to end. It holds
    this rank's parts by plain names. ``load_state_dict`` takes the state dict of this rank or of the whole.

    Args:
        init_params: whether to begin with the plain module's values, or with NaN until a load or broadcast.

    Attributes:
        compute_config: the config that it was created for.
        result: the result of the strategy, with the report: ``print(module.result.report)``.
        num_calls: number of calls.
    """

    compute_config: ClassVar[ComputeConfig]
    _state_names: ClassVar[tuple[str, ...]] = ()
    _apply_plan: ClassVar[Callable[[bool], Result] | None] = None

    def __init__(self, init_params: bool = True) -> None:
        super().__init__()
        make = type(self)._apply_plan
        if make is None:
            raise InputError(
                "ParallelModule is only a base class; instantiate a class that parallelize makes."
            )
        self.__dict__["result"] = make(init_params)  # past __setattr__, which may set the inner module's
        self.__dict__["num_calls"] = 0
        self.add_module(INNER, self.result.job.module)
        self.train(self.result.job.module.training)
        self.register_state_dict_post_hook(_name_pieces)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_pieces)  # type: ignore[no-untyped-call]

    result: Result
    num_calls: int

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == INNER:  # the inner module is not there yet
                raise
            return getattr(super().__getattr__(INNER), name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get(INNER)  # none while __init__ runs
        if inner is not None and name in vars(inner) and name not in vars(self):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the plain module, whole on every rank of the unit.

        Raises:
            StepError: for an end-to-end module.
        """
        if self.compute_config.use_end2end:
            raise StepError(
                f"{type(self).__name__} is end to end (use_end2end=True): call train_step(samples) or infer_step(samples)."
            )
        self.num_calls += 1
        with self.result.job.cluster.sharing_failures(STEP, turn=self.num_calls):
            return self.get_submodule(INNER)(*args, **kwargs)

    def train_step(
        self,
        samples: Sequence[Any],
        is_dummy_batch: Sequence[bool] | None = None,
        scale_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Any]:
        """Runs forward and backward passes of micro-batches, after clearing gradients. Collective.

        Gradients are those of the sum of all losses, also over the units once the optimizer has synchronised.

        Args:
            samples: micro-batches, each an argument of ``forward``.
            is_dummy_batch: flags of micro-batches that add nothing. Their outputs are zeros.
            scale_fn: transforms a loss, 0-d, before its backward pass.

        Returns:
            The outputs of the samples, detached.

        Raises:
            StepError: if the module is not end to end, is only for inference, or has no optimizer.
        """
        self._require_end2end("train_step")
        if self.compute_config.inference_only:
            raise StepError("the module was made with inference_only=True: it computes no gradients.")
        if self.result.train_step.optimizer is None:
            raise StepError("train_step needs an optimizer: call build_optimizer(module, ...) first.")
        step = self.result.train_step.micro_gradients(samples, dummies=is_dummy_batch, scale_fn=scale_fn)
        outputs = iter(step.outputs or ())  # without those of dummies
        dummies = is_dummy_batch or [False] * len(samples)
        nothing: Any = torch.zeros((), device=self.result.device)
        if step.outputs:
            nothing = map_tensors(torch.zeros_like, step.outputs[0])
        return [nothing if dummy else next(outputs) for dummy in dummies]

    def infer_step(self, samples: Sequence[Any]) -> list[Any]:
        """The outputs of samples, without gradients and in evaluation mode. Collective."""
        self._require_end2end("infer_step")
        return list(self.result.train_step.infer(samples).outputs or ())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Parts of parameters survive no move and no cast, so fn is tried on one element of each kind.
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
            result = fn(probe)
            if (result.dtype, result.device, result.is_shared()) != (
                tensor.dtype,
                tensor.device,
                probe.is_cuda,  # CUDA tensors always count as shared
            ):
                raise StepError(
                    f"a {type(self).__name__} keeps the dtype, memory and device that it was made with: give parallelize "
                    f"module_dtype=, and start a process for each device; a {tensor.dtype} tensor on {tensor.device} would become "
                    f"{result.dtype} on {result.device}."
                )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(
            f"a {type(self).__name__} cannot be copied or pickled: it is bound to its ranks' process groups. Save "
            "module.state_dict(), or merge_state_dicts of all ranks; to make several modules, parallelize their class."
        )

    def parameters_for_optimizer(self) -> list[nn.Parameter]:
        """Parameters to update on this rank. :func:`~atorch_ns.build_optimizer` takes them itself."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def gather_params(self) -> None:
        """Does nothing, since with ``use_zero`` the next forward pass gathers parameters."""

    def _require_end2end(self, what: str) -> None:
        if not self.compute_config.use_end2end:
            raise StepError(
                f"{what} is for end-to-end modules: set use_end2end=True, or call the module itself."
            )


def parallel_modules(module: nn.Module) -> dict[str, ParallelModule]:
    """The parallel modules in a module, by path."""
    return {path: part for path, part in module.named_modules() if isinstance(part, ParallelModule)}


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module that contains parallel ones, by the plain module's first names."""
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


def _name_pieces(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    # State dicts name plain tensors as the plain module does. PIECES gives the place of each in the whole.
    assert isinstance(module, ParallelModule)
    start = f"{prefix}{INNER}."
    entries = {name: state.pop(name) for name in list(state) if name.startswith(start)}
    pieces = Pieces.of(module.compute_config, module.result.job, module._state_names)
    for name, value in entries.items():
        plain = plain_name(name.removeprefix(start))
        state[prefix + plain] = localise(plain, value, pieces)
    state[prefix + PIECES] = pieces.as_state()


def _take_pieces(
    module: nn.Module, state: Any, prefix: str, _: Any, strict: bool, missing: list[str], *rest: Any
) -> None:
    # Names become those of the module inside, and whole tensors this rank's parts of them.
    assert isinstance(module, ParallelModule)
    inner = module.get_submodule(INNER)
    metadata: Mapping[str, Any] | None = state.pop(prefix + PIECES, None)
    inner_state = inner.state_dict(keep_vars=True)
    whole = module.result.job.parts.full_structure
    if metadata is None and whole is not None:  # parameters of other pipeline stages
        names = {plain_name(name) for name in inner_state}
        for name in whole.state_dict(keep_vars=True):
            if name not in names:
                state.pop(prefix + name, None)
    load_pieces(inner_state, state, prefix, f"{prefix}{INNER}.", metadata=metadata)
