"""What loops do with divided weights besides training them: writes, penalties, other tensors beside them, each as in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import CheckpointError, StepError
from atorch_ns.testing.workers import catch_ranks, run_ranks

pytestmark = pytest.mark.processes

STRATEGIES: Final[dict[str, list[Any]]] = {
    "ddp": ["ddp"],
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "tensor": [("parallel_mode", ([("tensor", 2)], None))],
}
X: Final = torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8).double()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double() for _ in range(2)
        )
        self.head = nn.Linear(8, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class Loop:
    """A loop, in one process with the global batches or under a strategy with a rank's part of them."""

    def __init__(self, methods: list[Any] | None, rank: int = 0) -> None:
        model = Model()
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.teacher = Model()
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False).mul_(0.5)
        self.batches = list(X)
        if methods is None:
            self.model: Any = model
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            return
        _, self.result, _ = auto_accelerate(
            model, torch.optim.AdamW, optim_args={"lr": 1e-2}, sample_batch=X[0][:2], load_strategy=methods
        )
        assert self.result is not None
        self.model, self.optimizer = self.result.model, self.result.optim
        if isinstance(methods[0], str):
            self.batches = [batch.chunk(torch.distributed.get_world_size())[rank] for batch in X]

    def named(self) -> Iterable[tuple[str, Any]]:
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("module."), parameter

    def step(self, extra: Callable[[], Any] = lambda: 0.0, change: Callable[[], Any] = lambda: None) -> None:
        for batch in self.batches:
            self.optimizer.zero_grad()
            loss = (self.model(batch) - batch).square().mean() + extra()
            loss.backward()
            change()
            self.optimizer.step()

    def write(self, action: Callable[[str, Any], Any]) -> None:
        """Training steps, with a write to each parameter after each."""
        for batch in self.batches:
            self.optimizer.zero_grad()
            (self.model(batch) - batch).square().mean().backward()
            self.optimizer.step()
            with torch.no_grad():
                for name, parameter in self.named():
                    action(name, parameter)


def anchor(loop: Loop) -> None:
    loop.step(lambda: sum((p - loop.start[name]).square().sum() for name, p in loop.named()))


def norm_of_all(loop: Loop) -> None:
    loop.step(lambda: 0.1 * torch.cat([p.flatten() for _, p in loop.named()]).norm())


def orthogonal(loop: Loop) -> None:
    def penalty() -> Tensor:
        weights = [p for name, p in loop.named() if name.endswith("0.weight")]
        apart = [(w.T @ w - torch.eye(8, dtype=w.dtype)).square().sum() for w in weights]
        return 0.1 * sum(apart) + 0.01 * torch.linalg.matrix_norm(weights[0], 2)

    loop.step(penalty)


def read_by_the_loss(loop: Loop) -> None:
    """A weight beside samples, of which each rank has its own."""
    loop.step(lambda: (loop.batches[0] @ dict(loop.named())["head.weight"]).square().mean())


def penalty_added_in_place(loop: Loop) -> None:
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        loss, total = (loop.model(batch) - batch).square().mean(), torch.zeros((), dtype=batch.dtype)
        loss += sum(p.square().sum() for _, p in loop.named())
        for _, parameter in loop.named():
            total += 0.1 * parameter.abs().sum()
        (total + loss).backward()
        loop.optimizer.step()


def penalty_by_itself(loop: Loop) -> None:
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        sum(p.square().sum() for _, p in loop.named()).backward()
        (loop.model(batch) - batch).square().mean().backward()
        loop.optimizer.step()


def penalty_after_the_loss(loop: Loop) -> None:
    """Of what the loss's backward pass lets go of."""
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        loss = (loop.model(batch) - batch).square().mean()
        again = loop.model(2 * batch).abs().mean()
        penalty = sum(p.square().sum() for _, p in loop.named())
        loss.backward()
        penalty.backward()
        again.backward()
        loop.optimizer.step()


def writes_between_passes(loop: Loop) -> None:
    """After a pass that no backward pass follows."""
    for number, batch in enumerate(loop.batches):
        loop.optimizer.zero_grad()
        before = loop.model(batch).detach()
        for _, parameter in loop.named():
            if number == 1:
                parameter.data.mul_(0.9)
            elif number == 2:
                torch._foreach_mul_([parameter.requires_grad_(False)], 0.9)  # type: ignore[attr-defined]
                parameter.requires_grad_(True)
            else:
                parameter.requires_grad_(False).mul_(0.9).requires_grad_(True)
        (loop.model(batch) - before).square().mean().backward()
        loop.optimizer.step()


def inference_first(loop: Loop) -> None:
    with torch.inference_mode():
        loop.model(loop.batches[0])
    loop.step()


def change_gradients(loop: Loop) -> None:
    def change() -> None:
        for _, p in loop.named():
            if p.ndim == 2:
                p.grad.mul_(torch.ones(p.shape, dtype=p.dtype).tril())
                p.grad[0] = 0.0
                p.grad += 0.01 * torch.ones(p.shape, dtype=p.dtype).triu()

    loop.step(change=change)


def teach(loop: Loop) -> None:
    """Plain copies follow the weights, and give the aim."""
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        (loop.model(batch) - loop.teacher(batch)).square().mean().backward()
        loop.optimizer.step()
        with torch.no_grad():
            for (_, p), copied in zip(loop.named(), loop.teacher.parameters(), strict=True):
                copied.mul_(0.9).add_(p, alpha=0.1)


def lerp_of_copies(loop: Loop) -> None:
    loop.write(lambda name, p: loop.start[name].lerp_(p, 0.1))
    with torch.no_grad():
        for name, p in loop.named():
            p.copy_(loop.start[name])


def write_rows(loop: Loop) -> None:
    def write(name: str, p: Any) -> None:
        p[0].zero_()
        p.data[-1:] *= 2
        p.view(-1)[1:3].mul_(0.5)

    loop.write(write)


def write_by_masks(loop: Loop) -> None:
    def write(name: str, p: Any) -> None:
        p[p.abs() < 0.05] = 0
        p.copy_(torch.where(p > 0, p, 0.5 * p))

    loop.write(write)


def exchange_data(loop: Loop) -> None:
    """By reference, as averages are put in the place of weights and taken out again."""

    def exchange(name: str, p: Any) -> None:
        kept = p.data
        p.data = kept * 2
        p.data = kept.clamp(-0.3, 0.3)

    loop.write(exchange)


def rebuild_from_vector(loop: Loop) -> None:
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        (loop.model(batch) - batch).square().mean().backward()
        loop.optimizer.step()
        with torch.no_grad():
            parameters = [p for _, p in loop.named()]
            vector = nn.utils.parameters_to_vector(parameters)
            nn.utils.vector_to_parameters(0.9 * vector, parameters)


def load_plain_weights(loop: Loop) -> None:
    loop.step()
    names = list(loop.model.state_dict())
    loop.model.load_state_dict(dict(zip(names, [1.5 * t for t in loop.start.values()], strict=True)))
    loop.step()


def gradients_of_other_strides(loop: Loop) -> None:
    """Fused kernels read gradients in the order of memory."""

    def change() -> None:
        for _, p in loop.named():
            if p.ndim == 2:
                p.grad = (p.grad.detach().T * 2.0).T

    loop.step(change=change)


def converted(loop: Loop) -> None:
    loop.step()
    loop.model.to(torch.float32)
    loop.model.to(torch.float64)
    loop.step()


def whole_gradients(loop: Loop) -> None:
    def change() -> None:
        parameters = [p for _, p in loop.named()]
        whole = torch.cat([p.grad.flatten() for p in parameters])
        first = 0
        for p in parameters:
            p.grad = whole[first : first + p.numel()].view_as(p).clone()
            first += p.numel()

    loop.step(change=change)


def singular_values(loop: Loop) -> None:
    """Gradients of weights that are whole on each rank."""
    loop.step(lambda: sum(torch.linalg.svdvals(p).sum() for name, p in loop.named() if p.ndim == 2))


def a_layer_by_itself(loop: Loop) -> None:
    for batch in loop.batches:
        loop.optimizer.zero_grad()
        layer = getattr(loop.model, "module", loop.model).blocks[0][0]
        nn.functional.linear(batch.repeat(1, 2)[:, :8], layer.weight, layer.bias).square().mean().backward()
        loop.optimizer.step()


LOOPS: Final = (
    anchor, norm_of_all, orthogonal, read_by_the_loss, penalty_added_in_place, penalty_by_itself, penalty_after_the_loss,
    writes_between_passes, inference_first, change_gradients, teach, lerp_of_copies, write_rows, write_by_masks,
    exchange_data,
    rebuild_from_vector, load_plain_weights, gradients_of_other_strides, converted, whole_gradients, singular_values,
    a_layer_by_itself,
)  # fmt: skip


def _train(strategy: str) -> list[dict[str, Tensor]]:
    found = []
    for loop in LOOPS:
        work = Loop(STRATEGIES[strategy], torch.distributed.get_rank())
        loop(work)
        found.append(checkpoint.export_state_dict(work.result))
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loops_train_as_in_one_process(strategy: str) -> None:
    _compare(run_ranks(_train, 2, args=(strategy,), timeout_s=150)[0])


@pytest.mark.timeout(120)
def test_loops_of_one_rank_with_a_process_group() -> None:
    """``torchrun --nproc_per_node 1`` divides weights too."""
    _compare(run_ranks(_train, 1, args=("fsdp",), timeout_s=90)[0])


def _compare(found: list[dict[str, Tensor]]) -> None:
    for loop, weights in zip(LOOPS, found, strict=True):
        work = Loop(None)
        loop(work)
        for name, expected in work.named():
            torch.testing.assert_close(
                weights[name],
                expected.detach(),
                rtol=1e-9,
                atol=1e-9,
                msg=lambda m, n=loop.__name__: f"{n}: {m}",
            )


WRITES: Final[dict[str, Callable[[Any], Any]]] = {
    "row": lambda p: p[0].mul_(3),
    "row drawn anew": lambda p: (torch.manual_seed(1), p[0].normal_()),
    "mask in rows": lambda p: p[:3].__setitem__(p[:3].abs() > 0.1, 0.25),
    "element": lambda p: p[1, 2].fill_(7.0),
    "slice": lambda p: p[:2].zero_(),
    "slice assigned": lambda p: p.__setitem__(slice(0, 3), 0.5),
    "column": lambda p: p[:, 1].mul_(2),
    "row of another": lambda p: p[0].copy_(p[1]),
    "exchanged columns": lambda p: p.__setitem__((slice(None), [0, 2]), p[:, [2, 0]]),
    "flat": lambda p: p.flatten()[:5].mul_(4),
    "as a view": lambda p: p.view(2, -1)[0].mul_(3),
    "transposed": lambda p: p.T[0].mul_(4),
    "diagonal": lambda p: p.diagonal().mul_(4),
    "filled diagonal": lambda p: p.fill_diagonal_(1.0),
    "chunk": lambda p: p.chunk(2)[0].zero_(),
    "split": lambda p: p.split(3)[1].zero_(),
    "rows one by one": lambda p: [row.mul_(number) for number, row in enumerate(p)],
    "narrow": lambda p: p.narrow(0, 1, 3).zero_(),
    "view of a view": lambda p: p.unsqueeze(0)[0, 1].zero_(),
    "detached": lambda p: p.detach()[2:].add_(1),
    "data": lambda p: setattr(p, "data", p.data * 3),
    "set": lambda p: p.set_(p * 2),
    "triangle": lambda p: p.tril_(),
    "index_fill": lambda p: p.index_fill_(0, torch.tensor([0, 2]), 1.0),
    "scatter": lambda p: p.scatter_(0, torch.zeros(1, p.shape[1], dtype=torch.long), 1.0),
    "mask of another": lambda p: p.masked_fill_(torch.ones(p.shape).tril().bool(), 0.5),
    "renorm": lambda p: p.renorm_(2, 0, 0.3),
    "cumulated": lambda p: p.cumsum_(0),
    "largest": lambda p: p.clamp_(max=p.flatten().topk(3).values[-1]),
    "numbers": lambda p: p.mul_(p.tolist()[0][0]),
    "array": lambda p: p.mul_(float(np.asarray(p.detach().cpu().numpy()).sum())),
    "counted": lambda p: p.mul_(len((p > 0).nonzero()) + len(p.sign().unique())),
    "permuted": lambda p: p.copy_(p[torch.arange(len(p)).flip(0)]),
    "distances": lambda p: p.add_(torch.cdist(p, p)[:, :1]),
    "close": lambda p: p.mul_(2.0 if torch.allclose(p, p * 1.0) else 3.0),
}


def _write(strategy: str) -> None:
    work = Loop(STRATEGIES[strategy])
    parameter = dict(work.named())["blocks.0.0.weight"]
    assert isinstance(parameter, DTensor)
    plain = Model()
    with torch.no_grad():
        for name, write in WRITES.items():
            start = work.start["blocks.0.0.weight"]
            parameter.copy_(start)
            expected = start.clone()
            write(expected)
            write(parameter)
            torch.testing.assert_close(parameter.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}")
            plain.get_parameter("blocks.0.0.weight").copy_(expected)
            torch.testing.assert_close(
                work.model(X[0]), plain(X[0]), msg=lambda m, n=name: f"forward pass after {n}: {m}"
            )
        with pytest.raises(StepError, match="cannot be replaced by a tensor of shape"):
            parameter.data = torch.zeros(3)
        with pytest.raises(ValueError, match="read-only"):
            parameter.numpy()[0] = 0.0
        with pytest.raises(CheckpointError, match=r"checkpoint.save\(folder, result\)"):
            torch.save(work.model.state_dict(), io.BytesIO())
        with pytest.raises(StepError, match=r"tensor.full_tensor\(\)"):
            torch.distributed.all_reduce(parameter)
        again = copy.deepcopy(work.model.state_dict())["blocks.0.0.weight"]
        torch.testing.assert_close(again.full_tensor(), parameter.full_tensor())


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_writes_reach_the_parts_of_all_ranks(strategy: str) -> None:
    run_ranks(_write, 2, args=(strategy,))


def _gradients_of_a_copy(work: Loop) -> None:
    """Of a model that no strategy knows, as first-order meta-learning makes them."""
    copied = Model()
    for batch in work.batches:
        with torch.no_grad():
            for mine, (_, p) in zip(copied.parameters(), work.named(), strict=True):
                mine.copy_(p)
        (copied(batch) - batch).square().mean().backward()
        for mine, (_, p) in zip(copied.parameters(), work.named(), strict=True):
            p.grad, mine.grad = mine.grad, None
        work.optimizer.step()


def _meta_learn(strategy: str) -> dict[str, Tensor] | str:
    work = Loop(STRATEGIES[strategy], torch.distributed.get_rank())
    try:
        _gradients_of_a_copy(work)
    except StepError as error:
        return str(error)
    return checkpoint.export_state_dict(work.result)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_gradients_of_a_copy_are_averaged_or_refused(strategy: str) -> None:
    found = run_ranks(_meta_learn, 2, args=(strategy,))[0]
    if isinstance(found, str):
        assert strategy in {"ddp", "zero1"}
        assert "holds other weights than rank" in found
        return
    work = Loop(None)
    _gradients_of_a_copy(work)
    for name, expected in work.named():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-9, atol=1e-9)


def _read_alone(rank_that_reads: int) -> None:
    work = Loop(["fsdp"], torch.distributed.get_rank())
    for batch in work.batches:
        (work.model(batch) - batch).square().mean().backward()
        if torch.distributed.get_rank() == rank_that_reads:
            [p.grad.norm().item() for _, p in work.named()]
        work.optimizer.step()


@pytest.mark.timeout(90)
def test_a_rank_that_reads_alone_ends_all_with_the_cause() -> None:
    outcomes = catch_ranks(_read_alone, 2, args=(0,), timeout_s=60)
    assert {outcome.status for outcome in outcomes} <= {"died", "raised"}
    assert any("a read of a divided tensor" in outcome.output for outcome in outcomes)


def _second_derivative() -> None:
    work = Loop(["fsdp"], torch.distributed.get_rank())
    penalty = sum((p - work.start[name]).square().sum() for name, p in work.named())
    with pytest.raises(StepError, match="create_graph=True"):
        torch.autograd.grad(penalty, [p for _, p in work.named()], create_graph=True)


def test_derivatives_of_derivatives_are_refused() -> None:
    run_ranks(_second_derivative, 2)


def _write_under_masters(methods: list[Any], kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    batch = torch.randn(8, 6)
    _, result, _ = auto_accelerate(
        copy.deepcopy(Model()).float(),
        torch.optim.SGD,
        loss_func=lambda batch, output: (output - batch).square().mean(),
        optim_args={"lr": 0.05},
        load_strategy=methods,
    )
    assert result is not None
    for step in range(6):
        result.train_step(batch)
        with torch.no_grad():
            if kind == "late list" and step > 3:
                torch._foreach_mul_(list(result.model.parameters()), 0.5)
            for parameter in result.model.parameters() if kind != "late list" else ():
                if kind == "rows":
                    parameter[0].zero_()
                elif kind == "new data":
                    parameter.data = parameter.data * 0.5
                else:
                    parameter.data.mul_(0.5)
    return checkpoint.export_state_dict(result)


@pytest.mark.parametrize("kind", ["rows", "new data", "data", "late list"])
def test_writes_reach_the_masters(kind: str) -> None:
    """fp32 copies would write over them."""
    expected = _write_under_masters(["half"], kind)
    if kind == "rows":
        assert float(expected["inner.weight"][0].abs().max()) == 0.0
    else:
        assert float(expected["inner.weight"].abs().max()) < 0.15
    for methods in (["half", "zero1"], ["half", "fsdp"]):
        found = run_ranks(_write_under_masters, 2, args=(methods, kind))[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-3)


def _grow(change: str, methods: list[Any]) -> str:
    work = Loop(methods, torch.distributed.get_rank())
    inner = getattr(work.model, "module", work.model)
    if change == "a head":
        inner.head = nn.Linear(8, 6).double()
    elif change == "a bias":
        inner.head.bias = None
    elif change == "a parametrization":
        nn.utils.parametrize.register_parametrization(inner.inner, "weight", nn.Identity())
    elif change == "pruned":
        prune.l1_unstructured(inner.inner, "weight", 0.4)
    named = {name: 0.9 * p for name, p in work.model.named_parameters()}
    try:
        if change == "functional_call":
            torch.func.functional_call(work.model, named, (X[0],))
        else:
            work.model(X[0])
    except StepError as error:
        return str(error)
    return "runs"


@pytest.mark.parametrize(
    ("change", "methods", "said"),
    [
        ("a head", ["ddp"], "was added to the model after auto_accelerate"),
        ("a head", ["zero1"], "was added to the model after auto_accelerate"),
        ("a head", ["fsdp"], "was added to the model after auto_accelerate"),
        ("a bias", ["fsdp"], "is no longer the tensor that was divided"),
        ("a parametrization", ["fsdp"], "is no longer the tensor that was divided"),
        ("pruned", ["fsdp"], "is no longer the tensor that was divided"),
        ("functional_call", ["fsdp"], "is no longer the tensor that was divided"),
        ("functional_call", ["zero1"], "runs"),
        ("pruned", ["ddp"], "runs"),
    ],
)
def test_changes_of_the_model_after_the_call(change: str, methods: list[Any], said: str) -> None:
    for found in run_ranks(_grow, 2, args=(change, methods)):
        assert said in found
