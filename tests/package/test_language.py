"""tests/language.py: where it finds banned words, and what it lets pass."""

import sys

import pytest
from checkout import TESTS

sys.path.insert(0, str(TESTS))
import language


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("The store\nasks Nobody.", 2, "Nobody"),
        ("def test_modules_that_nobody_calls():", 1, "nobody"),
        ("the codecs that there\n    are, by name", 1, "that there are"),
        ("    # it counts no\n    # more, since", 1, "no more"),
        ("/* put in the\n * place of it */", 1, "in the place of"),
        ("// what no\n// more is", 1, "no more"),
        ("#: none of them is none\n#: of ours", 1, "is none of"),
    ],
)
def test_found(text, line, words):
    """In sentences, in names, and over the end of a line of text or comment."""
    assert [found[:2] for found in language.find(text)] == [(line, words)]


@pytest.mark.parametrize(
    "text",
    ["at most: no more than 4", "so that there is one", "it may be. It ends", "the embodied", "he_init", "This"],
)
def test_passed(text):
    assert list(language.find(text)) == []


def test_report(tmp_path, monkeypatch, capsys):
    """A line for each occurrence, in the order of the file, with the way to write it."""
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Fine.\nSomebody holds it, lest it goes.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert language.main(["page.md", "picture.png", "gone.md"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'page.md:2: "Somebody": write the passive, or the subject: the caller, the user'
    assert lines[1] == 'page.md:2: "lest": write so that ... not'
    assert len(lines) == 2
    (tmp_path / "page.md").write_text("Fine.\n")
    assert language.main(["page.md"]) == 0
