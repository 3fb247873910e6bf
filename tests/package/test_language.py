"""Messages have one form: ``gradckpt: <what is wrong>; <what to do>``, at most 25 words. And
tests/language.py: where it finds banned words, and what it lets pass."""

import re
import sys

import pytest
import torch.utils.checkpoint as torch_checkpoint
from checkout import TESTS
from pages import PREFIX, is_of_torch, messages

sys.path.insert(0, str(TESTS))
import language

# ---- messages

#: Older names of the terms that users meet; tests/language.py has what is banned anywhere.
BANNED = re.compile(r"\breplay=|\b(asked for|stands? in|decisions?|verdicts?|refuse[sd]?)\b")

OURS = sorted(text for text in messages() if text.startswith(PREFIX))


def flaws(text):
    if len(text.split()) > 25:
        yield f"{len(text.split())} words"
    if text.count("; ") > 1:
        yield "more than two parts"
    if re.search(r"[.!]$|[.!?] [A-Z]", text):
        yield "more than one sentence, or a full stop"
    if re.match(r"[A-Z][a-z]+ ", text.removeprefix(PREFIX)):
        yield "a capital letter"
    if BANNED.search(text):
        yield f"the words {BANNED.search(text)[0]!r}"


def test_messages_have_the_form():
    assert len(OURS) > 180
    assert {text: found for text in OURS if (found := list(flaws(text)))} == {}


@pytest.mark.skipif(
    not hasattr(torch_checkpoint, "_SAC_MISMATCH_MSG"),
    reason="a torch before 2.13 has other texts than those reproduced",
)
def test_messages_without_the_prefix_are_torchs():
    assert [text for text in messages() if not text.startswith(PREFIX) and not is_of_torch(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        PREFIX + "word " * 25,
        PREFIX + "wrong; do this; or that",
        PREFIX + "it is wrong. Do this",
        PREFIX + "it is wrong.",
        PREFIX + "Values are wrong",
        PREFIX + "its verdict",
    ],
)
def test_other_forms_are_found(text):
    assert list(flaws(text))


# ---- tests/language.py


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
