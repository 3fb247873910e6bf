"""docs/architecture.md and its picture show the tree as it is; pages for contributors name files
that exist."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from checkout import ROOT
from test_layers import ALLOWED, CONTRACT, ONLY, PYTHON, SOURCES, package_of, unit_of

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PICTURE = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
SVG = "{http://www.w3.org/2000/svg}"

#: What the pages name in backticks that looks like a path of the tree: headers of others, and what
#: a target makes.
ELSEWHERE = {*ONLY, "build/docs"}

#: Folders that a checkout has and the tree has not.
MADE = {"build", "dist", "__pycache__"}

C_PACKAGES = {package_of(unit_of(path)) for path in SOURCES if path != CONTRACT}
PACKAGES = {path.parent.name for path in (ROOT / "gradckpt").glob("*/__init__.py")}


def tree():
    """The path of each file and folder, from the root and with a slash before it."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in MADE and not re.search(r"^\.(?!ci$)|\.egg-info$", name)]
        for name in (*folders, *files):
            yield f"/{(Path(folder) / name).relative_to(ROOT)}"


TREE = sorted(tree())


def names_in(text):
    """What stands in backticks and is a file's name, or a path; not in code blocks."""
    plain = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    for name in re.findall(r"`([^`\s]+)`", plain):
        if re.fullmatch(r"[\w.<>/-]*(/|\.(c|h|cu|cuh|py|md|txt|toml|yml|svg|so))|[\w.<>-]+(/[\w.<>-]+)+", name):
            yield name


def found(name):
    """The paths that end with this name; <codec> and the like stand for any word."""
    pattern = re.sub(r"<\w+>", r"[^/]+", re.escape(name.rstrip("/")))
    return [path for path in TREE if re.search(rf"/{pattern}$", path)]


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/decisions.md", "CONTRIBUTING.md"])
def test_every_file_that_the_page_names_exists(page):
    """By its path, by the end of its path, or by its name, which then is the name of one file."""
    names = set(names_in((ROOT / page).read_text())) - ELSEWHERE
    assert names
    wrong = {}
    for name in sorted(names):
        paths = found(name)
        if f"/{name.rstrip('/')}" not in paths and (len(paths) != 1 if "<" not in name else not paths):
            wrong[name] = paths
    assert not wrong


def table_of(heading):
    """The rows below a heading: {code of the first cell: the last cell}."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    cells = {first.strip().strip("`"): last.strip() for _, first, *_, last, _ in rows}
    assert len(cells) == len(rows)
    return cells


def code_in(cell):
    return set(re.findall("`([^`]+)`", cell))


def test_the_page_states_the_arrows_between_packages_of_c():
    assert set(ALLOWED) == C_PACKAGES
    assert {package: code_in(cell) for package, cell in table_of("Packages of csrc").items()} == ALLOWED


def test_the_page_states_what_may_import_packages_of_python():
    stated = table_of("Packages of gradckpt")
    free = {package for package, cell in stated.items() if cell == "any module"}
    dotted = {"gradckpt": "gradckpt"}  # the package itself
    importers = {
        f"gradckpt.{package}": {dotted.get(each, f"gradckpt.{each}") for each in code_in(cell)}
        for package, cell in stated.items()
        if package not in free
    }
    assert importers == PYTHON
    assert set(stated) >= PACKAGES
    assert free <= PACKAGES


def texts(kind):
    return [text.text for text in PICTURE.iter(f"{SVG}text") if text.get("class") == kind]


def test_the_picture_shows_each_package_once_and_nothing_else():
    assert sorted(texts("package")) == sorted(C_PACKAGES)
    assert sorted(texts("python")) == sorted(PACKAGES)
    assert texts("file") == [CONTRACT.name]
