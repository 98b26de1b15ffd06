"""torch's own attention, divided by heads, gives what it gives whole: with every mask and either result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from atorch_ns.sharding import Layout, TensorGroup, TensorPlan, choose_plan, divide, trace_layers
from atorch_ns.testing.workers import run_ranks

WIDTH, HEADS, SAMPLES, TOKENS = 16, 4, 2, 5


def _layer(**settings: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.MultiheadAttention(WIDTH, HEADS, **settings)


def _layout(module: nn.Module) -> Layout:
    return TensorPlan(styles={"0": "heads"}).resolve(module)


def _calls() -> dict[str, dict[str, Any]]:
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    padding = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
    padding[0, -2:] = True
    generator = torch.Generator().manual_seed(4)
    own = torch.randn(SAMPLES * HEADS, TOKENS, TOKENS, generator=generator)
    masks: dict[str, dict[str, Any]] = {
        "no mask": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "padding": {"key_padding_mask": padding, "attn_mask": causal == float("-inf")},
        "a mask for each head": {"attn_mask": own},
    }
    weights: dict[str, dict[str, Any]] = {
        "no weights": {"need_weights": False},
        "mean weights": {"need_weights": True},
        "all weights": {"need_weights": True, "average_attn_weights": False},
    }
    return {
        f"{one}, {other}": {**masks[one], **weights[other]}
        for one, other in itertools.product(masks, weights)
    }


def _errors() -> dict[str, float]:
    group = TensorGroup(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    errors: dict[str, float] = {}
    kinds: tuple[dict[str, Any], ...] = ({"batch_first": True}, {}, {"kdim": 8, "vdim": 12}, {"bias": False})
    for settings in kinds:
        holder = nn.Sequential(_layer(**settings))
        divide(holder, _layout(holder), group)
        inputs = _inputs(settings)
        for what, call in _calls().items():
            found, wanted = (module(*inputs, **call) for module in (holder[0], _layer(**settings)))
            pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
            assert all(a.shape == b.shape for a, b in pairs)
            errors[f"{settings}: {what}"] = max(float((a - b).abs().max()) for a, b in pairs)
    unbatched = nn.Sequential(_layer())
    divide(unbatched, _layout(unbatched), group)
    x = _inputs({})[0][:, 0]
    errors["unbatched"] = float((unbatched[0](x, x, x)[0] - _layer()(x, x, x)[0]).abs().max())
    return errors


def _inputs(settings: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    widths = (WIDTH, settings.get("kdim", WIDTH), settings.get("vdim", WIDTH))
    made = [torch.randn(SAMPLES, TOKENS, width, generator=generator) for width in widths]
    return made if settings.get("batch_first") else [x.transpose(0, 1) for x in made]


def test_every_mask_and_result() -> None:
    for errors in run_ranks(_errors, 2, timeout_s=60):
        wrong = {what: error for what, error in errors.items() if not error < 1e-6}
        assert not wrong


class Encoder(nn.Module):
    """torch's encoder, which looks at the values of its mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))
        return out


def _encoded() -> tuple[Any, float, float]:
    group = TensorGroup(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    torch.manual_seed(0)
    whole, divided, x = Encoder(), Encoder(), torch.randn(SAMPLES, TOKENS, WIDTH)
    divided.load_state_dict(whole.state_dict())
    graph = trace_layers(divided, x, lambda module, data: module(data))
    chosen = choose_plan(divided, group.size, graph)
    divide(divided, chosen.layout, group, chosen.regions)
    training = (divided(x) - whole(x)).abs().max()
    with torch.no_grad():  # where the whole layer takes a fused path
        evaluated = (divided.eval()(x) - whole.eval()(x)).abs().max()
    return chosen.plan, float(training), float(evaluated)


def test_a_transformer_of_torch_is_divided_whole() -> None:
    plan, training, evaluated = run_ranks(_encoded, 2, timeout_s=60)[0]
    assert plan.styles == {
        "encoder.layers.*.linear1": "colwise",
        "encoder.layers.*.linear2": "rowwise",
        "encoder.layers.*.self_attn": "heads",
    }
    assert training < 1e-6
    assert evaluated < 1e-5


@pytest.mark.parametrize(
    ("settings", "why"), [({"add_bias_kv": True}, "adds keys of its own"), ({}, "4 heads do not divide by 3")]
)
def test_what_cannot_be_divided_says_why(settings: dict[str, Any], why: str) -> None:
    from atorch_ns.sharding.tensor.divisibility import misfits

    holder = nn.Sequential(_layer(**settings))
    assert why in misfits(holder, _layout(holder), 3)["0"]
