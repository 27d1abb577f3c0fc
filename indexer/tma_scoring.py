"""The Hopper scorer: FP8 tensor cores fed by the copy engine, paged keys, ragged batches.

One block of threads per multiprocessor takes an equal stretch of all key tiles (`tile_schedule`) and walks it *item* by item: a run
of key tiles of one query block. Where memory is the limit, the multiprocessors' shares of its bandwidth differ; so the last quarter
of the tiles is given out on demand. A producer warpgroup and two math warpgroups meet in shared memory:

* the *schedule* warp finds the items, from device lengths, and brings each item's query tile and weights;
* the *key* warp brings key tiles and their scales, page by page;
* each math warpgroup multiplies its 64 keys of a tile with all columns (tokens x heads), and sums ReLU times weight over the heads.

The products of a tile come in two groups, one per half of the columns: while the tensor cores work on one, the threads sum the other.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int32, uint32, uint64
from numba.cuda import types

from . import ptx
from .device import Kernel
from .problem import ArrayView, Call
from .tile_schedule import (
    BLOCK_KV,
    MAX_KPOOL,
    last_visible,
    query_block_at,
    rows_to_score,
    tiles_before,
    tiles_for,
    tiles_of_request,
)

ROW_BYTES = 128                               # of a tile row in shared memory: a key or a head, zeros behind its depth
SWIZZLE_ATOM_BYTES = 1024
KEYS_PER_WARPGROUP = 64                       # rows of a product
MATH_WARPS = 4 * (BLOCK_KV // KEYS_PER_WARPGROUP)
SCHEDULE_WARP, KEY_WARP = MATH_WARPS, MATH_WARPS + 1
NUM_WARPS = MATH_WARPS + 4                    # registers move between whole warpgroups
THREADS = 32 * NUM_WARPS
PRODUCER_REGISTERS, MATH_REGISTERS = 40, 232
MAX_HEADS, MAX_COLUMNS, MAX_BLOCK_Q = 128, 256, 16
MAX_KV_STAGES = 12
MIN_FAIR, PARTS = 16, 64                      # a block's fair share of tiles, at least, to give some out on demand; in 1 / PARTS of it
MAX_SHARED_REQUESTS = 1024                    # a block walks past them to the tiles it is given

# Words of an item in shared memory; its tokens' candidate counts and its weights are behind them.
ITEM_REQUEST, ITEM_ROW, ITEM_NUM_ROWS, ITEM_TILE, ITEM_NUM_TILES, ITEM_CANDIDATES, ITEM_IS_HALVABLE = range(7)
ITEM_WORDS = 8


@dataclass(frozen=True)
class TmaTile:
    """What one block of threads works on, and where it lies in shared memory.

    Attributes
    ----------
    heads : int
        Heads per token, with padding: 8, 16, 32, 64 or 128.
    block_q : int
        Query tokens of a query block: a power of two.
    depth_steps : int
        Products of depth 32 per dot product.
    is_pooled : bool
        Whether a cache row is more than one token; without, the kernel has no divisions.
    num_q_stages, num_kv_stages : int
        Items and key tiles in flight.
    """

    heads: int
    block_q: int
    depth_steps: int
    is_pooled: bool
    num_q_stages: int
    num_kv_stages: int

    @property
    def columns(self) -> int:
        return self.heads * self.block_q

    @property
    def num_groups(self) -> int:
        """Groups of products per tile: two of whole tokens, or one token."""
        return min(2, self.block_q)

    @property
    def group_tokens(self) -> int:
        return self.block_q // self.num_groups

    @property
    def is_memory_bound(self) -> bool:
        """Whether the tensor cores wait for keys, not the other way round."""
        return self.columns <= MAX_COLUMNS // 2

    @property
    def q_tile_bytes(self) -> int:
        return self.columns * ROW_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return BLOCK_KV * ROW_BYTES

    # byte offsets in shared memory, from a base that is aligned to a swizzle atom
    @property
    def kv_offset(self) -> int:
        return self.num_q_stages * self.q_tile_bytes

    @property
    def scales_offset(self) -> int:
        return self.kv_offset + self.num_kv_stages * self.kv_tile_bytes

    @property
    def items_offset(self) -> int:
        return self.scales_offset + self.num_kv_stages * 4 * BLOCK_KV

    @property
    def item_bytes(self) -> int:
        """Of an item: its fields, the candidates of its tokens, its weights; a multiple of 8."""
        return 4 * (ITEM_WORDS + self.block_q + self.block_q % 2 + self.columns)

    @property
    def barriers_offset(self) -> int:
        return self.items_offset + self.num_q_stages * self.item_bytes

    @property
    def num_barriers(self) -> int:
        """Query tile full, item empty and item full per item; full and empty per key tile."""
        return 3 * self.num_q_stages + 2 * self.num_kv_stages

    @property
    def scratch_offset(self) -> int:
        return self.barriers_offset + 8 * self.num_barriers

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory: one word of scratch per warp, and the place where the walk starts."""
        return SWIZZLE_ATOM_BYTES + self.scratch_offset + 4 * (NUM_WARPS + 2)


def tma_tile(num_heads: int, head_dim: int, tokens_per_request: int, kpool: int, shared_bytes_limit: int) -> TmaTile:
    """The tile for these dimensions: query blocks as long as a request's new tokens, as far as the limits allow."""
    heads = next(h for h in (8, 16, 32, 64, 128) if num_heads <= h)
    block_q = 1
    while block_q < tokens_per_request and heads * block_q < MAX_COLUMNS and block_q < MAX_BLOCK_Q:
        block_q *= 2
    num_q_stages = 4 if heads * block_q <= MAX_COLUMNS // 2 else 2
    tiles = (TmaTile(heads, block_q, -(-head_dim // 32), kpool != 1, num_q_stages, stages) for stages in range(MAX_KV_STAGES, 1, -1))
    return next(tile for tile in tiles if tile.shared_bytes <= shared_bytes_limit)


# ------------------------------------------------------------------------------------------------------- weighted head sums

# ReLU is ``max(x, 0)`` on the ALU, or ``x + |x|``, which is twice that, on the FMA pipe with half the weight: the same product, so
# the same bits, unless halving a weight loses its last bit. Heads take turns, so that both pipes are busy.
SMALLEST_HALVABLE = 2.0**-125


def is_doubled(j: int) -> bool:
    """Whether the heads of columns 8 j ... 8 j + 7 take the doubled ReLU, where weights are halved."""
    return j % 4 < 2


def load_weights(columns: int, halved: bool) -> Callable[..., Any]:
    """A thread's weights from shared memory: ``weight[2 j + e]`` is that of column ``8 j + 2 q + e``, halved where `is_doubled`; the
    argument is the address of column ``2 q``."""
    text = ""
    for j in range(columns // 8):
        text += f"ld.shared.v2.f32 {{weight{2 * j}, weight{2 * j + 1}}}, [$0+{32 * j}]; "
        if halved and is_doubled(j):
            text += "".join(f"mul.rn.f32 weight{2 * j + e}, weight{2 * j + e}, 0f3F000000; " for e in range(2))
    return ptx.instruction(text, ptx.void, ptx.u32)


def head_sums(first_column: int, heads: int, halved: bool) -> str:
    """PTX of the weighted ReLU sums of one token over this thread's heads, $0 for its key g and $1 for its key g + 8.

    Per key two chains of fused multiply-adds over ``h // 8`` ascending, one for each parity of the head, then their sum. The token's
    heads are the columns from `first_column`; `halved` as in `load_weights`.
    """
    text = "".join(f"mov.f32 s{key}{parity}, 0f00000000; " for key in range(2) for parity in range(2))
    for j in range(first_column // 8, (first_column + heads) // 8):
        for key in range(2):
            for parity in range(2):
                dot, s = f"acc{4 * j + 2 * key + parity}", f"s{key}{parity}"
                if halved and is_doubled(j):
                    text += f"abs.f32 r, {dot}; add.rn.f32 r, r, {dot}; "
                else:
                    text += f"max.NaN.f32 r, {dot}, 0f00000000; "
                text += f"fma.rn.f32 {s}, r, weight{2 * j + parity}, {s}; "
    return f"{{ .reg .f32 r, s00, s01, s10, s11; {text}add.rn.f32 $0, s00, s01; add.rn.f32 $1, s10, s11; }}"


def token_sums(first: int, num_tokens: int, heads: int, halved: bool) -> Callable[..., Any]:
    """`head_sums` of tokens from `first` into a local float32 array: ``sums[2 token + {0, 1}]``."""
    return ptx.into_local_array([head_sums(heads * token, heads, halved) for token in range(first, first + num_tokens)], 2)


@cuda.jit(device=True, inline="always")
def fold(a, b, take_b, lane_mask):
    """The sum over this lane and its neighbour of `a`, or of `b` where `take_b`: each gives away what the other one keeps."""
    keep = b if take_b else a                 # statements of their own: a conditional within a collective's argument becomes a branch
    give = a if take_b else b
    return keep + cuda.shfl_xor_sync(0xFFFFFFFF, give, lane_mask)


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
def after(stage, phase, num_stages):
    """The stage of a ring behind this one, and its phase."""
    stage = uint32(stage + uint32(1))
    if stage == uint32(num_stages):
        stage = uint32(0)
        phase = uint32(phase ^ uint32(1))
    return stage, phase


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
    types.uint64, types.uint32,               # scores: address, `width` float32 per row
    types.uint32,                             # num_blocks
    types.uint32, types.uint32,               # page: log2 of the rows that are copied at a time, tiles per page (at least 1)
    types.uint32, types.uint32,               # causal, kpool
    types.int32, types.int32,                 # start, stop
    types.uint32, types.uint32,               # enough, limit: `tile_schedule`
)


def _walker(tile: TmaTile, second_tokens: int, halved: bool) -> Callable[..., Any]:
    """A math warpgroup's way through the tiles of an item, where the second group has so many tokens.

    Tile by tile: ``dot[key, column] = k[key, d] q[column, d]`` on the tensor cores, ``score[token, key] = scale[key] sum_h
    relu(dot[key, (token, h)]) weight[token, h]`` in the lanes. A lane writes one key of one token of every pair of tokens (of the
    token, where a group has only one).
    """
    HEADS, NUM_KV_STAGES, KV_TILE_BYTES = tile.heads, tile.num_kv_stages, tile.kv_tile_bytes
    FIRST_TOKENS = tile.group_tokens
    IS_SINGLE, IS_SPLIT = tile.block_q == 1 or FIRST_TOKENS == 1, second_tokens > 0
    FIRST_PAIRS, SECOND_PAIRS = max(1, FIRST_TOKENS // 2), (second_tokens + 1) // 2
    HAS_ODD_TOKEN = second_tokens % 2 == 1 and not IS_SINGLE
    LAST = 2 * second_tokens
    FIRST_COLUMNS = HEADS * FIRST_TOKENS
    SECOND_Q = FIRST_COLUMNS * ROW_BYTES // 16
    KV_FULL = tile.barriers_offset + 24 * tile.num_q_stages
    KV_EMPTY = KV_FULL + 8 * NUM_KV_STAGES

    multiply_first = ptx.wgmma_e4m3(0, FIRST_COLUMNS, tile.depth_steps)
    sum_first = token_sums(0, FIRST_TOKENS, HEADS, halved)
    if IS_SPLIT:
        multiply_second = ptx.wgmma_e4m3(FIRST_COLUMNS // 2, HEADS * second_tokens, tile.depth_steps)
        sum_second = token_sums(FIRST_TOKENS, second_tokens, HEADS, halved)

    @cuda.jit(device=True, inline="always")
    def write(sums, pairs, limits, first_limit, out, two_rows, key, scale, odd, high):
        at = uint64(out + uint64(4) * uint64(key))
        if IS_SINGLE:
            half = fold(sums[0], sums[1], odd, 1)
            score = (half + cuda.shfl_xor_sync(0xFFFFFFFF, half, 2)) * scale
            ptx.store_below(at, score, key, limits[first_limit])
        else:
            for pair in range(pairs):
                upper = fold(sums[4 * pair], sums[4 * pair + 2], odd, 1)
                lower = fold(sums[4 * pair + 1], sums[4 * pair + 3], odd, 1)
                score = fold(upper, lower, high, 2) * scale
                ptx.store_below(at, score, key, limits[first_limit + pair])
                at = uint64(at + two_rows)

    @cuda.jit(device=True, inline="always")
    def walk(base, stage, phase, num_tiles, my_tile, q_tile, my_scale, sums, limits, out, two_rows, key, is_leader, odd, high):
        out_second = uint64(out + uint64(FIRST_PAIRS) * two_rows)
        if IS_SINGLE:
            out_second = uint64(out + (two_rows >> uint64(1)))
        while num_tiles > uint32(0):
            num_tiles = uint32(num_tiles - uint32(1))
            ptx.mbarrier_wait(uint32(base + uint32(KV_FULL) + uint32(8) * stage), phase)
            k_tile = uint32(my_tile + stage * uint32(KV_TILE_BYTES // 16))
            multiply_first(k_tile, q_tile)
            scale = ptx.load_shared_f32(uint32(my_scale + stage * uint32(4 * BLOCK_KV)))
            if IS_SPLIT:
                multiply_second(k_tile, uint32(q_tile + uint32(SECOND_Q)))
                ptx.wgmma_wait_1()
                sum_first(sums)
                write(sums, FIRST_PAIRS, limits, 0, out, two_rows, key, scale, odd, high)
            ptx.wgmma_wait_0()
            ptx.mbarrier_arrive_if(uint32(base + uint32(KV_EMPTY) + uint32(8) * stage), is_leader)
            if IS_SPLIT:
                sum_second(sums)
                if HAS_ODD_TOKEN:
                    sums[LAST] = float32(0)
                    sums[LAST + 1] = float32(0)
                write(sums, SECOND_PAIRS, limits, FIRST_PAIRS, out_second, two_rows, key, scale, odd, high)
            else:
                sum_first(sums)
                write(sums, FIRST_PAIRS, limits, 0, out, two_rows, key, scale, odd, high)
            key = uint32(key + uint32(BLOCK_KV))
            stage, phase = after(stage, phase, NUM_KV_STAGES)
        return stage, phase

    return walk


@functools.cache
def tma_scorer(tile: TmaTile) -> Kernel:
    """The scoring kernel for a tile.

    ``scores[row - start, key] = key_scale[key] * sum_h(relu(sum_d q[h, d] * k[key, d]) * q_s[h])`` of every row in [start, stop)
    that sees more than `enough` tokens, for key < the row's candidates; the scores of other rows and keys are left as they are.
    """
    HEADS, BLOCK_Q, COLUMNS = tile.heads, tile.block_q, tile.columns
    NUM_Q_STAGES, NUM_KV_STAGES, NUM_BARRIERS = tile.num_q_stages, tile.num_kv_stages, tile.num_barriers
    Q_TILE_BYTES, KV_TILE_BYTES, ITEM_BYTES = tile.q_tile_bytes, tile.kv_tile_bytes, tile.item_bytes
    KV, SCALES, ITEMS, SCRATCH, Q_FULL = (tile.kv_offset, tile.scales_offset, tile.items_offset, tile.scratch_offset,
                                          tile.barriers_offset)
    Q_EMPTY, ITEM_FULL, KV_FULL = (Q_FULL + 8 * NUM_Q_STAGES * i for i in range(1, 4))
    KV_EMPTY = KV_FULL + 8 * NUM_KV_STAGES
    CANDIDATES, WEIGHTS = 4 * ITEM_WORDS, tile.item_bytes - 4 * COLUMNS
    START_REQUEST, START_TILE = SCRATCH + 4 * NUM_WARPS, SCRATCH + 4 * NUM_WARPS + 4
    GROUP_TOKENS, IS_SINGLE, IS_SPLIT = tile.group_tokens, tile.group_tokens == 1, tile.num_groups == 2
    NUM_LIMITS, LIMIT_BYTES, NUM_SUMS = max(2, BLOCK_Q // 2), 4 if IS_SINGLE else 8, 2 * GROUP_TOKENS
    THREE_QUARTERS = GROUP_TOKENS + GROUP_TOKENS // 2         # tokens; where a group has one, there is no such case
    IS_POOLED, IS_SHARED = tile.is_pooled, tile.is_memory_bound
    NO_REQUEST = 0xFFFFFFFF

    declare_registers = ptx.declare_registers(COLUMNS // 2, COLUMNS // 4)
    halved_weights_in, weights_in = (load_weights(COLUMNS, halved) for halved in (True, False))
    give_registers, take_registers = ptx.set_registers("dec", PRODUCER_REGISTERS), ptx.set_registers("inc", MATH_REGISTERS)
    walk_first = _walker(tile, 0, halved=False)
    if IS_SPLIT:
        walk_all_halved, walk_all = (_walker(tile, GROUP_TOKENS, halved) for halved in (True, False))
        walk_three_quarters = _walker(tile, max(1, GROUP_TOKENS // 2), halved=False)

    def score(q_map, key_map, maps_at, counters, q_s, scales_at, scales_stride, offsets, lengths, table, table_at, table_bytes,
              scores_at, width, num_blocks, copy_shift, tiles_per_page, causal, kpool, start, stop, enough, limit):
        declare_registers()
        shared = cuda.shared.array(0, types.uint8)
        base = uint32(uint32(ptx.shared_address(shared) + uint32(SWIZZLE_ATOM_BYTES - 1)) & uint32(0x100000000 - SWIZZLE_ATOM_BYTES))
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(tid >> uint32(5)), 0))          # the compiler's word that a warp shares it
        is_leader = uint32(1) if lane == uint32(0) else uint32(0)
        num_requests = uint32(lengths.shape[0])
        pool = uint32(1)
        if IS_POOLED:
            pool = kpool
        q_map_at = maps_at + uint64(16 * ptx.TENSOR_MAP_WORDS) * uint64(cuda.blockIdx.x)
        key_map_at = q_map_at + uint64(8 * ptx.TENSOR_MAP_WORDS)

        # This block's stretch of all tiles: every thread counts the tiles of its share of the requests.
        share = uint32(uint32(num_requests + uint32(THREADS - 1)) // uint32(THREADS))
        my_first = min(uint32(tid * share), num_requests)
        my_end = min(uint32(my_first + share), num_requests)
        mine = uint32(0)
        request = my_first
        while request < my_end:
            _, before, count = rows_to_score(offsets[request], offsets[request + uint32(1)], lengths[request], start, stop, enough,
                                             causal, limit)
            mine = uint32(mine + tiles_of_request(before, count, pool, causal, uint32(BLOCK_Q)))
            request = uint32(request + uint32(1))
        line = uint64(uint64(cuda.blockIdx.x) * uint64(THREADS) + uint64(tid)) * uint64(128)
        if line < table_bytes:
            ptx.prefetch_l2(table_at + line)                  # it will be wanted soon
        if tid == uint32(32 * SCHEDULE_WARP):
            ptx.store_tensor_map(q_map_at, q_map)
        if tid == uint32(32 * KEY_WARP):
            ptx.store_tensor_map(key_map_at, key_map)
        if tid < uint32(NUM_BARRIERS):
            arrivals = uint32(1)
            if uint32(NUM_Q_STAGES) <= tid and tid < uint32(2 * NUM_Q_STAGES):
                arrivals = uint32(MATH_WARPS + 1)             # item empty: the key warp, too
            if tid >= uint32(3 * NUM_Q_STAGES + NUM_KV_STAGES):
                arrivals = uint32(MATH_WARPS)                 # key tile empty
            ptx.mbarrier_init(uint32(base + uint32(Q_FULL) + uint32(8) * tid), arrivals)
            ptx.fence_mbarrier_init()
        if tid == uint32(0):
            ptx.store_shared_u32(uint32(base + uint32(START_REQUEST)), uint32(NO_REQUEST))
        running = running_sum(mine, lane)
        if lane == uint32(31):
            ptx.store_shared_u32(uint32(base + uint32(SCRATCH) + uint32(4) * warp), running)
        cuda.syncthreads()
        of_warp = uint32(0)
        if lane < uint32(NUM_WARPS):
            of_warp = ptx.load_shared_u32(uint32(base + uint32(SCRATCH) + uint32(4) * lane))
        of_warps = running_sum(of_warp, lane)
        total = shuffle(of_warps, 31)
        my_tile = uint32(uint32(shuffle(uint32(of_warps - of_warp), warp) + running) - mine)

        num_sharers = uint32(cuda.gridDim.x)
        sharer = uint32(cuda.blockIdx.x)
        fair = uint32(total // num_sharers)
        rest = uint32(total - uint32(fair * num_sharers))
        first_tile = uint32(uint32(fair * sharer) + min(sharer, rest))
        end_tile = uint32(first_tile + fair)
        if sharer < rest:
            end_tile = uint32(end_tile + uint32(1))
        shared_tile = total                                   # from here on, tiles are given out on demand
        if IS_SHARED:
            if fair >= uint32(MIN_FAIR) and num_requests <= uint32(MAX_SHARED_REQUESTS):
                own = uint32(fair - uint32(fair >> uint32(2)))
                first_tile = uint32(own * sharer)
                end_tile = uint32(first_tile + own)
                shared_tile = uint32(own * num_sharers)
        if uint32(first_tile - my_tile) < mine and first_tile < end_tile:
            request = my_first
            tile_in_request = uint32(first_tile - my_tile)
            while share > uint32(1):
                _, before, count = rows_to_score(offsets[request], offsets[request + uint32(1)], lengths[request], start, stop, enough,
                                                 causal, limit)
                tiles = tiles_of_request(before, count, pool, causal, uint32(BLOCK_Q))
                if tile_in_request < tiles:
                    break
                tile_in_request = uint32(tile_in_request - tiles)
                request = uint32(request + uint32(1))
            ptx.store_shared_u32(uint32(base + uint32(START_REQUEST)), request)
            ptx.store_shared_u32(uint32(base + uint32(START_TILE)), tile_in_request)
        cuda.syncthreads()

        item = uint32(0)
        if warp >= uint32(MATH_WARPS):
            give_registers()
            if warp == uint32(SCHEDULE_WARP):
                if lane == uint32(0):
                    ptx.release_tensor_map()
                    ptx.acquire_tensor_map(q_map_at)
                # 32 requests at a time, one per lane, from `batch`; its first tile is the `batch_tile`-th of the line
                batch = ptx.load_shared_u32(uint32(base + uint32(START_REQUEST)))
                batch_tile = uint32(first_tile - ptx.load_shared_u32(uint32(base + uint32(START_TILE))))
                is_loaded = False
                first = uint32(0)
                before = uint32(0)
                count = uint32(0)
                through = uint32(0)                           # tiles of the batch up to and with this lane's request
                tile = first_tile
                remaining = uint32(end_tile - first_tile)
                phase = uint32(1)
                while batch < num_requests:
                    if remaining == uint32(0):
                        if shared_tile == total:
                            break
                        part = max(uint32(fair // uint32(PARTS)), uint32(2))
                        given = uint32(0)
                        if lane == uint32(0):
                            given = cuda.atomic.add(counters, 0, part)
                        tile = uint32(shared_tile + shuffle(given, 0))
                        if tile >= total:
                            break
                        remaining = min(part, uint32(total - tile))
                    if not is_loaded:
                        is_loaded = True
                        first = uint32(0)
                        before = uint32(0)
                        count = uint32(0)
                        request = uint32(batch + lane)
                        if request < num_requests:
                            first, before, count = rows_to_score(offsets[request], offsets[request + uint32(1)], lengths[request],
                                                                 start, stop, enough, causal, limit)
                        mine = tiles_of_request(before, count, pool, causal, uint32(BLOCK_Q))
                        through = running_sum(mine, lane)
                    ahead = uint32(cuda.ballot_sync(0xFFFFFFFF, uint32(tile - batch_tile) < through))
                    if ahead == uint32(0):
                        batch = uint32(batch + uint32(32))
                        batch_tile = uint32(batch_tile + shuffle(through, 31))
                        is_loaded = False
                    else:
                        source = uint32(uint32(cuda.ffs(ahead)) - uint32(1))
                        request = uint32(batch + source)
                        first_row = shuffle(first, source)
                        seen_before = shuffle(before, source)
                        num_rows = shuffle(count, source)
                        tile_in_request = uint32(uint32(tile - batch_tile) - shuffle(uint32(through - mine), source))
                        query_block = uint32(0)
                        if num_rows > uint32(BLOCK_Q):
                            query_block = query_block_at(tile_in_request, seen_before, num_rows, pool, causal, uint32(BLOCK_Q))
                            tile_in_request = uint32(tile_in_request -
                                                     tiles_before(query_block, seen_before, pool, causal, uint32(BLOCK_Q)))
                        token = uint32(query_block * uint32(BLOCK_Q))
                        while remaining > uint32(0) and token < num_rows:
                            visible = last_visible(query_block, seen_before, num_rows, causal, uint32(BLOCK_Q))
                            num_tiles = min(uint32(tiles_for(visible, pool) - tile_in_request), remaining)
                            ptx.mbarrier_wait(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), phase)
                            at = uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES))
                            q_full = uint32(base + uint32(Q_FULL) + uint32(8) * item)
                            if lane == uint32(0):
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_REQUEST)), request)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_ROW)), uint32(uint32(first_row + token) - uint32(start)))
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_NUM_ROWS)), uint32(num_rows - token))
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_TILE)), tile_in_request)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_NUM_TILES)), num_tiles)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_CANDIDATES)), min(uint32(visible // pool), width))
                                ptx.mbarrier_arrive(uint32(base + uint32(ITEM_FULL) + uint32(8) * item))
                                ptx.mbarrier_expect_bytes(q_full, uint32(Q_TILE_BYTES))
                                ptx.copy_box(uint32(base + item * uint32(Q_TILE_BYTES)), q_map_at, int32(0), int32(0),
                                             int32(first_row + token), q_full)
                            if lane < uint32(BLOCK_Q):
                                candidates = uint32(0)
                                if uint32(token + lane) < num_rows:
                                    seen = seen_before
                                    if causal != uint32(0):
                                        seen = uint32(uint32(seen_before + token) + uint32(lane + uint32(1)))
                                    candidates = min(uint32(seen // pool), width)
                                ptx.store_shared_u32(uint32(at + uint32(CANDIDATES) + uint32(4) * lane), candidates)
                            is_halvable = True
                            column = lane
                            while column < uint32(COLUMNS):
                                q_row = uint32(column // uint32(HEADS))
                                head = uint32(column & uint32(HEADS - 1))
                                weight = float32(-0.0)                        # of padding: adds nothing to a chain
                                if uint32(token + q_row) < num_rows and head < uint32(q_s.shape[1]):
                                    weight = q_s[first_row + token + q_row, head]
                                if abs(weight) < float32(SMALLEST_HALVABLE) and weight != float32(0):
                                    is_halvable = False
                                ptx.store_shared_f32(uint32(at + uint32(WEIGHTS) + uint32(4) * column), weight)
                                column = uint32(column + uint32(32))
                            are_halvable = cuda.all_sync(0xFFFFFFFF, is_halvable)
                            if lane == uint32(0):
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_IS_HALVABLE)), uint32(1) if are_halvable else uint32(0))
                            cuda.syncwarp()
                            ptx.mbarrier_arrive_if(q_full, is_leader)
                            item, phase = after(item, phase, NUM_Q_STAGES)
                            tile = uint32(tile + num_tiles)
                            remaining = uint32(remaining - num_tiles)
                            tile_in_request = uint32(0)
                            query_block = uint32(query_block + uint32(1))
                            token = uint32(token + uint32(BLOCK_Q))
                if IS_SHARED:
                    if shared_tile != total and lane == uint32(0):
                        # the last block to come here leaves the counters as it found them
                        if cuda.atomic.inc(counters, 1, uint32(num_sharers - uint32(1))) == uint32(num_sharers - uint32(1)):
                            counters[0] = uint32(0)
                # an item without tiles ends the walk
                ptx.mbarrier_wait(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), phase)
                if lane == uint32(0):
                    ptx.store_shared_u32(uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES) + uint32(4 * ITEM_NUM_TILES)), uint32(0))
                    ptx.mbarrier_arrive(uint32(base + uint32(ITEM_FULL) + uint32(8) * item))
                    ptx.mbarrier_arrive(uint32(base + uint32(Q_FULL) + uint32(8) * item))
            elif warp == uint32(KEY_WARP):
                if lane == uint32(0):
                    ptx.release_tensor_map()
                cuda.syncwarp()
                ptx.acquire_tensor_map(key_map_at)
                rows_per_copy = uint32(uint32(1) << copy_shift)
                num_copies = uint32(uint32(BLOCK_KV) >> copy_shift)
                max_pages = uint32(table.shape[1])
                phase = uint32(0)
                stage = uint32(0)
                kv_phase = uint32(1)
                while True:
                    ptx.mbarrier_wait(uint32(base + uint32(ITEM_FULL) + uint32(8) * item), phase)
                    at = uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES))
                    num_tiles = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_NUM_TILES)))
                    if num_tiles == uint32(0):
                        break
                    request = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_REQUEST)))
                    candidates = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_CANDIDATES)))
                    key_tile = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_TILE)))
                    part = uint32(0)                          # the tile's place in a page of several tiles
                    page = uint32(key_tile * num_copies)
                    if tiles_per_page > uint32(1):
                        page = uint32(key_tile // tiles_per_page)
                        part = uint32(key_tile - uint32(page * tiles_per_page))
                    key = uint32(key_tile * uint32(BLOCK_KV))
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
                        rows = uint32(candidates - min(key, candidates))
                        copies = min(uint32(uint32(rows + uint32(rows_per_copy - uint32(1))) >> copy_shift), num_copies)
                        block = min(shuffle(ids, uint32(page + lane) & uint32(31)), uint32(num_blocks - uint32(1)))
                        kv_full = uint32(base + uint32(KV_FULL) + uint32(8) * stage)
                        ptx.mbarrier_wait(uint32(base + uint32(KV_EMPTY) + uint32(8) * stage), kv_phase)
                        if lane == uint32(0):
                            ptx.mbarrier_arrive_expect_bytes(kv_full, uint32(uint32(copies << copy_shift) * uint32(ROW_BYTES + 4)))
                        cuda.syncwarp()
                        if lane < copies:
                            row = uint32(lane << copy_shift)
                            slot = uint32(part * uint32(BLOCK_KV))
                            ptx.copy_box(uint32(base + uint32(KV) + stage * uint32(KV_TILE_BYTES) + row * uint32(ROW_BYTES)), key_map_at,
                                         int32(0), int32(slot), int32(block), kv_full)
                            ptx.copy_bytes(uint32(base + uint32(SCALES) + stage * uint32(4 * BLOCK_KV) + row * uint32(4)),
                                           scales_at + uint64(block) * scales_stride + uint64(slot) * uint64(4),
                                           uint32(rows_per_copy * uint32(4)), kv_full)
                        key = uint32(key + uint32(BLOCK_KV))
                        part = uint32(part + uint32(1))
                        if part == tiles_per_page:
                            part = uint32(0)
                            page = uint32(page + num_copies)
                        stage, kv_phase = after(stage, kv_phase, NUM_KV_STAGES)
                    ptx.mbarrier_arrive_if(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), is_leader)
                    item, phase = after(item, phase, NUM_Q_STAGES)
        else:
            take_registers()
            sums = cuda.local.array(NUM_SUMS, float32)
            limits = cuda.local.array(NUM_LIMITS, uint32)     # candidates of the tokens whose scores this lane writes
            quarter = uint32(lane & uint32(3))
            odd, high = (quarter & uint32(1)) != uint32(0), (quarter & uint32(2)) != uint32(0)
            my_row = uint32(warp * uint32(16) + (lane >> uint32(2)))          # of the tile: the key whose score this lane writes
            my_token = uint32(0)
            if IS_SINGLE:
                if odd:
                    my_row = uint32(my_row + uint32(8))
            else:
                if high:
                    my_row = uint32(my_row + uint32(8))
                if odd:
                    my_token = uint32(1)
            my_tile = uint32(uint32(base + uint32(KV) + (warp >> uint32(2)) * uint32(KEYS_PER_WARPGROUP * ROW_BYTES)) >> uint32(4))
            my_scale = uint32(base + uint32(SCALES) + uint32(4) * my_row)
            row_bytes = uint64(uint64(width) * uint64(4))
            two_rows = uint64(row_bytes + row_bytes)
            phase = uint32(0)
            stage = uint32(0)
            kv_phase = uint32(0)
            while True:
                ptx.mbarrier_wait(uint32(base + uint32(Q_FULL) + uint32(8) * item), phase)
                at = uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES))
                num_tiles = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_NUM_TILES)))
                if num_tiles == uint32(0):
                    break
                num_rows = shuffle(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_NUM_ROWS))), 0)
                is_halvable = cuda.all_sync(0xFFFFFFFF, ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_IS_HALVABLE))) != uint32(0))
                for i in range(NUM_LIMITS):
                    limits[i] = ptx.load_shared_u32(uint32(at + uint32(CANDIDATES) + uint32(4) * my_token + uint32(LIMIT_BYTES * i)))
                q_tile = uint32(uint32(base + item * uint32(Q_TILE_BYTES)) >> uint32(4))
                weights_at = uint32(at + uint32(WEIGHTS) + uint32(8) * quarter)
                row = uint32(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_ROW))) + my_token)
                key = uint32(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_TILE))) * uint32(BLOCK_KV) + my_row)
                out = uint64(scores_at + uint64(row) * row_bytes)
                if not IS_SPLIT or num_rows <= uint32(GROUP_TOKENS):
                    weights_in(weights_at)
                    stage, kv_phase = walk_first(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, sums, limits, out,
                                                 two_rows, key, is_leader, odd, high)
                if IS_SPLIT:
                    if num_rows > uint32(GROUP_TOKENS) and num_rows <= uint32(THREE_QUARTERS):
                        weights_in(weights_at)
                        stage, kv_phase = walk_three_quarters(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, sums, limits,
                                                              out, two_rows, key, is_leader, odd, high)
                    elif num_rows > uint32(THREE_QUARTERS) and is_halvable:
                        halved_weights_in(weights_at)
                        stage, kv_phase = walk_all_halved(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, sums, limits, out,
                                                          two_rows, key, is_leader, odd, high)
                    elif num_rows > uint32(THREE_QUARTERS):
                        weights_in(weights_at)
                        stage, kv_phase = walk_all(base, stage, kv_phase, num_tiles, my_tile, q_tile, my_scale, sums, limits, out,
                                                   two_rows, key, is_leader, odd, high)
                ptx.mbarrier_arrive_if(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), is_leader)
                item, phase = after(item, phase, NUM_Q_STAGES)

    return Kernel(score, SIGNATURE, THREADS, blocks_per_multiprocessor=1)


# ------------------------------------------------------------------------------------------------------------- tensor maps


def supports(call: Call, q: ArrayView, keys: ArrayView, key_scales: ArrayView) -> bool:
    """Whether the kernel takes these arrays, on a device: their dimensions, and the copy engine's alignment of 16 bytes.

    Parameters
    ----------
    q, keys, key_scales : ArrayView
        [T, H, D], [num_blocks, P, D] and [num_blocks, P], where the kernel would read them.
    """
    num_blocks, page_size, head_dim = keys.shape
    whole_pages = page_size in (8, 16, 32, 64) or page_size % BLOCK_KV == 0
    if not (whole_pages and num_blocks and call.table.shape[1] and call.num_heads <= MAX_HEADS and head_dim <= ROW_BYTES
            and call.kpool <= MAX_KPOOL):
        return False
    scale_slot, scale_block = key_scales.strides[1], key_scales.strides[0]
    return (_is_mappable(q) and _is_mappable(keys) and scale_slot == key_scales.itemsize and key_scales.address % 16 == 0
            and (num_blocks == 1 or (scale_block % 16 == 0 and 0 <= scale_block)))


def _is_mappable(view: ArrayView) -> bool:
    """Whether a tensor map can describe a [., ., D] array of bytes."""
    return view.address % 16 == 0 and all(n == 1 or (0 < s < 2**40 and s % 16 == 0) for n, s in zip(view.shape[:2], view.strides))


def tensor_map(view: ArrayView, box: tuple[int, int]) -> tuple[int, ...]:
    """Tensor map of a [n, m, D] array of bytes, as 16 uint64: boxes of ``box`` x 128, zeros outside, 128-byte swizzle."""
    from cuda.bindings import driver
    outer, inner, depth = view.shape
    strides = [s if n > 1 else ROW_BYTES for n, s in ((inner, view.strides[1]), (outer, view.strides[0]))]
    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, view.address,
        [driver.cuuint64_t(n) for n in (depth, inner, outer)], [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(n) for n in (ROW_BYTES, box[1], box[0])], [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    if int(error):
        raise RuntimeError(f"no tensor map of {view.name} with shape {list(view.shape)}, strides {list(view.strides)}: {error.name}")
    return tuple(int(word) for word in encoded.opaque)
