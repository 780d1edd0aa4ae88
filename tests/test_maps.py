"""Maps that are true: packages name their files, a class name has one meaning, the glossary has each word once."""

import ast
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [
    folder.parent for source in (ROOT / "src", ROOT / "lessons") for folder in sorted(source.rglob("__init__.py"))
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_a_package_names_each_of_its_files_once(package: Path) -> None:
    """At the head of a line of its docstring, beside what it is for: ``unit.py  ...`` or ``pipeline/  ...``."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    heads = [re.split(r"  +", line.strip())[0] for line in text.splitlines()]
    named = [name for head in heads for name in re.split(r", ", head)]
    files = {file.name for file in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{folder.parent.name}/" for folder in package.glob("*/__init__.py")}
    missing = sorted(name for name in files | folders if named.count(name) != 1)
    assert not missing, f"the docstring of {package.name} does not name, or names twice: {', '.join(missing)}"
    stale = sorted(name for name in named if re.fullmatch(r"\w+(\.py|/)", name) and name not in files | folders)
    assert not stale, f"the docstring of {package.name} names what is not there: {', '.join(stale)}"


def test_a_class_name_has_one_definition() -> None:
    places = defaultdict(list)
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.relative_to(ROOT / "src").as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice, "\n".join(f"class {name}: {', '.join(files)}" for name, files in twice.items())


def test_the_glossary_has_each_word_once_and_in_order() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    words = [match[1].lower() for line in lines if (match := re.match(r"\*\*(.+?)\*\*", line))]
    assert len(words) > 50
    assert len(words) == len(set(words)), sorted({word for word in words if words.count(word) > 1})
    assert words == sorted(words, key=lambda word: word.replace("-", " "))


PAGES = [ROOT / "README.md", ROOT / "docs" / "glossary.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
MODULES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "lessons").rglob("*.py"))]
PATH = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.py|(?:[a-z_]+/)+)(?![\w/*])")
DOTTED = re.compile(r"\bplait(?:_lessons)?(?:\.[a-z_]\w*)+")


def wrong_maps(text: str, folder: Path) -> list[str]:
    """Files and folders that a text names and that are nowhere it may mean, and dotted names that nothing has.

    A path starts at the repository, in ``src/plait``, in ``lessons``, or beside the file with the text.
    """
    source = ROOT / "src"
    homes = [ROOT, source, source / "plait", ROOT / "lessons", folder]
    paths = PATH.findall(re.sub(r"torchrun .*|(my_job|my_rows|FILE)\.py", "", text))  # those are the reader's
    wrong = [path for path in paths if not any((home / path).exists() for home in homes)]
    return wrong + [name for name in DOTTED.findall(text) if not leads_somewhere(name)]


def leads_somewhere(name: str) -> bool:
    """True if a dotted name is a module, or a name in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not wrong_maps(page.read_text(encoding="utf-8"), page.parent)


def test_what_docstrings_name_is_there() -> None:
    wrong = []
    for file in MODULES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        wrong += [f"{file.relative_to(ROOT)}: {name}" for text in texts for name in wrong_maps(text, file.parent)]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_map_is_found() -> None:
    here = ROOT / "src" / "plait" / "table"
    assert wrong_maps("`table/cells.py`, `cells.py`, `zero/unit.py`, `docs/guide/`; plait.table.cells", here) == []
    assert wrong_maps("`table/cell.py`, `guides/`; `plait.table.cell`, `plait.table.cells.nothing`", here) == [
        *("table/cell.py", "guides/"),
        *("plait.table.cell", "plait.table.cells.nothing"),
    ]
