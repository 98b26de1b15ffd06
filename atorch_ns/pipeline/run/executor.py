"""Executor of a pipeline step: takes a rank's actions in order, and sends and receives their tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from atorch_ns.capture.random_states import buffers_lent
from atorch_ns.pipeline.cut.graph import TensorSignature
from atorch_ns.pipeline.plan.choose import BUFFERS
from atorch_ns.pipeline.run.forward_pass import StageRange
from atorch_ns.pipeline.run.stage import StageModule
from atorch_ns.pipeline.run.weight_gradients import WeightGradients, linear_layers
from atorch_ns.pipeline.schedule.actions import Action, Orders
from atorch_ns.torch_compat import accumulate_after_backward, reduce_after_backward

Tensors = tuple[torch.Tensor, ...]


class Message(NamedTuple):
    """Tensors for another rank's pass: activations entering its stage (F) or gradients of its results (B)."""

    chain: Literal["F", "B"]
    stage: int
    micro_batch: int


class Timed(NamedTuple):
    """An action, when its turn came, when its tensors had arrived, and when it had handed on its results; in
    ``time.perf_counter`` seconds. On a GPU these are times of the process, ahead of the device."""

    action: Action
    due: float
    begun: float
    ended: float


@dataclass(frozen=True)
class Links:
    """The connections of a rank along a pipeline.

    One group carries what goes to higher ranks and one what goes to lower. On a GPU a group runs the sends
    and receives between two ranks one after the other, so that in one group both could wait for each other.

    Attributes:
        up, down: the groups, of the same ranks, used for nothing else.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's place along the pipeline."""
        return dist.get_rank(self.up)

    def between(self, source: int, target: int) -> dist.ProcessGroup:
        """The group by which one rank sends to another."""
        return self.up if source < target else self.down


def taken_by(action: Action, num_stages: int) -> Message | None:
    """The message that an action waits for; ``None`` if there is none."""
    kind, stage, micro_batch = action
    if kind == "F":
        return Message("F", stage, micro_batch) if stage else None  # the first stage reads the batch itself
    return Message("B", stage, micro_batch) if kind in "BI" and stage + 1 < num_stages else None


def given_by(action: Action, num_stages: int) -> Message | None:
    """The message that an action produces; ``None`` if there is none."""
    kind, stage, micro_batch = action
    if kind == "F":
        return Message("F", stage + 1, micro_batch) if stage + 1 < num_stages else None
    return Message("B", stage - 1, micro_batch) if kind in "BI" and stage else None


class _Inbox:
    """Receives the messages of one rank in the order sent: the needed message, and one ahead.

    A message also confirms the messages of this rank that the other had taken before sending it.
    """

    def __init__(self, execution: Execution, source: int) -> None:
        self._execution = execution
        self._source = source
        self._receives: dict[Message, tuple[Tensors, list[Any]]] = {}  # receives that are under way
        self._queue: deque[Message] = deque()  # in the order in which the other rank sends
        self.taken_before: dict[Message, list[Message]] = {}
        rank, rank_of = execution.links.rank, execution.rank_of
        deliveries: list[Message] = []
        # Every rank knows all orders, so no message has to say what is sent.
        for action in execution.orders[source]:
            request = taken_by(action, len(rank_of))
            if request is not None and rank_of[action.stage + (1 if request.chain == "B" else -1)] == rank:
                deliveries.append(request)
            message = given_by(action, len(rank_of))
            if message is not None and rank_of[message.stage] == rank:
                self._queue.append(message)
                self.taken_before[message] = deliveries
                deliveries = []
        self._post_receive()

    def take(self, message: Message) -> Tensors:
        while message not in self._receives:  # receives match sends by their order alone
            self._post_receive()
        tensors, works = self._receives.pop(message)
        for work in works:
            work.wait()
        if not self._receives:  # the next message arrives while this rank computes
            self._post_receive()
        return tensors

    def _post_receive(self) -> None:
        if not self._queue:
            return
        message = self._queue.popleft()
        links, device = self._execution.links, self._execution.device
        group = links.between(self._source, links.rank)
        specs = self._execution.specs_of(message)
        tensors = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs)
        works = [dist.irecv(tensor, group=group, group_src=self._source) for tensor in tensors]
        self._receives[message] = (tensors, works)


@dataclass
class _CallState:
    """State of a micro-batch in a stage until its backward pass is done.

    Attributes:
        received: tensors that have entered the stage. Their gradients are added later.
        edges: gradient edges of the results, which do not keep the results alive.
        gradients: gradients of the results.
        later: weight gradients that are computed later, if any.
    """

    received: Tensors
    edges: tuple[Any, ...] = ()
    gradients: Tensors = ()
    later: WeightGradients | None = None


@dataclass(kw_only=True)
class Execution:
    """One step of this rank.

    Attributes:
        orders: the actions of all ranks.
        rank_of: the rank of every stage.
        stages: this rank's stages by their numbers, ready for the micro-batches.
        ranges: the stages of every micro-batch: ``ranges[micro_batch][stage]``.
        keeping: context in which forward passes keep activations instead of recomputing them.
        kept: stages whose forward passes run in ``keeping``.
        idle: micro-batches that do not change the stages' buffers.
        whole_backward: whether weight gradients are computed together with input gradients.
        timeline: the actions with their times.
        losses: the losses of the micro-batches, on the rank of the last stage.
    """

    links: Links
    device: torch.device
    orders: Orders
    rank_of: Sequence[int]
    stages: Mapping[int, StageModule]
    ranges: Sequence[Sequence[StageRange]]
    keeping: Callable[[], AbstractContextManager[object]] = nullcontext
    kept: Collection[int] = ()
    idle: Collection[int] = ()
    whole_backward: bool = False
    timeline: list[Timed] = field(default_factory=list)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rank = self.links.rank
        self._order = self.orders[rank]
        self._inboxes = {
            source: _Inbox(self, source) for source in dict.fromkeys(self.rank_of) if source != rank
        }
        self._local: dict[Message, Tensors] = {}  # handed from stage to stage of this rank
        self._outbox: dict[Message, list[tuple[torch.Tensor, Any]]] = {}  # held until the other rank has them
        self._states: dict[tuple[int, int], _CallState] = {}
        self._trains = any(action.kind != "F" for action in self._order)
        # The other rank never waits for this one to receive, so that this one may wait for it to receive.
        self._is_one_way = not self._trains and list(self.rank_of) == sorted(self.rank_of)
        self._again = {action[1:] for action in self._order if action.kind == "R"}  # forward without a graph
        splits = not self.whole_backward and any(action.kind == "I" for action in self._order)
        self._layers = {n: linear_layers(stage) for n, stage in self.stages.items()} if splits else {}

    def run(self) -> None:
        """Runs all actions. Collective over the pipeline."""
        fsdp_stages = [s for s in self.stages.values() if self._trains and isinstance(s, FSDPModule)]
        for stage in fsdp_stages:  # gradients are reduced at the end
            stage.set_is_last_backward(False)
            stage.set_reshard_after_backward(False)  # gathered once for all micro-batches
            stage.set_requires_gradient_sync(False)  # no reduction after each micro-batch
        for action in self._order:
            due = time.perf_counter()
            inputs = self._receive_tensors(action)
            start = time.perf_counter()
            try:
                tensors = self._run_action(action, inputs)
            except Exception:
                self.stages[action.stage].failed = True  # tells it from a lost connection
                raise
            message = given_by(action, len(self.rank_of))
            if message is not None:
                self._hand_on(message, tensors)
            self.timeline.append(Timed(action, due, start, time.perf_counter()))
        for message in list(self._outbox):  # no later message of the other rank confirms these
            self._release_sent(message)
        for stage in fsdp_stages:
            reduce_after_backward(stage)

    def specs_of(self, message: Message) -> list[TensorSignature]:
        """The tensors of a message."""
        stage = self.ranges[message.micro_batch][message.stage]
        crossing = stage.received if message.chain == "F" else stage.sent
        specs = [tensor.spec for tensor in crossing.carried] if crossing else []
        return specs if message.chain == "F" else [spec for spec in specs if spec.requires_grad]

    def _receive_tensors(self, action: Action) -> Tensors:
        message = taken_by(action, len(self.rank_of))
        if message is None:
            return ()
        source = self.rank_of[action.stage + (1 if message.chain == "B" else -1)]
        if source == self.links.rank:
            return self._local.pop(message)
        inbox = self._inboxes[source]
        inputs = inbox.take(message)
        for delivery in inbox.taken_before[message]:  # the other rank took them before it sent this
            self._release_sent(delivery)
        return inputs

    def _release_sent(self, message: Message) -> None:
        for _, work in self._outbox.pop(message):
            work.wait()  # at once, but for the last messages of the step

    def _hand_on(self, message: Message, tensors: Tensors) -> None:
        target = self.rank_of[message.stage]
        if target == self.links.rank:
            self._local[message] = tensors
            return
        group = self.links.between(self.links.rank, target)
        self._outbox[message] = [(t, dist.isend(t, group=group, group_dst=target)) for t in tensors]
        while self._is_one_way and len(self._outbox) > BUFFERS:  # no message comes back to confirm any
            self._release_sent(next(iter(self._outbox)))

    def _run_action(self, action: Action, inputs: Tensors) -> Tensors:
        kind, number, micro_batch = action
        key = (number, micro_batch)
        if kind == "F":
            crossing = self.ranges[micro_batch][number].received
            for tensor, value in zip(inputs, crossing.carried if crossing else (), strict=True):
                tensor.requires_grad_(value.spec.requires_grad)  # leaves, whose gradients are sent back
            later = WeightGradients(self._layers[number]) if self._layers else None
            state = _CallState(inputs, later=later)
            if self._trains:  # else nothing reads it again
                self._states[key] = state
            results = self._run_forward(action, state, with_graph=key not in self._again)
            if number + 1 == len(self.rank_of):
                self.losses[micro_batch] = results[0].detach()
            return tuple(tensor.detach() for tensor in results)
        state = self._states[key]
        if kind == "R":
            # The forward pass has updated the buffers already. Now all activations are kept.
            with self.keeping(), buffers_lent(self.stages[number]):
                self._run_forward(action, state, with_graph=True)
            return ()
        gradients: Tensors = ()
        if kind != "W":
            state.gradients = inputs or state.gradients  # the last stage begins with ones
            self._run_backward(state)
            gradients, state.received = _gradients_of(state.received), ()
        if kind != "I":
            if state.later is not None:
                state.later.add()
                accumulate_after_backward(self.stages[number])  # the hooks of fully_shard ran before
            del self._states[key]
        return gradients

    def _run_forward(self, action: Action, state: _CallState, *, with_graph: bool) -> Tensors:
        stage = self.stages[action.stage]
        keeping = self.keeping if action.stage in self.kept else nullcontext
        loan = buffers_lent(stage) if action.micro_batch in self.idle else nullcontext()
        with nullcontext() if with_graph else torch.no_grad(), keeping(), loan, state.later or nullcontext():
            output = stage(*state.received, index=action.micro_batch)
        results: Tensors = output if isinstance(output, tuple) else (output,)
        grad_results = tuple(tensor for tensor in results if tensor.requires_grad)
        state.edges = tuple(get_gradient_edge(tensor) for tensor in grad_results)  # an edge keeps no tensor
        if action.stage + 1 == len(self.rank_of):
            state.gradients = tuple(torch.ones_like(loss) for loss in grad_results)
        return results

    def _run_backward(self, state: _CallState) -> None:
        run = torch.autograd.backward if state.later is None else state.later.backward
        if state.edges:  # none where nothing trains up to here
            run(state.edges, state.gradients)
        state.edges = state.gradients = ()


def _gradients_of(tensors: Tensors) -> Tensors:
    # The other rank expects a tensor for each, even without a gradient. Sends need contiguous memory.
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return tuple(torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in leaves)
