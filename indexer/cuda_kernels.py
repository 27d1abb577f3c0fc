"""The GPU function: the oracle's result, bit for bit, on any CUDA GPU from compute capability 7.5.

arguments -> `problem.check_call` -> `launches` -> output. Arrays on the host take the way over the device; scratch comes from the
library that the arrays came from, for the length of the call.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .device import (
    Memory,
    copy_to_host,
    is_capturing,
    is_hopper,
    naming_memory,
    on_device_of,
    stream_handle,
    wait_for_producers,
)
from .launches import Plan, Step, score_steps, select_steps
from .problem import DEFAULT_SCORES_BUDGET_BYTES, ArrayView, Call, check_call, describe, fp8_name

__all__ = ["default_arithmetic", "index_scores", "mla_indexer_ragged_float8_paged"]


def mla_indexer_ragged_float8_paged(
        q: Any, q_s: Any, input_row_offsets: Any, k_collection: Any, layer_idx: int = 0, *, top_k: int, mask: str = "causal",
        kpool: int = 1, scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index", arithmetic: str = "auto",
        out: Any = None, out_scores: Any = None, stream: Any = None) -> Any:
    """Positions of the `top_k` best keys of every query token, on the GPU.

    Parameters
    ----------
    q : array, FP8 or uint8, [T, H, D]
        Query heads, of the dtype of the keys (uint8: as its bytes). NumPy, torch, or anything on a GPU with
        ``__cuda_array_interface__`` or ``__dlpack__``.
    q_s : array, float32, [T, H]
        Query scales, any sign; they carry the head weights.
    input_row_offsets : array, uint32 or int32, [B + 1]
        Request ``b`` owns the query rows ``[offsets[b], offsets[b + 1])``. On the device as `q`, or on the host: then it is checked
        and copied, which stream capture does not allow.
    k_collection : PagedKeyCache
        The keys, where `q` is.
    layer_idx : int
        The layer whose keys are scored.
    top_k : int
        Positions per token, at least 1.
    mask : {"causal", "null"}
        Whether a token sees the new tokens behind it.
    kpool : int
        Tokens per cache row; with more than one, candidates and positions count pooled rows.
    scores_budget_bytes : int
        Bound on the score matrix that is held at a time; one row is held whatever it takes.
    order : {"index", "score"}
        Positions ascending, or best first.
    arithmetic : {"auto", "exact", "wgmma"}
        How a dot product is rounded; "auto" is `default_arithmetic`.
    out : array, int32, [T, top_k], optional
        Receives the result; where `q` is.
    out_scores : array, float32, [T, top_k], optional
        Receives the scores of the selected keys, -inf behind them; where `q` is.
    stream : optional
        A stream of torch, CuPy, numba or cuda.core, or a CUstream as int. Default: the current one of the library of `q`.

    Returns
    -------
    array, int32, [T, top_k]
        `out`, or a new array of the library of `q` (numba's for one that is none of NumPy, torch and CuPy). Device arrays are
        filled in stream order; for host arrays the function returns when they are filled.

    Raises
    ------
    TypeError, ValueError
        See `indexer.problem.check_call`; nothing is written before an error.
    NoDeviceError
        If there is no GPU.
    MemoryError
        If the device has not the memory; says for how many bytes, and what bounds them.
    RuntimeError
        If the device or its driver fails; says the usual cause.
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      top_k=top_k, scores_budget_bytes=scores_budget_bytes, order=order, out=out, out_scores=out_scores)
    with on_device_of(call.views):
        work = _Work(call, stream)
        shape = (call.num_tokens, call.top_k)
        device_out = work.output(call.out, shape, "int32")
        device_scores = None if call.out_scores is None else work.output(call.out_scores, shape, "float32")
        if call.num_tokens:
            plan = work.plan(with_scores=device_scores is not None)
            work.run(select_steps(work.call, plan, work.arithmetic, work.scratch, device_out, device_scores))
        if call.out_scores is not None:
            work.deliver(device_scores, call.out_scores)
        return work.deliver(device_out, call.out)


def index_scores(q: Any, q_s: Any, input_row_offsets: Any, k_collection: Any, layer_idx: int = 0, *, mask: str = "causal",
                 kpool: int = 1, arithmetic: str = "auto", stream: Any = None) -> Any:
    """Scores of all candidates of every query token, on the GPU.

    Parameters are those of `mla_indexer_ragged_float8_paged`.

    Returns
    -------
    array, float32, [T, W]
        Of the library of `q`. W is the largest candidate count of a token where offsets and lengths are on the host, else the
        smaller of the table's width in rows and ``(max_context_length + max_prompt_length) // kpool``; -inf outside each row's
        candidates.

    Raises
    ------
    TypeError, ValueError, NoDeviceError, MemoryError, RuntimeError
        As `mla_indexer_ragged_float8_paged`.
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      scores_only=True)
    with on_device_of(call.views):
        work = _Work(call, stream)
        scores = work.output(None, (call.num_tokens, call.width), "float32")
        if call.num_tokens and call.width:
            is_unchecked = call.offsets.on_device or call.lengths.on_device
            work.run(score_steps(work.call, work.plan(with_scores=True), work.arithmetic, work.scratch, scores, is_unchecked))
        return work.deliver(scores, None)


def default_arithmetic(fp8_dtype: Any = "float8_e4m3fn") -> str:
    """The arithmetic that "auto" stands for on the current device, to hand to the oracle.

    Parameters
    ----------
    fp8_dtype : dtype
        The FP8 kind of the keys.

    Returns
    -------
    str
        "wgmma" on compute capability 9.0 for float8_e4m3fn; "exact" elsewhere, and where there is no device.

    Raises
    ------
    TypeError
        If `fp8_dtype` is no supported FP8 kind.
    """
    return "wgmma" if fp8_name("fp8_dtype", fp8_dtype) == "float8_e4m3fn" and is_hopper() else "exact"


def resolved_arithmetic(call: Call) -> str:
    """The arithmetic of a call on the current device.

    Raises
    ------
    ValueError
        If the device has not got it.
    """
    if call.arithmetic == "wgmma" and not is_hopper():
        raise ValueError('arithmetic must be "auto" or "exact" on a device without compute capability 9.0, got "wgmma"')
    return default_arithmetic(call.fp8_dtype) if call.arithmetic == "auto" else call.arithmetic


class _Work:
    """One call on its way through a stream: its inputs on the device, its scratch, its output.

    Attributes
    ----------
    call : Call
        With every input on the device.
    """

    def __init__(self, call: Call, stream: Any) -> None:
        self.arithmetic = resolved_arithmetic(call)
        self.library = call.q.library if call.q.on_device else "numba"
        self.handle = stream_handle(stream, self.library)
        self.memory = Memory(self.library, self.handle)
        self._given, self._scratch = call, list[Any]()
        on_host = [view for view in call.views if not view.on_device]
        if on_host and is_capturing(self.handle):
            raise ValueError(f"{on_host[0].name} must be on the device during stream capture, got an array on the host")
        wait_for_producers(call.views, self.handle)
        uploaded: dict[str, Any] = {name: describe(view.name, self.memory.upload(view)) for name, view in call.inputs.items()
                                    if not view.on_device}
        self.call = replace(call, **uploaded)

    def output(self, given: ArrayView | None, shape: tuple[int, int], dtype: str) -> Any:
        """The caller's array where it is on the device, else a new one."""
        if given is not None and given.on_device:
            return given.owner
        return self._allocated(self.memory.empty, shape, dtype, f"output, T rows of {shape[1]},")

    def deliver(self, array: Any, view: ArrayView | None) -> Any:
        """What the caller gets of a device array: itself, or a host array in which it has been copied."""
        if self._given.q.on_device:
            return array
        host = copy_to_host(array, self.handle)
        if view is not None:
            view.numpy()[...] = host
            return view.owner
        if self._given.q.library == "torch":
            import torch
            return torch.from_numpy(host)
        return host

    def plan(self, *, with_scores: bool) -> Plan:
        """How this call is launched on the current device."""
        return Plan.here(self.call, self.arithmetic, with_scores=with_scores)

    def scratch(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory that lasts as long as this object."""
        self._scratch.append(self._allocated(
            self.memory.scratch, shape, dtype,
            f"scratch, the most of which scores_budget_bytes bounds ({self.call.scores_budget_bytes} here),"))
        return self._scratch[-1]

    def _allocated(self, allocate: Callable[..., Any], shape: tuple[int, ...], dtype: str, what: str) -> Any:
        with naming_memory(f"{math.prod(shape) * np.dtype(dtype).itemsize} bytes of {what}"):
            return allocate(shape, dtype)

    def run(self, steps: list[Step]) -> None:
        """Puts them on the stream."""
        for step in steps:
            step.enqueue(self.handle)
