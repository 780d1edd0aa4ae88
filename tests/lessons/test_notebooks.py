"""A lesson as a notebook: one source, converted by jupytext, and the notebook runs."""

import importlib.util
import sys
from types import ModuleType

import pytest

from plait.run.course.lessons import find, numbered

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jupytext") is None, reason="jupytext is not installed: pip install 'plait[notebooks]'"
)


@pytest.mark.parametrize("number", [lesson.number for lesson in numbered()])
def test_a_notebook_leads_back_to_the_same_file(number: int) -> None:
    import jupytext

    text = find(number).path.read_text()
    notebook = jupytext.reads(text, fmt="py:light")
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("markdown") >= 2 and kinds.count("code") >= 5
    assert jupytext.writes(notebook, fmt="py:light").partition('"""')[2] == text.partition('"""')[2]


def test_its_cells_run_one_after_the_other(capfd: pytest.CaptureFixture[str]) -> None:
    import jupytext

    main = ModuleType("__main__")
    kept, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        for cell in jupytext.reads(find(9).path.read_text(), fmt="py:light").cells:
            if cell.cell_type == "code":
                exec(cell.source, main.__dict__)
    finally:
        sys.modules["__main__"] = kept
    assert "gradients and parameters: the same bits on every rank" in capfd.readouterr().out
