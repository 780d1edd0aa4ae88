"""A failed run tells the cause before its echoes; sys.exit() in code that should have returned is a failure too."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from plait.messages.ended import EndedError, to_its_end
from plait.run.launch.failure import Failure, explain, first_of, is_mistake, leave, open_closed, recorded, report
from plait.shared_memory.segment import Segment
from plait.table.mesh import Mesh


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
    assert report(raised(lambda: Segment.make(2**60)), {}) == 1
    assert report(raised(lambda: 1 / 0), {}) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("plait: error: unknown mesh axis 'x'")
    assert " MiB of shared memory cannot be had" in shown[1]
    assert shown[2].startswith("Traceback")
    assert shown[-1].startswith("ZeroDivisionError")


def test_under_the_launcher_it_leaves_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(file), "PLAIT_LAUNCHER": "1"}
    assert report(raised(lambda: Mesh.parse("x=1")), environment) == 2
    assert capsys.readouterr().err == ""
    data = json.loads(file.read_text())
    assert int(data["message"]["extraInfo"]["timestamp"]) > 0  # as torch's agent reads it
    found = recorded(3, 2, file)
    assert (found.rank, found.exit_code, found.final) == (3, 2, True)
    assert found.text is not None and found.text.startswith("plait: error: unknown mesh axis")
    assert found.nanoseconds > 0
    del environment["PLAIT_LAUNCHER"]
    report(raised(lambda: Mesh.parse("x=1")), environment)
    assert capsys.readouterr().err != ""  # torchrun's agent keeps the note to itself
    environment = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "removed" / "error.json"), "PLAIT_LAUNCHER": "1"}
    assert report(raised(lambda: Mesh.parse("x=1")), environment) == 2
    assert capsys.readouterr().err.startswith("plait: error: unknown mesh axis 'x'")  # the note found no room


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which this process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_program_without_standard_streams_ends_as_any(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert report(raised(lambda: Mesh.parse("x=1")), {}) == 2
    leave(0)
    assert left == [0]


def test_output_that_finds_no_room_at_the_end_is_one_line(
    left: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("text")
        leave(0)
        leave(3)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert left == [1, 3]
    line = "plait: error: the standard output takes no more: No space left on device\n"
    assert capsys.readouterr().err == line


def test_streams_that_are_closed_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (pid := os.fork()):
        os.closerange(0, 3)
        sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
        open_closed()
        print("text", flush=True)
        found = [os.get_inheritable(n) and os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in range(3)]
        os._exit(0 if all(found) and sys.stderr.fileno() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_first_failure_is_told_and_a_killed_rank_before_all() -> None:
    cause, echo = Failure(2, 1, "Traceback: cause\n", 10), Failure(0, 1, "Traceback: echo\n", 20)
    silent, killed = Failure(1, 1, None, 5), Failure(3, -signal.SIGSEGV, None, 30)
    assert first_of([echo, silent, cause]) is cause
    assert first_of([echo, killed, cause]) is killed
    text, code = explain(cause, "shard=4")
    assert text.startswith("Traceback: cause\nplait: rank 2 of mesh shard=4 failed")
    assert code == 1
    text, code = explain(killed, "shard=4")
    assert text == "plait: rank 3 of mesh shard=4 was killed by SIGSEGV; the others were stopped\n"
    assert code == 128 + signal.SIGSEGV
    assert "rank 1 of mesh shard=4 ended with exit code 3 before it was done" in explain(Failure(1, 3), "shard=4")[0]
    assert explain(Failure(0, 2, "plait: error: no\n", 1, final=True), "shard=4") == ("plait: error: no\n", 2)
    assert explain(left := Failure(1, 0, None, 30), "shard=4")[1] == 1 and first_of([echo, left, cause]) is left
    assert explain(Failure(0, 7, "", final=True), "shard=4") == ("", 7)
    assert explain(Failure(3, -9), "shard=4", "found\n") == ("found\n", 137)  # the page knows more than the launcher
    assert explain(Failure(2, 1, "Traceback: cause\n", 10), "shard=4", "found\n") == ("Traceback: cause\nfound\n", 1)


@pytest.mark.parametrize(
    ("code", "said"), [((), r"SystemExit"), ((0,), "SystemExit: 0"), (("text",), "SystemExit: text")]
)
def test_an_end_that_would_seem_done_is_an_error_with_its_line(code: tuple[object, ...], said: str) -> None:
    def loss_fn() -> None:
        sys.exit(*code)  # type: ignore[arg-type]

    with (
        pytest.raises(EndedError, match=rf"test_failure\.py:\d+ ended the program in loss_fn \({said}\)"),
        to_its_end(),
    ):
        loss_fn()


def test_codes_and_exceptions_pass() -> None:
    for error in (SystemExit(3), KeyError("x")):
        with pytest.raises(type(error)) as caught, to_its_end():
            raise error
        assert caught.value is error
    with to_its_end():
        pass
