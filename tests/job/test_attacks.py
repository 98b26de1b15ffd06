"""What users do around a step, found by attacks: each trains as in one process, or is refused in words on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from atorch_ns import auto_accelerate, checkpoint
from atorch_ns.errors import InputError, StepError
from atorch_ns.testing.workers import run_ranks

pytestmark = pytest.mark.processes

BF16: Final = ("amp_native", "bf16")
FP16: Final = ("amp_native", {"dtype": "fp16", "init_scale": 1024.0})
MASTERS: Final = ("half", {"dtype": "bf16", "master_weights": True})
HALF: Final = ("half", {"dtype": "fp16", "init_scale": 1024.0})
TORCHS: Final = ("ddp", {"reducer": "torch"})
BATCHES: Final = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.temperature * self.down(self.act(self.up(x)))
        return out


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.head(self.features(x))
        return out


class Scaled(Net):
    """With a number of its own and a method of a batch that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def compute(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.gain * F.linear(self.features(batch["x"]), self.head.weight)
        return out


class Momentum(Net):
    """Whose second network follows the first by ``.data``, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for key, query in zip(self.keys.parameters(), self.head.parameters(), strict=True):
            key.data = 0.8 * key.data + 0.2 * query.data
        out: Tensor = super().forward(x) + self.keys(x)
        return out


def _spectral() -> nn.Module:
    model = Net()
    for block in model.blocks:
        parametrizations.spectral_norm(block.get_submodule("up"))
    return model


class Averaging(torch.optim.Optimizer):
    """SGD whose ``eval`` and ``train`` exchange weights and averages, and whose ``first_step`` perturbs by gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(0.1 * p.grad)
            self.state[p].setdefault("average", p.clone()).lerp_(p, 0.3)

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            kept = p.clone()
            p.copy_(state["average"])
            state["average"] = kept

    train = eval

    @torch.no_grad()
    def first_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["start"] = p.clone()
            p.add_(p.grad, alpha=0.1)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p].pop("start"))
        self.step()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Job:
    """A model in one process with the global batches, or a rank's job with its part of them."""

    def __init__(
        self, methods: Sequence[Any] | None, build: Callable[[], nn.Module], make: Any = _sgd
    ) -> None:
        torch.manual_seed(0)
        model = build()
        self.start = {name: value.clone() for name, value in model.state_dict().items()}
        self.num, self.rank, self.result = 1, 0, None
        self.model: Any = model
        if methods is None:
            self.optimizer: Any = make(model.parameters())
            return
        self.num, self.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        _, self.result, _ = auto_accelerate(model, make, loss_func=_loss, load_strategy=list(methods))
        assert self.result is not None
        self.model, self.optimizer = self.result.model, self.result.optim

    @property
    def inner(self) -> Any:
        return getattr(self.model, "module", self.model)

    def parts(self) -> list[Tensor]:
        return [batch.chunk(self.num)[self.rank] for batch in BATCHES]

    def backward(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.result.loss_func if self.result else _loss)(batch, self.model(batch))
        loss.backward()
        return loss.detach()

    def step(self, batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        self.optimizer.step()
        return loss

    def weights(self) -> dict[str, Tensor]:
        if self.result is None:
            return {name: value.detach() for name, value in self.model.state_dict().items()}
        return checkpoint.export_state_dict(self.result)


def _loss(batch: Tensor, output: Tensor) -> Tensor:
    return F.mse_loss(output.float(), batch)


def _doubled(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 2 * forward(x)


def attributes_of_blocks(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        for block in job.inner.blocks:
            block.temperature = 1.0 - 0.1 * number
            if number == 2:
                block.act = nn.ReLU()
        job.model.scale = 1.0 + 0.1 * number
        if number == 4:
            job.model.forward = partial(_doubled, job.model.forward)
        job.step(batch)


def thaw(job: Job) -> None:
    job.inner.blocks[0].requires_grad_(False)
    for number, batch in enumerate(job.parts()):
        if number == 2:
            job.inner.blocks[0].requires_grad_(True)
        job.step(batch)


def late_hooks(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    plain(job)


def submodules(job: Job) -> None:
    """The head by itself, on what the rest gives without gradients."""
    for batch in job.parts():
        job.optimizer.zero_grad()
        with torch.no_grad():
            hidden = job.inner.features(batch)
        _loss(batch, job.inner.head(hidden)).backward()
        job.optimizer.step()


def of_dicts(job: Job) -> None:
    """Trained through a method of a dict; between a backward pass and the step other calls gather the old weights."""
    for number, batch in enumerate(job.parts()):
        job.optimizer.zero_grad()
        _loss(batch, job.inner.compute({"x": batch})).backward()
        _clip(job.model, 0.05)
        with torch.inference_mode() if number % 2 else torch.no_grad():
            job.inner.compute({"x": batch})
            job.inner.features(job.inner.blocks[1](batch))
        job.optimizer.step()


def unit_first(job: Job) -> None:
    with torch.no_grad():
        job.inner.blocks[1](job.parts()[0])
    plain(job)


def left_out_after_clipping(job: Job) -> None:
    clip = job.result.clip_grad_norm_ if job.result else partial(_clip, job.model)
    for number, batch in enumerate(job.parts()):
        job.optimizer.zero_grad()
        job.backward(batch)
        clip(0.5)
        if number % 3:
            job.optimizer.step()


def zeroed_in_place(job: Job) -> None:
    """A pass is thrown away, and groups of the optimizer have an option that is not a number."""
    job.optimizer.param_groups[0]["limits"] = torch.tensor([0.0, 1.0])
    for batch in job.parts():
        job.backward(batch)
        for parameter in job.model.parameters():
            parameter.grad.zero_()
        job.step(batch)


def frozen_and_cleared_by_hand(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        job.inner.blocks[0].requires_grad_(number % 2 == 0)
        job.backward(batch)
        job.optimizer.step()
        for parameter in job.model.parameters():
            parameter.grad = None


def scaled_by_phase(job: Job) -> None:
    for batch in job.parts():
        job.optimizer.zero_grad()
        if job.result is None:
            job.backward(batch)
            for parameter in job.model.parameters():
                parameter.grad.mul_(0.5)
            job.optimizer.step()
            continue
        job.result.train_step.forward_backward(batch)
        job.result.train_step.reduce()
        job.result.train_step.scale(0.5)
        job.result.train_step.update()


def written_gradients(job: Job) -> None:
    for batch in job.parts():
        job.optimizer.zero_grad()
        job.backward(batch)
        if job.result is not None:
            job.result.prepare_gradients()
        with torch.no_grad():
            for parameter in _in_groups(job):
                parameter.grad.add_(parameter, alpha=0.1)
        job.optimizer.step()


def backward_after_clipping(job: Job) -> None:
    for batch in job.parts():
        job.optimizer.zero_grad()
        job.backward(batch)
        clip = job.result.clip_grad_norm_ if job.result else partial(_clip, job.model)
        clip(0.1)
        job.backward(batch)
        job.optimizer.step()


def _clip(model: nn.Module, limit: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def plain(job: Job) -> None:
    for batch in job.parts():
        job.step(batch)


def averages(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        job.step(batch)
        if number % 2:
            job.optimizer.eval()
            job.model(batch)
            job.optimizer.train()
    job.optimizer.eval()


def perturbed(job: Job) -> None:
    for batch in job.parts():
        job.backward(batch)
        job.optimizer.first_step()
        job.optimizer.zero_grad()
        job.backward(batch)
        job.optimizer.second_step()
        job.optimizer.zero_grad()


def error_in_backward(job: Job) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    for number, batch in enumerate(job.parts()):
        job.optimizer.zero_grad()
        if number == 2:
            handle = job.inner.blocks[1].register_full_backward_hook(fail)
            with pytest.raises(torch.OutOfMemoryError):
                job.backward(batch)
            handle.remove()
        job.step(batch)


def gradients_by_grad(job: Job) -> None:
    parameters = list(job.model.parameters())
    for batch in job.parts():
        found = torch.autograd.grad(_loss(batch, job.model(batch)), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        job.optimizer.step()


def own_optimizer(job: Job) -> None:
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    for batch in job.parts():
        optimizer.zero_grad()
        job.backward(batch)
        optimizer.step()


def _in_groups(job: Job) -> list[Any]:
    return [p for group in job.optimizer.param_groups for p in group["params"] if p.requires_grad]


def weights_by_groups(job: Job) -> None:
    for batch in job.parts():
        job.step(batch)
        with torch.no_grad():
            for parameter in _in_groups(job):
                parameter.mul_(0.9)


def clipped_by_groups(job: Job) -> None:
    """By a list that was made before the loop, and one of each step."""
    first = _in_groups(job)
    for number, batch in enumerate(job.parts()):
        job.optimizer.zero_grad()
        job.backward(batch)
        nn.utils.clip_grad_norm_(first if number % 2 else _in_groups(job), 0.4)
        job.optimizer.step()


def prepared_and_clipped(job: Job) -> None:
    """By a list from before the loop, then by the model's parameters."""
    first = _in_groups(job)
    for batch in job.parts():
        job.optimizer.zero_grad()
        job.backward(batch)
        if job.result is not None:
            job.result.prepare_gradients()
        nn.utils.clip_grad_norm_(first, 0.5)
        _clip(job.model, 0.4)
        job.optimizer.step()


def sharpness_by_groups(job: Job) -> None:
    """SAM, whose loop passes over parameters without a gradient."""
    for batch in job.parts():
        job.backward(batch)
        starts: list[tuple[Any, Tensor]] = []
        with torch.no_grad():
            for parameter in (p for p in _in_groups(job) if p.grad is not None):
                starts.append((parameter, parameter.clone()))
                parameter.add_(parameter.grad / parameter.grad.norm(), alpha=0.05)  # under any loss scale
        job.optimizer.zero_grad()
        job.backward(batch)
        with torch.no_grad():
            for parameter, start in starts:
                parameter.copy_(start)
        job.optimizer.step()
        job.optimizer.zero_grad()


def bounded_after_steps(job: Job) -> None:
    def bound(*_: Any) -> None:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.clamp_(-0.2, 0.2)

    job.optimizer.register_step_post_hook(bound)
    plain(job)


def of_the_head(job: Job) -> None:
    """Gradients of those parameters in groups that are the model's head."""
    for batch in job.parts():
        job.optimizer.zero_grad()
        job.backward(batch)
        for parameter in job.inner.head.parameters():
            if any(parameter is member for member in _in_groups(job)):
                parameter.grad.mul_(0.1)
        job.optimizer.step()


def read_after_the_step(job: Job) -> None:
    """A gradient that stays until it is cleared adds to the next one, and its sign decides about noise."""
    for number, batch in enumerate(job.parts()):
        job.backward(batch)
        job.optimizer.step()
        with torch.no_grad():
            for parameter in (p for p in _in_groups(job) if p.grad is not None):
                parameter.sub_(parameter.grad, alpha=0.05)
        if number % 2:
            job.optimizer.zero_grad()


def rate_by_own_loss(job: Job) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=0, threshold=0.0)
    for number, batch in enumerate(2 * job.parts()):
        schedule.step(float(job.step(batch)) + 10 * number * (1 - 2 * job.rank))


def loaded_on_one_rank(job: Job) -> None:
    if job.rank == 0:
        torch.manual_seed(7)
        job.inner.load_state_dict(Net().state_dict())
    plain(job)


def loaded_by_names_of_the_model(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        if number == 2:
            torch.manual_seed(7)
            job.model.load_state_dict(Net().state_dict())
        job.step(batch)


def _last_two(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[-2:], lr=0.1)


def states_taken_out(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        job.step(batch)
        if number == 2:
            for parameter in job.model.parameters():
                assert job.optimizer.state.pop(parameter)["momentum_buffer"] is not None
                assert job.optimizer.state.get(parameter) is None


def states_read(job: Job) -> None:
    plain(job)
    for parameter in job.model.parameters():
        job.optimizer.state[parameter]["momentum_buffer"].zero_()


def clipped_before_each_step(job: Job) -> None:
    job.optimizer.register_step_pre_hook(lambda *_: _clip(job.model, 0.4))
    plain(job)


def searched_along_lines(job: Job) -> None:
    for batch in job.parts()[:2]:

        def evaluate(batch: Tensor = batch) -> Tensor:
            job.optimizer.zero_grad()
            return job.backward(batch)

        job.optimizer.step(evaluate)


def searched_after_hooks(job: Job) -> None:
    """A hook before a step is called beside a closure too."""
    calls: list[None] = []
    job.optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    searched_along_lines(job)
    assert len(calls) == 2


def groups_changed(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        if number == 2:
            del job.optimizer.param_groups[0]["params"][-1]
        job.step(batch)


def noise_by_weights(job: Job) -> None:
    for number, batch in enumerate(job.parts()):
        job.step(batch)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in job.inner.parameters():
                parameter.add_(torch.bernoulli(parameter.sigmoid()), alpha=0.01)
                parameter.add_(torch.empty_like(parameter).cauchy_().clamp(-1, 1), alpha=0.01)


def _size(module: nn.Module) -> Tensor:
    return torch.stack([parameter.square().mean() for parameter in module.parameters()]).sum()


class Sized(Block):
    """Which keeps the size of its weights in an attribute, where no hook sees it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.size = _size(self)
        return out


class Penalised(Net):
    """Whose blocks tell hooks of the size of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sized() for _ in range(3))
        sizes: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, *_: sizes.append(_size(module)))
        object.__setattr__(self, "sizes", sizes)


def penalty_of_hooks(job: Job) -> None:
    sizes = job.inner.sizes
    for block in job.inner.blocks:  # also hooks that come after the call
        block.down.register_forward_hook(lambda module, *_: sizes.append(_size(module)))
    for batch in job.parts():
        job.optimizer.zero_grad()
        sizes.clear()  # what hooks inside of blocks append again in a recomputation
        output = job.model(batch)
        sizes += [block.size for block in job.inner.blocks]
        loss = (job.result.loss_func if job.result else _loss)(batch, output) + sum(sizes)
        loss.backward()
        job.optimizer.step()


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tied = [self.first.weight]


EQUAL: Final[tuple[tuple[Callable[[Job], None], Callable[[], nn.Module], Any, Sequence[Any]], ...]] = (
    (attributes_of_blocks, Net, _sgd, (["ddp", "checkpoint"], ["zero1"], ["fsdp", "checkpoint"])),
    (thaw, Net, _sgd, (["fsdp", BF16], ["zero2", BF16])),
    (late_hooks, Net, _sgd, (["fsdp", BF16], ["zero2", FP16])),
    (submodules, Net, _sgd, (["fsdp", BF16], ["zero2", BF16])),
    (plain, _spectral, _sgd, (["fsdp", BF16], ["zero2", BF16])),
    (averages, Net, Averaging, (["zero1"], ["fsdp"])),
    (error_in_backward, Net, _sgd, (["ddp"],)),
    (unit_first, Net, _sgd, (["fsdp"], ["zero2", BF16])),
    (of_dicts, Scaled, _sgd, (["fsdp"], ["zero2"], ["zero2", "checkpoint"])),
    (left_out_after_clipping, Net, _sgd, (["ddp", FP16], ["fsdp", HALF], ["zero2"])),
    (zeroed_in_place, Net, _sgd, (["ddp", FP16], ["zero2", FP16], ["fsdp"])),
    (frozen_and_cleared_by_hand, Net, _sgd, (["ddp", HALF], ["zero2", HALF])),
    (scaled_by_phase, Net, _sgd, (["ddp", HALF], ["zero2", FP16])),
    (written_gradients, Net, _sgd, (["ddp"], ["zero2"], ["zero1", HALF])),
    (gradients_by_grad, Net, _sgd, (["zero1"],)),
    (perturbed, Net, Averaging, (["fsdp"], ["ddp", MASTERS], ["zero2", HALF])),
    (
        backward_after_clipping,
        Net,
        _sgd,
        (["zero2"], ["ddp", MASTERS], ["zero1", MASTERS], [TORCHS, MASTERS]),
    ),
    (loaded_by_names_of_the_model, Net, _sgd, (["ddp"], ["zero1"])),
    (plain, Net, _last_two, (["ddp"], ["zero2"])),
    (states_taken_out, Net, _sgd, (["fsdp"], ["ddp", HALF])),
    (clipped_before_each_step, Net, _sgd, (["fsdp"], ["ddp", MASTERS], ["ddp", HALF])),
    (clipped_by_groups, Net, _sgd, (["ddp", MASTERS], ["zero1", MASTERS], ["fsdp", MASTERS])),
    (prepared_and_clipped, Net, _sgd, (["ddp", MASTERS], ["zero1", HALF], ["fsdp", HALF])),
    (sharpness_by_groups, Net, _sgd, (["ddp", MASTERS], ["zero1", HALF], ["fsdp", MASTERS])),
    (of_the_head, Net, _sgd, (["ddp", MASTERS], ["zero1", MASTERS], ["fsdp", MASTERS])),
    (read_after_the_step, Net, _sgd, (["ddp", MASTERS], ["zero1", MASTERS], ["fsdp", MASTERS])),
    (weights_by_groups, Net, _sgd, (["ddp", HALF], ["zero1", MASTERS])),
    (bounded_after_steps, Net, _sgd, (["ddp", MASTERS], ["fsdp", HALF])),
    (searched_after_hooks, Net, partial(torch.optim.LBFGS, max_iter=3), (["ddp", MASTERS],)),
    (noise_by_weights, Net, _sgd, (["fsdp"],)),
    (penalty_of_hooks, Penalised, _sgd, (["fsdp"], ["fsdp", "checkpoint"], ["ddp", "checkpoint"])),
    (plain, Listed, _sgd, (["ddp"],)),
)
REFUSED: Final[tuple[tuple[Callable[[Job], None], Callable[[], nn.Module], Any, Sequence[Any], str], ...]] = (
    (perturbed, Net, Averaging, (["zero1"], ["zero1", MASTERS]), "optim.first_step() has changed weights"),
    (
        perturbed,
        Net,
        Averaging,
        (["ddp", ("half", {"dtype": "fp16", "init_scale": 2.0**30})],),
        "only step() skips an update",
    ),
    (plain, Listed, _sgd, (["fsdp"],), "tied holds a parameter of the model in a list"),
    (states_read, Net, _sgd, (["zero1"],), "the state of this parameter is on another rank"),
    (groups_changed, Net, _sgd, (["zero1"],), "removed from or moved"),
    (clipped_by_groups, Net, _sgd, (["ddp", HALF], ["fsdp", HALF]), "while they had the loss scale"),
    (read_after_the_step, Net, _sgd, (["ddp", HALF],), "kept from an earlier step"),
    (plain, Net, _last_two, (["zero1"],), "optim_func makes 1 group of 2 of the 16 parameters"),
    (error_in_backward, Net, _sgd, (["fsdp"], ["zero2"]), "an error has ended the last backward pass"),
    (gradients_by_grad, Net, _sgd, (["fsdp"], ["zero2"]), "gradients that are all zero"),
    (plain, Momentum, _sgd, (["fsdp"], ["zero2"]), "writes to its parameter keys.weight"),
    (
        backward_after_clipping,
        Net,
        _sgd,
        (["ddp", FP16], ["zero2", HALF]),
        "after the gradients were clipped",
    ),
    (own_optimizer, Net, _sgd, (["ddp", FP16], ["fsdp", HALF]), "not created by auto_accelerate"),
    (rate_by_own_loss, Net, _sgd, (["zero1"], ["fsdp"]), "lr of the optimizer"),
    (loaded_on_one_rank, Net, _sgd, (["zero1"],), "before the update"),
)


def _train(kinds: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for loop, build, make, strategies, *_ in kinds:
        found.append([])
        for methods in strategies:
            try:
                job = Job(methods, build, make)
                loop(job)
            except (InputError, StepError) as error:
                found[-1].append(str(error))
            else:
                found[-1].append(job.weights())
    return found


@pytest.mark.timeout(150)
def test_loops_that_train_as_in_one_process() -> None:
    ranks = run_ranks(_train, 2, args=(EQUAL,), timeout_s=120)
    for (loop, build, make, strategies, *_), results in zip(EQUAL, ranks[0], strict=True):
        job = Job(None, build, make)
        loop(job)
        for methods, weights in zip(strategies, results, strict=True):
            assert not isinstance(weights, str), (loop.__name__, methods, weights)
            rounds = len(methods) > 1 and not isinstance(methods[1], str)
            share = (0.3 if MASTERS in methods else 0.1) if rounds else 1e-4
            for name, expected in job.weights().items():
                change = float((expected - job.start[name]).abs().max())
                off = float((weights[name] - expected).abs().max())
                assert off <= share * change + 1e-6, (loop.__name__, methods, name, off, change)


@pytest.mark.timeout(150)
def test_loops_that_are_refused_on_all_ranks() -> None:
    for results in run_ranks(_train, 2, args=(REFUSED,), timeout_s=120):
        for (loop, _, _, strategies, words), found in zip(REFUSED, results, strict=True):
            for methods, said in zip(strategies, found, strict=True):
                assert isinstance(said, str), (loop.__name__, methods)
                assert words in said, (loop.__name__, methods, said)
