"""The doctor on machines that are not like this one."""

import copy
import json
import socket
from pathlib import Path

import pytest

from plait.run.commands import doctor


def test_the_measured_speeds_are_those_of_a_computer() -> None:
    facts = doctor.measured()
    assert 1e8 < facts["memory_copy_bytes_per_second"] < 1e13
    assert 1e8 < facts["matrix_product_flops"] < 1e15


def test_warnings_name_the_cause_and_the_fix() -> None:
    good = doctor.examine(measure=False)
    bad = copy.deepcopy(good)
    bad["network"].update(hostname="nowhere", hostname_resolves_to=[], interfaces=["lo", "eth7"])
    bad["memory"]["shared_memory_bytes"] = 64 << 20
    bad["limits"]["open_files"] = 256
    bad["processor"].update(usable_cores=8, cgroup_cores=1.5)
    text = "\n".join(doctor.warnings(bad))
    for words in ("'nowhere' resolves to nothing", "eth7", "64 MB", "--shm-size", "256 open files", "1.5 of 8"):
        assert words in text
    bad["network"]["hostname_resolves_to"] = ["127.0.1.1"]
    assert "resolves to loopback (127.0.1.1)" in "\n".join(doctor.warnings(bad))


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
