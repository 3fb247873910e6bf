"""What a test that interrupts Python between any two lines has to put right itself."""

import ctypes

_set = ctypes.pythonapi.PyErr_SetExcInfo
_set.argtypes, _set.restype = [ctypes.c_void_p] * 3, None


def forget_handled_exception():
    """Call it from a function outside any ``except``.

    CPython itself leaves the exception being handled on its stack when an interrupt lands between
    the last line of a handler and the instruction that ends it; from then on it is the context of
    every exception raised, and with its traceback it keeps the tensors of all its frames alive.
    """
    _set(None, None, None)
