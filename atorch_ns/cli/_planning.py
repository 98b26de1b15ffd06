"""From the options of a verb to a profile and a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from atorch_ns.cli._input_format import check_format, chosen_format
from atorch_ns.cli._objects import build_model, gibibytes, load_object, load_sample
from atorch_ns.cli._words import ended, told
from atorch_ns.errors import InputError

if TYPE_CHECKING:
    from atorch_ns.cluster import Cluster
    from atorch_ns.profile import Profile
    from atorch_ns.search import SearchSettings

__all__ = [
    "Asked",
    "make_cluster",
    "make_profile",
    "make_settings",
    "read_file",
    "say",
    "say_where",
    "write_file",
]


class Asked(NamedTuple):
    """What is to be planned for, as the options say it."""

    model: str | None
    sample: str | None
    loss: str | None = None
    optimizer: str = "torch.optim.AdamW"
    input_format: str = "auto"
    profile: Path | None = None


def say(text: str) -> None:
    """Talk, on standard error: standard output is for the result."""
    typer.echo(text, err=True)


def make_cluster(spec: str | None) -> Cluster:
    """The cluster described, or this machine as one process, with figures for its hardware."""
    from atorch_ns.cluster import Cluster

    if spec is not None:
        return Cluster.from_spec(spec)
    return Cluster.detect().with_hardware()


def say_where(spec: str | None, cluster: Cluster) -> None:
    """Says what is planned for where nobody said it; once the other options are known to be of use."""
    if spec is None:
        say(
            f"no --cluster was given: planning for this machine, {cluster.world_size} × {cluster.device_type}"
        )


def make_profile(asked: Asked, *, device: str) -> tuple[Profile, float]:
    """The profile, and the seconds that it took.

    Raises:
        InputError: if options are missing or cannot be used; all that are missing at once.
    """
    from atorch_ns.engine._plan_offline import profile_offline
    from atorch_ns.profile import Profile

    if asked.profile is not None:
        return Profile.from_json(read_file(asked.profile)), 0.0
    missing = [name for name, value in (("--model", asked.model), ("--sample", asked.sample)) if not value]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} missing. Give --model pkg.mod:build and --sample pkg.mod:sample, or "
            "--profile with a file that --save-profile wrote."
        )
    wanted = check_format(asked.input_format)
    assert asked.model is not None
    assert asked.sample is not None
    model, how = build_model(asked.model)
    say(how)
    sample = load_sample(asked.sample)
    chosen, why = chosen_format(wanted, model, sample)
    if why:
        say(why)
    loss = None if asked.loss is None else load_object(asked.loss, option="--loss")
    no_optimizer = asked.optimizer.lower() == "none"
    optimizer = None if no_optimizer else load_object(asked.optimizer, option="--optimizer")
    say("profiling one step on fake tensors …")
    began = time.perf_counter()
    try:
        profile = profile_offline(
            model,
            sample,
            loss=loss,
            optimizer=optimizer,
            input_format=chosen,
            device=device,
        )
    except SystemExit as error:
        raise InputError(f"the model or the loss ended the process: {told(error)}.") from error
    return profile, time.perf_counter() - began


def make_settings(*, objective: str = "time", memory_limit: str | None = None) -> SearchSettings:
    """The settings of a search.

    Raises:
        InputError: if they cannot be used.
    """
    from pydantic import ValidationError

    from atorch_ns.search import SearchSettings

    limit = gibibytes(memory_limit)
    try:
        return SearchSettings.model_validate({"objective": objective, "memory_limit_gib": limit})
    except ValidationError as error:
        problems = "; ".join(f"--{issue['loc'][0]}: {issue['msg']}" for issue in error.errors())
        raise InputError(ended(problems)) from None


def read_file(path: Path) -> str:
    """A file's text.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise InputError(ended(f"{path} cannot be read: {why}")) from None


def write_file(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        InputError: if the place cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(ended(f"{path} cannot be written: {error.strerror or error}")) from None
