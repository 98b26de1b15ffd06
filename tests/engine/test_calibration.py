"""Refit finds the factors that measurements were made with, and says little where little was measured."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from atorch_ns.cluster import Cluster, Device, Hardware, Link, Rate, cluster_from_spec
from atorch_ns.cluster.calibrate import measure
from atorch_ns.cluster.measured import measured_document, write_measured
from atorch_ns.engine import find
from atorch_ns.engine.calibration import Calibration, Factors, read_calibration, refit
from atorch_ns.engine.request import SearchRequest
from atorch_ns.errors import InputError
from atorch_ns.estimate import Estimate, MemoryParts, TimeParts
from atorch_ns.method import load_registry
from atorch_ns.search import Candidate, Row, SearchOutcome, SearchSetting, SearchSettings, TrialOutcome

SETTING = SearchSetting(
    model="tests.Model",
    num_parameters=1,
    world_size=4,
    num_nodes=1,
    device="H100-80GB",
    memory_limit_bytes=2**36,
    global_batch=8,
    num_tokens=1,
    fingerprint="f",
)
BF16 = (("amp_native", {"dtype": "bfloat16"}),)


def _estimate(computed: float, communicated: float, peak: float = 1e9) -> Estimate:
    return Estimate(
        memory=MemoryParts(peak, 0, 0, 0, 0, 0),
        time=TimeParts(computed, 0, communicated / 2, communicated / 2, 0, 0, 0, 0),
    )


def _row(number: int, steps: tuple[Any, ...], predicted: Estimate | None, trial: TrialOutcome | None) -> Row:
    candidate = Candidate(key=f"c{number}", steps=steps, label=f"c{number}", estimate=predicted)
    return Row(candidate=candidate, fate="lost", reason="", trial=trial, trial_number=number)


def _measured(seconds: float, peak: float = 1e9, status: Any = "ok") -> TrialOutcome:
    return TrialOutcome(status=status, step_seconds=(seconds,) * 5, peak_bytes=(0, int(peak)))


def _outcome(rows: list[Row]) -> SearchOutcome:
    return SearchOutcome(
        setting=SETTING,
        settings=SearchSettings(),
        rows=tuple(rows),
        best=rows[0].candidate.key if rows else None,
        stop_reason="",
        num_trials=len(rows),
        seconds=1.0,
    )


def _factors(outcome: SearchOutcome, actual: TrialOutcome | None = None) -> Factors:
    found = refit(outcome, actual, registry=load_registry())
    return found.factors("H100-80GB", 4)


def test_the_factors_are_found_again() -> None:
    draw = random.Random(5)
    rows = []
    for number in range(20):
        computed, communicated = draw.uniform(0.1, 1.0), draw.uniform(0.0, 1.0)
        steps, factor, memory = (BF16, 1.5, 1.1) if number % 2 else ((), 0.8, 0.9)
        noise = draw.gauss(1.0, 0.02)
        trial = _measured((factor * computed + 3.0 * communicated) * noise, memory * 1e9)
        rows.append(_row(number, steps, _estimate(computed, communicated), trial))
    found = _factors(_outcome(rows))
    assert found.compute["float32"] == pytest.approx(0.8, rel=0.1)
    assert found.compute["bfloat16"] == pytest.approx(1.5, rel=0.1)
    assert found.communication == pytest.approx(3.0, rel=0.1)
    assert found.memory == {"float32": pytest.approx(0.9), "bfloat16": pytest.approx(1.1)}
    assert found.num_trials == 20
    assert found.error_before > 0.3
    assert found.error_after < 0.05


def test_what_nothing_was_measured_of_stays_as_it_was() -> None:
    found = _factors(_outcome([_row(1, (), _estimate(1.0, 0.0), _measured(2.0))]))
    assert found.compute == {"float32": pytest.approx(2.0, rel=0.1)}
    assert found.communication == pytest.approx(1.0)
    assert found.seconds(_estimate(1.0, 1.0), "bfloat16") == pytest.approx(2.0)


def test_training_counts_as_much_as_all_trials() -> None:
    rows = [_row(number, (), _estimate(1.0, 0.0), _measured(1.0)) for number in range(9)]
    without = _factors(_outcome(rows))
    assert without.compute["float32"] == pytest.approx(1.0)
    trained = _factors(_outcome(rows), TrialOutcome(status="ok", step_seconds=(4.0,) * 100))
    assert trained.compute["float32"] == pytest.approx(2.0, rel=0.05)  # the geometric mean of 1 and 4
    assert (trained.num_trials, trained.num_steps) == (9, 100)


def test_failed_trials_and_unpriced_candidates_say_nothing() -> None:
    rows = [
        _row(1, (), _estimate(1.0, 0.0), _measured(1.2)),
        _row(2, (), None, _measured(50.0)),
        _row(3, (), _estimate(1.0, 0.0), TrialOutcome(status="out of memory", reason="…")),
        _row(4, (), _estimate(1.0, 0.0), None),
    ]
    found = _factors(_outcome(rows))
    assert found.compute["float32"] == pytest.approx(1.2, rel=0.05)
    assert found.num_trials == 2


def test_a_wild_measurement_is_held_back() -> None:
    found = _factors(_outcome([_row(1, (), _estimate(1e-6, 0.0), _measured(60.0))]))
    assert found.compute["float32"] <= 20.0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to learn"):
        refit(_outcome([_row(1, (), _estimate(1.0, 0.0), None)]), registry=load_registry())


def _hardware() -> Hardware:
    link = Link(name="nvlink4", rate=Rate(1e-6, 4e11), collectives={"all_reduce": Rate(2e-6, 2e11)})
    device = Device(
        name="H100-80GB",
        type="cuda",
        memory_bytes=80 * 2**30,
        memory_bytes_per_s=3e12,
        flops_per_s={"float32": 6e13, "bfloat16": 9e14},
        launch_s=5e-6,
        source="data sheet",
    )
    return Hardware(device=device, within_node=link, between_nodes=link, to_host=link)


def test_hardware_becomes_slower_by_the_factors() -> None:
    corrected = Factors(compute={"float32": 2.0, "bfloat16": 1.5}, communication=4.0, num_trials=3).on(
        _hardware()
    )
    assert corrected.device.flops_per_s == {"float32": pytest.approx(3e13), "bfloat16": pytest.approx(6e14)}
    assert corrected.device.memory_bytes_per_s == pytest.approx(1.5e12)
    assert corrected.device.launch_s == pytest.approx(1e-5)
    assert corrected.within_node.rate == Rate(4e-6, 1e11)
    assert corrected.within_node.collectives["all_reduce"] == Rate(8e-6, 5e10)
    assert pickle.loads(pickle.dumps(corrected)) == corrected  # it is sent to trial workers
    assert corrected.device.source == "data sheet; corrected by 3 trials"


def test_factors_of_one_change_nothing() -> None:
    corrected = Factors().on(_hardware())
    assert corrected.device.flops_per_s == _hardware().device.flops_per_s
    assert corrected.between_nodes == _hardware().between_nodes


class TestFile:
    def _calibration(self, device: str = "H100-80GB", factor: float = 1.5) -> Calibration:
        factors = Factors(
            compute={"float32": factor}, communication=2.0, memory={"float32": 1.1}, num_trials=3, num_steps=7
        )
        return Calibration(devices={Calibration.key(device, 8): factors})

    def test_it_reads_what_it_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        self._calibration().save(path)
        read = Calibration.load(path)
        assert read.factors("H100-80GB", 8) == self._calibration().factors("H100-80GB", 8)
        assert read.factors("H100-80GB", 16) == Factors()
        assert [item.name for item in tmp_path.iterdir()] == ["calibration.json"]

    def test_devices_live_beside_each_other(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        self._calibration().save(path)
        self._calibration("A100-40GB").save(path)
        self._calibration(factor=1.7).save(path)
        read = Calibration.load(path)
        assert read.factors("A100-40GB", 8).compute["float32"] == 1.5
        assert read.factors("H100-80GB", 8).compute["float32"] == 1.7

    @pytest.mark.parametrize(
        "text",
        ["", "garbage", "[]", '{"schema": 1}', '{"schema": 2, "devices": {}}', '{"schema": 1, "devices": 3}'],
    )
    def test_another_file_is_refused_and_left_alone(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "calibration.json"
        path.write_text(text)
        with pytest.raises(InputError, match=str(path)):
            Calibration.load(path)
        with pytest.raises(InputError):
            self._calibration().save(path)
        assert path.read_text() == text

    def test_a_factor_that_is_none_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "calibration.json"
        self._calibration().save(path)
        data = json.loads(path.read_text())
        data["devices"]["H100-80GB x 8"]["communication"] = -1
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match="communication: Input should be greater than 0"):
            Calibration.load(path)

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="not written"):
            self._calibration().save(tmp_path / "none" / "calibration.json")


class TestMeasuredFile:
    """The file of ``atorch-ns calibrate`` in place of factors."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write_measured(tmp_path / "c.yaml", measured_document(Cluster(), measure(Cluster(), seconds=0.1)))
        return tmp_path / "c.yaml"

    def test_a_search_uses_its_figures_and_measures_nothing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("it was measured anew")

        monkeypatch.setattr(find, "calibrate", refuse)
        here = Cluster.detect()
        used = find._with_measured_hardware(here, SearchRequest(search_calibration=path))
        known = cluster_from_spec(path).hardware
        assert used.hardware is not None
        assert known is not None
        assert used.hardware.device.flops_per_s == known.device.flops_per_s
        assert used.hardware.within_node == known.within_node
        assert used.device_memory_bytes == here.with_hardware().device_memory_bytes

    def test_factors_go_on_correcting_what_is_measured_then(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = Cluster.detect()
        factors = Factors(compute={"float32": 2.0}, num_trials=1)
        Calibration(devices={Calibration.key(here.device_name, 1): factors}).save(tmp_path / "c.json")
        monkeypatch.setattr(find, "calibrate", lambda *_, **__: _hardware())
        used = find._with_measured_hardware(here, SearchRequest(search_calibration=tmp_path / "c.json"))
        assert used.hardware is not None
        assert used.hardware.device.flops_of("float32") == _hardware().device.flops_of("float32") / 2

    def test_the_two_kinds_of_file_are_not_mixed_up(self, path: Path, tmp_path: Path) -> None:
        before = path.read_text()
        with pytest.raises(InputError, match="measured by atorch-ns calibrate, not factors"):
            Calibration(devices={}).save(path)
        assert path.read_text() == before
        Calibration(devices={"cpu x 1": Factors()}).save(tmp_path / "f.json")
        with pytest.raises(InputError, match=r"factors written by report\.refit"):
            cluster_from_spec(tmp_path / "f.json")

    def test_of_another_cluster_it_is_refused(self, path: Path) -> None:
        with pytest.raises(InputError, match="not from this job's cluster"):
            read_calibration(path, Cluster(world_size=2, local_world_size=2))
