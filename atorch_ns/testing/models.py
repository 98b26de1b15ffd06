"""The models that strategies are checked on, each with its data and its loss.

Legend: B batch, T tokens, F features, V vocabulary.

===============  ===================  ===========================================  ===============
case             batch                what it adds                                 input format
===============  ===================  ===========================================  ===============
mlp              (features, targets)  float inputs, biases, LayerNorm, mean        unpack_sequence
                                      squared error
tied_llama       tokens [B, T]        one weight used as embedding and head        None
hf_llama         dict of input_ids    transformers' modules, grouped-query         unpack_dict
                 and attention_mask   attention, an untied head
hf_gpt2          dict of input_ids    learned positions, Conv1D, a fused qkv,      unpack_dict
                 and attention_mask   tied weights
hf_bert          dict of input_ids,   no causal mask, rows of padding, a masked    unpack_dict
                 attention_mask and   language model whose head shares a weight
                 labels               and has a bias of its own
hf_vit           dict of              images, a convolution, parameters that       unpack_dict
                 pixel_values and     belong to no layer (class token, positions)
                 labels
hf_mixtral       dict of input_ids    experts in one tensor, two of four for       unpack_dict
                 and attention_mask   each token, no loss of the router's
encoder_decoder  dict of source and   two kinds of blocks, cross attention, an     unpack_dict
                 target               embedding used three times
===============  ===================  ===========================================  ===============

Every model is float32, has no dropout, and is built equal on every call and every rank. All samples have
the same number of targets, so the mean of the ranks' losses is the loss of the global batch. The ``hf_`` cases import
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
from atorch_ns.testing.networks import EncoderDecoder, ResidualMlp, TiedLlama

IMAGE_SHAPE: Final = (3, 12, 20)
"""Channels, height and width: 15 patches, and with the class token 16 tokens, which 2, 4 and 8 ranks can share."""
_PATCH: Final = 4

# With transformers' default of 0.02 attention starts uniform, and the gradients of queries and keys drown in
# rounding; with 1/sqrt(width) the logits are so large that bf16 rounds the loss by 1e-3.
_INITIALIZER_RANGE: Final = 0.1


def make_llama(vocab_size: int) -> nn.Module:
    """Two layers, four heads and two of keys and values, a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
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


def make_gpt2(vocab_size: int) -> nn.Module:
    """Two layers, four heads, tied weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
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


def make_bert(vocab_size: int) -> nn.Module:
    """Two layers, four heads; the head of the masked language model is tied to the embedding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _with_biases(BertForMaskedLM(config))


def make_vit(num_labels: int) -> nn.Module:
    """Two layers, four heads, images of :data:`IMAGE_SHAPE`."""
    from transformers import ViTConfig, ViTForImageClassification

    channels, *size = IMAGE_SHAPE
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=size,
        patch_size=_PATCH,
        num_channels=channels,
        initializer_range=_INITIALIZER_RANGE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = num_labels
    return _with_biases(ViTForImageClassification(config))


def make_mixtral(vocab_size: int) -> nn.Module:
    """Two layers with four experts, of which every token uses two; the loss leaves the router's balance out."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=_INITIALIZER_RANGE,
        output_router_logits=False,
        router_jitter_noise=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        attention_dropout=0.0,
    )
    return MixtralForCausalLM(config)


def _with_biases(model: nn.Module) -> nn.Module:
    """Biases other than zero: one that a rank adds twice is seen at once, and one that has no gradient (of keys,
    to which a softmax is blind) still moves by its decay, so that its update is a measure."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.add_(_INITIALIZER_RANGE * torch.randn_like(parameter))
    return model


_VOCAB_SIZE: Final = 64
_NUM_TOKENS: Final = 16
_NUM_FEATURES: Final = 16
_NUM_OUTPUTS: Final = 8
_NUM_TARGET_TOKENS: Final = 8
_MASK_TOKEN: Final = _VOCAB_SIZE - 1
_MASK_EVERY: Final = 4
_NOT_A_TARGET: Final = -100
"""The label that cross entropy leaves out."""


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
    """The chosen rows of every tensor of a batch, contiguous as a loader gives them."""
    return map_tensors(lambda tensor: tensor[rows].contiguous(), batch)


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


def _masked_tokens(batch_size: int, seed: int) -> dict[str, Tensor]:
    """Every fourth token of the first half hidden, as the label; 0 to 3 tokens of padding at the end of a row."""
    tokens = _tokens(batch_size, seed) % _MASK_TOKEN
    hidden = torch.zeros(_NUM_TOKENS, dtype=torch.bool)
    hidden[: _NUM_TOKENS // 2 : _MASK_EVERY] = True
    lengths = _NUM_TOKENS - tokens[:, 0] % _MASK_EVERY
    return {
        "input_ids": tokens.masked_fill(hidden, _MASK_TOKEN),
        "attention_mask": (torch.arange(_NUM_TOKENS) < lengths[:, None]).long(),
        "labels": tokens.masked_fill(~hidden, _NOT_A_TARGET),
    }


def _images(batch_size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch_size, *IMAGE_SHAPE, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(_NUM_OUTPUTS, (batch_size,), generator=generator),
    }


def _token_pairs(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _tokens(batch_size, seed)
    return {"source": tokens, "target": tokens.flip(1)[:, :_NUM_TARGET_TOKENS].contiguous()}


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
                build=lambda: _seeded(lambda: make_llama(_VOCAB_SIZE)),
                make_batch=_token_dict,
                loss_func=_hf_loss,
                model_input_format="unpack_dict",
                block="LlamaDecoderLayer",
            ),
            Case(
                name="hf_gpt2",
                build=lambda: _seeded(lambda: make_gpt2(_VOCAB_SIZE)),
                make_batch=_token_dict,
                loss_func=_hf_loss,
                model_input_format="unpack_dict",
                block="GPT2Block",
            ),
            Case(
                name="hf_bert",
                build=lambda: _seeded(lambda: make_bert(_VOCAB_SIZE)),
                make_batch=_masked_tokens,
                loss_func=_hf_label_loss,
                model_input_format="unpack_dict",
                block="BertLayer",
            ),
            Case(
                name="hf_vit",
                build=lambda: _seeded(lambda: make_vit(_NUM_OUTPUTS)),
                make_batch=_images,
                loss_func=_hf_label_loss,
                model_input_format="unpack_dict",
                block="ViTLayer",
            ),
            Case(
                name="hf_mixtral",
                build=lambda: _seeded(lambda: make_mixtral(_VOCAB_SIZE)),
                make_batch=_token_dict,
                loss_func=_hf_loss,
                model_input_format="unpack_dict",
                block="MixtralDecoderLayer",
            ),
            Case(
                name="encoder_decoder",
                build=lambda: _seeded(EncoderDecoder),
                make_batch=_token_pairs,
                loss_func=_pair_loss,
                model_input_format="unpack_dict",
                block="CrossBlock",
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
