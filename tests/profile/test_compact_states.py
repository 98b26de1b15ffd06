"""Rules of states in fewer bits, against the bytes that optimizers really keep."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch_ns.profile import plain_tensors
from atorch_ns.profile.compact_states import compact_states
from atorch_ns.profile.optimizer import optimizer_spec

OPTIMIZERS: list[tuple[str, str, dict[str, Any]]] = [
    ("torchao", "AdamW8bit", {}),
    ("torchao", "AdamW8bit", {"block_size": 2048}),
    ("torchao", "AdamW4bit", {}),
    ("torchao", "AdamWFp8", {}),
    ("bitsandbytes", "AdamW8bit", {}),
    ("bitsandbytes", "AdamW8bit", {"min_8bit_size": 6144}),
    ("bitsandbytes", "Lion8bit", {}),
]
SIZES = (100, 4095, 4096, 5000, 6143, 6144, 7680, 8192, 20480, 33333, 65536 + 2048)


@pytest.mark.parametrize(("package", "name", "options"), OPTIMIZERS, ids=str)
def test_to_the_byte(package: str, name: str, options: dict[str, Any]) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    make = partial(getattr(importlib.import_module(f"{package}.optim"), name), lr=1e-3, **options)
    spec, notes = optimizer_spec(make, "cpu")
    assert notes == ()
    assert spec is not None
    assert spec.compact is not None
    plain = 4 * len(spec.state_dtypes)
    for size in SIZES:
        parameter = nn.Parameter(torch.ones(size))
        optimizer = make([parameter])
        parameter.grad = torch.ones_like(parameter)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        states = [s for s in optimizer.state[parameter].values() if isinstance(s, torch.Tensor)]
        real = sum(part.untyped_storage().nbytes() for state in states for part in plain_tensors(state))
        small = bool(spec.compact.has(np.asarray(size)))
        predicted = (
            float(spec.compact.num_bytes(np.asarray(size))) + spec.compact.shared_bytes
            if small
            else plain * size
        )
        assert predicted + spec.fixed_bytes == real, size


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, partial(torch.optim.SGD, lr=0.1)])
def test_optimizers_of_torch_have_none(make: Any) -> None:
    assert compact_states(make) is None
