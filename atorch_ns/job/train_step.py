"""Training step in phases, right for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from atorch_ns.capture.nests import map_tensors, num_rows
from atorch_ns.capture.random_states import buffers_lent
from atorch_ns.cluster.process_memory import GrowthWatch
from atorch_ns.data import BatchRunner, LossScale, Passed, Reduction, StepOutput, StepWork, call_model, weigh
from atorch_ns.errors import InputError, StepError
from atorch_ns.job.census import ForwardChanges
from atorch_ns.job.job import Job
from atorch_ns.job.loss import LossFunction, RowCheck, first_loss, is_power_of_ten
from atorch_ns.job.optimizer.step_optimizer import StepOptimizer, inner_optimizer
from atorch_ns.job.step_times import StepTimes
from atorch_ns.text import did_you_mean, with_article

Phase = Literal["zero", "forward_backward", "reduce", "scale", "clip", "update"]
PHASES: Final[tuple[Phase, ...]] = ("zero", "forward_backward", "reduce", "scale", "clip", "update")
"""The phases of a training step, in their order."""

StepObserver = Callable[[int, torch.Tensor, torch.Tensor | None], None]
"""Called after a step with the step count, the loss, and the gradients' norm if they were clipped."""

_Arriving = tuple[StepOutput, Callable[[], object]]
"""Output of a step, and a function that waits until its loss is averaged over all ranks."""

PhaseObserver = Callable[[], object]
"""Called before or after a phase. An error on one rank ends the others when they next wait for that rank: in
this step or, if the ranks have exchanged all data that it needs, in the next one."""


class TrainStep:
    """Runs forward, backward, clipping and the optimizer on one batch, as the strategy requires.

    A batch is this rank's part of a global batch from the data loader. It is split into the number of
    micro-batches set by ``gradient_accumulation_steps`` or the method ``gradient_accumulation``. Gradients
    synchronise only with the last one, unless ``reduce_each_micro_batch`` says otherwise. The loss is a
    mean over the samples of the batch, unless the job has a ``weight_func`` or a ``loss_reduction``.
    :meth:`micro_steps` accepts custom micro-batches of any size and weight, and also returns the outputs.

    A step has the phases ``zero``, ``forward_backward``, ``reduce``, ``scale``, ``clip`` and ``update``.
    They are methods that a custom loop may call, and that :meth:`observe` watches.

    Gradients stay in ``grad`` after a step, and are cleared when the next one begins. A custom loop that
    runs afterwards and clears gradients only at its end must call ``optim.zero_grad()`` first.

    Attributes:
        optimizer: the optimizer that updates the weights, or ``None`` until there is one.
        num_steps: number of updates so far.
        grad_norm: the norm of the last step's gradients, 0-d; ``None`` unless they were clipped.
        skipped: whether the last optimizer step was skipped for infinite or NaN gradients.
        times: durations of the last steps on this rank.
        memory: detects growth of this rank's memory from step to step.
        observers: called after every step of this rank, as ``(num_steps, loss, grad_norm)``. They must not
            communicate. Observers that read a tensor wait for the device.
    """

    def __init__(
        self,
        *,
        job: Job,
        optimizer: torch.optim.Optimizer | None,
        loss_func: LossFunction | None,
        prepare_input: Callable[[Any, torch.device], Any],
        runner: BatchRunner | None = None,
    ) -> None:
        self.num_steps = 0
        self._blocks = job.cluster.shared_blocks("a training step")
        self._is_shared = False  # inside a block of sharing_failures
        self.grad_norm: torch.Tensor | None = None
        self.times = StepTimes(job.device)
        self.observers: list[StepObserver] = []
        self.memory = GrowthWatch(job.device)
        if optimizer is not None:
            self.memory.follow(optimizer)
        self._rows = RowCheck(job.cluster, job.num_data_ranks)
        self._watching: dict[tuple[str, Phase], list[PhaseObserver]] = {}
        self._job = job
        self._changes = ForwardChanges(job)
        self.optimizer = optimizer
        self._loss_func = loss_func
        self._prepare_input = prepare_input
        self._runner = runner

    @property
    def skipped(self) -> bool:
        """True if the last optimizer step was skipped."""
        return bool(getattr(self.optimizer, "skipped", False))

    @property
    def timeline(self) -> Sequence[Any]:
        """The timed passes of this rank's last step as a pipeline stage, otherwise empty."""
        return getattr(self._runner, "timeline", ())

    def observe(
        self, phase: Phase, observer: PhaseObserver, *, when: Literal["before", "after"] = "after"
    ) -> Callable[[], None]:
        """Calls ``observer`` before or after each run of a phase, in the order of registration.

        Returns:
            A function that removes it.

        Raises:
            InputError: if there is no such phase.
        """
        if phase not in PHASES or when not in ("before", "after"):
            raise InputError(
                f"no phase {phase!r} can be observed {when!r}.{did_you_mean(phase, PHASES)} Phases are "
                f"{', '.join(PHASES)}, observed 'before' or 'after'."
            )
        if not callable(observer):
            raise InputError(f"an observer must be a function; it is {with_article(observer)}.")
        watching = self._watching.setdefault((when, phase), [])
        watching.append(observer)
        return partial(watching.remove, observer)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Trains on ``batch``.

        Args:
            batch: batch from the data loader, before ``prepare_input``.

        Returns:
            The loss, 0-d and detached, averaged over all data-parallel ranks.

        Raises:
            StepError: if the job has no optimizer or no loss function.
            BatchSizeError: if the micro-batches do not divide the batch.
            RankError: if another rank has failed.
        """
        return self._run_step(lambda: self._mean_of(batch)).loss

    def micro_steps(
        self,
        samples: Sequence[Any],
        *,
        weights: Sequence[float] | None = None,
        losses: Literal["means", "sums"] = "means",
        reduction: Reduction = "mean",
        dummies: Sequence[bool] | None = None,
        scale_fn: LossScale | None = None,
        divisor: Callable[[StepOutput], float] | None = None,
        outputs: bool = False,
    ) -> StepOutput:
        """Trains on custom micro-batches. Collective.

        With weights w_i and losses l_i of all micro-batches of all data ranks, gradients are those of
        ``sum(w_i * l_i) / sum(w_i)``, or of ``sum(l_i) / sum(w_i)`` if losses are sums, such as over tokens.
        With ``reduction="sum"`` nothing is divided. Data ranks with fewer micro-batches get dummies.

        Args:
            samples: micro-batches of this rank, before ``prepare_input``. A pipeline restricts their number.
            weights: w_i, such as numbers of tokens; ``None`` for 1 each.
            losses: whether the loss function returns means over what the weights count, or sums.
            reduction: ``"mean"`` or ``"sum"`` over all micro-batches.
            dummies: micro-batches that contribute neither gradients nor statistics.
            scale_fn: transforms a loss, 0-d, before its backward pass.
            divisor: a further divisor of the gradients, from this rank's output, summed over the data ranks.
                Along other axes the largest counts: ranks with nothing to count give 0.
            outputs: whether this rank wants the model's outputs. A pipeline's last stage sends them.

        Raises:
            InputError: on all ranks, if weights, dummies or the number of samples do not fit.
            StepError: if the job has no optimizer or no loss function.
        """
        work = partial(
            self._weigh_samples,
            samples,
            weights=weights,
            losses=losses,
            reduction=reduction,
            dummies=dummies,
            functions={"scale_fn": scale_fn, "divisor": divisor},
            outputs=outputs,
        )
        return self._run_step(work, divisor)

    def micro_gradients(
        self,
        samples: Sequence[Any],
        *,
        reduction: Reduction = "sum",
        dummies: Sequence[bool] | None = None,
        scale_fn: LossScale | None = None,
        outputs: bool = True,
    ) -> StepOutput:
        """Runs the phases ``zero`` and ``forward_backward`` on micro-batches, for a custom loop.

        After ``reduce``, gradients are those of the sum or mean of losses of all micro-batches of all data
        ranks. The arguments are those of :meth:`micro_steps`.
        """
        with self.sharing_failures():
            self.zero()
            work = self._weigh_samples(
                samples,
                weights=None,
                losses="means",
                reduction=reduction,
                dummies=dummies,
                functions={"scale_fn": scale_fn},
                outputs=outputs,
            )
            return _wait_for_loss(self._forward_backward(work))

    def _run_step(
        self, work: Callable[[], StepWork], divisor: Callable[[StepOutput], float] | None = None
    ) -> StepOutput:
        self._require_optimizer()
        with self.sharing_failures():
            self.times.start()
            self.zero()
            output, loss_arrives = self._forward_backward(work())
            self.reduce()
            if divisor is None:
                self.scale()
            else:
                loss_arrives()
                self.scale(self._one_over(divisor, output))
            self.clip()
            self.update()
            # The loss was reduced while the optimizer ran.
            loss_arrives()
            self.times.stop()
        for observer in tuple(self.observers):  # one may remove itself
            observer(self.num_steps, output.loss, self.grad_norm)
        return output

    def zero(self) -> None:
        """Clears the gradients."""
        optimizer, _ = self._require_optimizer()
        with self._observed_phase("zero"):
            optimizer.zero_grad()

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Adds the gradients of ``batch``, in micro-batches. Returns the loss like :meth:`__call__`."""
        with self.sharing_failures():
            return _wait_for_loss(self._forward_backward(self._mean_of(batch))).loss

    def reduce(self) -> None:
        """Completes the gradients over all ranks. Most are reduced during the last backward pass."""
        with self._observed_phase("reduce"), self._in_scale():
            self._job.gradients.complete(self._job.module)

    def scale(self, factor: float | None = None) -> None:
        """Multiplies all gradients by a number. ``None`` leaves them unchanged."""
        with self._observed_phase("scale"), self._in_scale():
            if factor is not None and factor != 1.0:
                if isinstance(self.optimizer, StepOptimizer):
                    self.optimizer.prepare_gradients()  # also of masters
                with torch.no_grad():
                    for parameter in self._optimizer_parameters():
                        if parameter.grad is not None:
                            parameter.grad.mul_(factor)

    def clip(self) -> None:
        """Clips the gradients, if the job has a ``max_grad_norm``."""
        with self._observed_phase("clip"):
            if self._job.inputs.max_grad_norm is not None:
                self.grad_norm = self.clip_grad_norm_(self._job.inputs.max_grad_norm)

    def update(self) -> None:
        """Steps the optimizer."""
        optimizer, _ = self._require_optimizer()
        with self._observed_phase("update"):
            optimizer.step()
            self.num_steps += 1

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all ranks together. Call it between the backward pass and the step.

        Returns:
            The norm before clipping, 0-d, the same on every rank.

        Raises:
            StepError: if the job has no optimizer.
        """
        if self.optimizer is None:
            raise StepError("clip_grad_norm_ needs an optimizer; pass optim_func to auto_accelerate.")
        if not isinstance(max_norm, (int, float, torch.Tensor)) or not max_norm >= 0:
            raise InputError(f"clip_grad_norm_: max_norm must be a non-negative number; it is {max_norm!r}.")
        if isinstance(self.optimizer, StepOptimizer):
            self.optimizer.prepare_gradients()
        self._job.gradients.complete(self._job.module)
        return self._job.gradients.clip(self._optimizer_parameters(), max_norm, norm_type)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss on ``batch`` without training. Like :meth:`__call__`, a mean over the rows of all ranks.

        A batch may have any number of rows, which may differ between data ranks and need not be divisible
        into micro-batches. The model is in evaluation mode during the call. Collective like a step.

        Raises:
            StepError: if the job has no loss function.
        """
        if self._loss_func is None:
            raise StepError("evaluate needs loss_func; pass it to auto_accelerate.")
        return self._run_evaluation(lambda: self._mean_of(batch, uneven=True)).loss

    def infer(
        self, samples: Sequence[Any], *, dummies: Sequence[bool] | None = None, outputs: bool = True
    ) -> StepOutput:
        """The losses and outputs of micro-batches without training on them. Collective.

        The model is in evaluation mode meanwhile. The arguments are those of :meth:`micro_steps`. Without
        a loss function losses are zero.
        """
        work = partial(
            self._weigh_samples,
            samples,
            weights=None,
            losses="means",
            reduction="mean",
            dummies=dummies,
            functions={},
            outputs=outputs,
        )
        return self._run_evaluation(work)

    @contextmanager
    def _observed_phase(self, phase: Phase) -> Iterator[None]:
        with self.sharing_failures():
            for observer in tuple(self._watching.get(("before", phase), ())):
                observer()
            yield
            for observer in tuple(self._watching.get(("after", phase), ())):
                observer()

    @contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """A context for a loop's phases and the code between them. A failure of one rank ends all."""
        if self._is_shared:  # phases inside a step share the step's block
            yield
            return
        self._is_shared = True
        try:
            with self._blocks.next():
                yield
        finally:
            self._is_shared = False

    def _forward_backward(self, work: StepWork) -> _Arriving:
        num = max(self._job.step.num_micro_batches, len(work.micro_batches))  # the same on all ranks
        with (
            self._observed_phase("forward_backward"),
            self._in_scale(),
            self._step_context(work),
            self._changes.look(num),
        ):
            if self._runner is None:
                return self._build_output(work, self._accumulate_gradients(work))
            optimizer, _ = self._require_optimizer()
            self._job.gradients.sums.expect(self._job.module)
            result = self._runner.forward_backward(work)
            # Only the last stage scales the loss, but the other ranks must count that backward pass.
            if isinstance(optimizer, StepOptimizer) and optimizer.scaler is not None:
                optimizer.scaler.expect_scaled_gradients(self._job.device)
            return self._build_output(work, result)

    def _in_scale(self) -> AbstractContextManager[object]:
        return self.optimizer.in_scale() if isinstance(self.optimizer, StepOptimizer) else nullcontext()

    def _step_context(self, work: StepWork) -> AbstractContextManager[object]:
        # Logits stay sharded over tensor ranks in the context, but requested outputs are whole.
        return nullcontext() if work.askers else self._job.step.context()

    def _accumulate_gradients(self, work: StepWork) -> Passed:
        optimizer, _ = self._require_optimizer()
        job, last = self._job, len(work.micro_batches) - 1
        losses, outputs = [], []
        with job.gradients.as_parts():
            for number, micro_batch in enumerate(work.micro_batches):
                # DeepSpeed reduces at the boundary, so it must know which micro-batch is the last.
                if job.optimizer.requires_boundary:
                    optimizer.set_gradient_accumulation_boundary(number == last)  # type: ignore[attr-defined]
                is_dummy = number in work.dummies
                # Only the last micro-batch reduces, including the accumulated gradients of the others.
                with nullcontext() if number == last else job.gradients.skip_sync():
                    # A dummy must change nothing, so its writes to buffers are discarded.
                    with buffers_lent(job.module) if is_dummy else nullcontext():
                        self._changes.mark(job.module)
                        output, loss = self._forward_micro_batch(micro_batch)
                        self._changes.mark(job.module)
                    losses.append(loss.detach())
                    if work.wants_outputs and not is_dummy:
                        outputs.append(map_tensors(torch.Tensor.detach, output))
                    share = work.share(number, loss)
                    if not share.requires_grad:
                        raise InputError(
                            "the loss has no gradient: it was detached or recreated (loss.detach(), torch.tensor(loss)), "
                            "computed under torch.no_grad(), or does not depend on any trained parameter."
                        )
                    if job.optimizer.use_optim_backward:
                        optimizer.backward(share)  # type: ignore[attr-defined]
                    else:
                        share.backward()
        return _collect_results(losses, outputs, work)

    @torch.no_grad()
    def _run_evaluation(self, make_work: Callable[[], StepWork]) -> StepOutput:
        job = self._job
        roots = (job.model, *job.parts.stages)
        modes = {module: module.training for root in roots for module in root.modules()}
        for root in roots:
            root.eval()
        try:
            with self.sharing_failures(), self._step_context(work := make_work()):
                result = self._run_inference(work) if self._runner is None else self._runner.forward(work)
                return _wait_for_loss(self._build_output(work, result))
        finally:
            for root in roots:
                root.train(modes[root])
            for module, training in modes.items():  # a part may have been in another mode than the whole
                module.training = training

    def _run_inference(self, work: StepWork) -> Passed:
        pairs = [self._forward_micro_batch(micro_batch) for micro_batch in work.micro_batches]
        outputs = [output for number, (output, _) in enumerate(pairs) if number not in work.dummies]
        return _collect_results([loss for _, loss in pairs], outputs if work.wants_outputs else [], work)

    def _forward_micro_batch(self, micro_batch: Any) -> tuple[Any, torch.Tensor]:
        output = call_model(self._job.model, micro_batch, self._job.inputs.model_input_format)
        if self._loss_func is None:
            return output, torch.zeros((), device=self._job.device)
        return output, first_loss(self._loss_func(micro_batch, output))

    def _build_output(self, work: StepWork, result: Passed) -> _Arriving:
        job = self._job
        # One number after another: a tensor of them would need a host copy, which waits for the device.
        terms = [loss * count for loss, count in zip(result.losses.unbind(), work.counts, strict=True)]
        loss, arrives = torch.stack(terms).sum(), _do_nothing
        # Asynchronous, so that reduction and update overlap with it.
        if job.mesh is not None and job.num_data_ranks > 1:
            arrives = dist.all_reduce(loss, group=job.mesh.data_group, async_op=True).wait
        real = [number for number in range(len(work.counts)) if number not in work.dummies]
        losses = result.losses if len(real) == len(work.counts) else result.losses[real]
        return StepOutput(loss=loss, losses=losses, outputs=result.outputs), arrives

    def _one_over(self, divisor: Callable[[StepOutput], float], output: StepOutput) -> float:
        value = divisor(output)
        try:
            local = torch.tensor(
                [self._job.data_rank, float(value)], dtype=torch.float64, device=self._job.device
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"divisor must return one number, but returned {with_article(value)}."
            ) from error
        # [data rank, number] of each rank.
        every = [local]
        if self._job.mesh is not None:
            every = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(every, local)
        # Ranks on other axes see the same samples. Take the largest, as ranks with nothing to count give 0.
        largest: dict[float, float] = {}
        for data_rank, number in torch.stack(every).tolist():
            largest[data_rank] = max(number, largest.get(data_rank, 0.0))
        total = sum(largest.values())
        if not total > 0.0:
            raise InputError(f"the divisor of the gradients is {total} over all data ranks, not positive.")
        return 1.0 / total

    def _mean_of(self, batch: Any, *, uneven: bool = False) -> StepWork:
        job = self._job
        data = self._prepare_input(batch, job.device)
        self._check_same_batch(data)
        parts = job.step.micro_batches(data, uneven=uneven)
        weights = None if job.inputs.weight_func is None else [self._weight_of(part) for part in parts]
        if job.step.loss_check is not None:
            # Only in steps 1, 10, 100, ..., since it calls the loss function again; one part proves nothing.
            is_tested = is_power_of_ten(self.num_steps + 1) and len(parts) * job.num_data_ranks > 1
            job.step.loss_check.law = job.inputs.loss_reduction if is_tested and weights is None else ""
        if weights is None and job.inputs.loss_reduction == "mean":
            if not uneven:
                if num_rows(data) == 0:
                    raise InputError(
                        "this rank's batch has no rows: give it some, or pass weight_func, which can give it weight 0."
                    )
                self._rows.look(num_rows(data))
                return StepWork.mean(parts, job.num_data_ranks)
            rows = map(num_rows, parts)  # without known row counts, all parts count equally
            weights = [1.0 if number is None else float(number) for number in rows]
        batches, fields = weigh(
            parts,
            weights=weights,
            losses="means",
            reduction=job.inputs.loss_reduction,
            # The mean over nothing is not finite, and counts nothing.
            dummies=None if weights is None else [weight == 0.0 for weight in weights],
            outputs=False,
            functions={},
            data_ranks=None if job.mesh is None else (job.data_rank, job.num_data_ranks),
            device=job.device,
        )
        return StepWork(micro_batches=batches, **fields)

    def _weight_of(self, micro_batch: Any) -> float:
        assert self._job.inputs.weight_func is not None
        value = self._job.inputs.weight_func(micro_batch)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"weight_func must return one number for a micro-batch, but returned {with_article(value)}."
            ) from error

    def _weigh_samples(
        self, samples: Sequence[Any], *, functions: Mapping[str, Callable[..., Any] | None], **weights: Any
    ) -> StepWork:
        job = self._job
        if job.step.loss_check is not None:
            job.step.loss_check.law = ""
        data_ranks = None if job.mesh is None else (job.data_rank, job.num_data_ranks)
        batches, fields = weigh(
            samples, data_ranks=data_ranks, device=job.device, functions=functions, **weights
        )
        inputs = [self._prepare_input(sample, job.device) for sample in batches]
        self._check_same_batch(inputs)
        return StepWork(micro_batches=inputs, scale_fn=functions.get("scale_fn"), **fields)

    def _check_same_batch(self, samples: Any) -> None:
        if self._job.step.same_batch is not None:
            self._job.step.same_batch.check(samples)

    def _optimizer_parameters(self) -> list[torch.Tensor]:
        assert self.optimizer is not None
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _require_optimizer(self) -> tuple[torch.optim.Optimizer, LossFunction]:
        if self.optimizer is None or self._loss_func is None:
            if self.optimizer is None:
                raise StepError(
                    "train_step needs optim_func; pass it to auto_accelerate, or call attach_optimizer(result, …)."
                )
            raise StepError("train_step needs loss_func; pass it to auto_accelerate.")
        if isinstance(inner_optimizer(self.optimizer), torch.optim.LBFGS):
            raise StepError(
                "LBFGS evaluates the model several times in one step; write the loop with optim.step(closure)."
            )
        return self.optimizer, self._loss_func


def _collect_results(losses: Sequence[torch.Tensor], outputs: Sequence[Any], work: StepWork) -> Passed:
    rows = torch.stack([loss.detach().to(torch.float32).reshape(()) for loss in losses])
    if work.dummies:  # whose losses may be anything
        rows[sorted(work.dummies)] = 0.0
    return Passed(losses=rows, outputs=tuple(outputs))


def _wait_for_loss(arriving: _Arriving) -> StepOutput:
    output, arrives = arriving
    arrives()
    return output


def _do_nothing() -> None:
    """Needs no wait, since the loss of a single data rank is available at once."""
