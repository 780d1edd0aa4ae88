"""The fuzzer of the channel, for a moment; by hand it runs for an hour."""

import subprocess
import sys
from pathlib import Path

FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz_channel.py"


def test_five_hundred_spoiled_streams_leave_a_known_peer_heard() -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZER), "--cases", "500", "--seconds", "100", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("500 cases, ") and done.stdout.endswith("nothing else\n")
