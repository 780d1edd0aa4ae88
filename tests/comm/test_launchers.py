"""A process that srun, SkyPilot or Modal started is a rank: torchrun's variables from theirs, and the rank's GPU.

Slurm's are as Slurm 22.05 set them on two nodes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import plait
from plait.comm.environment import (
    LAUNCHERS,
    VARIABLES,
    WorldVariables,
    as_torchrun,
    first_host,
    launched,
    own_device,
    port,
    started,
)


def slurm(text: str) -> dict[str, str]:
    """Slurm's variables, of words such as ``PROCID=2``."""
    return {f"SLURM_{name}": value for name, value in (word.split("=") for word in text.split())}


LAST_OF_THREE = slurm("DISTRIBUTION=block GTIDS=2 JOB_ID=6 LOCALID=0 NTASKS=3 PROCID=2 STEP_ID=0")
LAST_OF_THREE |= slurm("STEP_NODELIST=n[1-2] STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=2,1")
FIRST_OF_THREE = LAST_OF_THREE | slurm("GTIDS=0,1 PROCID=0")
ONE_OF_ONE_NODE = LAST_OF_THREE | slurm("GTIDS=0,1,2 LOCALID=1 PROCID=1 STEP_ID=4 STEP_NODELIST=n1")
CYCLIC = LAST_OF_THREE | slurm("DISTRIBUTION=cyclic GTIDS=0,2 LOCALID=1")
ARBITRARY = LAST_OF_THREE | slurm("DISTRIBUTION=arbitrary GTIDS=1,2 LOCALID=1")
BATCH = slurm("GTIDS=0 JOB_ID=6 LOCALID=0 NTASKS=3 PROCID=0 TASKS_PER_NODE=2,1")
ALONE = FIRST_OF_THREE | slurm("GTIDS=0 STEP_NUM_TASKS=1 STEP_NODELIST=n1")

SKY = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
}
SKY_OF_FOUR = SKY | {"SKYPILOT_NUM_GPUS_PER_NODE": "4"}
AS_ONE_OF_FOUR = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
ALL = [(LAST_OF_THREE, name) for launcher in [LAUNCHERS["srun"]] for name in (*launcher.alone, *launcher.more)]
ALL += [(SKY, name) for name in SKY if name != "SKYPILOT_NUM_GPUS_PER_NODE"]

FIX = "start one torchrun"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (SKY, "1 2 0 1 10.0.0.7 29500"),
        (SKY | {"SKYPILOT_NODE_RANK": "0"}, "0 2 0 1 10.0.0.7 29500"),
        (SKY_OF_FOUR | AS_ONE_OF_FOUR, "7 8 3 4 10.0.0.7 29500"),
        (SKY | {"SKYPILOT_NODE_IPS": "fd00::7 fd00::8"}, "1 2 0 1 fd00::7 29500"),
        (LAST_OF_THREE, "2 3 0 1 n1 12096"),
        (FIRST_OF_THREE, "0 3 0 2 n1 12096"),
        (ONE_OF_ONE_NODE, "1 3 1 3 127.0.0.1 12100"),
        (CYCLIC, "2 3 1 2 n1 12096"),
    ],
)
def test_a_task_is_a_rank(given: dict[str, str], wanted: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = dict(given)
    assert launched(environment, fix=FIX)
    assert {name: environment[name] for name in names} == dict(zip(names, wanted.split(), strict=True))
    place = WorldVariables.read(environment)
    assert (str(place.rank), str(place.size)) == (*wanted.split()[:2],) and started(given)
    before = dict(environment)
    assert launched(environment, fix=FIX) and environment == before


@pytest.mark.parametrize("given", [BATCH, ALONE, {}, SKY | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}])
def test_one_process_stays_one(given: dict[str, str]) -> None:
    environment = dict(given)
    assert not launched(environment, fix=FIX)
    assert environment == given


def test_what_the_user_has_set_wins() -> None:
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "LOCAL_RANK": " "}
    told = as_torchrun(FIRST_OF_THREE | own)
    assert told == {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_who_has_a_rank_is_left_alone() -> None:
    """Ranks of torchrun, and of plait, that run in one task of several."""
    assert as_torchrun(FIRST_OF_THREE | {"RANK": "5"}) == {}


@pytest.mark.parametrize(("given", "name"), ALL)
def test_half_of_a_set_is_refused(given: dict[str, str], name: str) -> None:
    """A container may get only some of the variables."""
    environment = {key: value for key, value in given.items() if key != name}
    says = rf"(SLURM|SKYPILOT)_\w+ is \d, and {name} not set: this program has been started several times.*{FIX}"
    with pytest.raises(ValueError, match=says):
        launched(environment, fix=FIX)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (SKY_OF_FOUR, "SKYPILOT_NUM_GPUS_PER_NODE=4, and this process is the only one of its host: start one torchrun"),
        (SKY | {"SKYPILOT_NODE_IPS": "10.0.0.7"}, "SKYPILOT_NUM_NODES=2, and SKYPILOT_NODE_IPS has 1 addresses"),
        (SKY | {"SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK='x' is no whole number"),
        (SKY | {"SKYPILOT_NODE_RANK": "2"}, "RANK=2 cannot be: ranks of WORLD_SIZE=2 are 0 to 1"),
        (SKY_OF_FOUR | AS_ONE_OF_FOUR | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 cannot be"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2: this program has been started several times"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launched(dict(given), fix=FIX)


class Cluster:
    def container_ips(self) -> list[str]:
        return ["fd00::1", "fd00::2", "fd00::3"]

    def container_rank(self) -> int:
        return 2


def test_modals_client_says_which_container_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("Cluster context is not initialized")

    client = SimpleNamespace(Cluster=SimpleNamespace(from_context=Cluster))
    monkeypatch.setitem(sys.modules, "modal", client)
    environment: dict[str, str] = {}
    assert launched(environment, fix=FIX)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[name] for name in names] == ["2", "3", "fd00::1", "29500"]
    assert as_torchrun(AS_ONE_OF_FOUR)["RANK"] == "11" and as_torchrun({"RANK": "0"}) == {}
    client.Cluster.from_context = none
    assert not launched({}, fix=FIX)


def test_where_nobody_knows_the_host_of_rank_0_its_address_is_asked_for() -> None:
    with pytest.raises(ValueError, match="SLURM_DISTRIBUTION is arbitrary: set MASTER_ADDR"):
        as_torchrun(ARBITRARY)
    assert as_torchrun(ARBITRARY | {"MASTER_ADDR": "n2"})["RANK"] == "2"
    assert as_torchrun(ONE_OF_ONE_NODE | {"SLURM_DISTRIBUTION": "arbitrary"})["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2,7],m3", "n1"),
        ("m3,n[1-2,7]", "m3"),
        ("n[7,9-12]", "n7"),
        ("gpu-a[003-120]", "gpu-a003"),
        ("rack[2-3]n[01-16]", "rack2n01"),
        ("n[1-2].cluster.example", "n1.cluster.example"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_steps_that_run_at_the_same_time_have_ports_of_their_own() -> None:
    ports = {port(str(job), str(step)) for job in range(7_000_000, 7_001_000) for step in range(16)}
    assert len(ports) == 16_000
    assert min(ports) >= 12000 and max(ports) < 32000
    assert 12000 <= port("+", "x") < 32000


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_script_started_alone_is_a_world_of_one_rank(device: str) -> None:
    comm = plait.join(device=device, deadline=7.0)
    assert (comm.mesh.size, comm.rank, comm.device, comm.deadline) == (1, 0, torch.device(device), 7.0)


def test_a_larger_mesh_alone_says_how_to_start_its_ranks() -> None:
    with pytest.raises(ValueError, match="start this program with torchrun --nproc-per-node 6"):
        plait.join("replica=2 shard=3")


FOUR = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("given", "gpus", "variables", "found"),
    [
        ("cuda", 8, {"LOCAL_RANK": "3", "RANK": "11"}, "cuda:3"),
        ("cuda", 8, {"RANK": "3"}, "cuda:3"),
        ("cuda", 8, {}, "cuda:0"),
        ("cuda", 1, {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),  # a launcher shows each rank its own
        ("cuda", 2, {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "6,7"}, "cuda:0"),
        ("cuda:1", 2, {"LOCAL_RANK": "0"}, "cuda:1"),
        ("cpu", 0, {"LOCAL_RANK": "3"}, "cpu"),
        ("auto", 0, {}, "cpu"),
        ("auto", 2, {}, "cuda:0"),
        ("auto", 4, {**FOUR, "LOCAL_RANK": "3"}, "cuda:3"),
        ("auto", 2, {**FOUR, "LOCAL_RANK": "1"}, "cpu"),
        ("auto", 1, {**FOUR, "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),
        ("auto", 1, {**FOUR, "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3", "TORCHELASTIC_RUN_ID": "x"}, "cpu"),
    ],
)
def test_a_rank_has_one(
    monkeypatch: pytest.MonkeyPatch, given: str, gpus: int, variables: dict[str, str], found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device(given, variables) == torch.device(found)


def test_a_rank_without_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="LOCAL_RANK=2 wants cuda:2, and torch sees"):
        own_device("cuda", {"LOCAL_RANK": "2"})
    with pytest.raises(ValueError, match="device cuda:5: torch sees 2 CUDA devices here"):
        own_device("cuda:5", {"LOCAL_RANK": "0"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device cuda: torch sees no CUDA device here"):
        plait.join(device="cuda")


def test_gpus_that_are_idle_are_told_once_on_each_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank in "0123":
        own_device("auto", {**FOUR, "LOCAL_RANK": rank})
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 GPUs of this host are idle: 4 ranks need one each. Start 2 ranks" in said
    own_device("cpu", {**FOUR, "LOCAL_RANK": "0"})
    assert not capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("plait.comm.environment.NVIDIA", str(tmp_path))
    assert plait.join().device.type == "cpu"
    assert "this host has NVIDIA GPUs, but torch" in capsys.readouterr().err
