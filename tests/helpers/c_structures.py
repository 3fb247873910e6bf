"""The structures of csrc that Python passes to libraries of C, each mirrored once, here;
test_c_structures.py compares them with the headers."""

import ctypes

from gradckpt import _C

GROUP_CODECS = [codec for codec in _C.codecs() if _C.codec_info(codec)["stochastic"]]
KERNELS = (ctypes.c_void_p * 3) * len(GROUP_CODECS)  # by format and floating dtype


class Tensor(ctypes.Structure):
    """gck_tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("ndim", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("steps", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("room", ctypes.c_int64),
    ]


class Dither(ctypes.Structure):
    """gck_dither."""

    _fields_ = [("seed", ctypes.c_uint64), ("step", ctypes.c_uint32), ("tensor", ctypes.c_uint32)]


class How(ctypes.Structure):
    """gck_how."""

    _fields_ = [("dither", ctypes.POINTER(Dither)), ("overflow", ctypes.c_void_p)]


class Bytes(ctypes.Structure):
    """gck_bytes."""

    _fields_ = [("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p)]


class Lengths(ctypes.Structure):
    """gck_lengths."""

    _fields_ = [("codes", ctypes.c_int64), ("scales", ctypes.c_int64)]


class DeviceKind(ctypes.Structure):
    """gck_device_kind."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dlpack", ctypes.c_int),
        ("check", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))),
        ("stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))),
        ("set_stream", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))),
        ("is_captured", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))),
        ("encode", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int)),
        ("decode", ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int)),
        ("compare", ctypes.CFUNCTYPE(ctypes.c_int)),
        ("words", ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_uint32), ctypes.c_int, ctypes.c_int)),
        ("error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)),
        ("link", ctypes.c_void_p),
    ]


class Kernels(ctypes.Structure):
    """gck_kernels."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("encode", KERNELS),
        ("encode_noisy", KERNELS),
        ("decode", KERNELS),
        ("to_bf16", ctypes.c_void_p),
        ("to_f16", ctypes.c_void_p),
        ("from_bf16", ctypes.c_void_p),
        ("from_f16", ctypes.c_void_p),
        ("mask_pack", ctypes.c_void_p),
        ("mask_unpack", ctypes.c_void_p),
        ("lossless_encode", ctypes.c_void_p * 3),
        ("lossless_decode", ctypes.c_void_p * 3),
        ("pack_nonzeros", ctypes.c_void_p * 3),
        ("unpack_nonzeros", ctypes.c_void_p * 3),
    ]


#: Their names in C, and the header of each.
MIRRORS = {
    "gck_tensor": (Tensor, "gradckpt.h"),
    "gck_dither": (Dither, "gradckpt.h"),
    "gck_how": (How, "gradckpt.h"),
    "gck_bytes": (Bytes, "gradckpt.h"),
    "gck_lengths": (Lengths, "gradckpt.h"),
    "gck_device_kind": (DeviceKind, "gradckpt.h"),
    "gck_kernels": (Kernels, "codec/portable/kernels.h"),
}
