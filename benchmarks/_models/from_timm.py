"""Families of timm: one small model of each, as shallow as its arguments allow, on small images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from atorch_ns.testing import Case
from benchmarks._models.entry import Entry, Unfit, case_of, num_parameters

__all__ = ["entries"]

NUM_CLASSES: Final = 10
MOST_PARAMETERS: Final = 32_000_000

# The smallest model of each of timm's modules, and of families that share a module with others.
_NAMES: Final = [
    "beit_base_patch16_224",
    "halonet_h1",
    "test_byobnet",
    "repvgg_a0",
    "mobileone_s0",
    "gernet_s",
    "bat_resnext26ts",
    "cait_xxs24_224",
    "coat_tiny",
    "convit_tiny",
    "convmixer_1024_20_ks9_p14",
    "test_convnext",
    "cpubone_nano",
    "crossvit_tiny_240",
    "csatv2",
    "cs3darknet_focus_s",
    "darknet53",
    "cspnext_tiny",
    "davit_tiny",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla60_res2next",
    "dla34",
    "dpn107",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "mobilenetv2_035",
    "efficientnet_b0",
    "mnasnet_small",
    "mixnet_s",
    "fbnetc_100",
    "tinynet_e",
    "spnasnet_100",
    "semnasnet_075",
    "efficientvim_m1",
    "efficientvit_b0",
    "efficientvit_m0",
    "vit_tiny_patch16_dinov3_qkvb",
    "eva02_tiny_patch14_224",
    "fasternet_t0",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "ghostnet_050",
    "hardcorenas_b",
    "hgnetv2_b0",
    "hgnet_tiny",
    "hiera_tiny_224",
    "hieradet_small",
    "sam2_hiera_tiny",
    "hrnet_w18_small",
    "iformer_t",
    "inception_next_atto",
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "lcnetv2_small",
    "lcnet_050",
    "levit_128s",
    "lowformer_b0",
    "test_mambaout",
    "test_coatnet",
    "maxvit_tiny_rw_224",
    "poolformerv2_s12",
    "convformer_s18",
    "caformer_s18",
    "gmlp_ti16_224",
    "mixer_s32_224",
    "resmlp_12_224",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small_035",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "naflexvit_base_patch16_siglip",
    "nest_tiny",
    "nextvit_small",
    "test_nfnet",
    "dm_nfnet_f0",
    "pit_ti_224",
    "pvt_v2_b0",
    "qwen3_vit_88m",
    "rdnet_tiny",
    "regnetx_002",
    "regnety_002",
    "regnetz_005",
    "repghostnet_050",
    "repvit_m0_9",
    "res2net50_14w_8s",
    "resnest14d",
    "test_resnet",
    "resnext26ts",
    "seresnext26d_32x4d",
    "ecaresnet26t",
    "resnetv2_18",
    "rexnet_100",
    "selecsls42",
    "legacy_seresnet18",
    "sequencer2d_s",
    "shvit_s1",
    "skresnet18",
    "starnet_s050",
    "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224",
    "tresnet_m",
    "twins_svt_small",
    "twins_pcpvt_small",
    "vgg11",
    "visformer_tiny",
    "test_vit",
    "vit_tiny_r_s16_p8_224",
    "test_vit_relpos",
    "samvit_base_patch16_224",
    "vitamin_small_224",
    "volo_d1_224",
    "ese_vovnet19b_slim_dw",
    "legacy_xception",
    "xception41p",
    "xcit_nano_12_p8_224",
]

_SHALLOW: Final[tuple[dict[str, Any], ...]] = (
    {"depth": 2},
    {"depth": 2, "embed_dim": 192, "num_heads": 3},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"num_features": 256},
    {"block_config": (2, 2, 2, 2)},
    {},
)


def entries() -> Iterator[Entry]:
    """One for each family."""
    for name in _NAMES:
        yield Entry(source="timm", name=name, kind="image", make=partial(_case, name))


def _case(name: str) -> Case:
    import timm

    if not timm.is_model(name):
        raise Unfit("this release of timm does not have it")
    said = ""
    for side in (64, None):
        for depth in _SHALLOW:
            options = {**depth, **({} if side is None else {"img_size": side})}
            for kwargs in (options, depth) if side else (options,):
                try:
                    make = partial(timm.create_model, name, num_classes=NUM_CLASSES, **kwargs)
                    if num_parameters(make) > MOST_PARAMETERS:
                        raise Unfit("no argument makes it small")
                    model = make().train()
                    make_batch = image_batches(side or model.default_cfg["input_size"][-1])
                    with torch.no_grad():
                        class_loss(make_batch(2, 0), model(make_batch(2, 0)[0]))
                except Exception as error:
                    said = said or f"{type(error).__name__}: {error}"
                    continue
                return case_of(model, make_batch, class_loss, "first")
    raise Unfit(said)


def image_batches(side: int) -> Any:
    """``(batch_size, seed)`` to images [B, 3, side, side] and labels [B]."""

    def make(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(batch_size, 3, side, side, generator=generator)
        return images, torch.randint(NUM_CLASSES, (batch_size,), generator=generator)

    return make


def class_loss(batch: Any, output: Any) -> Tensor:
    """Mean cross entropy; of several heads, the sum."""
    heads = output if isinstance(output, (tuple, list)) else [output]
    return torch.stack([nn.functional.cross_entropy(head, batch[1]) for head in heads]).sum()
