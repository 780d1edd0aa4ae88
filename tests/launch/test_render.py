"""A job as text: any words of a command reach the ranks unchanged; the programs that it is for read it."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from plait.run.launch.render import TARGETS, yaml
from plait.run.launch.spec import LaunchSpec, with_values
from plait.table.mesh import Mesh

HOSTILE = (
    "", " ", "a b", "'", '"', "'\"'\"'", "$HOME", "${HOME}", "$(id)", "$$(id)", "$$", "`id`", "a;b", "a&&b", "|", "*",
    "\\", "\\n", "a\nb", "a\r\nb", "\n", " a\n", "a\n\n", "#SBATCH --nodes=9", "\n#SBATCH --nodes=9", "!x", "~", "%s",
    "{x}", "{{x}}", "${app_id}", "$app_id", "- a", "a: b", "yes", "1e3", "null", "\t", "\x1b[2J", "\x7f", "\x85", "é",
    "€", "\u2028", "😀", "-n", "--", "PLACE", "\\u0024", "'''", '"""', "&amp;", "<<EOF",
)  # fmt: skip
COMMAND = ("train.py", *HOSTILE)
ENVIRONMENT = {f"V{number}": word for number, word in enumerate(HOSTILE)}
WORDS = tuple(f"{name}={word}" for name, word in ENVIRONMENT.items())
SPEC = LaunchSpec(2, 4, COMMAND, WORDS, 90, 3, 64, "H100", image="me/plait:1")
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k[0] == 'V'}]))"
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4"]


def text(target: str, spec: LaunchSpec = SPEC) -> str:
    return TARGETS[target].render(spec)


def run_by_bash(script: str, folder: Path, *programs: str, **more: str) -> tuple[list[str], dict[str, str]]:
    """The words and variables that these programs get from a script."""
    for program in programs:
        (folder / program).write_text(f"#!{sys.executable}\n{SHOW}\n")
        (folder / program).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "LC_ALL": "C.UTF-8", **more}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=60, check=True)
    words, found = json.loads(done.stdout)
    return words, found


def expanded(word: str) -> str:
    """Kubernetes' expansion of a word in ``args`` or ``env``: ``$(NAME)`` is replaced, ``$$`` is ``$``."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else "EXPANDED", word)


def test_an_sbatch_script_gives_each_word_to_srun(tmp_path: Path) -> None:
    script = text("slurm")
    words, environment = run_by_bash(script, tmp_path, "srun")
    assert words == ["python", *COMMAND]
    assert environment == ENVIRONMENT
    head = re.match(r"#!/bin/bash\n((#SBATCH .*\n)*)(?!#)", script)
    assert head and head[1].split() == [
        *("#SBATCH", "--job-name=plait", "#SBATCH", "--nodes=2", "#SBATCH", "--ntasks-per-node=4"),
        *("#SBATCH", "--cpus-per-task=3", "#SBATCH", "--time=90", "#SBATCH", "--mem=64G"),
        *("#SBATCH", "--gpus-per-node=H100:4"),
    ]


def test_a_requeued_script_ends_with_the_exit_code_of_srun(tmp_path: Path) -> None:
    script = text("slurm", LaunchSpec(1, 1, ("x.py",), requeue=True))
    assert "#SBATCH --signal=USR1@120\n#SBATCH --requeue\n#SBATCH --open-mode=append\n" in script
    for code in (0, 138, 3):
        (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
        for program in ("srun", "scontrol"):
            (tmp_path / program).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (code, "requeue 7\n" if code == 138 else "")


def test_a_trainjob_gives_each_word_to_torchrun() -> None:
    parsed = pytest.importorskip("yaml").safe_load(text("kubernetes"))
    assert (parsed["apiVersion"], parsed["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    body = parsed["spec"]
    assert body["runtimeRef"] == {"name": "torch-distributed"} and body["activeDeadlineSeconds"] == 5400
    trainer = body["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 4, "me/plait:1")
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": 12, "memory": "64Gi", "nvidia.com/gpu": 4}
    assert [*trainer["command"], *map(expanded, trainer["args"])] == ["python", "-m", "torch.distributed.run", *COMMAND]
    assert {one["name"]: expanded(one["value"]) for one in trainer["env"]} == ENVIRONMENT


def test_a_task_of_skypilot_gives_each_word_to_torchrun(tmp_path: Path) -> None:
    task = pytest.importorskip("yaml").safe_load(text("skypilot"))
    assert task["num_nodes"] == 2 and task["envs"] == ENVIRONMENT
    assert task["resources"] == {
        "cpus": "12+",
        "memory": "64+",
        "accelerators": "H100:4",
        "image_id": "docker:me/plait:1",
    }
    more = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    words, _ = run_by_bash(task["run"], tmp_path, "python", **more)
    place = ["--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"]
    assert words == [*TORCHRUN, *place, *COMMAND]


class Recorder(ModuleType):
    """A stand-in for a package: calls, decorators and attributes are noted."""

    def __init__(self, said: list[Any], name: str = "modal") -> None:
        super().__init__(name)
        self._said = said

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self._said, f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [one for one in args if not callable(one)]
        self._said.append((self.__name__, given, {k: v for k, v in kwargs.items() if not isinstance(v, Recorder)}))
        return next(iter(arg for arg in args if callable(arg) and not isinstance(arg, Recorder)), self)


def test_a_program_of_modal_gives_each_word_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setitem(sys.modules, "modal", Recorder(said))
    names: dict[str, Any] = {}
    exec(compile(text("modal"), "job.py", "exec"), names)
    functions = {name: (args, kwargs) for name, args, kwargs in reversed(said)}
    asked = {"cpu": 12.0, "memory": 65536, "gpu": "H100:4", "timeout": 5400}
    assert functions["modal.App.function"][1] == asked and functions["modal.clustered"][1] == {"size": 2}
    assert functions["modal.Image.from_registry.env"][0] == [ENVIRONMENT]

    class Cluster:
        def container_rank(self) -> int:
            return 1

        def container_ips(self) -> list[str]:
            return ["fd00::1", "fd00::2"]

    names["modal"] = ModuleType("modal")
    names["modal"].Cluster = type("C", (), {"from_context": staticmethod(Cluster)})
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: started.append((words, check)))
    names["job"]()
    place = ["--node-rank", "1", "--master-addr", "fd00::1", "--master-port", "29500"]
    assert started == [([sys.executable, *TORCHRUN, *place, *COMMAND], True)]


def test_files_go_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    spec = LaunchSpec(1, 1, ("x.py",), files=("a b", "x.py"), image="i")
    task = pytest.importorskip("yaml").safe_load(text("skypilot", spec))
    assert task["file_mounts"] == {f"~/plait-job/{one}": str(tmp_path / one) for one in spec.files}
    assert task["run"].startswith("mkdir -p ~/plait-job && cd ~/plait-job\n")
    folder, file = str(tmp_path / "a b"), str(tmp_path / "x.py")
    added = f".add_local_dir({folder!r}, '/root/a b').add_local_file({file!r}, '/root/x.py')\n"
    assert added in text("modal", spec) and "clustered" not in text("modal", spec)
    with pytest.raises(ValueError, match=r"SkyPilot expands \$"):
        text("skypilot", LaunchSpec(1, 1, ("x.py",), files=("$HOME",)))


def test_modals_limits_are_named() -> None:
    with pytest.raises(ValueError, match="no clusters without GPUs, and --hosts is 2"):
        text("modal", LaunchSpec(2, 1, ("x.py",), image="a"))
    with pytest.raises(ValueError, match="give --image"):
        text("modal", LaunchSpec(1, 1, ("x.py",)))


def test_a_program_of_ray_has_each_word() -> None:
    source = text("ray")
    names: dict[str, Any] = {}
    exec(
        compile("\n".join(line for line in source.splitlines() if re.match(r"[A-Z]+ = ", line)), "job.py", "exec"),
        names,
    )
    compile(source, "job.py", "exec")
    assert names["COMMAND"] == [*COMMAND] and names["TORCHRUN"] == TORCHRUN and names["ENVIRONMENT"] == ENVIRONMENT
    assert names["BUNDLE"] == {"CPU": 12, "GPU": 4, "memory": 64 << 30} and names["HOSTS"] == 2


def test_a_component_of_torchx_has_each_word_and_no_dollar(monkeypatch: pytest.MonkeyPatch) -> None:
    source = text("torchx")
    names: dict[str, Any] = {}
    exec(compile(source.partition("\n\n\ndef job")[0].partition("\n")[2], "job.py", "exec"), names)
    compile(source, "job.py", "exec")
    assert "$" not in names["START"] + names["COMMAND"]
    started: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["-c", "app-1", "FIRST_HOST", names["COMMAND"]])
    monkeypatch.setenv("FIRST_HOST", "n1")
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    exec(compile(names["START"], "start", "exec"), {})
    [(program, words, environment)] = started
    place = ["--rdzv-backend", "c10d", "--rdzv-id", "app-1", "--rdzv-endpoint", "n1:29500"]
    assert program == sys.executable and words == [sys.executable, *TORCHRUN, *place, *COMMAND]
    assert {name: environment[name] for name in ENVIRONMENT} == ENVIRONMENT


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": ()}, "no command: give one after --"),
        ({"name": "My Job"}, "name 'My Job': give a small letter"),
        ({"environment": ("A B=1",)}, "'A B': give the name of a variable"),
        *(
            ({"environment": (f"{name}=x",)}, f"{name}: the name looks like a secret")
            for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "github_token", "KEY")
        ),
    ],
)
def test_what_cannot_be_a_job_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        LaunchSpec(**{"command": ("x.py",), **more}).check()


def test_only_variables_that_are_named_are_taken() -> None:
    given = {"A": "1", "HF_TOKEN": "secret", "B": "2"}
    words = with_values(["A", "C=x=y"], given)
    assert LaunchSpec(environment=words).variables == {"A": "1", "C": "x=y"}
    with pytest.raises(ValueError, match="environment D: this variable is not set"):
        with_values(["D"], given)
    assert not re.search("secret|KEYBOARD_", text("slurm", LaunchSpec(1, 1, ("x.py",), words)))
    LaunchSpec(1, 1, ("x.py",), ("KEYBOARD=de", "MONKEY=1")).check()


def test_the_mesh_has_the_ranks_of_all_hosts() -> None:
    SPEC.check_mesh(Mesh(replica=2, shard=4))
    SPEC.check_mesh(Mesh(replica=2, shard=4, hosts=2))
    with pytest.raises(ValueError, match="has 4 ranks, and 2 hosts x 4 ranks are 8"):
        SPEC.check_mesh(Mesh(shard=4))
    with pytest.raises(ValueError, match="is on 4 hosts, and --hosts is 2"):
        SPEC.check_mesh(Mesh(shard=8, hosts=4))


def test_any_text_is_read_back_from_yaml() -> None:
    load = pytest.importorskip("yaml").safe_load
    value = {"a": [*HOSTILE], "b": {f"k{n}": word for n, word in enumerate(HOSTILE)}, "c": [{"x": 1, "y": {"z": "q"}}]}
    value |= dict.fromkeys((*HOSTILE, "ON", "a: b.txt", "null"), "q")
    assert load(yaml(value)) == value


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The file of the target that the test's name ends with."""
    name = request.node.name.rpartition("_")[2]
    file = tmp_path / TARGETS[name].file
    file.write_text(TARGETS[name].render(SPEC), encoding="utf-8")
    return file


def test_a_task_is_read_by_skypilot(written: Path) -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(written))
    assert task.num_nodes == 2 and {name: task.envs[name] for name in ENVIRONMENT} == ENVIRONMENT
    [resources] = task.resources
    assert resources.accelerators == {"H100": 4} and task.run.startswith("mkdir -p ~/plait-job")


def test_a_program_is_run_by_the_client_of_modal(written: Path) -> None:
    modal = pytest.importorskip("modal")
    names = runpy.run_path(str(written))
    assert names["COMMAND"] == [*COMMAND] and isinstance(names["job"], modal.Function)


def test_a_component_is_read_by_torchx(written: Path) -> None:
    pytest.importorskip("torchx")
    from torchx.specs import macros
    from torchx.specs.builders import materialize_appdef
    from torchx.specs.finder import get_component

    [role] = materialize_appdef(get_component(f"{written}:job").fn, []).roles
    values = macros.Values(img_root="", app_id="app-1", replica_id="0", rank0_env="FIRST")
    _, _, app, first, words = values.apply(role).args
    assert (app, first) == ("app-1", "FIRST") and json.loads(words) == [TORCHRUN, [*COMMAND], ENVIRONMENT]


def test_a_trainjob_is_read_by_the_models_of_kubernetes(written: Path) -> None:
    models: Any = pytest.importorskip("kubeflow_trainer_api.models")
    parsed = pytest.importorskip("yaml").safe_load(written.read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(parsed)
    assert job.to_dict()["spec"] == parsed["spec"]
