"""Whole calls under watch: what `python -m indexer check` and the tests hold against the oracle.

Every array of a call lies between guard zones; outputs, scratch and a plan's workspace hold poison before it. The call is right if
its outputs have the oracle's bits and no other byte has changed. numba is imported inside functions only, as in `__main__`.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from . import reference
from .batches import POISON, Batch, random_batch
from .problem import FP8_DTYPES, METADATA_DTYPES, c_strides

GUARD_BYTES = 4096                            # before and behind an array; as aligned as any array must be
# Whatever reads or writes where it must not should show: as a score one is nearly the largest, one NaN, one next to nothing; as an
# index, a length or a counter one is far too large, one -1, one far below 0.
FILLERS = (0x7F, 0xFF, 0xA5)
INPUTS = ("q", "q_s", "input_row_offsets", "blocks", "scales", "cache_lengths", "lookup_table")     # of a Batch
MAX_SCORES = 2**22                            # of a matrix that `index_scores` is asked for
# What a batch of `check` is drawn from, in turn (`random_batch`). On a GPU: every dimension; the dimensions of models, for the
# Hopper scorer; few long rows, which clusters or several blocks share, one by one and by the dozen; many rows. The oracle takes up
# to a second.
GPU_LIMITS: tuple[dict[str, Any], ...] = (
    {"max_spare_columns": 200},
    {"heads": (8, 16, 32, 64, 128), "depths": (32, 64, 128), "pages": (16, 32, 64, 128, 256), "max_spare_columns": 60},
    {"max_new": 3, "max_cached": 200_000, "max_requests": 3, "heads": (1, 8, 64), "depths": (16, 64), "pages": (16, 64, 256),
     "top_ks": (1, 64, 512, 2048, 4096, 5000), "max_spare_columns": 2000},
    {"max_new": 30, "max_cached": 60_000, "max_requests": 3, "heads": (1, 8), "depths": (16, 32), "pages": (16, 50, 64, 128),
     "top_ks": (1, 512, 2048, 4096, 9000), "max_spare_columns": 1500},
    {"max_new": 500, "max_cached": 400, "max_requests": 8, "heads": (1, 8), "depths": (4, 32), "pages": (16, 64)})
SIMULATOR_LIMITS: tuple[dict[str, Any], ...] = (
    {"max_new": 3, "max_cached": 12, "max_requests": 3, "heads": (1, 3, 9), "depths": (4, 12), "pages": (1, 4),
     "top_ks": (1, 5, 40)},)


# ------------------------------------------------------------------------------------------------------------ guard zones


class Guarded:
    """An array in the middle of memory that is watched.

    Parameters
    ----------
    name : str
        For messages.
    contents : array
        What it holds.
    filler : int
        The byte around it.
    on_device : bool
        On the device, FP8 as uint8, or on the host.
    is_output : bool
        Whether its contents may change.
    guard_bytes : int
        Before and behind it.
    pitch : int
        Bytes of filler behind every item of the first axis, where that is not the last one.
    shift : int
        Bytes by which it lies behind an aligned address.

    Attributes
    ----------
    array
        NumPy's or numba's.
    """

    def __init__(self, name: str, contents: np.ndarray, filler: int, *, on_device: bool = False, is_output: bool = False,
                 guard_bytes: int = GUARD_BYTES, pitch: int = 0, shift: int = 0) -> None:
        self.name, self.is_output = name, is_output
        self._shape, self._dtype, self._start = contents.shape, contents.dtype, guard_bytes + shift
        outer, *inner = c_strides(contents.shape, contents.dtype)
        self._strides = (outer + (pitch if inner else 0), *inner)
        self._before = np.full(self._start + contents.shape[0] * self._strides[0] + guard_bytes, filler, np.uint8)
        self._within(self._before)[...] = contents
        if on_device:
            from numba import cuda
            self._memory = cuda.to_device(self._before)
            self.array = self._on_device()
        else:
            self._memory = self._before.copy()
            self.array = self._within(self._memory)

    def _within(self, memory: np.ndarray, dtype: Any = None) -> np.ndarray:
        return np.ndarray(self._shape, dtype or self._dtype, memory, self._start, self._strides)

    def _on_device(self) -> Any:
        from numba import cuda

        from .device import SIMULATED
        dtype = np.dtype(np.uint8) if self._dtype in FP8_DTYPES.values() else self._dtype
        if SIMULATED:
            from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
            return FakeCUDAArray(self._within(self._memory._ary, dtype))
        address = self._memory.__cuda_array_interface__["data"][0]
        interface = {"shape": self._shape, "strides": self._strides, "typestr": dtype.str, "data": (address + self._start, False),
                     "version": 3}
        return cuda.from_cuda_array_interface(interface, owner=self._memory, sync=False)

    def fetch(self) -> np.ndarray:
        """The contents as they are, on the host."""
        return self._within(self._now())

    def restore(self) -> None:
        """Gives the memory its first contents again."""
        if isinstance(self._memory, np.ndarray):
            self._memory[...] = self._before
        else:
            self._memory.copy_to_device(self._before)

    def changes(self) -> list[str]:
        """A line if a byte has changed that must not have."""
        now = self._now()
        if self.is_output:
            self._within(now)[...] = self._within(self._before)
        changed = np.flatnonzero(now != self._before)
        if not len(changed):
            return []
        at = int(changed[0])
        return [f"{self.name}: {len(changed)} bytes {'around it ' if self.is_output else ''}have changed, the first at offset "
                f"{at - self._start}, from {self._before[at]:#04x} to {now[at]:#04x}"]

    def _now(self) -> np.ndarray:
        """A copy of the memory."""
        return np.array(self._memory) if isinstance(self._memory, np.ndarray) else self._memory.copy_to_host()


@contextlib.contextmanager
def filled_memory(filler: int, watched: list[Guarded] | None = None) -> Iterator[None]:
    """Scratch, and outputs that a call allocates, hold `filler` when it gets them; with a list, between guard zones added to it.

    Of numba's arrays: memory that torch or CuPy provide is theirs.
    """
    from .device import Memory, numba_stream

    def filled(allocate: Any) -> Any:
        def allocate_filled(self: Memory, shape: tuple[int, ...], dtype: str) -> Any:
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            if self.library != "numba" or not num_bytes:
                return allocate(self, shape, dtype)
            if watched is not None:
                contents = np.full(num_bytes, filler, np.uint8).view(dtype).reshape(shape)
                watched.append(Guarded("scratch", contents, filler, on_device=True, is_output=True))
                return watched[-1].array
            array = allocate(self, shape, dtype)
            array.copy_to_device(np.full(num_bytes, filler, np.uint8).view(dtype).reshape(shape), stream=numba_stream(self.handle))
            return array
        return allocate_filled

    with contextlib.ExitStack() as stack:
        for name in ("empty", "scratch"):
            stack.enter_context(mock.patch.object(Memory, name, filled(getattr(Memory, name))))
        yield


# ------------------------------------------------------------------------------------------------------------ whole calls


@dataclass(frozen=True)
class Way:
    """How a batch is handed to the GPU functions.

    Attributes
    ----------
    on_device : bool
        As device arrays, or as NumPy's.
    host_metadata : bool
        Offsets, lengths and table as NumPy arrays all the same.
    planned : bool
        To an `IndexerPlan`, twice: its first call packs, the second one remembers.
    with_scores, with_out, with_index_scores : bool
        Whether `out_scores` and `out` are given, and whether `index_scores` is called besides.
    own_stream : bool
        On a stream of its own.
    arithmetic : {"auto", "exact"}
        Of the GPU functions.
    filler : int or None
        In scratch and guard zones. None: no guard zones, and memory as it comes, freed as soon as it may be.
    pitch, shift : int
        Layout of the inputs, as in `Guarded`.
    """

    on_device: bool = False
    host_metadata: bool = False
    planned: bool = False
    with_scores: bool = True
    with_out: bool = True
    with_index_scores: bool = True
    own_stream: bool = False
    arithmetic: str = "auto"
    filler: int | None = FILLERS[0]
    pitch: int = 0
    shift: int = 0

    @property
    def num_calls(self) -> int:
        return (2 if self.planned else 1) + int(self.with_index_scores)

    def guarded(self, name: str, contents: np.ndarray, is_output: bool = False) -> Guarded:
        """An array of the call where it belongs."""
        is_metadata = not is_output and contents.dtype.name in METADATA_DTYPES
        options: dict[str, Any] = {} if is_output else {"pitch": self.pitch, "shift": self.shift}
        return Guarded(name, contents, self.filler or 0, on_device=self.on_device and not (is_metadata and self.host_metadata),
                       is_output=is_output, guard_bytes=0 if self.filler is None else GUARD_BYTES, **options)


def random_way(rng: np.random.Generator, batch: Batch, *, on_gpu: bool, arithmetic: str = "auto") -> Way:
    """A way for a batch with everything drawn; a plan and streams on a GPU only."""
    on_device = bool(rng.random() < 0.75)
    planned = on_gpu and on_device and bool(rng.random() < 0.4)
    declared = batch.lookup_table.shape[1] * batch.blocks.shape[3]
    return Way(
        on_device=on_device, host_metadata=on_device and not planned and bool(rng.random() < 0.2), planned=planned,
        with_scores=bool(rng.random() < 0.5), with_out=planned or bool(rng.random() < 0.8),
        with_index_scores=batch.num_tokens * declared <= MAX_SCORES and bool(rng.random() < 0.3),
        own_stream=on_gpu and bool(rng.random() < 0.3), arithmetic="exact" if rng.random() < 0.2 else arithmetic,
        filler=(*FILLERS, None)[int(rng.integers(4))], pitch=int(rng.choice((0, 0, 16, 4))), shift=int(rng.choice((0, 0, 0, 4))))


def draw(seed: int, i: int, *, on_gpu: bool, arithmetic: str = "auto", **given: Any) -> tuple[Batch, Way]:
    """Batch i of a seed and its way: the same for the same arguments, whatever was drawn before.

    Parameters
    ----------
    **given
        Arguments of `random_batch`, in place of the limits here.
    """
    rng = np.random.default_rng([seed, i])
    limits = GPU_LIMITS if on_gpu else SIMULATOR_LIMITS
    batch = random_batch(rng, **{**limits[i % len(limits)], **given})
    return batch, random_way(rng, batch, on_gpu=on_gpu, arithmetic=arithmetic)


@dataclass(frozen=True)
class Outcome:
    """What a batch returned in some way.

    Attributes
    ----------
    selections : list of (indices, out_scores)
        Of each call; `out_scores` is None where nobody asked for it.
    scores : array, float32, [T, W], or None
        What `index_scores` returned.
    changes : list of str
        `Guarded.changes` of everything that was watched.
    """

    selections: list[tuple[np.ndarray, np.ndarray | None]]
    scores: np.ndarray | None
    changes: list[str]


def call(batch: Batch, way: Way) -> Outcome:
    """Calls the GPU functions."""
    from . import index_scores, mla_indexer_ragged_float8_paged
    watched: list[Guarded] = []

    def guarded(name: str, contents: np.ndarray, is_output: bool = False) -> Guarded:
        watched.append(way.guarded(name, contents, is_output))
        return watched[-1]

    names = {id(getattr(batch, name)): name for name in INPUTS}
    arguments = batch.arguments(lambda array: guarded(names.get(id(array), "pages"), array).array)
    out, out_scores = (guarded(name, contents, True) for name, contents in zip(("out", "out_scores"), _poisoned(batch)))
    options: dict[str, Any] = {"arithmetic": way.arithmetic}
    outputs: dict[str, Any] = {**({"out": out.array} if way.with_out else {}),
                               **({"out_scores": out_scores.array} if way.with_scores else {})}
    select: Any = mla_indexer_ragged_float8_paged
    if way.planned:
        select = _plan(batch, way, watched)
    else:
        outputs |= {**batch.options, **options}
    if way.own_stream:
        from numba import cuda
        options["stream"] = outputs["stream"] = cuda.stream()

    selections, scores = [], None
    with contextlib.nullcontext() if way.filler is None else filled_memory(way.filler, watched):
        for _ in range(2 if way.planned else 1):
            out.restore()
            out_scores.restore()
            result = select(*arguments, **outputs)
            _finish(way)
            selections.append((out.fetch() if way.with_out else _on_host(result), out_scores.fetch() if way.with_scores else None))
        if way.with_index_scores:
            scores = index_scores(*arguments, **{**batch.score_options, **options})
            _finish(way)
    return Outcome(selections, None if scores is None else _on_host(scores), [line for zone in watched for line in zone.changes()])


def compare(batch: Batch, way: Way) -> list[str]:
    """What differs between GPU functions and oracle on a batch, and what a call has changed that it must not: a line for each."""
    from . import default_arithmetic
    arithmetic = default_arithmetic(batch.fp8_dtype) if way.arithmetic == "auto" else way.arithmetic
    expected, expected_scores = _poisoned(batch)
    batch.select(reference.mla_indexer_ragged_float8_paged, arithmetic=arithmetic, out=expected, out_scores=expected_scores)
    try:
        outcome = call(batch, way)
    except Exception as error:                # a valid batch: raising is one more way to differ from the oracle
        return [f"the GPU function raised {one_line(error)}"]
    differences = []
    for indices, out_scores in outcome.selections:
        differences += first_difference("indices", expected, indices)
        if out_scores is not None:
            differences += first_difference("out_scores", expected_scores, out_scores)
    if outcome.scores is not None:
        matrix = batch.score(reference.index_scores, arithmetic=arithmetic)
        # Where the metadata is on the device, W is a bound: -inf behind the oracle's W.
        extra = max(0, outcome.scores.shape[1] - matrix.shape[1]) if way.on_device and not way.host_metadata else 0
        matrix = np.pad(matrix, ((0, 0), (0, extra)), constant_values=-np.inf)
        differences += first_difference("index_scores", matrix, outcome.scores)
    return differences + outcome.changes


def _plan(batch: Batch, way: Way, watched: list[Guarded]) -> Any:
    """A plan that is just large enough, in a watched workspace."""
    from . import IndexerPlan
    options: dict[str, Any] = {
        **batch.options, "arithmetic": way.arithmetic, "max_tokens": max(1, batch.num_tokens),
        "max_requests": max(1, len(batch.cache_lengths)), "max_candidates": batch.lookup_table.shape[1] * batch.blocks.shape[3]}
    plan = IndexerPlan(**options)
    if way.filler is None:
        return plan
    watched.append(way.guarded("workspace", np.full(plan.workspace_bytes, way.filler, np.uint8), True))
    return IndexerPlan(**options, workspace=watched[-1].array)


def _poisoned(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Outputs that no call has written."""
    shape = batch.num_tokens, batch.top_k
    return np.full(shape, POISON, np.int32), np.full(shape, np.nan, np.float32)


def _finish(way: Way) -> None:
    """Waits for the device; its errors are raised here."""
    if way.on_device:
        from numba import cuda
        cuda.synchronize()


def _on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.copy_to_host()


def first_difference(name: str, expected: np.ndarray, got: np.ndarray) -> list[str]:
    """One line about the first entry in which two matrices of the same 4-byte dtype differ in a bit; empty if none does."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return [f"{name}: expected {expected.dtype} {list(expected.shape)}, got {got.dtype} {list(got.shape)}"]
    different = np.argwhere(expected.view(np.uint32) != got.view(np.uint32))
    if not len(different):
        return []
    row, column = map(int, different[0])
    values = [f"{array[row, column]} (bits {array.view(np.uint32)[row, column]:#010x})" for array in (expected, got)]
    return [f"{name}: {len(different)} of {expected.size} entries differ, first row {row}, column {column}: expected {values[0]}, "
            f"got {values[1]}"]


def one_line(error: Exception) -> str:
    """An error as a line of a report."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip(' :')}"
