"""Registered operators: one node in a capture, the function's own gradients, and rules by the annotation."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from atorch_ns.capture.graph.capture import capture
from atorch_ns.capture.graph.operator_graph import OperatorGraph
from atorch_ns.errors import InputError
from atorch_ns.operators.rules.custom import OperatorRegistry, register_op, registered_rules
from tests.operators.confirm import call_of, confirm

CPU = torch.device("cpu")


NUMBERS = itertools.count()


@pytest.fixture
def registry() -> OperatorRegistry:
    return OperatorRegistry(f"atorch_ns_tests_{next(NUMBERS)}")


@pytest.fixture
def scaled() -> Callable[..., torch.Tensor]:
    def scaled(
        x: torch.Tensor, w: torch.Tensor, factor: float = 2.0, *, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = torch.relu(x @ w) * factor
        return product if bias is None else product + bias

    return scaled


class Caller(nn.Module):
    """Calls a function on its input and a weight."""

    def __init__(self, function: Callable[..., Any], *rest: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self._function, self._rest = function, rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self._function(x, self.weight, *self._rest) * x.sum()).sum()


def called(registry: OperatorRegistry, name: str, *arguments: Any) -> tuple[Any, ...]:
    return registry.operator(name, arguments), *arguments


def captured(model: nn.Module, x: torch.Tensor) -> Any:
    return OperatorGraph(capture(model, (x,), {}, device=CPU))


def gradients(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 8 * 4).view(8, 4).requires_grad_()
    loss(x).backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["eager", "checkpoint", "autocast", "program"])
def test_gradients_are_those_of_the_function(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor], where: str
) -> None:
    model = Caller(register_op("m k, k n -> m n", registry=registry)(scaled))
    plain = Caller(scaled)
    plain.load_state_dict(model.state_dict())
    run: Callable[[torch.Tensor], torch.Tensor] = model
    if where == "checkpoint":
        run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    if where == "program":
        run = torch.export.export(model, (torch.randn(8, 4),), strict=False).module()
        model = run  # type: ignore[assignment]
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        mine, theirs = gradients(model, run), gradients(plain, plain)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_no_gradient_is_kept_without_grad_mode(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    function = register_op("m k, k n -> m n", registry=registry)(scaled)
    with torch.no_grad():
        assert not function(torch.ones(2, 4), nn.Parameter(torch.ones(4, 2))).requires_grad


def test_a_capture_holds_one_operator_for_each_call(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    function = register_op("m k, k n -> m n", "product", registry=registry)(scaled)
    graph = captured(Caller(function, 3.0), torch.randn(8, 4))
    (one,) = [one for one in graph.operators if one.name == "product"]
    assert one.key == "/product#0"
    assert [spec.shape for spec in one.call.outputs] == [(8, 6)]
    assert [str(rule) for rule in registered_rules(one.call, 2, registry) or ()] == ["0 <- 0,R", "1 <- R,1"]


def test_arguments_of_any_kind_and_several_results(registry: OperatorRegistry) -> None:
    @register_op("a b, ?, ?, ?, ?, ? -> a b, b a", registry=registry)
    def mixed(x: Any, sizes: Any, flag: Any, text: Any, dtype: Any, others: Any, gone: Any = None) -> Any:
        assert flag is True
        assert text == "t"
        assert gone is None
        return x.to(dtype) + sum(sizes) + others[1], x.t() * 1

    x = torch.ones(2, 3)
    first, second = mixed(x, [1, 2], True, "t", torch.float64, [x, x * 2])
    assert first.dtype == torch.float64
    assert first[0, 0] == 6.0
    assert second.shape == (3, 2)
    call = call_of(*called(registry, "mixed", x, [1, 2], True, "t", torch.float64, [x, x], None))
    assert [str(rule) for rule in registered_rules(call, 3, registry) or ()] == ["1,0 <- 1,R,R"]
    with pytest.raises(InputError, match="flag of mixed is an object"):
        mixed(x, [1], object(), "t", torch.float64, [])


def test_calls_with_other_types_add_overloads(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    function = register_op("m k+, k+ n -> m n", registry=registry)(scaled)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    torch.testing.assert_close(function(x, w, bias=w[0]), function(x, w) + w[0])
    torch.testing.assert_close(function(x, w, factor=3), torch.relu(x @ w) * 3)
    assert getattr(torch.ops, registry.namespace).scaled.overloads() == ["default", "form1", "form2"]


def test_results_never_share_memory_with_arguments(registry: OperatorRegistry) -> None:
    @register_op("(h t) k -> h t k", registry=registry)
    def apart(x: torch.Tensor, h: int = 2) -> torch.Tensor:
        return x.view(h, -1, x.size(-1))

    x = torch.zeros(4, 3)
    apart(x).add_(1)
    assert x.sum() == 0
    call = call_of(*called(registry, "apart", x, 2))
    assert [str(rule) for rule in registered_rules(call, 3, registry) or ()] == ["2 <- 1"]


def test_a_function_that_looks_at_values_has_the_shapes_of_its_annotation(registry: OperatorRegistry) -> None:
    @register_op("m k, k n -> m n", registry=registry)
    def by_values(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w if x.sum().item() > 0 else x @ w * 2

    model = Caller(by_values)
    graph = captured(model, torch.randn(8, 4))
    (one,) = [one for one in graph.operators if one.name == "by_values"]
    assert one.call.outputs[0].shape == (8, 6)
    assert one.call.outputs[0].requires_grad
    program = torch.export.export(model, (torch.randn(8, 4),), strict=False).module()
    x = -torch.ones(8, 4)
    torch.testing.assert_close(program(x), (x @ model.weight * 2 * x.sum()).sum())

    @register_op("m k, k n -> ?", registry=registry)
    def unknown(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())] @ w

    with pytest.raises(InputError, match=r"leaves the shape of a result open"):
        captured(Caller(unknown), torch.randn(8, 4))


def test_a_function_that_writes_to_its_arguments_is_refused(registry: OperatorRegistry) -> None:
    @register_op("m k, k n -> m k", registry=registry)
    def writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.add_(w.sum())

    with pytest.raises(InputError, match="writes to its arguments"):
        captured(Caller(writes), torch.randn(8, 4))


def test_results_that_the_annotation_lacks_are_refused(registry: OperatorRegistry) -> None:
    pair = register_op("a -> a, ?", "pair", registry=registry)(lambda x: (x + 1, 10))
    with pytest.raises(InputError, match="returns a tuple, but its annotation says it returns 2 tensors"):
        pair(torch.ones(2))


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 7, None


def test_an_autograd_function_keeps_its_gradient(registry: OperatorRegistry) -> None:
    original = Doubled.apply
    try:
        assert register_op("* -> *", registry=registry)(Doubled) is Doubled
        x = torch.ones(2, 3, requires_grad=True)
        result = Doubled.apply(x, 2)
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.eq(7).all()
        graph = captured(Caller(lambda x, w: Doubled.apply(x, 2) @ w), torch.randn(8, 4))
        assert [one.name for one in graph.operators][:1] == ["Doubled"]
    finally:
        Doubled.apply = original  # type: ignore[method-assign]


def test_a_function_registered_later_is_replaced_where_it_was_imported(registry: OperatorRegistry) -> None:
    home, user = types.ModuleType("a_home"), types.ModuleType("a_user")
    sys.modules.update({"a_home": home, "a_user": user})
    try:
        exec("def twice(x):\n    return x * 2", vars(home))
        user.other_name = home.twice  # type: ignore[attr-defined]
        public = register_op("* -> *", registry=registry)(home.twice)
        assert user.other_name is public
        assert home.twice is public
    finally:
        del sys.modules["a_home"], sys.modules["a_user"]


def test_a_function_may_give_the_annotation(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    def annotation(x: torch.Tensor, w: torch.Tensor, **options: Any) -> str:
        assert x.dim() == 2
        assert set(options) == {"factor", "bias"}
        return "m k, k n^ -> m n^" if options["bias"] is None else "m^ k^, k^ n -> m^ n"

    register_op(annotation, registry=registry)(scaled)(torch.ones(2, 4), torch.ones(4, 2))
    call = call_of(*called(registry, "scaled", torch.ones(2, 4), torch.ones(4, 2), 2.0, None))
    assert [str(rule) for rule in registered_rules(call, 2, registry) or ()] == ["0 <- 0,R"]


def test_rules_of_torchs_operators_are_replaced(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    call = call_of(torch.ops.aten.roll.default, torch.ones(4, 4), [1], [0])
    assert registered_rules(call, 2, registry) is None
    assert register_op("a^ b, ?, ? -> a^ b", registry=registry)(torch.roll) is torch.roll
    assert [str(rule) for rule in registered_rules(call, 2, registry) or ()] == ["1 <- 1"]
    register_op("a, b -> a b", registry=registry)(torch.ops.aten.outer.default)
    with pytest.raises(InputError, match="is not a single torch operator"):
        register_op("a -> a", registry=registry)(nn.functional.cross_entropy)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (
            "m k, k n -> n m",
            r"atorch_ns_tests_\d+\.scaled\.default on \[4, 4\] × \[4, 8\] is registered wrongly",
        ),
        ("m k, k n -> m k", r"gives \[\(4, 4\)\], but it gave \[\(4, 8\)\]"),
        ("m k, k n, j -> m n", "argument 2 is not a tensor"),
        (
            "m^ k+, k+ n^ -> m^ n^",
            r"rule 'P <- 1,0' of atorch_ns_tests_\d+\.scaled\.default on \[4, 4\] × \[4, 8\]",
        ),
    ],
)
def test_a_wrong_annotation_is_refused(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor], annotation: str, problem: str
) -> None:
    """Sums before ``relu`` are not sums after it."""
    function = register_op(annotation, registry=registry)(scaled)
    x, w = torch.randn(4, 4), torch.randn(4, 8)
    function(x, w)
    arguments = (x, w, 2.0, None)
    call = call_of(*called(registry, "scaled", *arguments))
    with pytest.raises(InputError, match=problem):
        [confirm(call, rule, arguments, {}, 2) for rule in registered_rules(call, 2, registry) or ()]


def test_right_rules_are_confirmed(registry: OperatorRegistry) -> None:
    function = register_op("b m k+, b k+ n -> b m n", registry=registry)(
        torch.bmm.__get__(None) if False else bmm
    )
    x, w = torch.randn(2, 4, 6), torch.randn(2, 6, 8)
    function(x, w)
    call = call_of(*called(registry, "bmm", x, w))
    rules = registered_rules(call, 2, registry) or ()
    assert [str(rule) for rule in rules] == ["0 <- 0,0", "1 <- 1,R", "P <- 2,1", "2 <- R,2"]
    for rule in rules:
        confirm(call, rule, (x, w), {}, 2)


def bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bmk,bkn->bmn", x, w)


def test_what_cannot_be_registered_is_refused(
    registry: OperatorRegistry, scaled: Callable[..., torch.Tensor]
) -> None:
    register_op("m k, k n -> m n", "product", registry=registry)(scaled)
    register_op("m k, k n -> m n", "product", registry=registry)(scaled)  # the same again
    with pytest.raises(InputError, match="'product' is registered already"):
        register_op("m k, k n -> m n", "product", registry=registry)(bmm)
    with pytest.raises(InputError, match="has no valid name"):
        register_op("a -> a", registry=registry)(lambda x: x)
    with pytest.raises(InputError, match=r"many takes \*xs"):
        register_op("a -> a", "many", registry=registry)(lambda *xs: xs[0])
    with pytest.raises(InputError, match="emit_fn is not supported"):
        register_op("a -> a", emit_fn=print)
    with pytest.raises(InputError, match="code_impl_pattern='copy'"):
        register_op("a -> a", code_impl_pattern="copy")
    with pytest.raises(InputError, match="cannot be read"):
        register_op("a -> b")
