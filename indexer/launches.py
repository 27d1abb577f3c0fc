"""What a call launches: its plan, its scratch, its kernels with their arguments, in order.

arguments -> `problem.check_call` -> `Plan` -> scratch and launches. The kernels of each stage have a module of their own.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from . import rows, sampled_selection, scoring, selection
from .device import (
    MAX_GRID,
    SIMULATED,
    Launch,
    clear,
    flat_array,
    kernel_array,
    max_clusters,
    max_shared_bytes,
    num_multiprocessors,
)
from .problem import ArrayView, Call, describe

if not SIMULATED:                     # the simulator knows no PTX
    from . import cluster_selection, ptx, tile_schedule, tma_scoring, tma_tile, wgmma_scoring


class Step(Protocol):
    """Something that is put on a stream: a `Launch`, a `Clear`."""

    def enqueue(self, handle: int) -> None: ...


@dataclass(frozen=True)
class Clear:
    """Zeroes device memory."""

    address: int
    num_bytes: int

    def enqueue(self, handle: int) -> None:
        clear(self.address, self.num_bytes, handle)


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
        Rows of the score matrix held at a time, at least.
    num_chunks : int
        Chunks that all rows need, at most.
    is_packed : bool
        Whether the lengths tell how many rows a chunk holds (`chunks`): where there are several.
    width : int
        Columns of the score matrix, W, at least 1.
    num_splits : int
        Blocks that share the key tiles of a row, but for the Hopper scorer.
    skip_up_to : int
        Rows with at most so many candidates need no scores: all are selected.
    row_blocks : int
        Blocks of a kernel that takes whole rows: one for each; as many as run at a time where the lengths tell how many there are.
    cluster_blocks : int
        Blocks of the cluster that selects a row; 0 for none.
    reach : int
        Candidates of the longest rows that clusters select; -1 without them. Longer ones are for another selection.
    num_held : int
        Tiles of a row that a block of a cluster keeps.
    num_pieces : int
        Blocks that share a row in the sampled selection; 0 without it.
    rank_width : int
        Entries per row that are sorted; 0 for order "index".
    """

    num_multiprocessors: int
    tile: scoring.ScoreTile
    tma: tma_tile.TmaTile | None
    rows_per_chunk: int
    num_chunks: int
    is_packed: bool
    width: int
    num_splits: int
    skip_up_to: int
    row_blocks: int
    cluster_blocks: int
    reach: int
    num_held: int
    num_pieces: int
    rank_width: int

    @classmethod
    def of(cls, call: Call, num_multiprocessors: int, shared_bytes_limit: int, *, with_scores: bool, use_tma: bool = False,
           tokens_per_request: int | None = None, max_clusters: Mapping[int, int] | None = None) -> Plan:
        """The plan for a checked call on such a device.

        Parameters
        ----------
        with_scores : bool
            Whether scores are part of its result.
        use_tma : bool
            Whether the Hopper scorer takes it.
        tokens_per_request : int, optional
            What that one's tile is made for. Default: the call's mean.
        max_clusters : mapping, optional
            How many clusters of so many blocks of the selection run at a time. Default: none.
        """
        tile = scoring.score_tile(call.num_heads)
        width = max(1, call.width)
        num_tiles = -(-width // tile.block_kv)
        num_rows = min(call.rows_per_chunk, MAX_GRID)
        num_chunks = -(-call.num_tokens // num_rows)
        is_packed = num_chunks > 1 and call.width > 0
        row_blocks = min(call.num_tokens, 2 * num_multiprocessors) if is_packed else num_rows
        num_splits = min(scoring.splits_per_row(num_rows, num_tiles, num_multiprocessors), MAX_GRID // num_rows)
        by_score = call.order == "score"
        skip_up_to = 0 if with_scores or by_score else min(call.top_k, width)
        rank_width = selection.next_power_of_two(max(1, min(call.top_k, width))) if by_score else 0
        cluster_blocks = num_held = num_pieces = 0
        reach = -1
        if max_clusters and num_chunks == 1 and call.top_k <= cluster_selection.MAX_TOP_K:
            cluster_blocks = cluster_selection.blocks_per_row(num_rows, width, max_clusters)
        is_sampled = sampled_selection.supports(width, call.top_k, shared_bytes_limit)
        if cluster_blocks:
            longest = cluster_selection.longest_row(cluster_blocks, shared_bytes_limit)
            reach = min(width, longest) if is_sampled else width
            num_held = cluster_selection.tiles_held(reach, cluster_blocks, shared_bytes_limit)
        if is_sampled and reach < width:
            num_pieces = 1 if is_packed else sampled_selection.pieces_per_row(num_rows, width, num_multiprocessors)
        tma = None
        if use_tma:
            tma = tma_tile.tile_for(call.num_heads, call.q.shape[2], tokens_per_request or -(-call.num_tokens // call.num_requests),
                                    shared_bytes_limit)
        return cls(num_multiprocessors, tile, tma, num_rows, num_chunks, is_packed, width, num_splits, skip_up_to, row_blocks,
                   cluster_blocks, reach, num_held, num_pieces, rank_width)

    @classmethod
    def here(cls, call: Call, arithmetic: str, *, with_scores: bool, tokens_per_request: int | None = None) -> Plan:
        """`of` for the current device and an arithmetic that is resolved."""
        num_processors = num_multiprocessors()
        # to ask how many clusters run compiles the kernel: not where only scores are wanted
        few = not SIMULATED and call.top_k > 0 and call.num_tokens <= num_processors
        return cls.of(call, num_processors, max_shared_bytes(), with_scores=with_scores, tokens_per_request=tokens_per_request,
                      use_tma=arithmetic == "wgmma" and tma_tile.supports(call, call.q, call.keys, call.key_scales),
                      max_clusters=max_clusters(cluster_selection.SELECT_ROWS_OF_CLUSTERS) if few else None)

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
        return self.row_blocks, self.rank_width

    @property
    def lists_shape(self) -> tuple[int, int]:
        """Of what the blocks that share a row hand over, uint32."""
        return (self.rows_per_chunk, 2 * sampled_selection.CAPACITY) if self.num_pieces > 1 else (1, 1)

    @property
    def zeros_shape(self) -> tuple[int, int]:
        """Of what is zero before and after every kernel, int32: the Hopper scorer's counters, then the state of shared rows."""
        return (1 + (self.rows_per_chunk if self.num_pieces > 1 else 1), 2)

    @property
    def cluster_shared_bytes(self) -> int:
        """Dynamic shared memory of a block of a cluster."""
        return cluster_selection.shared_bytes(self.num_held)

    @property
    def select_shared_bytes(self) -> int:
        """Dynamic shared memory of a block of another selection."""
        return sampled_selection.shared_bytes(self.width) if self.num_pieces else 0

    @property
    def finds_rows(self) -> bool:
        """Whether scorer and selection find a row's request by themselves: the Hopper scorer, then any but the portable one."""
        return self.tma is not None and (self.num_pieces > 0 or self.cluster_blocks > 0) and not self.rank_width


NOTHING = ArrayView("nothing", 0, (0,), (4,), "int32", True, "cuda", None)
Scratch = Callable[[tuple[int, ...], str], Any]           # (shape, dtype) -> device memory that lasts until the steps have run


def select_steps(call: Call, plan: Plan, arithmetic: str, scratch: Scratch, out: Any, out_scores: Any,
                 zeros: ArrayView | None = None) -> list[Step]:
    """The whole operator, one chunk of rows after the other.

    Parameters
    ----------
    call : Call
        Its inputs are on the device.
    plan : Plan
    arithmetic : {"exact", "wgmma"}
    scratch : callable
        Of (shape, dtype): gives device memory that lasts until the steps have run.
    out, out_scores : device array, int32 and float32, [T, top_k]
        The outputs; `out_scores` may be None.
    zeros : device array, int32, `Plan.zeros_shape`, optional
        Memory that holds zeros when the steps begin, as it will when they have run. Default: scratch that is cleared.
    """
    steps: list[Step] = []
    counters = None
    if plan.tma or plan.num_pieces:
        if zeros is None:
            zeros = _cleared(plan.zeros_shape, scratch, steps)
        counters = _counters(zeros)
    of_lengths = kernel_array(call.offsets), kernel_array(call.lengths), int(call.causal), call.kpool
    located = () if plan.finds_rows else _located_rows(call, scratch, steps)
    memory = scratch(plan.scores_shape, "float32")
    scores, bits = flat_array(memory), flat_array(memory, "uint32")
    packing = kernel_array(NOTHING)
    if plan.is_packed:
        packing = kernel_array(scratch((2,), "int32"))
        steps.append(Launch(rows.PACK_CHUNKS, 1, (*of_lengths, call.width, math.prod(plan.scores_shape), call.num_tokens, packing)))
    with_scores = int(out_scores is not None)
    targets = (kernel_array(out), kernel_array(scratch((1, 1), "float32") if out_scores is None else out_scores, "uint32"),
               with_scores)

    # the kernel of a selection without clusters, and what it takes besides the scores and the rows of a chunk
    kernel, of_rows = selection.SELECT_ROWS, located[1:]
    pieces: tuple[Any, ...] = ()
    if zeros is not None and plan.num_pieces:
        kernel = sampled_selection.SELECT_FOUND_ROWS if plan.finds_rows else sampled_selection.SELECT_ROWS_SAMPLED
        of_rows = of_lengths if plan.finds_rows else of_rows
        pieces = (plan.reach, plan.num_pieces, kernel_array(scratch(plan.lists_shape, "int32"), "uint32"),
                  zeros.rows(1, zeros.shape[0]))
    if plan.rank_width:
        ranks = kernel_array(scratch(plan.ranks_shape, "uint64"), "uint64")
    score = _scorer(call, plan, arithmetic, scratch, located, counters, plan.skip_up_to) if call.width else None
    for slot in range(plan.num_chunks):
        chunk = slot, plan.rows_per_chunk, call.width, call.num_tokens
        if score:
            steps.append(score(scores, bits, chunk, packing))
        if plan.cluster_blocks:
            steps.append(Launch(cluster_selection.SELECT_ROWS_OF_CLUSTERS, plan.row_blocks * plan.cluster_blocks,
                                (kernel_array(memory, "uint32"), located[1] if located else NOTHING, *of_lengths, call.width,
                                 *targets, plan.reach, plan.num_held),
                                plan.cluster_shared_bytes, plan.cluster_blocks))
        if plan.reach < plan.width:
            steps.append(Launch(kernel, plan.row_blocks * max(1, plan.num_pieces),
                                (bits, *of_rows, chunk, packing, *targets, *pieces), plan.select_shared_bytes))
        if plan.rank_width:
            steps.append(Launch(selection.RANK_ROWS, plan.row_blocks, (bits, located[1], chunk, packing, *targets, ranks)))
    return steps


def score_steps(call: Call, plan: Plan, arithmetic: str, scratch: Scratch, out: Any, everywhere: bool) -> list[Step]:
    """Scores of all rows into `out`, float32 [T, W], -inf outside the candidates.

    With `everywhere` all of `out` is -inf first: offsets and lengths that nobody has checked may leave rows to no request's tiles.
    """
    steps: list[Step] = []
    counters = None
    if plan.tma:
        counters = _counters(_cleared((1, 2), scratch, steps))
    located = _located_rows(call, scratch, steps)
    steps.append(Launch(rows.FILL_OUTSIDE, call.num_tokens,
                        (kernel_array(out, "uint32"), located[1], int(everywhere and plan.tma is not None))))
    score = _scorer(call, plan, arithmetic, scratch, located, counters, 0)
    all_rows = 0, call.num_tokens, call.width, call.num_tokens
    steps.append(score(flat_array(out), flat_array(out, "uint32"), all_rows, kernel_array(NOTHING)))
    return steps


def _cleared(shape: tuple[int, int], scratch: Scratch, steps: list[Step]) -> ArrayView:
    """Scratch, int32, that is zero from here on."""
    zeros = describe("zeros", scratch(shape, "int32"))
    steps.append(Clear(zeros.address, 4 * zeros.size))
    return zeros


def _counters(zeros: ArrayView) -> ArrayView:
    """The Hopper scorer's, uint32 [2]: the first row."""
    return zeros.rows(0, 1).sliced(axes=(1,), dtype="uint32")


def _located_rows(call: Call, scratch: Scratch, steps: list[Step]) -> tuple[Any, ...]:
    """Request and candidate count of every token, int32 [T]."""
    request, candidates = (kernel_array(scratch((call.num_tokens,), "int32")) for _ in range(2))
    steps.append(Launch(rows.LOCATE_ROWS, -(-call.num_tokens // rows.THREADS),
                        (kernel_array(call.offsets), kernel_array(call.lengths), int(call.causal), call.kpool, call.width, request,
                         candidates)))
    return request, candidates


def _scorer(call: Call, plan: Plan, arithmetic: str, scratch: Scratch, located: tuple[Any, ...], counters: Any,
            skip_up_to: int) -> Callable[[Any, Any, tuple[int, ...], Any], Launch]:
    """What all chunks share of a scorer's launch, made once.

    Returns
    -------
    function of (scores, bits, chunk, packing)
        The launch that puts the scores of a chunk's tokens into the first rows of `scores`; `bits` is the same memory.
    """
    if plan.tma is not None:
        return _tma_scorer(call, plan, plan.tma, scratch, counters, skip_up_to)
    data = (*map(kernel_array, (call.q, call.q_s, call.keys, call.key_scales, call.table)), *located)

    def score(scores: Any, bits: Any, chunk: tuple[int, ...], packing: Any) -> Launch:
        num_blocks = plan.rows_per_chunk * plan.num_splits
        if arithmetic == "wgmma":
            return Launch(wgmma_scoring.SCORE_ROWS, num_blocks, (*data, scores, chunk, packing, skip_up_to, plan.num_splits))
        code = scoring.FP8_CODES[call.fp8_dtype]
        return Launch(scoring.exact_scorer(plan.tile), num_blocks,
                      (*data, scores, bits, chunk, packing, skip_up_to, plan.num_splits, code.nan_mask, code.nan_bits,
                       np.float32(code.unit**2)))

    return score


def _tma_scorer(call: Call, plan: Plan, tile: tma_tile.TmaTile, scratch: Scratch, counters: Any,
                skip_up_to: int) -> Callable[[Any, Any, tuple[int, ...], Any], Launch]:
    num_blocks, page_size, _ = call.keys.shape
    rows_per_copy = min(page_size, tile_schedule.BLOCK_KV)
    maps = tma_tile.tensor_map(call.q, (tile.block_q, tile.heads)), tma_tile.tensor_map(call.keys, (1, rows_per_copy))
    extents = [word for start, end in (call.table.extent, call.q.extent) for word in (start, end - start)]
    inputs = (counters, call.q_s, call.key_scales.address, call.key_scales.strides[0], call.offsets, call.lengths, call.table,
              *extents)
    dimensions = (num_blocks, rows_per_copy.bit_length() - 1, max(1, page_size // tile_schedule.BLOCK_KV),
                  int(call.causal), tile_schedule.divisor(call.kpool))
    bounds = tile_schedule.enough_visible(skip_up_to, call.kpool), tile_schedule.visible_limit(call.width, call.kpool)
    kernel = tma_scoring.tma_scorer(tile)
    memory = describe("maps", scratch(plan.maps_shape, "uint64"))

    def score(scores: Any, bits: Any, chunk: tuple[int, ...], packing: Any) -> Launch:
        return Launch(kernel, plan.num_multiprocessors,
                      (*maps, memory.address, *inputs, scores.address, chunk, packing, *dimensions, *bounds), tile.shared_bytes)

    return score
