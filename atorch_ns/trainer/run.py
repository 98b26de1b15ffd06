"""A training run as a command, and its log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atorch_ns.trainer.trainer import Trainer


def set_default_logger_level(level: str | int) -> None:
    """Shows the log of this package from a level on, such as ``INFO``, on standard error."""
    logger = logging.getLogger("atorch_ns")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter(
                "%(asctime)s | %(levelname)s | %(name)s | %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
            )
        )
        logger.addHandler(handler)
    logger.setLevel(level)


def train(argv: Sequence[str]) -> Trainer:
    """Trains as ``-f config.yaml`` and overrides say, and shows how it goes; the log is as before afterwards."""
    logger = logging.getLogger("atorch_ns")
    level, handlers = logger.level, list(logger.handlers)
    set_default_logger_level("INFO")
    try:
        trainer = Trainer(argv)
        trainer.run()
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    return trainer
