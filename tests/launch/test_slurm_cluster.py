"""A Slurm of two nodes on this machine: ``plait submit slurm`` as its user sees it.

It runs where Debian's slurmctld, slurmd and slurm-client are, as root: ``apt install slurmctld slurmd slurm-client``.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from waiting import wait_for

from plait.run.commands.main import main

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "scancel", "squeue")
pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0, reason="needs Slurm's programs, as root"
    ),
    pytest.mark.timeout(600),
]
CONFIG = """
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Two nodes and their controller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        ports = [free_port() for _ in range(3)]
        text = CONFIG.format(host=os.uname().nodename, folder=folder, ports=ports)
        home = Path(shutil.which("slurmctld") or "").resolve().parents[1]  # plugins are beside the programs
        text += "".join(f"PluginDir={one}\n" for one in home.glob("lib/*/slurm-wlm"))
        (folder / "slurm.conf").write_text(text)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        self.daemons["ctl"] = self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start(node)
        wait_for(lambda: self.say("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{words[0]}{words[-1]}.log").open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def start(self, node: str) -> None:
        self.daemons[node] = self._start("slurmd", "-D", "-d", str(shutil.which("slurmstepd")), "-N", node)

    def say(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.say("scontrol", "show", "job", job))
        return found[1] if found else ""

    def again(self, job: str) -> None:
        """Starts a job that was requeued; by itself Slurm waits two minutes."""
        wait_for(lambda: self.state(job) == "PENDING")
        self.say("scontrol", "update", f"JobId={job}", "StartTime=now")

    def kill(self, node: str, pid: int) -> None:
        """Kills a node: its daemon, and a rank with the process that started it."""
        self.daemons[node].kill()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for one in (parent, pid):
            os.kill(one, signal.SIGKILL)
        self.daemons[node].wait()
        self.say("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("SLURM_CONF", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    slurm = tmp_path / "slurm"
    slurm.mkdir()
    found = Cluster(slurm)
    try:
        found.begin()
        yield found
        for job in found.say("squeue", "-h", "-o", "%i").split():
            found.say("scancel", job)
        wait_for(lambda: not found.say("squeue", "-h", "-o", "%i"), 60)
    finally:
        for daemon in found.daemons.values():
            daemon.kill()
            daemon.wait(20)


def submit(capfd: pytest.CaptureFixture[str], *words: str, option: str = "", more: tuple[str, ...] = ()) -> str:
    """The number of a job of two nodes with a rank each, whose names no resolver knows."""
    sizes = ("--hosts", "2", "--ranks-per-host", "1", "--environment", "MASTER_ADDR=127.0.0.1")
    assert main(("submit", "slurm", *sizes, *([option] if option else []), *more, "--", *words)) == 0
    found = re.search(r"Submitted batch job (\d+)", capfd.readouterr().out)
    assert found
    return found[1]


def test_words_reach_ranks_that_meet(cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "show.py").write_text(
        "import json, sys, plait\ncomm = plait.join(deadline=50)\n"
        "open(f'{comm.rank}.json', 'w').write(json.dumps([str(comm.mesh), sys.argv[1:]]))\ncomm.close()\n"
    )
    hostile = ["$(id)", "a'b\"c", "$HOME", "x\ny\r\n#SBATCH --nodes=9", "", "*", "\\", "é"]
    submit(capfd, "show.py", *hostile, option="--option=-W")
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == ["shard=2", hostile]


def test_a_run_that_is_warned_and_loses_a_node_ends_with_the_bits_of_one_that_was_not(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--mesh", "shard=2", "--model", "mlp", "--width", "16", "--batch", "8", "--save-every", "25"]
    words += ["--steps", "300", "--log-every", "100", "--out", "a", "--resume", "auto"]
    job = submit(capfd, *words, option="--requeue")

    def saved(step: int) -> bool:
        return any((tmp_path / f"a/checkpoints/step-{n:06}").exists() for n in range(step, 301))

    wait_for(lambda: saved(25))
    cluster.say("scancel", "--signal=USR1", job)
    cluster.again(job)
    text = next(tmp_path.glob("slurm-*.out")).read_text()
    stopped = re.search(r"SIGUSR1 \(on rank \d\): stopped after step (\d+) of 300", text)
    assert stopped, text
    wait_for(lambda: saved(int(stopped[1]) + 50))
    ranks = [pid for pid in Path("/proc").glob("[0-9]*") if is_rank(pid, tmp_path)]
    victim = next(int(pid.name) for pid in ranks if b"SLURM_PROCID=1\0" in (pid / "environ").read_bytes())
    cluster.kill("n2", victim)
    wait_for(lambda: cluster.state(job) == "PENDING")
    cluster.start("n2")
    wait_for(
        lambda: (
            cluster.say("sinfo", "-h", "-t", "idle", "-o", "%D") == "2"
            or cluster.say("scontrol", "update", "NodeName=n2", "State=RESUME")
        )
    )
    cluster.again(job)
    wait_for(lambda: cluster.state(job) == "COMPLETED", 240)
    text = next(tmp_path.glob("slurm-*.out")).read_text()
    assert len(re.findall(r"resumed at step \d+ from", text)) == 2, text
    (tmp_path / "b").mkdir()
    done = subprocess.run([sys.executable, "-m", "plait", *words], cwd=tmp_path / "b", timeout=240)
    assert done.returncode == 0
    last = "a/checkpoints/step-000300"
    assert main(("checkpoint", "diff", last, f"b/{last}")) == 0


def test_each_job_of_an_array_is_a_world_of_its_own(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sum.py").write_text(
        "import os, plait, torch\ncomm = plait.join(deadline=50)\ntask = int(os.environ['SLURM_ARRAY_TASK_ID'])\n"
        "x = torch.tensor([10.0 ** task])\ncomm.all_reduce(x, ('shard',)).wait()\n"
        "open(f'{task}-{comm.rank}.txt', 'w').write(f'{x.item():g} {comm.mesh}')\ncomm.close()\n"
    )
    submit(capfd, "sum.py", option="--option=--array=1-3", more=("--option=-W",))
    found = {file.name: file.read_text() for file in tmp_path.glob("*.txt")}
    assert found == {f"{task}-{rank}.txt": f"{2 * 10**task} shard=2" for task in (1, 2, 3) for rank in (0, 1)}


def is_rank(process: Path, folder: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return (process / "cwd").readlink() == folder and b"plait" in words and words[0].endswith(b"python")
    except OSError:
        return False
