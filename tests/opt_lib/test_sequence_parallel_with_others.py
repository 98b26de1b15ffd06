"""sequence_parallel trains as one process does together with the other methods."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from atorch_ns.capture.nests import tensors_of
from atorch_ns.errors import InputError
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.networks import TiedLlama
from atorch_ns.testing.parity import (
    BF16_GLOBAL_BATCH,
    accelerate_case,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.sequence_cases import KINDS, check, cut, strategy, train

DIVIDED = "head and loss are computed on each rank's own positions"
ULYSSES, RING = (("sequence_parallel", {"kind": kind}) for kind in KINDS)
STREAM = ("tensor_parallel", {"sequence": True})
VOCABULARY, WIDTH = 160, 32
"""Of a TiedLlama; unlike each other, also halved."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_over_four_ranks(kind: str) -> None:
    tied, odd = get_case("tied_llama"), cut("tied_llama", 13)
    two = {"sequence": 2, "data": 2}
    check(
        4,
        [
            (tied, strategy(kind, sequence=4)),
            (get_case("hf_llama"), strategy(kind, sequence=4)),
            (tied, strategy(kind, "ddp", **two)),
            (odd, strategy(kind, "fsdp", "checkpoint", **two)),
            (odd, strategy(kind, "zero2", ("gradient_accumulation", 2), **two)),
        ],
    )


@pytest.mark.timeout(200)
def test_states_are_sharded_over_data_and_sequence_ranks() -> None:
    """Untied and tied, the loss in the model or outside, gradients clipped."""
    llama, tied, two = get_case("hf_llama"), get_case("tied_llama"), {"sequence": 2, "data": 2}
    runs = [
        (llama, strategy("ring", "fsdp", sequence=4)),
        (tied, strategy("ulysses", "zero2", **two)),
        (llama, strategy("ulysses", "ddp", **two)),
        (tied, strategy("ring", "fsdp", ("checkpoint", {"no_reentrant": False}), **two)),
    ]
    references = {case.name: reference_run(case, max_norm=0.05) for case in (llama, tied)}
    found = run_ranks(train, 4, args=(runs, {"max_grad_norm": 0.05}), timeout_s=150)
    for place, (case, _) in enumerate(runs):
        assert_ranks_agree([trajectories[place] for trajectories in found])
        assert_parity(compare(references[case.name], found[0][place]))


def _tails() -> list[Any]:
    """What reports say, and the outputs outside of a training step."""
    found: list[Any] = []
    for name, config in (
        ("hf_llama", {}),
        ("tied_llama", {}),
        ("hf_vit", {}),
        ("hf_llama", {"parallel_loss": False}),
    ):
        result = accelerate_case(get_case(name), strategy("ring", **config))
        found.append(result.job.explained("sequence_parallel")[-1])
    batch = result.prepare_input(next(iter(result.dataloader)), torch.device("cpu"))
    with torch.no_grad():
        logits = result.model(**batch).logits
    return [*found, type(logits), logits.shape[1] == batch["input_ids"].shape[1]]


def test_head_and_loss_see_parts_where_they_divide() -> None:
    for found in run_ranks(_tails, 2):
        llama, tied, vit, asked, kind, is_whole = found
        assert (llama, tied) == (DIVIDED, DIVIDED)
        assert vit == "head and loss see whole samples: they are needed whole by __getitem__"
        assert asked == "head and loss see whole samples, since parallel_loss=False"
        assert kind is torch.Tensor
        assert is_whole


def _refused(loss: Any) -> str:
    case = dataclasses.replace(get_case("tied_llama"), loss_func=loss)
    with pytest.raises(InputError) as caught:
        accelerate_case(case, strategy("ring", parallel_loss=True))
    report = accelerate_case(case, strategy("ring")).job.explained("sequence_parallel")[-1]
    return f"{caught.value}; {report}"


def _in_place(batch: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    output = output.mul_(0.5)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def test_a_loss_that_changes_logits_in_place_sees_whole_samples() -> None:
    text, _ = run_ranks(_refused, 2, args=(_in_place,))
    assert "parallel_loss=True cannot be used" in text
    assert "head and loss see whole samples: loss_func changes them in place, by mul_" in text


def test_with_compiled_and_recomputed_blocks() -> None:
    case = get_case("tied_llama")
    check(2, [(case, strategy(kind, ("compile", "aot_eager"), "checkpoint")) for kind in KINDS])


def _axes(**sizes: int) -> Any:
    return ("parallel_mode", (list(sizes.items()), None))


def _with_labels(name: str) -> Case:
    """A case of transformers whose model computes the loss: of labels that are nearly all at the end of the samples."""
    case = get_case(name)

    def make_batch(batch_size: int, seed: int) -> Any:
        batch = case.make_batch(batch_size, seed)
        labels = batch["input_ids"].clone()
        labels[:, 1 : 2 * labels.size(1) // 3] = -100
        return {**batch, "labels": labels}

    return dataclasses.replace(
        case, name=f"{name} with labels", make_batch=make_batch, loss_func=lambda _, output: output.loss
    )


@pytest.mark.timeout(300)
def test_where_layers_are_divided_too() -> None:
    """The residual stream whole or divided, tied and untied, with sharded states and accumulation."""
    axes, gpt2 = _axes(tensor=2, sequence=2), get_case("hf_gpt2")
    check(
        4,
        [
            (_with_labels("hf_llama"), [axes, "tensor_parallel", ULYSSES, "fsdp"]),
            (get_case("tied_llama"), [axes, RING, STREAM, "checkpoint", ("gradient_accumulation", 2)]),
            (gpt2, [axes, STREAM, "sequence_parallel", "zero2"]),
        ],
        timeout_s=250,
    )


@pytest.mark.timeout(300)
def test_where_the_model_is_cut_too() -> None:
    axes, passes = _axes(sequence=2, pipeline=2), ("pipeline_parallel", {"num_micro_batches": 2})
    alone = ("pipeline_parallel", {"num_micro_batches": 2, "split_points": ["norm"]})
    tied = get_case("tied_llama")
    check(
        4,
        [
            (_with_labels("hf_llama"), [axes, passes, RING, "fsdp"]),
            (tied, [axes, passes, ULYSSES, "checkpoint"]),
            (get_case("hf_gpt2"), [axes, passes, "sequence_parallel", "zero2"]),
            (tied, [axes, alone, ULYSSES]),
        ],
        timeout_s=250,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_where_layers_are_divided_and_the_model_is_cut() -> None:
    axes, passes = _axes(tensor=2, sequence=2, pipeline=2), ("pipeline_parallel", {"num_micro_batches": 4})
    llama = _with_labels("hf_llama")
    check(
        8,
        [
            (llama, [axes, passes, STREAM, RING, "checkpoint"]),
            (get_case("tied_llama"), [axes, passes, "tensor_parallel", "sequence_parallel"]),
            (
                llama,
                [axes, ("pipeline_parallel", {"schedule": "ZBVZeroBubble", "num_micro_batches": 4}), ULYSSES],
            ),
        ],
        timeout_s=350,
    )


class _Rows(TorchDispatchMode):
    """Records the largest number of positions for which there are logits, of any tensor."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.most = 0
        self._words = words

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tensors_of(made):
            if one.dim() > 1 and one.size(-1) == self._words and len(one) != WIDTH:  # or the weight
                self.most = max(self.most, one.numel() // self._words)
        return made


def _logits(strategies: list[Any]) -> list[Any]:
    """Positions of logits on this rank in a step of four samples, the largest tensor that it sends to a stage, and what
    the report says."""
    found: list[Any] = []
    for steps in strategies:
        model = TiedLlama(vocab_size=VOCABULARY, width=WIDTH)
        result = accelerate_case(get_case("tied_llama"), steps, global_batch=4, model=model)
        axes = dict(steps[0][1][0])
        batch = next(iter(result.dataloader))
        words = VOCABULARY // axes.get("tensor", 1)
        with patch.object(dist, "isend", wraps=dist.isend) as sent, _Rows(words) as rows:
            result.train_step(batch)
        largest = max((call.args[0].numel() for call in sent.call_args_list), default=0)
        found.append((rows.most, result.job.explained("sequence_parallel"), largest // WIDTH))
    return found


@pytest.mark.timeout(200)
def test_ranks_have_logits_of_their_own_positions_alone() -> None:
    passes, whole = (
        ("pipeline_parallel", {"num_micro_batches": 2}),
        ("sequence_parallel", {"parallel_loss": False}),
    )
    alone = ("pipeline_parallel", {"num_micro_batches": 2, "split_points": ["norm"]})
    tensor, cut = _axes(tensor=2, sequence=2), _axes(sequence=2, pipeline=2)
    strategies = [
        [tensor, STREAM, ULYSSES],
        [tensor, "tensor_parallel", whole],
        [cut, passes, ULYSSES],
        [cut, passes, whole],
        [cut, alone, ULYSSES],
    ]
    ranks = run_ranks(_logits, 4, args=(strategies,), timeout_s=150)
    sample = get_case("tied_llama").make_batch(1, 0).size(1)
    most = [max(rank[index][0] for rank in ranks) for index in range(len(strategies))]
    assert most == [4 * sample // 2, 4 * sample, 2 * sample // 2, 2 * sample, 2 * sample]
    assert [max(rank[index][2] for rank in ranks) for index in range(len(strategies))] == [
        0,
        0,
        *[sample] * 3,
    ]
    notes = [found[-1] for _, found, _ in ranks[0]]
    cut_off = "head and loss see whole samples: the model is cut between them and the last block"
    assert (notes[0], notes[2], notes[4]) == (DIVIDED, DIVIDED, cut_off)
    assert "hidden states stay divided after 1 block(s)" in ranks[0][2][1][0]


@pytest.mark.slow
def test_reduced_precision() -> None:
    """Against one process in the same precision, to the tolerances of rounding."""
    case, large = get_case("tied_llama"), {"global_batch": BF16_GLOBAL_BATCH}
    autocast = reference_run(case, autocast_dtype=torch.bfloat16, **large)
    ((half,),) = run_ranks(train, 1, args=([(case, [("half", "bf16")])], large))
    runs = [(case, strategy(kind, ("amp_native", "bf16"), "checkpoint")) for kind in KINDS]
    runs += [(case, strategy(kind, ("half", "bf16"))) for kind in KINDS]
    found, _ = run_ranks(train, 2, args=(runs, large), timeout_s=100)
    for trajectory in found[:2]:
        assert_parity(compare(autocast, trajectory), param_tol=0.15, loss_tol=1e-3)
    for trajectory in found[2:]:
        assert_parity(compare(half, trajectory), param_tol=0.5, loss_tol=1e-3)
