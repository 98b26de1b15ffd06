"""Checkpoints that any strategy on any number of ranks can load, and plain weights in and out.

::

    checkpoint.save("runs", result)                          # runs/step-100, and it is the latest
    checkpoint.load("runs", result)["step"]                  # in another run, under another strategy
    checkpoint.resume("runs", result)                        # the same, or None where nothing was saved yet
    checkpoint.export_safetensors(result, "my-model")        # transformers' from_pretrained("my-model")
"""

from atorch_ns.checkpoint.export import Unmatched, export_state_dict, import_state_dict
from atorch_ns.checkpoint.folder import latest
from atorch_ns.checkpoint.load import load, resume
from atorch_ns.checkpoint.safetensors import export_safetensors, import_safetensors
from atorch_ns.checkpoint.save import PendingSave, save

__all__ = [
    "PendingSave", "Unmatched", "export_safetensors", "export_state_dict", "import_safetensors",
    "import_state_dict", "latest", "load", "resume", "save",
]  # fmt: skip
