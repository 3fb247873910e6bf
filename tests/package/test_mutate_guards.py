"""tests/mutate_guards.py: what it takes for a guard, and that a switch does what it says."""

import os
import subprocess

import mutate_guards
import pytest

SOURCE = """
/* if (in_a_comment) return; */
#define MACRO(x) if (x) return 1;
static int limit(int x, int *seen)
{
    if (x > 100) return 100;
    if (x < 0 || (x == 13 && ++*seen)) {
        *seen += 10;
        goto low;
    }
    if (x == 1) { x = 2; }
    else if (x == 3) {
        return 33;
    }
    return x;
low:
    return 0;
}
static char *text(void)
{
    char *made = calloc(3, 1);

    if (made == NULL) {
        return NULL;
    }
    if (made[1]) { /* faster: it is ready */
        return made;
    }
#if GCK_WITH_CUDA
    if (made[0]) { return made; }
#endif
    return made;
}
"""


@pytest.fixture(scope="module")
def guards():
    return list(mutate_guards.guards_of(SOURCE, "engine/limit.c"))


def test_what_is_a_guard(guards):
    assert [(g.line, g.condition) for g in guards] == [
        (6, "x > 100"),
        (7, "x < 0 || (x == 13 && ++*seen)"),
        (12, "x == 3"),
        (23, "made == NULL"),
        (26, "made[1]"),
        (30, "made[0]"),
    ]
    assert [g.apart for g in guards] == ["", "", "", "a failed allocation", "speed alone", "device code"]


def test_a_switch(guards, tmp_path):
    """Removed: what the condition changes is still changed. Negated: the others go.
    And it is written down."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "guards.h").write_text(mutate_guards.SWITCH.replace("COUNT", str(len(guards))))
    program = (
        mutate_guards.switched(SOURCE, list(enumerate(guards)), tmp_path / "guards.h", "limit.c")
        + """
        #include <stdio.h>
        int main(void)
        {
            int seen = 0, values[] = {200, -1, 13, 3, 5};
            for (int i = 0; i < 5; i++) printf("%d ", limit(values[i], &seen));
            printf("%d", seen + 0 * (text() == NULL));
            return 0;
        }"""
    )
    (tmp_path / "limit.c").write_text("#include <stdlib.h>\n" + program)
    subprocess.run(["gcc", "-D_GNU_SOURCE", "-o", "limit", "limit.c"], cwd=tmp_path, check=True)
    hits = tmp_path / "hits"

    def run(**env):
        hits.write_bytes(bytes(len(guards)))
        given = {**os.environ, mutate_guards.HITS: str(hits), **env}
        said = subprocess.run(["./limit"], cwd=tmp_path, env=given, capture_output=True, text=True, check=True).stdout
        return said, list(hits.read_bytes())

    assert run() == ("100 0 0 33 5 21", [3, 3, 3, 1, 1, 0])
    assert run(**{mutate_guards.GUARD: "0"})[0] == "200 0 0 33 5 21"
    assert run(**{mutate_guards.GUARD: "1"})[0] == "100 -1 13 33 5 1"
    assert run(**{mutate_guards.GUARD: "2"})[0] == "100 0 0 3 5 21"
    assert run(**{mutate_guards.GUARD: "2", mutate_guards.HOW: "negate"})[0] == "100 0 0 3 33 21"
