"""Which tests `make test` runs, and which `make test_all` beside them. conftest.py asks,
for ``--target``."""

#: What `make test` leaves to `make test_all`, by reason: folders, files,
#: and the first letters of tests.
LEFT_BECAUSE = {
    "needs packages that `make test` does not install, or ranks of its own": (
        "frameworks",
        "package/test_stats_reporting.py::test_tensorboard",
    ),
    "builds the device code, with nvcc or for the CPU": (
        "codec/test_cuda_build.py",
        "codec/test_cuda_emulation.py",
    ),
    "builds the extension once more": ("codec/test_toy_codec.py",),
    "builds the virtual device, and runs in a process of its own": (
        "device",
        "equivalence/test_suites_on_device.py",
    ),
    "builds packages or the site, or runs what users run: a process each": (
        "package/test_gpu_scripts.py",
        "package/test_main.py",
        "models/test_nothing_left.py",
        "models/test_paper.py::test_a_process_with_few_addresses",
        "models/test_paper.py::test_no_memory_is_touched",
        "models/test_trainer_flag.py::test_order_of_imports",
        "models/test_trainer_flag_scope.py",
        "package/test_import_effects.py::test_imported_again",
        "package/test_import_effects.py::test_two_things_differ[transformers first",
        "package/test_benchmarks.py",
        "package/test_benchmarks_frontier.py",
        "package/test_benchmarks_gradient_error.py",
        "package/test_benchmarks_selective.py",
        "package/test_benchmarks_training.py",
        "package/test_docs.py::test_commands_run",
        "package/test_docs.py::test_files_of_the_root_are_in_the_site",
        "package/test_docs.py::test_every_page_is_built",
        "package/test_docs.py::test_examples_run",
        "package/test_docs.py::test_nothing_is_loaded_from_elsewhere",
        "package/test_docs.py::test_tables_are_tables",
        "package/test_examples.py",
        "package/test_gpu.py",
        "package/test_make_release.py",
        "package/test_packaging.py",
        "package/test_plan_command.py",
        "package/test_plan_pages.py",
        "planner/test_needed_memory.py",
        "package/test_run.py",
        "package/test_run_options.py",
    ),
    "runs mypy once more": (
        "package/test_typing.py::test_a_typed_program_passes",
        "package/test_typing.py::test_a_wrong_line_is_an_error",
        "package/test_typing.py::test_the_stub_is_what_the_extension_has",
    ),
    "compiles whole models, or by inductor": (
        "compile/test_compile_blocks.py::test_everyday[T5",
        "compile/test_compile_blocks.py::test_everyday[UNet",
        "compile/test_compile_rewritten.py::test_each_function_between_residuals",
        "compile/test_compile_rewritten.py::test_inductor_itself",
        "selective/test_higher_order.py::test_gradients_compiled",
        "compile/test_compile.py::test_torchs_own_backends",
        "compile/test_compile_breaks.py",
        "compile/test_compile_discrete.py::test_a_compiled_block_in_an_eager_region_routes_as_in_the_forward[inductor",
        "compile/test_compile_limits.py::test_a_graph_from_inductors_cache",
        "compile/test_compile_limits.py::test_a_leaf_stays_exact_in_a_fake_quantized_region_as_without_compile[inductor",
        "compile/test_compile_models.py",
        "compile/test_compiled_saves.py::test_a_block_of_inductor",
        "compile/test_compiled_saves.py::test_caches_of_inductor",
        *(f"compile/test_compiled_saves.py::test_ten_blocks[{name}]" for name in ("GPT2", "Bert", "T5", "ViT")),
        "models/test_patched_models.py::TestCompile::test_afterwards_graphs_are_torchs",
    ),
    "runs what another torch or another process would do: a process each": (
        "engine/test_older_torch.py",
        "engine/test_processes.py",
    ),
    "plans many models, of which `make test` plans some": (
        "models/test_budget_hostile.py",
        "models/test_budget_loops.py",
        "models/test_budget_mixtures.py",
        "models/test_budget_profile.py::test_more_is_never_slower",
        "models/test_budget_profile.py::test_plans_that_a_profile_knows_are_considered",
        "models/test_budget_profile.py::test_the_same_file_gives_the_same_bytes",
        "models/test_plan_higher_order.py",
        "models/test_plan_offload.py",
        "models/test_plan_operators.py",
        "models/test_plan_peaks.py",
        "models/test_plan.py::test_the_longest_sequence_fits_and_a_longer_one_does_not[sdpa",
        "models/test_working_set.py::test_budgets_use_parts_and_by_permission_tiles",
        "models/test_working_set.py::test_live_budgets",
        "models/test_working_set.py::test_rows_of_a_plan_and_their_real_peaks",
        "package/test_plan_budget_command.py",
        "planner/test_places_in_plans.py",
    ),
    "is a sweep of which `make test` has a part": (
        "package/test_codec_gradients.py",
        "planner/test_paper_leaves_no_trace.py",
        "codec/test_casts.py::test_every_bfloat16_and_what_lies_between",
        "codec/test_sparse.py::test_many_blocks_on_the_device",
        "engine/test_offloader.py",
        "engine/test_byte_store.py::test_each_request_for_memory_may_fail",
        "engine/test_byte_store.py::test_what_comes_back_is_what_went[thread",
        "engine/test_offload_graphs.py::test_programs_with_a_file",
        *(f"engine/test_call_faults.py::test_any_call_may_fail[{share}" for share in (1, 2, 3, 4)),
        "equivalence/test_layout_sweep.py::test_every_layout_with",
        "models/test_enable.py::test_every_pair_of_keywords[transformers",
        "models/test_no_recompute.py::test_families",
        *(f"selective/test_kept_then_written.py::test_operators_that_products_are_part_of[{n}" for n in range(1, 8)),
        "selective/test_jumps.py::test_what_is_kept_does_not_jump[1",
        *(f"selective/test_one_truth.py::test_of_every_operator[{n}" for n in (1, 2, 3)),
        "codec/test_codec_hostile.py::test_last_values_of_a_tensor_beyond_2_31",
        "equivalence/test_differing_runs.py::test_a_recompute_that_differs_is_right",
        "equivalence/test_harmless_runs.py::test_a_recompute_that_differs_harmlessly_is_right",
        "equivalence/test_nestings.py::test_pairs",
        "equivalence/test_nestings.py::test_some_triples",
        *(f"equivalence/test_random_programs.py::test_random_programs_behave_as_with_torch[{n}]" for n in range(5, 10)),
        "models/test_gradient_error_models.py",
        *(f"package/test_torch_private.py::test_each_name_may_be_missing[{part}" for part in (1, 2, 3)),
    ),
}
LEFT = [key for keys in LEFT_BECAUSE.values() for key in keys]

#: What only `make soak` runs, beside the tests that are marked so: they take a minute each, and of
#: each the other targets have a part.
SOAK = [
    "codec/test_toy_codec.py::test_the_tests_over_all_codecs_see_it",
    "engine/test_long_chains.py::test_a_long_chain_under_compress_saved",
    "engine/test_offloader.py::test_more_calls_of_the_device_may_fail",
    "equivalence/test_layout_sweep.py::test_every_layout_with_every_pair_of_door_and_codec[operators",
    "equivalence/test_opinfo.py::test_gradients_of_every_operator_are_those_of_plain_autograd[bfloat16",
    "equivalence/test_opinfo.py::test_gradients_of_every_operator_are_those_of_plain_autograd[float64",
    "models/test_plan.py::test_the_longest_sequence_fits_and_a_longer_one_does_not[eager",
    "package/test_plan_budget_command.py::test_codecs_are_permitted_one_by_one",
    "package/test_plan_budget_command.py::test_unrolled_segments_are_those_of_the_whole_step",
]


def is_left(name):
    """Does the table name this folder, file or test, or what it lies in?"""
    return any(
        name == key or name.startswith((f"{key}/", f"{key}::")) or ("::" in key and name.startswith(key))
        for key in LEFT
    )
