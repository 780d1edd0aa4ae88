"""What ranks must have alike: torch, plait and the program, as far as a rank can tell what it runs."""

from __future__ import annotations

import cProfile
import py_compile
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import plait
from plait.comm.init_process import code_facts, users_own
from plait.comm.process import ProcessComm
from plait.comm.store_rendezvous import UNKNOWN

PROGRAM = "the code of the program"


def facts_of(file: Path | str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a program in ``file``."""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=file and str(file)))  # type: ignore[arg-type]
    return code_facts()


def test_a_program_is_what_its_file_holds_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for file, text in zip(files, ("print(1)", "print(1)", "print(2)"), strict=True):
        file.write_text(text)
    one, same, other = (facts_of(file, monkeypatch)[PROGRAM] for file in files)
    assert one == same != other and UNKNOWN not in (one, other)


def test_what_is_no_source_of_the_users_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a.py"
    script.write_text("print(1)")
    compiled = py_compile.compile(str(script), str(tmp_path / "a.pyc"))
    command, module = Path(sys.executable).with_name("plait"), Path(plait.__file__).with_name("__main__.py")
    archive, gone = tmp_path / "a.pyz" / "__main__.py", tmp_path / "gone.py"
    for file in (None, compiled, cProfile.__file__, command, module, pytest.__file__, archive, gone):
        assert facts_of(file, monkeypatch)[PROGRAM] == UNKNOWN, file
    assert users_own(SimpleNamespace(__file__=str(script))) == [script]


def test_whether_collectives_are_checked_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[object]()
    monkeypatch.setattr(ProcessComm, "from_env", lambda *_, **how: told.append(how["facts"]) or 1 / 0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for on in (True, False):
        with pytest.raises(ZeroDivisionError):
            plait.join("shard=2", check_collectives=on)
    assert told == [{"check_collectives": "True"}, {"check_collectives": "False"}]
