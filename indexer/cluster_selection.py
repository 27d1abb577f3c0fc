"""Exact selection for few rows: a cluster of blocks holds a row in its shared memory and searches it together; a block alone, where
there are about as many rows as multiprocessors.

Each block keeps a piece of the row, as sortable keys, and counts its digits; the counts of all blocks together tell in which bin
the k-th best key is. Once a bin holds few enough keys, all blocks get all of them and finish the search alone, each with the same
result. What reaches the bound is then written in order of position, behind what the blocks before write. Where a bin never holds
few, as with ties, the digits are counted together to the last one: any data goes through, and none takes much longer.

Blocks send each other stores that count at a barrier of the receiver's. A barrier of the whole cluster that orders memory takes
longer than such an exchange (750 cycles against 400 to 600 on an H200), and so do loads whose lanes ask several blocks.

A piece that is longer than a block's shared memory is read again in every pass.
"""
from __future__ import annotations

from collections.abc import Mapping

from numba import cuda, int32, int64, uint32, uint64
from numba.cuda import types

from .device import Kernel
from .ptx import at as address_of
from .ptx import (
    cluster_arrive,
    cluster_id,
    cluster_rank,
    cluster_size,
    cluster_wait,
    fence_mbarrier_init,
    global_address,
    load_words,
    mbarrier_arrive_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    sortable_bits,
    store_cluster_u32,
    warp_sum,
)
from .rows import LENGTHS_SIGNATURE, find_candidates
from .sampled_selection import at, lowest_bit, warp_running_sum
from .selection import MINUS_INF_BITS, SELECT_SIGNATURE

THREADS = 1024
NUM_WARPS = THREADS // 32
ITEMS = 8                                     # keys of a thread at a time
TILE = 32 * ITEMS                             # consecutive keys that a warp works on at a time
TILE_WORDS = TILE + TILE // 32                # in shared memory: a word more for every 32, so that no bank is asked twice
MAX_BLOCKS = 16                               # of a cluster
DIGIT_BITS = 11
NUM_BINS = 1 << DIGIT_BITS
NUM_DIGITS = 3
COARSE = 32                                   # coarse bins of a histogram, of FINE bins each
FINE = NUM_BINS // COARSE
FINE_PITCH = FINE + 1                         # words from block to block: a bin of all of them lies in as many banks
MAX_TOP_K = 2**30                             # slots, and those that a cluster's threads reach behind them, are int32
SHORTEST_PIECE, LONGEST_PIECE = 2048, 2**20   # keys of a block, of rows as long as they can be; a warp's are counted in 16 bits
CAPACITY = 4096                               # keys that are gathered in every block

# Shared memory of a block, in 32-bit words. Zero at the start: a histogram per digit, the keys above and at the bound of each warp,
# how many keys the block has gathered. Then its coarse bins; what all blocks send of theirs, of their fine bins, of their keys
# above and at the bound; what a search has found; the keys gathered by all blocks, and from which warp each of this block's is. A
# barrier for everything that is sent. The keys.
HISTOGRAMS = 0
WARP_COUNTS = HISTOGRAMS + NUM_DIGITS * NUM_BINS
GATHERED = WARP_COUNTS + 2 * 32
NUM_ZEROED = GATHERED + 1
OWN_COARSE = NUM_ZEROED
COARSE_ROWS = OWN_COARSE + COARSE
FINE_ROWS = COARSE_ROWS + MAX_BLOCKS * COARSE
BLOCK_COUNTS = FINE_ROWS + MAX_BLOCKS * FINE_PITCH
BIN, ABOVE, IN_BIN = range(BLOCK_COUNTS + 2 * MAX_BLOCKS, BLOCK_COUNTS + 2 * MAX_BLOCKS + 3)
LIST = IN_BIN + 1
OWNERS = LIST + CAPACITY
BARRIERS = (OWNERS + CAPACITY + 1) // 2 * 2   # 2 words each: coarse and fine per digit, then the list's and the counts'
NUM_BARRIERS = 2 * NUM_DIGITS + 2
LIST_BARRIER = BARRIERS + 2 * (NUM_BARRIERS - 2)
COUNTS_BARRIER = BARRIERS + 2 * (NUM_BARRIERS - 1)
KEYS = BARRIERS + 2 * NUM_BARRIERS


def blocks_per_row(num_rows: int, width: int, max_clusters: Mapping[int, int]) -> int:
    """Blocks of the cluster that takes a row, 1 for none, or 0 where rows are too many, too short or too long.

    Parameters
    ----------
    max_clusters : mapping
        How many clusters of so many blocks run at a time.
    """
    for blocks in sorted(max_clusters, reverse=True):
        if num_rows <= max_clusters[blocks] and width >= blocks * SHORTEST_PIECE:
            return blocks if width <= blocks * LONGEST_PIECE else 0
    return 0


def longest_row(num_blocks: int, shared_bytes_limit: int) -> int:
    """Candidates of the longest row that a cluster of so many blocks takes where another selection can, too.

    Only pairs leave rows whose pieces do not fit: of a million candidates they would take twice as long. A second launch is 3 us,
    which is little for the 31 to 66 rows that an H200 gives to pairs. For those of four blocks and of one it is over 5 % of the
    whole operator on short rows, and what long ones lose is little beside their scores.
    """
    return num_blocks * (TILE * most_tiles_held(shared_bytes_limit) if num_blocks == 2 else LONGEST_PIECE)


def tiles_held(width: int, num_blocks: int, shared_bytes_limit: int) -> int:
    """Tiles that a block keeps in shared memory: its piece of a row of `width` candidates, or as much of it as fits."""
    num_tiles = -(-width // TILE)
    return min(-(-num_tiles // num_blocks), most_tiles_held(shared_bytes_limit))


def most_tiles_held(shared_bytes_limit: int) -> int:
    """Tiles that fit in a block's shared memory."""
    return (shared_bytes_limit - shared_bytes(0)) // (4 * TILE_WORDS)


def shared_bytes(num_held: int) -> int:
    """Dynamic shared memory of a block that keeps so many tiles."""
    return 4 * (KEYS + TILE_WORDS * num_held)


@cuda.jit(device=True, inline="always")
def lane_of_entry(above, mine, missing):
    """The lane in whose `mine` entries, of which `above` are ahead, the `missing`-th lies."""
    return int32(cuda.ffs(cuda.ballot_sync(0xFFFFFFFF, above < missing and missing <= above + mine)) - 1)


@cuda.jit(device=True, inline="always")
def choose_bin(shared, base, digit, missing, alone, block, num_blocks, tid, warp):
    """The bin, from the top, in which the `missing`-th entry of a histogram lies: (bin, entries above it, in it).

    The histogram is the block's own where it is `alone`, else the sum of all blocks': they send their coarse bins to all of them,
    then the fine ones of the chosen. One warp does it, as barriers and every other warp's work cost; all threads get the result.
    """
    lane = uint32(tid & uint32(31))
    histogram = uint32(HISTOGRAMS + NUM_BINS * digit)
    for first in range(0, COARSE, NUM_WARPS):
        pair = uint32(histogram + uint32(FINE * first) + uint32(2) * tid)
        mine = warp_sum(int32(shared[pair] + shared[pair + uint32(1)]))
        if lane == uint32(0):
            shared[at(OWN_COARSE + first, warp)] = uint32(mine)
    cuda.syncthreads()
    if warp == 0:
        barrier = address_of(base, 4 * BARRIERS, 16, uint32(digit))
        top = uint32(uint32(COARSE - 1) - lane)               # lane 0 has the highest bin
        mine = int32(shared[at(OWN_COARSE, top)])
        if not alone:
            to = address_of(base, 4 * COARSE_ROWS, 4, uint32(block * uint32(COARSE) + top))
            other = uint32(0)
            while other < num_blocks:
                store_cluster_u32(to, other, uint32(mine), barrier)
                other = uint32(other + uint32(1))
            mbarrier_wait(barrier, uint32(0))
            mine = int32(0)
            other = uint32(0)
            while other < num_blocks:
                mine = int32(mine + int32(shared[at(COARSE_ROWS, other * uint32(COARSE) + top)]))
                other = uint32(other + uint32(1))
        above = int32(warp_running_sum(mine, lane) - mine)
        source = lane_of_entry(above, mine, missing)
        above = cuda.shfl_sync(0xFFFFFFFF, above, source)
        first = uint32(int32(FINE) * int32(int32(COARSE - 1) - source))

        top = uint32(uint32(FINE - 1) - uint32(2) * lane)     # of the two bins of this lane
        mine = int32(shared[histogram + first + top])
        below = int32(shared[histogram + first + top - uint32(1)])
        if not alone:
            barrier = uint32(barrier + uint32(8))
            to = address_of(base, 4 * FINE_ROWS, 4, uint32(block * uint32(FINE_PITCH) + top))
            other = uint32(0)
            while other < num_blocks:
                store_cluster_u32(to, other, uint32(mine), barrier)
                store_cluster_u32(uint32(to - uint32(4)), other, uint32(below), barrier)
                other = uint32(other + uint32(1))
            mbarrier_wait(barrier, uint32(0))
            mine = below = int32(0)
            other = uint32(0)
            while other < num_blocks:
                row = at(FINE_ROWS, other * uint32(FINE_PITCH) + top)
                mine = int32(mine + int32(shared[row]))
                below = int32(below + int32(shared[row - uint32(1)]))
                other = uint32(other + uint32(1))
        both = int32(mine + below)
        above = int32(above + warp_running_sum(both, lane) - both)
        if above < missing and missing <= above + both:       # one lane
            if missing > above + mine:
                top = uint32(top - uint32(1))
                above = int32(above + mine)
                mine = below
            shared[BIN] = uint32(first + top)
            shared[ABOVE] = uint32(above)
            shared[IN_BIN] = uint32(mine)
    cuda.syncthreads()
    return shared[BIN], int32(shared[ABOVE]), int32(shared[IN_BIN])


load_strided, load_in_order = load_words(ITEMS, 32), load_words(ITEMS, 1)


@cuda.jit(device=True, inline="always")
def address_of_score(source_at, index):
    """Of a row's scores."""
    return uint64(source_at + uint64(4) * uint64(uint32(index)))


@cuda.jit(device=True, inline="always")
def sort_keys(key, item, rest, step):
    """The keys of scores `step` apart; 0, the least, behind the `rest` that are left: there they are the last of their equals."""
    for j in range(ITEMS):
        key[j] = sortable_bits(item[j]) if rest > int32(step * j) else uint32(0)


@cuda.jit(device=True, inline="always")
def read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, in_order):
    """A thread's keys of a tile, from shared memory where the block holds it: consecutive ones, if need be."""
    if tile - first_tile < num_held:
        for j in range(ITEMS):
            key[j] = shared[at(KEYS + j, (tile - first_tile) * int32(TILE_WORDS) + lane * int32(ITEMS) + (lane >> int32(2)))]
    elif in_order:
        first = int32(tile * int32(TILE) + lane * int32(ITEMS))
        rest = int32(candidates - first)
        sort_keys(key, load_in_order(address_of_score(source_at, first), rest), rest, 1)
    else:
        first = int32(tile * int32(TILE) + lane)
        rest = int32(candidates - first)
        sort_keys(key, load_strided(address_of_score(source_at, first), rest), rest, 32)


@cuda.jit(device=True, inline="always")
def compare(key, low):
    """A bit per key that is above the bound, and per key that equals it."""
    above = equal = uint32(0)
    for j in range(ITEMS):
        if key[j] > low:
            above = uint32(above | uint32(1 << j))
        if key[j] == low:
            equal = uint32(equal | uint32(1 << j))
    return above, equal


@cuda.jit(device=True, inline="always")
def split(candidates, block, num_blocks, warp):
    """(first tile of the block, first tile of the warp, the one behind its last)."""
    num_tiles = uint32(candidates + int32(TILE - 1)) // uint32(TILE)
    per_block = int32(num_tiles >> uint32(cuda.popc(uint32(num_blocks - uint32(1)))))
    more = int32(num_tiles & uint32(num_blocks - uint32(1)))            # the first so many blocks have a tile more
    first_tile = int32(int32(block) * per_block + min(int32(block), more))
    if int32(block) < more:
        per_block = int32(per_block + int32(1))
    more = per_block & int32(NUM_WARPS - 1)
    per_warp = int32(per_block // int32(NUM_WARPS))
    warp_tile = int32(first_tile + warp * per_warp + min(warp, more))
    return first_tile, warp_tile, int32(warp_tile + per_warp + (int32(1) if warp < more else int32(0)))


@cuda.jit(device=True, inline="always")
def gather(key, shared, base, source_at, candidates, first_tile, warp_tile, warp_end, num_held, low, span, chosen, inside, block,
           num_blocks, tid, lane, warp):
    """Puts the keys low ... low + span of all blocks, those `inside` the chosen bin, in every block's list.

    Returns (the first place of this block's own, how many they are). Counts each warp's keys above them on the way.
    """
    count = int32(0)
    if num_blocks == uint32(1):
        count = inside if lane == int32(0) else int32(0)
    elif lane < int32(num_blocks):
        count = int32(shared[at(FINE_ROWS, uint32(lane * int32(FINE_PITCH)) + (chosen & uint32(FINE - 1)))])
    list_own = cuda.shfl_sync(0xFFFFFFFF, count, block)
    list_first = warp_sum(count if lane < int32(block) else int32(0))
    if tid == uint32(0):
        mbarrier_arrive_expect_bytes(uint32(base + uint32(4 * LIST_BARRIER)), uint32(4) * uint32(inside - list_own))
    num_above, high = int32(0), uint32(low + span)
    tile = warp_tile
    while tile < warp_end:
        read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, False)
        mine = int32(0)
        for j in range(ITEMS):
            is_above = int32(key[j] > high)
            num_above = int32(num_above + is_above)
            mine = int32(mine + int32(key[j] >= low) - is_above)
        running = warp_running_sum(mine, lane)
        to = int32(0)
        if lane == int32(31):
            to = int32(cuda.atomic.add(shared, GATHERED, uint32(running)))
        to = int32(list_first + cuda.shfl_sync(0xFFFFFFFF, to, 31) + running - mine)
        for j in range(ITEMS):
            if key[j] - low <= span:
                shared[at(LIST, to)] = key[j]
                shared[at(OWNERS, to)] = uint32(warp)
                to = int32(to + int32(1))
        tile = int32(tile + int32(1))
    num_above = warp_sum(num_above)
    if lane == int32(0):
        shared[at(WARP_COUNTS, warp)] = uint32(num_above)
    cuda.syncthreads()
    to_block = uint32(warp) & uint32(num_blocks - uint32(1))
    log_blocks = uint32(cuda.popc(uint32(num_blocks - uint32(1))))
    i = uint32(((uint32(warp) >> log_blocks) << uint32(5)) + uint32(lane))
    while to_block != block and i < uint32(list_own):
        entry = uint32(uint32(LIST + list_first) + i)
        store_cluster_u32(address_of(base, 0, 4, entry), to_block, shared[entry], uint32(base + uint32(4 * LIST_BARRIER)))
        i = uint32(i + (uint32(THREADS) >> log_blocks))
    mbarrier_wait(uint32(base + uint32(4 * LIST_BARRIER)), uint32(0))
    return list_first, list_own


@cuda.jit(device=True, inline="always")
def counts_before(shared, base, block, num_blocks, lane, warp):
    """Keys (above the bound, at it) of the warps and blocks before this warp."""
    cuda.syncthreads()
    if warp == 0:                             # a lane per warp
        num_above = int32(shared[at(WARP_COUNTS, lane)])
        num_equal = int32(shared[at(WARP_COUNTS + 32, lane)])
        above = warp_running_sum(num_above, lane)
        equal = warp_running_sum(num_equal, lane)
        num_above = int32(above - num_above)
        num_equal = int32(equal - num_equal)
        above = cuda.shfl_sync(0xFFFFFFFF, above, 31)
        equal = cuda.shfl_sync(0xFFFFFFFF, equal, 31)
        other = int32(lane & int32(MAX_BLOCKS - 1))
        barrier = uint32(base + uint32(4 * COUNTS_BARRIER))
        if num_blocks > uint32(1) and other < int32(num_blocks):
            store_cluster_u32(address_of(base, 4 * BLOCK_COUNTS, 4, uint32(uint32(lane - other) + block)), uint32(other),
                              uint32(above if lane == other else equal), barrier)
        if num_blocks > uint32(1):
            mbarrier_wait(barrier, uint32(0))
        theirs = int32(0)
        if other < int32(block):
            theirs = int32(shared[at(BLOCK_COUNTS, lane)])
        shared[at(WARP_COUNTS, lane)] = uint32(num_above + warp_sum(theirs if lane == other else int32(0)))
        shared[at(WARP_COUNTS + 32, lane)] = uint32(num_equal + warp_sum(int32(0) if lane == other else theirs))
    cuda.syncthreads()
    return int32(shared[at(WARP_COUNTS, warp)]), int32(shared[at(WARP_COUNTS + 32, warp)])


def _select_rows_of_clusters(bits, row_candidates, offsets, lengths, causal, kpool, width, out, out_scores, with_scores, reach,
                             num_held):
    """out[token] = positions of the min(top_k, v) best scores of that row, ascending, then -1.

    A cluster per row, its blocks on consecutive pieces of it, the warps of a block on consecutive pieces of that. A block holds up
    to `num_held` tiles in shared memory. Rows of more than `reach` candidates are left to others. Where no kernel has counted the
    rows' candidates before, `row_candidates` is empty.
    """
    shared = cuda.shared.array(0, uint32)
    key = cuda.local.array(ITEMS, uint32)
    base = shared_address(shared)
    tid = uint32(cuda.threadIdx.x)
    lane = int32(tid & uint32(31))
    warp = cuda.shfl_sync(0xFFFFFFFF, int32(tid >> uint32(5)), 0)       # so that the compiler, too, knows it to be one per warp
    token, block, num_blocks = cluster_id(), cluster_rank(), cluster_size()
    if tid < uint32(NUM_BARRIERS):
        barrier = address_of(base, 4 * BARRIERS, 8, tid)
        mbarrier_init(barrier, uint32(1))
        fence_mbarrier_init()
        words = uint32(FINE) if tid & uint32(1) else uint32(COARSE)
        if tid == uint32(NUM_BARRIERS - 1):
            words = uint32(2)
        if tid != uint32(NUM_BARRIERS - 2):   # how long the list is turns out later
            mbarrier_arrive_expect_bytes(barrier, uint32(4) * words * num_blocks)
    if row_candidates.shape[0] > 0:
        candidates = cuda.shfl_sync(0xFFFFFFFF, row_candidates[token], 0)
    else:
        candidates = find_candidates(offsets, lengths, int64(token), causal, kpool, width)
    if candidates > reach:
        return
    top_k = int32(out.shape[1])
    source = bits[token]
    source_at = global_address(source)

    if candidates <= top_k:
        slot = int32(block * uint32(THREADS) + tid)
        while slot < top_k:
            exists = slot < candidates
            out[token, uint32(slot)] = slot if exists else int32(-1)
            if with_scores != 0:
                out_scores[token, uint32(slot)] = source[uint32(slot)] if exists else MINUS_INF_BITS
            slot = int32(slot + int32(num_blocks * uint32(THREADS)))
        return

    cluster_arrive()                          # the barriers are there
    first_tile, warp_tile, warp_end = split(candidates, block, num_blocks, warp)

    low, missing, digit, shift = uint32(0), top_k, int32(0), uint32(32 - DIGIT_BITS)
    first = int32(warp_tile * int32(TILE) + lane)
    item = load_strided(address_of_score(source_at, first), int32(candidates - first))
    i = tid
    while i < uint32(NUM_ZEROED):
        shared[i] = uint32(0)
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    tile = warp_tile
    while tile < warp_end:
        sort_keys(key, item, int32(candidates - first), 32)
        first = int32(first + int32(TILE))
        if tile + int32(1) < warp_end:
            item = load_strided(address_of_score(source_at, first), int32(candidates - first))
        if tile - first_tile < num_held:
            for j in range(ITEMS):
                shared[at(KEYS + 33 * j, (tile - first_tile) * int32(TILE_WORDS) + lane)] = key[j]
        for j in range(ITEMS):
            cuda.atomic.add(shared, at(HISTOGRAMS, key[j] >> shift), uint32(1))
        tile = int32(tile + int32(1))
    cluster_wait()
    list_first = list_own = list_length = int32(0)
    alone = False
    while True:
        cuda.syncthreads()
        chosen, above, inside = choose_bin(shared, base, digit, missing, alone or num_blocks == uint32(1), block, num_blocks,
                                           tid, warp)
        low = uint32(low + (chosen << shift))
        missing = int32(missing - above)
        if missing == inside or shift == uint32(0):
            break
        span = uint32((uint32(1) << shift) - uint32(1))
        shift = uint32(max(int32(shift) - int32(DIGIT_BITS), int32(0)))
        digit = int32(digit + int32(1))
        if not alone and inside <= int32(CAPACITY):
            alone = True
            list_length = inside
            list_first, list_own = gather(key, shared, base, source_at, candidates, first_tile, warp_tile, warp_end, num_held, low,
                                          span, chosen, inside, block, num_blocks, tid, lane, warp)
        histogram = uint32(HISTOGRAMS + NUM_BINS * digit)
        if alone:
            i = tid
            while i < uint32(list_length):
                offset = uint32(shared[at(LIST, i)] - low)
                if offset <= span:
                    cuda.atomic.add(shared, histogram + (offset >> shift), uint32(1))
                i = uint32(i + uint32(THREADS))
        else:
            tile = warp_tile
            while tile < warp_end:
                read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, False)
                for j in range(ITEMS):
                    offset = uint32(key[j] - low)
                    if offset <= span:
                        cuda.atomic.add(shared, histogram + (offset >> shift), uint32(1))
                tile = int32(tile + int32(1))

    # How many keys are above the bound, and at it: of the warps and blocks before this one.
    if alone:
        i = tid
        while i < uint32(list_own):
            entry = uint32(uint32(list_first) + i)
            if shared[at(LIST, entry)] > low:
                cuda.atomic.add(shared, at(WARP_COUNTS, shared[at(OWNERS, entry)]), uint32(1))
            elif shared[at(LIST, entry)] == low:
                cuda.atomic.add(shared, at(WARP_COUNTS + 32, shared[at(OWNERS, entry)]), uint32(1))
            i = uint32(i + uint32(THREADS))
    else:
        counts = int32(0)
        tile = warp_tile
        while tile < warp_end:
            read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, False)
            above, equal = compare(key, low)
            counts = int32(counts + int32(cuda.popc(above)) + int32(int32(cuda.popc(equal)) << int32(16)))
            tile = int32(tile + int32(1))
        counts = warp_sum(counts)
        if lane == 0:
            shared[at(WARP_COUNTS, warp)] = uint32(counts & int32(0xFFFF))
            shared[at(WARP_COUNTS + 32, warp)] = uint32(uint32(counts) >> uint32(16))
    num_above, num_equal = counts_before(shared, base, block, num_blocks, lane, warp)

    tile = warp_tile
    while tile < warp_end:
        read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, True)
        above, equal = compare(key, low)
        counts = int32(int32(cuda.popc(above)) + int32(int32(cuda.popc(equal)) << int32(16)))
        running = warp_running_sum(counts, lane)
        before = int32(running - counts)
        my_above = int32(num_above + (before & int32(0xFFFF)))
        my_equal = int32(num_equal + (before >> int32(16)))
        reached = uint32(above | equal)
        while reached != uint32(0):
            bit = uint32(reached & uint32(uint32(0) - reached))
            reached = uint32(reached ^ bit)
            is_above = above & bit != uint32(0)
            if is_above or my_equal < missing:
                slot = uint32(my_above + min(my_equal, missing))
                position = uint32(uint32(tile * int32(TILE) + lane * int32(ITEMS)) + lowest_bit(bit))
                out[token, slot] = int32(position)
                if with_scores != 0:
                    out_scores[token, slot] = source[position]
            if is_above:
                my_above = int32(my_above + int32(1))
            else:
                my_equal = int32(my_equal + int32(1))
        counts = cuda.shfl_sync(0xFFFFFFFF, running, 31)
        num_above = int32(num_above + (counts & int32(0xFFFF)))
        num_equal = int32(num_equal + (counts >> int32(16)))
        tile = int32(tile + int32(1))


SELECT_ROWS_OF_CLUSTERS = Kernel(
    _select_rows_of_clusters,
    (types.Array(types.uint32, 2, "C"), SELECT_SIGNATURE[1], *LENGTHS_SIGNATURE, *SELECT_SIGNATURE[4:], types.int32, types.int32),
    THREADS, blocks_per_multiprocessor=1)
