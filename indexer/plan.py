"""A plan: what a serving engine makes once, and calls in every layer of every step."""
from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda

from . import sampled_selection, selection
from .cuda_kernels import resolved_arithmetic
from .device import (
    SIMULATED,
    NoDeviceError,
    clear,
    current_context,
    naming_memory,
    num_multiprocessors,
    on_device_of,
    require_device,
    stream_handle,
    wait_for_producers,
)
from .launches import Plan, Step, select_steps
from .problem import (
    ARITHMETICS,
    DEFAULT_SCORES_BUDGET_BYTES,
    MASKS,
    ORDERS,
    ArrayView,
    Call,
    PagedKeyCache,
    c_strides,
    check_call,
    describe,
    integer,
    one_of,
)
from .ptx import TENSOR_MAP_WORDS

ALIGNMENT = 256                               # bytes, of a workspace and of each of its parts
MAX_PREPARED = 4096                           # calls whose launches a plan remembers


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def workspace_parts(max_tokens: int, max_candidates: int, top_k: int, scores_budget_bytes: int, order: str,
                    num_multiprocessors: int) -> dict[str, int]:
    """Bytes of each part of the workspace that every call within the bounds fits in, by name.

    Rows are shared among blocks where they are fewer than half the multiprocessors; so those bound what is handed over.
    """
    row_bytes = 4 * max(1, max_candidates)
    num_shared = num_multiprocessors // 2
    rank_bytes = 8 * selection.next_power_of_two(max(1, min(top_k, max_candidates))) if order == "score" else 0
    parts = {
        "zeros": 8 * (1 + max(1, num_shared)),
        "scores": max(row_bytes, min(scores_budget_bytes, max_tokens * row_bytes)),
        "maps": 16 * TENSOR_MAP_WORDS * num_multiprocessors,
        "lists": 8 * sampled_selection.CAPACITY * max(1, min(num_shared, max_tokens)),
        "located": 2 * aligned(4 * max_tokens),
        "ranks": max_tokens * rank_bytes,
        "packing": 8,
        "no scores": 4,
    }
    return {name: aligned(num_bytes) for name, num_bytes in parts.items()}


class IndexerPlan:
    """The operator for calls within bounds, in a fixed workspace: a call allocates, waits for and reads back nothing on the device.

    Parameters
    ----------
    max_tokens, max_requests : int
        Query tokens T and requests B of a call, at most. Their ratio is what the Hopper scorer's tile is chosen for.
    max_candidates : int
        Columns W of the score matrix, at most: the smaller of ``max_pages * P`` and ``(max_context_length + max_prompt_length) //
        kpool`` of the caches that it will be called with.
    top_k, mask, kpool, scores_budget_bytes, order, arithmetic
        As in `mla_indexer_ragged_float8_paged`.
    workspace : array, uint8, [at least `workspace_bytes`], optional
        Device memory for the plan alone, aligned to 256 bytes. Default: memory that the plan allocates.

    Raises
    ------
    TypeError, ValueError
        For an argument of another kind or out of range, or a workspace that is too small or elsewhere.
    NoDeviceError
        If there is no GPU.
    MemoryError
        If the device has not the memory for the workspace.

    Notes
    -----
    A plan belongs to the device that was current when it was made. It works for one stream at a time; several streams or threads
    need a plan each. A CUDA graph that has captured calls needs their plan, and its workspace, as long as it is replayed.

    The first call with given addresses, shapes and strides checks its arguments and packs its launches; the plan remembers the last
    `MAX_PREPARED`. Kernels are compiled at the first call of their kind, so call once before capturing.

    Making a plan waits for the device, which CUDA forbids while any of its streams is being captured.
    """

    def __init__(self, *, max_tokens: int, max_requests: int, max_candidates: int, top_k: int, mask: str = "causal", kpool: int = 1,
                 scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index", arithmetic: str = "auto",
                 workspace: Any = None) -> None:
        self._max_tokens = integer("max_tokens", max_tokens, 1)
        self._max_requests = integer("max_requests", max_requests, 1)
        self._max_candidates = integer("max_candidates", max_candidates, 0)
        budget = integer("scores_budget_bytes", scores_budget_bytes, 1)
        one_of("mask", mask, MASKS)
        one_of("order", order, ORDERS)
        one_of("arithmetic", arithmetic, ("auto", *ARITHMETICS))
        self._options: dict[str, Any] = {"top_k": integer("top_k", top_k, 1), "mask": mask, "kpool": integer("kpool", kpool, 1),
                         "scores_budget_bytes": budget, "order": order, "arithmetic": arithmetic}
        require_device()
        if SIMULATED:
            raise NoDeviceError("a plan needs a GPU, numba's simulator is none")
        self._device = cuda.get_current_device()
        self._context = current_context()
        self._parts = workspace_parts(self._max_tokens, self._max_candidates, self._options["top_k"], budget, order,
                                      num_multiprocessors())
        if workspace is None:
            with naming_memory(f"{self.workspace_bytes} bytes of workspace, of which scores_budget_bytes bounds "
                               f"{self._parts['scores']},"):
                workspace = cuda.device_array(self.workspace_bytes, np.uint8)
        self._workspace = describe("workspace", workspace)
        self._check_workspace()
        cuda.synchronize()                    # whatever the memory's owner before may still do to it
        clear(self._workspace.address, self._parts["zeros"], 0)
        cuda.synchronize()
        self._prepared: dict[tuple[Any, ...], tuple[list[Step], list[ArrayView]]] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the plan works in: the score matrix's budget and what does not depend on it."""
        return sum(self._parts.values())

    def _check_workspace(self) -> None:
        view, wanted = self._workspace, self.workspace_bytes
        if view.dtype != "uint8":
            raise TypeError(f"workspace must be uint8, got {view.dtype}")
        if len(view.shape) != 1 or view.size < wanted or not view.c_contiguous:
            raise ValueError(f"workspace must be contiguous and have shape [at least {wanted}], got {list(view.shape)} with "
                             f"strides {list(view.strides)}")
        if not view.on_device or view.address % ALIGNMENT:
            raise ValueError(f"workspace must be in device memory, aligned to {ALIGNMENT} bytes, got address {view.address:#x}")
        self._require_own_device([view])

    def _require_own_device(self, views: list[ArrayView]) -> None:
        with on_device_of(views):
            device = cuda.get_current_device().id
        if device != self._device.id:
            raise ValueError(f"{views[0].name} must be on the plan's device, {self._device.id}, got device {device}")

    def __call__(self, q: Any, q_s: Any, input_row_offsets: Any, k_collection: PagedKeyCache, layer_idx: int = 0, *, out: Any,
                 out_scores: Any = None, stream: Any = None) -> Any:
        """`mla_indexer_ragged_float8_paged` into `out`, in stream order.

        Parameters
        ----------
        q, q_s, input_row_offsets, k_collection, layer_idx, stream
            As there, every array on the plan's device.
        out : array, int32, [T, top_k]
            Receives the result.
        out_scores : array, float32, [T, top_k], optional
            Receives the scores of the selected keys.

        Returns
        -------
        array
            `out`.

        Raises
        ------
        TypeError, ValueError
            As there, and for a call beyond the plan's bounds; nothing is written before an error.
        """
        arrays = q, q_s, input_row_offsets, out, out_scores
        layer_idx = integer("layer_idx", layer_idx)
        key = (*map(_fingerprint, _NAMES, arrays), getattr(k_collection, "_fingerprint", None), layer_idx)
        with contextlib.nullcontext() if current_context() == self._context else cuda.gpus[self._device.id]:
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepare(*arrays, k_collection, layer_idx)
                if len(self._prepared) >= MAX_PREPARED:
                    del self._prepared[next(iter(self._prepared))]
                self._prepared[key] = prepared
            steps, produced = prepared
            handle = stream_handle(stream, _library(q), self._device.id)
            if produced:
                wait_for_producers(produced, handle)
            for step in steps:
                step.enqueue(handle)
        return out

    def _prepare(self, q: Any, q_s: Any, input_row_offsets: Any, out: Any, out_scores: Any, k_collection: PagedKeyCache,
                 layer_idx: int) -> tuple[list[Step], list[ArrayView]]:
        """The steps of a call, and those of its arrays that another stream may still be writing."""
        describe("out", out)                  # of a plan's call it is no option
        call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, out=out, out_scores=out_scores, **self._options)
        self._check_bounds(call)
        self._require_own_device(call.views)
        if not call.num_tokens:
            return [], []
        arithmetic = resolved_arithmetic(call)
        plan = Plan.here(call, arithmetic, with_scores=out_scores is not None,
                         tokens_per_request=-(-self._max_tokens // self._max_requests))
        end = self._workspace.address + self.workspace_bytes
        free = self._workspace.address + self._parts["zeros"]

        def scratch(shape: tuple[int, ...], dtype: str) -> ArrayView:
            nonlocal free
            view = _memory(free, shape, dtype)
            free += aligned(view.size * view.itemsize)
            if free > end:
                raise AssertionError(f"a workspace of {self.workspace_bytes} bytes is too small for {plan}")
            return view

        zeros = _memory(self._workspace.address, plan.zeros_shape, "int32")
        steps = select_steps(call, plan, arithmetic, scratch, out, out_scores, zeros)
        produced = [replace(view, owner=None, capsule=None) for view in call.views if view.stream is not None]
        return steps, produced                # keeps no array alive

    def _check_bounds(self, call: Call) -> None:
        for view in call.views:
            if not view.on_device:
                raise ValueError(f"{view.name} must be on the device in a call of a plan, got an array on the host")
        for name, what, bound, value in (("q", "rows", self._max_tokens, call.num_tokens),
                                         ("lookup_table", "rows", self._max_requests, call.num_requests)):
            if value > bound:
                raise ValueError(f"{name} must have at most as many {what} as the plan was made for, {bound}, got {value}")
        if call.width > self._max_candidates:
            raise ValueError(f"k_collection must bound the candidates of a token to max_candidates = {self._max_candidates}, by "
                             f"its table's width or by max_prompt_length and max_context_length, got {call.width}")


_NAMES = "q", "q_s", "input_row_offsets", "out", "out_scores"


def _memory(address: int, shape: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView("workspace", address, shape, c_strides(shape, dtype), dtype, True, "cuda", None)


def _library(q: Any) -> str:
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(q, torch.Tensor) else describe("q", q).library


def _fingerprint(name: str, array: Any) -> tuple[Any, ...] | None:
    """`ArrayView.fingerprint` of an argument; sooner, for torch."""
    if array is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and type(array) is torch.Tensor and array.layout is torch.strided:
        return array.data_ptr(), array.shape, array.stride(), array.dtype, array.device, array.is_neg()
    return describe(name, array).fingerprint
