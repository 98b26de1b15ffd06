"""The yardstick of processor times: what one machine takes in seconds another takes in other seconds, of this too."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["WORDS", "in_yardsticks", "yardstick_seconds"]

WORDS = (
    "one *yardstick* is the processor time of a forward and backward pass of two blocks of Llama-3 8B on fake tensors (one "
    "sample of 4,096 tokens), which is torch's work alone, measured in the same process"
)
_RUNS = 9


@functools.cache
def yardstick_seconds() -> float:
    """Median processor seconds of the yardstick in this process, after two passes that do not count."""
    step = _fake_step()
    for _ in range(2):
        step()
    return statistics.median(_clocked(step) for _ in range(_RUNS))


def in_yardsticks(cpu_seconds: float) -> float:
    """Processor seconds, divided by the yardstick's."""
    return cpu_seconds / yardstick_seconds()


def _clocked(step: Callable[[], None]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def _fake_step() -> Callable[[], None]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with FakeTensorMode() as mode:
        model = LlamaModel(config).train()
        inputs = torch.randn(1, 4096, 4096, requires_grad=True)

    def step() -> None:
        with mode:
            model(inputs_embeds=inputs).last_hidden_state.sum().backward()

    return step
