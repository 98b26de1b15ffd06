"""DeepSpeed's ZeRO optimizer as a torch optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from atorch_ns.cluster import gather_values
from atorch_ns.errors import StepError
from atorch_ns.text import first_few
from opt_lib._optimizer_parts import clip_parts, norm_of_parts

_USE_CHECKPOINT = (
    "under DeepSpeed an optimizer's state is cut into flat pieces, together with the weights it belongs to. Save "
    "and load with atorch_ns.checkpoint, which every other strategy can read."
)


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """The user's optimizer when DeepSpeed owns model and optimizer.

    Groups and state are those of the user's optimizer, which DeepSpeed has put on this rank's flat partition
    of each group: schedulers work as usual. Gradients add up over backward passes until :meth:`step`, which
    alone ends an accumulation.

    Args:
        engine: DeepSpeed's engine, with ``managed_gradient_accumulation`` off.
        group: the ranks that partitions are spread over.
        skip_if_nonfinite: whether a step is skipped, on all ranks, whose gradients are infinite or NaN.
        stages: the pipeline ranks over which norms are computed; ``None`` for ``group``.
        remote: parameters that another of these ranks counts in norms.
        names: names of the parameters, for messages; ``None`` for those that the engine knows.

    Attributes:
        engine: DeepSpeed's engine.
        num_skipped: steps skipped so far.
        skipped: whether the last step was skipped.
    """

    def __init__(
        self,
        engine: Any,
        *,
        group: dist.ProcessGroup,
        skip_if_nonfinite: bool = False,
        stages: dist.ProcessGroup | None = None,
        remote: Iterable[torch.Tensor] = (),
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would build a second, empty set of groups and state.
        self.engine = engine
        self.num_skipped = 0
        self.skipped = False
        self._zero = engine.optimizer
        self._group = group
        self._all = group if stages is None else stages
        self._pipeline = stages is not None
        self._names = engine.param_names if names is None else names
        self._remote_ids = {id(parameter) for parameter in remote}
        self._device = torch.device(self._zero.device)
        self._skip_if_nonfinite = skip_if_nonfinite
        self._before_steps: dict[int, Callable[..., Any]] = OrderedDict()
        self._boundary = True
        self._is_reduced = False
        # Each hook takes its parameter out: parameters left in the set got no gradient.
        self._idle = {p for parameters in self._zero.bit16_groups for p in parameters}
        self._watches = [p.register_post_accumulate_grad_hook(self._idle.discard) for p in self._idle]

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of ``loss``; divide it first if micro-batches accumulate."""
        if self._is_reduced:
            raise StepError(
                "backward() was called after the gradients were clipped and before step(): they are already "
                "averaged over the ranks. Clip after the last micro-batch."
            )
        # The caller has divided the loss: the engine may not divide it by its accumulation steps again.
        self.engine.backward(loss, scale_wrt_gas=False)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the next backward pass is the last before a step.

        It is only used for a check: a step right after ``False`` is an error.
        """
        self._boundary = bool(is_boundary)

    def clip_gradients(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``. Collective.

        Args:
            parameters: ignored: gradients are in partitions that only DeepSpeed knows.
            max_norm: the largest norm to leave.
            norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.

        Returns:
            The norm before, 0-d float32, the same on every rank.
        """
        self._reduce_gradients()
        return clip_parts(
            self._gradient_parts(),
            max_norm,
            norm_type,
            group=self._all,
            device=self._device,
            remote_parts=self._gradient_parts(remote=True),
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates the weights and clears the gradients; does nothing if there are none. Collective.

        Raises:
            StepError: after ``set_gradient_accumulation_boundary(False)``; at the first step, if no rank
                uses some parameter.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._boundary:
            raise StepError(
                "step() was called although set_gradient_accumulation_boundary(False) said that more "
                "micro-batches follow. Call set_gradient_accumulation_boundary(True) before the last one."
            )
        # Hooks get torch's arguments, and run before gradients are averaged.
        for hook in self._before_steps.values():
            hook(self, (), {})
        self._reduce_gradients()
        if self._is_reduced and self._watches:
            self._require_use_of_all()
        self.skipped = self._skip_if_nonfinite and self._has_nonfinite_gradients()
        if self.skipped:
            self.num_skipped += 1
        elif self._is_reduced:  # without gradients there is nothing to step
            self._zero.step()
        self.zero_grad()
        return loss

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Lets ``hook(optimizer, args, kwargs)`` be called at the beginning of every step."""
        handle = RemovableHandle(self._before_steps)
        self._before_steps[handle.id] = hook
        return handle

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those already averaged included."""
        self._zero.zero_grad(set_to_none=True)
        # The numbers of groups stay as keys; None is DeepSpeed's own mark of no gradients.
        for tensors in (self._zero.all_grad_tensors, self._zero.averaged_gradients):
            tensors.update(dict.fromkeys(tensors))
        self._is_reduced = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups, each with one flat partition; changing a learning rate here has effect."""
        groups: list[dict[str, Any]] = self._zero.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this rank's partitions."""
        return self._zero.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's defaults."""
        defaults: dict[str, Any] = self._zero.optimizer.defaults
        return defaults

    def state_dict(self) -> dict[str, Any]:
        """Raises StepError: a rank holds flat pieces of states and of weights, which belong together."""
        raise StepError(_USE_CHECKPOINT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises StepError, as :meth:`state_dict`."""
        raise StepError(_USE_CHECKPOINT)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises StepError: the partitions are made once."""
        raise StepError("parameters cannot be added after DeepSpeed has partitioned the model")

    def __repr__(self) -> str:
        return repr(self._zero.optimizer)

    def _reduce_gradients(self) -> None:
        # Once a step: clipping and the step both ask for it.
        if self._is_reduced or not self._has_gradients():
            return
        # ZeRO 2 has reduced in every backward pass; ZeRO 1 reduces the accumulated ``grad`` now.
        if self._zero.partition_gradients:
            self._zero.finalize_gradient_accumulation_boundary()
        else:
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients(pipeline_parallel=self._pipeline)
        self._is_reduced = True

    def _require_use_of_all(self) -> None:
        # The first step decides: later backward passes run without these hooks.
        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        local = {self._names[parameter] for parameter in self._idle}
        # A parameter that any data rank has used has a gradient once they are averaged.
        idle_names = set.intersection(*gather_values(local, distributed=True, group=self._group))
        if self._pipeline:  # all stages must stop, or the others would wait for those that do
            idle_names = set.union(*gather_values(idle_names, distributed=True, group=self._all))
        if idle_names:
            raise StepError(
                f"{len(idle_names)} trainable parameter(s) took no part in the loss: {first_few(sorted(idle_names))}. "
                "DeepSpeed would step them with zero gradients, so weight decay would change them. Freeze them (requires_grad=False) or "
                "use another backend."
            )

    def _has_gradients(self) -> bool:
        if self._zero.partition_gradients:
            return any(gradients is not None for gradients in self._zero.all_grad_tensors.values())
        return any(parameter.grad is not None for group in self._zero.bit16_groups for parameter in group)

    def _gradient_parts(self, *, remote: bool = False) -> Iterator[torch.Tensor]:
        """This rank's parts that it counts in norms, or those that another rank counts."""
        for number, partition in self._zero.averaged_gradients.items():
            # Padding at a partition's end is zero and adds nothing to a norm: it matters for pairing alone.
            if not self._remote_ids:
                yield from () if remote else partition or ()
                continue
            parts = [part for part in partition or () if not getattr(part, "_zero_padding", False)]
            # One part for each parameter; where there is none, a part of zeros.
            for parameter, part in zip(self._zero.params_in_partition[number], parts, strict=False):
                if (id(parameter) in self._remote_ids) == remote:
                    yield part

    def _has_nonfinite_gradients(self) -> bool:
        # One element that is infinite or NaN makes the norm so, and all ranks get the same norm.
        norm = norm_of_parts(self._gradient_parts(), 2.0, group=self._all, device=self._device)
        return not bool(torch.isfinite(norm))
