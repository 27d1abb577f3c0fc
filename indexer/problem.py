"""What the oracle and the kernels share: the paged key cache, the dimensions of a call and the check of its arguments.

Axes, as in the README: ``B`` requests, ``T`` new query tokens of all requests together, ``H`` heads, ``D`` head dimension, ``K`` =
``top_k``, ``L`` layers, ``P`` page size, ``W`` width of the score matrix. Nothing here imports NumPy's rivals or a GPU library:
arrays of other libraries are read through their public attributes.
"""
from __future__ import annotations

import math
import operator
import reprlib
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from . import dlpack

FP8_DTYPES = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
}
ARITHMETICS = ("exact", "wgmma")
MASKS = ("causal", "null")
ORDERS = ("index", "score")
METADATA_DTYPES = ("uint32", "int32")
MAX_HEAD_DIM = 1024                       # up to here the exact sum of e4m3 products fits a float64
MAX_POSITION = 2**31 - 1                  # positions are int32
DEFAULT_SCORES_BUDGET_BYTES = 512 * 2**20

_ENDLESS = 2**40                          # more tokens than any request has, whatever its lengths hold: such a pool is never full
_ADDRESSABLE = 2**63 - 1                  # bytes of an array
_SHOWN = 80                               # characters of a value in a message
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _SHOWN


def decode_table(fp8_dtype: str) -> np.ndarray:
    """Value of every FP8 byte, float64 [256]; NaN where the byte is a NaN.

    Parameters
    ----------
    fp8_dtype : str
        A key of `FP8_DTYPES`.
    """
    return np.arange(256, dtype=np.uint8).view(FP8_DTYPES[fp8_dtype]).astype(np.float64)


# ---------------------------------------------------------------------------------------------------------------- arrays


@dataclass(frozen=True)
class ArrayView:
    """Where an array lies and what it holds, whoever made it.

    Attributes
    ----------
    name : str
        The argument's name, for messages.
    address : int
        First byte, in the address space of `on_device`.
    shape, strides : tuple of int
        Strides in bytes.
    dtype : str
        NumPy's name ("float32"), also for FP8 ("float8_e4m3fn").
    on_device : bool
        True for GPU memory.
    library : str
        "numpy", "torch", "cupy", "numba" or "cuda" (another one with ``__cuda_array_interface__`` or ``__dlpack__``).
    owner : object
        Keeps the memory alive.
    writeable : bool
        False for read-only memory.
    stream : int or None
        Stream on which the producer may still be writing, as ``__cuda_array_interface__`` names it.
    capsule : object
        Keeps the memory alive that was exported through DLPack.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    on_device: bool
    library: str
    owner: Any
    writeable: bool = True
    stream: int | None = None
    capsule: Any = None

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize          # ml_dtypes has told NumPy the names of FP8

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two arrays that a kernel cannot tell apart but by their contents."""
        return self.address, self.shape, self.strides, self.dtype, self.on_device, self.writeable, self.stream

    @property
    def extent(self) -> tuple[int, int]:
        """Half-open range of the bytes it may touch, [start, end); empty for an empty array."""
        if self.size == 0:
            return self.address, self.address
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides)]
        return (self.address + sum(r for r in reach if r < 0),
                self.address + sum(r for r in reach if r > 0) + self.itemsize)

    @property
    def c_contiguous(self) -> bool:
        expected = self.itemsize
        for n, stride in zip(reversed(self.shape), reversed(self.strides)):
            if n > 1 and stride != expected:
                return self.size == 0
            expected *= n
        return True

    def sliced(self, *, axes: tuple[int, ...], offset: int = 0, dtype: str | None = None) -> ArrayView:
        """The same memory with only these axes, `offset` bytes further on, its items read as `dtype` of the same size."""
        return replace(self, address=self.address + offset if self.address else 0, shape=tuple(self.shape[a] for a in axes),
                       strides=tuple(self.strides[a] for a in axes), dtype=dtype or self.dtype)

    def rows(self, start: int, stop: int) -> ArrayView:
        """The range [start, stop) of the first axis."""
        return replace(self, address=self.address + start * self.strides[0], shape=(stop - start, *self.shape[1:]))

    def _interface(self) -> dict[str, Any]:
        typestr = "|u1" if self.dtype.startswith("float8") else np.dtype(self.dtype).str
        return {"shape": self.shape, "strides": self.strides, "typestr": typestr,
                "data": (self.address, not self.writeable), "version": 3}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.on_device:
            raise AttributeError(f"{self.name} is on a device")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.on_device:
            raise AttributeError(f"{self.name} is on the host")
        return {**self._interface(), "stream": self.stream}

    def numpy(self) -> np.ndarray:
        """The host array, zero copy; FP8 as uint8."""
        if self.size == 0:
            return np.empty(self.shape, np.uint8 if self.dtype.startswith("float8") else self.dtype)
        return np.asarray(self)


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else dtype.str


def c_strides(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in bytes."""
    return tuple(np.dtype(dtype).itemsize * math.prod(shape[axis + 1:]) for axis in range(len(shape)))


def describe(name: str, array: Any) -> ArrayView:
    """Reads an array's place, shape and dtype without touching its contents.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    array : array
        NumPy, torch (host or GPU), or anything on a GPU with ``__cuda_array_interface__`` (numba, CuPy, ...) or ``__dlpack__``
        (JAX, ...).

    Raises
    ------
    TypeError
        If it is none of these.
    """
    if isinstance(array, ArrayView):
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask, got {type(array).__name__}")
    if isinstance(array, np.ndarray):
        return ArrayView(name, array.ctypes.data, array.shape, array.strides, _dtype_name(array.dtype), False, "numpy", array,
                         array.flags.writeable)
    modules = {base.__module__.split(".")[0] for base in type(array).__mro__}
    if "torch" in modules and hasattr(array, "data_ptr"):
        if str(array.layout) != "torch.strided" or array.device.type not in ("cpu", "cuda") or array.is_neg() or (
                array.numel() and not array.data_ptr()):
            raise TypeError(f"{name} must be a plain strided torch tensor in memory on cpu or cuda, got {type(array).__name__} of "
                            f"layout {array.layout} on {array.device}")
        itemsize = array.element_size()
        return ArrayView(name, array.data_ptr(), tuple(array.shape), tuple(s * itemsize for s in array.stride()),
                         str(array.dtype).removeprefix("torch."), array.device.type == "cuda", "torch", array)
    # numba's simulator marks its arrays as device arrays and has the host's array interface
    try:
        interface = getattr(array, "__cuda_array_interface__", None) or (
            array.__array_interface__ if getattr(array, "__cuda_ndarray__", False) else None)
    except Exception as error:                    # whatever the producer raises
        raise _malformed(name, array, error) from None
    if interface is None or _names_no_stream(interface):
        exported = _exported(name, array)
        if exported is not None:
            return ArrayView(name, exported.address, exported.shape, exported.strides, exported.dtype, True, "cuda", array,
                             not (exported.read_only or _says_read_only(interface)), dlpack.LEGACY_STREAM, exported.capsule)
    if interface is None:
        raise TypeError(f"{name} must be a NumPy array, a torch tensor or an array on a GPU with __cuda_array_interface__ or "
                        f"__dlpack__, got {type(array).__name__}")
    try:
        shape, dtype = tuple(map(operator.index, interface["shape"])), np.dtype(interface["typestr"])
        strides, mask, stream = map(interface.get, ("strides", "mask", "stream"))
        strides = c_strides(shape, dtype) if strides is None else tuple(map(operator.index, strides))
        address, read_only = interface["data"]
        address = operator.index(address or 0)
        _require_lawful(shape, strides, address)
        if stream is not None and not 0 <= operator.index(stream) < 2**64:
            raise ValueError(f"stream {_shown(stream)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _malformed(name, array, error) from None
    if mask is not None:
        raise TypeError(f"{name} must be an array without a mask, got {type(array).__name__}")
    library = next((name for name in ("numba", "cupy") if name in modules), "cuda")
    return ArrayView(name, address, shape, strides, _dtype_name(dtype), True, library, array, not read_only, stream)


def _malformed(name: str, array: Any, error: Exception) -> TypeError:
    return TypeError(f"{name} must have a __cuda_array_interface__ with shape, typestr and data, got one of "
                     f"{type(array).__name__} that gives {_cut(f'{type(error).__name__}: {error}')}")


def _require_lawful(shape: tuple[int, ...], strides: tuple[int, ...], address: int) -> None:
    """Raises ValueError for what no memory has, whoever says so."""
    if min(shape, default=0) < 0 or len(strides) != len(shape) or not 0 <= address < 2**64:
        raise ValueError(f"shape {_shown(shape)}, strides {_shown(strides)}, address {_shown(address)}")


def _names_no_stream(interface: Any) -> bool:
    """Whether an array interface is from before version 3, or knows no kind of FP8: then DLPack tells more."""
    return isinstance(interface, dict) and (interface.get("version", 0) in (0, 1, 2) or interface.get("typestr") == "|V1")


def _says_read_only(interface: Any) -> bool:
    """Whether an array interface does; DLPack has no word for it before version 1.0."""
    data = interface.get("data") if isinstance(interface, dict) else None
    return isinstance(data, tuple) and len(data) == 2 and bool(data[1])


def _exported(name: str, array: Any) -> dlpack.Exported | None:
    """A device array through DLPack; None for one that does not speak it, or is elsewhere."""
    try:
        exported = dlpack.export(array) if dlpack.is_on_device(array) else None
        if exported is not None:
            _require_lawful(exported.shape, exported.strides, exported.address)
        return exported
    except Exception as error:                    # whatever the producer raises
        raise TypeError(f"{name} must be an array that DLPack can export, got one of {type(array).__name__} that gives "
                        f"{_cut(f'{type(error).__name__}: {error}')}") from None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN - 3]}..."


def _shown(value: Any) -> str:
    """A value's repr for a message, short whatever its length, depth or number of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"             # Python refuses to print the longest
    return _cut(_BRIEF.repr(value))


def _require_dtype(view: ArrayView, *names: str) -> None:
    if view.dtype not in names:
        raise TypeError(f"{view.name} must be {' or '.join(names)}, got {view.dtype}")


def _require_shape(view: ArrayView, axes: str, shape: tuple[int | None, ...]) -> None:
    if len(view.shape) != len(shape) or any(want is not None and want != got for want, got in zip(shape, view.shape)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{view.name} must have shape {axes} = [{wanted}], got {list(view.shape)}")


def _require_layout(view: ArrayView) -> None:
    """Last axis contiguous, address and strides aligned to the items."""
    if view.size == 0:
        return
    if view.shape[-1] > 1 and view.strides[-1] != view.itemsize:
        raise ValueError(f"{view.name} must be contiguous along its last axis (stride {view.itemsize} bytes), "
                         f"got stride {view.strides[-1]} bytes")
    if view.address % view.itemsize or any(s % view.itemsize for n, s in zip(view.shape, view.strides) if n > 1):
        raise ValueError(f"{view.name} must be aligned to its {view.itemsize}-byte items, got address {view.address:#x} and "
                         f"strides {list(view.strides)}")


def _described(name: str, array: Any, dtypes: tuple[str, ...], axes: str, shape: tuple[int | None, ...]) -> ArrayView:
    """`describe`, with these dtypes, this shape and a legal layout required."""
    view = describe(name, array)
    _require_dtype(view, *dtypes)
    _require_shape(view, axes, shape)
    _require_layout(view)
    return view


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """A scalar argument as an int.

    Raises
    ------
    TypeError
        If it is not an integer (a bool is not).
    ValueError
        If it is below `minimum`.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {_shown(value)}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {_shown(number)}")
    return number


def one_of(name: str, value: Any, choices: tuple[str, ...], remark: str = "") -> None:
    """Raises TypeError or ValueError unless a text argument is one of these."""
    wanted = f"one of {', '.join(map(repr, choices))}{remark}"
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, {wanted}, got {type(value).__name__} {_shown(value)}")
    if value not in choices:
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def fp8_name(name: str, dtype: Any, remark: str = "") -> str:
    """Canonical name of an FP8 dtype given as a name, a NumPy or ml_dtypes dtype, or a torch dtype.

    `name` is the argument's, for messages; `remark` what else it may be.

    Raises
    ------
    TypeError
        If it is not an FP8 dtype that has an exact sum; ``float8_e5m2`` is refused by name.
    """
    text = str(dtype) if type(dtype).__module__.split(".")[0] == "torch" else dtype
    if not isinstance(text, str):
        try:
            text = np.dtype(dtype).name
        except Exception:                         # whatever NumPy raises on its way through the value
            text = _shown(dtype)
    text = text.removeprefix("torch.")
    if text not in FP8_DTYPES:
        why = " (its products span more than a float64, so it has no exact sum yet)" if text == "float8_e5m2" else ""
        raise TypeError(f"{name} must be {' or '.join(FP8_DTYPES)}{remark}, got {_cut(text)}{why}")
    return text


# ------------------------------------------------------------------------------------------------------------- key cache


class PagedKeyCache:
    """The paged FP8 key cache of one model, with the request metadata of one step.

    Parameters
    ----------
    blocks : array, FP8 or uint8, [num_blocks, 1, L, P, 1, D]
        Key rows. The last axis is contiguous, strides above it are free. uint8 is read as bytes of `fp8_dtype`.
    scales : array, float32, [num_blocks, 1, L, P, 1, 1]
        One scale per key row, any sign.
    cache_lengths : array, uint32 or int32, [B]
        Tokens of each request cached before this call. The new tokens' keys are already in the cache, behind them.
    lookup_table : array, uint32 or int32, [B, max_pages]
        Page ``p`` of request ``b`` is block ``lookup_table[b, p]``. Requests may share blocks. Entries behind a request's pages
        are never followed.
    max_prompt_length, max_context_length : int, optional
        Upper bounds of the new and of the cached tokens of a request. They may change cost, never a result.
    fp8_dtype : dtype, optional
        The FP8 kind of the keys. Default: the dtype of `blocks`, and float8_e4m3fn for uint8 blocks.

    Raises
    ------
    TypeError
        If an argument is of another kind or dtype, or `blocks` and `fp8_dtype` name two FP8 kinds.
    ValueError
        If a shape, stride, alignment or bound does not fit.

    Notes
    -----
    Nothing is copied: the arrays are the caller's, and their contents are read at each call. Their memory must stay where it is
    (no resize in place). Contents of host metadata are checked by the call, against its other arguments.
    """

    def __init__(self, blocks: Any, scales: Any, cache_lengths: Any, lookup_table: Any, *, max_prompt_length: int | None = None,
                 max_context_length: int | None = None, fp8_dtype: Any = None) -> None:
        declared = None if fp8_dtype is None else fp8_name("fp8_dtype", fp8_dtype)
        block_view = describe("blocks", blocks)
        if block_view.dtype == "uint8":
            self._fp8_dtype = declared or "float8_e4m3fn"
        else:
            self._fp8_dtype = fp8_name("blocks", block_view.dtype, " (or uint8, as its bytes)")
            if declared not in (None, self._fp8_dtype):
                raise TypeError(f"blocks must be of fp8_dtype {declared} (or uint8, as its bytes), got {self._fp8_dtype}")
        _require_shape(block_view, "[num_blocks, 1, L, P, 1, D]", (None, 1, None, None, 1, None))
        num_blocks, _, num_layers, page_size, _, head_dim = block_view.shape
        if min(num_layers, page_size, head_dim) < 1 or head_dim > MAX_HEAD_DIM:
            raise ValueError(f"{block_view.name} must have L and P of at least 1 and D from 1 to {MAX_HEAD_DIM}, "
                             f"got L {num_layers}, P {page_size}, D {head_dim}")
        if max(num_blocks, page_size) > MAX_POSITION:
            raise ValueError(f"{block_view.name} must have num_blocks and P of at most {MAX_POSITION}, got {num_blocks} and "
                             f"{page_size}")
        _require_layout(block_view)
        scale_view = _described("scales", scales, ("float32",), "[num_blocks, 1, L, P, 1, 1]",
                                (num_blocks, 1, num_layers, page_size, 1, 1))
        length_view = _described("cache_lengths", cache_lengths, METADATA_DTYPES, "[B]", (None,))
        table_view = _described("lookup_table", lookup_table, METADATA_DTYPES, "[B, max_pages]", (length_view.shape[0], None))

        self._arrays = blocks, scales, cache_lengths, lookup_table
        self._max_prompt_length = None if max_prompt_length is None else integer("max_prompt_length", max_prompt_length, 0)
        self._max_context_length = None if max_context_length is None else integer("max_context_length", max_context_length, 0)
        self._views = block_view, scale_view, length_view, table_view
        self._fingerprint = (*(view.fingerprint for view in self._views), self._max_prompt_length, self._max_context_length,
                             self._fp8_dtype)

    @classmethod
    def from_fused(cls, pages: Any, cache_lengths: Any, lookup_table: Any, *, max_prompt_length: int | None = None,
                   max_context_length: int | None = None, fp8_dtype: Any = None) -> PagedKeyCache:
        """The cache over fused pages, the layout of DeepGEMM, vLLM and SGLang, zero copy.

        Parameters
        ----------
        pages : array, uint8, [num_blocks, P, 1, D + 4]
            The bytes of a page are **planar**: first ``P * D`` key bytes (row after row), then ``P`` float32 scales. This is not
            the interleaved page of the same size, in which each key row is followed by its own scale.
        cache_lengths, lookup_table, max_prompt_length, max_context_length
            As in the constructor.
        fp8_dtype : dtype, optional
            The FP8 kind of the key bytes, float8_e4m3fn by default.

        Raises
        ------
        TypeError
            If an argument is of another kind or dtype.
        ValueError
            If a page is not contiguous, or ``P * D``, the page stride or the address is not a multiple of 4.
        """
        view = describe("pages", pages)
        _require_dtype(view, "uint8")
        _require_shape(view, "[num_blocks, P, 1, D + 4]", (None, None, 1, None))
        num_blocks, page_size, _, row_bytes = view.shape
        head_dim = row_bytes - 4
        if page_size < 1 or head_dim < 1:
            raise ValueError(f"pages must have shape [num_blocks, P, 1, D + 4] with P and D of at least 1, got {list(view.shape)}")
        if view.size and (view.strides[3] != 1 or (page_size > 1 and view.strides[1] != row_bytes)):
            raise ValueError(f"pages must be contiguous within a page (strides [any, {row_bytes}, any, 1] bytes), "
                             f"got strides {list(view.strides)}")
        page_stride = view.strides[0] if num_blocks > 1 else page_size * row_bytes
        for what, value in (("P * D", page_size * head_dim), ("a page stride", page_stride), ("an address", view.address)):
            if value % 4:
                raise ValueError(f"pages must have {what} that is a multiple of 4 bytes, got {value}")

        blocks, scales = (
            replace(view, address=view.address + offset if view.address else 0, shape=(num_blocks, 1, 1, page_size, 1, width),
                    strides=(page_stride, page_stride, page_stride, row, row, item), dtype=dtype)
            for offset, width, row, item, dtype in ((0, head_dim, head_dim, 1, "uint8"),
                                                    (page_size * head_dim, 1, 4, 4, "float32")))
        return cls(blocks, scales, cache_lengths, lookup_table, max_prompt_length=max_prompt_length,
                   max_context_length=max_context_length, fp8_dtype="float8_e4m3fn" if fp8_dtype is None else fp8_dtype)

    @property
    def blocks(self) -> Any:
        """Key rows, [num_blocks, 1, L, P, 1, D], as given; an `ArrayView` into fused pages."""
        return self._arrays[0]

    @property
    def scales(self) -> Any:
        """Key scales, [num_blocks, 1, L, P, 1, 1], as given; an `ArrayView` into fused pages."""
        return self._arrays[1]

    @property
    def cache_lengths(self) -> Any:
        """Cached tokens as given, [B]."""
        return self._arrays[2]

    @property
    def lookup_table(self) -> Any:
        """Block ids as given, [B, max_pages]."""
        return self._arrays[3]

    @property
    def max_prompt_length(self) -> int | None:
        """Upper bound of the new tokens of a request."""
        return self._max_prompt_length

    @property
    def max_context_length(self) -> int | None:
        """Upper bound of the cached tokens of a request."""
        return self._max_context_length

    @property
    def fp8_dtype(self) -> str:
        """Name of the FP8 kind of the keys."""
        return self._fp8_dtype

    def __repr__(self) -> str:
        num_blocks, _, num_layers, page_size, _, head_dim = self._views[0].shape
        num_requests, max_pages = self._views[3].shape
        return (f"PagedKeyCache({num_requests} requests, {num_blocks} blocks of {page_size} x {head_dim} {self.fp8_dtype}, "
                f"{num_layers} layers, table width {max_pages})")


# ------------------------------------------------------------------------------------------------------------ whole call


@dataclass(frozen=True)
class Call:
    """A checked call: its dimensions and where its arrays lie.

    Attributes
    ----------
    num_requests, num_tokens, num_heads, page_size : int
        B, T, H, P.
    width : int
        W: the largest candidate count where lengths are known, else the bound that table and cache bounds give.
    causal : bool
        True for the causal mask.
    kpool, top_k, scores_budget_bytes, order, arithmetic
        As given. `top_k` is 0 where only scores are asked for.
    q, q_s, keys, key_scales, offsets, lengths, table : ArrayView
        [T, H, D] uint8, [T, H] float32, the layer's [num_blocks, P, D] uint8 and [num_blocks, P] float32, and the metadata as
        int32 [B + 1], [B], [B, max_pages].
    out, out_scores : ArrayView or None
        The caller's outputs.
    """

    num_requests: int
    num_tokens: int
    num_heads: int
    page_size: int
    width: int
    causal: bool
    kpool: int
    top_k: int
    scores_budget_bytes: int
    order: str
    arithmetic: str
    fp8_dtype: str
    q: ArrayView
    q_s: ArrayView
    keys: ArrayView
    key_scales: ArrayView
    offsets: ArrayView
    lengths: ArrayView
    table: ArrayView
    out: ArrayView | None
    out_scores: ArrayView | None

    @property
    def inputs(self) -> dict[str, ArrayView]:
        """The input arrays, by attribute."""
        names = ("q", "q_s", "keys", "key_scales", "offsets", "lengths", "table")
        return {name: getattr(self, name) for name in names}

    @property
    def views(self) -> list[ArrayView]:
        """All arrays, the data first."""
        outputs = [view for view in (self.out, self.out_scores) if view is not None]
        inputs = list(self.inputs.values())
        return [*inputs[:4], *outputs, *inputs[4:]]

    @property
    def rows_per_chunk(self) -> int:
        """Rows of the score matrix that are held at a time: as many as the budget takes, at least one."""
        return max(1, min(self.num_tokens, self.scores_budget_bytes // (4 * max(1, self.width))))


def check_call(q: Any, q_s: Any, input_row_offsets: Any, k_collection: Any, layer_idx: Any, *, mask: Any, kpool: Any,
               arithmetic: Any, top_k: Any = None, scores_budget_bytes: Any = DEFAULT_SCORES_BUDGET_BYTES, order: Any = "index",
               out: Any = None, out_scores: Any = None, scores_only: bool = False, host_only: bool = False) -> Call:
    """Checks every argument of a call, the contents of host metadata included, before any work.

    Parameters are those of the public functions. With `scores_only` nothing is selected and `top_k` is not looked at; with
    `host_only` (the oracle) every array must be a NumPy array and `arithmetic` has no "auto".

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape, range, alignment or place.
    """
    if not isinstance(k_collection, PagedKeyCache):
        raise TypeError(f"k_collection must be a PagedKeyCache, got {type(k_collection).__name__}")
    cache = k_collection
    blocks, scales, lengths, table = cache._views
    q, q_s = describe("q", q), describe("q_s", q_s)
    offsets = describe("input_row_offsets", input_row_offsets)
    out_view = None if out is None else describe("out", out)
    out_scores_view = None if out_scores is None else describe("out_scores", out_scores)
    inputs = [q, q_s, blocks, scales, offsets, lengths, table]
    outputs = [view for view in (out_view, out_scores_view) if view is not None]

    # kinds and dtypes
    if host_only:
        for view in inputs + outputs:
            if view.library != "numpy":
                raise TypeError(f"{view.name} must be a NumPy array, got {type(view.owner).__name__}")
    if q.dtype != "uint8" and fp8_name("q", q.dtype, " (or uint8, as its bytes)") != cache.fp8_dtype:
        raise TypeError(f"q must have the dtype of the keys, {cache.fp8_dtype} (or uint8, as its bytes), got {q.dtype}")
    _require_dtype(q_s, "float32")
    _require_dtype(offsets, *METADATA_DTYPES)
    if out_view is not None:
        _require_dtype(out_view, "int32")
    if out_scores_view is not None:
        _require_dtype(out_scores_view, "float32")

    # scalars
    layer_idx = integer("layer_idx", layer_idx)
    top_k = 0 if scores_only else integer("top_k", top_k, 1)
    kpool = integer("kpool", kpool, 1)
    scores_budget_bytes = integer("scores_budget_bytes", scores_budget_bytes, 1)
    one_of("mask", mask, MASKS)
    one_of("order", order, ORDERS)
    if host_only or not (isinstance(arithmetic, str) and arithmetic == "auto"):
        one_of("arithmetic", arithmetic, ARITHMETICS, " (on the GPU 'auto' too)")
    if arithmetic == "wgmma" and cache.fp8_dtype != "float8_e4m3fn":
        raise ValueError(f'arithmetic must be "exact" unless the keys are float8_e4m3fn, got "wgmma" for {cache.fp8_dtype}')

    # shapes
    _, _, num_layers, page_size, _, head_dim = blocks.shape
    num_requests = table.shape[0]
    _require_shape(q, "[T, H, D]", (None, None, head_dim))
    num_tokens, num_heads, _ = q.shape
    if not 1 <= num_heads <= MAX_POSITION or num_tokens > MAX_POSITION:
        raise ValueError(f"q must have shape [T, H, D] with H of at least 1 and both at most {MAX_POSITION}, got {list(q.shape)}")
    if 4 * max(1, num_tokens) * top_k > _ADDRESSABLE:
        raise ValueError(f"top_k must leave T x top_k int32 within {_ADDRESSABLE} bytes (T = {num_tokens}), got {_shown(top_k)}")
    _require_shape(q_s, "[T, H]", (num_tokens, num_heads))
    _require_shape(offsets, "[B + 1]", (num_requests + 1,))
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx must be in [0, L) = [0, {num_layers}), got {_shown(layer_idx)}")
    for view in (q, q_s, offsets):
        _require_layout(view)
    for view in outputs:
        _require_shape(view, "[T, top_k]", (num_tokens, top_k))
        if not view.c_contiguous:
            raise ValueError(f"{view.name} must be C-contiguous, got strides {list(view.strides)} for shape {list(view.shape)}")
        _require_layout(view)
        if not view.writeable:
            raise ValueError(f"{view.name} must be writeable, got a read-only array")

    _check_places(inputs, outputs)
    width = _check_metadata(cache, offsets, lengths, table, num_tokens, kpool)
    return Call(
        num_requests=num_requests, num_tokens=num_tokens, num_heads=num_heads, page_size=page_size, width=width,
        causal=mask == "causal", kpool=min(kpool, _ENDLESS), top_k=top_k, scores_budget_bytes=scores_budget_bytes, order=order,
        arithmetic=arithmetic, fp8_dtype=cache.fp8_dtype,
        q=q.sliced(axes=(0, 1, 2), dtype="uint8"), q_s=q_s,
        keys=blocks.sliced(axes=(0, 3, 5), offset=layer_idx * blocks.strides[2], dtype="uint8"),
        key_scales=scales.sliced(axes=(0, 3), offset=layer_idx * scales.strides[2]),
        offsets=offsets.sliced(axes=(0,), dtype="int32"), lengths=lengths.sliced(axes=(0,), dtype="int32"),
        table=table.sliced(axes=(0, 1), dtype="int32"), out=out_view, out_scores=out_scores_view)


def _check_places(inputs: list[ArrayView], outputs: list[ArrayView]) -> None:
    """Data where `q`, the first input, is; metadata there or on the host; no output over another array."""
    q, data, metadata = inputs[0], inputs[1:4] + outputs, inputs[4:]
    place = {True: "a device", False: "the host"}
    for view in data:
        if view.on_device != q.on_device:
            raise ValueError(f"{view.name} must be on {place[q.on_device]} as q is, got an array on {place[view.on_device]}")
    for view in metadata:
        if view.on_device and not q.on_device:
            raise ValueError(f"{view.name} must be on the host as q is, got an array on a device")
    for i, view in enumerate(outputs):
        for other in inputs + outputs[:i]:
            (start, end), (other_start, other_end) = view.extent, other.extent
            if view.on_device == other.on_device and max(start, other_start) < min(end, other_end):
                raise ValueError(f"{view.name} must not overlap {other.name}, got memory [{start:#x}, {end:#x}) and "
                                 f"[{other_start:#x}, {other_end:#x})")


def _check_metadata(cache: PagedKeyCache, offsets: ArrayView, lengths: ArrayView, table: ArrayView, num_tokens: int,
                    kpool: int) -> int:
    """Checks the contents of the metadata that is on the host, as far as it is; returns the width W of the score matrix."""
    num_blocks, _, _, page_size, _, _ = cache._views[0].shape
    max_pages = table.shape[1]
    new_tokens = cached = None
    if not offsets.on_device:
        at = offsets.numpy().astype(np.int64)
        if at[0] != 0 or at[-1] != num_tokens:
            raise ValueError(f"input_row_offsets must start at 0 and end at T = {num_tokens}, got {at[0]} ... {at[-1]}")
        new_tokens = np.diff(at)
        if (b := _first(new_tokens < 0)) is not None:
            raise ValueError(f"input_row_offsets must ascend, got {at[b]} then {at[b + 1]} at request {b}")
        _check_bound(cache.max_prompt_length, "max_prompt_length", new_tokens, "new")
    if not lengths.on_device:
        cached = lengths.numpy().astype(np.int64)
        if (b := _first(cached < 0)) is not None:
            raise ValueError(f"cache_lengths must not be negative, got {cached[b]} at request {b}")
        total = cached if new_tokens is None else cached + new_tokens
        if (b := _first(total > MAX_POSITION)) is not None:
            raise ValueError(f"cache_lengths plus new tokens must be at most {MAX_POSITION}, got {total[b]} at request {b}")
        _check_bound(cache.max_context_length, "max_context_length", cached, "cached")

    if new_tokens is None or cached is None:
        width = min(max_pages * page_size, MAX_POSITION)
        if cache.max_context_length is not None and cache.max_prompt_length is not None:
            width = min(width, (cache.max_context_length + cache.max_prompt_length) // kpool)
        return width
    # cache rows of the requests that have query tokens
    rows = np.where(new_tokens > 0, (cached + new_tokens) // min(kpool, _ENDLESS), 0)
    pages = -(-rows // page_size)
    if (b := _first(pages > max_pages)) is not None:
        raise ValueError(f"lookup_table must have ceil({rows[b]} / P) = {pages[b]} columns for the {rows[b]} cache rows of request "
                         f"{b} (P = {page_size}), got {max_pages}")
    if not table.on_device:
        ids = table.numpy()
        bad = np.argwhere((np.arange(max_pages) < pages[:, None]) & ((ids < 0) | (ids >= num_blocks)))
        if len(bad):
            b, p = map(int, bad[0])
            raise ValueError(f"lookup_table must hold block ids in [0, {num_blocks}), got {ids[b, p]} at request {b}, page {p}")
    return int(rows.max(initial=0))


def _first(bad: np.ndarray) -> int | None:
    """The first request that is marked, or None."""
    return int(np.argmax(bad)) if np.any(bad) else None


def _check_bound(bound: int | None, name: str, lengths: np.ndarray, kind: str) -> None:
    if bound is not None and np.any(lengths > bound):
        b = int(np.argmax(lengths))
        raise ValueError(f"{name} must be at least the {kind} tokens of every request, got {bound} for the {lengths[b]} of "
                         f"request {b}")
