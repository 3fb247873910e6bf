"""A policy without operators."""

import os
import subprocess
import sys

from checkout import ROOT

PROGRAM = """
import gradckpt
for policy in ([], {}, gradckpt.policies.Policy([])):
    gradckpt.compat.create_selective_checkpoint_contexts(policy)
"""


def test_empty_policies_before_any_other():
    """In a process of its own: what is registered for the first policy is registered once."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
