"""mkdocs hooks: a line ``::: name`` of reference.md becomes what the installed gradckpt says of that name, and
changelog.md becomes CHANGELOG.md.

Signatures and docstrings are read at run time, so that functions written in C are like the others.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"

DIRECTIVE = re.compile(r"^::: (gradckpt[\w.]*)$", re.M)

SECTIONS = ("Args", "Returns", "Raises", "Example", "Attributes")

#: What torch calls, not the user.
TORCHS = ("forward", "backward")

#: Columns of a signature before it takes a line for each argument.
WIDTH = 100


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "changelog.md":
        return CHANGELOG.read_text().replace("](docs/", "](")
    if page.file.src_uri != "reference.md":
        return markdown
    names = DIRECTIVE.findall(markdown)
    return DIRECTIVE.sub(lambda match: entry(match[1], names), markdown)


def entry(name: str, names: list[str]) -> str:
    """Heading, signature and docstring of a public name, with those of its members."""
    value = resolve(name)
    lines = [f"### `{name}` {{#{anchor(name)}}}", *signature(name, value), prose(value.__doc__, names)]
    for member, (of, text) in members(name, value).items():
        lines += [f"#### `{member}`", *signature(member, of), prose(text, names)]
    return "\n\n".join(line for line in lines if line)


def resolve(name: str) -> Any:
    """The object of a dotted name; its module may be one that nothing has imported yet."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return importlib.import_module(name)
    try:
        return getattr(resolve(module), attribute)
    except AttributeError:
        return importlib.import_module(name)


def anchor(name: str) -> str:
    return name.removeprefix("gradckpt.").replace(".", "-").lower()


def members(name: str, value: Any) -> dict[str, tuple[Any, str | None]]:
    """What belongs to a class or module: name to (object, docstring)."""
    if isinstance(value, ModuleType):
        comments = comments_above(value)
        public = {key: getattr(value, key) for key in value.__all__}
        return {f"{value.__name__}.{key}": (of, comments.get(key) or inspect.getdoc(of)) for key, of in public.items()}
    if not isinstance(value, type) or issubclass(value, BaseException):
        return {}
    found = {}
    for key, of in vars(value).items():
        of = of.__func__ if isinstance(of, (classmethod, staticmethod)) else of
        text = getattr(of, "__doc__", None)
        described = callable(of) or inspect.isdatadescriptor(of)
        if not key.startswith("_") and described and text not in (None, value.__doc__) and key not in TORCHS:
            found[f"{value.__name__}.{key}"] = (of, text)
    return found


def comments_above(module: ModuleType) -> dict[str, str]:
    """``#:`` comments of a module's constants, which have no docstrings of their own."""
    source = inspect.getsource(module)
    found = re.finditer(r"^((?:#: .*\n)+)(\w+)\b", source, re.M)
    return {match[2]: match[1].replace("#: ", "").strip() for match in found}


class Bare(str):
    """An annotation that is written without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, value: Any) -> list[str]:
    """A code block, or nothing for what is not called."""
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    if not callable(value) or is_exception or not (isinstance(value, type) or inspect.isroutine(value)):
        return []
    try:
        found = inspect.signature(value)
    except ValueError:
        return []
    if str(found) in ("()", "(*args, **kwargs)") and isinstance(value, type):
        return []  # not made by calling it
    parameters = [
        p.replace(annotation=Bare(p.annotation)) if isinstance(p.annotation, str) else p
        for key, p in found.parameters.items()
        if key not in ("self", "cls")
    ]
    result = found.return_annotation
    if isinstance(value, type) or result is inspect.Signature.empty:
        arrow = ""
    else:
        arrow = f" -> {result if isinstance(result, str) else inspect.formatannotation(result)}"
    text = str(inspect.Signature(parameters))
    short = name.removeprefix("gradckpt.")
    if len(short + text + arrow) > WIDTH:
        rows = inspect.Signature(parameters)
        text = "(\n" + "".join(f"    {row},\n" for row in split(str(rows)[1:-1])) + ")"
    return [f"```py\n{short}{text}{arrow}\n```"]


def split(arguments: str) -> list[str]:
    """Cut at the commas that are in no bracket."""
    rows, depth = [""], 0
    for char in arguments:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            rows.append("")
        else:
            rows[-1] += char
    return [row.strip() for row in rows]


def prose(docstring: str | None, names: list[str]) -> str:
    """A docstring of this project as Markdown: its sections, their items, and roles such as ``:func:`` as links."""
    if not docstring:
        return ""
    out: list[str] = []
    items = loose = False
    for line in inspect.cleandoc(docstring).split("\n"):
        section = line.rstrip(":")
        item = re.match(r"^ {4}([\w*][\w*, .]*): (.*)", line)
        if line.endswith(":") and section in SECTIONS:
            items, loose = section != "Returns", False
            out += ["", f"**{section}**", ""]
        elif items and item:
            out += [""] * loose + [f"* `{item[1]}`: {item[2]}"]
        elif items and line.startswith("     "):
            loose = loose or not out[-1]  # a second paragraph of an item
            out.append("    " + line.strip())
        else:
            items = items and (not line or line.startswith(" "))
            out.append(line.strip())
    return re.sub(r":(?:\w+):`~?([\w.]+)`", lambda match: link(match[1], names), "\n".join(out)).strip()


def link(name: str, names: list[str]) -> str:
    full = name if name.startswith("gradckpt.") else f"gradckpt.{name}"
    return f"[`{name}`](#{anchor(full)})" if full in names else f"`{name}`"
