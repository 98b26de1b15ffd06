"""What compiled blocks share, what is counted of them, and what inductor needs."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atorch_ns.cluster import Cluster
from atorch_ns.job import Result
from atorch_ns.testing.models import Case, get_case
from atorch_ns.testing.parity import accelerate_case
from atorch_ns.testing.workers import run_ranks
from opt_lib.compile import Compile, CompileConfig

EAGER = ("compile", "aot_eager")
WIDTH = 16


class Block(nn.Module):
    """A layer that may print, which breaks a graph."""

    def __init__(self, *, prints: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.prints = prints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.prints:
            print(end="")  # noqa: T201  # what torch cannot trace
        return x + torch.relu(y)


class BranchingBlock(Block):
    """A layer that looks at its input's values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.5 if x.sum() > 0 else x * 0.5)


class Stack(nn.Module):
    """A first layer and equal blocks, of which some have hooks on their layers."""

    def __init__(
        self,
        *,
        num_blocks: int = 6,
        prints: bool = False,
        block: type[Block] = Block,
        hooked: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(prints=prints) for _ in range(num_blocks))
        for place in hooked:
            self.blocks[place].get_submodule("layer").register_forward_hook(
                lambda module, args, output: output * 3
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _row(result: Result) -> str:
    (why,) = (row.why for row in result.report.rows if row.name == "compile")
    return why


def _trained(name: str, strategy: Sequence[Any], steps: int = 2) -> str:
    result = accelerate_case(get_case(name), strategy, steps=steps)
    assert result.dataloader is not None
    for batch in result.dataloader:
        result.train_step(batch)
    return _row(result)


def _stack(batch_sizes: Sequence[int], *, strategy: Any = EAGER, **options: Any) -> Result:
    """A stack trained on batches of these sizes."""
    case = Case(
        name="stack",
        build=lambda: Stack(**options),
        make_batch=lambda size, seed: torch.ones(size, WIDTH),
        loss_func=lambda batch, output: output.square().mean(),
        model_input_format=None,
        block="Block",
    )
    result = accelerate_case(case, [strategy], dataset=None, dataloader_args=None)
    for size in batch_sizes:
        result.train_step(torch.ones(size, WIDTH))
    return result


COUNTS = "1 graph, 0 graph breaks, 0 recompiles"


@pytest.mark.parametrize("name", ["tied_llama", "hf_gpt2"])
@pytest.mark.parametrize(
    "others", [(), ("checkpoint",), (("amp_native", "bf16"),)], ids=["alone", "checkpoint", "bf16"]
)
def test_equal_blocks_share_one_graph(name: str, others: tuple[Any, ...]) -> None:
    assert _trained(name, [EAGER, *others]).endswith(COUNTS)


def test_more_blocks_than_torch_compiles_one_function_for_share_one_graph() -> None:
    assert _row(_stack([4], num_blocks=12)).endswith(COUNTS)


def test_sharded_blocks_share_one_graph() -> None:
    whole = ("compile", {"backend": "aot_eager", "fullgraph": True})
    strategies = [["fsdp", whole], ["fsdp", "checkpoint", EAGER], ["ddp", whole]]
    get_case("tied_llama").build()
    rows = run_ranks(_rows_of, 2, args=(strategies,), timeout_s=100)
    for own in rows:
        for text in own:
            assert text.endswith(COUNTS)


def _rows_of(strategies: Sequence[Any]) -> list[str]:
    found = []
    for strategy in strategies:
        torch.compiler.reset()
        found.append(_trained("tied_llama", strategy))
    return found


def test_before_the_first_call_nothing_is_compiled() -> None:
    assert "nothing compiled yet" in _row(_stack([]))


def test_graph_breaks_are_counted_with_their_reason() -> None:
    text = _row(_stack([4], prints=True))
    assert "2 graphs, 1 graph break (Failed to trace builtin operator), 0 recompiles" in text


def test_a_break_elsewhere_is_not_counted() -> None:
    result = _stack([4])
    other = torch.compile(Block(prints=True), backend="aot_eager")
    other(torch.ones(2, WIDTH))
    result.train_step(torch.ones(4, WIDTH))
    assert _row(result).endswith(COUNTS)


def test_branches_that_depend_on_data_are_graph_breaks() -> None:
    text = _row(_stack([4], block=BranchingBlock))
    assert "1 graph break (Data-dependent branching" in text


def _losses(result: Result) -> list[float]:
    return [float(result.train_step(torch.ones(4, WIDTH))) for _ in range(3)]


def _seeded(**options: Any) -> Result:
    torch.manual_seed(0)
    return _stack([], **options)


@pytest.mark.parametrize("hooked", [(1,), (0,), (0, 2, 3, 4, 5)], ids=str)
def test_blocks_with_other_inner_hooks_stay_uncompiled(hooked: Sequence[int]) -> None:
    with pytest.warns(UserWarning, match="1 of 6 module\\(s\\) stay uncompiled: hooks on modules inside"):
        result = _seeded(hooked=hooked)
    assert _losses(result) == pytest.approx(_losses(_seeded(hooked=hooked, strategy="checkpoint")))
    assert "1 of 6 module(s) stay uncompiled" in _row(result)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_hooks_that_come_after_the_call_are_called(num_steps: int) -> None:
    def train(result: Result) -> list[float]:
        first = [float(result.train_step(torch.ones(4, WIDTH))) for _ in range(num_steps)]
        blocks = [module for module in result.model.modules() if isinstance(module, Block)]
        blocks[2].get_submodule("layer").register_forward_hook(lambda *given: given[2] * 0.5)
        return first + _losses(result)

    expected = train(_seeded(strategy="checkpoint"))
    with pytest.warns(UserWarning, match="It runs uncompiled"):
        found = train(_seeded())
    assert found == pytest.approx(expected)


def test_hooks_that_an_earlier_job_did_not_have_are_not_lost() -> None:
    _losses(_seeded())
    result = _seeded(hooked=range(6))
    assert _losses(result) == pytest.approx(_losses(_seeded(hooked=range(6), strategy="checkpoint")))
    assert "stay uncompiled" not in _row(result)


def test_a_second_job_is_counted_by_itself() -> None:
    for _ in range(2):
        assert _row(_stack([4])).endswith(COUNTS)


def test_fullgraph_fails_on_a_break_that_an_earlier_job_had() -> None:
    _stack([4], block=BranchingBlock)
    with pytest.raises(Exception, match="Data-dependent branching"):
        _stack([4], block=BranchingBlock, strategy=("compile", {"backend": "aot_eager", "fullgraph": True}))


def test_recompilations_are_counted_with_their_reason() -> None:
    text = _row(_stack([4, 5, 6], strategy=("compile", {"backend": "aot_eager", "dynamic": False})))
    assert "3 graphs, 0 graph breaks, 2 recompiles (" in text
    assert "size mismatch at index 0. expected 4, actual 5" in text


def test_changing_sizes_compile_once_with_dynamic() -> None:
    text = _row(_stack([4, 5, 6], strategy=("compile", {"backend": "aot_eager", "dynamic": True})))
    assert text.endswith(COUNTS)


def test_the_recompile_limit_is_one_warning() -> None:
    result = _stack([], strategy=("compile", {"backend": "aot_eager", "dynamic": False}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(2, 14):
            result.train_step(torch.ones(size, WIDTH))
    (only,) = [str(each.message) for each in caught if "recompile_limit" in str(each.message)]
    assert "size mismatch" in only
    assert "dynamic=True" in only
    assert _row(result).endswith("a function hit the recompile limit and runs uncompiled")


def test_without_a_compiler_inductor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(UserWarning, match="compile is left out: inductor needs a C\\+\\+ compiler"):
        result = accelerate_case(get_case("mlp"), ["compile"])
    assert not any(row.name == "compile" for row in result.report.rows)
    assert any("C++ compiler" in note for note in result.report.notes)
    assert list(Compile().options(None, Cluster.detect())) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "triton", "compiler", "expected"),
    [
        ((9, 0), True, "/usr/bin/gcc", None),
        ((6, 1), True, "/usr/bin/gcc", "compute capability 7.0, and this one has 6.1"),
        ((9, 0), False, "/usr/bin/gcc", "pip install triton"),
        ((9, 0), True, None, "C compiler"),
    ],
)
def test_what_inductor_needs_on_a_gpu(
    capability: tuple[int, int],
    triton: bool,
    compiler: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = replace(Cluster.detect(), device_type="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    reason = Compile().unavailable(CompileConfig(), gpu)
    assert reason is None if expected is None else expected in str(reason)
    assert Compile().unavailable(CompileConfig(backend="aot_eager"), gpu) is None


def test_modes_that_change_nothing_are_said() -> None:
    cpu = Cluster.detect()
    configs = (
        CompileConfig(mode="reduce-overhead"),
        CompileConfig(backend="aot_eager", mode="max-autotune"),
        CompileConfig(),
    )
    told = [list(Compile().notices(config, cpu)) for config in configs]
    assert "CUDA graphs" in told[0][0]
    assert "aot_eager ignores it" in told[1][0]
    assert told[2] == []
