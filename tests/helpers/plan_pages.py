"""What pages show of ``gradckpt plan``: the output of the commands that stand in them.

    python tests/helpers/plan_pages.py docs/decide.md docs/budgets.md README.md

A mark after a command names the parts of its output to show. Models are built from the shapes
below, in a folder that has the name of the hub's. Long sentences are wrapped, as a terminal does,
and a table becomes one of Markdown, whose cells wrap where a page is narrow.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

import page_marks

from gradckpt.__main__ import main

MARKS = r"<!-- of its output, by tests/helpers/plan_pages\.py: (?P<parts>[a-z ,]+) -->", "<!-- end -->"

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

    return page_marks.fill(page, MARKS, output)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path = path.resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            os.environ["HF_HUB_OFFLINE"] = "1"
            path.write_text(written(path.read_text()))
