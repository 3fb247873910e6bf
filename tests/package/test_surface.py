"""The names of gradckpt are few, and stay few: a new feature finds its place in one of them."""

import json
import subprocess
import sys

#: docs/reference.md says what each does. Nothing is added: what is new is a keyword,
#: a method or in a submodule.
NAMES = {
    *("CompressionConfig", "GradckptInactiveWarning", "Offload", "SelectiveRecompute"),
    *("checkpoint", "checkpoint_sequential", "compress_saved", "disable", "enable", "gradient_error", "patched"),
    *("Plan", "plan", "residuals", "stats", "track_memory"),
}

SUBMODULES = {"codecs", "compat", "config", "integrations", "policies", "run", "selectors"}


def test_names_of_a_fresh_process_are_the_frozen_ones():
    program = "import gradckpt, json; print(json.dumps([name for name in vars(gradckpt) if name[0] != '_']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) - SUBMODULES == NAMES


def test_there_are_sixteen_names():
    assert len(NAMES) == 16
    assert len(SUBMODULES) <= 7
