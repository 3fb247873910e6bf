"""Which tests `make test` runs, and which `make test_all` beside them. conftest.py asks,
for ``--target``."""

#: What `make test` leaves to `make test_all`, by reason: folders, files,
#: and the first letters of tests.
LEFT_BECAUSE = {
    "needs packages that `make test` does not install, or ranks of its own": ("frameworks",),
    "builds the device code, with nvcc or for the CPU": (
        "codec/test_cuda_build.py",
        "codec/test_cuda_emulation.py",
    ),
    "builds the virtual device, and runs in a process of its own": (
        "device",
        "equivalence/test_suites_on_device.py",
    ),
    "builds packages or the site, or runs what users run: a process each": (
        "package/test_gpu_scripts.py",
        "package/test_main.py",
        "models/test_nothing_left.py",
        "models/test_trainer_flag.py::test_order_of_imports",
        "models/test_trainer_flag_scope.py",
        "package/test_import_effects.py",
        "package/test_benchmarks.py",
        "package/test_benchmarks_frontier.py",
        "package/test_benchmarks_pages.py::test_table_page_and_picture",
        "package/test_benchmarks_training.py",
        "package/test_docs.py::test_commands_run",
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
        "package/test_surface.py::test_a_typed_program_passes",
        "package/test_surface.py::test_a_wrong_line_is_an_error",
        "package/test_surface.py::test_the_stub_is_what_the_extension_has",
    ),
    "compiles whole models, or by inductor": (
        "compile/test_compile_blocks.py",
        "compile/test_compile_rewritten.py::test_each_function_between_residuals",
        "compile/test_compile_rewritten.py::test_inductor_itself",
        "selective/test_higher_order.py::test_gradients_compiled",
        "compile/test_compile.py::test_torchs_own_backends",
        "compile/test_compile_breaks.py",
        "compile/test_compile_discrete.py::test_a_compiled_block_in_an_eager_region_routes_as_in_the_forward[inductor",
        "compile/test_compile_limits.py::test_a_leaf_stays_exact_in_a_fake_quantized_region_as_without_compile[inductor",
        "compile/test_compile_models.py",
        "compile/test_compiled_saves.py::test_a_block_of_inductor",
        "compile/test_compiled_saves.py::test_caches_of_inductor",
        "compile/test_compiled_saves.py::test_ten_blocks[GPT2",
        "models/test_patched_models.py::TestCompile::test_afterwards_graphs_are_torchs",
    ),
    "runs what another torch or another process would do: a process each": ("engine/test_processes.py",),
    "plans many models, of which `make test` plans some": (
        "planner/test_budget.py::test_an_error_budget",
        "planner/test_budget.py::test_other_tensors_count",
        "planner/test_budget.py::test_the_optimizer_counts",
        "planner/test_budget_hostile.py",
        "planner/test_budget_profile.py",
        "planner/test_budget_runs.py",
        "models/test_transformers_versions.py::test_the_flag",
        "models/test_gradient_error.py",
        "planner/test_plan.py",
        "planner/test_plan_offload.py",
        "planner/test_plan_peaks.py",
        "models/test_working_set.py::test_budgets_use_parts_and_by_permission_tiles",
        "models/test_working_set.py::test_rows_of_a_plan_and_their_real_peaks",
        "models/test_working_set_limits.py",
        "package/test_plan_budget_command.py",
        "planner/test_config_steps.py",
        "planner/test_places_in_plans.py",
    ),
    "is a sweep of which `make test` has a part": (
        "package/test_codec_gradients.py",
        "planner/test_simulation_leaves_no_trace.py",
        "codec/test_casts.py::test_every_bfloat16_and_what_lies_between",
        "codec/test_sparse.py::test_many_blocks_on_the_device",
        "engine/test_offloader.py",
        "engine/test_offload_programs.py::test_what_comes_back_is_what_went[thread",
        "engine/test_offload_programs.py::test_programs_with_a_file",
        "models/test_enable.py::test_every_pair_of_keywords[transformers",
        "models/test_no_recompute.py::test_families",
        *(f"selective/test_kept_then_written.py::test_operators_that_products_are_part_of[{n}" for n in range(1, 8)),
        "equivalence/test_layout_sweep.py",
        "package/test_torch_private.py",
        "selective/test_jumps.py",
        "equivalence/test_differing_runs.py::test_a_recompute_that_differs_is_right",
        "equivalence/test_differing_runs.py::test_a_recompute_that_differs_harmlessly_is_right",
        "equivalence/test_nesting.py::test_pairs",
        "equivalence/test_nesting.py::test_some_triples",
        "models/test_gradient_error_models.py",
    ),
}
LEFT = [key for keys in LEFT_BECAUSE.values() for key in keys]

#: What only `make soak` runs, beside the tests that are marked so, because it is slow. Of most the
#: other targets have a part; of budgets of sharded models, loops and mixtures, plans of second
#: gradients and of all model types, the toy codec and untouched memory they have none.
SOAK = [
    "codec/test_toy_codec.py",
    "compile/test_compile_blocks.py::test_everyday[T5",
    "compile/test_compile_blocks.py::test_everyday[UNet",
    "compile/test_compile_limits.py::test_a_graph_from_inductors_cache",
    *(f"compile/test_compiled_saves.py::test_ten_blocks[{name}" for name in ("Bert", "T5", "ViT")),
    "engine/test_offload_programs.py::test_each_request_for_memory_may_fail",
    *(f"engine/test_call_faults.py::test_any_call_may_fail[{share}" for share in (1, 2, 3, 4)),
    "engine/test_leaks.py::test_a_long_chain_under_compress_saved",
    "engine/test_offloader.py::test_more_calls_of_the_device_may_fail",
    "equivalence/test_layout_sweep.py::test_every_layout_with",
    "equivalence/test_opinfo.py::test_gradients_of_every_operator_are_those_of_plain_autograd[bfloat16",
    "equivalence/test_opinfo.py::test_gradients_of_every_operator_are_those_of_plain_autograd[float64",
    *(f"equivalence/test_random_programs.py::test_random_programs_behave_as_with_torch[{n}]" for n in range(5, 10)),
    "frameworks/test_budget_sharded.py",
    "frameworks/test_deepspeed.py::test_example",
    "frameworks/test_distributed.py::test_example",
    "frameworks/test_lightning.py::test_example",
    "frameworks/test_plan_frameworks.py::test_lora",
    "frameworks/test_plan_model_types.py",
    "planner/test_budget_loops.py",
    "planner/test_budget_mixtures.py",
    "planner/test_budget_profile.py::test_more_is_never_slower",
    "planner/test_budget_profile.py::test_the_same_file_gives_the_same_bytes",
    "models/test_transformers_versions.py::test_before_a_step",
    "models/test_transformers_versions.py::test_enable[{'budget'",
    "planner/test_simulation.py::test_a_process_with_few_addresses",
    "planner/test_simulation.py::test_no_memory_is_touched",
    "planner/test_plan.py::test_the_longest_sequence_fits_and_a_longer_one_does_not",
    "planner/test_plan_higher_order.py",
    "planner/test_plan_offload.py::test_a_budget_of_a_model_that_trains",
    "planner/test_plan_offload.py::test_less_is_needed_than_without_a_place",
    "models/test_working_set.py::test_live_budgets",
    "package/test_plan_budget_command.py::test_a_faster_device_changes_times_alone",
    "package/test_plan_budget_command.py::test_codecs_are_permitted_one_by_one",
    "package/test_plan_budget_command.py::test_no_ready_setting_needs_less",
    *(
        f"package/test_benchmarks.py::test_a_broken_benchmark_fails[bench_{name} "
        for name in ("budget", "plan", "planner")
    ),
    *(
        f"package/test_benchmarks.py::test_small_form[bench_{name}"
        for name in ("budget-det", "budget-err", "budget-mono", "budget-pla", "budget-torch")
        + ("plan-", "planner-ways", "working_set-budgets")
    ),
    "selective/test_jumps.py::test_what_is_kept_does_not_jump[1",
]

#: Sweeps of which only so many rows, evenly apart, run outside `make soak`.
ROWS = {
    "compile/test_compile_rewritten.py::test_each_function_between_residuals": 8,
    "codec/test_cuda_emulation.py::test_every_pattern": 21,
    "device/test_device_calls.py::test_calls_of_a_region": 1,
    "device/test_device_graphs.py::test_a_captured_step_is_replayed_on_other_values": 1,
    "device/test_device_models.py::test_exact_formats_change_no_bit": 3,
    "device/test_device_streams.py::test_programs": 1,
    "equivalence/test_differing_runs.py::test_a_recompute_that_differs_harmlessly_is_right": 2,
    "equivalence/test_nesting.py::test_pairs": 3,
    "frameworks/test_distributed.py::test_engine": 10,
    "frameworks/test_distributed.py::test_offloaded": 8,
    "frameworks/test_no_trace_models.py::test_next_steps_are_a_fresh_models": 12,
    "planner/test_budget_hostile.py::test_no_plan_is_faster": 2,
    "planner/test_budget_hostile.py::test_peaks_are_within_budgets_and_nothing_changes": 4,
    "planner/test_budget_profile.py::test_a_profile_of_something_else": 4,
    "planner/test_plan_offload.py::test_a_step_stays_within_the_budget": 1,
    "planner/test_plan_offload.py::test_the_command": 1,
    "planner/test_plan_peaks.py::test_the_peak_is_that_of_a_real_step": 10,
    "planner/test_plan_peaks.py::test_peaks_of_families": 2,
    "package/test_plan_pages.py::test_pages_show_what_the_command_prints": 1,
    "package/test_run.py::test_main_stays_until_the_process_ends": 3,
    "package/test_run.py::test_processes_of_multiprocessing": 2,
    "package/test_run.py::test_untouched_scripts": 1,
    "planner/test_config_steps.py::test_a_step_is_the_whole_ones_where_layers_know_of_each_other": 3,
    "planner/test_simulation_leaves_no_trace.py": 10,
    "planner/test_planner.py::test_best_of_all_plans": 4,
    "selective/test_higher_order.py::test_gradients": 5,
    "selective/test_one_truth.py::test_no_way_to_keep_a_part_is_worse_than_to_keep_nothing": 1,
    "selective/test_one_truth.py::test_of_every_operator": 1,
}


def is_left(name):
    """Does the table name this folder, file or test, or what it lies in?"""
    return any(
        name == key or name.startswith((f"{key}/", f"{key}::")) or ("::" in key and name.startswith(key))
        for key in LEFT
    )
