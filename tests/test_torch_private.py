"""Torch's private names are on two pages: the module that hands them on, and decision 135's table of the others."""

import ast
import re
from pathlib import Path

import plait

SOURCE = Path(plait.__file__).parent
PAGE = SOURCE / "torch_private.py"
RECORD = SOURCE.parents[1] / "docs" / "decisions" / "135-torchs-private-names-on-one-page.md"
MOST = 40
"""Names on both pages together; a change may only lower it."""


def names(path: Path) -> set[str]:
    """The private names of torch that a file imports, or reads as attributes of ``torch``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and re.match(r"torch\b", node.module):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            found |= {text} if re.fullmatch(r"torch(\.\w+)+", text) else set()
    private = {name for name in found if re.search(r"\._(?!_)", name)}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def test_every_private_name_of_torch_has_its_reason() -> None:
    told = set(re.findall(r"^\| `([\w/.]+)` \| `([\w.]+)` \| .+ \|$", RECORD.read_text(), re.MULTILINE))
    used = {
        (path.relative_to(SOURCE).as_posix(), name.removesuffix(".default"))
        for path in SOURCE.rglob("*.py")
        if path != PAGE
        for name in names(path)
    }
    assert used == told
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\w+ = torch|from torch.*import", line)]
    handed = [re.split(r" = | as ", line)[-2 if " = " in line else -1].split()[0] for line in lines]
    assert len(handed) + len(told) <= MOST
    texts = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path != PAGE)
    assert [name for name in handed if not re.search(rf"\b{name}\b", texts)] == []
