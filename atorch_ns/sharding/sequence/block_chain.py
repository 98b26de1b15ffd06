"""Block chain: neighbouring blocks that run on parts of the sequence; between joined ones it stays divided.

A block takes this rank's positions out of its whole input and gathers the result, so that embeddings, heads,
losses and the code between blocks see whole sequences. Between joined blocks neither happens. A recomputation
needs nothing but a block's arguments and its notes of the forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from atorch_ns.capture.blocks import NamedModule
from atorch_ns.capture.nests import Path, leaves, map_leaves
from atorch_ns.errors import InputError
from atorch_ns.sharding.collectives import scale_gradient
from atorch_ns.sharding.rank_context import RankRandomness, call_in_thread
from atorch_ns.sharding.sequence.block_calls import DividedCalls
from atorch_ns.sharding.sequence.plan import (
    BlockPlan,
    SequenceLayout,
    SequenceSettings,
    divide_arguments,
    find_hidden,
    gather_results,
)
from atorch_ns.sharding.sequence.selftest import TestedBlock, find_block_plan
from atorch_ns.sharding.sequence.tokens import DividedTokens, TokenPart
from atorch_ns.torch_compat import in_backward, pipeline_unit, plain_name


@dataclass
class _Call:
    calls: DividedCalls
    plan: BlockPlan
    layout: SequenceLayout
    is_random: bool


# The tensors that a block is called with: paths, numbers of dimensions, and which may be masks of a row each.
_Form = frozenset[tuple[Path, int, bool]]


@dataclass
class _Known:
    """The plans of equal blocks by their call, and a copy to test until each has been called."""

    copy: nn.Module | None
    uncalled: set[int] = field(default_factory=set)
    plans: dict[_Form, BlockPlan | InputError] = field(default_factory=dict)


class BlockChain:
    """Neighbouring blocks of a model. Initially no block is joined to the next.

    Args:
        blocks: the blocks, in the order of their calls.
        kinds: a text for each block that is equal for equal blocks.
    """

    def __init__(
        self, blocks: Sequence[NamedModule], kinds: Sequence[str], settings: SequenceSettings
    ) -> None:
        self.blocks = tuple(blocks)
        self._kinds = tuple(kinds)
        self._settings = settings
        self._plans_by_kind: dict[str, _Known] = {}
        self._plans: dict[int, BlockPlan] = {}  # of each block's last call
        self._whole: dict[int, InputError] = {}  # blocks that run whole, and why they cannot be divided
        self._zigzag: bool | None = None  # None until a plan has decided
        self._joints: dict[int, frozenset[Path]] = {}  # by joined block: results that it gathers
        self._divides_tail = False
        # The path of the hidden states that the last block has handed on, and this rank's positions of them.
        self._tail: tuple[Path, TokenPart] | None = None
        self._has_part = False  # whether the first block was last given this rank's positions
        self._due: int | None = None  # the block that must be called next
        self._lengths = WeakTensorKeyDictionary()  # T by the parts that blocks handed on
        self._last_length = 0  # T of the last call on parts
        self._running: list[_Call | None] = []  # a stack; None for a block that runs whole
        self._randomness = RankRandomness(settings.group.rank(), settings.device)

    def attach(self) -> None:
        """Surrounds the forward passes of the blocks."""
        for index, (block, kind) in enumerate(zip(self.blocks, self._kinds, strict=True)):
            if kind not in self._plans_by_kind:
                duplicate = _test_copy(block.module)
                if self._settings.restore_precision is not None:
                    self._settings.restore_precision(duplicate)
                self._plans_by_kind[kind] = _Known(duplicate)
            self._plans_by_kind[kind].uncalled.add(index)
            block.module.register_forward_pre_hook(self._make_enter_hook(index), with_kwargs=True)
            block.module.register_forward_hook(self._make_leave_hook(index), always_call=True)

    def join(self, places: Mapping[int, Sequence[tuple[Path, Path]]]) -> None:
        """Makes blocks hand on divided results. Do not call it between a forward pass and its backward pass.

        Args:
            places: blocks whose result the next one takes and nothing else sees, by index; for each, paths of
                the same tensors in its result and in the next's arguments, hidden states first. A part that
                is whole in the other is gathered, and until that is known, all but hidden states.
        """
        self._joints, self._due = {}, None
        for block_index, links in places.items():
            if self._whole.keys() & {block_index, block_index + 1}:  # one of the two runs whole
                continue
            following = self._plans.get(block_index + 1)
            hidden = [path for _, path in links[:1]]
            parts: Container[Path] = hidden if following is None else following.divided
            self._joints[block_index] = frozenset(source for source, path in links if path not in parts)

    def divide_tail(self, root: nn.Module) -> None:
        """Passes :class:`DividedTokens` instead of whole hidden states to the code after the last block.

        They are made when ``root`` is first called, around all wrappers of the block: a recomputation may run
        the block without gradients, and a compiler would trace them.
        """
        self._divides_tail = True
        self._when_wrapped(
            root, -1, lambda outermost: outermost.register_forward_hook(torch.compiler.disable(self._hand_on))
        )

    def divide_head(self, root: nn.Module) -> None:
        """Divides the first block's input before its wrappers once planned, so recomputation keeps a part."""

        def attach(outermost: nn.Module) -> None:
            _, unit = pipeline_unit(outermost)
            take_in = torch.compiler.disable(self._take_in)
            unit.register_forward_pre_hook(take_in, with_kwargs=True, prepend=True)

        self._when_wrapped(root, 0, attach)

    def _when_wrapped(self, root: nn.Module, index: int, attach: Callable[[nn.Module], object]) -> None:
        path = plain_name(self.blocks[index].name)

        def before(module: nn.Module, args: Any) -> None:
            if module is not root:  # a copy
                return
            handle.remove()
            # Wrappers have the plain name of what they wrap; the outermost one comes first.
            attach(next(wrapper for name, wrapper in module.named_modules() if plain_name(name) == path))

        handle = root.register_forward_pre_hook(torch.compiler.disable(before))

    def _take_in(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        arguments, group = (args, kwargs), self._settings.group
        hidden = find_hidden(arguments, self._settings.dim)
        plan = self._plans_by_kind[self._kinds[0]].plans.get(_argument_form(arguments))
        self._has_part = hidden is not None and isinstance(plan, BlockPlan) and hidden[0] in plan.divided
        # Before its first test a block must get whole hidden states.
        if hidden is None or not isinstance(plan, BlockPlan) or not self._has_part:
            return None
        path, whole = hidden
        self._last_length = whole.size(self._settings.dim)
        part = self._sequence_layout(self._last_length).divide(whole, plan.divided[path], group)
        part = scale_gradient(part, 1 / group.size())  # as divide_arguments has it
        self._lengths[part] = self._last_length
        return map_leaves(lambda leaf_path, leaf: part if leaf_path == path else leaf, arguments)

    def _hand_on(self, module: nn.Module, args: Any, output: Any) -> Any:
        tail, self._tail = self._tail, None
        if tail is None:
            return None
        target, at = tail
        return map_leaves(lambda path, leaf: DividedTokens.of(leaf, at) if path == target else leaf, output)

    @property
    def num_joined(self) -> int:
        """The number of blocks that hand their result on divided."""
        return len(self._joints)

    def plans(self) -> dict[str, BlockPlan]:
        """The plans in use, each by the name of the first block that has it."""
        block_plans: dict[str, BlockPlan] = {}
        for index, plan in sorted(self._plans.items()):
            if plan not in block_plans.values():
                block_plans[self.blocks[index].name] = plan
        return block_plans

    def left_whole(self) -> dict[str, InputError]:
        """The names of the blocks that run whole, with the reason."""
        return {self.blocks[index].name: why for index, why in sorted(self._whole.items())}

    def _make_enter_hook(self, index: int) -> Any:
        def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is not self.blocks[index].module:  # a copy under test
                return None
            arguments = (args, kwargs)
            length = self._length_of(index, arguments)
            plan = self._plan_for_call(index, arguments, length)
            if plan is None:
                self._running.append(None)  # the block runs whole
                return None
            layout = self._sequence_layout(length)
            arguments = divide_arguments(arguments, plan, layout, self._settings.group)
            calls = DividedCalls(plan, layout, self._settings.group)
            calls.enter()
            if module.training:
                self._randomness.enter()
            self._running.append(_Call(calls, plan, layout, module.training))
            return arguments

        return torch.compiler.disable(entering)

    def _make_leave_hook(self, index: int) -> Any:
        def leaving(module: nn.Module, args: Any, output: Any) -> Any:
            if module is not self.blocks[index].module or not self._running:  # or it failed before it began
                return None
            call = self._running.pop()
            if call is None:
                self._tail = None
                return None
            if call.is_random:  # undone in the reverse order of entering
                self._randomness.leave()
            call.calls.leave()
            if output is None:  # the call failed
                return None
            call.calls.check()
            # A joined block gathers only the results that the next one takes whole.
            plan, paths = call.plan, self._joints.get(index)
            if paths is not None:
                self._last_length = call.layout.length
                self._lengths.update(
                    {leaf: self._last_length for path, leaf in leaves(output) if path in plan.outputs}
                )
                if paths.isdisjoint(plan.outputs):
                    return None
                plan = replace(
                    plan, outputs={path: plan.outputs[path] for path in paths & plan.outputs.keys()}
                )
            elif self._divides_tail and index == len(self.blocks) - 1:
                plan = self._without_tail(plan, call.layout, output)
            return gather_results(output, plan, call.layout, self._settings.group)

        return torch.compiler.disable(leaving)

    def _without_tail(self, plan: BlockPlan, layout: SequenceLayout, output: Any) -> BlockPlan:
        hidden = find_hidden(output, self._settings.dim)
        dim = None if hidden is None else plan.outputs.get(hidden[0])
        if hidden is None or dim is None:
            self._tail = None
            return plan
        # Not gathered: `_hand_on` shows them as DividedTokens.
        self._tail = hidden[0], TokenPart(layout, self._settings.group, dim, length=layout.length)
        return replace(plan, outputs={path: dim for path, dim in plan.outputs.items() if path != hidden[0]})

    def _length_of(self, index: int, arguments: Any) -> int:
        name = self.blocks[index].name
        entry = find_hidden(arguments, self._settings.dim)
        if entry is None:
            raise InputError(
                f"sequence_parallel: {name} is called with no floating tensor of more than "
                f"{self._settings.dim} dimensions, so there are no hidden states to divide. Set sequence_dim, or "
                "name other modules in blocks."
            )
        if not in_backward():  # a recomputation calls the blocks that it needs
            due = self._due if self._due is not None else None if self._is_first(index) else index - 1
            if index != 0 and due is not None and index != self._due:
                raise InputError(
                    f"sequence_parallel: {name} is called where {self.blocks[due].name} should be. The "
                    "blocks of a chain must be called one after another, none left out (set layer dropout to 0); "
                    "name in blocks only those that are."
                )
            self._due = index + 1 if index in self._joints else None
        hidden = entry[1]
        size = hidden.size(self._settings.dim)
        if self._is_first(index):
            is_part = self._has_part
            if in_backward():  # of this call or of another
                is_part = is_part and size == self._sequence_layout(self._last_length).local
            if index or not is_part:
                return int(self._lengths.get(hidden, size))
        # What wraps a block may hand on another tensor with the same values: then the last length holds.
        return int(self._lengths.get(hidden, self._last_length))

    def _is_first(self, index: int) -> bool:
        return index == 0 or index - 1 not in self._joints  # it takes whole hidden states

    def _sequence_layout(self, length: int) -> SequenceLayout:
        group = self._settings.group
        return SequenceLayout(length, group.size(), group.rank(), bool(self._zigzag))

    def _plan_for_call(self, index: int, arguments: Any, length: int) -> BlockPlan | None:
        record = self._plans_by_kind[self._kinds[index]]
        form = _argument_form(arguments)
        plan = record.plans.get(form)
        if plan is None:
            plan = record.plans[form] = self._find_plan(index, arguments, length)
        record.uncalled.discard(index)
        if not record.uncalled:
            record.copy = None  # all equal blocks have been called: frees its memory
        if isinstance(plan, InputError):
            self._whole[index] = plan
            return None
        self._plans[index] = plan
        return plan

    def _find_plan(self, index: int, arguments: Any, length: int) -> BlockPlan | InputError:
        record = self._plans_by_kind[self._kinds[index]]
        device, duplicate, name = self._settings.device, record.copy, self.blocks[index].name
        if duplicate is None:  # called with other tensors later, when nothing is left to test
            likeliest = next(iter(record.plans.values()))
            if isinstance(likeliest, BlockPlan) and likeliest.products:
                raise InputError(
                    f"sequence_parallel: {name} is called with different tensors than in the first batch. It writes its "
                    "attention out as matrix products, so masks that appear later were not tested. Give the first "
                    "batch everything that others have, such as an attention_mask with padding."
                )
            return likeliest
        subject = TestedBlock(
            name=name,
            # Outside of modes that follow this pass's tensors: a tensor with references cannot be swapped.
            block=call_in_thread(lambda: duplicate.to(device), device),
            arguments=arguments,
            length=length,
            zigzag=self._zigzag,
            may_stay_whole=self._settings.leave_whole and index not in self._joints and self._is_first(index),
            settings=self._settings,
        )
        outcome = find_block_plan(subject)
        if isinstance(outcome, InputError):
            return outcome
        plan, self._zigzag = outcome
        return plan


def _argument_form(arguments: Any) -> _Form:
    return frozenset(
        (path, leaf.dim(), leaf.dim() > 3 and leaf.size(-2) > 1)
        for path, leaf in leaves(arguments)
        if isinstance(leaf, torch.Tensor)
    )


def _test_copy(block: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    duplicate = copy.deepcopy(block)
    if any(tensor.is_meta for tensor in (*duplicate.parameters(), *duplicate.buffers())):
        duplicate = duplicate.to_empty(device="cpu")
        blank = True  # no values to add noise to
    else:
        blank = False
    duplicate = duplicate.float().eval()
    with torch.no_grad():
        # Noise, since a block whose last weights are zero would pass any test. Without values, matrices are
        # noise around 0, and vectors are noise around 1, as norms have them.
        for tensor in (*duplicate.parameters(), *(duplicate.buffers() if blank else ())):
            if tensor.is_floating_point():
                values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                spread = max(values.shape, default=1) ** -0.5
                noise = torch.randn(values.shape, generator=generator).to(values) * spread
                values.copy_(noise + float(values.dim() < 2) if blank else values + 0.2 * noise)
    return duplicate
