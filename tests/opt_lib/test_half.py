"""half keeps in fp32 what its dtype cannot hold."""

from __future__ import annotations

import pytest
import torch

from atorch_ns.testing.models import get_case
from atorch_ns.testing.parity import accelerate_case


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rotary_frequencies_are_not_rounded(dtype: str) -> None:
    case = get_case("hf_llama")
    wanted = {name: one for name, one in case.build().named_buffers() if name.endswith("inv_freq")}
    assert {name.rpartition(".")[2] for name in wanted} == {"inv_freq", "original_inv_freq"}
    result = accelerate_case(case, [("half", dtype)])
    weights = {one.dtype for one in result.model.parameters()}
    assert weights == {torch.bfloat16 if dtype == "bf16" else torch.float16}
    found = dict(result.model.named_buffers())
    for name, frequencies in wanted.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], frequencies)
