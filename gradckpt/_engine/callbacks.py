"""Python functions that C calls, by the names in csrc/torch/objects.h: one table, bound at
import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradckpt._engine import arguments, buffers, decorator, detached_saves, input_aliasing, parameter_hooks, saved_roles
from gradckpt._engine import region_callbacks as region
from gradckpt._engine import selective_callbacks as selective
from gradckpt._models import activity

TABLE: dict[str, Callable[..., Any]] = {
    "accelerator_initialized": region.accelerator_initialized,
    "ask": selective.ask,
    "autocast_capture": region.autocast_capture,
    "barred": selective.barred,
    "buffer_roots": buffers.roots_of,
    "call_negated": selective.call_negated,
    "call_within": region.call_within,
    "candidate": selective.candidate,
    "capture": parameter_hooks.capture,
    "check_aliases": input_aliasing.check_and_write_back,
    "check_buffers": buffers.check,
    "check_leaves": selective.check_leaves,
    "check_parameters": region.check_parameters,
    "check_reentrant": region.check_reentrant,
    "contexts": region.contexts,
    "contexts_plan": region.contexts_plan,
    "debug_contexts": region.debug_contexts,
    "discrete_rules": selective.discrete_rules,
    "decorate": decorator.decorate,
    "determinism_check": region.determinism_check,
    "device_context": region.device_context,
    "device_rng_capture": region.device_rng_capture,
    "device_rng_swap": region.device_rng_swap,
    "enter_buffers": buffers.enter,
    "fill_from": region.fill_from,
    "fill_holes": region.fill_holes,
    "find_candidate": selective.find_candidate,
    "generator_of": selective.generator_of,
    "has_buffer_rule": buffers.has_rule,
    "is_dual": region.is_dual,
    "logits_are_small": saved_roles.logits_are_small,
    "metadata": region.metadata,
    "nodes_behind": saved_roles.nodes_behind,
    "note_keyword": arguments.note_keyword,
    "note_step": activity.note_step,
    "original_of": detached_saves.original_of,
    "parse_plan": region.parse_plan,
    "payload_repr": region.payload_repr,
    "policy_contexts": region.policy_contexts,
    "raise_fewer_saved": region.raise_fewer_saved,
    "raise_metadata": region.raise_metadata,
    "raise_modified": region.raise_modified,
    "raise_more_saved": region.raise_more_saved,
    "raise_no_entry": selective.raise_no_entry,
    "raise_stop_iteration": region.raise_stop_iteration,
    "recompute_within": region.recompute_within,
    "record_stream": region.record_stream,
    "record_traced": selective.record_traced,
    "rows_are_alike": saved_roles.rows_are_alike,
    "same_metadata": region.same_metadata,
    "selective_key": selective.selective_key,
    "selective_mode": selective.selective_mode,
    "selective_policy": selective.selective_policy,
    "straight_through": region.straight_through,
    "tensors_of": selective.tensors_of,
    "through_modes": selective.through_modes,
    "together": selective.together,
    "told_by": selective.told_by,
    "torchs_checkpoint": selective.torchs_checkpoint,
    "traced_value": selective.traced_value,
    "tracing_mode_active": region.tracing_mode_active,
    "warn_unnamed": selective.warn_unnamed,
    "without_modes": selective.without_modes,
}
