"""One rank of nnScaler, or of our front end of the same name: ``python -m benchmarks._peers._nnscaler_rank JOB``.

JOB is JSON. It tells what is planned, or trained step by step: the module, batch, policy and optimizer are the same on both
sides, and so are the calls. nnScaler was written for CUDA and older versions of torch: :func:`_adapted` lists what is changed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._llama import Llama, random_batch
from benchmarks._peers._beside import FOLDER, serve
from benchmarks._peers._cuda_as_cpu import cuda_as_cpu
from benchmarks._peers._peer import OPTIM_ARGS

__all__ = ["peaks", "with_labels"]

Tell = Callable[[Mapping[str, Any]], str]

_PROFILE = (0.05, 5, 1.0)
"""Seconds of warm-up, runs, and seconds at most of each operator that autodist profiles; 2, 20 and 20 by default."""


class WithLoss(nn.Module):
    """A Llama and its loss: token ids and the labels that follow them, [B, T], to the mean loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Labels of -100 do not count."""
        logits = self.model(input_ids=input_ids, use_cache=False, return_dict=False)[0]
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def with_labels(size: Llama, samples: int, num_tokens: int) -> dict[str, Tensor]:
    """The batch of all ranks; each label is the token that follows, -100 after the last."""
    ids = random_batch(size, samples, num_tokens, seed=0)["input_ids"]
    return {"input_ids": ids, "labels": torch.cat([ids[:, 1:], ids.new_full((samples, 1), -100)], 1)}


def _adapted() -> Callable[[], AbstractContextManager[Any]]:
    """Lets nnScaler 0.8 run on CPUs under today's torch; the context in which it compiles.

    Its tracer wraps every builtin of torch by its qualified name, which those of pybind11 3 do not have, and replaces
    ``Node.is_impure`` by a function without the argument that it has now; its own tests' helper makes what the
    traced model would make on ``cuda`` on the processor.
    """
    sys.path[:0] = [str(FOLDER / "nnscaler-source"), str(FOLDER / "nnscaler-source" / "tests")]
    from nnscaler.graph.tracer import torch_fx_patcher, wrap_utils  # type: ignore[import-not-found]
    from nnscaler.profiler import database  # type: ignore[import-not-found]
    from utils import replace_all_device_with  # type: ignore[import-not-found]

    wrapped = wrap_utils.default_autowrap_leaf_function
    for function in [one for one in wrapped if "pybind11" in getattr(one, "__qualname__", "")]:
        del wrapped[function]
    patcher = torch_fx_patcher.TorchFXPatcher
    is_impure = patcher.is_impure_new
    patcher.is_impure_new = staticmethod(lambda node, *_: is_impure(node))
    database.profile.__defaults__ = _PROFILE
    return lambda: replace_all_device_with("cpu", True)


def _noted(noted: dict[str, Any]) -> None:
    """Has nnScaler's search note when it began and ended, and what it chose for which operator."""
    from nnscaler.autodist import apis  # type: ignore[import-not-found]

    search = apis.calc_parallel_plan

    def searched(graph: Any, config: Any) -> Any:
        noted["trace_s"] = time.process_time()
        found = search(graph, config)
        noted["plan_s"] = time.process_time()
        chosen = {key: one for stage in found.desc.spmd_descs for key, one in stage.partition_descs.items()}
        noted["choices"] = [
            [next(reversed(node.module_stack or {"": None})), node.signature.rsplit(".", 1)[-1], *where]
            for node in graph.nodes()
            if node.cid in chosen
            for where, _ in chosen[node.cid].desc
        ]
        return found

    apis.calc_parallel_plan = searched


def main() -> None:
    """Plans or trains."""
    job = json.loads(sys.argv[1])
    serve(lambda tell: _run(job, tell))


def _run(job: Mapping[str, Any], tell: Tell) -> None:
    compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
    if job["side"] == "theirs":
        os.environ["HOME"] = str(FOLDER / "nnscaler-profiles")  # where it keeps them
        cuda_as_cpu()
        compiling = _adapted()
        import nnscaler.parallel as front  # type: ignore[import-not-found]
    else:
        import atorch_ns.parallel as front

        if "RANK" in os.environ:
            dist.init_process_group("gloo")
    (_plan if job["do"] == "plan" else _train)(job, front, compiling, tell)


def _parallel(
    job: Mapping[str, Any], front: Any, compiling: Callable[[], Any], load: bool
) -> tuple[Any, dict[str, Tensor]]:
    size, units = Llama(**job["size"]), job["ranks"] // job["degree"]
    batch = with_labels(size, job["samples"], job["num_tokens"])
    if load:
        unit = dist.get_rank() // job["degree"]
        batch = {name: tensor.chunk(units)[unit].contiguous() for name, tensor in batch.items()}
    model = size.build("meta" if job["meta"] else "cpu")
    if load:
        model.load_state_dict(torch.load(job["weights"]))
    settings = {"mem_constraint": 80, "parallel_profile": False} if job["policy"] == "autodist" else {}
    config = front.ComputeConfig(
        job["degree"],
        job["ranks"],
        constant_folding=True,
        trace_strategy="meta" if job["meta"] else "cpu",
        pas_config=settings,
    )
    with compiling():
        parallel = front.parallelize(
            WithLoss(model),
            batch,
            job["policy"],
            config,
            gen_savedir=Path(job["folder"]) / job["side"],
            reuse=front.ReuseType.OVERRIDE,
            load_module=load,
        )
    return parallel, batch


def _plan(job: Mapping[str, Any], front: Any, compiling: Callable[[], Any], tell: Tell) -> None:
    noted: dict[str, Any] = {}
    if job["side"] == "theirs":
        _noted(noted)
    tell({})
    while True:
        begun = time.process_time()
        _parallel(job, front, compiling, False)
        seconds = {"all_s": time.process_time() - begun}
        if noted:
            seconds |= {name: noted[name] - begun for name in ("trace_s", "plan_s")}
        tell({**seconds, "choices": noted.get("choices")})


def _train(job: Mapping[str, Any], front: Any, compiling: Callable[[], Any], tell: Tell) -> None:
    tell({})
    with peaks(job["memory"]) as peak:
        parallel, batch = _parallel(job, front, compiling, True)
        optimizer = front.build_optimizer(parallel, torch.optim.AdamW, **OPTIM_ARGS)
        units = job["ranks"] // job["degree"]
        gc.collect()
        found: dict[str, float] = {}
        while True:
            tell({**found, **peak()})
            loss = parallel(**batch)
            (loss / units).backward()  # gradients are summed over units
            optimizer.step()
            optimizer.zero_grad()
            found = {"loss": float(loss.detach())}


@contextmanager
def peaks(follow: bool) -> Iterator[Callable[[], dict[str, int]]]:
    """``peak_bytes`` of tensors since it was last asked, if they are to be followed, which slows every operator."""
    if not follow:
        yield dict
        return
    from atorch_ns.job import track_memory

    with track_memory(torch.device("cpu")) as memory:

        def peak() -> dict[str, int]:
            found = memory.peak_bytes
            memory.reset_peak()
            return {"peak_bytes": found}

        yield peak


if __name__ == "__main__":
    main()
