"""Parts of pages that programs write: what stands between two marks."""

import re


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
