"""A plugin of pytest, ``-p on_device``: factories make tensors on the virtual device, so that tests
that name no device run there. test_suites.py starts it."""

import functools
import re

import pytest
import torch
import virtual_device

virtual_device.load()
virtual_device.introduce()
virtual_device.use_host_codecs(True)  # faster than the kernels' emulation, whose bytes other tests compare

import behaviours  # noqa: E402, F401  # asks torch about the CPU

FACTORIES = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip

#: Tests that a device answers otherwise, and why: patterns of their names.
LEFT_OUT = {
    "they pretend that the CPU is a device": ["test_late_overflow"],
    "they need the device's own kernels, which tell how much room they took": ["test_payload_room"],
    "a device's verdicts come a step later": ["test_ill_conditioned"],
    "each call of C is led through one that fails, with the CPU's counts": ["test_call_faults"],
    "Ctrl-C and profilers reach the main thread, and a device's backward has another": [
        "test_interrupts",
        "interrupt_at_each_line",
        "test_leaks.py::test_nothing_stays_of_a_step",
        "failing_restore_of_contexts_is_reported_as_itself",
        "overtake_each_other_on_one_region",
    ],
    "two threads meet in a backward, and a device has one thread for both": [
        "two_threads_",
        "of_two_threads",
        "four_threads_train_as_one",
        "recomputes_at_once_leave_the_generator",
        "two_backwards_inside_one_region_at_once",
    ],
    "they start processes": ["test_processes"],
    "they name the CPU, its numpy, DLPack, generators, autocast or memory": [
        "test_fake_quantized",
        "numpy",
        "dlpack",
        "own_generator",
        "generator_that_is_not_restored",
        "device given",
        "a_draw_of_the_forward_alone",
        "random_programs_draw_the_same",
        "test_random_numbers_and_autocast",
        "test_fake_mode_is_left_alone",
        "test_residuals.py::test_a_module",
        "no_random_state_is_left_after_the_backward",
        "checked_as_by_torch",
        "test_memory_comes_back",
    ],
    "they look torch's functions up, which are wrapped here": [
        "forward_over_reverse",
        "test_duals.py::test_it_is_counted",
        "question_may_drop_the_payload.*empty",
        "a_question_may_change_the_tensor",
    ],
    "the device has no fused attention, addmm or LSTM": [
        "save_attention",
        "test_attention_",
        "lstm",
        "modules_whose_kernels_write",
        "sparse_and_subclasses",
        "sparse input",
        "test_naming",
        "attention_is_kept_where",
        "attention_runs_again",
        "restores_its_inputs_too",
        "disjoint_slices_cost",
    ],
    "a device says later what its codec could not hold, and keeps what has too few zeros": [
        "values_the_codec_cannot_hold",
        "values_that_the_codec_refuses",
        "equal_bytes_are_kept_once.lossless",
        "sparse_int8",
    ],
    "a device encodes saved tensors in groups, and views smaller than their base by themselves": [
        "disjoint_slices_cost",
        "log_softmax_is_kept_in_half_precision_once",
        "views_share_one_payload",
        "smaller_than_its_base",
        "leaves_its_base",
        "transposed_memory_is_shared",
        "the_innermost_decides",
        "a_pair_serves_many_blocks",
        "of_two_pairs",
        "a_pair_keeps_what_the_block_keeps",
        "each_restore_is_a_tensor_of_its_own",
        "what_is_listed_is_encoded_and_close",
        "a_pole_that_nothing_follows",
        "a_product_that_a_pole_uses_later",
        "stays_until_another_block_finds_it",
        "hooks_around_get_what_waits",
        "backward_that_overwrites_what_it_saved",
        "found_although_nothing_waits",
    ],
}


def _on_the_device(make):
    @functools.wraps(make)
    def made(*args, **keywords):
        if keywords.get("device") is not None or keywords.get("out") is not None or keywords.get("pin_memory"):
            return make(*args, **keywords)
        generator = keywords.get("generator")
        if generator is None or generator.device.type == "virtual":
            return make(*args, **{**keywords, "device": "virtual"})
        leaf = keywords.pop("requires_grad", False)
        return make(*args, **keywords).to("virtual").requires_grad_(leaf)

    return made


for name in FACTORIES:
    setattr(torch, name, _on_the_device(getattr(torch, name)))


def pytest_collection_modifyitems(config, items):
    pattern = re.compile("|".join(pattern for patterns in LEFT_OUT.values() for pattern in patterns))
    left = [item for item in items if pattern.search(item.nodeid)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _nothing_unordered_is_left():
    with virtual_device.in_order():
        yield


def pytest_sessionfinish():
    assert torch.virtual.max_memory_allocated() > 0, "no test ran on the device"
