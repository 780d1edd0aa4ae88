"""What a failed run says: the cause before its echoes."""

import json
import signal
from pathlib import Path

import pytest

from plait.core.mesh import Mesh
from plait.launch.failure import Failure, explain, is_mistake, recorded, report


def raised(make) -> BaseException:  # type: ignore[no-untyped-def]
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_only_plaits_own_refusals_are_mistakes() -> None:
    assert is_mistake(raised(lambda: Mesh.parse("x=1")))
    assert not is_mistake(raised(lambda: int("x")))
    assert not is_mistake(raised(lambda: Mesh(shard=2).axis({}["none"])))
    assert not is_mistake(ValueError("never raised"))


def test_without_a_launcher_the_rank_speaks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(raised(lambda: Mesh.parse("x=1")), {}) == 2
    assert report(raised(lambda: 1 / 0), {}) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("plait: error: unknown mesh axis 'x'")
    assert shown[1].startswith("Traceback")
    assert shown[-1].startswith("ZeroDivisionError")


def test_under_the_launcher_it_leaves_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(file), "PLAIT_LAUNCHER": "1"}
    assert report(raised(lambda: Mesh.parse("x=1")), environment) == 2
    assert capsys.readouterr().err == ""
    data = json.loads(file.read_text())
    assert int(data["message"]["extraInfo"]["timestamp"]) > 0  # as torch's agent reads it
    found = recorded(3, 2, data)
    assert (found.rank, found.exit_code) == (3, 2)
    assert found.text.startswith("plait: error: unknown mesh axis")
    assert found.nanoseconds > 0
    del environment["PLAIT_LAUNCHER"]
    report(raised(lambda: Mesh.parse("x=1")), environment)
    assert capsys.readouterr().err != ""  # torchrun's agent keeps the note to itself


def test_the_first_failure_is_told_and_a_killed_rank_before_all() -> None:
    cause = Failure(2, 1, "Traceback: cause\n", 10)
    echo = Failure(0, 1, "Traceback: echo\n", 20)
    silent = Failure(1, 1, "", 5)
    killed = Failure(3, -signal.SIGSEGV, "", 30)
    stopped = Failure(3, -signal.SIGTERM, "", 1)  # by the agent, when it saw another fail
    text, code = explain([stopped, echo, silent, cause], "shard=4")
    assert text.startswith("Traceback: cause\nplait: rank 2 of mesh shard=4 failed")
    assert code == 1
    assert explain([echo, killed, cause], "shard=4") == (
        "plait: rank 3 of mesh shard=4 was killed by SIGSEGV; the others were stopped\n",
        128 + signal.SIGSEGV,
    )
    assert explain([Failure(0, 2, "plait: error: no\n", 1)], "shard=4") == ("plait: error: no\n", 2)
    assert explain([Failure(0, 7)], "shard=4") == ("", 7)
