"""What changes inside a block that runs on a part of the sequence: attention, and position numbers.

Legend: T positions of the whole sequence, L of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from atorch_ns.errors import InputError
from atorch_ns.sharding._attention_calls import AttentionCall, read_call
from atorch_ns.sharding._multi_head import multi_head_attention
from atorch_ns.sharding._position_calls import position_count, square_view, with_positions
from atorch_ns.sharding._ring import ring_attention
from atorch_ns.sharding._sequence_layout import SequenceLayout
from atorch_ns.sharding._sequence_plan import BlockPlan
from atorch_ns.sharding._ulysses import ulysses_attention, whole_mask

__all__ = ["DividedCalls", "SeenCalls"]


class SeenCalls(TorchFunctionMode):
    """Notes what a block calls, and runs it as it is.

    Args:
        length: T, unlike other sizes in the block.

    Attributes:
        attentions: the attention calls in order.
        sites: which of the position numbers, tables and square masks are T long.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.attentions: list[AttentionCall] = []
        self.sites: set[int] = set()
        self._length = length
        self._count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.attentions.append(read_call(args, kwargs))
        elif func is F.multi_head_attention_forward:
            multi_head_attention(self._note, lambda mask, _: mask, *args, **kwargs)
        elif (count := position_count(func, args, kwargs)) is not None:
            if count == self._length:
                self.sites.add(self._count)
            self._count += 1
        return func(*args, **kwargs)

    def _note(self, call: AttentionCall) -> torch.Tensor:
        self.attentions.append(call)
        return call.run()


class DividedCalls(TorchFunctionMode):
    """Lets a block that sees L of T positions compute what it computes for them when it sees all.

    Attention sees the keys of all ranks. Numbers from 0 to L-1 become this rank's positions or those of all,
    and the first L rows of a table the rows of these, where the plan says that they mean the sequence.

    Args:
        plan: of the block.
        layout: who holds which positions.
        group: the ranks.

    Attributes:
        crossed: the attention calls so far whose keys are no part of the sequence.
    """

    def __init__(self, plan: BlockPlan, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.crossed: set[int] = set()
        self._plan = plan
        self._layout = layout
        self._group = group
        self._num_attentions = 0
        self._num_sites = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(read_call(args, kwargs))
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._attention, self._whole, *args, **kwargs)
        if self._plan.sites and (count := position_count(func, args, kwargs)) is not None:
            self._num_sites += 1
            numbers = self._plan.sites.get(self._num_sites - 1)
            if numbers is not None:
                self._expect(count)
                return with_positions(func, args, kwargs, self._layout, numbers)
        view = square_view(func, args, kwargs, self._layout)
        return func(*args, **kwargs) if view is None else view

    def enter(self) -> None:
        """From here on, in this thread."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """No longer."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _attention(self, call: AttentionCall) -> torch.Tensor:
        place = self._num_attentions
        self._num_attentions += 1
        call = call.cast()
        if call.query.size(-2) != self._layout.local:
            raise InputError(
                f"an attention call has {call.query.size(-2)} queries where this rank holds "
                f"{self._layout.local} positions: only queries that are the sequence's can be divided."
            )
        if place in self._plan.crossed or call.key.size(-2) != self._layout.local:
            self.crossed.add(place)
            return self._cross(call)
        if self._plan.kind == "ring":
            return ring_attention(call, self._layout, self._group)
        return ulysses_attention(call, self._layout, self._group)

    def _cross(self, call: AttentionCall) -> torch.Tensor:
        """Keys that every rank has whole: each rank attends to them with its own queries."""
        if call.causal:
            raise InputError("a causal attention call sees keys that are not divided as its queries are.")
        mask = call.mask
        if mask is not None and mask.dim() > 1 and mask.size(-2) == self._layout.length:
            mask = self._layout.select(mask, -2)
        return call.with_mask(mask).run()

    def _whole(self, mask: torch.Tensor, crossed: bool) -> torch.Tensor:
        return mask if crossed else whole_mask(mask, self._layout, self._group)

    def _expect(self, count: int) -> None:
        if count != self._layout.local:
            raise InputError(
                f"a block made {count} position numbers where this rank holds {self._layout.local} positions. "
                "Its code takes another course than when it was tested; pass position ids into it instead."
            )
