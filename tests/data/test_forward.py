"""Which keys of a batch a model is given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch_ns.data import call_model
from atorch_ns.data.batch import taken_items


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(image)
        return out if mask is None else out * mask


class TakesAll(nn.Module):
    """A module of the user's that wraps another: its own forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Classifier()

    def forward(self, *args: Any, **batch: Any) -> Any:
        return sorted(batch)


BATCH = {"image": torch.ones(3, 2), "label": torch.zeros(3), "weight": torch.ones(3)}


def test_keys_that_forward_does_not_name_stay_out_and_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Classifier):
        def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(image, mask)

    with caplog.at_level(logging.INFO, logger="atorch_ns.data"):
        for _ in range(3):
            assert call_model(Own(), BATCH, "unpack_dict").shape == (3, 2)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "'label', 'weight' of the batch" in record.getMessage()
    assert "forward of Own" in record.getMessage()
    masked = {**BATCH, "mask": torch.zeros(3, 2)}
    assert float(call_model(Own(), masked, "unpack_dict").detach().abs().sum()) == 0.0


def test_all_keys_where_forward_takes_any() -> None:
    assert call_model(TakesAll(), BATCH, "unpack_dict") == sorted(BATCH)
    assert call_model(lambda **batch: sorted(batch), BATCH, "unpack_dict") == sorted(BATCH)


def test_what_is_missing_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'image'"):
        call_model(Classifier(), {"picture": torch.ones(1, 2)}, "unpack_dict")


@pytest.mark.parametrize(
    "wrapped", ["plain", "parallel", "compiled", "averaged", "checkpointed", "traced", "peft"]
)
def test_wrappers_are_looked_through(wrapped: str) -> None:
    def keys(model: Any) -> list[str]:
        taken: Mapping[str, Any] = taken_items(model, BATCH)
        return list(taken)

    model = Classifier()
    assert keys(_wrap(wrapped, model)) == ["image"]
    if wrapped not in ("traced", "peft"):
        assert keys(_wrap(wrapped, TakesAll())) == list(BATCH)


def _wrap(how: str, model: nn.Module) -> Any:
    if how == "parallel":
        return nn.DataParallel(model)
    if how == "compiled":
        return torch.compile(nn.DataParallel(model))
    if how == "averaged":
        return torch.optim.swa_utils.AveragedModel(model)
    if how == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        return checkpoint_wrapper(model)
    if how == "traced":
        return torch.fx.symbolic_trace(model, concrete_args={"mask": None})
    if how == "peft":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["layer"]))
    return model


@pytest.mark.parametrize(
    ("batch", "how"), [({"image": torch.ones(1, 2)}, "unpack_dict"), ([torch.ones(1, 2)], "unpack_sequence")]
)
def test_a_model_that_cannot_take_a_whole_batch_is_told_of_the_formats(batch: Any, how: str) -> None:
    with pytest.raises(TypeError) as caught:
        call_model(Classifier(), batch, None)
    assert f"model_input_format='{how}'" in caught.value.__notes__[0]
