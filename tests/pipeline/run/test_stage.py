"""Stages that run one after the other compute what the whole model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atorch_ns.capture.blocks import repeated_blocks, select_modules
from atorch_ns.errors import InputError, StepError
from atorch_ns.pipeline import (
    CallTracer,
    HowToRun,
    StageSet,
    StageSettings,
    divide_parameters,
    find_units,
    install_stages,
    plan_crossings,
    refused_cuts,
)
from atorch_ns.pipeline.cut.install import ranges
from atorch_ns.pipeline.run.forward_pass import CALL_STRIDE, StagePass
from atorch_ns.pipeline.run.stage import StageUnit
from atorch_ns.torch_compat import plain_name
from tests.pipeline.chains import CPU, assert_same, chain_pass, trace, whole_pass
from tests.pipeline.odd_models import (
    FOLLOWED,
    Base,
    Block,
    Dropouts,
    LooksAtValues,
    ParametersInParent,
    ResidualInParent,
    TiedByFunction,
    build,
    mean_loss,
    tokens,
)


@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_every_single_cut(kind: type[nn.Module]) -> None:
    model, batch = build(kind), tokens()
    whole = whole_pass(model, batch, mean_loss)
    num_calls = len(trace(model, batch, mean_loss).calls)
    assert refused_cuts(trace(model, batch, mean_loss)) == {}
    for cut in range(1, num_calls):
        assert_same(whole, chain_pass(model, batch, mean_loss, [cut]))


@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_a_stage_for_every_call(kind: type[nn.Module]) -> None:
    model, batch = build(kind), tokens()
    whole = whole_pass(model, batch, mean_loss)
    cuts = range(1, len(trace(model, batch, mean_loss).calls))
    assert_same(whole, chain_pass(model, batch, mean_loss, list(cuts)))


@pytest.mark.parametrize("kind", FOLLOWED, ids=lambda kind: kind.__name__)
def test_two_stages_on_a_rank(kind: type[nn.Module]) -> None:
    model, batch = build(kind), tokens()
    whole = whole_pass(model, batch, mean_loss)
    assert_same(whole, chain_pass(model, batch, mean_loss, [1, 3, 4], on_rank=2))


def test_random_numbers_do_not_depend_on_the_cut() -> None:
    model, batch = build(Dropouts), tokens()
    whole = chain_pass(model, batch, mean_loss, [])
    without = whole_pass(model.eval(), batch, mean_loss)
    assert abs(whole.loss - without.loss) > 1e-4  # something was dropped
    model.train()
    for cuts in ([2], [4], [1, 3], [1, 2, 3, 4, 5]):
        assert_same(whole, chain_pass(model, batch, mean_loss, cuts))


def test_the_callers_random_state_is_kept() -> None:
    model, batch = build(Dropouts), tokens()
    before = torch.get_rng_state()
    chain_pass(model, batch, mean_loss, [2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_residual_stream_crosses_as_one_tensor() -> None:
    graph = trace(build(ResidualInParent), tokens(), mean_loss)
    (crossing,) = plan_crossings(graph, [3])
    assert [one.is_argument for one in crossing.carried] == [True]
    assert crossing.num_bytes == 4 * 6 * 8 * 4


def test_what_a_later_stage_needs_passes_through() -> None:
    graph = trace(build(Dropouts), tokens(), mean_loss)
    crossings = plan_crossings(graph, [2, 3, 4])
    for crossing in crossings:  # the embedding's output, from which the dropout is computed again
        assert (0, 0) in {(one.call, one.leaf) for one in crossing.carried if not one.is_argument}


def test_a_cut_after_the_code_looked_at_values_is_refused() -> None:
    model = build(LooksAtValues)
    units = find_units(model)
    with pytest.raises(InputError, match=r"looked into a value that blocks\.1 computes"):
        CallTracer(model, units, CPU).trace(tokens(), HowToRun())
    from atorch_ns.pipeline import trace_with_values

    graph = trace_with_values(model, units, tokens(), HowToRun(loss_func=mean_loss), device=CPU)
    assert graph.paths == ("embed", *(f"blocks.{n}" for n in range(4)), "head")
    refused = refused_cuts(graph)
    assert sorted(refused) == [3, 4, 5]
    assert "blocks.1" in refused[3]
    with pytest.raises(InputError, match=r"cannot be cut before blocks\.2.*blocks\.1"):
        plan_crossings(graph, [3])


def test_a_real_pass_leaves_buffers_and_random_states() -> None:
    from atorch_ns.pipeline import trace_with_values

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    state, rng = model[1].running_mean.clone(), torch.get_rng_state()
    trace_with_values(model, find_units(model), torch.ones(4, 8), HowToRun(), device=CPU)
    assert torch.equal(model[1].running_mean, state)
    assert torch.equal(torch.get_rng_state(), rng)


def _installed(kind: type[nn.Module], cuts: list[int], rank: int) -> nn.Module:
    model = build(kind)
    units = find_units(model)
    graph = CallTracer(model, units, CPU).trace(tokens(), HowToRun(loss_func=mean_loss))
    division = divide_parameters(model, units, graph, cuts, rank_of=range(len(cuts) + 1))
    install_stages(model, units, division, rank, settings=StageSettings(device=CPU, model_input_format=None))
    return model


def test_a_rank_keeps_its_own_parameters_and_their_names() -> None:
    whole = build(Base)
    parts = [_installed(ResidualInParent, [3], rank) for rank in (0, 1)]
    names = [{plain_name(name) for name, _ in part.named_parameters()} for part in parts]
    assert names[0] | names[1] == {name for name, _ in whole.named_parameters()}
    assert not names[0] & names[1]
    assert all(isinstance(part.blocks, nn.ModuleList) and len(part.blocks) == 4 for part in parts)
    assert parts[0].blocks[3].linear.weight.shape == (8, 8)  # a shape without memory
    assert parts[0].blocks[3].linear.weight.untyped_storage().nbytes() == 4


def test_parameters_between_units_stay_where_they_are_used() -> None:
    first, last = (_installed(ParametersInParent, [3], rank) for rank in (0, 1))
    assert {"position", "scale"} <= dict(first.named_parameters()).keys()
    assert "shift" not in dict(first.named_parameters())
    assert {"position", "scale", "shift"} <= dict(last.named_parameters()).keys()


def test_a_tied_parameter_keeps_its_first_name_on_every_rank() -> None:
    first, last = (_installed(TiedByFunction, [3], rank) for rank in (0, 1))
    for part in (first, last):
        assert "embed.weight" in {plain_name(name) for name, _ in part.named_parameters()}


def test_blocks_are_found_inside_units_and_nowhere_else() -> None:
    part = _installed(ResidualInParent, [3], 0)
    assert [block.name for block in repeated_blocks(part)] == [
        "blocks.0._pipeline_unit",
        "blocks.1._pipeline_unit",
    ]
    assert all(type(block.module) is Block for block in repeated_blocks(part))
    found = select_modules(part, ["Block"])
    assert [plain_name(block.name) for block in found] == ["blocks.0", "blocks.1"]
    assert [plain_name(block.name) for block in select_modules(part, ["blocks.*"], outermost=True)] == [
        "blocks.0",
        "blocks.1",
    ]
    assert isinstance(part.blocks[0], StageUnit)


def test_a_batch_for_which_the_model_calls_other_units_is_refused() -> None:
    class Branches(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            for block in self.blocks if x.shape[1] > 5 else self.blocks[1:]:
                h = block(h)
            return self.head(h)

    model = build(Branches)
    units = find_units(model)
    tracer = CallTracer(model, units, CPU)
    graph = tracer.trace(tokens(), HowToRun())
    stages = StageSet(
        (),
        [3],
        [0, 1],
        graph.paths,
        trace=lambda batch, *_: tracer.trace(batch, HowToRun()),
        draw_seed=lambda: 0,
    )
    stages.begin([tokens()], mean_loss)
    with pytest.raises(StepError, match=r"calls blocks\.1 where it called blocks\.0"):
        stages.begin([tokens(length=4)], mean_loss)


def test_only_calls_of_units_have_seeds_of_their_own() -> None:
    """Blocks inside one unit go on with its stream: another's seed would give them the masks of that one."""
    graph = trace(build(Dropouts), tokens(), mean_loss)
    (stage,) = ranges(graph, [])
    running = StagePass(graph, stage, (), device=CPU, seed=5)
    running.num_calls = 2
    assert running.call_seeds(graph.paths[1:3]) == (5 + CALL_STRIDE, 5 + 2 * CALL_STRIDE)
    assert running.call_seeds([graph.paths[1], f"{graph.paths[1]}.0"]) == ()


def test_the_model_cannot_be_called_in_parts() -> None:
    with pytest.raises(StepError, match=r"cut over the ranks of a pipeline.*train_step.*excluded="):
        _installed(ResidualInParent, [3], 0)(tokens())


class _KeepsAside(Block):
    """Keeps a loss in an attribute, as routers do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        self.aux = out.square().mean()
        return out


class _ReadsAside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_KeepsAside() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        total: torch.Tensor = sum(block.aux for block in self.blocks)  # type: ignore[assignment]
        return self.head(h) + total


def test_what_units_keep_in_attributes_is_not_read_across_a_cut() -> None:
    model = build(_ReadsAside)
    refused = refused_cuts(trace(model, tokens(), mean_loss))
    assert list(refused) == [2, 3, 4, 5]
    assert "the model reads blocks.0.aux after the cut" in refused[2]
    assert_same(
        whole_pass(model, tokens(), mean_loss), chain_pass(build(_ReadsAside), tokens(), mean_loss, [1])
    )
