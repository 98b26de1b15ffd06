"""One rank of Merak, or of our front end of the same name: ``python -m benchmarks._peers._merak_rank JOB``.

JOB is JSON. Both sides run ``MerakTrainer.train()`` with the same arguments, and stop after each step until they are asked for
the next one. Merak was written for CUDA and NCCL: :func:`_adapted` lists what is changed.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._llama import Llama, next_token_loss
from benchmarks._peers._beside import FOLDER, serve
from benchmarks._peers._cuda_as_cpu import cuda_as_cpu
from benchmarks._peers._nnscaler_rank import Tell, peaks, with_labels
from benchmarks._peers._peer import OPTIM_ARGS
from benchmarks._slow_stage import SLOW_WIDTH, Slow, SlowStage

Wait = Callable[[Mapping[str, float]], None]

_ENDLESS = 10**6
"""Steps: as many as are asked for."""


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of one batch, again and again."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return _ENDLESS * len(self.batch["input_ids"])

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: rows[place % len(rows)] for name, rows in self.batch.items()}


class _InTurn:
    """Batches of the rows of one data-parallel rank, in the order in which they come."""

    def __init__(self, rows: range, batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size

    def __len__(self) -> int:
        return _ENDLESS

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            for start in range(0, len(self.rows), self.batch_size):
                yield list(self.rows[start : start + self.batch_size])


def _adapted() -> None:
    """Lets Merak 2.2.2 run on CPUs: its ``init`` looks for NCCL in torch's build, and its modules for CUDA."""
    cuda_as_cpu()
    sys.path.insert(0, str(FOLDER / "merak-source"))
    shown = torch.__config__.show()
    torch.__config__.show = lambda: f"{shown}, USE_NCCL=1, "


def main() -> None:
    """Plans or trains."""
    job = json.loads(sys.argv[1])
    serve(lambda tell: _run(job, tell))


def _run(job: Mapping[str, Any], tell: Tell) -> None:
    if job["do"] == "plan":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  the backend of that name

        dist.init_process_group("fake", rank=0, world_size=job["stages"])
    if job["side"] == "theirs":
        _adapted()
        import Merak as front  # type: ignore[import-not-found]
    else:
        if job["do"] == "train":
            dist.init_process_group("gloo")
        import atorch_ns.merak as front
    (_plan if job["do"] == "plan" else _train)(job, front, tell)


def _plan(job: Mapping[str, Any], front: Any, tell: Tell) -> None:
    """Merak cuts the traced model into the stages it is told to make; ours looks for degrees, cuts and all else as well."""
    if job["side"] == "theirs":
        front.init(pp=job["stages"], tp=1, dp=1)
    tell({})
    while True:
        size = Llama(**job["size"])
        model, batch = size.build(), with_labels(size, job["samples"], job["num_tokens"])
        begun = time.process_time()
        if job["side"] == "theirs":
            with tempfile.TemporaryDirectory() as folder:
                _theirs_of(model, batch, job, front, folder, dict)
        else:
            _searched(model, batch, job)
        tell({"all_s": time.process_time() - begun})


def _searched(model: nn.Module, batch: dict[str, Tensor], job: Mapping[str, Any]) -> None:
    from atorch_ns.cluster import cluster_from_spec
    from atorch_ns.estimate import Workload
    from atorch_ns.method import load_registry
    from atorch_ns.profile import profile_model
    from atorch_ns.search import SearchSettings, explore
    from atorch_ns.sharding import find_dims

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return next_token_loss(batch, model(input_ids=batch["input_ids"]))

    profile = profile_model(model, batch, loss_of, find_dims, make_optimizer=torch.optim.AdamW)
    workload = Workload(global_batch=job["samples"], num_tokens=job["num_tokens"])
    cluster = cluster_from_spec(f"{job['stages']}xH100-80GB")
    explore(profile, cluster, workload, load_registry(), settings=SearchSettings())


def _train(job: Mapping[str, Any], front: Any, tell: Tell) -> None:
    front.init(pp=job["stages"], tp=1, dp=job["ranks"] // job["stages"])
    tell({})
    with peaks(job["memory"]) as peak, tempfile.TemporaryDirectory() as folder:

        def wait(found: Mapping[str, float]) -> None:
            tell({**found, **peak(), "slow_forwards": Slow.num_forwards})

        side = _theirs if job["side"] == "theirs" else _ours
        trainer = side(job, front, folder, wait)
        gc.collect()
        trainer.train()


def _arguments(job: Mapping[str, Any], front: Any, folder: str, **more: Any) -> Any:
    """Those that have the same names and meaning on both sides."""
    replicas = job["ranks"] // job["stages"]
    return front.MerakArguments(
        output_dir=folder,
        per_device_train_batch_size=job["samples"] // replicas // job["micro_batches"],
        gradient_accumulation_steps=job["micro_batches"],
        max_steps=_ENDLESS,
        learning_rate=OPTIM_ARGS["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        label_names=["labels"],
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
        train_schedule=job["schedule"],
        activation_checkpointing=job["recompute"],
        wall_clock_breakdown=False,
        **{"split_method": "layer_split", "partition_method": "uniform_floor", **more},
    )


class _Slowed(nn.Module):
    """Stages that sleep, and a last layer that Merak leaves without recomputation, as it always does.

    Beside what is computed, the inputs go from stage to stage: Merak's recomputation takes a lone tensor for a tuple.

    Args:
        seconds: of a stage's forward and backward pass.
        num_stages: stages.
        bare: return logits as they are; Merak's backward pass takes nothing else, and ``Trainer`` the first of a tuple.
    """

    def __init__(self, seconds: Sequence[float], num_stages: int, bare: bool) -> None:
        super().__init__()
        self.bare = bare
        self.layers = nn.ModuleList(SlowStage(*seconds) for _ in range(num_stages))
        self.head = nn.Linear(SLOW_WIDTH, SLOW_WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor | tuple[Tensor]:
        """[B, F] to logits."""
        hidden = input_ids
        for layer in self.layers:
            hidden = layer(hidden + input_ids)
        logits: Tensor = self.head(hidden + input_ids)
        return logits if self.bare else (logits,)


def _model(job: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    if job["slow"]:
        rows = job["samples"]
        batch = {"input_ids": torch.ones(rows, SLOW_WIDTH), "labels": torch.zeros(rows, dtype=torch.long)}
        return _Slowed(job["slow"], job["stages"], job["side"] == "theirs"), batch
    size = Llama(**job["size"])
    model = size.build()
    model.load_state_dict(torch.load(job["weights"]))
    return model, with_labels(size, job["samples"], job["num_tokens"])


def _theirs(job: Mapping[str, Any], front: Any, folder: str, wait: Wait) -> Any:
    return _theirs_of(*_model(job), job, front, folder, wait)


def _theirs_of(
    model: nn.Module, batch: dict[str, Tensor], job: Mapping[str, Any], front: Any, folder: str, wait: Wait
) -> Any:
    from Merak.core import mpu  # type: ignore[import-not-found]
    from transformers import PretrainedConfig
    from transformers.models.llama import modeling_llama

    class Trainer(front.MerakTrainer):  # type: ignore[misc]
        def get_train_sampler(self) -> _InTurn:
            rows = job["samples"] // mpu.get_data_parallel_world_size()
            first = rows * mpu.get_data_parallel_rank()
            return _InTurn(range(first, first + rows), self.args.per_device_train_batch_size)

        def init_engine(self, eval: bool = False) -> None:
            super().init_engine(eval)
            train_batch = self.engine.train_batch

            def paused(data: Any) -> Any:
                loss = train_batch(data)
                wait({"loss": float(loss)})
                return loss

            self.engine.train_batch = paused
            wait({})

    # Its example has attention as a leaf, too.
    leaves = (SlowStage, *modeling_llama.LLAMA_ATTENTION_CLASSES.values())
    more: dict[str, Any] = {}
    if job["slow"]:
        model.config = PretrainedConfig()  # it asks every model for one
        stages = range(job["stages"])
        more["custom_partition"] = [",".join(map(str, (*stages, job["stages"] + 1)))]
        more |= {"partition_method": "custom", "input_names": ["input_ids"], "num_layers": job["stages"]}
        more["custom_split_points"] = [*(f"layers.{stage}" for stage in stages[1:]), "head"]
        more["activation_checkpoint_ratio"] = ["1.0"] * job["stages"]  # a schedule asks for it
    arguments = _arguments(job, front, folder, logging_steps=_ENDLESS, **more)
    return Trainer(model, arguments, train_dataset=_Rows(batch), leaf_modules=leaves)


def _ours(job: Mapping[str, Any], front: Any, folder: str, wait: Wait) -> Any:
    from transformers import TrainerCallback

    class Pausing(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wait({})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait({"loss": trainer.loss})

    class Trainer(front.MerakTrainer):  # type: ignore[misc]
        loss = 0.0

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            self.loss = float(loss)
            return loss

    model, batch = _model(job)
    more: dict[str, Any] = {}
    if job["slow"]:
        more["custom_split_points"] = [f"layers.{stage}" for stage in range(1, job["stages"])]
    arguments = _arguments(job, front, folder, logging_strategy="no", disable_tqdm=True, **more)
    trainer = Trainer(
        model, arguments, train_dataset=_Rows(batch), loss_fn=nn.CrossEntropyLoss(), callbacks=[Pausing()]
    )
    return trainer


if __name__ == "__main__":
    main()
