"""nnScaler 0.8, in an environment of its own, from its source: on GitHub, or in the folder ``nnscaler-source`` of the peers.

Python 3.11, transformers 4.48 and this project's torch, which is newer than it asks for: ``_nnscaler_rank.py`` adapts it.
"""

from __future__ import annotations

from benchmarks._peers._beside import environment, source

__all__ = ["prepare"]

TORCH = ("torch==2.13.0", "setuptools<81", "wheel", "numpy")
"""The build of torch that everything else is measured with."""

OURS = ("pydantic>=2.7", "PyYAML", "rich", "typer", "jinja2", "cloudpickle>=3", "highspy", "scipy")
"""What this project's own modules import, of which a rank beside us uses some."""

RPC = ("grpcio", "grpcio-health-checking", "protobuf<8")
_OWN = ("pybind11", "dill", "matplotlib", "more-itertools", "psutil", "pulp", "tqdm", "regex")


def prepare() -> str:
    """Makes the environment and fetches the source, if they are not there; the reason if that fails."""
    return environment(
        "nnscaler", (TORCH, (*OURS, *RPC), (*_OWN, "transformers==4.48.3", "tensorboard"))
    ) or source(
        "nnscaler",
        "https://github.com/microsoft/nnscaler",
        "1585c15",
        ("setup.py", "build_ext", "--inplace"),
    )
