"""Architectures of the installed transformers, each with a tiny configuration, made inputs and the model's own loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns.testing import Case, take
from benchmarks._models.entry import Entry, Unfit, distance_to_waves, first_floating
from benchmarks._models.tiny_configs import FIRST_SPECIAL, NUM_TOKENS, tiny_config

__all__ = ["entries"]

_KINDS: Final = (
    # (kind, transformers' mapping from a type of config to a class); the first that has a type decides.
    ("causal", "CAUSAL_LM"),
    ("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("speech to text", "SPEECH_SEQ_2_SEQ"),
    ("masked", "MASKED_LM"),
    ("speech", "CTC"),
    ("vision and language", "IMAGE_TEXT_TO_TEXT"),
    ("image", "IMAGE_CLASSIFICATION"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("video", "VIDEO_CLASSIFICATION"),
)


def entries() -> Iterator[Entry]:
    """One for each type of configuration."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for kind, mapping in _KINDS:
        for name, class_name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            if name in seen:
                continue
            seen.add(name)
            cls = class_name if isinstance(class_name, str) else class_name[0]
            yield Entry(source="transformers", name=name, kind=kind, make=partial(_case, name, cls))


def _case(name: str, class_name: str) -> Case:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny_config(CONFIG_MAPPING[name])
    model = getattr(transformers, class_name)(config).train()
    make_batch = _working(model)
    return Case(
        name=name,
        build=lambda: model,
        make_batch=make_batch,
        loss_func=_loss,
        model_input_format="unpack_dict",
        block="",
    )


def _loss(batch: Mapping[str, Tensor], output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return distance_to_waves(first_floating(output, len(next(iter(batch.values())))))


def _working(model: nn.Module) -> Callable[[int, int], dict[str, Tensor]]:
    """The first form of batch that the model computes.

    Raises:
        Unfit: if there is none, with what the model said of each.
    """
    said = []
    for candidate in _batches(model):
        batch = candidate(2, 0)
        try:
            with torch.no_grad():
                loss = _loss(batch, model(**batch))
        except Exception as error:
            said.append(f"{', '.join(batch)}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if torch.isfinite(loss):
            return candidate
        said.append(f"{', '.join(batch)}: loss {float(loss)}")
    raise Unfit("; ".join(said))


Maker = Callable[[int, int], dict[str, Tensor]]


def _batches(model: nn.Module) -> Iterator[Maker]:
    takes = inspect.signature(model.forward).parameters
    config = model.config
    text = {"input_ids": _tokens, "attention_mask": _ones, "labels": _tokens}
    image = _image(config)
    if "pixel_values" in takes and "input_ids" not in takes:
        for shape in image:
            pixels = partial(_floats, shape=shape)
            yield _made(pixel_values=pixels, labels=partial(_classes, count=2))
            yield _made(pixel_values=pixels)
        return
    for audio in ("input_features", "input_values"):
        if audio in takes and "input_ids" not in takes:
            for shape in _sounds(config, audio):
                sound = partial(_floats, shape=shape)
                yield _made(**{audio: sound}, labels=partial(_tokens, count=4))
                yield _made(**{audio: sound}, labels=partial(_classes, count=2))
                yield _made(**{audio: sound})
    yield _made(**{name: make for name, make in text.items() if name in takes or "kwargs" in takes})
    yield _made(**{name: make for name, make in text.items() if name in takes and name != "labels"})


def _made(**fields: Callable[[torch.Generator, int], Tensor]) -> Maker:
    def make(batch_size: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: field(generator, batch_size) for name, field in fields.items()}

    return make


def _tokens(generator: torch.Generator, batch_size: int, count: int = NUM_TOKENS) -> Tensor:
    return torch.randint(4, FIRST_SPECIAL, (batch_size, count), generator=torch.Generator().manual_seed(7))


def _ones(generator: torch.Generator, batch_size: int) -> Tensor:
    return torch.ones(batch_size, NUM_TOKENS, dtype=torch.long)


def _floats(generator: torch.Generator, batch_size: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(batch_size, *shape, generator=generator)


def _classes(generator: torch.Generator, batch_size: int, count: int) -> Tensor:
    return torch.randint(count, (batch_size,), generator=generator)


def _image(config: Any) -> list[tuple[int, ...]]:
    channels = getattr(config, "num_channels", 3)
    sizes = [getattr(config, "image_size", None), 32, 64, 224]
    shapes = []
    for size in sizes:
        if isinstance(size, int):
            shapes.append((channels, size, size))
        elif isinstance(size, (list, tuple)):
            shapes.append((channels, *size))
    return shapes


def _sounds(config: Any, name: str) -> list[tuple[int, ...]]:
    if name == "input_values":
        return [(1600,), (6400,), (16000,)]
    bins = [getattr(config, key) for key in ("num_mel_bins", "feature_size", "input_feat_per_channel") if hasattr(config, key)]
    return [shape for count in (*bins, 80, 128) for shape in ((count, 128), (128, count), (64, count), (count, 64))]
