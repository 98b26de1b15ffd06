"""The checks that every method must pass, built in or not, for a test suite to inherit.

::

    class TestMyMethod(MethodConformance):
        method = MyMethod
        configs = [None, {"level": 2}, "shorthand"]
        bad_configs = [({"levle": 2}, "levle"), ({"level": -1}, "level")]

Run by pytest with ``OMP_NUM_THREADS=1``, since ranks are forked. The method is found by its name, so its
distribution must be installed (``pip install -e .``) with an entry point in the group ``atorch_ns.methods``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.overrides import TorchFunctionMode

from atorch_ns.api import auto_accelerate
from atorch_ns.cluster import Cluster
from atorch_ns.errors import StrategyError
from atorch_ns.method import Chosen, Method, MethodConfig, load_registry, resolve
from atorch_ns.method.method import fit_config
from atorch_ns.profile import Profile
from atorch_ns.strategy import Plan, Strategy
from atorch_ns.testing.models import SyntheticDataset, get_case
from atorch_ns.testing.parity import (
    Trajectory,
    accelerate_case,
    accelerated_run,
    assert_parity,
    assert_ranks_agree,
    compare,
    reference_run,
)
from atorch_ns.testing.workers import catch_ranks, run_ranks


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Random states and the settings of torch are the same after the block as before."""
    before = {name: read() for name, read in _READERS.items()}
    yield
    changes = [name for name, read in _READERS.items() if read() != before[name]]
    assert not changes, f"changed: {', '.join(changes)}"


_READERS: Mapping[str, Callable[[], Any]] = {
    "the random state of torch": lambda: torch.get_rng_state().tolist(),
    "the random state of Python": random.getstate,
    "the random state of numpy": lambda: repr(np.random.get_state(legacy=False)),  # too few items to shorten
    "torch's default dtype": torch.get_default_dtype,
    "torch's number of threads": torch.get_num_threads,
    "grad mode": torch.is_grad_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the precision of matrix products": torch.get_float32_matmul_precision,
}


class MethodConformance:
    """Inherit, name the class ``Test…``, and say which method is meant.

    Class attributes:
        method: the method's class.
        configs: configs as users write them, shorthand among them; ``None`` for the defaults.
        bad_configs: pairs of a config to refuse and the key that the refusal names, ``None`` for the whole.
        partners: other methods that a strategy needs for the method to work.
        cases: the models it is tried on, of :mod:`atorch_ns.testing.models`.
        num_ranks: the world size of the runs on several ranks.
        failing_rank: the rank that fails alone, where one is made to; from the end if negative.
        param_tol, loss_tol: tolerances of a parameter, in units of its update, and of a loss.
        global_batch: samples a step. Reduced precision needs many: ``BF16_GLOBAL_BATCH``.
        reference: further arguments of ``reference_run``, as ``autocast_dtype`` for the method's precision.
    """

    method: ClassVar[type[Method[Any]]]
    configs: ClassVar[Sequence[Any]] = (None,)
    bad_configs: ClassVar[Sequence[tuple[Any, str | None]]] = ()
    partners: ClassVar[Sequence[Any]] = ()
    cases: ClassVar[Sequence[str]] = ("mlp", "tied_llama")
    num_ranks: ClassVar[int] = 2
    failing_rank: ClassVar[int] = -1
    param_tol: ClassVar[float] = 2e-4
    loss_tol: ClassVar[float] = 1e-5
    global_batch: ClassVar[int] = 8
    reference: ClassVar[Mapping[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Gives every test the configs and cases that it asks for; called by pytest."""
        for name, values in (
            ("config", self.configs),
            ("bad_config", self.bad_configs),
            ("case_name", self.cases),
            ("call", (1, 200, None)),  # the first call, one in the middle, the end
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=[str(value) for value in values])

    # ---- what it is

    def test_the_class_is_final_named_and_documented(self) -> None:
        """One small final class with a name, a phase and a summary."""
        kind = self.method
        assert getattr(kind, "__final__", False), f"decorate {kind.__name__} with typing.final"
        summary = kind().summary
        assert summary.strip(), f"{kind.__name__} needs a docstring"
        assert not summary.startswith(kind.name), "the summary says what it does, not how it is called"

    def test_it_is_found_by_its_name(self) -> None:
        """The method's distribution registers it as an entry point, under its name and its aliases."""
        registry = load_registry()
        for name in (self.method.name, *self.method.aliases):
            assert name in registry, f"no entry point of the group atorch_ns.methods gives {name!r}"
            assert type(registry.get(name)) is self.method, f"{name!r} is another method's name"

    def test_every_setting_is_described(self) -> None:
        """The description of each field feeds the help texts and the documentation."""
        silent = [name for name, field in self.method.Config.model_fields.items() if not field.description]
        assert not silent, f"{self.method.Config.__name__} does not describe {', '.join(silent)}"
        assert (self.method.Config.__doc__ or "").strip(), f"{self.method.Config.__name__} needs a docstring"

    def test_the_defaults_are_the_empty_config(self) -> None:
        """``{}``, ``None`` and ``Config()`` are one config, and it is written as nothing."""
        kind = self.method.Config
        default = kind()
        forms = (kind.model_validate(None), kind.model_validate({}))
        assert all(form == default for form in forms), f"{forms} are not {default}"
        assert default.as_json() == {}, f"the defaults are written as {default.as_json()}"

    # ---- its config

    def test_a_config_cannot_be_changed(self, config: Any) -> None:
        """Configs are shared and compared: frozen, and equal ones have equal hashes."""
        first, second = self._validate_config(config), self._validate_config(config)
        assert first == second, f"{first} and {second} are made of the same"
        assert hash(first) == hash(second), "equal configs have different hashes"
        open_fields = [name for name in type(first).model_fields if _can_be_assigned(first, name)]
        assert not open_fields, f"{type(first).__name__} lets {', '.join(open_fields)} be assigned to"

    def test_a_config_survives_its_file(self, config: Any) -> None:
        """Through JSON and YAML, as the user wrote it and as it is written once it is resolved."""
        settings = self._validate_config(config)
        for form in (config, settings.as_json()):
            strategy = Strategy([(self.method.name, form)])
            for suffix in (".json", ".yaml"):
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / f"strategy{suffix}"
                    strategy.save(path)
                    read = Strategy.load(path)
                    assert read == strategy, f"{strategy} is read as {read}"
                    assert read.to_bytes(suffix=suffix) == path.read_bytes(), (
                        "written again, the file differs"
                    )
                again = self.method.Config.model_validate(read[self.method.name])
                assert again == settings, f"{settings} is read as {again}"
        json.dumps(settings.as_json(), allow_nan=False)

    def test_a_bad_config_is_refused(self, bad_config: tuple[Any, str | None]) -> None:
        """The StrategyError names method and key."""
        config, key = bad_config
        profile = Profile.of(get_case(self.cases[0]).build())
        try:
            strategy = Strategy([*self.partners, (self.method.name, config)])
            resolve(strategy, self._make_cluster(), load_registry(), profile=profile)
        except StrategyError as error:
            keys = {(problem.method, problem.key) for problem in error.problems}
            assert (self.method.name, key) in keys, f"{config!r}: the refusal blames {keys}"
        else:
            raise AssertionError(f"{config!r} is accepted")

    # ---- what it says without doing anything

    def test_the_plan_is_pure(self, config: Any) -> None:
        """Planning twice changes nothing more, and equal questions have equal answers."""
        choice = self._fit_method(config)
        for plan in (Plan(), Plan(axes=(("data", self.num_ranks),), gradient_sync="all_reduce")):
            before = dataclasses.replace(plan)
            with nothing_changes():
                once = choice.method.plan(plan, choice.config)
                again = choice.method.plan(plan, choice.config)
            assert plan == before, "planning changes the plan that is given"
            assert once == again, f"the same question gives {once} and {again}"
            assert choice.method.plan(once, choice.config) == once, "planning twice adds to the plan"

    def test_checks_are_pure(self, config: Any) -> None:
        """Asking what is wrong, what is needed and why it is here changes nothing."""
        choice = self._fit_method(config)
        method, settings, cluster = choice.method, choice.config, self._make_cluster()
        profile = Profile.of(get_case(self.cases[0]).build())
        before = copy.deepcopy((settings, cluster, profile))

        def ask() -> list[Any]:
            return [
                fit_config(method, settings, cluster),
                method.check(settings, cluster, profile),
                method.check(settings, cluster, None),
                method.roles(settings),
                list(method.needs(settings, cluster)),
                list(method.notices(settings, cluster)),
                method.unavailable(settings, cluster),
                method.explain(settings, cluster),
            ]

        with nothing_changes():
            first, second = ask(), ask()
        assert first == second, f"asked twice, the method says {first} and {second}"
        assert first[0] == settings, "fitting twice changes the config again"
        assert first[1] == [], f"the config {config!r} is refused: {first[1]}"
        assert (settings, cluster, profile) == before, "asking changes config, cluster or profile"

    def test_it_offers_a_search_only_what_it_accepts(self) -> None:
        """Every config among ``options`` passes ``check`` and can be written."""
        method, cluster = self.method(), self._make_cluster()
        profile = Profile.of(get_case(self.cases[0]).build())
        for option in method.options(profile, cluster):
            assert isinstance(option, self.method.Config), (
                f"{option!r} is not a {self.method.Config.__name__}"
            )
            assert method.check(option, cluster, profile) == [], f"{option} is offered and refused"
            again = self.method.Config.model_validate(option.as_json())
            assert again == option, f"{option} is read as {again}"

    def test_it_explains_itself(self, config: Any) -> None:
        """A clause for the report, without a full stop of its own."""
        choice = self._fit_method(config)
        text = choice.method.explain(choice.config, self._make_cluster())
        assert text.strip(), "explain gives nothing"
        assert "\n" not in text, "explain gives several lines"

    # ---- what it does

    def test_one_process_trains_the_same_model(self, config: Any, case_name: str) -> None:
        """Three times in one process: alike to the bit, and like plain torch."""
        runs = self._three_runs(case_name, self._make_strategy(config))
        assert_ranks_agree(runs)
        self._assert_like_plain_torch(case_name, runs[0])

    def test_ranks_train_the_same_model(self, config: Any, case_name: str) -> None:
        """Two runs on several ranks match plain torch in one process, and the ranks agree."""
        get_case(case_name).build()  # what it imports, every rank would import anew
        ranks = run_ranks(
            self._three_runs, self.num_ranks, args=(case_name, self._make_strategy(config)), timeout_s=120
        )
        for runs in zip(*ranks, strict=True):  # the same run of all ranks
            assert_ranks_agree(list(runs))
            self._assert_like_plain_torch(case_name, runs[0])

    def test_a_failure_on_one_rank_ends_all_with_its_cause(self, call: int | None) -> None:
        """An error at a call inside ``apply``, or at its end, on one rank alone: no rank is left waiting."""
        get_case(self.cases[0]).build()
        outcomes = catch_ranks(
            self._fail_on_one_rank,
            self.num_ranks,
            args=(self._make_strategy(self.configs[0]), call),
            timeout_s=60,
        )
        for outcome in outcomes:
            assert "on one rank alone" in outcome.describe(), f"not the cause: {outcome.describe()}"

    def test_what_the_caller_gave_is_left_alone(self, config: Any) -> None:
        """The strategy, the arguments, the random states and the settings of torch are as before."""
        case = get_case(self.cases[0])
        options: dict[str, Any] = {
            "load_strategy": self._make_strategy(config),
            "optim_args": {"lr": 1e-3, "betas": [0.9, 0.99]},
            "dataloader_args": {"batch_size": self.global_batch, "drop_last": True},
        }
        before = copy.deepcopy(options)
        with nothing_changes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, result, _ = auto_accelerate(
                case.build(),
                torch.optim.AdamW,
                SyntheticDataset(case, self.global_batch),
                case.loss_func,
                model_input_format=case.model_input_format,
                **options,
            )
            assert options == before, f"{before} became {options}"
        assert result is not None, "auto_accelerate gives no result"
        rows = {row.name: row.why for row in result.report.rows}
        text = rows.get(self.method.name) or " ".join(result.report.notes)
        assert text.strip(), "the report does not mention the method"

    # ---- helpers

    def _make_cluster(self) -> Cluster:
        cluster = Cluster.detect()
        return dataclasses.replace(
            cluster, world_size=self.num_ranks, local_world_size=self.num_ranks, distributed=True
        )

    def _validate_config(self, config: Any) -> MethodConfig:
        value = Strategy([(self.method.name, config)])[self.method.name]
        return self.method.Config.model_validate(value)

    def _fit_method(self, config: Any) -> Chosen:
        method = self.method()
        return Chosen(method, fit_config(method, self._validate_config(config), self._make_cluster()))

    def _make_strategy(self, config: Any) -> list[Any]:
        return [*self.partners, (self.method.name, config)]

    def _three_runs(self, case_name: str, strategy: list[Any]) -> list[Trajectory]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = get_case(case_name)
            return [accelerated_run(case, strategy, global_batch=self.global_batch) for _ in range(3)]

    def _fail_on_one_rank(self, strategy: list[Any], call: int | None) -> None:
        if dist.get_rank() == self.failing_rank % self.num_ranks:
            self.method.apply = _make_failing_apply(self.method.apply, call)  # type: ignore[method-assign]
        accelerate_case(get_case(self.cases[0]), strategy, global_batch=self.global_batch)

    def _assert_like_plain_torch(self, case_name: str, run: Trajectory) -> None:
        plain = reference_run(get_case(case_name), global_batch=self.global_batch, **self.reference)
        assert_parity(compare(plain, run), param_tol=self.param_tol, loss_tol=self.loss_tol)


def _make_failing_apply(apply: Callable[..., None], call: int | None) -> Callable[..., None]:

    class Fails(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            if self.calls == call:  # counted from 1
                raise ZeroDivisionError("on one rank alone")
            return func(*args, **(kwargs or {}))

    def failing(*args: Any) -> None:
        with Fails():
            apply(*args)
        raise ZeroDivisionError("on one rank alone")  # call is None, or more than were made

    return failing


def _can_be_assigned(config: MethodConfig, name: str) -> bool:
    try:
        setattr(config, name, getattr(config, name))
    except ValidationError:
        return False
    return True
