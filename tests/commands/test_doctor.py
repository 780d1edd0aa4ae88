"""What the doctor says about machines that are not like this one."""

import copy
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from plait.run.commands import doctor
from plait.run.measure import machine
from plait.tensor import gemm
from plait.tensor.gemm import ONEDNN, TORCH, has_onednn


def test_the_measured_speeds_are_those_of_a_computer() -> None:
    facts = doctor.measured()
    assert 1e8 < facts["memory_copy_bytes_per_second"] < 1e13
    assert 1e8 < facts["matrix_product_flops"] < 1e15
    assert has_onednn() == (facts["onednn_product_flops"] is not None)
    if has_onednn():
        assert 1e8 < facts["onednn_product_flops"] < 1e15


def test_warnings_name_the_cause_and_the_fix() -> None:
    good = doctor.examine(measure=False)
    bad = copy.deepcopy(good)
    bad["network"].update(hostname="nowhere", hostname_resolves_to=[], interfaces=["lo", "eth7"])
    bad["memory"]["shared_memory_bytes"] = 64 << 20
    bad["limits"]["open_files"] = 256
    bad["processor"].update(usable_cores=8, cgroup_cores=1.5)
    text = "\n".join(doctor.warnings(bad))
    for words in (
        "'nowhere' resolves to nothing",
        "eth7",
        "64 MB",
        "--shm-size",
        "256 open files",
        "1.5 of 8",
    ):
        assert words in text
    bad["network"]["hostname_resolves_to"] = ["127.0.1.1"]
    assert "resolves to loopback (127.0.1.1)" in "\n".join(doctor.warnings(bad))


@pytest.mark.parametrize(
    ("torchs", "onednns", "said"),
    [(95e9, 205e9, True), (100e9, 120e9, True), (100e9, 119e9, False), (100e9, None, False)],
)
def test_a_faster_way_to_multiply_is_named_with_its_flag(torchs: float, onednns: float | None, said: bool) -> None:
    facts = doctor.examine(measure=False)
    assert "--gemm" not in "\n".join(doctor.warnings(facts)), "nothing was measured"
    facts["measured"] = {"matrix_product_flops": torchs, "onednn_product_flops": onednns}
    found = [warning for warning in doctor.warnings(facts) if "--gemm onednn" in warning]
    assert len(found) == said
    for warning in found:
        assert f"oneDNN multiplies fp32 matrices at {(onednns or 0) / 1e9:.0f} GFLOP/s" in warning
        assert f"torch's own BLAS at {torchs / 1e9:.0f} GFLOP/s" in warning


def test_a_torch_without_onednn_has_no_rate_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "has_onednn", lambda: False)
    monkeypatch.setattr(machine, "product_rate", lambda *_, **__: 1e9)
    facts = doctor.measured()
    assert facts["onednn_product_flops"] is None
    assert doctor.run(doctor.DoctorConfig()) == 0
    shown = capsys.readouterr().out
    assert "onednn product" in shown and "--gemm" not in shown


@pytest.mark.skipif(not has_onednn(), reason="this torch was built without oneDNN")
def test_the_rate_is_that_of_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []
    original = gemm._onednn

    def counted(*given: Any) -> Tensor:
        made.append(original(*given))
        return made[-1]

    monkeypatch.setattr(gemm, "_onednn", counted)
    assert machine.product_rate(0.0, 64, gemm=TORCH) > 0 and not made
    assert machine.product_rate(0.0, 64, gemm=ONEDNN) > 0 and len(made) == 4, "once to warm up, three times measured"


def test_a_hostname_that_does_not_resolve_is_a_fact_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert doctor.network()["hostname_resolves_to"] == []


def test_a_machine_without_proc_is_still_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read", lambda path: "")
    assert doctor.memory()["total_bytes"] is None
    assert doctor.processor()["model"]


def test_facts_go_to_a_file_and_markup_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "processor", lambda: {"model": "[red]x[/]", "usable_cores": 1, "cgroup_cores": None})
    path = tmp_path / "facts.json"
    assert doctor.run(doctor.DoctorConfig(json=str(path), measure=False)) == 0
    assert json.loads(path.read_text())["processor"]["model"] == "[red]x[/]"
    assert "[red]x[/]" in capsys.readouterr().out
