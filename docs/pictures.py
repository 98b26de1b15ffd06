"""Writes the pictures of the guides anew: ``python docs/pictures.py``, a minute. Figures differ by machine and run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from atorch_ns import auto_accelerate
from atorch_ns.pipeline import PipelineStep, StageCosts
from atorch_ns.report.pictures import save_pictures

FOLDER = Path(__file__).parent / "_static"
WIDTH = 64
LIMIT_MIB = 2.7  # a little less than the plain strategy needs, so that there is something to find


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to the same."""
        output: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return output


class Blocks(nn.Module):
    """A model of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to the same."""
        output: torch.Tensor = self.blocks(x)
        return output


def main() -> None:
    """A small search in one process, and a pipeline as it is simulated."""
    _, result, _ = auto_accelerate(
        Blocks(),
        torch.optim.AdamW,
        torch.randn(64, 16, WIDTH),
        lambda batch, output: (output - batch).float().square().mean(),
        dataloader_args={"batch_size": 8},
        excluded=["compile"],  # which waits for a compiler longer than the search takes
        search={"max_trials": 5, "memory_limit_gib": LIMIT_MIB / 1024},
    )
    assert result is not None
    step = PipelineStep(
        schedule="1F1B",
        num_ranks=4,
        num_micro_batches=8,
        stages_per_rank=1,
        costs=StageCosts.equal(4, forward=1e-3, backward_input=1e-3, backward_weight=1e-3),
    )
    report = result.report.with_pipeline(step)
    FOLDER.mkdir(exist_ok=True)
    save_pictures(report, FOLDER)


if __name__ == "__main__":
    main()
