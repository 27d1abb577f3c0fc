"""The Hopper scorer: FP8 tensor cores fed by the copy engine, paged keys, ragged batches.

One block of threads per multiprocessor takes an equal stretch of all key tiles (`tile_schedule`) and walks it *item* by item: a run
of key tiles of one query block. A producer warpgroup and two math warpgroups meet in shared memory:

* the *schedule* warp finds the items, from device lengths, and brings each item's query tile and weights;
* the *key* warp brings key tiles and their scales, page by page;
* each math warpgroup multiplies its 64 keys of a tile with all columns (tokens x heads), and sums ReLU times weight over the heads.

The products of a tile come in two groups, one per half of the columns: while the tensor cores work on one, the threads sum the other.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

from numba import cuda, float32, int32, int64, uint32, uint64
from numba.cuda import types

from . import ptx
from .device import Kernel
from .problem import ArrayView, Call
from .tile_schedule import BLOCK_KV, MAX_KPOOL, last_visible, query_block_at, rows_to_score, tiles_before, tiles_for, tiles_of_request

ROW_BYTES = 128                               # of a tile row in shared memory: a key or a head, zeros behind its depth
MATH_WARPGROUPS = 2
MATH_THREADS = 128 * MATH_WARPGROUPS
MATH_WARPS = MATH_THREADS // 32
SCHEDULE_WARP, KEY_WARP = MATH_WARPS, MATH_WARPS + 1
THREADS = MATH_THREADS + 128
NUM_WARPS = THREADS // 32
KEYS_PER_WARPGROUP = BLOCK_KV // MATH_WARPGROUPS
MAX_HEADS, MAX_COLUMNS, MAX_BLOCK_Q = 128, 256, 16
MAX_KV_STAGES = 12
NUM_Q_STAGES = 2
PRODUCER_REGISTERS, MATH_REGISTERS = 40, 232
SWIZZLE_ATOM_BYTES = 1024


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
    num_kv_stages : int
        Key tiles in flight.
    """

    heads: int
    block_q: int
    depth_steps: int
    num_kv_stages: int
    turn: int = 0

    @property
    def columns(self) -> int:
        return self.heads * self.block_q

    @property
    def num_groups(self) -> int:
        """Groups of products per tile: two halves of whole tokens, or one token."""
        return min(2, self.block_q)

    @property
    def group_columns(self) -> int:
        return self.columns // self.num_groups

    @property
    def q_tile_bytes(self) -> int:
        return self.columns * ROW_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return BLOCK_KV * ROW_BYTES

    # byte offsets in shared memory, from a base that is aligned to a swizzle atom
    @property
    def kv_offset(self) -> int:
        return NUM_Q_STAGES * self.q_tile_bytes

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
        return self.items_offset + NUM_Q_STAGES * self.item_bytes

    @property
    def scratch_offset(self) -> int:
        return self.barriers_offset + 8 * (3 * NUM_Q_STAGES + 2 * self.num_kv_stages)

    @property
    def shared_bytes(self) -> int:
        return SWIZZLE_ATOM_BYTES + self.scratch_offset + 4 * (NUM_WARPS + 2)


# Words of an item; its tokens' candidate counts and its weights are behind them.
ITEM_REQUEST, ITEM_ROW, ITEM_TILE, ITEM_NUM_TILES, ITEM_NUM_PAGES = range(5)
ITEM_WORDS = 6


def tma_tile(num_heads: int, head_dim: int, tokens_per_request: int, shared_bytes_limit: int) -> TmaTile:
    """The tile for these dimensions: query blocks as long as a request's new tokens, as far as the limits allow."""
    heads = next(h for h in (8, 16, 32, 64, 128) if num_heads <= h)
    block_q = 1
    while block_q < tokens_per_request and heads * block_q < MAX_COLUMNS and block_q < MAX_BLOCK_Q:
        block_q *= 2
    stages = MAX_KV_STAGES
    tile = TmaTile(heads, block_q, -(-head_dim // 32), stages)
    while tile.shared_bytes > shared_bytes_limit:
        stages -= 1
        tile = TmaTile(heads, block_q, tile.depth_steps, stages)
    return tile


# ------------------------------------------------------------------------------------------------------- weighted head sums


@functools.cache
def load_weights(columns: int):
    """A thread's weights from shared memory: ``weight[2 j + e]`` is that of column ``8 j + 2 q + e``; the argument is the address of
    column ``2 q``."""
    loads = "".join(f"ld.shared.v2.f32 {{weight{2 * j}, weight{2 * j + 1}}}, [$0+{32 * j}]; " for j in range(columns // 8))
    return ptx.instruction(loads, ptx.void, ptx.u32)


def head_sums(first_column: int, heads: int) -> str:
    """PTX of the weighted ReLU sums of one token over this thread's heads, $0 for its key g and $1 for its key g + 8.

    Per key two chains of fused multiply-adds over ``h // 8`` ascending, one for each parity of the head, then their sum. The token's
    heads are the columns from `first_column`.
    """
    text = "".join(f"mov.f32 s{key}{parity}, 0f00000000; " for key in range(2) for parity in range(2))
    for j in range(first_column // 8, (first_column + heads) // 8):
        for key in range(2):
            for parity in range(2):
                text += (f"max.NaN.f32 r, acc{4 * j + 2 * key + parity}, 0f00000000; "
                         f"fma.rn.f32 s{key}{parity}, r, weight{2 * j + parity}, s{key}{parity}; ")
    return f"{{ .reg .f32 r, s00, s01, s10, s11; {text}add.rn.f32 $0, s00, s01; add.rn.f32 $1, s10, s11; }}"


@functools.cache
def group_sums(first_column: int, num_tokens: int, heads: int):
    """`head_sums` of the tokens from `first_column` into a local float32 array: ``sums[2 token + {0, 1}]``."""
    return ptx.into_local_array([head_sums(first_column + heads * token, heads) for token in range(num_tokens)], 2)


@cuda.jit(device=True, inline="always")
def fold(a, b, take_b, lane_mask):
    """The sum over this lane and its neighbour of `a`, or of `b` where `take_b`: each gives away what the other one keeps."""
    keep = b if take_b else a                 # statements of their own: a conditional within a collective's argument becomes a branch
    give = a if take_b else b
    return keep + cuda.shfl_xor_sync(0xFFFFFFFF, give, lane_mask)


# ------------------------------------------------------------------------------------------------------------------- kernel

SIGNATURE = (
    types.UniTuple(types.uint64, ptx.TENSOR_MAP_WORDS),       # q_map
    types.UniTuple(types.uint64, ptx.TENSOR_MAP_WORDS),       # key_map
    types.uint64,                             # maps_at: scratch of 256 bytes per block
    types.Array(types.float32, 2, "A"),       # q_s [T, H]
    types.uint64, types.uint64,               # key scales: address, bytes from block to block
    types.Array(types.int32, 1, "A"),         # offsets [B + 1]
    types.Array(types.int32, 1, "A"),         # lengths [B]
    types.Array(types.int32, 2, "A"),         # table [B, max_pages]
    types.Array(types.float32, 1, "C"),       # scores, rows of `width`
    types.int64,                              # width
    types.uint32, types.uint32,               # num_blocks, page_size
    types.uint32, types.uint32,               # causal, kpool
    types.int32, types.int32,                 # start, stop
    types.uint32, types.uint32,               # enough, limit: `tile_schedule`
)


@functools.cache
def tma_scorer(tile: TmaTile) -> Kernel:
    """The scoring kernel for a tile.

    ``scores[row - start, key] = key_scale[key] * sum_h(relu(sum_d q[h, d] * k[key, d]) * q_s[h])`` of every row in [start, stop)
    that sees more than `enough` tokens, for key < the row's candidates; the scores of other rows and keys are left as they are.
    """
    HEADS, BLOCK_Q, COLUMNS = tile.heads, uint32(tile.block_q), tile.columns
    Q_TILE_BYTES, KV_TILE_BYTES, NUM_KV_STAGES = tile.q_tile_bytes, tile.kv_tile_bytes, tile.num_kv_stages
    KV, SCALES, ITEMS, ITEM_BYTES, SCRATCH = (tile.kv_offset, tile.scales_offset, tile.items_offset, tile.item_bytes,
                                              tile.scratch_offset)
    Q_FULL = tile.barriers_offset
    Q_EMPTY, ITEM_FULL, KV_FULL = (Q_FULL + 8 * NUM_Q_STAGES * i for i in range(1, 4))
    KV_EMPTY = KV_FULL + 8 * NUM_KV_STAGES
    CANDIDATES, WEIGHTS = 4 * ITEM_WORDS, tile.item_bytes - 4 * COLUMNS
    START_REQUEST, START_TILE = SCRATCH + 4 * NUM_WARPS, SCRATCH + 4 * NUM_WARPS + 4
    IS_SPLIT, GROUP_TOKENS = tile.num_groups == 2, tile.block_q // tile.num_groups
    GROUP_Q = tile.group_columns * ROW_BYTES // 16
    NUM_SUMS, IS_SINGLE, PAIRS = 2 * GROUP_TOKENS, GROUP_TOKENS == 1, max(1, GROUP_TOKENS // 2)
    NO_REQUEST = 0xFFFFFFFF
    TURN = tile.turn

    declare_registers = ptx.declare_registers(COLUMNS // 2, COLUMNS // 4)
    weights_in = load_weights(COLUMNS)
    multiply_first = ptx.wgmma_e4m3(0, tile.group_columns, tile.depth_steps)
    multiply_second = ptx.wgmma_e4m3(tile.group_columns // 2, tile.group_columns, tile.depth_steps)
    sum_first = group_sums(0, GROUP_TOKENS, HEADS)
    sum_second = group_sums(tile.group_columns, GROUP_TOKENS, HEADS)
    give_registers, take_registers = ptx.set_registers("dec", PRODUCER_REGISTERS), ptx.set_registers("inc", MATH_REGISTERS)

    @cuda.jit(device=True, inline="always")
    def write_scores(sums, candidates_at, scores, out, width, key, scale, odd, high):
        """A group's scores: this lane writes one key of one token of every pair (of the token, where it is alone)."""
        if IS_SINGLE:
            half = fold(sums[0], sums[1], odd, 1)
            score = (half + cuda.shfl_xor_sync(0xFFFFFFFF, half, 2)) * scale
            if not high and key < ptx.load_shared_u32(candidates_at):
                scores[out + int64(key)] = score
        else:
            for pair in range(PAIRS):
                upper = fold(sums[4 * pair], sums[4 * pair + 2], odd, 1)
                lower = fold(sums[4 * pair + 1], sums[4 * pair + 3], odd, 1)
                score = fold(upper, lower, high, 2) * scale
                if key < ptx.load_shared_u32(uint32(candidates_at + uint32(8 * pair))):
                    scores[out + int64(key)] = score
                out += 2 * width

    def score(q_map, key_map, maps_at, q_s, scales_at, scales_stride, offsets, lengths, table, scores, width, num_blocks, page_size,
              causal, kpool, start, stop, enough, limit):
        declare_registers()
        shared = cuda.shared.array(0, types.uint8)
        base = uint32(uint32(ptx.shared_address(shared) + uint32(SWIZZLE_ATOM_BYTES - 1)) & uint32(0x100000000 - SWIZZLE_ATOM_BYTES))
        tid = uint32(cuda.threadIdx.x)
        lane = uint32(tid & uint32(31))
        warp = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(tid >> uint32(5)), 0))          # the compiler's word that a warp shares it
        is_leader = uint32(1) if lane == uint32(0) else uint32(0)
        num_requests = uint32(lengths.shape[0])
        q_map_at = maps_at + uint64(16 * ptx.TENSOR_MAP_WORDS) * uint64(cuda.blockIdx.x)
        key_map_at = q_map_at + uint64(8 * ptx.TENSOR_MAP_WORDS)

        # This block's stretch [first_tile, end_tile) of all tiles: every thread counts the tiles of some requests.
        if tid == uint32(0):
            for i in range(NUM_Q_STAGES):
                ptx.mbarrier_init(uint32(base + uint32(Q_FULL + 8 * i)), uint32(1))
                ptx.mbarrier_init(uint32(base + uint32(ITEM_FULL + 8 * i)), uint32(1))
                ptx.mbarrier_init(uint32(base + uint32(Q_EMPTY + 8 * i)), uint32(MATH_WARPS + 1))
            for i in range(NUM_KV_STAGES):
                ptx.mbarrier_init(uint32(base + uint32(KV_FULL + 8 * i)), uint32(1))
                ptx.mbarrier_init(uint32(base + uint32(KV_EMPTY + 8 * i)), uint32(MATH_WARPS))
            ptx.fence_mbarrier_init()
            ptx.store_shared_u32(uint32(base + uint32(START_REQUEST)), uint32(NO_REQUEST))
        if tid == uint32(32 * SCHEDULE_WARP):
            ptx.store_tensor_map(q_map_at, q_map)
            ptx.store_tensor_map(key_map_at, key_map)
        share = uint32(uint32(num_requests + uint32(THREADS - 1)) // uint32(THREADS))
        my_first = min(uint32(tid * share), num_requests)
        my_end = min(uint32(my_first + share), num_requests)
        mine = uint32(0)
        for request in range(my_first, my_end):
            _, before, count = rows_to_score(offsets[request], offsets[request + 1], lengths[request], start, stop, enough, causal,
                                             limit)
            mine = uint32(mine + tiles_of_request(before, count, kpool, causal, BLOCK_Q))
        running = mine
        distance = uint32(1)
        while distance < uint32(32):
            other = uint32(cuda.shfl_up_sync(0xFFFFFFFF, int32(running), distance))
            if lane >= distance:
                running = uint32(running + other)
            distance = uint32(distance + distance)
        if lane == uint32(31):
            ptx.store_shared_u32(uint32(base + uint32(SCRATCH) + uint32(4) * warp), running)
        cuda.syncthreads()
        total = uint32(0)
        my_tile = uint32(running - mine)
        for w in range(NUM_WARPS):
            of_warp = ptx.load_shared_u32(uint32(base + uint32(SCRATCH + 4 * w)))
            total = uint32(total + of_warp)
            if uint32(w) < warp:
                my_tile = uint32(my_tile + of_warp)
        first_tile = uint32(uint64(total) * uint64(cuda.blockIdx.x) // uint64(cuda.gridDim.x))
        end_tile = uint32(uint64(total) * (uint64(cuda.blockIdx.x) + uint64(1)) // uint64(cuda.gridDim.x))
        if uint32(first_tile - my_tile) < mine and first_tile < end_tile:
            tile_in_request = uint32(first_tile - my_tile)
            for request in range(my_first, my_end):
                _, before, count = rows_to_score(offsets[request], offsets[request + 1], lengths[request], start, stop, enough,
                                                 causal, limit)
                tiles = tiles_of_request(before, count, kpool, causal, BLOCK_Q)
                if tile_in_request < tiles:
                    ptx.store_shared_u32(uint32(base + uint32(START_REQUEST)), uint32(request))
                    ptx.store_shared_u32(uint32(base + uint32(START_TILE)), tile_in_request)
                    break
                tile_in_request = uint32(tile_in_request - tiles)
        cuda.syncthreads()

        item = uint32(0)
        if warp >= uint32(MATH_WARPS):
            give_registers()
            if warp == uint32(SCHEDULE_WARP):
                ptx.acquire_tensor_map(q_map_at)
                request = ptx.load_shared_u32(uint32(base + uint32(START_REQUEST)))
                tile_in_request = ptx.load_shared_u32(uint32(base + uint32(START_TILE)))
                remaining = uint32(end_tile - first_tile)
                phase = uint32(1)
                while remaining > uint32(0) and request < num_requests:
                    # the next request with rows to score, among 32: one per lane
                    first = uint32(0)
                    before = uint32(0)
                    count = uint32(0)
                    candidate = uint32(request + lane)
                    if candidate < num_requests:
                        first, before, count = rows_to_score(offsets[candidate], offsets[candidate + uint32(1)], lengths[candidate],
                                                             start, stop, enough, causal, limit)
                    busy = uint32(cuda.ballot_sync(0xFFFFFFFF, count > uint32(0)))
                    if busy == uint32(0):
                        request = uint32(request + uint32(32))
                    else:
                        source = uint32(cuda.ffs(busy)) - uint32(1)
                        request = uint32(request + uint32(source))
                        first = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(first), source))
                        before = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(before), source))
                        count = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(count), source))
                        query_block = query_block_at(tile_in_request, before, count, kpool, causal, BLOCK_Q)
                        tile_in_block = uint32(tile_in_request - tiles_before(query_block, before, kpool, causal, BLOCK_Q))
                        tile_in_request = uint32(0)
                        token = uint32(query_block * BLOCK_Q)
                        while remaining > uint32(0) and token < count:
                            visible = last_visible(query_block, before, count, causal, BLOCK_Q)
                            num_tiles = min(uint32(tiles_for(visible, kpool) - tile_in_block), remaining)
                            ptx.mbarrier_wait(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), phase)
                            at = uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES))
                            q_full = uint32(base + uint32(Q_FULL) + uint32(8) * item)
                            if lane == uint32(0):
                                candidates = min(uint64(visible // kpool), uint64(width))
                                num_pages = uint32(uint64(candidates + uint64(page_size) - uint64(1)) // uint64(page_size))
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_REQUEST)), request)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_ROW)), uint32(uint32(first + token) - uint32(start)))
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_TILE)), tile_in_block)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_NUM_TILES)), num_tiles)
                                ptx.store_shared_u32(uint32(at + uint32(4 * ITEM_NUM_PAGES)), num_pages)
                                ptx.mbarrier_arrive(uint32(base + uint32(ITEM_FULL) + uint32(8) * item))
                                ptx.mbarrier_expect_bytes(q_full, uint32(Q_TILE_BYTES))
                                ptx.copy_box(uint32(base + item * uint32(Q_TILE_BYTES)), q_map_at, int32(0), int32(0),
                                             int32(first + token), q_full)
                            if lane < BLOCK_Q:
                                candidates = uint32(0)
                                if uint32(token + lane) < count:
                                    seen = visible
                                    if causal != uint32(0):
                                        seen = uint32(uint32(before + token) + uint32(lane + uint32(1)))
                                    candidates = uint32(min(uint64(seen // kpool), uint64(width)))
                                ptx.store_shared_u32(uint32(at + uint32(CANDIDATES) + uint32(4) * lane), candidates)
                            for column in range(lane, uint32(COLUMNS), uint32(32)):
                                q_row = uint32(column // uint32(HEADS))
                                head = uint32(column - q_row * uint32(HEADS))
                                weight = float32(-0.0)                        # of padding: adds nothing to a chain
                                if uint32(token + q_row) < count and head < uint32(q_s.shape[1]):
                                    weight = q_s[first + token + q_row, head]
                                ptx.store_shared_f32(uint32(at + uint32(WEIGHTS) + uint32(4) * uint32(column)), weight)
                            cuda.syncwarp()
                            ptx.mbarrier_arrive_if(q_full, is_leader)
                            item = uint32(item ^ uint32(1))
                            if item == uint32(0):
                                phase = uint32(phase ^ uint32(1))
                            remaining = uint32(remaining - num_tiles)
                            tile_in_block = uint32(0)
                            query_block = uint32(query_block + uint32(1))
                            token = uint32(token + BLOCK_Q)
                        request = uint32(request + uint32(1))
                # an item without tiles ends the walk
                ptx.mbarrier_wait(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), phase)
                if lane == uint32(0):
                    ptx.store_shared_u32(uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES) + uint32(4 * ITEM_NUM_TILES)), uint32(0))
                    ptx.mbarrier_arrive(uint32(base + uint32(ITEM_FULL) + uint32(8) * item))
                    ptx.mbarrier_arrive(uint32(base + uint32(Q_FULL) + uint32(8) * item))
            elif warp == uint32(KEY_WARP):
                ptx.acquire_tensor_map(key_map_at)
                rows_per_copy = min(page_size, uint32(BLOCK_KV))
                num_copies = uint32(uint32(BLOCK_KV) // rows_per_copy)
                copied_bytes = uint32(rows_per_copy * uint32(ROW_BYTES + 4))
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
                    num_pages = min(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_NUM_PAGES))), max_pages)
                    key = uint32(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_TILE))) * uint32(BLOCK_KV))
                    page = uint32(key // page_size)
                    slot = uint32(key - uint32(page * page_size))
                    # page ids, 32 at a time and 32 ahead: lane l holds that of page window + l
                    window = uint32(page & uint32(0xFFFFFFE0))
                    ids = uint32(0)
                    next_ids = uint32(0)
                    if uint32(window + lane) < num_pages:
                        ids = uint32(table[request, window + lane])
                    if uint32(window + uint32(32) + lane) < num_pages:
                        next_ids = uint32(table[request, window + uint32(32) + lane])
                    for _ in range(num_tiles):
                        if uint32(page - window) >= uint32(32):
                            window = uint32(window + uint32(32))
                            ids = next_ids
                            if uint32(window + uint32(32) + lane) < num_pages:
                                next_ids = uint32(table[request, window + uint32(32) + lane])
                        copies = min(num_copies, uint32(num_pages - min(page, num_pages)))
                        block = min(uint32(cuda.shfl_sync(0xFFFFFFFF, int32(ids), uint32(page + lane) & uint32(31))),
                                    uint32(num_blocks - uint32(1)))
                        kv_full = uint32(base + uint32(KV_FULL) + uint32(8) * stage)
                        ptx.mbarrier_wait(uint32(base + uint32(KV_EMPTY) + uint32(8) * stage), kv_phase)
                        if lane == uint32(0):
                            ptx.mbarrier_arrive_expect_bytes(kv_full, uint32(copies * copied_bytes))
                        cuda.syncwarp()
                        if lane < copies:
                            row = uint32(lane * rows_per_copy)
                            ptx.copy_box(uint32(base + uint32(KV) + stage * uint32(KV_TILE_BYTES) + row * uint32(ROW_BYTES)), key_map_at,
                                         int32(0), int32(slot), int32(block), kv_full)
                            ptx.copy_bytes(uint32(base + uint32(SCALES) + stage * uint32(4 * BLOCK_KV) + row * uint32(4)),
                                           scales_at + uint64(block) * scales_stride + uint64(slot) * uint64(4),
                                           uint32(rows_per_copy * uint32(4)), kv_full)
                        slot = uint32(slot + uint32(BLOCK_KV))
                        if slot >= page_size:
                            slot = uint32(0)
                            page = uint32(page + num_copies)
                        stage = uint32(stage + uint32(1))
                        if stage == uint32(NUM_KV_STAGES):
                            stage = uint32(0)
                            kv_phase = uint32(kv_phase ^ uint32(1))
                    ptx.mbarrier_arrive_if(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), is_leader)
                    item = uint32(item ^ uint32(1))
                    if item == uint32(0):
                        phase = uint32(phase ^ uint32(1))
        else:
            take_registers()
            sums = cuda.local.array(NUM_SUMS, float32)
            quarter = uint32(lane & uint32(3))
            odd, high = (quarter & uint32(1)) != uint32(0), (quarter & uint32(2)) != uint32(0)
            my_row = uint32(warp * uint32(16) + (lane >> uint32(2)))          # of the tile: this lane writes the score of one key
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
            my_turn = uint32(uint32(1) + (warp >> uint32(2)))
            other_turn = uint32(uint32(3) - my_turn)
            if TURN != 0 and my_turn == uint32(2):
                ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
            phase = uint32(0)
            stage = uint32(0)
            kv_phase = uint32(0)
            while True:
                ptx.mbarrier_wait(uint32(base + uint32(Q_FULL) + uint32(8) * item), phase)
                at = uint32(base + uint32(ITEMS) + item * uint32(ITEM_BYTES))
                num_tiles = ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_NUM_TILES)))
                if num_tiles == uint32(0):
                    break
                weights_in(uint32(at + uint32(WEIGHTS) + uint32(8) * quarter))
                q_tile = uint32(uint32(base + item * uint32(Q_TILE_BYTES)) >> uint32(4))
                row = uint32(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_ROW))) + my_token)
                key = uint32(ptx.load_shared_u32(uint32(at + uint32(4 * ITEM_TILE))) * uint32(BLOCK_KV) + my_row)
                out = int64(row) * width
                candidates_at = uint32(at + uint32(CANDIDATES) + uint32(4) * my_token)
                for _ in range(num_tiles):
                    ptx.mbarrier_wait(uint32(base + uint32(KV_FULL) + uint32(8) * stage), kv_phase)
                    scale = ptx.load_shared_f32(uint32(my_scale + stage * uint32(4 * BLOCK_KV)))
                    k_tile = uint32(my_tile + stage * uint32(KV_TILE_BYTES // 16))
                    if TURN != 0:
                        ptx.barrier_sync(my_turn, uint32(MATH_THREADS))
                    multiply_first(k_tile, q_tile)
                    if IS_SPLIT:
                        multiply_second(k_tile, uint32(q_tile + uint32(GROUP_Q)))
                        if TURN == 1:
                            ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
                        ptx.wgmma_wait_1()
                        if TURN == 2:
                            ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
                        sum_first(sums)
                        if TURN == 3:
                            ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
                        write_scores(sums, candidates_at, scores, out, width, key, scale, odd, high)
                        if TURN == 4:
                            ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
                    ptx.wgmma_wait_0()
                    if TURN == 5:
                        ptx.barrier_arrive(other_turn, uint32(MATH_THREADS))
                    ptx.mbarrier_arrive_if(uint32(base + uint32(KV_EMPTY) + uint32(8) * stage), is_leader)
                    if IS_SPLIT:
                        sum_second(sums)
                        write_scores(sums, uint32(candidates_at + uint32(4 * GROUP_TOKENS)), scores, out + GROUP_TOKENS * width, width, key,
                                     scale, odd, high)
                    else:
                        sum_first(sums)
                        write_scores(sums, candidates_at, scores, out, width, key, scale, odd, high)
                    key = uint32(key + uint32(BLOCK_KV))
                    stage = uint32(stage + uint32(1))
                    if stage == uint32(NUM_KV_STAGES):
                        stage = uint32(0)
                        kv_phase = uint32(kv_phase ^ uint32(1))
                ptx.mbarrier_arrive_if(uint32(base + uint32(Q_EMPTY) + uint32(8) * item), is_leader)
                item = uint32(item ^ uint32(1))
                if item == uint32(0):
                    phase = uint32(phase ^ uint32(1))

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
