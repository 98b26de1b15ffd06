"""Tensor parallelism: a part of the memory, the right random numbers, the plan shown, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from atorch_ns.errors import InputError
from atorch_ns.job import Result
from atorch_ns.strategy import Strategy
from atorch_ns.testing.models import CASES, Case
from atorch_ns.testing.parity import Trajectory, accelerate_case, accelerated_run, compare
from atorch_ns.testing.workers import catch_ranks, run_ranks
from tests.opt_lib.tensor_cases import SEQUENCE, TENSOR, by_hand, check, of_model
from tests.sharding.tensor_models import HEADS, WIDTH, Beside, ByCount, FusedParts, Heads, make, tokens


def _meta(name: str, strategy: Any) -> Trajectory:
    with torch.device("meta"):
        model = CASES[name].build()
    torch.manual_seed(5)
    return accelerated_run(CASES[name], strategy, model=model)


@pytest.mark.parametrize("name", ["tied_llama", "hf_gpt2"])
def test_a_model_on_meta_has_the_values_of_one_process(name: str) -> None:
    one = _meta(name, [])
    mesh = ("parallel_mode", [("tensor", 2), ("zero", 2)])
    for ranks, strategy in ((2, [TENSOR]), (4, [mesh, "fsdp"])):
        run = run_ranks(_meta, ranks, args=(name, strategy), timeout_s=100)[0]
        report = compare(run, one)
        assert report.initial_error == 0.0
        assert report.max_param_error < 2e-4, report.describe()


def _sizes(name: str) -> tuple[int, int, int]:
    """Bytes of divided parameters here, of the same whole, and what the report says of all here."""
    result = accelerate_case(CASES[name], [TENSOR])
    divided = [p for p in result.job.module.parameters() if isinstance(p, DTensor)]
    here = sum(p.to_local().nbytes for p in divided)
    return here, sum(p.numel() * p.element_size() for p in divided), result.applied.parameter_bytes_per_rank


@pytest.mark.parametrize("name", ["tied_llama", "hf_gpt2"])
def test_a_rank_holds_its_share_of_what_is_divided(name: str) -> None:
    whole = sum(p.nbytes for p in CASES[name].build().parameters())
    for here, divided, reported in run_ranks(_sizes, 2, args=(name,)):
        assert here * 2 == divided
        assert reported == whole - divided + here
        assert divided > 0.85 * whole


def _masks() -> dict[str, list[torch.Tensor]]:
    """What each dropout drops in a step, in the forward pass and then in the recomputation, by its path."""
    torch.manual_seed(17 + torch.distributed.get_rank())  # as users do
    result = accelerate_case(by_hand(FusedParts, dropout=0.5), [TENSOR, "checkpoint"])
    masks: dict[str, list[torch.Tensor]] = {}
    for path, module in result.job.module.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, x, out, path=path: masks.setdefault(path, []).append(out.detach() == 0)
            )
    assert result.dataloader is not None
    result.train_step(next(iter(result.dataloader)))
    return masks


def test_dropout_differs_inside_regions_and_agrees_outside() -> None:
    first, second = run_ranks(_masks, 2)
    assert len(first) == 4
    for path, masks in first.items():
        inner = path.endswith("inner")
        for one, other in zip(masks, second[path], strict=True):
            assert (0.3 < (one != other).float().mean() < 0.7) if inner else torch.equal(one, other)
        recomputed = masks[1] if inner else masks[2]  # the residual's dropout is called twice in a block
        assert torch.equal(masks[0], recomputed)
        assert 0.3 < masks[0].float().mean() < 0.7


def _piece_masks() -> list[torch.Tensor]:
    result = accelerate_case(by_hand(FusedParts, dropout=0.5), [TENSOR, SEQUENCE, "checkpoint"])
    masks: list[torch.Tensor] = []
    for path, module in result.job.module.named_modules():
        if path.endswith("residual"):
            module.register_forward_hook(lambda _, x, out: masks.append(out.detach() == 0))
    assert result.dataloader is not None
    result.train_step(next(iter(result.dataloader)))
    return masks


def test_dropout_differs_between_pieces_of_the_sequence() -> None:
    first, second = run_ranks(_piece_masks, 2)
    assert first[0].shape[1] == 4
    assert all(0.3 < (one != other).float().mean() < 0.7 for one, other in zip(first, second, strict=True))


def _with(case: Case, config: dict[str, Any], mesh: Any = TENSOR) -> Result:
    return accelerate_case(case, [mesh, ("tensor_parallel", config)])


def _plan(attributes: tuple[str, ...] = ()) -> dict[str, Any]:
    styles = {
        **dict.fromkeys(("attention.q", "attention.k", "attention.v"), "colwise"),
        "attention.o": "rowwise",
    }
    return {"plan": styles, "attributes": list(attributes)}


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (_plan(), r"makes blocks.0 compute something else.*lacks attributes: .*num_heads"),
            ({"plan": {"attention.query": "colwise"}}, r"attention.query, which matches nothing in Decoder"),
            ({"plan": {"norm1": "colwise"}}, r"blocks.0.norm1: LayerNorm is not a layer with one weight"),
            ({"plan": {"embed": "colwise"}}, r"embed: colwise does not go with Embedding"),
            (
                {"attributes": ["num_heads"]},
                r"attributes, parts and narrow_inputs of tensor_parallel belong to a plan",
            ),
        ],
    )
    def test_a_users_plan(self, config: dict[str, Any], message: str) -> None:
        for outcome in catch_ranks(_with, 2, args=(by_hand(ByCount), config)):
            assert isinstance(outcome.error, InputError), outcome.describe()
            with pytest.raises(InputError, match=message):
                raise outcome.error

    def test_heads_that_do_not_divide(self) -> None:
        for outcome in catch_ranks(_with, 3, args=(by_hand(ByCount), {}, ("parallel_mode", [("tensor", 3)]))):
            assert isinstance(outcome.error, InputError), outcome.describe()
            assert "tensor=3 does not divide the 4 attention heads of Decoder" in str(outcome.error)

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (
                Heads,
                r"tensor=4 does not divide the heads of blocks.0.attention .*h=6 .*tensor in \{1, 2, 3, 6\}",
            ),
            (
                lambda: Heads(2),
                r"blocks.0.attention \(Heads: h=6 and kv=2\).*tensor in \{1, 2\}.*undivided='keep'",
            ),
        ],
    )
    def test_heads_known_by_the_code_alone(self, build: Any, message: str) -> None:
        case = of_model(lambda: make(build))
        for outcome in catch_ranks(_with, 4, args=(case, {}, ("parallel_mode", [("tensor", 4)]))):
            assert isinstance(outcome.error, InputError), outcome.describe()
            with pytest.raises(InputError, match=message):
                raise outcome.error

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("a value", r"a value that block 0 .*does not return"),
            ("a weight", r"norm1.weight of block 0 .*is used outside"),
            ("a batch norm", r"sequence=True .*blocks.0 .*updates blocks.0.batch_norm.running_mean"),
            ("the first states", r"sequence=True cannot be used with Beside: .*blocks.1"),
        ],
    )
    def test_what_counts_outside_of_blocks_on_pieces(self, what: str, message: str) -> None:
        for outcome in catch_ranks(_with, 2, args=(of_model(lambda: Beside(what)), {"sequence": True})):
            assert isinstance(outcome.error, InputError), outcome.describe()
            with pytest.raises(InputError, match=message):
                raise outcome.error

    def test_a_loss_that_uses_a_norm_of_a_block(self) -> None:
        models: list[torch.nn.Module] = []

        def build() -> torch.nn.Module:
            models.append(make(ByCount))
            return models[-1]

        def loss(batch: Any, output: Any) -> Any:
            used = models[-1].blocks[0].norm1.weight  # type: ignore[union-attr, index]
            return CASES["tied_llama"].loss_func(batch, output) + used.pow(2).sum()

        case = replace(of_model(build), loss_func=loss)
        (outcome, _) = catch_ranks(_with, 2, args=(case, {"sequence": True}))
        assert "cannot sum the gradient of blocks.0.norm1.weight" in outcome.message

    def test_a_tied_weight_divided_on_one_side(self) -> None:
        config = {"plan": {"head": "colwise_gather_output"}}
        (outcome, _) = catch_ranks(_with, 2, args=(by_hand(ByCount, tied=True), config))
        assert (
            "head: its weight is also embed.weight, which is not divided in the same way" in outcome.message
        )

    def test_a_sequence_that_is_none(self) -> None:
        (outcome, _) = catch_ranks(_with, 2, args=(CASES["mlp"], {"sequence": True}))
        assert "sequence=True cannot be used with ResidualMlp" in outcome.message


def _saved() -> tuple[dict[str, Any], str]:
    from atorch_ns import auto_accelerate

    status, result, strategy = auto_accelerate(
        make(ByCount), load_strategy=[TENSOR], dataset=list(tokens()), dataloader_args={"batch_size": 4}
    )
    assert status
    assert result is not None
    return Strategy.load(strategy.to_bytes())["tensor_parallel"], str(result.applied)


def test_the_plan_is_shown_and_saved_and_can_be_given_back() -> None:
    config, report = run_ranks(_saved, 2)[0]
    assert config["attributes"] == ["blocks.*.attention.num_heads"]
    assert config["plan"]["blocks.*.attention.o"] == "rowwise"
    assert "blocks.*.attention.num_heads" in report
    check(by_hand(ByCount), 2, {"given back": [TENSOR, ("tensor_parallel", config)]})


def test_the_words_of_merak() -> None:
    lists = {
        "col_para_list": ["q", "k", "v"],
        "row_para_list": ["attention.o"],
        "tp_attr_list": ["num_heads"],
    }
    ratios = {"input_output_mapping": [[1, 4, "col"], [2, 1, "row"]], "parts": {"gate_up": [2 * WIDTH] * 2}}
    weights = {
        "weight_change_list": [["gate_up", 0], ["down.weight", 1]],
        "parts": {"gate_up": [2 * WIDTH] * 2},
    }
    strategies = {
        what: [TENSOR, ("tensor_parallel", config)]
        for what, config in {"lists": lists, "ratios": ratios, "weights": weights}.items()
    }
    assert HEADS % 2 == 0
    check(by_hand(ByCount), 2, strategies)
