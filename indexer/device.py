"""How the host reaches the GPU: devices, streams, memory of the caller's library, compiling and launching.

The kernels' modules know nothing of torch or CuPy; this one knows nothing of the operator.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config
from numba.cuda import types

from .problem import ArrayView, describe

SIMULATED = bool(config.ENABLE_CUDASIM)
OLDEST_CAPABILITY = (7, 5)
MAX_GRID = 2**31 - 1                          # along x, on every supported card
DEFAULT_STREAMS = (0, 1, 2)                   # the default, the legacy and the per-thread one


class NoDeviceError(RuntimeError):
    """There is no usable GPU; the oracle (`indexer.reference`) needs none."""


def is_available() -> bool:
    """Whether there is a GPU to run on (or its simulator)."""
    return SIMULATED or bool(cuda.is_available())


def require_device() -> None:
    """Raises NoDeviceError with the reason when there is no GPU."""
    if not is_available():
        reason = "NVVM is missing"
        try:
            cuda.get_current_device()         # without a driver or a device, its error is the reason
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(" :")
        raise NoDeviceError(f"no CUDA device is available ({reason}): install the extra cu12 or cu13 on a machine with an NVIDIA "
                            "GPU, or call indexer.reference")


# What usually is the reason for an error of the driver.
_CAUSES = (
    (("INVALID_HANDLE", "INVALID_CONTEXT", "CONTEXT_IS_DESTROYED"),
     "a stream, or the context of a stream or an array, has been destroyed"),
    (("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_PC", "INVALID_ADDRESS_SPACE", "HARDWARE_STACK_ERROR",
      "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT"),
     "some kernel of this process has failed before, of whatever library: no call works in it any more"),
    (("NO_BINARY_FOR_GPU", "INVALID_IMAGE", "INVALID_PTX", "INVALID_SOURCE", "UNSUPPORTED_PTX_VERSION"),
     f"the kernels need compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer, and a driver as new as the compiler: "
     "the extra cu12 is for drivers that know CUDA 12 only"))


def explained(text: str) -> str:
    """A driver's error with its usual cause."""
    causes = [cause for names, cause in _CAUSES if any(re.search(rf"CUDA_ERROR_{name}\b", text) for name in names)]
    return "; ".join([text, *causes])


@contextlib.contextmanager
def explaining_errors() -> Iterator[None]:
    """Turns what numba and cuda.core raise for an error of the driver into a RuntimeError with its usual cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (RuntimeError, TypeError, ValueError)) or "CUDA_ERROR_" not in str(error):
            raise
        raise RuntimeError(explained(" ".join(str(error).split()))) from error


@contextlib.contextmanager
def on_device_of(views: list[ArrayView]) -> Any:
    """Makes the device that holds the views current; the current one where all are on the host.

    Raises
    ------
    ValueError
        If two views are on two devices.
    RuntimeError
        If the card is older than the kernels support, or the driver fails, also in what is done there.
    """
    require_device()
    if SIMULATED:
        yield
        return
    first = None
    for view in views:
        if view.on_device and view.size:
            ordinal = _ordinal(view)
            if first is not None and ordinal != first[1]:
                raise ValueError(f"{view.name} must be on device {first[1]} as {first[0]} is, got device {ordinal}")
            first = first or (view.name, ordinal)
    with explaining_errors(), cuda.gpus[first[1]] if first else contextlib.nullcontext():
        capability = cuda.get_current_device().compute_capability
        if tuple(capability) < OLDEST_CAPABILITY:
            raise RuntimeError(f"the kernels need compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer, "
                               f"this device has {'.'.join(map(str, capability))}")
        yield


def _ordinal(view: ArrayView) -> int:
    from cuda.bindings import driver
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, view.address)
    if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
        raise ValueError(f"{view.name} must be in device memory, got address {view.address:#x} ({error.name})")
    _check((error,), f"the device of {view.name} could not be found")
    return int(ordinal)


def current_context() -> int:
    """The calling thread's CUcontext, 0 for none."""
    from cuda.bindings import driver
    error, context = driver.cuCtxGetCurrent()
    return 0 if int(error) else int(context)


def max_shared_bytes() -> int:
    """Shared memory that a block can have on the current device."""
    return 48 * 1024 if SIMULATED else cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


def is_hopper() -> bool:
    """Whether the current device has Hopper's tensor cores and clusters (compute capability 9.0); False without a device."""
    return not SIMULATED and is_available() and tuple(cuda.get_current_device().compute_capability) == (9, 0)


def num_multiprocessors() -> int:
    """Streaming multiprocessors of the current device."""
    return 1 if SIMULATED else cuda.get_current_device().MULTIPROCESSOR_COUNT


# --------------------------------------------------------------------------------------------------------------- streams


def stream_handle(stream: Any, library: str, ordinal: int | None = None) -> int:
    """The CUstream to work on.

    Parameters
    ----------
    stream : None, int, or a stream of torch, CuPy, numba or cuda.core
        None: the current stream of `library` on the current device, numba's default stream where it has none.
    library : str
        As `ArrayView.library`.
    ordinal : int, optional
        The current device, where it is known.

    Raises
    ------
    TypeError
        If it is no stream.
    ValueError
        If it is an int that no CUstream can be, or a stream of another device than the current one.

    Notes
    -----
    Whether a CUstream still exists cannot be asked. If its context has been destroyed, the driver refuses work on it, which is a
    RuntimeError then. What a destroyed stream of a living context does CUDA leaves undefined: it may end the process, and a new
    stream may have its handle.
    """
    if stream is not None:
        handle = _given_handle(stream)
        _require_current_device(handle)
        return handle
    if SIMULATED:
        return 0
    if library == "torch":
        ordinal = cuda.current_context().device.id if ordinal is None else ordinal
        return int(sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream)
    if library == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def _given_handle(stream: Any) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 2**64:
            raise ValueError(f"stream must be a CUstream, in [0, 2**64), got {stream}")
        return stream
    with contextlib.suppress(TypeError, ValueError, IndexError):            # of objects that are no streams after all
        if hasattr(stream, "__cuda_stream__"):
            protocol = stream.__cuda_stream__
            return int((protocol() if callable(protocol) else protocol)[1])
        for attribute in ("cuda_stream", "ptr", "handle"):
            if hasattr(stream, attribute):
                return int(getattr(stream, attribute))
    raise TypeError(f"stream must be None, an int or a stream of torch, CuPy, numba or cuda.core, got {type(stream).__name__}")


def _require_current_device(handle: int) -> None:
    """Refuses a stream of another device, where the driver can tell (from CUDA 12.8 on); default streams belong to all.

    A stream that is being captured must not be asked: the driver would end the capture.
    """
    if SIMULATED or handle in DEFAULT_STREAMS or is_capturing(handle):
        return
    from cuda.bindings import driver
    with contextlib.suppress(AttributeError, RuntimeError):                 # older bindings, older drivers
        error, device = driver.cuStreamGetDevice(handle)
        current = cuda.get_current_device().id
        if not int(error) and int(device) != current:
            raise ValueError(f"stream must be of device {current}, as the arrays are, got one of device {int(device)}")


def is_capturing(handle: int) -> bool:
    """Whether the stream is being captured into a CUDA graph."""
    if SIMULATED:
        return False
    from cuda.bindings import driver
    error, status = driver.cuStreamIsCapturing(handle)
    return bool(int(error) == 0 and int(status) != int(driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE))


def wait_for_producers(views: Iterable[ArrayView], handle: int) -> None:
    """Orders the stream behind the streams on which the views' producers may still be writing; the host does not wait.

    A stream that is being captured cannot wait for what is not: a graph's inputs are written before it is replayed.
    """
    if SIMULATED:
        return
    producers = {view.stream for view in views if view.stream is not None} - {handle} - ({1} if handle == 0 else set())
    if producers and is_capturing(handle):
        producers = {producer for producer in producers if is_capturing(producer)}
    for producer in producers:
        event = cuda.event(timing=False)
        event.record(cuda.external_stream(producer))
        event.wait(numba_stream(handle))


# ---------------------------------------------------------------------------------------------------------------- memory


class Memory:
    """Device memory, ordered with one stream, from the library that the caller's arrays came from.

    Parameters
    ----------
    library : str
        As `ArrayView.library`; memory comes from torch or CuPy where the arrays did, from numba otherwise.
    handle : int
        The stream on which the memory is used.
    """

    def __init__(self, library: str, handle: int) -> None:
        self.library = library if library in ("torch", "cupy") and not SIMULATED else "numba"
        self.handle = handle

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised C-contiguous array of the caller's library, float32, int32 or uint64, to return to the caller."""
        if self.library == "torch":
            torch = importlib.import_module("torch")
            device = torch.device("cuda", cuda.current_context().device.id)
            # an ExternalStream of handle 0 would be another stream, and its memory free too soon for the default stream's work
            stream = torch.cuda.ExternalStream(self.handle, device) if self.handle else torch.cuda.default_stream(device)
            with torch.cuda.stream(stream):
                return torch.empty(shape, dtype=torch.int64 if dtype == "uint64" else getattr(torch, dtype), device=device)
        if self.library == "cupy":
            cupy = importlib.import_module("cupy")
            is_current = cupy.cuda.get_current_stream().ptr == self.handle
            with contextlib.nullcontext() if is_current else cupy.cuda.ExternalStream(self.handle):
                return cupy.empty(shape, dtype)
        return cuda.device_array(shape, dtype)

    def scratch(self, shape: tuple[int, ...], dtype: str) -> Any:
        """As `empty`, for a call's own use: freed in stream order when the last reference to it goes.

        numba's own allocations would be freed late, after a wait for the device; so where torch or CuPy do not provide, the memory
        comes from the device's stream-ordered pool. Sizes are rounded up, or every new size would leave its own piece in a pool.
        """
        num_items = int(np.prod(shape, dtype=np.int64))
        num_bytes = rounded(num_items * np.dtype(dtype).itemsize)
        if SIMULATED or num_bytes == 0:
            return self.empty(shape, dtype)
        if self.library != "numba":
            return self.empty((num_bytes // np.dtype(dtype).itemsize,), dtype)[:num_items].reshape(shape)
        from cuda.core import Device, Stream
        device = Device(cuda.current_context().device.id)
        device.set_current()
        buffer = device.allocate(num_bytes, stream=Stream.from_handle(self.handle))
        interface = {"shape": shape, "typestr": np.dtype(dtype).str, "data": (int(buffer.handle), False), "version": 3}
        return cuda.from_cuda_array_interface(interface, owner=buffer, sync=False)

    def upload(self, view: ArrayView) -> Any:
        """A contiguous copy of a host array on the device, in stream order."""
        return cuda.to_device(np.ascontiguousarray(view.numpy()), stream=numba_stream(self.handle))


@contextlib.contextmanager
def naming_memory(what: str) -> Iterator[None]:
    """Turns whatever a library raises for want of memory into a MemoryError that says for what, and what bounds it."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__} {error}".lower().replace("_", " ").replace("outofmemory", "out of memory")
        if isinstance(error, MemoryError) or "out of memory" in text:
            raise MemoryError(f"{what} could not be allocated on the device") from error
        raise


def rounded(num_bytes: int) -> int:
    """The next size of which there are four to every power of two, from 512 bytes on; 0 for 0."""
    if num_bytes == 0:
        return 0
    unit = max(512, 1 << max(0, (num_bytes - 1).bit_length() - 3))
    return -(-num_bytes // unit) * unit


def clear(address: int, num_bytes: int, handle: int) -> None:
    """Zeroes device memory, in stream order."""
    from cuda.bindings import driver
    _check(driver.cuMemsetD8Async(address, 0, num_bytes, handle), f"{num_bytes} bytes could not be cleared")


def _check(result: tuple[Any, ...], what: str) -> None:
    """Raises RuntimeError for a driver call that failed."""
    if int(result[0]):
        raise RuntimeError(explained(f"{what}: {result[0].name}"))


def copy_to_host(array: Any, handle: int) -> np.ndarray:
    """A host copy of a device array, taken in stream order; returns when it is complete."""
    view = describe("array", array)
    if view.size == 0:
        return np.empty(view.shape, view.dtype)
    device_array = array if SIMULATED else cuda.from_cuda_array_interface(view.__cuda_array_interface__, owner=view, sync=False)
    host = device_array.copy_to_host(stream=numba_stream(handle))
    if handle:                                # else the copy itself was synchronous
        cuda.external_stream(handle).synchronize()
    return host


def numba_stream(handle: int) -> Any:
    """A CUstream as numba's functions take it."""
    return cuda.external_stream(handle) if handle else 0


def kernel_array(array: Any, dtype: str | None = None) -> Any:
    """A device array as `Launch` takes it, zero copy, optionally with its items read as `dtype` of the same size."""
    view = describe("array", array)
    if dtype is not None:
        view = view.sliced(axes=tuple(range(len(view.shape))), dtype=dtype)
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
        return FakeCUDAArray(np.asarray(_HostInterface(view)) if view.size else np.empty(view.shape, view.dtype))
    return view


def flat_array(array: Any, dtype: str | None = None) -> Any:
    """As `kernel_array`, with all items of a C-contiguous array in one axis."""
    view = describe("array", array)
    return kernel_array(replace(view, shape=(view.size,), strides=(view.itemsize,)), dtype)


class _HostInterface:
    """The simulator's device memory is host memory: the same interface under the host's name."""

    def __init__(self, view: ArrayView) -> None:
        interface = {**view.__cuda_array_interface__}
        del interface["stream"]
        self.__array_interface__ = interface
        self.owner = view.owner


# ----------------------------------------------------------------------------------------------------------- compilation


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is compiled everywhere: by the package for the current device, by the tests for every target.

    Attributes
    ----------
    function : callable
        The Python function.
    signature : tuple of numba types
        Explicit, so that a Python int never makes a second, 64-bit specialisation.
    threads : int
        Threads per block.
    blocks_per_multiprocessor : int
        Blocks that must fit on a multiprocessor. Without this bound, ptxas picks an occupancy of its own and spills to reach it.
    """

    function: Callable[..., None]
    signature: tuple[Any, ...]
    threads: int
    blocks_per_multiprocessor: int = 3

    @property
    def launch_bounds(self) -> tuple[int, int]:
        """As numba takes them."""
        return self.threads, self.blocks_per_multiprocessor

    def launch(self, num_blocks: int, handle: int, *args: Any, shared_bytes: int = 0) -> None:
        """Enqueues `num_blocks` blocks on the stream: see `Launch`."""
        Launch(self, num_blocks, args, shared_bytes).enqueue(handle)


def max_clusters(kernel: Kernel) -> dict[int, int]:
    """How many clusters of 1, 2, 4, 8 and 16 blocks of a kernel, with all the shared memory there is, run at a time on the current
    device; none but on Hopper."""
    return {} if not is_hopper() else _max_clusters(kernel, cuda.get_current_device().id)


@functools.cache
def _max_clusters(kernel: Kernel, ordinal: int) -> dict[int, int]:
    from cuda.bindings import driver
    counts = {1: num_multiprocessors()}
    for blocks in (2, 4, 8, 16):
        launch = Launch(kernel, blocks, (), max_shared_bytes(), blocks)
        error, counts[blocks] = driver.cuOccupancyMaxActiveClusters(launch._function, launch._config)
        if int(error):
            counts[blocks] = 0
    return counts


class Launch:
    """A kernel with its arguments, compiled and packed for the current device, to be enqueued any number of times.

    Parameters
    ----------
    kernel : Kernel
    num_blocks : int
        1 to `MAX_GRID`.
    args : tuple
        Arrays as `kernel_array` gives them, or that `describe` can read. They are not kept alive.
    shared_bytes : int
        Dynamic shared memory of a block.
    blocks_per_cluster : int
        Blocks that run at the same time and read each other's shared memory.

    Raises
    ------
    ValueError
        For a number of blocks that no grid has.
    RuntimeError
        If the driver cannot load the kernel; says what is supported.
    """

    def __init__(self, kernel: Kernel, num_blocks: int, args: tuple[Any, ...], shared_bytes: int = 0,
                 blocks_per_cluster: int = 1) -> None:
        if not 0 < num_blocks <= MAX_GRID:
            raise ValueError(f"a launch takes 1 to {MAX_GRID} blocks, got {num_blocks}")
        if SIMULATED:
            self._simulate = functools.partial(_simulated(kernel)[num_blocks, kernel.threads], *args)
            return
        from cuda.bindings import driver
        device = cuda.get_current_device()
        with explaining_errors():             # the driver loads the code here, if it can
            compiled = _compiled(kernel, tuple(device.compute_capability))
            function = compiled._codelibrary.get_cufunc().kernel.handle
        if shared_bytes:
            _allow_dynamic_shared(compiled, device.id)
        words = [word for kind, value in zip(kernel.signature, args) for word in _words(kind, value)]
        self._words = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * len(words))(*range(first, first + 8 * len(words), 8))
        self._arguments = ctypes.addressof(self._pointers)
        self._function = driver.CUfunction(int(function))
        self._launch = driver.cuLaunchKernelEx
        self._stream = driver.CUstream
        self._handle = 0
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX, self._config.blockDimX, self._config.sharedMemBytes = num_blocks, kernel.threads, shared_bytes
        self._config.gridDimY = self._config.gridDimZ = self._config.blockDimY = self._config.blockDimZ = 1
        if blocks_per_cluster > 1:
            _allow_large_clusters(compiled, device.id)
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = blocks_per_cluster
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            self._config.attrs, self._config.numAttrs = [cluster], 1

    def enqueue(self, handle: int) -> None:
        """Puts it on a stream of the device that it was made for, whose context is current."""
        if SIMULATED:
            self._simulate()
            return
        if handle != self._handle:
            self._config.hStream = self._stream(handle)
            self._handle = handle
        _check(self._launch(self._config, self._function, self._arguments, 0), "a kernel could not be launched")


def _words(kind: Any, value: Any) -> list[int]:
    """A kernel argument as the 8-byte words that hold its parameters, in numba's order."""
    if isinstance(kind, types.Array):
        view = describe("array", value)
        no_owner = [0, 0]
        return [word & (2**64 - 1) for word in (*no_owner, view.size, view.itemsize, view.address, *view.shape, *view.strides)]
    if isinstance(kind, types.BaseTuple):
        return [word for item, part in zip(kind, value) for word in _words(item, part)]
    if kind == types.float32:
        return [struct.unpack("<I", struct.pack("<f", value))[0]]
    return [int(value) & (2**64 - 1)]


@functools.cache
def _simulated(kernel: Kernel) -> Any:
    return cuda.jit(kernel.function)


@functools.cache
def _compiled(kernel: Kernel, capability: tuple[int, int]) -> Any:
    """The compiled kernel for a compute capability. Launched directly: its arguments need no type inference, and a strided array
    and a contiguous one run the same machine code."""
    dispatcher = cuda.jit([kernel.signature], launch_bounds=kernel.launch_bounds)(kernel.function)
    return dispatcher.overloads[kernel.signature]


@functools.cache
def _allow_dynamic_shared(compiled: Any, ordinal: int) -> None:
    """Lifts the default limit of 48 KiB to the device's own; numba does not."""
    from cuda.bindings import driver
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _set_attribute(compiled, ordinal, attribute, max_shared_bytes())


@functools.cache
def _allow_large_clusters(compiled: Any, ordinal: int) -> None:
    """Lifts the limit of 8 blocks per cluster, which every card with clusters has, to the device's own."""
    from cuda.bindings import driver
    _set_attribute(compiled, ordinal, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)


def _set_attribute(compiled: Any, ordinal: int, attribute: Any, value: int) -> None:
    from cuda.bindings import driver
    kernel = compiled._codelibrary.get_cufunc().kernel.handle
    _check(driver.cuKernelSetAttribute(attribute, value, kernel, driver.CUdevice(ordinal)),
           f"{attribute.name} could not be set to {value}")
