"""Search for the degrees that ``init`` left open, with schedule, recomputation, sharding, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.engine import SearchRequest, find_strategy
from atorch_ns.errors import InputError
from atorch_ns.job import Inputs
from atorch_ns.merak.args import MerakArguments
from atorch_ns.merak.mpu import Degree
from atorch_ns.method import load_registry, resolve
from atorch_ns.report import observer_for
from atorch_ns.search import SearchOutcome
from atorch_ns.strategy import Strategy

_AXES: Final = ("tensor", "sequence", "expert", "zero", "data", "pipeline")  # innermost first


@dataclass(frozen=True)
class FoundDegrees:
    """Result of a search for degrees.

    Attributes:
        strategy: the strategy to apply.
        sizes: ranks along pipe, data, sequence and model.
        num_micro_batches: micro-batches of each data rank in a step.
        outcome: outcome of the search, for the report; ``None`` for a file.
    """

    strategy: Strategy
    sizes: tuple[int, int, int, int]
    num_micro_batches: int
    outcome: SearchOutcome | None


def own_loss(batch: Any, output: Any) -> torch.Tensor:
    """The loss that a transformers model returns with its outputs.

    Raises:
        InputError: if there is none.
    """
    loss: torch.Tensor | None = output.get("loss") if isinstance(output, Mapping) else output[0]
    if loss is None:
        raise InputError(
            "a search for degrees trains on the model's own loss, but its outputs have no loss: give labels in the batch, or "
            "name dp, tp and pp in init."
        )
    return loss


def search(
    model: nn.Module,
    args: MerakArguments,
    given_degrees: Mapping[str, Degree],
    sample: Mapping[str, Any],
    *,
    optimizer: tuple[Any, Mapping[str, Any]],
    batch_size: int,
) -> FoundDegrees:
    """Searches for a strategy on the ranks that will train. Collective.

    Args:
        model: the undivided model.
        args: arguments, of which precision, ``torch_compile`` and ``output_dir`` are used.
        given_degrees: the degrees given to ``init``.
        sample: the model's input for a batch.
        optimizer: class and arguments.
        batch_size: samples of a step over all ranks.

    Raises:
        InputError: if no mesh has the degrees given as numbers.
        SearchError: if no candidate could be run.
    """
    cluster, registry = Cluster.detect(), load_registry()
    make, arguments = optimizer
    inputs = Inputs(
        model=model,
        optim_func=make,
        optim_args=dict(arguments),
        loss_func=own_loss,
        model_input_format="unpack_dict",
        max_grad_norm=args.max_grad_norm or None,  # 0 does not clip
    )
    precision: list[Any] = [("amp_native", {"dtype": "fp16" if args.fp16 else "bf16"})]
    mixed = args.fp16 or args.bf16
    # Precision and compilation come from the arguments. Candidates differ in everything else.
    request = SearchRequest(
        included=[*(precision if mixed else ()), *(["compile"] if args.torch_compile else ())],
        excluded=[
            *(() if mixed else ("precision",)),  # the arguments decide on these two
            *(() if args.torch_compile else ("compile",)),
            *_unwanted_meshes(given_degrees, cluster.world_size),
        ],
        sample_batch=dict(sample),
        batch_size=batch_size,
        search_logs=Path(args.output_dir or ".") / "search.logs",
    )

    def check() -> None:
        inputs.check()
        request.check(registry, cluster)

    cluster.agree(check, what="checking the arguments of the search")
    view = observer_for(verbose=False, time_limit_s=request.settings.time_limit_s)
    with view if cluster.rank == 0 else nullcontext():  # one rank shows progress
        outcome = find_strategy(inputs, cluster, registry, replace(request, observer=view))
    assert outcome.winner is not None
    return _resolve_strategy(outcome.winner.candidate.strategy, cluster, outcome)


def read_file(path: str, given_degrees: Mapping[str, Degree], batch_size: int) -> FoundDegrees:
    """Reads a strategy file for these ranks and a step of ``batch_size`` samples.

    Raises:
        InputError: if its degrees differ from those given to ``init``, or do not divide the samples.
        StrategyFileError: if the file cannot be read.
    """
    result = _resolve_strategy(Strategy.load(path), Cluster.detect(), None)
    degrees = dict(zip(("pp", "dp", "sp", "tp"), result.sizes, strict=True))
    for name, degree in given_degrees.items():
        if isinstance(degree, int) and degree != degrees[name]:
            raise InputError(
                f"init: {name}={degree}, but strategy_file={path} has {name}={degrees[name]}. Omit degrees from init."
            )
    if batch_size % (result.sizes[1] * result.num_micro_batches):
        raise InputError(
            f"strategy_file={path}: {result.sizes[1]} data rank(s) with {result.num_micro_batches} micro-batch(es) do not divide "
            f"a step of {batch_size} samples (per_device_train_batch_size × gradient_accumulation_steps × processes)."
        )
    return result


def _resolve_strategy(strategy: Strategy, cluster: Cluster, outcome: SearchOutcome | None) -> FoundDegrees:
    plan = resolve(strategy, cluster, load_registry()).plan
    sizes = (
        plan.size("pipeline"),
        plan.size("data") * plan.size("zero"),  # ranks that shard states have samples of their own
        plan.size("sequence"),
        plan.size("tensor"),
    )
    return FoundDegrees(strategy, sizes, plan.num_micro_batches, outcome)


def _unwanted_meshes(given_degrees: Mapping[str, Degree], world_size: int) -> Iterator[Any]:
    numbers = {name: degree for name, degree in given_degrees.items() if isinstance(degree, int)}
    num_matches = 0
    for sizes in _list_factorizations(world_size, len(_AXES)):
        of = dict(zip(_AXES, sizes, strict=True))
        degrees = {
            "dp": of["data"] * of["zero"],
            "tp": of["tensor"],
            "pp": of["pipeline"],
            "sp": of["sequence"],
        }
        # Candidates have the given degrees and divide no experts, for which Merak has no degree.
        if of["expert"] == 1 and all(degrees[name] == degree for name, degree in numbers.items()):
            num_matches += 1
            continue
        yield ("parallel_mode", {"axes": [[name, size] for name, size in of.items() if size > 1]})
    if not num_matches:
        text = ", ".join(f"{name}={degree}" for name, degree in numbers.items())
        raise InputError(f"init: {text} do not fit any mesh of {world_size} process(es).")


def _list_factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    # Ordered: (2, 4) and (4, 2) are different meshes.
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _list_factorizations(number // first, count - 1))
