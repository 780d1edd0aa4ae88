"""Runs the code of the guide's page on extending, unchanged."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "extending.md"


def code_of(title: str) -> str:
    """The first code block under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    code: str = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
    return code


def run_section(title: str) -> dict[str, Any]:
    """The names that it leaves."""
    names: dict[str, Any] = {"__name__": "__guide__"}
    exec(compile(code_of(title), f"<{title}>", "exec"), names)
    return names
