"""Two agents of torchrun on one host: when a rank or an agent is killed, all ranks come together again."""

import os
import re
import sys
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from ports import free_port
from waiting import wait_for

SCRIPT = str(Path(__file__).with_name("elastic_ranks.py"))
PATIENCE = 110


class Agents:
    """Starts agents of one run of two.  Agent 0 has the store in which they meet."""

    def __init__(self, start: Any, folder: Path, *program: str, **variables: str) -> None:
        self.start, self.folder, self.program, self.port = start, folder, program, free_port()
        self.variables = variables

    def agent(self, number: int) -> Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--max-restarts", "2"]
        torchrun += ["--rdzv-conf", f"is_host={int(not number)}"]
        given = {k: v for k, v in os.environ.items() if not k.startswith("PLAIT_")}
        environment = {**given, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", **self.variables}
        with (self.folder / f"agent{number}-{time.time_ns()}").open("w") as said:
            agent: Popen[str] = self.start(*torchrun, *self.program, env=environment, stdout=said, stderr=said)
        return agent

    @property
    def said(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("agent*")))


def test_a_run_of_two_agents_goes_on_when_a_rank_is_killed(start: Any, tmp_path: Path) -> None:
    out, sizes = str(tmp_path / "run"), "--layers 1 --width 16 --heads 2 --length 8 --batch 4 --steps 8 --save-every 2"
    train = ["-m", "plait", "train", "--mesh", "shard=2", *sizes.split(), "--out", out, "--deadline", "40"]
    agents = Agents(start, tmp_path, *train, "--inject", "kill@rank=1,step=5")
    both = [agents.agent(number) for number in range(2)]
    assert [agent.wait(PATIENCE) for agent in both] == [0, 0], agents.said
    assert agents.said.count("injected kill on rank 1 in step 5") == 1, agents.said
    assert re.search("resumed at step [24]", agents.said), agents.said  # the save behind step 4 may be under way
    assert (tmp_path / "run" / "summary.json").exists(), agents.said


def test_ranks_meet_again_when_an_agent_is_killed_and_another_is_started(start: Any, tmp_path: Path) -> None:
    # While ranks meet in the agents' store, rank 0's agent of torch 2.13 does not tell a new one where that is.
    agents = Agents(start, tmp_path, SCRIPT, str(tmp_path), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    first, second = agents.agent(0), agents.agent(1)
    wait_for(lambda: len(list(tmp_path.glob("attempt0-rank?"))) == 2, PATIENCE, lambda: agents.said)
    second.kill()
    third = agents.agent(1)
    assert [first.wait(PATIENCE), third.wait(PATIENCE)] == [0, 0], agents.said
    again = sorted((tmp_path / f"attempt1-rank{rank}").read_text() for rank in range(2))
    assert again == ["2 0", "2 1"], agents.said  # both know that it is the second attempt; their agents do not agree
