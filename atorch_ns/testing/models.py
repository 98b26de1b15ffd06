"""Reference models that strategies are checked on, each with its data and its loss (docs/design/parity.md).

Legend: B batch, T tokens, F features, V vocabulary.

Every model is float32, has no dropout, and is built equal on every call and every rank. All samples have
the same number of targets, so the mean of the ranks' losses is the loss of the global batch. The ``hf_``
cases import transformers when built: build one before forking ranks, or every rank imports it anew.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch_ns.capture.nests import map_tensors
from atorch_ns.errors import InputError, MissingPackageError
from atorch_ns.testing.networks import EncoderDecoder, ResidualMlp, TiedLlama

IMAGE_SHAPE: Final = (3, 12, 20)
"""Channels, height and width: 15 patches, with the class token 16 tokens, for 2, 4 and 8 ranks to share."""
_PATCH: Final = 4  # pixels of a side

# With transformers' default of 0.02 attention starts uniform, and the gradients of queries and keys drown in
# rounding; with 1/sqrt(width) the logits are so large that bf16 rounds the loss by 1e-3.
_INITIALIZER_RANGE: Final = 0.1


_VOCAB_SIZE: Final = 64
_NUM_TOKENS: Final = 16
_NUM_FEATURES: Final = 16
_NUM_OUTPUTS: Final = 8
_NUM_TARGET_TOKENS: Final = 8
_MASK_TOKEN: Final = _VOCAB_SIZE - 1  # not in the data
_MASK_EVERY: Final = 4
_NOT_A_TARGET: Final = -100  # the label that cross entropy leaves out

_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": _INITIALIZER_RANGE,
}
_TOKENS: Final[Mapping[str, Any]] = {"vocab_size": _VOCAB_SIZE, "max_position_embeddings": 64}
_DECODER: Final[Mapping[str, Any]] = {"num_key_value_heads": 2, "tie_word_embeddings": False}
_NO_DROPOUT: Final[Mapping[str, Any]] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_llama(**settings: Any) -> nn.Module:
    """Two layers, four query heads, two key-value heads, untied output head. ``settings`` replace these."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, **_TOKENS, **_DECODER, **settings}))


def make_gpt2(**settings: Any) -> nn.Module:
    """Two layers, four heads, tied weights, no dropout; ``settings`` (``hidden_size`` …) replace these."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {**_SIZES, "n_inner": _SIZES["intermediate_size"]}
    tokens = {**_TOKENS, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **tokens, **dropout, **settings}))


def make_bert() -> nn.Module:
    """Two layers, four heads; the head of the masked language model is tied to the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    return _with_biases(BertForMaskedLM(BertConfig(**_SIZES, **_TOKENS, **_NO_DROPOUT)))


def make_vit() -> nn.Module:
    """Two layers, four heads, images of :data:`IMAGE_SHAPE`."""
    from transformers import ViTConfig, ViTForImageClassification

    channels, *size = IMAGE_SHAPE
    config = ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=size, patch_size=_PATCH, num_channels=channels)
    config.num_labels = _NUM_OUTPUTS
    return _with_biases(ViTForImageClassification(config))


def make_mixtral() -> nn.Module:
    """Two layers with four experts, two for every token; the loss leaves the router's balance out."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
    return MixtralForCausalLM(
        MixtralConfig(**{**_SIZES, **_TOKENS, **_DECODER, **experts, "intermediate_size": 48})
    )


def _with_biases(model: nn.Module) -> nn.Module:
    # Biases other than zero: one that a rank adds twice changes the output. One without a gradient (of
    # keys, which a softmax cancels) still moves by its decay, so that its update is a measure.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(_INITIALIZER_RANGE * torch.randn_like(parameter))
    return model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with everything a test needs to train it.

    Attributes:
        name: name in tests.
        build: makes the model, equal on every call; the random state of the caller is not changed.
        make_batch: ``(batch_size, seed)`` to a batch on the CPU; row ``i`` depends on both.
        loss_func: ``(batch, output)`` to a scalar, the mean over the batch.
        model_input_format: form of the model's batch: None, "unpack_sequence", "unpack_dict", "first".
        block: class name of the repeated block, for methods that wrap by class.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss_func: Callable[[Any, Any], Tensor]
    model_input_format: str | None
    block: str

    def call(self, model: nn.Module, batch: Any) -> Any:
        """The model's output for ``batch``, passed in the form of ``model_input_format``."""
        if self.model_input_format == "unpack_sequence":
            return model(*batch)
        if self.model_input_format == "unpack_dict":
            return model(**batch)
        return model(batch[0] if self.model_input_format == "first" else batch)


def take(batch: Any, rows: slice | int) -> Any:
    """The chosen rows of every tensor of a batch, contiguous as a loader gives them."""
    return map_tensors(lambda tensor: tensor[rows].contiguous(), batch)


class SyntheticDataset(Dataset[Any]):
    """``length`` samples of a case; in order, in batches of B, they are :meth:`batch` 0, 1, 2 …"""

    def __init__(self, case: Case, length: int, *, seed: int = 0) -> None:
        self._rows = case.make_batch(length, seed)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is outside the dataset of {self._length}")
        return take(self._rows, index)

    def batch(self, step: int, batch_size: int) -> Any:
        """The global batch of the given step when nothing shuffles."""
        return take(self._rows, slice(step * batch_size, (step + 1) * batch_size))


def _make_features(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch_size, _NUM_FEATURES, generator=generator)
    return features, torch.randn(batch_size, _NUM_OUTPUTS, generator=generator)


def _make_tokens(batch_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_VOCAB_SIZE, (batch_size, _NUM_TOKENS), generator=generator)


def _token_dict(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _make_tokens(batch_size, seed)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _masked_tokens(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _make_tokens(batch_size, seed) % _MASK_TOKEN  # data never hold the mask
    hidden = torch.zeros(_NUM_TOKENS, dtype=torch.bool)
    hidden[: _NUM_TOKENS // 2 : _MASK_EVERY] = True  # every fourth of the first half
    lengths = _NUM_TOKENS - tokens[:, 0] % _MASK_EVERY  # rows end in 0 to 3 tokens of padding
    return {
        "input_ids": tokens.masked_fill(hidden, _MASK_TOKEN),
        "attention_mask": (torch.arange(_NUM_TOKENS) < lengths[:, None]).long(),
        "labels": tokens.masked_fill(~hidden, _NOT_A_TARGET),
    }


def _make_images(batch_size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch_size, *IMAGE_SHAPE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(_NUM_OUTPUTS, (batch_size,), generator=generator)}


def _token_pairs(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _make_tokens(batch_size, seed)
    return {"source": tokens, "target": tokens.flip(1)[:, :_NUM_TARGET_TOKENS].contiguous()}  # reversed


def _squared_error(batch: Any, output: Any) -> Tensor:
    return F.mse_loss(output.float(), batch[1])


def _next_token_loss(tokens: Tensor, logits: Tensor) -> Tensor:
    """Mean cross entropy of logits [B, T, V] against the tokens [B, T] that follow."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _hf_loss(batch: Any, output: Any) -> Tensor:
    return _next_token_loss(batch["input_ids"], output.logits)


def _hf_label_loss(batch: Any, output: Any) -> Tensor:
    """Cross entropy of logits [B, ..., V] against labels [B, ...]."""
    return F.cross_entropy(output.logits.flatten(0, -2).float(), batch["labels"].flatten())


def _pair_loss(batch: Any, output: Any) -> Tensor:
    return _next_token_loss(batch["target"], output)


def _make_case(
    name: str,
    make: Callable[[], nn.Module],
    make_batch: Callable[[int, int], Any],
    loss_func: Callable[[Any, Any], Tensor],
    *,
    block: str,
    model_input_format: str | None = "unpack_dict",
) -> Case:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the caller's state stays
            torch.manual_seed(20)  # equal on every rank
            return make().train()

    return Case(
        name=name,
        build=build,
        make_batch=make_batch,
        loss_func=loss_func,
        model_input_format=model_input_format,
        block=block,
    )


_CASES: Final = (
    _make_case(
        "mlp",
        ResidualMlp,
        _make_features,
        _squared_error,
        block="ResidualBlock",
        model_input_format="unpack_sequence",
    ),
    _make_case(
        "tied_llama", TiedLlama, _make_tokens, _next_token_loss, model_input_format=None, block="DecoderBlock"
    ),
    _make_case("hf_llama", make_llama, _token_dict, _hf_loss, block="LlamaDecoderLayer"),
    _make_case("hf_gpt2", make_gpt2, _token_dict, _hf_loss, block="GPT2Block"),
    _make_case("hf_bert", make_bert, _masked_tokens, _hf_label_loss, block="BertLayer"),
    _make_case("hf_vit", make_vit, _make_images, _hf_label_loss, block="ViTLayer"),
    _make_case("hf_mixtral", make_mixtral, _token_dict, _hf_loss, block="MixtralDecoderLayer"),
    _make_case("encoder_decoder", EncoderDecoder, _token_pairs, _pair_loss, block="CrossBlock"),
)
CASES: Final[Mapping[str, Case]] = MappingProxyType({case.name: case for case in _CASES})


def get_case(name: str) -> Case:
    """The case of that name.

    Raises:
        InputError: there is none; the message lists those there are.
        MissingPackageError: one of transformers, which is not installed.
    """
    if name.startswith("hf_") and importlib.util.find_spec("transformers") is None:
        raise MissingPackageError("transformers", needed_by=name, install="pip install 'atorch-ns[hf]'")
    try:
        return CASES[name]
    except KeyError:
        raise InputError(f"unknown reference model {name!r}. Use one of {', '.join(CASES)}.") from None
