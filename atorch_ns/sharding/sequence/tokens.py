"""Divided tokens, which look like whole samples while each rank holds its positions, and losses on them.

Functions that treat positions alike are computed on the part: the last norm, the head, element-wise
functions, sums over features. A cross-entropy, a sum or a mean over positions is computed for this rank's own
and summed over ranks. Anything else gathers whole samples first.

As inside a block, gradients of the part are those of the whole times the number of ranks: weights then get
the mean over ranks, which leaves unchanged what each rank computes whole.

Legend: B samples, T positions of the whole tensor, L positions of this rank, V classes, n ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from atorch_ns.sharding.collectives import Group, copy_to, reduce_from, scale_gradient
from atorch_ns.sharding.divided_tensor import (
    DividedTensor,
    LogitUses,
    LossCall,
    changes_in_place,
    on_whole,
    whole_logits,
)
from atorch_ns.sharding.sequence.plan import SequenceLayout
from atorch_ns.torch_compat import tensor_without_storage


def _find_functions(names: str, *homes: Any) -> frozenset[Any]:
    return frozenset(getattr(home, name) for name in names.split() for home in homes if hasattr(home, name))


# Functions applied to each position independently. Other tensor arguments are broadcast.
_ELEMENTWISE: Final = _find_functions(
    "float half bfloat16 double to type type_as contiguous clone detach cpu cuda neg abs exp log log1p sqrt rsqrt square "
    "pow tanh sigmoid relu clamp clamp_min clamp_max masked_fill add sub mul div true_divide eq ne lt le gt ge bool long "
    "int logical_and logical_or logical_not isnan isinf where minimum maximum softplus gelu silu nan_to_num __neg__ "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__ __and__ __or__ __invert__",
    Tensor,
    torch,
    F,
)
# Functions of the last dimensions at each position. Their other tensors are weights.
_WITH_WEIGHTS: Final = _find_functions("linear layer_norm rms_norm", F, torch)
# Functions over dimensions, ``dim``.
_OVER_FEATURES: Final = _find_functions(
    "sum mean amax amin argmax argmin logsumexp var std prod all any softmax log_softmax norm",
    Tensor,
    torch,
    F,
)
_SUMS: Final = _find_functions("sum mean", Tensor, torch)
_OVER_SEVERAL: Final = _SUMS | _find_functions("amax amin logsumexp var std", Tensor, torch)
_SAME_SHAPE: Final = _find_functions("softmax log_softmax", Tensor, torch, F)
_UNBIASED_FIRST: Final = _find_functions("var std", Tensor, torch)  # whose first flag is ``unbiased``
_MEANS: Final = _find_functions("mean", Tensor, torch)
_VIEWS: Final = _find_functions("view reshape", Tensor, torch)
_GATHER: Final = _find_functions("gather", Tensor, torch)
_RESHAPED: Final = _find_functions("flatten unsqueeze squeeze transpose swapaxes", Tensor, torch)
_DROPOUT: Final = _find_functions("dropout", F, torch)
_MATMUL: Final = _find_functions("matmul __matmul__ mm", Tensor, torch)


def _keeps_dims(func: Callable[..., Any], rest: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    # Whether a function over dimensions keeps them in its result. ``rest`` holds the arguments after ``dim``.
    flags = [argument for argument in rest if isinstance(argument, bool)][func in _UNBIASED_FIRST :]
    return func in _SAME_SHAPE or bool(keywords.get("keepdim", flags[0] if flags else False))


@dataclass(frozen=True)
class TokenPart:
    """The positions that a rank holds of a tensor.

    Attributes:
        layout: the positions of each rank in the whole sequence.
        group: the ranks; ``None`` to compute only shapes, without communication.
        dim: the dimension of positions in the part.
        merged: whether earlier dimensions are flattened into ``dim`` in the whole tensor, sample by sample.
        start, length: the tensor has the ``length`` (T) positions of the sequence from ``start`` on.
    """

    layout: SequenceLayout
    group: Group | None
    dim: int
    merged: bool = False
    start: int = 0
    length: int = 0

    def whole_shape(self, part: Sequence[int]) -> list[int]:
        """The shape of the whole tensor."""
        shape = list(part)
        shape[self.dim] = self.length
        return [math.prod(shape[: self.dim + 1]), *shape[self.dim + 1 :]] if self.merged else shape

    @property
    def whole_dim(self) -> int:
        """The dimension of positions in the whole tensor."""
        return 0 if self.merged else self.dim

    def part_dim(self, dim: int, num_dims: int) -> int:
        """The part's dimension for ``dim`` of a whole tensor with ``num_dims``."""
        return dim % num_dims + (self.dim if self.merged else 0)

    def local_indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's positions [L] as indices of the whole tensor, and a mask that is False for padding."""
        places = self.layout.places(self.layout.rank, device)
        real = (places < self.layout.length) & (places >= self.start) & (places < self.start + self.length)
        return (places - self.start).clamp_(0, max(0, self.length - 1)), real  # some valid index for the rest

    def mask(self, part: torch.Tensor) -> torch.Tensor:
        """Boolean mask of the positions that count, in a shape that broadcasts to ``part``."""
        shape = [1] * part.dim()
        shape[self.dim] = -1
        return self.local_indices(part.device)[1].view(shape)

    def select(self, whole: torch.Tensor, dim: int, lead: Sequence[int]) -> torch.Tensor:
        """This rank's positions of a whole tensor, along ``dim``; ``lead``: sizes that are merged with it."""
        if self.merged:
            whole = whole.unflatten(0, (*lead, self.length))
            dim = self.dim
        return whole.index_select(dim, self.local_indices(whole.device)[0])

    def spread(self, whole: torch.Tensor, lead: Sequence[int]) -> torch.Tensor:
        """This rank's positions of a whole tensor's gradient; zeros for positions that the tensor lacks."""
        part = self.select(whole, self.dim, lead)
        return part.masked_fill(~self.mask(part), 0)

    def enter(self, other: Any) -> Any:
        """Prepares an argument of functions on parts. A value computed whole gets its whole gradient. A
        parameter keeps the gradient of this rank's positions, which is averaged over ranks once a step."""
        if self.group is None or not isinstance(other, Tensor) or not other.requires_grad or other.is_leaf:
            return other
        return scale_gradient(copy_to(other, self.group), 1 / self.layout.ranks)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of ``value`` over the ranks, with gradients as this module has them."""
        if self.group is None:
            return value
        return reduce_from(scale_gradient(value, float(self.layout.ranks)), self.group)


class DividedTokens(DividedTensor):
    """A tensor that looks like the whole […, T, …] and holds this rank's […, L, …], maybe divided logits."""

    part_name = "a part of the positions"
    method = "sequence_parallel"

    _at: TokenPart

    @staticmethod
    def of(part: torch.Tensor, at: TokenPart, uses: LogitUses | None = None) -> DividedTokens:
        """The tensor of which this rank holds ``part``."""
        tokens: DividedTokens = _Joined.apply(part, at)  # type: ignore[no-untyped-call]
        tokens._part, tokens._at, tokens._uses, tokens._wholes = part, at, uses, {}
        return tokens

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DividedTokens(this rank's {self._part!r}, divided along {self._at.dim})"

    def _gather_whole(self) -> torch.Tensor:
        part: torch.Tensor = whole_logits(self._part)
        at = self._at
        if at.group is None:
            return part.new_zeros(at.whole_shape(part.shape)) + 0 * part.sum()  # keeps the graph
        whole = at.layout.gather(scale_gradient(part, float(at.layout.ranks)), at.dim, at.group)
        return whole.narrow(at.dim, at.start, at.length).reshape(at.whole_shape(part.shape))

    def of_rank(
        self, whole: torch.Tensor, group: Group, uses: LogitUses
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
        """See :class:`DividedTensor`."""
        at = replace(self._at, layout=replace(self._at.layout, rank=group.rank()), group=group)
        lead, ranks = self._leading_sizes, float(group.size())
        part = at.select(whole, at.dim, lead).contiguous()
        return (
            part,
            lambda gradient: at.spread(gradient, lead) * ranks,
            lambda part: DividedTokens.of(part, at, uses),
        )

    @classmethod
    def _on_parts(
        cls, tensor: DividedTokens, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func not in _DROPOUT and changes_in_place(func, args, kwargs):
            return NotImplemented
        if func in _ELEMENTWISE:
            return tensor._map_elements(func, args, kwargs)
        if not args or args[0] is not tensor:
            return NotImplemented
        others = [operand for operand in (*args[1:], *kwargs.values()) if isinstance(operand, DividedTokens)]
        if func in _GATHER:
            return tensor._gather_features(*args[1:], **kwargs)
        if others:
            return NotImplemented
        if func in _WITH_WEIGHTS or func in _MATMUL:
            return tensor._with_weights(func, args, kwargs)
        if func in _DROPOUT:
            settings = {
                "p": 0.5,
                "training": True,
                **dict(zip(("p", "training"), args[1:3], strict=False)),
                **kwargs,
            }
            # Then no rank draws numbers. torch.dropout has another name for the mode.
            idle = not settings.get("train", settings["training"]) or settings["p"] == 0
            return tensor._wrap_part(tensor._part.clone()) if idle else NotImplemented
        if func in _OVER_FEATURES:
            return tensor._run_over_dims(func, args[1:], kwargs)
        if func in _VIEWS:
            return tensor._view_tokens(args[1:], kwargs)
        if func in _RESHAPED:
            return tensor._reshape_tokens(func, args[1:], kwargs)
        return tensor._index_tokens(args[1]) if func is Tensor.__getitem__ else NotImplemented

    def through(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Applies a function of the last dimension, such as a divided layer. Results may be split along V."""
        has_features = self._at.whole_dim < self.dim() - 1
        out: torch.Tensor = self._wrap_part(function(self._part)) if has_features else function(self.whole())
        return out

    def _wrap_part(self, part: torch.Tensor, **changes: Any) -> DividedTokens:
        return DividedTokens.of(part, replace(self._at, **changes), self._uses)

    def _map_elements(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = [self._localise_argument(argument) for argument in args]
        keywords = {name: self._localise_argument(argument) for name, argument in kwargs.items()}
        if any(argument is NotImplemented for argument in (*parts, *keywords.values())):
            return NotImplemented
        out = func(*parts, **keywords)
        # The result must have its positions in the dimension where the part has them.
        size = self._part.size(self._at.dim)
        if not isinstance(out, Tensor) or out.dim() != self._part.dim() or out.size(self._at.dim) != size:
            return NotImplemented
        self._note_parameters(args, kwargs)
        return self._wrap_part(out)

    def _localise_argument(self, other: Any) -> Any:
        if isinstance(other, DividedTokens):
            alike = other._at == self._at and other._part.dim() == self._part.dim()
            return other._part if alike else NotImplemented  # else it is at other positions
        if not isinstance(other, Tensor):
            return NotImplemented if isinstance(other, (list, tuple)) else other
        after = self.dim() - 1 - self._at.whole_dim  # dimensions after that of positions
        if other.dim() > self.dim():
            return NotImplemented
        if other.dim() <= after or other.size(-1 - after) == 1:
            return self._at.enter(other)  # it is the same for all positions
        if other.size(-1 - after) != self.size(self._at.whole_dim):
            return NotImplemented
        return self._at.select(self._at.enter(other), other.dim() - 1 - after, self._leading_sizes)

    @property
    def _leading_sizes(self) -> Sequence[int]:
        return self._part.shape[: self._at.dim]  # those of the part before positions

    def _with_weights(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        after = self.dim() - 1 - self._at.whole_dim
        if func in _MATMUL:
            if not isinstance(args[1], Tensor) or args[1].dim() != 2 or not after:
                return NotImplemented
            func = torch.matmul  # the part may have more dimensions
        else:
            shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
            if after < (1 if isinstance(shape, Tensor) else len(tuple(shape))):
                return NotImplemented
        self._note_parameters(args, kwargs)
        weights = [self._at.enter(argument) for argument in args[1:]]
        keywords = {name: self._at.enter(argument) for name, argument in kwargs.items()}
        return self._wrap_part(func(self._part, *weights, **keywords))

    def _note_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._uses is not None:
            tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]
            self._uses.parameters += [
                tensor
                for tensor in tensors
                if not isinstance(tensor, DividedTokens) and tensor.requires_grad and tensor.is_leaf
            ]

    def _run_over_dims(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keywords, rest = dict(kwargs), list(args)
        dims = rest.pop(0) if rest else keywords.pop("dim", None)
        # norm takes its order before dims. Without dims positions are included: only sums can be added up.
        if func is Tensor.norm or func is torch.norm or (dims is None and func not in _SUMS):
            return NotImplemented
        if isinstance(dims, torch.dtype) or any(isinstance(argument, Tensor) for argument in (dims, *rest)):
            return NotImplemented
        listed_dims = range(self.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
        whole_dims = [dim % self.dim() for dim in listed_dims]  # of this tensor, counted from 0
        part_dims = [self._at.part_dim(dim, self.dim()) for dim in whole_dims]
        if self._at.whole_dim in whole_dims:  # over positions, which other ranks have too
            return self._sum_positions(func, whole_dims, rest, keywords) if func in _SUMS else NotImplemented
        if len(part_dims) > 1 and func not in _OVER_SEVERAL:
            return NotImplemented
        output = func(
            self._part, part_dims[0] if isinstance(dims, int) else tuple(part_dims), *rest, **keywords
        )
        # The dimension of positions moves by those before it that the function removes.
        removed_dims = [] if _keeps_dims(func, rest, keywords) else part_dims
        return self._wrap_part(output, dim=self._at.dim - sum(dim < self._at.dim for dim in removed_dims))

    def _sum_positions(
        self, func: Callable[..., Any], axes: Sequence[int], rest: list[Any], keywords: dict[str, Any]
    ) -> Any:
        at = self._at
        if rest or keywords.keys() - {"dtype", "keepdim"} or (at.merged and keywords.get("keepdim")):
            return NotImplemented
        dtype = keywords.get("dtype") or self.dtype
        places = {at.part_dim(dim, self.dim()) for dim in axes} | (set(range(at.dim)) if at.merged else set())
        # Padding does not count. Sums of half precision are added up over ranks in fp32.
        values = self._part.masked_fill(~at.mask(self._part), 0)
        summed_in = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else None
        sums = values.sum(tuple(sorted(places)), keepdim=bool(keywords.get("keepdim")), dtype=summed_in)
        result = at.total(sums)
        if func in _MEANS:
            result = result / math.prod(self.size(dim) for dim in axes)  # of the whole tensor
        return result.to(dtype) if dtype.is_floating_point else result

    def _gather_features(self, dim: int, index: Any = None, **kwargs: Any) -> Any:
        at = self._at
        if kwargs or dim % self.dim() == at.whole_dim or not isinstance(index, Tensor):
            return NotImplemented
        local_index = self._localise_argument(index)
        if local_index is NotImplemented or local_index.dim() != self._part.dim():
            return NotImplemented
        return self._wrap_part(self._part.gather(at.part_dim(dim, self.dim()), local_index))

    def _view_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(target, (tuple, list)):
            target = args
        sizes = list(target)
        if not sizes or not all(isinstance(size, int) for size in sizes):
            return NotImplemented
        if -1 in sizes:
            product = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = self.numel() // product if product else 0
        at, shape = self._at, list(self._part.shape)
        # Positions stay a dimension, or merge with all before it, or the reverse. The part keeps its shape.
        for is_merged in (at.merged, not at.merged):
            if sizes == replace(at, merged=is_merged).whole_shape(shape):
                return self._wrap_part(self._part.view(self._part.shape), merged=is_merged)
        return NotImplemented

    def _reshape_tokens(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, name = self._at, func.__name__
        dims = [*args, *kwargs.values()]
        if not all(isinstance(dim, int) for dim in dims) or (kwargs and args):
            return NotImplemented
        if name == "flatten":
            ends = [*dims, *(0, -1)[len(dims) :]]
            is_lead = ends[0] == 0 and ends[1] % self.dim() == at.whole_dim
            return (
                self._wrap_part(self._part.view(self._part.shape), merged=True) if is_lead else NotImplemented
            )
        if name in ("unsqueeze", "squeeze") and len(dims) == 1:
            axis = dims[0] % (self.dim() + (name == "unsqueeze"))
            if axis == at.whole_dim and (name == "squeeze" or at.merged):
                return NotImplemented
            moves = not at.merged and axis <= at.dim  # whether the dimension of positions moves
            if name == "squeeze" and self.size(axis) != 1:
                return self
            part_dim = axis + (at.dim if at.merged else 0)
            shift = (1 if name == "unsqueeze" else -1) * moves
            return self._wrap_part(func(self._part, part_dim), dim=at.dim + shift)
        if name in ("transpose", "swapaxes") and len(dims) == 2 and not at.merged:
            first, other = (dim % self.dim() for dim in dims)
            new_dim = {first: other, other: first}.get(at.dim, at.dim)
            return self._wrap_part(self._part.transpose(first, other), dim=new_dim)
        return NotImplemented

    def _index_tokens(self, index: Any) -> Any:
        items = list(index) if isinstance(index, tuple) else [index]
        if not all(item is Ellipsis or isinstance(item, (slice, int)) for item in items):
            return NotImplemented
        if any(isinstance(item, bool) for item in items) or items.count(Ellipsis) > 1:
            return NotImplemented
        # An item for each dimension: the ellipsis and those missing at the end stand for whole ones.
        missing = [slice(None)] * (self.dim() - len(items) + items.count(Ellipsis))
        gap = items.index(Ellipsis) if Ellipsis in items else len(items)
        items = [*items[:gap], *missing, *items[gap + 1 :]]
        at = self._at
        if len(items) != self.dim() or not isinstance(items[at.whole_dim], slice):
            return NotImplemented
        start, stop, step = items[at.whole_dim].indices(self.size(at.whole_dim))
        whole = (start, stop) == (0, self.size(at.whole_dim))
        if step != 1 or stop <= start or (at.merged and not whole):
            return NotImplemented
        items[at.whole_dim] = slice(None)
        before = sum(isinstance(item, int) for item in items[: at.whole_dim])
        # A slice of positions leaves the part as it is, and notes which of its positions count.
        part = self._part[tuple([slice(None)] * (at.dim if at.merged else 0) + items)]
        changes = {} if whole else {"start": at.start + start, "length": stop - start}
        return self._wrap_part(part, dim=at.dim - before, **changes)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(input, DividedTokens) or isinstance(target, DividedTokens):
        return NotImplemented
    at, classes = input._at, 1 if input.dim() > 1 else 0
    shape = [size for dim, size in enumerate(input.shape) if dim != classes]
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    why = ""
    if size_average is not None or reduce is not None:
        why = "cross_entropy with size_average or reduce"
    elif not isinstance(target, Tensor) or target.is_floating_point() or list(target.shape) != shape:
        why = "cross_entropy with class probabilities"
    elif classes == at.whole_dim or input.dim() < 2:
        why = "cross_entropy over positions"
    elif weight is not None and weight.requires_grad:
        why = "cross_entropy with weights that are trained"
    if why:
        legacy = {"size_average": size_average, "reduce": reduce}
        options |= {name: value for name, value in legacy.items() if value is not None}
        return on_whole(F.cross_entropy, (input, target, weight), {**options, "reduction": reduction}, why)
    if input._uses is not None:
        call = (tuple(input.shape), classes, ignore_index, reduction, weight is not None, label_smoothing)
        input._uses.losses.append(LossCall(*call))
    # Labels have no dimension of classes.
    dim = at.dim - (1 if not at.merged and classes < at.dim else 0)
    own_at = replace(at, dim=dim)
    labels = own_at.select(target, dim, input._leading_sizes)
    labels = labels.masked_fill(~own_at.mask(labels), ignore_index)  # padding does not count
    rows = input._part.movedim(at.part_dim(classes, input.dim()), -1)  # […, V]
    losses = F.cross_entropy(
        rows.reshape(-1, rows.size(-1)),
        labels.reshape(-1),
        weight,
        reduction="none" if reduction == "none" else "sum",
        **options,
    )
    if reduction == "none":
        return input._wrap_part(losses.view(labels.shape), dim=dim)
    loss = at.total(losses)
    if reduction == "sum":
        return loss
    # The mean is over whole samples: by all labels that count, not by those of this rank.
    valid = target != ignore_index
    if weight is None:
        return loss / valid.sum()
    return loss / weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()


class _Joined(torch.autograd.Function):
    """A part presented as the whole, also to autograd functions: each rank takes its positions' gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, at: TokenPart) -> torch.Tensor:
        ctx.at, ctx.lead = at, part.shape[: at.dim]
        tensor: torch.Tensor = tensor_without_storage(DividedTokens, part, at.whole_shape(part.shape))
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.at.spread(gradients[0], ctx.lead) * float(ctx.at.layout.ranks), None  # as in a block
