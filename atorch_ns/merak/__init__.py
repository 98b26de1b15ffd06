"""Merak's front end: 3D parallelism for models of Hugging Face, in their own Trainer.

::

    from atorch_ns.merak import MerakArguments, MerakTrainer, init

    init(dp=2, tp=1, pp=2)
    trainer = MerakTrainer(model, MerakArguments("out", gradient_accumulation_steps=4), train_dataset=data)
    trainer.train()

``import atorch_ns.merak as Merak`` runs scripts that were written for Merak.
"""

from atorch_ns.errors import MissingPackageError
from atorch_ns.merak import mpu
from atorch_ns.merak.mapping import MP_MODEL_MAPPING, set_tp_layer_lists
from atorch_ns.merak.mpu import get_grid, get_topo, init, reset

try:
    from atorch_ns.merak.args import MerakArguments
    from atorch_ns.merak.trainer import MerakTrainer
except ModuleNotFoundError as error:
    raise MissingPackageError(
        str(error.name), needed_by="atorch_ns.merak", install="pip install 'atorch-ns[merak]'"
    ) from error

__all__ = [
    "MP_MODEL_MAPPING", "MerakArguments", "MerakTrainer", "get_grid", "get_topo", "init", "mpu", "reset",
    "set_tp_layer_lists",
]  # fmt: skip
