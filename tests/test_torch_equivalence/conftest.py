"""What is said when torch loads a module late is no part of a program's record: load it now."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp  # noqa: F401
