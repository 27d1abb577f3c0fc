"""The Hopper scorer: FP8 tensor cores fed by the copy engine, paged keys, ragged batches.

One block of threads per multiprocessor takes an equal stretch of all key tiles (`tile_schedule`) and walks it *item* by item: a run
of key tiles of one query block. Where some would end late all the same, the last quarter of the stretches is given out on demand
(`TmaTile.given_out`). A producer warpgroup and two math warpgroups meet in shared memory:

* the *schedule* warp finds the items, from device lengths, and brings each item's query tile and weights;
* the *key* warp brings key tiles and their scales, page by page;
* each math warpgroup multiplies its 64 keys of a tile with all columns (tokens x heads), and sums ReLU times weight over the heads.

The products of a tile come in two groups, one per half of the columns: while the tensor cores work on one, the threads sum the
other.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, uint32, uint64
from numba.cuda import types

from . import ptx
from .chunks import CHUNK, PACKING, chunk_rows
from .device import Kernel
from .ptx import at
from .tile_schedule import (
    BLOCK_KV,
    divide,
    last_visible,
    query_block_at,
    rows_to_score,
    slots_before,
    slots_of_request,
    stretch,
    tiles_for,
)
from .tma_tile import (
    ITEM_CANDIDATES,
    ITEM_IS_HALVABLE,
    ITEM_NUM_ROWS,
    ITEM_NUM_TILES,
    ITEM_REQUEST,
    ITEM_ROW,
    ITEM_TILE,
    KEY_WARP,
    KEYS_PER_WARPGROUP,
    KV_EMPTY_ARRIVALS,
    MATH_REGISTERS,
    MATH_WARPS,
    MIN_PART,
    NUM_WARPS,
    PRODUCER_REGISTERS,
    Q_EMPTY_ARRIVALS,
    Q_FULL_ARRIVALS,
    ROW_BYTES,
    SCHEDULE_WARP,
    SWIZZLE_ATOM_BYTES,
    THREADS,
    TmaTile,
)

# ------------------------------------------------------------------------------------------------ scores from accumulators

# These are written in PTX, since the accumulators of a product in flight are no values of the compiler's (`ptx.declare`). A
# thread's accumulators are the dots of its keys g and g + 8 with the columns 8 j + 2 q + {0, 1}, (g, q) = divmod(lane, 4);
# weight[2 j + e] is that of column 8 j + 2 q + e.

# ReLU is ``max(x, 0)`` on the ALU, or ``x + |x|``, which is twice that, on the FMA pipe with half the weight: the same product, so
# the same bits, unless halving a weight loses its last bit. Heads take turns, so that both pipes are busy.
SMALLEST_HALVABLE = 2.0**-125


def is_doubled(j: int) -> bool:
    """Whether the heads of columns 8 j ... 8 j + 7 take the doubled ReLU, where weights are halved."""
    return j % 4 < 2


def load_weights(columns: int, halved: bool) -> Callable[..., Any]:
    """A thread's weights from shared memory; the argument is the address of that of column ``2 q``. With `halved`, half of them
    where `is_doubled`."""
    text = ""
    for j in range(columns // 8):
        text += f"ld.shared.v2.f32 {{weight{2 * j}, weight{2 * j + 1}}}, [$0+{32 * j}]; "
        if halved and is_doubled(j):
            text += "".join(f"mul.rn.f32 weight{2 * j + e}, weight{2 * j + e}, 0f3F000000; " for e in range(2))
    return ptx.instruction(text, ptx.void, ptx.u32)


# predicates that hold for a lane, whatever it works on: odd and high, the bits of q
know_lane = ptx.instruction("{ .reg .u32 b; and.b32 b, $0, 1; setp.ne.u32 odd, b, 0; and.b32 b, $0, 2; setp.ne.u32 high, b, 0; }",
                            ptx.void, ptx.u32)


def _head_sums(token: int, heads: int, halved: bool, results: tuple[str, str]) -> str:
    """Weighted ReLU sums of a token over this thread's heads, for its keys g and g + 8.

    Per key two chains of fused multiply-adds over ``h // 8`` ascending, one for each parity of the head, then their sum.
    """
    text = "".join(f"mov.f32 s{key}{parity}, 0f00000000; " for key in range(2) for parity in range(2))
    for j in range(token * heads // 8, (token + 1) * heads // 8):
        for key in range(2):
            for parity in range(2):
                dot, s = f"acc{4 * j + 2 * key + parity}", f"s{key}{parity}"
                if halved and is_doubled(j):
                    text += f"abs.f32 r, {dot}; add.rn.f32 r, r, {dot}; "
                else:
                    text += f"max.NaN.f32 r, {dot}, 0f00000000; "
                text += f"fma.rn.f32 {s}, r, weight{2 * j + parity}, {s}; "
    return text + "".join(f"add.rn.f32 {results[key]}, s{key}0, s{key}1; " for key in range(2))


def _fold(result: str, a: str, b: str, take_b: str, lane_mask: int) -> str:
    """The sum over this lane and its neighbour of `a`, or of `b` where `take_b`: each gives away what the other one keeps."""
    return (f"selp.f32 keep, {b}, {a}, {take_b}; selp.f32 give, {a}, {b}, {take_b}; "
            f"shfl.sync.bfly.b32 give, give, {lane_mask}, 31, 0xFFFFFFFF; add.rn.f32 {result}, keep, give; ")


def group_scores(first: int, num_tokens: int, heads: int, halved: bool, is_single: bool) -> Callable[..., Any]:
    """The scores of a group's tokens, from the accumulators to global memory.

    The four lanes of a g sum over all heads and share out what they have: each writes one key of one token of every pair of tokens,
    key g + 8 high of token 2 i + odd (where a group has only one token, key g + 8 odd of it).

    Returns
    -------
    intrinsic(place, two_rows, limits, key, scale)
        uint64 address of this lane's first score and bytes from pair to pair; uint32 shared address of the candidate count of its
        first token (8 bytes from pair to pair); uint32 position of the key and its float32 scale. Keys at and past the count are
        left out.
    """
    text = "mov.u64 at, $0; "
    for pair in range((num_tokens + 1) // 2):
        token = first + 2 * pair
        text += _head_sums(token, heads, halved, ("u0", "l0"))
        if is_single:
            text += _fold("u0", "u0", "l0", "odd", 1) + "shfl.sync.bfly.b32 give, u0, 2, 31, 0xFFFFFFFF; add.rn.f32 u0, u0, give; "
        else:
            has_second = 2 * pair + 1 < num_tokens
            if has_second:
                text += _head_sums(token + 1, heads, halved, ("u1", "l1"))
            else:
                text += "mov.f32 u1, 0f00000000; mov.f32 l1, 0f00000000; "
            text += _fold("u0", "u0", "u1", "odd", 1) + _fold("l0", "l0", "l1", "odd", 1) + _fold("u0", "u0", "l0", "high", 2)
        text += f"mul.rn.f32 u0, u0, $4; ld.shared.u32 limit, [$2+{8 * pair}]; setp.lt.u32 p, $3, limit; "
        text += "@p st.global.f32 [at], u0; "
        text += "add.u64 at, at, $1; "
    registers = ".reg .f32 r, s00, s01, s10, s11, u0, u1, l0, l1, keep, give; .reg .u64 at; .reg .u32 limit; .reg .pred p; "
    return ptx.instruction(f"{{ {registers}{text}}}", ptx.void, ptx.u64, ptx.u64, ptx.u32, ptx.u32, ptx.f32)


@cuda.jit(device=True, inline="always")
def shuffle(value, lane):
    """The uint32 of another lane."""
    return uint32(cuda.shfl_sync(0xFFFFFFFF, int32(value), lane))


@cuda.jit(device=True, inline="always")
def running_sum(value, lane):
    """Sum of a uint32 over the lanes up to and with this one."""
    distance = uint32(1)
    while distance < uint32(32):
        other = uint32(cuda.shfl_up_sync(0xFFFFFFFF, int32(value), distance))
        if lane >= distance:
            value = uint32(value + other)
        distance = uint32(distance + distance)
    return value


@cuda.jit(device=True, inline="always")
def arrivals_of(barrier, num_q_stages, num_kv_stages):
    """Arrivals that complete a phase of a barrier, in the order of `TmaTile`: of all who are done, or of the one who brings."""
    arrivals = uint32(1)
    if barrier < uint32(num_q_stages):
        arrivals = uint32(Q_FULL_ARRIVALS)
    if barrier >= uint32(num_q_stages) and barrier < uint32(2 * num_q_stages):
        arrivals = uint32(Q_EMPTY_ARRIVALS)
    if barrier >= uint32(3 * num_q_stages + num_kv_stages):
        arrivals = uint32(KV_EMPTY_ARRIVALS)
    return arrivals


@cuda.jit(device=True, inline="always")
def copied_bytes(copies, copy_shift):
    """Bytes of so many copies of keys and of their scales."""
    return uint32(uint32(copies << copy_shift) * uint32(ROW_BYTES + 4))


@cuda.jit(device=True, inline="always")
def page_of(key_tile, num_copies, tiles_per_page):
    """(page, part): the first page of a key tile, and the tile's place in a page of several tiles."""
    page = uint32(key_tile * num_copies)
    part = uint32(0)
    if tiles_per_page > uint32(1):
        page = uint32(key_tile // tiles_per_page)
        part = uint32(key_tile - uint32(page * tiles_per_page))
    return page, part


@cuda.jit(device=True, inline="always")
def next_page(page, part, num_copies, tiles_per_page):
    """`page_of` the next key tile."""
    part = uint32(part + uint32(1))
    if part == tiles_per_page:
        part = uint32(0)
        page = uint32(page + num_copies)
    return page, part


@cuda.jit(device=True, inline="always")
def after(stage, phase, num_stages):
    """The stage of a ring behind this one, and its phase."""
    stage = uint32(stage + uint32(1))
    if stage == uint32(num_stages):
        stage = uint32(0)
        phase = uint32(phase ^ uint32(1))
    return stage, phase


@cuda.jit(device=True, inline="always")
def share_of(num_requests):
    """Requests whose slots a thread counts, at most."""
    return uint32(uint32(num_requests + uint32(THREADS - 1)) // uint32(THREADS))


@cuda.jit(device=True, inline="always")
def make_map(address, words, lane):
    """Puts a tensor map, for the lanes of this warp to use, into global memory."""
    if lane == uint32(0):
        ptx.store_tensor_map(address, words)
        ptx.release_tensor_map()
    cuda.syncwarp()
    ptx.acquire_tensor_map(address)


# ------------------------------------------------------------------------------------------------------------------- kernel

SIGNATURE = (
    types.UniTuple(types.uint64, ptx.TENSOR_MAP_WORDS),       # q_map
    types.UniTuple(types.uint64, ptx.TENSOR_MAP_WORDS),       # key_map
    types.uint64,                             # maps_at: scratch of 256 bytes per block
    types.Array(types.uint32, 1, "C"),        # counters [2], zero before and after: tiles given out, blocks done
    types.Array(types.float32, 2, "A"),       # q_s [T, H]
    types.uint64, types.uint64,               # key scales: address, bytes from block to block
    types.Array(types.int32, 1, "A"),         # offsets [B + 1]
    types.Array(types.int32, 1, "A"),         # lengths [B]
    types.Array(types.int32, 2, "A"),         # table [B, max_pages]
    types.uint64, types.uint64,               # its address and extent in bytes
    types.uint64, types.uint64,               # of the queries, likewise
    types.uint64, CHUNK, PACKING,             # scores: address, rows
    types.uint32,                             # num_blocks
    types.uint32, types.uint32,               # page: log2 of the rows that are copied at a time, tiles per page (at least 1)
    types.uint32, types.UniTuple(types.uint32, 3),            # causal, `divisor` of kpool
    types.uint32, types.uint32,               # enough, limit: `tile_schedule`
)


@functools.cache
def tma_scorer(tile: TmaTile) -> Kernel:
    """The scoring kernel for a tile.

    ``scores[row - start, key] = key_scale[key] * sum_h(relu(sum_d q[h, d] * k[key, d]) * q_s[h])`` of every row of a chunk that
    sees more than `enough` tokens, for key < the row's candidates; the scores of other rows and keys are left as they are.
    """
    BARRIERS, SCRATCH = tile.q_full, tile.scratch_offset
    BLOCK_Q, NUM_Q_STAGES, NUM_KV_STAGES, NUM_BARRIERS = tile.block_q, tile.num_q_stages, tile.num_kv_stages, tile.num_barriers
    declare = ptx.declare(acc=tile.columns // 2, weight=tile.columns // 4, predicates=("odd", "high"))
    give_registers, take_registers = ptx.set_registers("dec", PRODUCER_REGISTERS), ptx.set_registers("inc", MATH_REGISTERS)
    schedule, copy_keys, multiply = _schedule_warp(tile), _key_warp(tile), _math_warps(tile)

    def score(q_map, key_map, maps_at, counters, q_s, scales_at, scales_stride, offsets, lengths, table, table_at, table_bytes,
              q_at, q_bytes, scores_at, chunk, packing, num_blocks, copy_shift, tiles_per_page, causal, pool, enough, limit):
        declare()
        # Each thread counts the slots of its share of the requests. Lengths are on their way while maps and barriers are made.
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = shuffle(uint32(tid >> uint32(5)), 0)           # the compiler's word that a warp shares it
        rank = uint32(warp - uint32(SCHEDULE_WARP))           # of the warp: the schedule warp has the first requests
        if warp < uint32(SCHEDULE_WARP):
            rank = uint32(warp + uint32(NUM_WARPS - SCHEDULE_WARP))
        num_requests = uint32(lengths.shape[0])
        share = share_of(num_requests)
        request = min(uint32(uint32(uint32(32) * rank + lane) * share), num_requests)
        my_end = min(uint32(request + share), num_requests)
        offset = end = cached = int32(0)
        if request < my_end:
            offset, end, cached = offsets[request], offsets[request + uint32(1)], lengths[request]
        first_row, end_row, pitch = chunk_rows(chunk, packing)
        start, stop = int32(shuffle(uint32(first_row), 0)), int32(shuffle(uint32(end_row), 0))
        width = uint32(pitch)
        if start == stop:
            return
        shared = cuda.shared.array(0, types.uint8)
        base = uint32((ptx.shared_address(shared) + uint32(SWIZZLE_ATOM_BYTES - 1)) & uint32(2**32 - SWIZZLE_ATOM_BYTES))
        q_map_at = maps_at + uint64(16 * ptx.TENSOR_MAP_WORDS) * uint64(cuda.blockIdx.x)
        key_map_at = q_map_at + uint64(8 * ptx.TENSOR_MAP_WORDS)
        if warp == uint32(SCHEDULE_WARP):
            make_map(q_map_at, q_map, lane)
        if warp == uint32(KEY_WARP):
            make_map(key_map_at, key_map, lane)
        barrier = uint32(uint32(lane * uint32(NUM_WARPS)) + warp)       # few for each warp: its lanes make them one after the other
        if barrier < uint32(NUM_BARRIERS):
            arrivals = arrivals_of(barrier, NUM_Q_STAGES, NUM_KV_STAGES)
            ptx.mbarrier_init(at(base, BARRIERS, 8, barrier), arrivals)
            ptx.fence_mbarrier_init()
        line = uint64(uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(tid)) * uint64(128)
        if line < table_bytes:
            ptx.prefetch_l2(table_at + line)
        if line < q_bytes:
            ptx.prefetch_l2(q_at + line)
        if num_requests > uint32(32):                         # else the schedule warp has them all
            mine = uint32(0)
            while request < my_end:
                _, before, count = rows_to_score(offset, end, cached, start, stop, enough, causal, limit)
                mine = uint32(mine + slots_of_request(before, count, pool, causal, uint32(BLOCK_Q)))
                request = uint32(request + uint32(1))
                if request < my_end:
                    offset, end, cached = end, offsets[request + uint32(1)], lengths[request]
            mine = uint32(ptx.warp_sum(int32(mine)))
            if lane == uint32(0):
                ptx.store_shared_u32(at(base, SCRATCH, 4, rank), mine)
        cuda.syncthreads()

        if warp >= uint32(MATH_WARPS):
            give_registers()
            if warp == uint32(SCHEDULE_WARP):
                schedule(base, lane, offset, end, cached, q_map_at, counters, q_s, offsets, lengths, width, causal, pool, start,
                         stop, enough, limit)
            elif warp == uint32(KEY_WARP):
                copy_keys(base, lane, key_map_at, scales_at, scales_stride, table, num_blocks, copy_shift, tiles_per_page)
        else:
            take_registers()
            multiply(base, lane, warp, scores_at, width)

    return Kernel(score, SIGNATURE, THREADS, blocks_per_multiprocessor=1)


def _schedule_warp(tile: TmaTile) -> Callable[..., None]:
    """Finds this block's items and brings their query tiles, weights and candidate counts."""
    HEADS, BLOCK_Q, COLUMNS = tile.heads, tile.block_q, tile.columns
    Q_FULL, Q_EMPTY, ITEM_FULL, NUM_Q_STAGES, Q_TILE_BYTES = (tile.q_full, tile.q_empty, tile.item_full, tile.num_q_stages,
                                                              tile.q_tile_bytes)
    ITEMS, ITEM_BYTES, CANDIDATES, WEIGHTS = tile.items_offset, tile.item_bytes, tile.candidates_offset, tile.weights_offset
    SCRATCH = tile.scratch_offset
    MIN_FAIR, MAX_FAIR, PARTS = tile.given_out
    WEIGHTS_PER_LANE = -(-COLUMNS // 32)

    @cuda.jit(device=True, inline="always")
    def bring(base, lane, item, q_map_at, q_s, row, num_rows, seen_before, width, causal, pool):
        """The query tile of the tokens from `row`, which see `seen_before` tokens and their own, into an item."""
        place = at(base, ITEMS, ITEM_BYTES, item)
        q_full = at(base, Q_FULL, 8, item)
        if lane == uint32(0):
            ptx.mbarrier_expect_bytes(q_full, uint32(Q_TILE_BYTES))
            ptx.copy_box(at(base, 0, Q_TILE_BYTES, item), q_map_at, int32(0), int32(0), int32(row), q_full)
        if lane < uint32(BLOCK_Q):
            candidates = uint32(0)
            if lane < num_rows:
                seen = seen_before
                if causal != uint32(0):
                    seen = uint32(seen_before + uint32(lane + uint32(1)))
                candidates = min(divide(seen, pool), width)
            ptx.store_shared_u32(at(place, CANDIDATES, 4, lane), candidates)
        weights = cuda.local.array(WEIGHTS_PER_LANE, float32)           # all under way before the first is waited for
        for i in range(WEIGHTS_PER_LANE):
            column = uint32(lane + uint32(32 * i))
            token = uint32(column // uint32(HEADS))
            head = uint32(column & uint32(HEADS - 1))
            weights[i] = float32(-0.0)                        # of padding: adds nothing to a chain
            if column < uint32(COLUMNS) and token < num_rows and head < uint32(q_s.shape[1]):
                weights[i] = q_s[row + token, head]
        is_halvable = True
        for i in range(WEIGHTS_PER_LANE):
            column = uint32(lane + uint32(32 * i))
            if abs(weights[i]) < float32(SMALLEST_HALVABLE) and weights[i] != float32(0):
                is_halvable = False
            if column < uint32(COLUMNS):
                ptx.store_shared_f32(at(place, WEIGHTS, 4, column), weights[i])
        are_halvable = cuda.all_sync(0xFFFFFFFF, is_halvable)
        if lane == uint32(0):
            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_IS_HALVABLE)), uint32(1) if are_halvable else uint32(0))
        ptx.mbarrier_arrive(q_full)                           # every lane, for what it has stored

    @cuda.jit(device=True, inline="always")
    def schedule(base, lane, offset, end, cached, q_map_at, counters, q_s, offsets, lengths, width, causal, pool, start, stop,
                 enough, limit):
        num_requests = uint32(lengths.shape[0])
        # 32 requests at a time, one per lane, from `batch`; its first slot is the `batch_slot`-th of the line
        batch = uint32(0)
        batch_slot = uint32(0)
        first = before = count = mine = uint32(0)
        is_loaded = num_requests <= uint32(32)
        if is_loaded:
            first, before, count = rows_to_score(offset, end, cached, start, stop, enough, causal, limit)
            mine = slots_of_request(before, count, pool, causal, uint32(BLOCK_Q))
        elif lane < uint32(NUM_WARPS):
            mine = ptx.load_shared_u32(at(base, SCRATCH, 4, lane))
        through = running_sum(mine, lane)                     # slots up to and with this lane's request, or its warp's
        total = shuffle(through, 31)
        first_slot, end_slot, shared_slot, fair = stretch(total, uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x), num_requests,
                                                          MIN_FAIR, MAX_FAIR)
        if not is_loaded:
            ahead = uint32(cuda.ballot_sync(0xFFFFFFFF, first_slot < through))
            batch = num_requests
            if ahead != uint32(0):
                source = uint32(uint32(cuda.ffs(ahead)) - uint32(1))
                batch = uint32(uint32(32) * uint32(source * share_of(num_requests)))
                batch_slot = shuffle(uint32(through - mine), source)
        slot = first_slot
        remaining = uint32(end_slot - first_slot)
        item = uint32(0)
        phase = uint32(1)
        while batch < num_requests:
            if remaining == uint32(0):
                if shared_slot == total:
                    break
                part = max(uint32(fair // uint32(PARTS)), uint32(MIN_PART))
                given = uint32(0)
                if lane == uint32(0):
                    given = cuda.atomic.add(counters, 0, part)
                slot = uint32(shared_slot + shuffle(given, 0))
                if slot >= total:
                    break
                remaining = min(part, uint32(total - slot))
            if not is_loaded:
                is_loaded = True
                first = uint32(0)
                before = uint32(0)
                count = uint32(0)
                request = uint32(batch + lane)
                if request < num_requests:
                    first, before, count = rows_to_score(offsets[request], offsets[request + uint32(1)], lengths[request], start,
                                                         stop, enough, causal, limit)
                mine = slots_of_request(before, count, pool, causal, uint32(BLOCK_Q))
                through = running_sum(mine, lane)
            ahead = uint32(cuda.ballot_sync(0xFFFFFFFF, uint32(slot - batch_slot) < through))
            if ahead == uint32(0):
                batch = uint32(batch + uint32(32))
                batch_slot = uint32(batch_slot + shuffle(through, 31))
                is_loaded = False
            else:
                source = uint32(uint32(cuda.ffs(ahead)) - uint32(1))
                first_row = shuffle(first, source)
                seen_before = shuffle(before, source)
                num_rows = shuffle(count, source)
                slot_in_block = uint32(uint32(slot - batch_slot) - shuffle(uint32(through - mine), source))
                query_block = uint32(0)
                if num_rows > uint32(BLOCK_Q):
                    query_block = query_block_at(slot_in_block, seen_before, num_rows, pool, causal, uint32(BLOCK_Q))
                    slot_in_block = uint32(slot_in_block - slots_before(query_block, seen_before, pool, causal, uint32(BLOCK_Q)))
                token = uint32(query_block * uint32(BLOCK_Q))
                while remaining > uint32(0) and token < num_rows:
                    visible = last_visible(query_block, seen_before, num_rows, causal, uint32(BLOCK_Q))
                    tiles = tiles_for(visible, pool)
                    num_slots = min(uint32(uint32(tiles + uint32(1)) - slot_in_block), remaining)
                    num_tiles = min(num_slots, uint32(tiles - slot_in_block))
                    if num_tiles > uint32(0):
                        ptx.mbarrier_wait(at(base, Q_EMPTY, 8, item), phase)
                        row = uint32(first_row + token)
                        if lane == uint32(0):
                            place = at(base, ITEMS, ITEM_BYTES, item)
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_REQUEST)), uint32(batch + source))
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_ROW)), uint32(row - uint32(start)))
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_NUM_ROWS)), uint32(num_rows - token))
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_TILE)), slot_in_block)
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_NUM_TILES)), num_tiles)
                            ptx.store_shared_u32(at(place, 0, 4, uint32(ITEM_CANDIDATES)), min(divide(visible, pool), width))
                            ptx.mbarrier_arrive(at(base, ITEM_FULL, 8, item))
                        seen_by_block = seen_before
                        if causal != uint32(0):
                            seen_by_block = uint32(seen_before + token)
                        bring(base, lane, item, q_map_at, q_s, row, uint32(num_rows - token), seen_by_block, width, causal, pool)
                        item, phase = after(item, phase, NUM_Q_STAGES)
                    slot = uint32(slot + num_slots)
                    remaining = uint32(remaining - num_slots)
                    slot_in_block = uint32(0)
                    query_block = uint32(query_block + uint32(1))
                    token = uint32(token + uint32(BLOCK_Q))
        if shared_slot != total and lane == uint32(0):
            # the last block to come here leaves the counters as it found them
            last = uint32(cuda.gridDim.x - 1)
            if cuda.atomic.inc(counters, 1, last) == last:
                counters[0] = uint32(0)
        # an item without tiles ends the walk
        ptx.mbarrier_wait(at(base, Q_EMPTY, 8, item), phase)
        if lane == uint32(0):
            ptx.store_shared_u32(at(base, ITEMS + 4 * ITEM_NUM_TILES, ITEM_BYTES, item), uint32(0))
            ptx.mbarrier_arrive(at(base, ITEM_FULL, 8, item))
        ptx.mbarrier_arrive(at(base, Q_FULL, 8, item))

    return schedule


def _key_warp(tile: TmaTile) -> Callable[..., None]:
    """Copies the key tiles of every item and their scales: page by page, one lane per page."""
    NUM_Q_STAGES, NUM_KV_STAGES, KV, KV_TILE_BYTES = tile.num_q_stages, tile.num_kv_stages, tile.kv_offset, tile.kv_tile_bytes
    Q_EMPTY, ITEM_FULL, KV_FULL, KV_EMPTY = tile.q_empty, tile.item_full, tile.kv_full, tile.kv_empty
    ITEMS, ITEM_BYTES, SCALES = tile.items_offset, tile.item_bytes, tile.scales_offset

    @cuda.jit(device=True, inline="always")
    def copy_keys(base, lane, key_map_at, scales_at, scales_stride, table, num_blocks, copy_shift, tiles_per_page):
        rows_per_copy = uint32(uint32(1) << copy_shift)
        num_copies = uint32(uint32(BLOCK_KV) >> copy_shift)
        my_row = uint32(lane << copy_shift)
        max_pages = uint32(table.shape[1])
        item = uint32(0)
        phase = uint32(0)
        stage = uint32(0)
        kv_phase = uint32(1)
        while True:
            ptx.mbarrier_wait(at(base, ITEM_FULL, 8, item), phase)
            place = at(base, ITEMS, ITEM_BYTES, item)
            num_tiles = ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_NUM_TILES)))
            if num_tiles == uint32(0):
                break
            request = ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_REQUEST)))
            candidates = ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_CANDIDATES)))
            key_tile = ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_TILE)))
            key = uint32(key_tile * uint32(BLOCK_KV))
            page, part = page_of(key_tile, num_copies, tiles_per_page)
            # page ids, 32 at a time and 32 ahead: lane l holds that of page window + l
            window = uint32(page & uint32(0xFFFFFFE0))
            ids = uint32(0)
            next_ids = uint32(0)
            if uint32(window + lane) < max_pages:
                ids = uint32(table[request, window + lane])
            if uint32(window + uint32(32) + lane) < max_pages:
                next_ids = uint32(table[request, window + uint32(32) + lane])
            while num_tiles > uint32(0):
                num_tiles = uint32(num_tiles - uint32(1))
                if uint32(page - window) >= uint32(32):
                    window = uint32(window + uint32(32))
                    ids = next_ids
                    if uint32(window + uint32(32) + lane) < max_pages:
                        next_ids = uint32(table[request, window + uint32(32) + lane])
                num_rows = uint32(candidates - min(key, candidates))
                copies = min(uint32(uint32(num_rows + uint32(rows_per_copy - uint32(1))) >> copy_shift), num_copies)
                block = min(shuffle(ids, uint32(page + lane) & uint32(31)), uint32(num_blocks - uint32(1)))
                kv_full = at(base, KV_FULL, 8, stage)
                ptx.mbarrier_wait(at(base, KV_EMPTY, 8, stage), kv_phase)
                if lane == uint32(0):
                    ptx.mbarrier_arrive_expect_bytes(kv_full, copied_bytes(copies, copy_shift))
                cuda.syncwarp()
                if lane < copies:
                    slot = uint32(part * uint32(BLOCK_KV))
                    ptx.copy_box(uint32(at(base, KV, KV_TILE_BYTES, stage) + my_row * uint32(ROW_BYTES)), key_map_at, int32(0),
                                 int32(slot), int32(block), kv_full)
                    ptx.copy_bytes(uint32(at(base, SCALES, 4 * BLOCK_KV, stage) + my_row * uint32(4)),
                                   scales_at + uint64(block) * scales_stride + uint64(slot) * uint64(4),
                                   uint32(rows_per_copy * uint32(4)), kv_full)
                key = uint32(key + uint32(BLOCK_KV))
                page, part = next_page(page, part, num_copies, tiles_per_page)
                stage, kv_phase = after(stage, kv_phase, NUM_KV_STAGES)
            if lane == uint32(0):
                ptx.mbarrier_arrive(at(base, Q_EMPTY, 8, item))
            item, phase = after(item, phase, NUM_Q_STAGES)

    return copy_keys


def _math_warps(tile: TmaTile) -> Callable[..., None]:
    """Scores of every item: products on the tensor cores, weighted ReLU sums in the lanes.

    Thread (g, q) = divmod(lane, 4) of a warp holds the dots of its warp's keys g and g + 8 with the columns 8 j + 2 q + {0, 1}.
    After the sums over heads, the four lanes of a g share out what they have summed: each writes one key of one token of every pair
    of tokens (of the token, where a group has only one).
    """
    GROUP_TOKENS, COLUMNS, IS_SPLIT, IS_SINGLE = tile.group_tokens, tile.columns, tile.num_groups == 2, tile.group_tokens == 1
    ITEMS, ITEM_BYTES, CANDIDATES, WEIGHTS = tile.items_offset, tile.item_bytes, tile.candidates_offset, tile.weights_offset
    Q_FULL, Q_EMPTY, NUM_Q_STAGES, Q_TILE_BYTES = tile.q_full, tile.q_empty, tile.num_q_stages, tile.q_tile_bytes
    KV, SCALES = tile.kv_offset, tile.scales_offset
    THREE_QUARTERS = GROUP_TOKENS + GROUP_TOKENS // 2         # tokens; where a group has one, there is no such case

    halved_weights_in, weights_in = (load_weights(COLUMNS, halved) for halved in (True, False))
    walk_first = _walk(tile, 0, halved=False)
    if IS_SPLIT:
        walk_all_halved, walk_all = (_walk(tile, GROUP_TOKENS, halved) for halved in (True, False))
        walk_three_quarters = _walk(tile, max(1, GROUP_TOKENS // 2), halved=False)

    @cuda.jit(device=True, inline="always")
    def multiply(base, lane, warp, scores_at, width):
        quarter = uint32(lane & uint32(3))
        know_lane(quarter)
        is_leader = uint32(1) if lane == uint32(0) else uint32(0)
        odd, high = uint32(quarter & uint32(1)), uint32(quarter >> uint32(1))
        my_row = at(uint32(lane >> uint32(2)), 0, 16, warp)                   # of the tile: the key whose score this lane writes
        my_token = uint32(0)
        if IS_SINGLE:
            my_row = at(my_row, 0, 8, odd)
        else:
            my_row = at(my_row, 0, 8, high)
            my_token = odd
        my_tile = uint32(at(base, KV, KEYS_PER_WARPGROUP * ROW_BYTES, uint32(warp >> uint32(2))) >> uint32(4))
        my_scale = at(base, SCALES, 4, my_row)
        row_bytes = uint64(uint64(width) * uint64(4))
        item = uint32(0)
        phase = uint32(0)
        stage = uint32(0)
        kv_phase = uint32(0)
        while True:
            ptx.mbarrier_wait(at(base, Q_FULL, 8, item), phase)
            place = at(base, ITEMS, ITEM_BYTES, item)
            num_tiles = ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_NUM_TILES)))
            if num_tiles == uint32(0):
                break
            num_rows = shuffle(ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_NUM_ROWS))), 0)
            is_halvable = cuda.all_sync(0xFFFFFFFF, ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_IS_HALVABLE))) != uint32(0))
            limits = at(place, CANDIDATES, 4, my_token)
            my_weights = at(place, WEIGHTS, 8, quarter)
            q_tile = uint32(at(base, 0, Q_TILE_BYTES, item) >> uint32(4))
            row = uint32(ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_ROW))) + my_token)
            key = uint32(ptx.load_shared_u32(at(place, 0, 4, uint32(ITEM_TILE))) * uint32(BLOCK_KV) + my_row)
            out = uint64(scores_at + uint64(row) * row_bytes)
            if not IS_SPLIT or num_rows <= uint32(GROUP_TOKENS):
                weights_in(my_weights)
                stage, kv_phase = walk_first(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, limits,
                                             out, row_bytes, key, is_leader)
            if IS_SPLIT:
                if num_rows > uint32(GROUP_TOKENS) and num_rows <= uint32(THREE_QUARTERS):
                    weights_in(my_weights)
                    stage, kv_phase = walk_three_quarters(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, limits,
                                                          out, row_bytes, key, is_leader)
                elif num_rows > uint32(THREE_QUARTERS) and is_halvable:
                    halved_weights_in(my_weights)
                    stage, kv_phase = walk_all_halved(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, limits,
                                                      out, row_bytes, key, is_leader)
                elif num_rows > uint32(THREE_QUARTERS):
                    weights_in(my_weights)
                    stage, kv_phase = walk_all(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, limits,
                                               out, row_bytes, key, is_leader)
            cuda.syncwarp()
            ptx.mbarrier_arrive_if(at(base, Q_EMPTY, 8, item), is_leader)
            item, phase = after(item, phase, NUM_Q_STAGES)

    return multiply


def _walk(tile: TmaTile, second_tokens: int, halved: bool) -> Callable[..., tuple[Any, Any]]:
    """A math warpgroup's way through the tiles of an item whose second group has so many tokens.

    ``dot[key, column] = k[key, d] q[column, d]``, then ``score[token, key] = scale[key] sum_h relu(dot[key, (token, h)])
    weight[token, h]``. Returns the stage of the key tiles that it has come to, and its phase.
    """
    HEADS, NUM_KV_STAGES, KV_TILE_BYTES, KV_FULL, KV_EMPTY = (tile.heads, tile.num_kv_stages, tile.kv_tile_bytes, tile.kv_full,
                                                              tile.kv_empty)
    FIRST_TOKENS, FIRST_COLUMNS, IS_SPLIT = tile.group_tokens, HEADS * tile.group_tokens, second_tokens > 0
    SECOND_Q = FIRST_COLUMNS * ROW_BYTES // 16
    multiply_first = ptx.wgmma_e4m3(0, FIRST_COLUMNS, tile.depth_steps)
    write_first = group_scores(0, FIRST_TOKENS, HEADS, halved, FIRST_TOKENS == 1)
    if IS_SPLIT:
        multiply_second = ptx.wgmma_e4m3(FIRST_COLUMNS // 2, FIRST_COLUMNS, tile.depth_steps)
        write_second = group_scores(FIRST_TOKENS, second_tokens, HEADS, halved, FIRST_TOKENS == 1)

    @cuda.jit(device=True, inline="always")
    def walk(base, stage, phase, num_tiles, my_tile, q_tile, my_scale, limits, out, row_bytes, key, is_leader):
        two_rows = uint64(row_bytes + row_bytes)
        out_second = uint64(out + uint64(FIRST_TOKENS) * row_bytes)
        limits_second = uint32(limits + uint32(4 * FIRST_TOKENS))
        while num_tiles > uint32(0):
            num_tiles = uint32(num_tiles - uint32(1))
            ptx.mbarrier_wait(at(base, KV_FULL, 8, stage), phase)
            k_tile = at(my_tile, 0, KV_TILE_BYTES // 16, stage)
            multiply_first(k_tile, q_tile)
            scale = ptx.load_shared_f32(at(my_scale, 0, 4 * BLOCK_KV, stage))
            here = uint64(uint64(4) * uint64(key))
            if IS_SPLIT:
                multiply_second(k_tile, uint32(q_tile + uint32(SECOND_Q)))
                ptx.wgmma_wait_1()
                write_first(out + here, two_rows, limits, key, scale)
            ptx.wgmma_wait_0()
            cuda.syncwarp()
            ptx.mbarrier_arrive_if(at(base, KV_EMPTY, 8, stage), is_leader)
            if IS_SPLIT:
                write_second(out_second + here, two_rows, limits_second, key, scale)
            else:
                write_first(out + here, two_rows, limits, key, scale)
            key = uint32(key + uint32(BLOCK_KV))
            stage, phase = after(stage, phase, NUM_KV_STAGES)
        return stage, phase

    return walk
