"""Banned words in the sources and the documentation: ``python tests/language.py [FILE...]``.

``make lint`` runs it. For each occurrence it prints file, line, words and what to write instead;
the exit status is 1 if there is one. Without arguments it reads all files of FOLDERS.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("csrc", "gradckpt", "tests", "docs", "examples", "benchmarks", "release"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "setup.py", "pyproject.toml"),
)

#: It contains the words.
EXCEPT = ("tests/language.py",)

#: Words, as regular expressions -> what to write instead. A space also matches the end of a line
#: with the prefix of a comment on the next one, and an underscore.
BANNED = {
    "(no|some|any|every)body|who(m|so)?ever": "the passive, or the subject: the caller, the user",
    "(?<!so )(?<!for )that there (is|are|was|were)": "a noun: the known values, not a negation",
    "no more(?! than)": "no longer, nothing else, or the number",
    "(?<!to )(?<!can )be it": "either, or, whether",
    "lest": "so that ... not",
    "sa(y|ys|id) it to": "print, log, warn, raise",
    "sa(y|ys|id) nothing to": "has no effect on",
    "whatever (it|they|he)": "any, regardless of",
    "ever after": "from then on",
    "as it says": "the fix",
    "slip of the pen": "misspelling",
    "(is|are) none of": "is not one of",
    "in the place of": "in place of, instead of",
    "on paper": "simulated, in a simulated step",
    "doors?": "entry point",
    "rubbish": "undefined contents, invalid bytes",
    "(?<!_)(he|him|his|himself)(?!_)": "the user, they",
}


def _pattern(words: str) -> str:
    gap = r"(?:_|[ \t]*\n[ \t]*(?:#:?|//|\*|>)?[ \t]*| )"
    return "(?P<found>" + re.sub(r"(?<!so)(?<!for)(?<!to)(?<!can) ", lambda _: gap, words) + ")"


_RULES = [
    (re.compile(rf"(?<![A-Za-z])(?:{_pattern(words)})(?![A-Za-z])", re.IGNORECASE), instead)
    for words, instead in BANNED.items()
]


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and what to write instead, in the order of the rules."""
    for rule, instead in _RULES:
        for match in rule.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield line, re.sub(r"[\W_]+", " ", match["found"]), instead


def sources() -> list[str]:
    """Return the text files that are checked."""
    found = [path for name in FOLDERS for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    names = [str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts]
    return sorted(name for name in names if name not in EXCEPT)


def main(names: list[str]) -> int:
    """Print the occurrences in files; return 1 if there are any."""
    count = 0
    for name in names or sources():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # a picture, or a file that was just removed
            continue
        for line, words, instead in sorted(find(text)):
            print(f'{name}:{line}: "{words}": write {instead}')
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
