"""Peers that run from their sources, in environments of their own: from GitHub, or from ``NAME-source`` in the peers' folder.

All with this project's torch, which is newer than nnScaler asks for: ``_nnscaler_rank.py`` adapts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks._peers._beside import environment, source

__all__ = ["SOURCES", "prepare"]

TORCH = ("torch==2.13.0", "setuptools<81", "wheel", "numpy")
"""The build of torch that everything else is measured with."""

OURS = ("pydantic>=2.7", "PyYAML", "rich", "typer", "jinja2", "cloudpickle>=3", "highspy", "scipy")
"""What this project's own modules import, of which a rank beside us uses some."""

RPC = ("grpcio", "grpcio-health-checking", "protobuf<8")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A repository at a commit.

    Attributes:
        repository: on GitHub.
        commit: short hash.
        needs: packages beside torch and what our modules import.
        build: arguments of the interpreter that compile it.
    """

    repository: str
    commit: str
    needs: Sequence[str]
    build: Sequence[str] = ()


SOURCES: Mapping[str, _Source] = {
    "nnScaler": _Source(
        repository="microsoft/nnscaler",
        commit="1585c15",
        needs=(
            *("pybind11", "dill", "matplotlib", "more-itertools", "psutil", "pulp", "tqdm", "regex"),
            *("transformers==4.48.3", "tensorboard"),
        ),
        build=("setup.py", "build_ext", "--inplace"),
    ),
    # transformers 4.46 is the newest that Merak works with.
    "Merak": _Source(
        repository="HPDL-Group/Merak",
        commit="1593043",
        needs=("transformers==4.46.3", "accelerate", "tensorboard", "sentencepiece"),
    ),
    "AutoParallel": _Source(
        repository="meta-pytorch/autoparallel",
        commit="a54c252",
        needs=("transformers==5.23.0", "typing_extensions", "filecheck", "pulp"),
    ),
}
"""By the peer's name in tables."""


def prepare(peer: str) -> str:
    """Makes a peer's environment and fetches its source, if they are not there; the reason if that fails."""
    name, one = peer.lower(), SOURCES[peer]
    return environment(name, (TORCH, (*OURS, *RPC), one.needs)) or source(
        name, f"https://github.com/{one.repository}", one.commit, one.build
    )
