"""Tensor parallelism trains what one process trains, alone and with what composes on top."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.testing.models import CASES
from atorch_ns.testing.parity import BF16_GLOBAL_BATCH, compare, reference_run
from atorch_ns.testing.workers import run_ranks
from tests.opt_lib.scenarios import named
from tests.opt_lib.tensor_cases import NAMES, SEQUENCE, TENSOR, by_hand, check, of_model, trajectories
from tests.sharding.tensor_models import (
    BETWEEN,
    VOCAB,
    Between,
    Block,
    ByCount,
    Decoder,
    FusedParts,
    Heads,
    WithNorms,
)


class AsksWhatWeightsAre(Decoder):
    """As the ``dtype`` of transformers' models does."""

    def __init__(self) -> None:
        super().__init__(ByCount, tied=True)

    def forward(self, tokens: Tensor) -> Tensor:
        assert all(p.is_floating_point() and p.dim() and p.numel() for p in self.parameters())
        return super().forward(tokens)


class OneLayerBlocks(nn.Sequential):
    """Blocks of one layer each, two of which make a pair to divide."""

    def __init__(self) -> None:
        width = 16
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        super().__init__(nn.Embedding(VOCAB, width), nn.Sequential(*blocks), nn.Linear(width, VOCAB))


class NamesItsResults(Decoder):
    """Its blocks return dicts."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)["hidden"]
        out: Tensor = self.head(self.norm(x))
        return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamingBlock(ByCount, 0.0) for _ in range(2))


class NamingBlock(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


class TestParity:
    @pytest.mark.parametrize("name", NAMES)
    def test_two_ranks(self, name: str) -> None:
        """The method alone: ``tests/parity/test_model_axes.py``."""
        strategies = {
            "found, with checkpoint": [TENSOR, ("tensor_parallel", {"source": "found"}), "checkpoint"]
        }
        if name != "mlp":
            strategies["with its sequence divided"] = [TENSOR, SEQUENCE, "checkpoint"]
        check(CASES[name], 2, strategies)

    @pytest.mark.parametrize(
        "name", named(("mlp", "tied_llama", "hf_gpt2", "hf_bert", "encoder_decoder"), often=("hf_gpt2",))
    )
    def test_four_ranks(self, name: str) -> None:
        strategies = {
            "tensor 4": [("parallel_mode", [("tensor", 4)])],
            "with fsdp": [("parallel_mode", [("tensor", 2), ("zero", 2)]), "fsdp", "checkpoint"],
            "with ddp": [("parallel_mode", [("tensor", 2), ("data", 2)])],
        }
        check(CASES[name], 4, strategies)

    def test_a_model_that_asks_what_its_weights_are_beside_fsdp(self) -> None:
        mesh = ("parallel_mode", [("tensor", 2), ("zero", 2)])
        check(of_model(AsksWhatWeightsAre), 4, {"with fsdp": [mesh, "fsdp"]})

    def test_norms_inside_attention_and_clipping(self) -> None:
        check(
            by_hand(WithNorms, tied=True),
            2,
            {"plain": [TENSOR], "pieces": [TENSOR, SEQUENCE]},
            max_grad_norm=0.1,
        )

    def test_a_last_block_that_returns_a_dict_hands_on_whole_sequences(self) -> None:
        check(of_model(NamesItsResults), 2, {"pieces": [TENSOR, SEQUENCE]})

    @pytest.mark.parametrize("what", BETWEEN)
    def test_code_between_blocks_sees_whole_sequences(self, what: str) -> None:
        check(of_model(lambda: Between(what)), 2, {"pieces": [TENSOR, SEQUENCE]})

    def test_pairs_over_two_blocks(self) -> None:
        case = of_model(OneLayerBlocks)
        plan = {"1.*.0": "colwise", "1.1.0": "rowwise", "1.3.0": "rowwise"}
        check(case, 2, {"found": [TENSOR], "given": [TENSOR, ("tensor_parallel", {"plan": plan})]})

    def test_pairs_over_two_blocks_that_a_pipeline_may_cut_stay_whole(self) -> None:
        mesh = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
        check(of_model(OneLayerBlocks), 4, {"found": [mesh]})

    @pytest.mark.slow
    def test_heads_that_do_not_divide_can_be_kept_whole(self) -> None:
        keep = ("tensor_parallel", {"undivided": "keep"})
        mesh = ("parallel_mode", [("tensor", 4)])
        check(by_hand(Heads), 4, {"keep": [mesh, keep]})
        check(CASES["hf_llama"], 4, {"keep": [mesh, keep]})

    def test_micro_batches(self) -> None:
        strategies = {"pieces": [TENSOR, SEQUENCE], "plain": [TENSOR]}
        check(by_hand(FusedParts), 2, strategies, gradient_accumulation_steps=2)

    def test_compiled_blocks(self) -> None:
        """torch's collectives in place lose gradients in a compiled graph and say nothing."""
        compiled = ("compile", {"backend": "aot_eager"})
        strategies = {
            "plain": [TENSOR, compiled],
            "pieces, recomputed": [TENSOR, SEQUENCE, compiled, "checkpoint"],
        }
        check(by_hand(WithNorms, tied=True), 2, strategies)

    @pytest.mark.slow
    def test_stages_of_a_pipeline(self) -> None:
        mesh = ("parallel_mode", [("tensor", 2), ("pipeline", 2)])
        check(CASES["tied_llama"], 4, {"plain": [mesh], "pieces": [mesh, SEQUENCE]})

    @pytest.mark.parametrize("name", ["tied_llama", "hf_gpt2"])
    def test_autocast(self, name: str) -> None:
        reference = reference_run(CASES[name], global_batch=BF16_GLOBAL_BATCH, autocast_dtype=torch.bfloat16)
        arguments = {"global_batch": BF16_GLOBAL_BATCH}
        strategies = {"amp": [TENSOR, "amp_native"]}
        runs = run_ranks(trajectories, 2, args=(CASES[name], strategies, arguments), timeout_s=100)
        assert compare(runs[0]["amp"], reference).max_loss_error < 1e-3
