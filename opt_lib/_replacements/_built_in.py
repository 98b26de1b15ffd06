"""The built-in replacements, in the order in which they are tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from opt_lib._replacements._base import Replacement, Requirements
from opt_lib._replacements._kernels import APEX, LIGER
from opt_lib._replacements.attention import AttentionSwitch
from opt_lib._replacements.linear_cross_entropy import NOT_OVER, LinearCrossEntropy
from opt_lib._replacements.norms import FusedLayerNorm, FusedRmsNorm
from opt_lib._replacements.rope import LigerRope
from opt_lib._replacements.swiglu import LigerSwiglu

__all__ = ["BUILT_IN"]

_HALF: Final = frozenset({"float16", "bfloat16"})
_CUDA: Final = frozenset({"cuda"})
# How a division is found and proved runs the model on small tensors of the CPU, where flash-attn has no kernel.
_WHOLE_MODEL: Final = frozenset({"tensor", "sequence", "pipeline"})

BUILT_IN: Final[tuple[Replacement, ...]] = (
    # Where several want the same modules, the preferred one stands first: each works on what is left to it.
    AttentionSwitch(
        name="flash_attention_3",
        implementation="flash_attention_3",
        requirements=Requirements(
            package="flash_attn_interface",
            install="build it from the folder hopper of flash-attention's sources",
            imports=("flash_attn_interface",),
            device_types=_CUDA,
            capability=(9, 0),
            dtypes=_HALF,
            not_over=_WHOLE_MODEL,
        ),
        switches=("eager", "sdpa"),
    ),
    AttentionSwitch(
        name="flash_attention",
        implementation="flash_attention_2",
        requirements=Requirements(
            package="flash_attn",
            install="install it with: pip install --no-build-isolation flash-attn",
            imports=("flash_attn",),
            device_types=_CUDA,
            capability=(8, 0),
            dtypes=_HALF,
            not_over=_WHOLE_MODEL,
        ),
        switches=("eager", "sdpa"),
    ),
    AttentionSwitch(name="sdpa_attention", implementation="sdpa"),
    LigerRope(),
    LigerSwiglu(),
    FusedRmsNorm(name="liger_rms_norm", kernel="liger", requirements=LIGER),
    FusedRmsNorm(name="apex_rms_norm", kernel="apex", requirements=APEX),
    FusedRmsNorm(),
    FusedLayerNorm(name="apex_layer_norm", kernel="apex", requirements=APEX),
    FusedLayerNorm(),
    LinearCrossEntropy(
        name="liger_fused_linear_cross_entropy",
        kernel="liger",
        requirements=replace(LIGER, not_over=NOT_OVER),
    ),
    LinearCrossEntropy(),
)
