"""The models that strategies are checked on, each with its data and its loss.

Legend: B batch, T tokens, F features, V vocabulary.

===========  =====================  ===========================================  =================
case         batch                  what it adds                                  input format
===========  =====================  ===========================================  =================
mlp          (features, targets)    float inputs, biases, LayerNorm, mean         unpack_sequence
                                    squared error
tied_llama   tokens [B, T]          one weight used as embedding and head         None
hf_llama     dict of input_ids      transformers' modules, grouped-query          unpack_dict
             and attention_mask     attention, an untied head
hf_gpt2      dict of input_ids      learned positions, Conv1D, a fused qkv,       unpack_dict
             and attention_mask     tied weights
===========  =====================  ===========================================  =================

Every model is float32, has no dropout, and is built equal on every call and every rank. All samples have
one length, so the mean of the ranks' losses is the loss of the global batch. The ``hf_`` cases import
transformers when they are built: build one before forking ranks, or every rank imports it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch_ns.errors import InputError
from atorch_ns.testing.networks import ResidualMlp, TiedLlama

__all__ = ["CASES", "Case", "SyntheticDataset", "get_case", "map_tensors", "take"]

_VOCAB_SIZE: Final = 64
_NUM_TOKENS: Final = 16
_NUM_FEATURES: Final = 16
_NUM_OUTPUTS: Final = 8
# With transformers' default of 0.02 attention starts uniform, and the gradients of queries and keys drown in
# rounding; with 1/sqrt(width) the logits are so large that bf16 rounds the loss by 1e-3.
_INITIALIZER_RANGE: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with everything a test needs to train it.

    Attributes:
        name: how tests call it.
        build: makes the model, equal on every call; leaves the random state of the caller alone.
        make_batch: ``(batch_size, seed)`` to a batch on the CPU; row ``i`` depends on both.
        loss_func: ``(batch, output)`` to a scalar, the mean over the batch.
        model_input_format: how the batch is handed to the model: None, "unpack_sequence", "unpack_dict".
        block: class name of the repeated block, for methods that wrap by class.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss_func: Callable[[Any, Any], Tensor]
    model_input_format: str | None
    block: str

    def call(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for ``batch``, handed over as ``model_input_format`` says."""
        if self.model_input_format == "unpack_sequence":
            return model(*batch)
        if self.model_input_format == "unpack_dict":
            return model(**batch)
        return model(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch (a tensor, or a tuple, list or dict of batches) with ``function`` applied to every tensor."""
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, value) for value in batch)
    return function(batch)


def take(batch: Any, rows: slice | int) -> Any:
    """The chosen rows of every tensor of a batch."""
    return map_tensors(lambda tensor: tensor[rows], batch)


class SyntheticDataset(Dataset[Any]):
    """``length`` samples of a case; loading them in order in batches of B gives :meth:`batch` 0, 1, 2 …"""

    def __init__(self, case: Case, length: int, *, seed: int = 0) -> None:
        self._rows = case.make_batch(length, seed)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of a dataset of {self._length}")
        return take(self._rows, index)

    def batch(self, step: int, batch_size: int) -> Any:
        """The global batch of the given step when nothing shuffles."""
        return take(self._rows, slice(step * batch_size, (step + 1) * batch_size))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Build with a fixed seed, in training mode, without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        return make().train()


def _features(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch_size, _NUM_FEATURES, generator=generator)
    return features, torch.randn(batch_size, _NUM_OUTPUTS, generator=generator)


def _tokens(batch_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_VOCAB_SIZE, (batch_size, _NUM_TOKENS), generator=generator)


def _token_dict(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _tokens(batch_size, seed)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _squared_error(batch: Any, output: Any) -> Tensor:
    return F.mse_loss(output.float(), batch[1])


def _next_token_loss(tokens: Tensor, logits: Tensor) -> Tensor:
    """Mean cross entropy of logits [B, T, V] against the tokens [B, T] that follow."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _hf_loss(batch: Any, output: Any) -> Tensor:
    return _next_token_loss(batch["input_ids"], output.logits)


def _hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=False,
        use_cache=False,
        attention_dropout=0.0,
    )
    return LlamaForCausalLM(config)


def _hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCAB_SIZE,
        n_embd=32,
        n_inner=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=_INITIALIZER_RANGE,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case(
                name="mlp",
                build=lambda: _seeded(ResidualMlp),
                make_batch=_features,
                loss_func=_squared_error,
                model_input_format="unpack_sequence",
                block="ResidualBlock",
            ),
            Case(
                name="tied_llama",
                build=lambda: _seeded(TiedLlama),
                make_batch=_tokens,
                loss_func=_next_token_loss,
                model_input_format=None,
                block="DecoderBlock",
            ),
            Case(
                name="hf_llama",
                build=lambda: _seeded(_hf_llama),
                make_batch=_token_dict,
                loss_func=_hf_loss,
                model_input_format="unpack_dict",
                block="LlamaDecoderLayer",
            ),
            Case(
                name="hf_gpt2",
                build=lambda: _seeded(_hf_gpt2),
                make_batch=_token_dict,
                loss_func=_hf_loss,
                model_input_format="unpack_dict",
                block="GPT2Block",
            ),
        )
    }
)


def get_case(name: str) -> Case:
    """The case of that name.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    try:
        return CASES[name]
    except KeyError:
        raise InputError(f"there is no reference model {name!r}. Use one of {', '.join(CASES)}.") from None
