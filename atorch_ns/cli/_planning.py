"""Inputs of planning subcommands from options and files: cluster, profile, settings and strategies."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from atorch_ns.capture.user_code import build_model, gibibytes, load_object, load_sample
from atorch_ns.errors import InputError, LayoutError, StrategyError, StrategyFileError
from atorch_ns.text import with_period

if TYPE_CHECKING:
    from torch import nn

    from atorch_ns.cluster import Cluster
    from atorch_ns.engine.input_format import InputFormat
    from atorch_ns.profile import Profile
    from atorch_ns.report import TrainingReport
    from atorch_ns.search import SearchSettings
    from atorch_ns.strategy import Strategy


class ModelOptions(NamedTuple):
    """Options that name the model, its training and the cluster."""

    model: str | None
    sample: str | None
    loss: str | None = None
    optimizer: str = "torch.optim.AdamW"
    input_format: str = "auto"
    profile: Path | None = None
    cluster: str | None = None


class PlanningInputs(NamedTuple):
    """Inputs read from :class:`ModelOptions`.

    Attributes:
        options: the options.
        cluster: the cluster to plan for.
        profile: profile from a file; ``None`` where the model is to be profiled.
        model: the model, a sample of its data, and the format in which it takes the sample.
        loss, optimizer: the named loss and optimizer.
    """

    options: ModelOptions
    cluster: Cluster
    profile: Profile | None
    model: Any = None
    loss: Any = None
    optimizer: Any = None


def all_or_problems(*actions: Callable[[], Any]) -> list[Any]:
    """Runs each action and returns the results.

    Raises:
        AtorchError: the error of the one that refuses; for several, an InputError with all their messages.
    """
    results, refusals = [], []
    for action in actions:
        try:
            results.append(action())
        except (InputError, LayoutError, StrategyError) as refusal:
            refusals.append(refusal)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise InputError("\n".join(dict.fromkeys(map(str, refusals))))  # each once
    return results


def say(text: str) -> None:
    """Prints on standard error: standard output is for the result."""
    typer.echo(text, err=True)


def terminal_columns() -> int:
    """Columns of standard output: the terminal's, else those of a report in a file."""
    from atorch_ns.report.text.tables import TEXT_WIDTH

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else TEXT_WIDTH


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Prints plain values on standard output."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


def one_node(world_size: int, device_type: str = "cpu") -> Cluster:
    """A cluster of one node, with the packages of this machine."""
    from atorch_ns.cluster import Cluster, installed_packages

    return Cluster(
        world_size=world_size,
        local_world_size=world_size,
        distributed=world_size > 1,
        device_type=device_type,
        packages=installed_packages(),
    )


def make_cluster(spec: str | None) -> Cluster:
    """The cluster described, or this machine as one process, with figures for its hardware."""
    from atorch_ns.planning.offline import cluster_of

    return cluster_of(spec)


def make_model(options: ModelOptions) -> tuple[nn.Module, Any, InputFormat]:
    """Makes the model, the sample, and the format in which the model takes it.

    Raises:
        InputError: if options are missing or cannot be used; with all of them.
    """
    values = {"--model": options.model, "--sample": options.sample}
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} missing. Give --model pkg.mod:build and --sample pkg.mod:sample, or "
            "--profile with a file that --save-profile wrote."
        )
    from atorch_ns.engine.input_format import check_format, chosen_format

    name, batch = options.model, options.sample
    assert name is not None
    assert batch is not None
    format_name, (model, how), sample = all_or_problems(
        lambda: check_format(options.input_format), lambda: build_model(name), lambda: load_sample(batch)
    )
    say(how)
    input_format, why = chosen_format(format_name, model, sample)
    if why:
        say(why)
    return model, sample, input_format


def read_inputs(options: ModelOptions) -> PlanningInputs:
    """Reads the inputs that options name: the cluster, and the model with its training or a profile of it.

    Raises:
        InputError: if options are missing or cannot be used; with all of them.
    """
    from atorch_ns.profile import Profile
    from atorch_ns.report.report import read_text

    def read_cluster() -> Cluster:
        return make_cluster(options.cluster)

    if options.profile is not None:
        text = options.profile
        cluster, profile = all_or_problems(read_cluster, lambda: Profile.from_json(read_text(text)))
        return PlanningInputs(options, cluster, profile)
    no_optimizer = options.optimizer.lower() == "none"
    cluster, model, loss, optimizer = all_or_problems(
        read_cluster,
        lambda: make_model(options),
        lambda: None if options.loss is None else load_object(options.loss, option="--loss"),
        lambda: None if no_optimizer else load_object(options.optimizer, option="--optimizer"),
    )
    return PlanningInputs(options, cluster, None, model, loss, optimizer)


def make_profile(inputs: PlanningInputs) -> tuple[Profile, float]:
    """The profile, and the seconds that profiling took."""
    from atorch_ns.planning.offline import profile_offline

    profile, cluster, seconds = inputs.profile, inputs.cluster, 0.0
    if profile is None:
        model, sample, input_format = inputs.model
        say("profiling one step on fake tensors …")
        began = time.perf_counter()
        profile = profile_offline(
            model,
            sample,
            loss=inputs.loss,
            optimizer=inputs.optimizer,
            input_format=input_format,
            device=cluster.device_type,
        )
        seconds = time.perf_counter() - began
    if inputs.options.cluster is None:
        say(
            f"no --cluster was given: planning for this machine, {cluster.world_size} × {cluster.device_type}"
        )
    return profile, seconds


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
    except ValidationError as error:  # of an unknown objective, a negative limit
        problems = "; ".join(f"--{issue['loc'][0]}: {issue['msg']}" for issue in error.errors())
        raise InputError(with_period(problems)) from None


def read_strategy(text: str, option: str = "") -> Strategy:
    """A file (of a strategy, or of a report, which holds one), JSON text, or names with commas between them.

    Args:
        text: the option or argument as written.
        option: the option's name, for messages; empty for an argument.

    Raises:
        StrategyError: if it is none of these.
    """
    from atorch_ns.strategy import Strategy

    if text.lstrip()[:1] in ("[", "{"):
        return Strategy.load(text)
    if Path(text).exists():
        document = read_report_or_strategy(Path(text))
        return document if isinstance(document, Strategy) else document.strategy
    check_strategy_is_there(text, option)
    names = [name.strip() for name in text.split(",")]
    return Strategy(name for name in names if name)


def check_strategy_is_there(text: str, option: str = "") -> None:
    """Checks that a text which looks like a strategy file names one that exists; see :func:`read_strategy`.

    Raises:
        StrategyFileError: if it is not there.
    """
    is_file = text.lstrip()[:1] not in ("[", "{") and (Path(text).suffix or "/" in text)
    if is_file and not Path(text).exists():
        raise StrategyFileError(
            f"no such strategy file. Methods by name: {option} fsdp,checkpoint".replace("  ", " "),
            source=text,
        )


def read_report_or_strategy(path: Path) -> TrainingReport | Strategy:
    """The report or strategy that a file holds.

    Raises:
        InputError, StrategyError: if it holds neither.
    """
    from atorch_ns.report.report import KIND, TrainingReport
    from atorch_ns.strategy import Strategy

    if not path.exists():
        raise StrategyFileError("no such file", source=str(path))
    if path.suffix.lower() == ".html":
        raise InputError(f"{path} is the HTML page; give the report.json of the same search.")
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise StrategyFileError(f"cannot be read: {error.strerror or error}", source=str(path)) from None
    except ValueError:
        return Strategy.load(path)  # YAML, or broken JSON, whose place it reports
    is_report = isinstance(document, Mapping) and document.get("kind") == KIND
    return TrainingReport.load(path) if is_report else Strategy.load(path)
