"""Loops inside a test: the report of a failure still names the case."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(*words: object) -> Iterator[None]:
    """Add the case to whatever its block raises.

    For cases by the hundred that differ in a number: one test, not a hundred ids. What a reader
    looks for in a list of tests, such as the codec and the dtype, stays a parameter.
    """
    try:
        yield
    except BaseException as error:
        error.add_note("case: " + ", ".join(map(str, words)))
        raise
