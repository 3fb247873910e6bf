"""The table of all codecs in docs/codecs.md, from gradckpt.codecs.info().

    python tests/helpers/codec_table.py [docs/codecs.md]

It prints the table, or writes it into the page, between the two marks.
"""

import re
import sys
from pathlib import Path

import page_marks

from gradckpt import codecs

MARKS = re.escape("<!-- all codecs: python tests/helpers/codec_table.py docs/codecs.md -->"), "<!-- end -->"


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
    return page_marks.fill(page, MARKS, lambda _: table())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(page_with_table(path.read_text()))
    else:
        print(table())
