"""What fails on a torch that gradckpt does not follow yet: `make test_newer` expects each of these
to fail, so that a listed one that passes is an error, as is another that fails."""

import pytest

#: Release of torch -> why -> tests, as pytest names them.
FAILS_BECAUSE = {
    "2.14.1": {
        "its selective contexts take our saved-tensor hooks for a user's, and warn": (
            *(
                f"equivalence/test_contexts.py::test_selective_contexts_of_torch[{ours}-{policy}]"
                for ours in ("gradckpt", "compat")
                for policy in ("list", "bool", "prefer")
            ),
            "equivalence/test_contexts.py::test_selective_contexts_may_not_be_used_twice[gradckpt]",
            "equivalence/test_contexts.py::test_selective_contexts_may_not_be_used_twice[compat]",
        ),
        "checkpoint() has the keyword respect_saved_tensors_hooks": (
            "engine/test_checkpoint_errors.py::test_signature_has_torchs_keywords",
            "equivalence/test_drop_in.py::test_signature_is_torchs[checkpoint]",
            "equivalence/test_drop_in.py::test_every_keyword_of_torch_is_a_keyword_of_ours",
        ),
        "checkpoint() without a function is a decorator": (
            "equivalence/test_errors.py::test_missing_function[compat]",
        ),
        "its errors name respect_saved_tensors_hooks": (
            "engine/test_checkpoint_errors.py::test_reentrant_is_torchs[True]",
            "engine/test_checkpoint_errors.py::test_reentrant_is_torchs[None]",
            *(
                f"equivalence/test_reentrant.py::test_context_fn_and_debug_are_refused[{ours}-options{n}]"
                for ours in ("gradckpt", "compat")
                for n in range(4)
            ),
        ),
        "attention of three dimensions is one operator, of whose saves compress_saved rounds V and O apart": (
            "equivalence/test_saved_operators.py::test_gradients_of_every_operator_are_close_or_exact",
        ),
        "quantile's gradient goes elsewhere": (
            "selective/test_deciding_operators.py::test_the_gradient_goes_where_the_forward_found_the_result[quantile]",
        ),
    },
}


def failures_of(version):
    """Return the tests that fail on this torch, without the folder "tests/", and why."""
    rows = FAILS_BECAUSE.get(version.partition("+")[0], {})
    return {test: why for why, tests in rows.items() for test in tests}


def expect_failures(items, version):
    """Mark the tests of a session that have to fail on this torch."""
    failures = failures_of(version)
    for item in items:
        if (why := failures.get(item.nodeid.removeprefix("tests/"))) is not None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=why))
