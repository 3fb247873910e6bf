from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, TypedDict, TypeVar, final, overload, type_check_only

import torch
from torch.nn import Module
from typing_extensions import Buffer, disjoint_base

from gradckpt._compression import Compress
from gradckpt._offload import OffloadLike
from gradckpt.policies import PolicyLike

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Formats = tuple[tuple[str, str | None], ...]

@final
class Payload:
    @property
    def codec(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def scales(self) -> torch.Tensor: ...
    def decode(self) -> torch.Tensor: ...

class SelectiveRecompute(torch.autograd.Function):
    @staticmethod
    def apply(
        function: Callable[..., _R],
        policy: Any,
        /,
        *args: Any,
        compress: Compress = None,
        offload: OffloadLike = None,
        **kwargs: Any,
    ) -> _R: ...
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any: ...
    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any: ...

@type_check_only
class OpPolicy: ...

@type_check_only
class OpOutput:
    @property
    def val(self) -> Any: ...
    @property
    def form(self) -> Any: ...

@final
class SavedTensor:
    @property
    def value(self) -> Any: ...
    def restore(self) -> torch.Tensor: ...

@final
class Place:
    def __new__(
        cls,
        directory: str | None,
        host_budget: int,
        ring: int,
        held: int,
        prefetch: int,
        min_bytes: int,
        payloads: int,
    ) -> Self: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def figures(self, restart: bool = False, /) -> dict[str, int]: ...

@type_check_only
class OpStorage:
    @property
    def storage(self) -> dict[Any, dict[int, Any]]: ...

@type_check_only
class Choice(TypedDict):
    """The result of choose_options()."""

    choices: tuple[int, ...] | None  # an option per region; None: no plan, or no budget was given
    time: int | None  # the sum over the choices
    peak: int | None  # the smallest budget that these choices fit, in true bytes
    error: int | None  # the sum over the choices; 0 without errors
    lower_bound: int | None  # no plan within the budgets takes less time; equals time if exact
    smallest_budget: int | None  # for this error budget; None: no budget is enough
    front: list[tuple[int, int, int]]  # (budget, time, error), at most 1,024, by ascending budget
    exact: bool  # nothing was thinned: all of the above is optimal

@type_check_only
class MemoryUse(TypedDict):
    """The result of memory_use()."""

    requested: int  # the most bytes at a time that were asked for
    allocated: int  # and in blocks: memory_stats()["allocated_bytes.all.peak"]
    reserved: int  # and in segments
    needed: int  # the smallest capacity from which on the trace completes

@type_check_only
class OffloadTime(TypedDict):
    """The result of simulate_offload(), in nanoseconds and bytes."""

    time: int  # from the first encode to the end of the last backward
    exposed_forward: int  # the compute stream waited for room in the ring
    exposed_backward: int  # and for payloads; without both, the step takes the rest of the time
    stalls: int  # how often it waited
    copies: int  # payloads that went out; as many came back
    moved: int  # bytes, each way
    stayed: int  # regions whose payload never was in the ring
    peak: int  # bytes of the ring in use at a time

@disjoint_base
class Context:
    storage: Any
    respect_saved_tensors_hooks: bool | None
    def __init__(self, store: Any, by_key: bool, replay: bool, /) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = ..., kwargs: Any = ..., /) -> Any: ...

# Our keywords stand between the function's, so a type checker sees its result but not its
# arguments. Each overload repeats them, because a stub has no way to share keywords.
@overload
def checkpoint(
    function: Callable[..., _R],
    *args: Any,
    compress: Compress = None,
    policy: PolicyLike = None,
    offload: OffloadLike | Place = None,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    buffers: str | Module | Sequence[Module] | None = None,
    **kwargs: Any,
) -> _R: ...
@overload
def checkpoint(
    *,
    compress: Compress = None,
    policy: PolicyLike = None,
    offload: OffloadLike | Place = None,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    buffers: str | Module | Sequence[Module] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def compat_checkpoint(
    function: Callable[..., _R],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] = ...,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> _R: ...

GROUP: int
BLOCK: int
LEAST_ROW: int
OP_RECOMPUTE: int
OP_SAVE: int
OP_REPLAY: int
OP_REPLAY_CAST: int
OP_LABEL: int
OP_REPLAY_CHOICE: int
OP_PRODUCT: int
OP_SEPARATE: int
OP_JOINT: int
OP_UNKNOWN: int

def is_recomputing() -> bool: ...
def running_region() -> tuple[dict[str, Any], bool, bool, bool, int, Any, Any] | None: ...
def is_name_wanted(match: Callable[[frozenset[str], int], bool], /) -> bool: ...
def cpu_rng_state() -> torch.Tensor: ...
def set_cpu_rng_state(state: torch.Tensor, /) -> None: ...
def hooks_around_region() -> tuple[Any, Any] | None: ...
def hide_operators(by: int, /) -> bool: ...
def sample_anew(on: bool | int, /) -> int | None: ...
def eligible(requires_grad: bool, is_leaf: bool, floating: bool, fake_quantize: bool, /) -> bool: ...
def is_simulated() -> bool: ...
def simulated_placed() -> tuple[int, int]: ...
def set_simulated(first: int, end: int, is_device: bool, /) -> None: ...

# The problem and what thinning means: csrc/planner/planner.h. Tables are row-major, of native
# 64-bit integers: array('q') or its bytes. need = 2**63 - 1: the region has no such option.
# smallest_budget is optimal without errors, and with errors if exact; else some plan fits it, but
# an even smaller budget might do. The front is solved without looking at the budgets, so a larger
# budget, or error budget, is never slower.
def choose_options(
    regions: int,
    options: int,
    kept: Buffer,
    need: Buffer,
    time: Buffer,
    error: Buffer | None,
    last_need: int,
    budget: int | None,
    error_budget: int = 0,
    buckets: int = 4096,
) -> Choice: ...

# Rows of native 64-bit integers: bytes > 0 allocates under a name below the number of rows, 0
# releases what has that name.
def memory_use(changes: Buffer, /) -> MemoryUse: ...

# Rows of native 64-bit integers: forward, backward, encode and decode in ns, bytes of the payload,
# and 1 if it is offloaded, else 0. Rates are in bytes a second, latency and head in ns, ring and
# held in bytes.
def simulate_offload(
    regions: Buffer,
    *,
    rate_out: int,
    rate_in: int,
    latency: int,
    ring: int,
    held: int,
    head: int,
) -> OffloadTime: ...
def forget_types() -> None: ...
def guard_hooks(hooks: dict[int, Any], type: type, kind: type, /) -> None: ...
def encode(x: Any, codec: str, dither: tuple[int, int, int] | None = None, /) -> Payload: ...
def hooks_are_lossy() -> bool: ...
def saved_push(compress: Any, formats: _Formats, place: Place | None, /) -> None: ...
def saved_pair(
    compress: Any, formats: _Formats, place: Place | None, /
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]: ...
def saved_functions() -> list[tuple[str, str, tuple[str, ...], str | None]]: ...
def saved_nodes() -> dict[str, str | list[tuple[str, str, str | None]]]: ...
def saved_roles() -> list[tuple[str, str, str | None, str]]: ...
def saved_pop(failed: bool, /) -> None: ...
def saved_call(
    compress: Any,
    formats: _Formats,
    place: Place | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    /,
) -> Any: ...
def selective_name(x: Any, name: str, modes: list[Any], /) -> None: ...
def rounding_state() -> tuple[int, int]: ...
def set_rounding_state(step: int, tensor: int, /) -> None: ...
def bind(callbacks: dict[str, Callable[..., Any]], /) -> None: ...
def codecs() -> list[str]: ...
def codec_info(name: str, /) -> dict[str, Any]: ...
def isa() -> str: ...
def force_isa(name: str | None, /) -> None: ...
def build_info() -> dict[str, Any]: ...
def observe_regions(observer: Callable[[Any], object] | None, /) -> None: ...
def figures_of_ended_places(restart: bool = False, /) -> dict[str, int]: ...
def add_device(kind: Any, /) -> None: ...
def late_overflow(seconds: float, /) -> None: ...
def settle_overflow() -> None: ...
def make_op_policy(
    rows: tuple[tuple[Any, int, Any, int, int, int, Any, int], ...] | None, wanted: frozenset[str], /
) -> OpPolicy: ...
def make_op_storage(names: OpPolicy, mutation: bool, reusable: bool, approximate_inputs: bool, /) -> OpStorage: ...
def catcher(operator: Any, /) -> Callable[..., Any]: ...
def selective_key() -> Any: ...
def catch_by_mode(on: bool, /) -> None: ...
def replace_checkpoint(by: int, /) -> None: ...
def replays_discrete() -> bool: ...
def forget_random_state() -> None: ...
def stats() -> dict[str, Any]: ...
def reset_stats() -> None: ...
def restart_peak() -> tuple[int, int]: ...
