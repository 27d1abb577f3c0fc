"""Device arrays of libraries that offer them through DLPack, read where they are.

Source: ``dlpack.h``, version 1.1, and the array API's text on ``__dlpack__``.
"""
from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

DEVICES = (2, 13)                             # kDLCUDA, kDLCUDAManaged
LEGACY_STREAM = 1                             # CUDA's default stream, as DLPack and the CUDA array interface name it
_VERSION = (1, 1)                             # the first one that names the FP8 kinds
_READ_ONLY = 1
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool", 7: "float8_e3m4", 8: "float8_e4m3",
          9: "float8_e4m3b11fnuz", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz",
          14: "float8_e8m0fnu"}
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor)]


@dataclass(frozen=True)
class Exported:
    """What a capsule holds; `capsule` keeps the memory alive, and gives it back when it goes.

    `dtype` is NumPy's name of it, `strides` are in bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    read_only: bool
    capsule: Any


def is_on_device(array: Any) -> bool:
    """Whether it is offered through DLPack, and in memory of a CUDA device."""
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        return False
    return int(array.__dlpack_device__()[0]) in DEVICES


def export(array: Any) -> Exported:
    """An array's memory; its producer makes CUDA's default stream wait until its contents are there.

    Raises
    ------
    ValueError
        If a capsule is of a version or kind that is not known, or of memory elsewhere.
    Exception
        Whatever the producer raises.
    """
    try:
        capsule = array.__dlpack__(stream=LEGACY_STREAM, max_version=_VERSION)
    except TypeError:                         # a producer from before version 1.0
        capsule = array.__dlpack__(stream=LEGACY_STREAM)
    read_only = False
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _ManagedVersioned.from_address(_pointer_of(capsule, b"dltensor_versioned"))
        if versioned.major != _VERSION[0]:
            raise ValueError(f"DLPack of version {versioned.major}.{versioned.minor}")
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _Managed.from_address(_pointer_of(capsule, b"dltensor")).tensor
    else:
        raise ValueError(f"{type(capsule).__name__} instead of a DLPack capsule")
    if tensor.device_type not in DEVICES or tensor.ndim < 0:
        raise ValueError(f"a capsule of DLPack device type {tensor.device_type} with {tensor.ndim} axes")
    kind = _KINDS.get(tensor.code)
    is_byte = kind is not None and (kind == "bool" or kind.startswith("float8"))
    if kind is None or tensor.lanes != 1 or tensor.bits % 8 or not tensor.bits or (is_byte and tensor.bits != 8):
        raise ValueError(f"items of DLPack type code {tensor.code}, {tensor.bits} bits and {tensor.lanes} lanes")
    dtype = kind if is_byte else f"{kind}{tensor.bits}"
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    items = (tensor.strides[axis] if tensor.strides else math.prod(shape[axis + 1:]) for axis in range(tensor.ndim))
    strides = tuple(tensor.bits // 8 * stride for stride in items)
    return Exported((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, read_only, capsule)
