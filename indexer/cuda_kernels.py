"""The GPU function: the oracle's result, bit for bit, on any CUDA GPU from compute capability 7.5.

arguments -> `problem.check_call` -> `Plan` -> launches -> output. The kernels of each stage have a module of their own
(`scoring`, `selection`); the one that finds each row's request and candidates is here.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, int64
from numba.cuda import types

from . import sampled_selection, scoring, selection
from .device import (
    MAX_GRID,
    Kernel,
    Memory,
    copy_to_host,
    has_wgmma,
    is_capturing,
    kernel_array,
    max_shared_bytes,
    num_multiprocessors,
    on_device_of,
    stream_handle,
    wait_for_producers,
)
from .problem import DEFAULT_SCORES_BUDGET_BYTES, ArrayView, Call, check_call, describe, fp8_name

if not scoring.SIMULATED:                     # the simulator knows no PTX
    from . import ptx, tile_schedule, tma_scoring, tma_tile, wgmma_scoring

__all__ = ["default_arithmetic", "index_scores", "mla_indexer_ragged_float8_paged"]

ROW_THREADS = 8 if scoring.SIMULATED else 128


def mla_indexer_ragged_float8_paged(
        q: Any, q_s: Any, input_row_offsets: Any, k_collection: Any, layer_idx: int = 0, *, top_k: int, mask: str = "causal",
        kpool: int = 1, scores_budget_bytes: int = DEFAULT_SCORES_BUDGET_BYTES, order: str = "index", arithmetic: str = "auto",
        out: Any = None, out_scores: Any = None, stream: Any = None) -> Any:
    """Positions of the `top_k` best keys of every query token, on the GPU.

    Parameters
    ----------
    q : array, FP8 or uint8, [T, H, D]
        Query heads, of the dtype of the keys (uint8: as its bytes). NumPy, torch, or anything with ``__cuda_array_interface__``.
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
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      top_k=top_k, scores_budget_bytes=scores_budget_bytes, order=order, out=out, out_scores=out_scores)
    with on_device_of(_views(call)):
        work = _Work(call, stream)
        shape = (call.num_tokens, call.top_k)
        device_out = work.output(call.out, shape, "int32")
        device_scores = None if call.out_scores is None else work.output(call.out_scores, shape, "float32")
        if call.num_tokens:
            work.select(work.plan(with_scores=device_scores is not None), device_out, device_scores)
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
    TypeError, ValueError, NoDeviceError
        As `mla_indexer_ragged_float8_paged`.
    """
    call = check_call(q, q_s, input_row_offsets, k_collection, layer_idx, mask=mask, kpool=kpool, arithmetic=arithmetic,
                      scores_only=True)
    with on_device_of(_views(call)):
        work = _Work(call, stream)
        scores = work.memory.empty((call.num_tokens, call.width), "float32")
        if call.num_tokens and call.width:
            work.score_all(work.plan(with_scores=True), scores)
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
    return "wgmma" if fp8_name("fp8_dtype", fp8_dtype) == "float8_e4m3fn" and has_wgmma() else "exact"


# ------------------------------------------------------------------------------------------------------------------ plan


@dataclass(frozen=True)
class Plan:
    """What a call launches and how much scratch it takes: everything the launches know.

    Attributes
    ----------
    num_multiprocessors : int
        Of the device.
    tile : ScoreTile
        Of the portable scorer.
    tma : TmaTile or None
        Of the Hopper scorer, where it takes the call.
    rows_per_chunk : int
        Rows of the score matrix held at a time.
    width : int
        Columns of the score matrix, W, at least 1.
    num_splits : int
        Blocks that share the key tiles of a row, but for the Hopper scorer.
    skip_up_to : int
        Rows with at most so many candidates need no scores: all are selected.
    num_pieces : int
        Blocks that share a row in selection; 0 for the portable kernel, which has one block per row.
    rank_width : int
        Entries per row that are sorted; 0 for order "index".
    """

    num_multiprocessors: int
    tile: scoring.ScoreTile
    tma: tma_tile.TmaTile | None
    rows_per_chunk: int
    width: int
    num_splits: int
    skip_up_to: int
    num_pieces: int
    rank_width: int

    @classmethod
    def of(cls, call: Call, num_multiprocessors: int, shared_bytes_limit: int, *, with_scores: bool, use_tma: bool = False) -> Plan:
        """The plan for a checked call on such a device; `with_scores` if scores are part of its result."""
        tile = scoring.score_tile(call.num_heads)
        width = max(1, call.width)
        num_tiles = -(-width // tile.block_kv)
        num_rows = min(call.rows_per_chunk, MAX_GRID)
        num_splits = min(scoring.splits_per_row(num_rows, num_tiles, num_multiprocessors), MAX_GRID // num_rows)
        by_score = call.order == "score"
        skip_up_to = 0 if with_scores or by_score else min(call.top_k, width)
        rank_width = selection.next_power_of_two(max(1, min(call.top_k, width))) if by_score else 0
        num_pieces = 0
        if sampled_selection.supports(width, call.top_k, shared_bytes_limit):
            num_pieces = sampled_selection.pieces_per_row(num_rows, width, num_multiprocessors)
        tma = None
        if use_tma:
            tokens_per_request = -(-call.num_tokens // call.num_requests)
            tma = tma_tile.tile_for(call.num_heads, call.q.shape[2], tokens_per_request, shared_bytes_limit)
        return cls(num_multiprocessors, tile, tma, num_rows, width, num_splits, skip_up_to, num_pieces, rank_width)

    @property
    def scores_shape(self) -> tuple[int, int]:
        """Of the score matrix, float32."""
        return self.rows_per_chunk, self.width

    @property
    def maps_shape(self) -> tuple[int, int]:
        """Of the Hopper scorer's tensor maps, two per block, uint64."""
        return self.num_multiprocessors, 2 * ptx.TENSOR_MAP_WORDS

    @property
    def ranks_shape(self) -> tuple[int, int]:
        """Of the sort's scratch, uint64."""
        return self.rows_per_chunk, self.rank_width

    @property
    def lists_shape(self) -> tuple[int, int]:
        """Of what the blocks that share a row hand over, uint32."""
        return (self.rows_per_chunk, 2 * sampled_selection.CAPACITY) if self.num_pieces > 1 else (1, 1)

    def chunks(self, num_tokens: int) -> list[tuple[int, int]]:
        """Half-open ranges of tokens that are scored and selected at a time."""
        return [(start, min(start + self.rows_per_chunk, num_tokens)) for start in range(0, num_tokens, self.rows_per_chunk)]


def _views(call: Call) -> list[ArrayView]:
    optional = [view for view in (call.out, call.out_scores) if view is not None]
    return [call.q, call.q_s, call.keys, call.key_scales, *optional, call.offsets, call.lengths, call.table]


# -------------------------------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class _Rows:
    """What is known of a call's rows, on the device.

    Attributes
    ----------
    request, candidates : int32 [T]
    state : int32 [T, 2]
        Zeros, for selection.
    counters : uint32 [2]
        Zeros, for the Hopper scorer.
    """

    request: Any
    candidates: Any
    state: Any
    counters: Any


class _Work:
    """One call on its way through a stream: its inputs on the device, its scratch, its launches."""

    def __init__(self, call: Call, stream: Any) -> None:
        self.arithmetic = call.arithmetic
        if call.arithmetic == "auto":
            self.arithmetic = default_arithmetic(call.fp8_dtype)
        elif call.arithmetic == "wgmma" and not has_wgmma():
            raise ValueError('arithmetic must be "auto" or "exact" on a device without compute capability 9.0, got "wgmma"')
        self.call = call
        library = call.q.library if call.q.on_device else "numba"
        self.handle = stream_handle(stream, library)
        self.memory = Memory(library, self.handle)
        views = _views(call)
        on_host = [view for view in views if not view.on_device]
        if on_host and is_capturing(self.handle):
            raise ValueError(f"{on_host[0].name} must be on the device during stream capture, got an array on the host")
        wait_for_producers(views, self.handle)
        self.q, self.q_s, self.keys, self.key_scales, self.offsets, self.lengths, self.table = (
            kernel_array(view if view.on_device else self.memory.upload(view))
            for view in (call.q, call.q_s, call.keys, call.key_scales, call.offsets, call.lengths, call.table))

    def output(self, given: ArrayView | None, shape: tuple[int, int], dtype: str) -> Any:
        """The caller's array where it is on the device, else a new one."""
        return given.owner if given is not None and given.on_device else self.memory.empty(shape, dtype)

    def deliver(self, array: Any, view: ArrayView | None) -> Any:
        """What the caller gets of a device array: itself, or a host array in which it has been copied."""
        if self.call.q.on_device:
            return array
        host = copy_to_host(array, self.handle)
        if view is not None:
            view.numpy()[...] = host
            return view.owner
        if self.call.q.library == "torch":
            import torch
            return torch.from_numpy(host)
        return host

    @functools.cached_property
    def mapped(self) -> tuple[ArrayView, ArrayView, ArrayView]:
        """Queries, keys and key scales, as the Hopper scorer's copies address them."""
        return describe("q", self.q), describe("blocks", self.keys), describe("scales", self.key_scales)

    def plan(self, *, with_scores: bool) -> Plan:
        """The plan for this call on the current device."""
        use_tma = self.arithmetic == "wgmma" and tma_tile.supports(self.call, *self.mapped)
        return Plan.of(self.call, num_multiprocessors(), max_shared_bytes(), with_scores=with_scores, use_tma=use_tma)

    def locate_rows(self, width: int) -> _Rows:
        """What is known of the call's rows, on the device."""
        call = self.call
        request, candidates, state = (kernel_array(self.memory.scratch(shape, "int32"))
                                      for shape in ((call.num_tokens,), (call.num_tokens,), (call.num_tokens, 2)))
        counters = kernel_array(self.memory.scratch((2,), "int32"), "uint32")
        num_blocks = -(-call.num_tokens // ROW_THREADS)
        LOCATE_ROWS.launch(num_blocks, self.handle, self.offsets, self.lengths, int(call.causal), call.kpool,
                           width, request, candidates, state, counters)
        return _Rows(request, candidates, state, counters)

    def scorer(self, plan: Plan, rows: _Rows, skip_up_to: int) -> Callable[[int, int, Any, Any], None]:
        """What all chunks share of a scorer's launch, made once.

        Returns
        -------
        function of (start, stop, scores, bits)
            Launches it: scores of the tokens [start, stop) into the first rows of `scores`; `bits` is the same memory.
        """
        if plan.tma is not None:
            return self._tma_scorer(plan, plan.tma, rows, skip_up_to)
        data = (self.q, self.q_s, self.keys, self.key_scales, self.table, rows.request, rows.candidates)

        def score(start: int, stop: int, scores: Any, bits: Any) -> None:
            num_blocks = (stop - start) * plan.num_splits
            if self.arithmetic == "wgmma":
                wgmma_scoring.SCORE_ROWS.launch(num_blocks, self.handle, *data, scores, start, skip_up_to, plan.num_splits)
            else:
                code = scoring.FP8_CODES[self.call.fp8_dtype]
                scoring.exact_scorer(plan.tile).launch(
                    num_blocks, self.handle, *data, scores, bits, start, skip_up_to, plan.num_splits, code.nan_mask, code.nan_bits,
                    np.float32(code.unit**2))

        return score

    def _tma_scorer(self, plan: Plan, tile: tma_tile.TmaTile, rows: _Rows,
                    skip_up_to: int) -> Callable[[int, int, Any, Any], None]:
        call = self.call
        q, keys, key_scales = self.mapped
        table = describe("lookup_table", self.table)
        num_blocks, page_size, _ = keys.shape
        rows_per_copy = min(page_size, tile_schedule.BLOCK_KV)
        maps = tma_tile.tensor_map(q, (tile.block_q, tile.heads)), tma_tile.tensor_map(keys, (1, rows_per_copy))
        inputs = (rows.counters, self.q_s, key_scales.address, key_scales.strides[0], self.offsets, self.lengths,
                  self.table, table.extent[0], table.extent[1] - table.extent[0])
        dimensions = (call.width, num_blocks, rows_per_copy.bit_length() - 1, max(1, page_size // tile_schedule.BLOCK_KV),
                      int(call.causal), tile_schedule.divisor(call.kpool))
        bounds = tile_schedule.enough_visible(skip_up_to, call.kpool), tile_schedule.visible_limit(call.width, call.kpool)
        kernel = tma_scoring.tma_scorer(tile)
        memory = describe("maps", self.memory.scratch(plan.maps_shape, "uint64"))       # freed with the function below

        def score(start: int, stop: int, scores: Any, bits: Any) -> None:
            kernel.launch(plan.num_multiprocessors, self.handle, *maps, memory.address, *inputs, describe("scores", scores).address,
                          *dimensions, start, stop, *bounds, shared_bytes=tile.shared_bytes)

        return score

    def select(self, plan: Plan, out: Any, out_scores: Any) -> None:
        """The whole operator, one chunk of rows after the other."""
        call = self.call
        rows = self.locate_rows(call.width)
        scratch = self.memory.scratch(plan.scores_shape, "float32")
        scores, bits = kernel_array(scratch), kernel_array(scratch, "uint32")
        with_scores = int(out_scores is not None)
        if out_scores is None:
            out_scores = self.memory.scratch((1, 1), "float32")
        targets = kernel_array(out), kernel_array(out_scores, "uint32"), with_scores
        lists = kernel_array(self.memory.scratch(plan.lists_shape, "int32"), "uint32")
        if plan.rank_width:
            ranks = kernel_array(self.memory.scratch(plan.ranks_shape, "uint64"), "uint64")
        score = self.scorer(plan, rows, plan.skip_up_to) if call.width else None
        for start, stop in plan.chunks(call.num_tokens):
            if score:
                score(start, stop, scores, bits)
            if plan.num_pieces:
                sampled_selection.SELECT_ROWS_SAMPLED.launch(
                    (stop - start) * plan.num_pieces, self.handle, bits, rows.candidates, start, *targets, plan.num_pieces, lists,
                    rows.state, shared_bytes=sampled_selection.shared_bytes(plan.width))
            else:
                selection.SELECT_ROWS.launch(stop - start, self.handle, bits, rows.candidates, start, *targets)
            if plan.rank_width:
                selection.RANK_ROWS.launch(stop - start, self.handle, bits, rows.candidates, start, *targets, ranks)

    def score_all(self, plan: Plan, out: Any) -> None:
        """Scores of all rows into `out` [T, W], -inf outside the candidates."""
        call = self.call
        rows = self.locate_rows(call.width)
        scores, bits = kernel_array(out), kernel_array(out, "uint32")
        # offsets and lengths that nobody has checked may leave rows to no request's tiles
        everywhere = plan.tma is not None and (call.offsets.on_device or call.lengths.on_device)
        FILL_OUTSIDE.launch(call.num_tokens, self.handle, bits, rows.candidates, int(everywhere))
        score = self.scorer(plan, rows, 0)
        for start, stop in plan.chunks(call.num_tokens):
            score(start, stop, scores[start:stop], bits[start:stop])


def _locate_rows(offsets, lengths, causal, kpool, width, row_request, row_candidates, row_state, counters):
    """Request and candidate count of every token, and a clean state, one thread each.

    The request is the last one whose offset is not behind the token; whatever offsets and lengths hold, the search ends inside them
    and the count is clamped to [0, width]. A request of negative length has no candidates.
    """
    token = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)
    num_requests = int64(lengths.shape[0])
    if token < row_request.shape[0]:
        low, high = int64(0), num_requests
        while high - low > 1:
            middle = (low + high) // 2
            if offsets[middle] <= token:
                low = middle
            else:
                high = middle
        count = int64(0)
        if num_requests > 0:
            index = token - int64(offsets[low])
            new_tokens = int64(offsets[low + 1]) - int64(offsets[low])
            visible = int64(lengths[low]) + (index + 1 if causal != 0 else new_tokens)
            if lengths[low] >= 0:
                count = max(visible, int64(0)) // int64(kpool)
        row_request[token] = low
        row_candidates[token] = min(count, int64(width))
        for i in range(2):
            row_state[token, i] = 0
            if token == 0:
                counters[i] = 0


def _fill_outside(bits, row_candidates, everywhere):
    """-inf at and behind each row's candidates, or everywhere; one block per row."""
    row = int64(cuda.blockIdx.x)
    first = int64(0) if everywhere != 0 else int64(row_candidates[row])
    for position in range(first + cuda.threadIdx.x, bits.shape[1], cuda.blockDim.x):
        bits[row, position] = selection.MINUS_INF_BITS


LOCATE_ROWS = Kernel(
    _locate_rows,
    (types.Array(types.int32, 1, "A"), types.Array(types.int32, 1, "A"), types.int32, types.int64, types.int64,
     types.Array(types.int32, 1, "C"), types.Array(types.int32, 1, "C"), types.Array(types.int32, 2, "C"),
     types.Array(types.uint32, 1, "C")),
    ROW_THREADS)
FILL_OUTSIDE = Kernel(_fill_outside, (types.Array(types.uint32, 2, "C"), types.Array(types.int32, 1, "C"), types.int32),
                      ROW_THREADS)
