"""Batches: moved, split, and passed to the model with the keys that it names."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atorch_ns.data.batch import (
    call_model,
    check_model_input_format,
    default_prepare_input,
    split_batch,
    taken_items,
)
from atorch_ns.errors import BatchSizeError, InputError

META = torch.device("meta")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    name: str
    made: list[int] = dataclasses.field(default_factory=list, init=False)


class TestDefaultPrepareInput:
    def test_every_tensor_of_a_nest_moves_and_types_stay(self) -> None:
        data = {
            "pair": Pair(torch.ones(2), [torch.ones(3), "text"]),
            "sample": Sample(torch.ones(1), "a"),
            "default": collections.defaultdict(list, x=torch.ones(2)),
            "tuple": (torch.ones(2), 5, None),
        }
        moved = default_prepare_input(data, META)

        assert isinstance(moved["pair"], Pair)
        assert moved["pair"].left.device == META
        assert moved["pair"].right[0].device == META
        assert moved["pair"].right[1] == "text"
        assert moved["sample"].tokens.device == META
        assert moved["sample"].name == "a"
        assert moved["default"]["x"].device == META
        assert moved["default"].default_factory is list
        assert moved["tuple"][0].device == META
        assert moved["tuple"][1:] == (5, None)

    def test_the_batch_given_stays_where_it_was(self) -> None:
        transformers = pytest.importorskip("transformers")
        encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3)})
        sample = Sample(torch.ones(1), "a")
        moved = default_prepare_input([encoding, sample], META)
        assert encoding["input_ids"].device.type == "cpu"
        assert sample.tokens.device.type == "cpu"
        assert type(moved[0]) is type(encoding)
        assert moved[0]["input_ids"].device == META

    def test_a_packed_sequence_moves_by_its_own_method(self) -> None:
        packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
        moved = default_prepare_input(packed, torch.device("cpu"))
        assert torch.equal(moved.data, packed.data)
        assert isinstance(moved, type(packed))

    def test_other_data_is_returned_as_it_is(self) -> None:
        marker = object()
        assert default_prepare_input(marker, META) is marker
        assert default_prepare_input("text", META) == "text"


class TestCallModel:
    def test_each_format(self) -> None:
        def model(*args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        assert call_model(model, (1, 2), None) == (((1, 2),), {})
        assert call_model(model, (1, 2), "unpack_sequence") == ((1, 2), {})
        assert call_model(model, {"a": 1}, "unpack_dict") == ((), {"a": 1})
        assert call_model(model, ({"a": 1}, 2), "first") == (({"a": 1},), {})
        assert call_model(model, ({"a": 1}, 2), "unpack_first") == ((), {"a": 1})

    @pytest.mark.parametrize(
        ("data", "model_input_format", "said"),
        [
            (torch.ones(2, 3), "unpack_sequence", r"a Tensor of shape \(2, 3\)"),
            ({"x": 1}, "unpack_sequence", r"a dict with the keys \['x'\]"),
            ("text", "unpack_sequence", "a str"),
            ([1, 2], "unpack_dict", "a list of 2 items"),
            ({1: 2}, "unpack_dict", "a dictionary with string keys"),
            ({"a": 1}, "unpack_first", r"a dict with the keys \['a'\]"),
            ([2], "unpack_first", "an int"),
        ],
    )
    def test_data_that_does_not_fit_is_described(self, data: Any, model_input_format: str, said: str) -> None:
        with pytest.raises(InputError, match=said):
            call_model(print, data, model_input_format)

    def test_an_unknown_format_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(InputError, match="Did you mean 'unpack_dict'"):
            check_model_input_format("unpack_dicts")
        with pytest.raises(InputError, match="7"):
            check_model_input_format(7)
        assert check_model_input_format("unpack_sequence") == "unpack_sequence"
        assert check_model_input_format(None) is None


class TestSplitBatch:
    @given(num=st.integers(1, 5), rows=st.integers(1, 4))
    def test_the_parts_joined_are_the_batch(self, num: int, rows: int) -> None:
        batch = {"x": torch.arange(num * rows * 2).view(-1, 2), "y": (torch.arange(num * rows),)}
        parts = split_batch(batch, num)
        assert len(parts) == num
        assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
        assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])

    def test_what_is_split_and_what_is_repeated(self) -> None:
        batch = {
            "x": torch.arange(4),
            "names": ["a", "b", "c", "d"],
            "other_length": ["a", "b"],
            "tuple": ("a", "b", "c", "d"),
            "scale": torch.tensor(2.0),
            "word": "abcd",
            "flag": True,
        }
        first, second = split_batch(batch, 2)
        assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
        assert second["other_length"] == ["a", "b"]
        assert second["tuple"] == ("a", "b", "c", "d")
        assert second["scale"].item() == 2.0
        assert second["word"] == "abcd"
        assert second["flag"] is True

    def test_a_list_of_tensors_is_structure_even_if_it_is_as_long_as_the_batch(self) -> None:
        first, second = split_batch([torch.arange(2), torch.arange(2) + 10], 2)
        assert [part.tolist() for part in first] == [[0], [10]]
        assert [part.tolist() for part in second] == [[1], [11]]

    def test_a_batch_encoding_keeps_its_type(self) -> None:
        transformers = pytest.importorskip("transformers")
        encoding = transformers.BatchEncoding({"input_ids": torch.arange(4).view(4, 1)})
        parts = split_batch(encoding, 2)
        assert [type(part) for part in parts] == [type(encoding)] * 2
        assert parts[1]["input_ids"].tolist() == [[2], [3]]
        assert len(encoding["input_ids"]) == 4

    def test_one_part_is_the_batch_itself(self) -> None:
        batch = object()
        assert split_batch(batch, 1) == [batch]

    @pytest.mark.parametrize(
        ("size", "num", "sizes"), [(7, 4, [2, 2, 2, 1]), (5, 4, [2, 2, 1]), (3, 4, [1] * 3)]
    )
    def test_uneven_parts(self, size: int, num: int, sizes: list[int]) -> None:
        parts = split_batch({"x": torch.arange(size), "n": list(range(size))}, num, uneven=True)
        assert [len(part["x"]) for part in parts] == [len(part["n"]) for part in parts] == sizes
        assert torch.equal(torch.cat([part["x"] for part in parts]), torch.arange(size))

    @pytest.mark.parametrize(
        ("batch", "num", "error", "said"),
        [
            (torch.ones(6), 4, BatchSizeError, "6 rows .* into 4 .* are 4 and 8"),
            (torch.ones(2), 4, BatchSizeError, "nearest size that divides is 4"),
            (
                {"x": torch.ones(4), "y": torch.ones(6)},
                2,
                BatchSizeError,
                r"batch\['x'\] has 4 rows.*\['y'\]",
            ),
            ({"scale": torch.tensor(1.0)}, 2, BatchSizeError, "no tensor to split"),
            (torch.ones(4), 0, InputError, "positive integer; it is 0"),
            (torch.ones(4), True, InputError, "positive integer; it is True"),
        ],
    )
    def test_what_cannot_be_split_says_why(
        self, batch: Any, num: int, error: type[Exception], said: str
    ) -> None:
        with pytest.raises(error, match=said):
            split_batch(batch, num)

    def test_a_packed_sequence_cannot_be_split(self) -> None:
        packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(2)])
        with pytest.raises(InputError, match="PackedSequence"):
            split_batch([torch.ones(2), packed], 2)


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
