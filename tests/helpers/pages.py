"""Parts of pages that programs write: what stands between two marks. And the messages of the
sources.

``python tests/helpers/pages.py PAGE...`` writes the table of all codecs, or what the commands in
the page print; without a page it prints the table.
"""

import ast
import contextlib
import inspect
import io
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

import torch.utils.checkpoint as torch_checkpoint
from checkout import ROOT

from gradckpt import codecs
from gradckpt.__main__ import main

# ---- Parts of pages that programs write: what stands between two marks.


def fill(page, marks, make):
    """Return the page with what ``make`` returns between each pair of marks.

    ``marks``: the first as a regular expression, the second as it stands. ``make`` takes the match
    of the first.
    """
    start, end = marks
    between = re.compile(rf"(?P<mark>{start}\n).*?(?={re.escape(end)})", re.DOTALL)
    filled, number = between.subn(lambda found: f"{found['mark']}\n{make(found)}\n\n", page)
    if number == 0:
        raise SystemExit(f"the page lacks the marks {start} and {end}")
    return filled


# ---- The table of all codecs in docs/codecs.md, from gradckpt.codecs.info().

TABLE_MARKS = re.escape("<!-- all codecs: python tests/helpers/pages.py docs/codecs.md -->"), "<!-- end -->"


def table():
    rows = ["| name | id | dtypes | bits/value | max_error | what it is |", "| --- | --- | --- | --- | --- | --- |"]
    for name in codecs.names():
        info = codecs.info(name)
        bits = " ".join(dict.fromkeys(f"{bits:g}" for bits, *_ in info["sizes"].values()))
        error = f"{info['max_error']:.3g}" if info["max_error"] else "exact"
        dtypes = " ".join(info["dtypes"])
        rows.append(f"| `{name}` | {info['id']} | {dtypes} | {bits} | {error} | {info['summary']} |")
    return "\n".join(rows)


def page_with_table(page):
    return fill(page, TABLE_MARKS, lambda _: table())


# ---- What pages show of ``gradckpt plan``: the output of the commands that stand in them.
#
# python tests/helpers/pages.py docs/decide.md docs/budgets.md README.md
#
# A mark after a command names the parts of its output to show. Models are built from the shapes
# below, in a folder that has the name of the hub's. Long sentences are wrapped, as a terminal
# does, and a table becomes one of Markdown, whose cells wrap where a page is narrow.

PLAN_MARKS = r"<!-- of its output, by tests/helpers/pages\.py: (?P<parts>[a-z ,]+) -->", "<!-- end -->"

#: In the order in which the command prints them, with empty lines between; and with --budget.
PARTS = ("verdict", "fixed", "table", "lines", "about")
PARTS_OF_BUDGET = ("verdict", "table", "about")

COMMAND = re.compile(r"^```console\n\$ gradckpt (plan .*?)^```$", re.M | re.S)

#: A python block of the page that a command imports.
MODULE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.M | re.S)

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}

CONFIGS = {
    "meta-llama/Meta-Llama-3-8B": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "meta-llama/Llama-3.2-1B": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "meta-llama/Meta-Llama-3-70B": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
    "google/vit-large-patch16-224": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 1024,
        "image_size": 224,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 16,
    },
}


def output_of(command):
    """Return what a command prints, by the names of its parts."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(shlex.split(command))
    names = PARTS_OF_BUDGET if "--budget" in command else PARTS
    texts = printed.getvalue().strip().split("\n\n")
    if len(texts) < len(names):  # nothing fits, so there are no lines to paste
        names = [name for name in names if name != "lines"]
    return dict(zip(names, texts, strict=True))


def columns_of(lines):
    """The places of each column; between columns, two places are empty in all lines."""
    width = max(map(len, lines))
    used = "".join("x" if any(line[i : i + 1].strip() for line in lines) else " " for i in range(width))
    return [found.span() for found in re.finditer(r"x( ?x)*", used)]


def as_markdown(table):
    """The printed table as one of Markdown; a column of figures is aligned to the right."""
    lines = table.splitlines()
    columns = columns_of(lines)
    rows = [[line[start:end].strip() for start, end in columns] for line in lines]
    ends = [{len(line[start:end].rstrip()) for line in lines} - {0} for start, end in columns]
    rule = ["---:" if len(each) == 1 else "---" for each in ends]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def shown(parts, names):
    """Blocks of text, and the table between them."""
    shown_parts = []
    for name in names.split(", "):
        lines = parts[name].splitlines()
        if name in ("verdict", "fixed", "about"):
            lines = [textwrap.fill(line, 100) for line in lines]
        shown_parts.append(as_markdown(parts[name]) if name == "table" else "```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(shown_parts).replace("\n```\n\n```text\n", "\n\n")


def written(page):
    """Return the page with what its commands print; the files that they read are made here."""
    for folder, config in CONFIGS.items():
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text(json.dumps(config))
    for name, source in MODULE.findall(page):
        Path(name).write_text(source)

    def output(mark):
        command = [*COMMAND.finditer(page, 0, mark.start())][-1][1].replace("\\\n", " ")
        return shown(output_of(command), mark["parts"])

    return fill(page, PLAN_MARKS, output)


# ---- The messages of gradckpt, read from its sources, with … for what varies.

PREFIX = "gradckpt: "

#: Functions that put the prefix before a warning, or before a line in the log.
SAY = {"warn_inactive", "say", "inactivity_warning.say"}

#: What shows its first argument to the user as it is.
SHOW = re.compile(r"logger\.\w+|logging\.getLogger\('gradckpt'\)\.\w+|warnings\.warn|rank_zero_info|sys\.exit")

#: Of Python and of torch's C++, to the letter.
NOT_OF_CHECKPOINT = re.compile(
    r"tuple index out of range|generator raised StopIteration|module 'gradckpt\.\w+' has no attribute …"
    r"|checkpoint\(\) (missing 1 required positional|got multiple values for) argument:? 'function'"
    r"|one of the variables needed for gradient computation has been modified by an inplace operation: .*"
    r"|Trying to use a saved tensor that has been detached in-place.*"
)

#: A ValueError there is the parser's, which puts the program's name before it.
PARSED = {ROOT / "gradckpt" / name for name in ("run.py", "_script.py")}

#: The middle of a message: of setup.py; and of a plan, which says why a step cannot be simulated.
MESSAGE_PARTS = {"CudaError", "NotSimulated"}


def template(node):
    """A text of the source; not a text: …"""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


def texts_of_python(tree):
    """All texts but docstrings."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in parts:
            yield template(node)


def messages_of_python(tree):
    """What is raised, warned of or logged; returned to be raised: what begins with the prefix."""
    yield from (text for text in texts_of_python(tree) if text.startswith(PREFIX) and "%" not in text)
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args or ast.unparse(call.func) in MESSAGE_PARTS:
            continue
        if ast.unparse(call.func) in SAY:
            yield PREFIX + template(call.args[0])
        elif isinstance(node, ast.Raise) or SHOW.fullmatch(ast.unparse(call.func)):
            yield re.sub("%[sdr]", "…", template(call.args[0]))


def messages_of_c(source):
    """The first text of each call that raises or warns, and any that begins with the prefix."""
    literals = r'(?:"(?:[^"\\\n]|\\.)*"\s*)+'
    raised = re.findall(rf'PyErr_(?:SetString|Format|WarnEx)\([^";]*?({literals})', source)
    for each in {*raised, *re.findall(literals, source)}:
        text = re.sub(r"%(?:\.\d+)?(?:ll|z)?[a-zA-Z]", "…", "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', each)))
        if each in raised or text.startswith(PREFIX):
            yield text.replace('\\"', '"')


def plain(text):
    """With single spaces, one … for several, and without lines after a colon: a command, a list."""
    text = re.sub(r":\n.+", ":", text.replace("\\n", "\n"), flags=re.S)
    return re.sub("…+", "…", " ".join(text.split()))


def messages():
    """Every message that says something itself."""
    found = set()
    for path in [*ROOT.glob("gradckpt/**/*.py"), ROOT / "setup.py"]:
        texts = messages_of_python(ast.parse(path.read_text()))
        found |= {PREFIX + text if path in PARSED and not text.startswith(PREFIX) else text for text in texts}
    for path in ROOT.glob("csrc/**/*.c"):
        found |= set(messages_of_c(path.read_text()))
    return {text for text in map(plain, found) if len(re.findall("[a-z]", text.partition(" ")[2])) > 3}


def is_of_torch(text):
    """Return whether a message is torch's or Python's own."""
    if NOT_OF_CHECKPOINT.fullmatch(text) or text.startswith("torch.utils.checkpoint"):
        return True
    torchs = " ".join(plain(each) for each in texts_of_python(ast.parse(inspect.getsource(torch_checkpoint))))
    return all(part.strip(" .") in torchs for part in re.split(r"…|(?<=\.) ", text))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(table())
    for path in map(Path, sys.argv[1:]):
        path = path.resolve()
        page = path.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.environ["HF_HUB_OFFLINE"] = "1"
            path.write_text((page_with_table if re.search(TABLE_MARKS[0], page) else written)(page))
