"""Every operator of PyTorch's own sample table (OpInfo) that jumps: what is decided there is
replayed, or a table says why it is not.

    python tests/selective/test_jumps.py [--part 1/4] [--samples 14] [--only amax] [--errors]

prints which operators jump (tests/helpers/operator_samples.py says what that is), and how many of
these jumps
are not replayed. With --errors: the error of the gradient of a region of each operator of
NOT_REPLAYED with int8, the root of the mean square over the samples. Every test is such a process,
as those of test_opinfo.py.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import operator_samples
import pytest
import torch
from operator_samples import Case, cases, operators
from processes import printed_by

SAMPLES = 3


# ---- the tables ----


class Reason(NamedTuple):
    """Why discrete results of operators are not replayed, and what may jump then."""

    why: str
    kinds: str
    names: tuple[str, ...]
    on_request: bool = False  # replay_discrete="casts" replays it, but for the gradient


#: All of their jumps are replayed; not the whole list of such.
REPLAYED = (
    *("cummax", "cummin", "kthvalue", "max_reduction_with_dim", "min_reduction_with_dim", "mode", "msort", "sort"),
    *("argmax", "argmin", "argsort", "topk", "nonzero", "argwhere", "bucketize", "histc"),
    *("aminmax", "amax", "amin", "max_reduction_no_dim", "min_reduction_no_dim", "median", "nanmedian"),
    *("masked_median", "cdist(inf)", "pdist(inf)", "dist(inf)", "norm(inf)"),
    *("scatter_reduce(amax)", "scatter_reduce(amin)", "index_reduce(amin)", "scatter_reduce_amax", "index_reduce_amax"),
    *("index_reduce_amin", "_segment_reduce_lengths", "_segment_reduce_offsets"),
    *("nn_functional_adaptive_max_pool1d", "nn_functional_adaptive_max_pool2d", "nn_functional_adaptive_max_pool3d"),
    *("nn_functional_fractional_max_pool2d", "nn_functional_fractional_max_pool3d", "nn_functional_max_pool1d"),
    *("nn_functional_max_pool2d", "nn_functional_max_pool3d", "max_pool2d_with_indices_backward"),
    *("eq", "ge", "gt", "isclose", "isin", "le", "logical_or", "lt", "signbit"),
    *("nn_functional_triplet_margin_loss", "nn_functional_triplet_margin_with_distance_loss"),
    *("logical_not", "logical_and", "logical_xor", "all", "count_nonzero", "multinomial", "bernoulli"),
    *("frexp", "geqrf", "lu", "qr", "linalg_eigh", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_lu"),
    *("linalg_lu_factor", "linalg_lu_factor_ex", "linalg_pinv", "linalg_qr", "linalg_svdvals"),
    *("pca_lowrank", "svd_lowrank"),
)

NOT_REPLAYED = (
    Reason(
        "a kink of single values, whose own gradient alone changes: a bit of each would have to be kept, and backward "
        "compares the inputs",
        "gradients",
        (
            *("abs", "clamp", "clamp_max", "clamp_min", "fmax", "fmin", "max_binary", "maximum", "min_binary"),
            *("minimum", "nn_functional_hardsigmoid", "nn_functional_hardswish", "nn_functional_hardtanh"),
            *("nn_functional_leaky_relu", "nn_functional_prelu", "nn_functional_relu", "nn_functional_relu6"),
            *("nn_functional_rrelu", "nn_functional_selu", "nn_functional_softshrink", "logit", "special_i0e"),
            *("nn_functional_hinge_embedding_loss", "nn_functional_l1_loss", "nn_functional_margin_ranking_loss"),
            *("nn_functional_multi_margin_loss", "nn_functional_multilabel_margin_loss"),
            *("nn_functional_smooth_l1_loss", "nextafter"),
        ),
    ),
    Reason(
        "a magnitude has a kink at zero, a norm of order 0 counts, that of renorm has a bound",
        "values gradients",
        (
            *("norm", "norm_inf", "norm(-inf)", "dist(-inf)", "linalg_norm", "cdist", "nn_functional_pdist", "renorm"),
            *("nn_functional_normalize", "masked_normalize", "corrcoef"),
            *("linalg_matrix_norm", "nn_functional_pairwise_distance"),
        ),
    ),
    Reason(
        "single values jump, with their own gradients alone: a bit of each would have to be kept",
        "values gradients",
        (
            *("angle", "atan2", "copysign", "nn_functional_hardshrink", "nn_functional_softplus"),
            "nn_functional_threshold",
        ),
    ),
    Reason(
        "as large as activations, and next to each other; kept on request",
        "values gradients",
        (
            *("ceil", "div_floor_rounding", "div_trunc_rounding", "floor", "floor_divide", "fmod", "frac", "heaviside"),
            *("remainder", "__rmod__", "round", "round_decimals_0", "round_decimals_3", "sgn", "sign", "trunc"),
        ),
        on_request=True,
    ),
    Reason(
        "casts: every operator with a number makes one; kept on request",
        "discrete",
        ("bool", "byte", "char", "int", "long", "short"),
        on_request=True,
    ),
    Reason("the step of the format", "values", ("bfloat16", "half")),
    Reason(
        "coordinates say between which values to interpolate, and backward reads them again; below the step of a codec "
        "they are as wrong where nothing jumps",
        "values gradients",
        ("nn_functional_grid_sample", "grid_sampler_2d", "grid_sampler_3d"),
    ),
    Reason("the logarithm of nothing, where a determinant is exactly zero", "values", ("linalg_slogdet",)),
    Reason("counts of a whole tensor, without a gradient", "values", ("histogram", "histogramdd")),
    Reason("a checksum, or whether it failed", "discrete", ("hash_tensor", "linalg_cholesky_ex")),
    Reason(
        "the order is truncated, and has no gradient",
        "values",
        (
            *(f"special_chebyshev_polynomial_{kind}" for kind in "tuvw"),
            *(f"special_shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
            *("special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_laguerre_polynomial_l"),
            "special_legendre_polynomial_p",
        ),
    ),
    Reason("torch counts a place that it fills with zeros for one of the equals", "gradients", ("index_reduce(amax)",)),
)
REASONS = {name: reason for reason in NOT_REPLAYED for name in reason.names}

#: They return undefined memory.
UNDEFINED = ("empty", "new_empty", "resize")


# ---- the sweep ----


class Sweep:
    """Jumps found and jumps that are not replayed, by operator and kind; and what no table has."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[tuple[str, str], float] = {}
        self.wrong = 0

    def check(self, case: Case) -> None:
        name = case.name.removesuffix(operator_samples.IN_PLACE)
        for moved, jump in operator_samples.search(case):
            key = name, jump.kind
            self.found[key] += 1
            self.sizes[key] = max(self.sizes.get(key, 0.0), jump.size)
            if not operator_samples.is_replayed(moved, jump):
                self.left[key] += 1
                if complaint := self.complaint(name, moved, jump):
                    self.wrong += 1
                    print(f"WRONG {case.name}: {complaint}, size {jump.size:.3g}", flush=True)

    def complaint(self, name: str, moved: operator_samples.Moved, jump: operator_samples.Jump) -> str | None:
        reason = REASONS.get(name)
        if reason is None or jump.kind not in reason.kinds.split():
            return f"{jump.kind} jump, which neither is replayed nor has a reason"
        if reason.on_request and jump.kind != "gradients" and not operator_samples.is_replayed(moved, jump, "casts"):
            return f'{jump.kind} jump, which replay_discrete="casts" does not replay'
        return None

    def stale(self) -> Iterator[str]:
        """Names in a table that did not show what it says."""
        jumping = {name for name, _ in self.found}
        staying = {name for name, _ in self.left}
        yield from (f"{name}: has a reason, and nothing is left of its jumps" for name in {*REASONS} - staying)
        yield from (f"{name}: is said to be replayed, and did not jump" for name in {*REPLAYED} - jumping)


def samples(part: int, parts: int, most: int, wanted: set[str] | None) -> Iterator[Case]:
    def take(name: str) -> bool:
        return (wanted is None or name in wanted) and not name.startswith(UNDEFINED)

    if part == 0:
        yield from (
            case for case in operator_samples.further_cases() if take(case.name.removesuffix(operator_samples.IN_PLACE))
        )
    for op in operators()[part::parts]:
        if take(op.formatted_name) and torch.float64 in op.dtypes:
            for case in itertools.islice(cases(op, torch.float64, most > SAMPLES), most):
                yield from operator_samples.variants(op, case)


def errors() -> Iterator[tuple[str, float]]:
    """Of the gradient of a region of the operator with int8:
    the root of the mean square over samples."""
    for op in operators():
        if op.formatted_name in REASONS and op.supports_autograd:
            moved = [
                operator_samples.Moved(case, 0.0, seed) for case in cases(op, torch.float32, False) for seed in range(3)
            ]
            found = [error for each in moved if (error := operator_samples.gradient_error(each, "int8")) is not None]
            if found:
                yield op.formatted_name, statistics.fmean(error**2 for error in found) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1", help="I/N: every N-th operator, from the I-th")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="at most, of each operator")
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--replayed", action="store_true", help="only what is said to be replayed")
    parser.add_argument("--errors", action="store_true", help="errors of gradients instead")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.errors:
        for name, error in errors():
            print(f"{name:45s} {error:.4f}", flush=True)
        return 0
    part, parts = map(int, chosen.part.split("/"))
    wanted = set(chosen.only.split(",")) if chosen.only else {*REPLAYED} if chosen.replayed else None
    sweep = Sweep()
    for case in samples(part, parts, chosen.samples, wanted):
        sweep.check(case)
    print(f"{len({name for name, _ in sweep.found})} operators jump")
    for (name, kind), n in sorted(sweep.found.items()):
        size = sweep.sizes[name, kind]
        print(f"  {name:45s} {kind:10s} size {size:.3g}, {sweep.left[name, kind]} of {n} not replayed")
    stale = list(sweep.stale()) if parts == 1 and wanted is None else []
    for line in stale:
        print(f"WRONG {line}")
    return int(sweep.wrong > 0 or bool(stale))


# ---- the tests ----


def check(*options: str) -> int:
    return int(re.findall(r"(\d+) operators jump", printed_by(__file__, *options))[0])


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_what_is_kept_does_not_jump(part):
    assert check("--replayed", "--samples", "2", "--part", part) >= 20  # there are 20 with torch 2.15


def test_the_tables_have_each_operator_once():
    names = [*REPLAYED, *(name for reason in NOT_REPLAYED for name in reason.names)]
    assert len(names) == len({*names})


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_whatever_jumps_is_replayed_or_has_a_reason():
    assert check("--samples", "14") > 150


if __name__ == "__main__":
    sys.exit(main())
