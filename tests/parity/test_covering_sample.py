"""A covering sample of architectures, with the defaults their users have: each differs from all others in one thing.

``python -m benchmarks --only models`` trains every architecture under every strategy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
import torch

from benchmarks._models import by_hand, from_transformers
from benchmarks._models.entry import Entry, has_experts
from benchmarks._models.row import STRATEGIES, References, Strategy, run_row
from tests.sharding.tensor.test_priced_division import divided, priced

SAMPLE: Final = {
    "transformers/llama": "rotary positions, grouped queries, a cache by default",
    "transformers/gpt2": "one layer for queries, keys and values, as Conv1D; tied head",
    "transformers/bloom": "ALiBi; heads that lie one after the other in a fused layer",
    "transformers/falcon": "one head of keys and values",
    "transformers/gpt_neox": "parallel residuals",
    "transformers/gptj": "rotary positions over a part of a head",
    "transformers/opt": "learned positions with an offset",
    "transformers/phi3": "fused gate and up",
    "transformers/gemma2": "soft caps; layers of two kinds in turns",
    "transformers/gpt_oss": "attention sinks; fused experts",
    "transformers/bert": "an encoder with a pooler that nothing uses",
    "transformers/mobilebert": "bottlenecks; an empty parameter",
    "transformers/xlnet": "two streams; unused parameters",
    "transformers/prophetnet": "n-gram attention that is written out",
    "transformers/bart": "encoder and decoder with shared embeddings",
    "transformers/t5": "position biases that blocks pass on",
    "transformers/switch_transformers": "experts in a dictionary, used by some ranks only",
    "transformers/mixtral": "fused experts",
    "transformers/deepseek_v3": "latent attention; shared experts",
    "transformers/mamba": "a recurrence in place of attention",
    "transformers/jamba": "recurrence, attention and experts",
    "transformers/qwen3_5": "linear attention; images",
    "transformers/whisper": "convolutions before an encoder; a decoder",
    "transformers/wav2vec2": "speech; a loss over paths",
    "transformers/swin": "attention in windows, of sizes that grow",
    "transformers/resnet": "batch norms",
    "transformers/convnext": "convolutions without batch norms; layer scales",
    "transformers/chinese_clip": "two towers, one of which the loss may not see",
    "transformers/qwen2_vl": "images among the tokens, positions in three dimensions",
    "by hand/Containers": "layers that are dictionaries and never called",
}
"""By their names in the sweep, with what only they have."""


_NO_LAYER: Final = "tensor=2 divides no layer"
_ONE_HEAD: Final = "does not divide the 1 attention heads"
_POSITIONS: Final = "on a small input it does not give on parts what it gives on the whole"

REFUSED: Final[dict[tuple[str, str], str]] = {
    ("transformers/switch_transformers", "expert 2"): "its experts are modules of their own",
    ("transformers/resnet", "tensor 2"): _NO_LAYER,
    ("transformers/resnet", "tensor 2 × pipeline 2"): _NO_LAYER,
    ("transformers/resnet", "tensor 2 × fsdp 2"): _NO_LAYER,
    ("transformers/resnet", "sequence 2"): "is a batch norm",
    ("transformers/swin", "tensor 2"): _ONE_HEAD,
    ("transformers/swin", "tensor 2 × pipeline 2"): _ONE_HEAD,
    ("transformers/swin", "tensor 2 × fsdp 2"): _ONE_HEAD,
    **{
        (name, "sequence 2"): _POSITIONS
        for name in (
            "by hand/Containers",
            "transformers/convnext",
            "transformers/mamba",
            "transformers/prophetnet",
            "transformers/swin",
        )
    },
}
"""What is refused in words, with a part of them."""


DIVISIONS: Final[dict[str, tuple[set[str], set[str], str]]] = {
    "transformers/bloom": (
        {"transformer.h.*.self_attention"},
        set(),
        "biases for the heads of all ranks come in as an argument, which only numbers show",
    ),
    "transformers/swin": (
        {"swin.encoder.layers.*.blocks.*.attention"},
        set(),
        "a table of biases for the heads of all ranks, which only numbers show",
    ),
    **dict.fromkeys(
        ("transformers/t5", "transformers/switch_transformers"),
        (
            {
                "decoder.block.*.layer.*.EncDecAttention",
                "decoder.block.*.layer.*.SelfAttention",
                "encoder.block.*.layer.*.SelfAttention",
            },
            set(),
            "biases for the heads of all ranks come from the first block, which only numbers show",
        ),
    ),
}
"""Where the division that the search prices is not the one that runs: the owners of parameters that are priced as divided
and run otherwise, of those that run divided and are priced otherwise, and the reason."""


def _entries() -> dict[str, Entry]:
    found = [*from_transformers.entries(), *by_hand.entries()]
    return {entry.key: entry for entry in found if entry.key in SAMPLE}


ENTRIES: Final = _entries()
PLAIN: Final = tuple(one for one in STRATEGIES if one.methods is not None and one.autocast_dtype is None)


def _outcomes(key: str, strategies: tuple[Strategy, ...], folder: Path) -> dict[str, str]:
    """What came of each strategy: ``"equal"``, or what it was in place of that and why."""
    case = ENTRIES[key].case()
    references = References(case, folder, 300)
    experts = has_experts(case.build())
    found = {}
    for strategy in strategies:
        if experts or not strategy.mixtures_only:
            row = run_row(case, strategy, references, 60)
            found[strategy.name] = row["is"] if row["is"] == "equal" else f"{row['is']}: {row['reason']}"
    return found


def test_every_architecture_of_the_sample_is_there() -> None:
    assert ENTRIES.keys() == SAMPLE.keys()


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("key", SAMPLE)
def test_it_trains_as_in_one_process(key: str, tmp_path: Path) -> None:
    """Under two strategies, which take turns, so that each has several architectures."""
    fitting = [one for one in PLAIN if (key, one.name) not in REFUSED and not one.mixtures_only]
    place = list(SAMPLE).index(key)
    strategies = tuple(fitting[(place + step) % len(fitting)] for step in (0, 4))
    assert _outcomes(key, strategies, tmp_path) == {one.name: "equal" for one in strategies}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", SAMPLE)
def test_it_trains_as_in_one_process_under_all_strategies(key: str, tmp_path: Path) -> None:
    """Or is refused with the known reason."""
    found = _outcomes(key, PLAIN, tmp_path)
    for name, outcome in found.items():
        reason = REFUSED.get((key, name), "equal")
        assert reason in outcome, f"{name}: {outcome}, and expected was {reason}"


def _owners(names: Iterable[str]) -> set[str]:
    """The modules around the layers of parameters, blocks as one."""
    return {re.sub(r"\.\d+(?=\.|$)", ".*", name.rpartition(".")[0].rpartition(".")[0]) for name in names}


@pytest.mark.parametrize("key", SAMPLE)
def test_what_is_priced_as_divided_runs_divided(key: str) -> None:
    torch.manual_seed(0)  # random weights decide what numbers show
    case = ENTRIES[key].case()
    batch = case.make_batch(4, 0)
    dims = priced(case.build(), batch, lambda model, given: case.loss_func(given, case.call(model, given)))
    runs = divided(case.build(), batch, case.call)
    expected = DIVISIONS.get(key, (set(), set(), ""))[:2]
    otherwise = (
        {name for name in dims if dims[name] != runs.get(name)},
        {name for name in runs if runs[name] != dims.get(name)},
    )
    assert tuple(map(_owners, otherwise)) == expected
