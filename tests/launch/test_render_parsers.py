"""Jobs as text, read by the programs that they are for, where those are installed."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from test_render import COMMAND, ENVIRONMENT, SPEC, TORCHRUN

from plait.run.launch.render import TARGETS


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
