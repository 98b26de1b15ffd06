"""Runs of the Trainer: the quickstart, every policy against a plain loop, hooks in their order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch_ns.errors import InputError
from atorch_ns.strategy import Strategy
from atorch_ns.testing.workers import catch_ranks, run_ranks
from atorch_ns.trainer import (
    AggregatedOutputs,
    CheckpointConfig,
    ComputeConfig,
    DatasetConfig,
    HookConfig,
    HookMapConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    Trainer,
    TrainerArgs,
    TrainHook,
)
from tests.trainer.parts import Dataset, Model, Told, aggregate


def args_of(folder: str, plan: int = 1, **fields: Any) -> TrainerArgs:
    """Five steps of eight samples on all ranks; the last step of an epoch has two of them."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    pas = fields.pop("pas_config", {})
    zero = fields.pop("use_zero", False)
    config = ComputeConfig(plan, ranks, use_end2end=True, use_zero=zero, pas_config=pas)
    given: dict[str, Any] = {
        "compute_config": config,
        "gen_savedir": f"{folder}/plans",
        "model": ModelConfig(type=Model),
        "optimizer": OptimizerConfig(type=torch.optim.Adam, args={"lr": 1e-2}),
        "dataset": DatasetConfig(type=Dataset, train_args={"size": 20}, val_args={"size": 8, "seed": 1}),
        "checkpoint": CheckpointConfig(save_dir=f"{folder}/checkpoints"),
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "max_train_steps": 5,
        "enable_progress_bar": False,
        "seed": 3,
    }
    return TrainerArgs(**given | fields)


def micro_batches(epoch: int, size: int = 20) -> list[Any]:
    """Those of an epoch in the order in which one process sees them."""
    dataset = Dataset(size)
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    return list(loader)


def plain(reduction: str = "mean", num_steps: int = 5, clip: float | None = None) -> dict[str, Any]:
    """The same run as a plain loop in one process, on whole windows of four micro-batches and what is left."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, epoch = [], 0
    while len(losses) < num_steps:
        batches = micro_batches(epoch)
        for start in range(0, len(batches), 4):
            if len(losses) == num_steps:
                break
            window = batches[start : start + 4]
            optimizer.zero_grad()
            found = [model(batch) for batch in window]
            total = sum(int(count) for _, count in found)
            summed = torch.stack([loss for loss, _ in found]).sum()
            {"mean": summed / len(found), "sum": summed, "per-token-mean": summed / total}[
                reduction
            ].backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(float(summed) / len(found))
        epoch += 1
    return {"losses": losses, "weights": copy.deepcopy(model.state_dict())}


class Losses(TrainHook):
    """Keeps the losses of steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(
        self, trainer: Trainer, epoch: int, idx: int, step_metrics: Any, aggregated_outputs: Any
    ) -> None:
        self.found.append(step_metrics.train_loss)


KEPT: list[Any] = []


def kept_losses() -> Losses:
    KEPT.append(Losses())
    return KEPT[-1]


def run(folder: str, plan: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A run on these ranks: its losses, and the whole weights it has saved."""
    trainer = Trainer(train_args=args_of(folder, plan, hook=HookConfig(type=kept_losses), **fields))
    trainer.run()
    if dist.is_initialized():
        dist.barrier()
    return {"losses": KEPT[-1].found}


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    out = folder / "merged.ckpt"
    Trainer.merge_checkpoint([str(folder / "checkpoints" / name)], str(out))
    found: dict[str, torch.Tensor] = torch.load(out, weights_only=True)["model"]
    return found


def compare(found: list[dict[str, Any]], folder: Path, wanted: dict[str, Any]) -> None:
    for one in found:
        assert one["losses"] == pytest.approx(wanted["losses"], abs=2e-5)
    state = weights(folder)
    for name, value in wanted["weights"].items():
        assert torch.allclose(state[name], value, atol=2e-5), name


RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one process": (1, 1, {"pas_policy": "dp"}),
    "dp": (2, 1, {"pas_policy": "dp"}),
    "zero": (2, 1, {"pas_policy": "dp", "use_zero": True}),
    "tp": (2, 2, {"pas_policy": "tp"}),
    "autodist": (2, 2, {"pas_policy": "autodist"}),
    "pp": (2, 2, {"pas_policy": "pp", "pas_config": {"pipeline_nmicros": 4}}),
    "pp, zero, units": (4, 2, {"pas_policy": "pp", "use_zero": True, "pas_config": {"pipeline_nmicros": 4}}),
    "tp, units": (4, 2, {"pas_policy": "tp"}),
}


@pytest.mark.parametrize("what", RUNS)
def test_losses_and_weights_are_those_of_a_plain_loop(tmp_path: Path, what: str) -> None:
    ranks, plan, fields = RUNS[what]
    found = (
        [run(str(tmp_path), plan, dict(fields))]
        if ranks == 1
        else run_ranks(run, ranks, args=(str(tmp_path), plan, fields), timeout_s=120)
    )
    compare(found, tmp_path, plain())


@pytest.mark.parametrize("reduction", ["sum", "per-token-mean"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_reductions_of_gradients(tmp_path: Path, reduction: str, clip: float) -> None:
    optimizer = OptimizerConfig(
        type=torch.optim.Adam,
        args={"lr": 1e-2},
        clip_gnorm=clip,
        grad_reduction=reduction,  # type: ignore[arg-type]
        aggregate_outputs_fn=aggregate,
    )
    found = run_ranks(run, 2, args=(str(tmp_path), 1, {"pas_policy": "dp", "optimizer": optimizer}))
    compare(found, tmp_path, plain(reduction, clip=clip or None))


@pytest.mark.parametrize("given", [None, AggregatedOutputs(num_batches=2), AggregatedOutputs(loss_sum=1.0)])
def test_aggregations_that_lack_something_are_refused(tmp_path: Path, given: Any) -> None:
    optimizer = OptimizerConfig(type=torch.optim.SGD, args={"lr": 0.1}, aggregate_outputs_fn=lambda *_: given)
    with pytest.raises(InputError, match="must return AggregatedOutputs"):
        Trainer(train_args=args_of(str(tmp_path), pas_policy="dp", optimizer=optimizer)).run()


def strategy_file(folder: Path, *methods: Any) -> str:
    path = folder / "strategy.json"
    Strategy(list(methods)).save(path)
    return str(path)


@pytest.mark.parametrize(
    "methods", [["fsdp"], ["ddp"], [["parallel_mode", [["tensor", 2]]], "tensor_parallel"]]
)
def test_a_strategy_file_of_auto_accelerate(tmp_path: Path, methods: list[Any]) -> None:
    given = [tuple(one) if isinstance(one, list) else one for one in methods]
    path = strategy_file(tmp_path, *given)
    found = run_ranks(run, 2, args=(str(tmp_path), 1, {"pas_policy": path}), timeout_s=120)
    compare(found, tmp_path, plain())


ORDER = [
    "on_step_start",
    "before_zero_grad",
    "after_zero_grad",
    "on_train_step_start",
    "on_train_step_end",
    "after_aggregate_train_step_outputs",
    "before_sync_grad",
    "after_sync_grad",
    "before_gnorm_clip",
    "after_gnorm_clip",
    "before_optimizer_step",
    "after_optimizer_step",
    "before_log_train_metrics",
    "on_step_end",
]


def told(folder: str) -> list[str]:
    trainer = Trainer(
        train_args=args_of(
            folder, pas_policy="dp", hook=HookConfig(type=Told), max_train_steps=1, lr_scheduler=None
        )
    )
    trainer.run()
    seen: list[str] = trainer.hook._called["on_step_end"][0].__self__.seen
    return seen


def test_hooks_are_called_in_their_order_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(told, 2, args=(str(tmp_path),))
    assert first == second
    start = first.index("on_step_start")
    assert first[start : start + len(ORDER)] == ORDER
    assert first[:start] == ["after_setup", "on_train_start", "on_epoch_start"]
    assert [
        name for name in first[start + len(ORDER) :] if not name.startswith(("on_val_s", "after_agg"))
    ] == ["on_val_end", "before_log_val_metrics", "on_save_checkpoint", "on_train_end", "on_finalize"]


class Watches(TrainHook):
    """Compares gradients before and after they are reduced, and fails on one rank if told."""

    def __init__(self, fails: bool = False) -> None:
        self.before: list[float] = []
        self.after: list[float] = []
        self.fails = fails

    def before_sync_grad(self, trainer: Trainer) -> None:
        self.before = [float(p.grad.sum()) for p in trainer.model.parameters() if p.grad is not None]

    def after_sync_grad(self, trainer: Trainer) -> None:
        self.after = [float(p.grad.sum()) for p in trainer.model.parameters() if p.grad is not None]
        if self.fails and trainer.rank == 1:
            raise ValueError("a hook of rank 1")


def watched(folder: str, fails: bool) -> tuple[list[float], list[float]]:
    hook = HookConfig(type=Watches, args={"fails": fails})
    trainer = Trainer(train_args=args_of(folder, pas_policy="dp", hook=hook, max_train_steps=1))
    trainer.run()
    found = trainer.hook._called["before_sync_grad"][0].__self__
    return found.before, found.after


class Order(TrainHook):
    """Writes down when gradients may be looked at, among the reductions."""

    def __init__(self) -> None:
        self.log: list[str] = []
        whole = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() > 2:  # else of losses
                self.log.append("reduced")
            return whole(tensor, *args, **kwargs)

        dist.all_reduce = noted

    def on_step_start(self, trainer: Trainer, epoch: int, idx: int) -> None:
        self.log.append("step")

    def before_sync_grad(self, trainer: Trainer) -> None:
        self.log.append("before")

    def after_sync_grad(self, trainer: Trainer) -> None:
        self.log.append("after")


def ordered(folder: str) -> list[str]:
    trainer = Trainer(
        train_args=args_of(folder, pas_policy="dp", hook=HookConfig(type=Order), max_train_steps=2)
    )
    trainer.run()
    log: list[str] = trainer.hook._called["before_sync_grad"][0].__self__.log
    return log


def test_before_sync_grad_is_called_before_the_first_byte_is_reduced(tmp_path: Path) -> None:
    for log in run_ranks(ordered, 2, args=(str(tmp_path),)):
        steps = " ".join(log).split("step")[1:]
        assert len(steps) == 2
        for one in steps:
            words = one.split()
            assert words[0] == "before"
            assert words[1 : words.index("after")]
            assert set(words[1 : words.index("after")]) == {"reduced"}


def test_before_sync_grad_sees_the_gradients_of_this_rank_alone(tmp_path: Path) -> None:
    (mine, means), (others, _) = run_ranks(watched, 2, args=(str(tmp_path), False))
    assert mine != pytest.approx(others, rel=1e-3)
    assert means == pytest.approx([(a + b) / 2 for a, b in zip(mine, others, strict=True)], abs=1e-5)


def test_a_hook_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    other, own = catch_ranks(watched, 2, args=(str(tmp_path), True))
    assert own.message == "a hook of rank 1"
    assert "rank 1: ValueError: a hook of rank 1" in other.message, other.traceback


def test_a_hook_that_takes_something_else_is_found_before_training(tmp_path: Path) -> None:
    hook = HookMapConfig(on_epoch_end=lambda trainer, number: None)
    with pytest.raises(InputError, match=r"hook on_epoch_end: .* is called with \(trainer, epoch\)"):
        Trainer(train_args=args_of(str(tmp_path), pas_policy="dp", hook=hook)).run()
    assert not (tmp_path / "checkpoints" / "last").exists()


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_schedulers_step_by_epoch_or_step(tmp_path: Path, interval: Any) -> None:
    scheduler = LRSchedulerConfig(
        type=torch.optim.lr_scheduler.StepLR, args={"step_size": 1, "gamma": 0.5}, interval=interval
    )
    trainer = Trainer(train_args=args_of(str(tmp_path), pas_policy="dp", lr_scheduler=scheduler))
    trainer.run()  # five steps: an epoch of three and two more
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(
        1e-2 * 0.5 ** (1 if interval == "epoch" else 5)
    )


def test_a_plateau_is_judged_by_the_validation_of_its_own_epoch(tmp_path: Path) -> None:
    scheduler = LRSchedulerConfig(type=torch.optim.lr_scheduler.ReduceLROnPlateau, interval="epoch")
    trainer = Trainer(
        train_args=args_of(str(tmp_path), pas_policy="dp", lr_scheduler=scheduler, max_epochs=1)
    )
    trainer.run()
    assert trainer.lr_scheduler.best == trainer.train_status.val_loss


class Late(Dataset):
    """Fails on the second rank, when it is made or later."""

    def __init__(self, size: int, fails_at: int) -> None:
        super().__init__(size)
        self.fails_at = fails_at
        self._fail_if(fails_at < 0)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        self._fail_if(place == self.fails_at)
        return super().__getitem__(place)

    def _fail_if(self, is_due: bool) -> None:
        if is_due and dist.get_rank() == 1:
            raise ValueError("a sample of rank 1")


class LateHook(TrainHook):
    """Fails on the second rank where it is told."""

    def __init__(self, name: str) -> None:
        def fail(trainer: Trainer, **_: Any) -> None:
            if trainer.rank == 1:
                raise ValueError("a sample of rank 1")

        setattr(type(self), name, lambda _, trainer, **told: fail(trainer, **told))


def failing(folder: str, where: str) -> None:
    fields: dict[str, Any] = {}
    if where in ("made", "read"):
        given = {"size": 20, "fails_at": -1 if where == "made" else 5}
        fields["dataset"] = DatasetConfig(type=Late, train_args=given)
    else:
        fields["hook"] = HookConfig(type=LateHook, args={"name": where})
    Trainer(train_args=args_of(folder, pas_policy="dp", **fields)).run()


@pytest.mark.parametrize(
    "where", ["made", "read", "after_setup", "on_val_end", "on_save_checkpoint", "on_finalize"]
)
def test_what_fails_on_one_rank_ends_the_run_on_all_with_its_cause(tmp_path: Path, where: str) -> None:
    other, own = catch_ranks(failing, 2, args=(str(tmp_path), where))
    assert "a sample of rank 1" in own.message
    if where == "on_finalize":  # the other one is done
        assert other.status == "returned"
    else:
        assert "rank 1" in other.message, other.traceback
        assert "a sample of rank 1" in other.message, other.traceback
