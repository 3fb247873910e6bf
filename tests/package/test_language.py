"""Messages have one form: ``gradckpt: <what is wrong>; <what to do>``, at most 25 words."""

import re

import pytest
import torch.utils.checkpoint as torch_checkpoint
from pages import PREFIX, is_of_torch, messages

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
