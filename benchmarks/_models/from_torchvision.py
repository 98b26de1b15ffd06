"""torchvision's classification, segmentation, detection and video models, one small model of each family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns.testing import Case
from benchmarks._models.entry import Entry, Unfit, case_of
from benchmarks._models.from_timm import NUM_CLASSES, class_loss, image_batches

__all__ = ["entries"]

MOST_PARAMETERS: Final = 64_000_000
_SIDE: Final = 64

_CLASSIFIERS: Final[Mapping[str, Mapping[str, Any]]] = {
    # name: arguments that make it small
    "alexnet": {},
    "convnext_tiny": {},
    "densenet121": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "maxvit_t": {},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "swin_t": {},
    "swin_v2_t": {},
}
_SIDES: Final[Mapping[str, int]] = {"inception_v3": 96, "maxvit_t": 224}
_SEGMENTERS: Final = (
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)
_DETECTORS: Final = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
_NO_WEIGHTS: Final = {"weights": None, "weights_backbone": None}


def entries() -> Iterator[Entry]:
    """One for each family."""
    for name, options in _CLASSIFIERS.items():
        yield Entry(source="torchvision", name=name, kind="image", make=partial(_classifier, name, options))
    yield Entry(source="torchvision", name="vit", kind="image", make=_transformer)
    for name in _SEGMENTERS:
        yield Entry(source="torchvision", name=name, kind="segmentation", make=partial(_segmenter, name))
    for name in _DETECTORS:
        yield Entry(source="torchvision", name=name, kind="detection", make=partial(_detector, name))


def _transformer() -> Case:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    model = VisionTransformer(image_size=_SIDE, patch_size=16, num_classes=NUM_CLASSES, **sizes)
    return case_of(model, image_batches(_SIDE), class_loss, "first")


def _small(make: Any) -> nn.Module:
    model: nn.Module = make().train()
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        raise Unfit("no argument makes it small")
    return model


def _classifier(name: str, options: Mapping[str, Any]) -> Case:
    from torchvision.models import get_model

    model = _small(partial(get_model, name, weights=None, num_classes=NUM_CLASSES, **options))
    return case_of(model, image_batches(_SIDES.get(name, _SIDE)), class_loss, "first")


def _segmenter(name: str) -> Case:
    from torchvision.models import get_model

    model = _small(partial(get_model, name, num_classes=NUM_CLASSES, **_NO_WEIGHTS))
    return case_of(model, _images_with_masks, _pixel_loss, "first")


def _images_with_masks(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [B, 3, side, side] and a class for every pixel [B, side, side]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch_size, 3, _SIDE, _SIDE, generator=generator)
    return images, torch.randint(NUM_CLASSES, (batch_size, _SIDE, _SIDE), generator=generator)


def _pixel_loss(batch: Any, output: Any) -> Tensor:
    return nn.functional.cross_entropy(output["out"], batch[1])


class Detection(nn.Module):
    """Detector as users wrap it for batches of tensors: lists of images and targets are made of them.

    The samplers of anchors and boxes choose at random among the many; here they have room for all, since two runs with
    other draws cannot be compared. Batch norms are frozen, as torchvision has them with the weights that users load.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = _frozen(detector)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Losses of images [B, 3, side, side] with boxes [B, N, 4] of classes [B, N]."""
        side = images.shape[-1]
        targets = [
            {
                "boxes": one,
                "labels": classes,
                "masks": one.new_zeros(len(one), side, side, dtype=torch.uint8),
                "keypoints": torch.cat([one[:, None, :2] + 1, torch.ones_like(one[:, None, :1])], 2).repeat(
                    1, 17, 1
                ),
            }
            for one, classes in zip(boxes, labels, strict=True)
        ]
        losses: dict[str, Tensor] = self.detector(list(images), targets)
        return losses


def _frozen(model: nn.Module) -> nn.Module:
    from torchvision.ops import FrozenBatchNorm2d

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                frozen = FrozenBatchNorm2d(child.num_features)
                frozen.weight.fill_(
                    0.5
                )  # with 1 the residual stream of a random network grows with its depth
                setattr(module, name, frozen)
    return model


def _detector(name: str) -> Case:
    from torchvision.models import get_model

    options: dict[str, Any] = {"min_size": _SIDE, "max_size": _SIDE} if "ssd" not in name else {}
    if "rcnn" in name:
        options |= {"rpn_batch_size_per_image": 4096, "box_batch_size_per_image": 4096}
        options |= {"rpn_pre_nms_top_n_train": 8, "rpn_post_nms_top_n_train": 8}
    classes = {"num_classes": NUM_CLASSES} if "keypoint" not in name else {}
    model = _small(lambda: Detection(get_model(name, **classes, **_NO_WEIGHTS, **options)))
    loss = lambda batch, losses: torch.stack(list(losses.values())).sum()  # noqa: E731
    return case_of(model, _images_with_boxes, loss, "unpack_dict")


def _images_with_boxes(batch_size: int, seed: int) -> dict[str, Tensor]:
    """Images with two boxes each, of the one class that detectors of keypoints know."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(batch_size, 2, 2, generator=generator) * _SIDE / 3
    return {
        "images": torch.rand(batch_size, 3, _SIDE, _SIDE, generator=generator),
        "boxes": torch.cat([corners, corners + _SIDE / 3], 2),
        "labels": torch.ones(batch_size, 2, dtype=torch.long),
    }
