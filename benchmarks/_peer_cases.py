"""The models that estimators are asked about: none is among those that our own estimate is held against elsewhere.

Legend: B batch, C channels, S height and width of an image, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atorch_ns.testing.models import Case
from benchmarks._memory_cases import SizedCase, gpt2, language_case, llama, seeded

__all__ = ["peer_cases"]

_NUM_CLASSES = 10
_IMAGE_SIZE = 16


class _ConvBlock(nn.Module):
    """Two convolutions with batch normalisation and a shortcut: [B, C, S, S] to [B, F, S/stride, S/stride]."""

    def __init__(self, channels: int, features: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, features, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(features)
        self.second = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(features)
        self.shortcut = nn.Conv2d(channels, features, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class _ConvNet(nn.Module):
    """Blocks at three resolutions, two at each: images [B, 3, S, S] to logits of classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        sizes = ((1, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1))
        self.blocks = nn.ModuleList(_ConvBlock(c * width, f * width, stride) for c, f, stride in sizes)
        self.head = nn.Linear(4 * width, _NUM_CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits; the labels of a batch are the loss's business."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def _images(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(batch_size, 3, _IMAGE_SIZE, _IMAGE_SIZE, generator=generator)
    return pixels, torch.randint(_NUM_CLASSES, (batch_size,), generator=generator)


def _class_loss(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), batch[1])


def peer_cases(*, quick: bool) -> tuple[SizedCase, ...]:
    """A Llama, a GPT-2 with tied embeddings, and a convolutional network; tiny ones if ``quick``."""
    of_llama = (48, 128, 3, 300, 24) if quick else (192, 512, 6, 2048, 64)
    of_gpt2 = (48, 192, 3, 300, 24) if quick else (160, 640, 5, 1800, 80)
    width = 8 if quick else 64
    convnet = Case(
        name="convnet",
        build=lambda: seeded(_ConvNet, width),
        make_batch=_images,
        loss_func=_class_loss,
        model_input_format="unpack_sequence",
        block="_ConvBlock",
    )
    return (
        SizedCase(
            name="Llama",
            case=language_case("Llama", llama, of_llama),
            global_batch=8,
            num_tokens=of_llama[-1],
        ),
        SizedCase(
            name="GPT-2", case=language_case("GPT-2", gpt2, of_gpt2), global_batch=8, num_tokens=of_gpt2[-1]
        ),
        SizedCase(name="convnet", case=convnet, global_batch=32),
    )
