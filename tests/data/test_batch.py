from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch_ns.data.batch import call_model, check_model_input_format, default_prepare_input, split_batch
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

    @pytest.mark.parametrize(
        ("data", "model_input_format", "said"),
        [
            (torch.ones(2, 3), "unpack_sequence", r"a Tensor of shape \(2, 3\)"),
            ({"x": 1}, "unpack_sequence", r"a dict with the keys \['x'\]"),
            ("text", "unpack_sequence", "a str"),
            ([1, 2], "unpack_dict", "a list of 2 items"),
            ({1: 2}, "unpack_dict", "strings as keys"),
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
