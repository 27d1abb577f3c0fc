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
from .ptx import (
    add_if_at_most,
    append_shared,
    cluster_arrive,
    cluster_id,
    cluster_rank,
    cluster_size,
    cluster_wait,
    fence_mbarrier_init,
    global_address,
    load_shared_u32,
    load_words,
    mbarrier_arrive_expect_bytes,
    mbarrier_init,
    mbarrier_wait,
    shared_address,
    sortable_bits,
    store_cluster_u32,
    warp_sum,
)
from .ptx import at as address_of
from .rows import LENGTHS_SIGNATURE, candidates_of, find_candidates
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
EVEN_PIECE = 2**16                            # up to here clusters are no slower than the sampled selection
CAPACITY = 4096                               # keys that are gathered in every block
ADDRESS_BITS = 18                             # of an address in a block's shared memory; those above them tell blocks apart

# Shared memory of a block, in 32-bit words. Zero at the start: a histogram per digit, how many keys the block has gathered, the
# row's candidates. Then the keys above and at the bound of each warp; the block's coarse bins; what all blocks send of theirs (two
# digits' in turn: a warp may still read one when the next comes), of their fine bins, of their keys above and at the bound; what a
# search has found; the keys gathered by all blocks. A barrier for everything that is sent. The keys.
HISTOGRAMS = 0
GATHERED = HISTOGRAMS + NUM_DIGITS * NUM_BINS
CANDIDATES = GATHERED + 1
NUM_ZEROED = CANDIDATES + 1
WARP_COUNTS = NUM_ZEROED
OWN_COARSE = WARP_COUNTS + 2 * 32
COARSE_ROWS = OWN_COARSE + COARSE
FINE_ROWS = COARSE_ROWS + 2 * MAX_BLOCKS * COARSE
BLOCK_COUNTS = FINE_ROWS + MAX_BLOCKS * FINE_PITCH
BIN, ABOVE, IN_BIN = range(BLOCK_COUNTS + 2 * MAX_BLOCKS, BLOCK_COUNTS + 2 * MAX_BLOCKS + 3)
LIST = IN_BIN + 1
BARRIERS = (LIST + CAPACITY + 1) // 2 * 2     # 2 words each: coarse and fine per digit, then the list's and the counts'
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


def longest_row(num_blocks: int) -> int:
    """Candidates of the longest row that a cluster of so many blocks takes where another selection can, too.

    Only pairs and threes leave rows: of a million candidates they would take twice as long. A second launch is 3 us, which is
    little for the 31 to 66 rows that an H200 gives to them. For those of more blocks and of one it is over 5 % of the whole
    operator on short rows, and what long ones lose is little beside their scores.
    """
    return num_blocks * (EVEN_PIECE if num_blocks in (2, 3) else LONGEST_PIECE)


def tiles_held(width: int, num_blocks: int, shared_bytes_limit: int) -> int:
    """Tiles that a block keeps in shared memory: its piece of a row of `width` candidates, or as much of it as fits."""
    num_tiles = -(-width // TILE)
    return min(-(-num_tiles // num_blocks), (shared_bytes_limit - shared_bytes(0)) // (4 * TILE_WORDS))


def shared_bytes(num_held: int) -> int:
    """Dynamic shared memory of a block that keeps so many tiles."""
    return 4 * (KEYS + TILE_WORDS * num_held)


@cuda.jit(device=True, inline="always")
def lane_of_entry(above, mine, missing):
    """The lane in whose `mine` entries, of which `above` are ahead, the `missing`-th lies."""
    return int32(cuda.ffs(cuda.ballot_sync(0xFFFFFFFF, above < missing and missing <= above + mine)) - 1)


@cuda.jit(device=True, inline="always")
def sum_over_blocks(shared, first, pitch, num_blocks):
    """Sum of a word of every block's, `pitch` apart. Four at a time are under way; what is behind the last is left out."""
    total = int32(0)
    other = uint32(0)
    while other < num_blocks:
        for j in range(4):
            word = int32(shared[uint32(first + other * uint32(pitch)) + uint32(j * pitch)])
            total = int32(total + (word if uint32(other + uint32(j)) < num_blocks else int32(0)))
        other = uint32(other + uint32(4))
    return total


@cuda.jit(device=True, inline="always")
def choose_bin(shared, base, digit, missing, alone, block, num_blocks, tid, warp):
    """The bin, from the top, in which the `missing`-th entry of a histogram lies: (bin, entries above it, in it).

    The histogram is the block's own where it is `alone`, else the sum of all blocks': they send their coarse bins to all of them,
    then the fine ones of the chosen, a warp to each block. The first warp finds the bin; all threads get it.
    """
    lane = uint32(tid & uint32(31))
    histogram = uint32(HISTOGRAMS + NUM_BINS * digit)
    for first in range(0, COARSE, NUM_WARPS):
        pair = uint32(histogram + uint32(FINE * first) + uint32(2) * tid)
        mine = warp_sum(int32(shared[pair] + shared[pair + uint32(1)]))
        if lane == uint32(0):
            shared[at(OWN_COARSE + first, warp)] = uint32(mine)
    cuda.syncthreads()
    if uint32(warp) < (uint32(1) if alone else num_blocks):
        barrier = address_of(base, 4 * BARRIERS, 16, uint32(digit))
        top = uint32(uint32(COARSE - 1) - lane)               # lane 0 has the highest bin
        mine = int32(shared[at(OWN_COARSE, top)])
        if not alone:
            column = uint32(uint32(uint32(digit & int32(1)) * uint32(MAX_BLOCKS * COARSE)) + top)
            store_cluster_u32(address_of(base, 4 * COARSE_ROWS, 4, uint32(column + block * uint32(COARSE))), uint32(warp),
                              uint32(mine), barrier)
            mbarrier_wait(barrier, uint32(0))
            mine = sum_over_blocks(shared, at(COARSE_ROWS, column), COARSE, num_blocks)
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
            store_cluster_u32(to, uint32(warp), uint32(mine), barrier)
            store_cluster_u32(uint32(to - uint32(4)), uint32(warp), uint32(below), barrier)
        if warp == 0:
            if not alone:
                mbarrier_wait(barrier, uint32(0))
                mine = sum_over_blocks(shared, at(FINE_ROWS, top), FINE_PITCH, num_blocks)
                below = sum_over_blocks(shared, at(FINE_ROWS - 1, top), FINE_PITCH, num_blocks)
            both = int32(mine + below)
            above = int32(above + warp_running_sum(both, lane) - both)
            if above < missing and missing <= above + both:   # one lane
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
    """(first tile of the block, how many it has, first tile of the warp, the one behind its last)."""
    num_tiles = uint32(uint32(candidates + int32(TILE - 1)) // uint32(TILE))
    per_block = uint32(uint32(num_tiles + uint32(num_blocks - uint32(1))) // num_blocks)
    first_tile = min(uint32(block * per_block), num_tiles)
    end_tile = min(uint32(first_tile + per_block), num_tiles)
    per_warp = uint32(uint32(per_block + uint32(NUM_WARPS - 1)) // uint32(NUM_WARPS))
    warp_tile = min(uint32(first_tile + uint32(warp) * per_warp), end_tile)
    return int32(first_tile), int32(end_tile - first_tile), int32(warp_tile), int32(min(uint32(warp_tile + per_warp), end_tile))


@cuda.jit(device=True, inline="always")
def gather(key, shared, base, source_at, candidates, first_tile, warp_tile, warp_end, num_held, is_held, low, span, chosen, inside,
           block, num_blocks, tid, lane, warp):
    """Puts the keys low ... low + span of all blocks, those `inside` the chosen bin, in every block's list.

    Where the block holds all of its piece, each warp notes which of its keys are at least `low`, over those that it has read: the
    key's place in the warp's piece and, 16 bits up, a fourth of its address in the list, or 0 for a key above. Returns how many.
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
    notes = address_of(base, 4 * KEYS, 4 * TILE_WORDS, uint32(warp_tile - first_tile))
    note = notes
    at_least_low = uint32(uint32(0xFFFFFFFF) - low)           # what a key is more than `low`, if it is
    tile = warp_tile
    while tile < warp_end:
        read_tile(key, shared, source_at, tile, first_tile, num_held, candidates, lane, False)
        counts = uint32(0)                    # keys that are at least `low`, and 16 bits up those of them in the bin
        for j in range(ITEMS):
            key[j] = uint32(key[j] - low)
            counts = add_if_at_most(counts, key[j], at_least_low, uint32(1))
            counts = add_if_at_most(counts, key[j], span, uint32(1 << 16))
        mine = int32(counts)
        running = warp_running_sum(mine, lane)
        to = int32(0)
        if lane == int32(31):
            to = int32(cuda.atomic.add(shared, GATHERED, uint32(running >> int32(16))))
        mine = int32(running - mine)
        to = int32(list_first + cuda.shfl_sync(0xFFFFFFFF, to, 31) + (mine >> int32(16)))
        listed = address_of(base, 4 * LIST, 4, uint32(to))
        my_note = uint32(note + uint32(uint32(4) * uint32(mine & int32(0xFFFF))))
        place = uint32((tile - warp_tile) * int32(TILE) + lane * int32(ITEMS))
        cuda.syncwarp()                       # the warp's keys have been read
        if is_held:
            for j in range(ITEMS):
                noted = add_if_at_most(uint32(place + uint32(j)), key[j], span, uint32(listed << uint32(14)))
                my_note = append_shared(my_note, noted, key[j], at_least_low)
                listed = append_shared(listed, uint32(key[j] + low), key[j], span)
        else:
            for j in range(ITEMS):
                listed = append_shared(listed, uint32(key[j] + low), key[j], span)
        note = uint32(note + uint32(uint32(4) * uint32(cuda.shfl_sync(0xFFFFFFFF, running, 31) & int32(0xFFFF))))
        tile = int32(tile + int32(1))
    cuda.syncthreads()
    round_of_warp = uint32(uint32(warp) // num_blocks)                  # the warps take turns to send to a block
    to_block = uint32(uint32(warp) - uint32(round_of_warp * num_blocks))
    num_rounds = uint32(uint32(NUM_WARPS) // num_blocks)
    i = uint32(uint32(round_of_warp << uint32(5)) + uint32(lane))
    while round_of_warp < num_rounds and to_block != block and i < uint32(list_own):
        entry = uint32(uint32(LIST + list_first) + i)
        store_cluster_u32(address_of(base, 0, 4, entry), to_block, shared[entry], uint32(base + uint32(4 * LIST_BARRIER)))
        i = uint32(i + uint32(num_rounds << uint32(5)))
    mbarrier_wait(uint32(base + uint32(4 * LIST_BARRIER)), uint32(0))
    return int32(uint32(note - notes) >> uint32(2))


@cuda.jit(device=True, inline="always")
def read_note(shared, base, first, i, count, low):
    """(place in the warp's piece, whether that key is above the bound, whether it is at it) of the `i`-th note, if there is one.

    A note has the low bits of an address; those from ADDRESS_BITS on, the block's own in the cluster, are those of `base`.
    """
    place, key = uint32(0), uint32(0)
    exists = i < count
    if exists:
        note = shared[at(KEYS, first + i)]
        place = note & uint32(0xFFFF)
        key = uint32(0xFFFFFFFF)
        if note > uint32(0xFFFF):
            window = uint32(base & uint32(2**32 - 2**ADDRESS_BITS))
            key = load_shared_u32(uint32(window | uint32(uint32(note >> uint32(16)) << uint32(2))))
    return place, exists and key > low, exists and key == low


@cuda.jit(device=True, inline="always")
def counts_before(shared, base, block, num_blocks, lane, warp):
    """Keys (above the bound, at it) of the warps and blocks before this warp."""
    cuda.syncthreads()
    above, equal = int32(shared[at(WARP_COUNTS, lane)]), int32(shared[at(WARP_COUNTS + 32, lane)])          # a lane per warp
    num_above = warp_sum(above if lane < warp else int32(0))
    num_equal = warp_sum(equal if lane < warp else int32(0))
    if num_blocks > uint32(1):
        other = int32(lane & int32(MAX_BLOCKS - 1))           # lanes from MAX_BLOCKS on are for the keys at the bound
        barrier = uint32(base + uint32(4 * COUNTS_BARRIER))
        if warp == 0:
            above, equal = warp_sum(above), warp_sum(equal)
            if other < int32(num_blocks):
                store_cluster_u32(address_of(base, 4 * BLOCK_COUNTS, 4, uint32(uint32(lane - other) + block)), uint32(other),
                                  uint32(above if lane == other else equal), barrier)
        mbarrier_wait(barrier, uint32(0))
        theirs = int32(0)
        if other < int32(block):
            theirs = int32(shared[at(BLOCK_COUNTS, lane)])
        num_above = int32(num_above + warp_sum(theirs if lane == other else int32(0)))
        num_equal = int32(num_equal + warp_sum(int32(0) if lane == other else theirs))
    return num_above, num_equal


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
    barrier = address_of(base, 4 * BARRIERS, 8, tid)
    if tid < uint32(NUM_BARRIERS):
        mbarrier_init(barrier, uint32(1))
        fence_mbarrier_init()
    # What the thread's request has is on its way while memory is zeroed.
    num_requests = uint32(lengths.shape[0])
    offset = end = cached = int32(0)
    if tid < num_requests:
        offset, end, cached = offsets[tid], offsets[tid + uint32(1)], lengths[tid]
    i = tid
    while i < uint32(NUM_ZEROED):
        shared[i] = uint32(0)
        i = uint32(i + uint32(THREADS))
    cuda.syncthreads()
    if row_candidates.shape[0] > 0:
        if tid == uint32(0):
            shared[CANDIDATES] = uint32(row_candidates[token])
    elif reach == int32(width):
        request = tid
        while request < num_requests:
            if offset <= int32(token) and int32(token) < end:             # one request, if offsets are true
                cuda.atomic.max(shared, CANDIDATES, uint32(candidates_of(offset, end, cached, token, causal, kpool, width)))
            request = uint32(request + uint32(THREADS))
            if request < num_requests:
                offset, end, cached = offsets[request], offsets[request + uint32(1)], lengths[request]
    if tid < uint32(NUM_BARRIERS) and tid != uint32(NUM_BARRIERS - 2):      # how long the list is turns out later
        words = uint32(FINE) if tid & uint32(1) else uint32(COARSE)
        if tid == uint32(NUM_BARRIERS - 1):
            words = uint32(2)
        mbarrier_arrive_expect_bytes(barrier, uint32(4) * words * num_blocks)
    cuda.syncthreads()
    candidates = cuda.shfl_sync(0xFFFFFFFF, int32(shared[CANDIDATES]), 0)       # one value, as the compiler, too, shall know
    if row_candidates.shape[0] == 0 and reach < int32(width):
        # found as the other selection finds them: whatever offsets hold, one of the two takes the row
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
    first_tile, num_tiles, warp_tile, warp_end = split(candidates, block, num_blocks, warp)
    is_held = num_tiles <= num_held

    low, missing, digit, shift = uint32(0), top_k, int32(0), uint32(32 - DIGIT_BITS)
    first = int32(warp_tile * int32(TILE) + lane)
    item = load_strided(address_of_score(source_at, first), int32(candidates - first))
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
    list_length = num_notes = int32(0)
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
            num_notes = gather(key, shared, base, source_at, candidates, first_tile, warp_tile, warp_end, num_held, is_held, low,
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

    # How many keys are above the bound, and at it: of the warps and blocks before this one. Then each writes its own behind them.
    has_notes = alone and is_held
    first = int32((warp_tile - first_tile) * int32(TILE_WORDS))
    counts = i = int32(0)                     # above, and 16 bits up at the bound
    if has_notes:
        while i < num_notes:
            _, is_above, is_equal = read_note(shared, base, first, int32(i + lane), num_notes, low)
            counts = int32(counts + int32(is_above) + int32(int32(is_equal) << int32(16)))
            i = int32(i + int32(32))
    else:
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

    if has_notes:
        i = int32(0)
        before_me = uint32(uint32(uint32(1) << uint32(lane)) - uint32(1))
        while i < num_notes:
            place, is_above, is_equal = read_note(shared, base, first, int32(i + lane), num_notes, low)
            above = uint32(cuda.ballot_sync(0xFFFFFFFF, is_above))
            equal = uint32(cuda.ballot_sync(0xFFFFFFFF, is_equal))
            my_equal = int32(num_equal + int32(cuda.popc(equal & before_me)))
            if is_above or (is_equal and my_equal < missing):
                slot = uint32(num_above + int32(cuda.popc(above & before_me)) + min(my_equal, missing))
                position = uint32(uint32(warp_tile * int32(TILE)) + place)
                out[token, slot] = int32(position)
                if with_scores != 0:
                    out_scores[token, slot] = source[position]
            num_above = int32(num_above + int32(cuda.popc(above)))
            num_equal = int32(num_equal + int32(cuda.popc(equal)))
            i = int32(i + int32(32))
        return
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
