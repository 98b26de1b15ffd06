"""nnScaler's Trainer: a training run from a YAML file or from Python, over every strategy there is.

::

    trainer = Trainer(train_args=TrainerArgs(...))     # or: atorch-ns train -f config.yaml
    trainer.run()
"""

from atorch_ns.parallel import ComputeConfig
from atorch_ns.trainer.args import (
    CheckpointConfig,
    DataloaderConfig,
    DatasetConfig,
    DatasetSamplerConfig,
    HookConfig,
    HookMapConfig,
    LogConfig,
    LRSchedulerConfig,
    ModelConfig,
    ModuleParallelizeConfig,
    OptimizerConfig,
    OptionalComputeConfig,
    TrainerArgs,
)
from atorch_ns.trainer.checkpoints import TrainStatus
from atorch_ns.trainer.hooks import AggregatedOutputs, TrainHook, TrainStepMetrics, ValMetrics
from atorch_ns.trainer.loggers import LoggerBase, TensorBoardLogger, WandbLogger, set_default_logger_level
from atorch_ns.trainer.trainer import Trainer

__all__ = [
    "AggregatedOutputs", "CheckpointConfig", "ComputeConfig", "DataloaderConfig", "DatasetConfig",
    "DatasetSamplerConfig", "HookConfig", "HookMapConfig", "LRSchedulerConfig", "LogConfig", "LoggerBase",
    "ModelConfig", "ModuleParallelizeConfig", "OptimizerConfig", "OptionalComputeConfig", "TensorBoardLogger",
    "TrainHook", "TrainStatus", "TrainStepMetrics", "Trainer", "TrainerArgs", "ValMetrics", "WandbLogger",
    "set_default_logger_level",
]  # fmt: skip
