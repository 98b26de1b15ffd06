"""Architectures of the installed transformers, each with a tiny configuration, made inputs and the model's own loss."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns.testing import Case
from benchmarks._models.entry import Entry, Unfit, case_of, distance_to_waves, first_floating, num_parameters
from benchmarks._models.tiny_configs import FIRST_SPECIAL, NUM_TOKENS, SCALES, VOCAB_SIZE, Scale, tiny_config

__all__ = ["MOST_PARAMETERS", "entries"]

MOST_PARAMETERS: Final = 12_000_000

_KINDS: Final = (
    # (kind, transformers' mapping from a type of config to a class); the first that has a type decides.
    ("vision and language", "IMAGE_TEXT_TO_TEXT"),
    ("speech to text", "SPEECH_SEQ_2_SEQ"),
    ("causal", "CAUSAL_LM"),
    ("sequence to sequence", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("masked", "MASKED_LM"),
    ("speech", "CTC"),
    ("image", "IMAGE_CLASSIFICATION"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("video", "VIDEO_CLASSIFICATION"),
    ("image and text", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("detection", "OBJECT_DETECTION"),
    ("segmentation", "SEMANTIC_SEGMENTATION"),
    ("depth", "DEPTH_ESTIMATION"),
)


_WINDOWS: Final = {
    "embed_dim": 24,
    "num_heads": [1, 2, 4, 8],
    "window_size": 4,
    "patch_size": 2,
    "image_size": 64,
}
_SECTIONS: Final = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_GIVEN: Final[Mapping[str, Mapping[str, Any]]] = {
    # What no rule can know, by type of configuration: sizes that must fit, and what a class needs to be a model at all.
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": _WINDOWS,
    "esm": {"vocab_size": VOCAB_SIZE},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "layer_types": None,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "mamba2": {"head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "wav2vec2-bert": {"vocab_size": VOCAB_SIZE},
    # Its batch norms are compared with one process on the whole batch, where a sum is another loss than a mean of sums.
    "wav2vec2-conformer": {"vocab_size": VOCAB_SIZE, "ctc_loss_reduction": "mean"},
    "xlstm": {"qk_dim_factor": 1.0},
    "timm_backbone": {"backbone": "resnet18", "use_pretrained_backbone": False},
    "timm_wrapper": {"architecture": "test_vit"},
    "xmod": {"default_language": "en_XX"},
    **{
        f"{name}_text": _SECTIONS
        for name in ("glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl")
    },
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS["rope_parameters"], "partial_rotary_factor": 1.0}},
}


def entries() -> Iterator[Entry]:
    """One for each type of configuration."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for kind, mapping in _KINDS:
        for name, class_name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            if name not in seen:
                seen.add(name)
                cls = class_name if isinstance(class_name, str) else class_name[0]
                yield Entry(source="transformers", name=name, kind=kind, make=partial(_case, name, cls))


def _case(name: str, class_name: str) -> Case:
    """The case at the first scale that computes.

    Raises:
        Unfit: if none does; with the reason of the first.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    said = []
    for scale in SCALES:
        try:
            config = _config(CONFIG_MAPPING[name], scale)
            cls = getattr(transformers, class_name)
            if num_parameters(lambda cls=cls, config=config: cls(copy.deepcopy(config))) > MOST_PARAMETERS:
                raise Unfit("no rule makes it small")
            model = cls(config)
            make_batch = _working(model)
        except Exception as error:
            said.append(str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}")
            continue
        return case_of(model, make_batch, _loss, "unpack_dict")
    raise Unfit(said[0])


def _config(cls: type[Any], scale: Scale) -> Any:
    config = tiny_config(cls, scale, _GIVEN)
    for part in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))):
        if part is None:
            continue
        for name in (
            "pad_token_id",
            "decoder_start_token_id",
        ):  # users set them, or load them with the weights
            if getattr(part, name, None) is None and (name == "pad_token_id" or config.is_encoder_decoder):
                setattr(part, name, 0)
    return config


def _loss(batch: Mapping[str, Tensor], output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    return distance_to_waves(first_floating(output, len(next(iter(batch.values())))))


def _working(model: nn.Module) -> Maker:
    """The first form of batch that the model computes.

    Raises:
        Unfit: if there is none, with what the model said of each.
    """
    said: list[str] = []
    model.train()
    for candidate in _batches(model):
        maker = _tried(model, candidate, said)
        if maker is not None:
            return maker
    raise Unfit("; ".join(said))


def _tried(model: nn.Module, maker: Maker, said: list[str], *, again: bool = True) -> Maker | None:
    """The maker, with as many image tokens as the model asks for, if the model computes its batch."""
    batch = maker(2, 0)
    try:
        with torch.no_grad():
            loss = _loss(batch, model(**batch))
    except Exception as error:
        text = str(error)
        said.append(f"{', '.join(batch)}: {type(error).__name__}: {text[:200]}")
        asked = re.search(r"tokens:? \D*(\d+)\D*,? *features:? \D*(\d+)", text)
        if asked and again and "input_ids" in batch:
            each = int(asked[2]) // len(batch["input_ids"])
            return _tried(model, _with_images(maker, model.config, each), said, again=False)
        return None
    if torch.isfinite(loss):
        return maker
    said.append(f"{', '.join(batch)}: loss {float(loss)}")
    return None


def _image_token(config: Any) -> int | None:
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index", "image_patch_id"))
    return next((one for one in ids if isinstance(one, int)), None)


def _with_images(maker: Maker, config: Any, count: int) -> Maker:
    """Samples that begin with ``count`` image tokens, then text."""

    def make(batch_size: int, seed: int) -> dict[str, Tensor]:
        batch = maker(batch_size, seed)
        text = batch["input_ids"][:, -NUM_TOKENS:].clone()
        token = _image_token(config)
        text[text == token] = 5
        images = torch.full((batch_size, count), token, dtype=torch.long)
        tokens = torch.cat([text[:, :1], images, text[:, 1:]], 1)
        labels = torch.where(tokens == token, -100, tokens)
        new = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        if "mm_token_type_ids" in batch:
            new["mm_token_type_ids"] = (tokens == token).long()
        return {**batch, **{name: value for name, value in new.items() if name in batch}}

    return make


def _batches(model: nn.Module) -> Iterator[Maker]:
    """Forms of batches, those with most of what the model takes first."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    text = {name: make for name, make in _TEXT.items() if name in takes}
    takes_images = [
        name for name in ("pixel_values", "pixel_values_videos", "flattened_patches") if name in takes
    ]
    for audio in ("input_features", "input_values"):
        if audio in takes:
            for shape in _sounds(config, audio):
                sound: Any = {audio: partial(_floats, shape=shape)}
                if "input_ids" not in takes:
                    yield _made(**sound, labels=partial(_tokens, count=4))
                    yield _made(**sound, labels=partial(_classes, count=2))
                    yield _made(**sound)
                else:
                    yield _made(**sound, **text)
                if "attention_mask" in takes:
                    mask = partial(_ones, count=shape[0])
                    yield _made(**sound, attention_mask=mask, labels=partial(_tokens, count=4))
    for name in takes_images:
        for shape in _pictures(config, name):
            pixels: Any = {name: partial(_floats, shape=shape)}
            if "input_ids" in takes:
                yield _made(**{**text, **pixels, **_beside_pixels(config, takes, shape)})
                continue
            if "pixel_mask" in takes:
                yield _made(**pixels)
            yield _made(**pixels, labels=partial(_classes, count=2))
            yield _made(**pixels, labels=partial(_tokens, count=4))
            yield _made(**pixels)
    if "input_ids" in takes:
        yield _made(**text)
        yield _made(**{name: make for name, make in text.items() if name != "labels"})
        if "decoder_input_ids" in takes:
            yield _made(
                **{name: make for name, make in text.items() if name != "labels"}, decoder_input_ids=_tokens
            )


Field = Callable[[torch.Generator, int], Tensor]
Maker = Callable[[int, int], dict[str, Tensor]]


def _beside_pixels(config: Any, takes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Field]:
    """What a batch with images needs besides, from the names that ``forward`` takes."""
    token = _image_token(config)
    more: dict[str, Field] = {}
    if token is not None:
        more["input_ids"] = partial(_one_image, token=token)
    if "mm_token_type_ids" in takes:
        more["mm_token_type_ids"] = lambda _, batch_size: torch.zeros(
            batch_size, NUM_TOKENS, dtype=torch.long
        )
    for name in ("image_grid_thw", "grid_thw"):
        if name in takes and len(shape) == 2:
            side = int(shape[0] ** 0.5)
            more[name] = partial(_constant, value=(1, side, side))
    if "image_sizes" in takes:
        more["image_sizes"] = partial(_constant, value=shape[-2:])
    if "qformer_input_ids" in takes:
        more["qformer_input_ids"] = _tokens
    return more


def _one_image(generator: torch.Generator, batch_size: int, token: int) -> Tensor:
    tokens = _tokens(generator, batch_size)
    tokens[:, 1] = token
    return tokens


def _constant(_: torch.Generator, batch_size: int, value: tuple[int, ...]) -> Tensor:
    return torch.tensor([value] * batch_size)


def _made(**fields: Field) -> Maker:
    def make(batch_size: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: field(generator, batch_size) for name, field in fields.items()}

    return make


def _tokens(generator: torch.Generator, batch_size: int, count: int = NUM_TOKENS) -> Tensor:
    """The same whenever it is asked: inputs are labels too."""
    same = torch.Generator().manual_seed(generator.initial_seed())
    return torch.randint(4, FIRST_SPECIAL, (batch_size, count), generator=same)


def _ones(generator: torch.Generator, batch_size: int, count: int = NUM_TOKENS) -> Tensor:
    return torch.ones(batch_size, count, dtype=torch.long)


def _floats(generator: torch.Generator, batch_size: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(batch_size, *shape, generator=generator)


def _classes(generator: torch.Generator, batch_size: int, count: int) -> Tensor:
    return torch.randint(count, (batch_size,), generator=generator)


def _pictures(config: Any, name: str) -> list[tuple[int, ...]]:
    """Shapes that one sample's image or video may have."""
    vision = getattr(config, "vision_config", None) or config
    channels = next(
        (
            getattr(c, k)
            for c in (vision, config)
            for k in ("num_channels", "in_channels")
            if isinstance(getattr(c, k, None), int)
        ),
        3,
    )
    sides = [side for c in (vision, config) if isinstance(side := getattr(c, "image_size", None), int)]
    sizes = [
        tuple(c.image_size)
        for c in (vision, config)
        if isinstance(getattr(c, "image_size", None), (list, tuple))
    ]
    sizes += [(side, side) for side in (*sides, 32, 64, 224)]
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else patch[0]
    whole = [(channels, *size) for size in dict.fromkeys(sizes)]
    depth = getattr(vision, "temporal_patch_size", 1)
    flat = [(16, channels * depth * patch * patch)]
    frames = getattr(config, "num_frames", getattr(config, "frames_per_clip", 2))
    videos = [(frames, *shape) for shape in whole]
    return (
        videos
        if name == "pixel_values_videos"
        else [*whole[:2], *flat, *whole[2:], *[(1, *shape) for shape in whole], *videos]
    )


def _sounds(config: Any, name: str) -> list[tuple[int, ...]]:
    parts = [config, *(getattr(config, part) for part in getattr(config, "sub_configs", {}))]
    keys = (
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "n_mels",
        "input_dim",
        "feature_projection_input_dim",
    )
    bins = [value for part in parts for key in keys if isinstance(value := getattr(part, key, None), int)]
    waves = [(1600,), (6400,), (1, 1600), (16000,)]
    shapes = [
        shape
        for count in dict.fromkeys((*bins, 80, 128))
        for shape in ((count, 128), (128, count), (64, count))
    ]
    if isinstance(length := getattr(config, "max_length", None), int):
        shapes = [(length, count) for count in bins] + shapes
    return [*waves, *shapes] if name == "input_values" else [*shapes, *waves]


_TEXT: Final[Mapping[str, Field]] = {"input_ids": _tokens, "attention_mask": _ones, "labels": _tokens}
