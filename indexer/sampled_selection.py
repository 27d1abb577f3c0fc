"""Exact selection that reads a row once: a sample gives a bound of the k-th best score, the row is streamed past it.

What passes the bound, a few more scores than are wanted, goes to shared memory, where a radix search finds the k-th best of it.
Several blocks may share a row: each streams a piece, the last one to finish goes on with what all of them found. Nothing is waited
for, so the blocks need not run at the same time.

The bound only saves time. Score and position make one total order for it too, so no number of ties gets past it; and if it was too
high or too low after all, the search runs over the row itself. Rows of up to `DIRECT` candidates need no sample.

It uses warp collectives, which numba's simulator lacks; there, and for larger `top_k`, `selection.SELECT_ROWS` does the same.
"""
from __future__ import annotations

import math

from numba import cuda, float32, int32, int64, uint32
from numba.cuda import types

from .chunks import chunk_rows
from .device import SIMULATED, Kernel
from .rows import LENGTHS_SIGNATURE, find_candidates
from .selection import MINUS_INF_BITS, SELECT_SIGNATURE, sortable

THREADS = 512
NUM_WARPS = THREADS // 32
ITEMS = 16                                    # scores that a thread streams at a time
GROUP = 8                                     # keys of a thread that are on their way at a time
CAPACITY = 16 * THREADS                       # keys that a block holds
DIRECT = CAPACITY
WARP_TILE = 32 * ITEMS                        # consecutive scores that a warp streams at a time
FIRST_SAMPLE = 2048                           # scores, in lines of 32; doubled where more are needed
DIGIT_BITS = 11                               # of the radix search
NUM_BINS = 1 << DIGIT_BITS
BINS_PER_THREAD = NUM_BINS // THREADS
PLACE_BITS = 22                               # a place is LAST_PLACE - position: lower positions have higher places
LAST_PLACE = uint32((1 << PLACE_BITS) - 1)
MAX_TOP_K = CAPACITY // 2
STEP = int32(THREADS)
INF_BITS = uint32(0x7F800000)
NAN_BITS = uint32(0x7FFFFFFF)                 # of any other sign or payload counts as this one

# Shared memory of a block, in 32-bit words: keys and positions of what passed the bound, the histogram, a sum per warp, single
# results, and one bit per candidate of a window of the row, in lines of 32 words.
KEYS, POSITIONS = 0, CAPACITY
HISTOGRAM = POSITIONS + CAPACITY
WARP_SUMS = HISTOGRAM + NUM_BINS
BIN, ABOVE, IN_BIN, COUNT, HIGHEST, TICKET = range(WARP_SUMS + 32, WARP_SUMS + 38)
BITMAP = WARP_SUMS + 40
WINDOW = 2**17                                # a multiple of CAPACITY


def shared_bytes(width: int) -> int:
    """Dynamic shared memory for rows of up to `width` candidates."""
    return 4 * (BITMAP + 32 * -(-min(width, WINDOW) // 1024))


def supports(width: int, top_k: int, shared_bytes_limit: int) -> bool:
    """Whether the kernel takes rows of `width` candidates on a device with that much shared memory per block."""
    return not SIMULATED and top_k <= MAX_TOP_K and width <= LAST_PLACE and shared_bytes(width) <= shared_bytes_limit


def pieces_per_row(num_rows: int, width: int, num_multiprocessors: int) -> int:
    """Blocks that share a row: as many as fill the GPU once, each with at least half of `DIRECT` candidates, at most 32."""
    return max(1, min(num_multiprocessors // num_rows, -(-width // (DIRECT // 2)), 32))


@cuda.jit(device=True, inline="always")
def at(base, index):
    """Index of a shared word, unsigned: a signed one costs a test for negative values."""
    return uint32(base) + uint32(index)


@cuda.jit(device=True, inline="always")
def warp_running_sum(value, lane):
    """Sum of `value` over the lanes up to and with this one."""
    distance = 1
    while distance < 32:
        other = cuda.shfl_up_sync(0xFFFFFFFF, value, distance)
        if lane >= distance:
            value = int32(value + other)
        distance *= 2
    return value


@cuda.jit(device=True, inline="always")
def block_running_sum(shared, value, tid):
    """Sum of `value` over the threads up to and with this one; synchronises once, and the caller before the next call."""
    lane = tid & int32(31)
    warp = tid >> int32(5)
    running = warp_running_sum(value, lane)
    if lane == 31:
        shared[at(WARP_SUMS, warp)] = uint32(running)
    cuda.syncthreads()
    of_warp = int32(0)
    if lane < NUM_WARPS:
        of_warp = int32(shared[at(WARP_SUMS, lane)])
    of_warps = warp_running_sum(of_warp, lane)
    before = cuda.shfl_sync(0xFFFFFFFF, of_warps, (warp + int32(31)) & int32(31))
    if warp > 0:
        running = int32(running + before)
    return running


@cuda.jit(device=True, inline="always")
def choose_bin(shared, missing, tid):
    """The bin, from the top, in which the `missing`-th entry of the histogram lies: BIN, entries ABOVE it and IN_BIN."""
    top = uint32(uint32(NUM_BINS - 1) - uint32(BINS_PER_THREAD) * uint32(tid))
    mine = int32(0)
    for b in range(BINS_PER_THREAD):
        mine += int32(shared[uint32(HISTOGRAM) + top - uint32(b)])
    above = block_running_sum(shared, mine, tid) - mine
    if above < missing and missing <= above + mine:
        for b in range(BINS_PER_THREAD):
            here = int32(shared[uint32(HISTOGRAM) + top - uint32(b)])
            if above < missing and missing <= above + here:
                shared[BIN] = top - uint32(b)
                shared[ABOVE] = uint32(above)
                shared[IN_BIN] = uint32(here)
            above += here
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def write_direct(shared, source, target, values, with_scores, candidates, low, missing, tid, warp):
    """Writes the positions of the keys above `low` and of the first `missing` ones that equal it, ascending.

    Key i is at position i. Per 32 of them, keys above and equals are counted, 16 bits each; a running sum tells how many of either
    are ahead.
    """
    lane = tid & int32(31)
    num_counts = (candidates + int32(31)) >> int32(5)
    lower_lanes = uint32(uint32(uint32(1) << uint32(lane)) - uint32(1))
    base = int32(warp << int32(5))
    while base < candidates:
        cuda.syncwarp()
        i = int32(base + lane)
        key = shared[at(KEYS, i)]             # behind the row: whatever is there
        exists = i < candidates
        above = uint32(cuda.popc(cuda.ballot_sync(0xFFFFFFFF, exists and key > low)))
        equal = uint32(cuda.popc(cuda.ballot_sync(0xFFFFFFFF, exists and key == low)))
        if lane == 0:
            shared[at(HISTOGRAM, base >> int32(5))] = uint32(above | (equal << uint32(16)))
        base = int32(base + STEP)
    cuda.syncthreads()
    mine = int32(0)
    if tid < num_counts:
        mine = int32(shared[at(HISTOGRAM, tid)])
    before = int32(block_running_sum(shared, mine, tid) - mine)
    if tid < num_counts:
        shared[at(HISTOGRAM, tid)] = uint32(before)
    cuda.syncthreads()
    base = int32(warp << int32(5))
    while base < candidates:
        cuda.syncwarp()
        i = int32(base + lane)
        key = shared[at(KEYS, i)]
        is_above = i < candidates and key > low
        is_equal = i < candidates and key == low
        above = uint32(cuda.ballot_sync(0xFFFFFFFF, is_above))
        equal = uint32(cuda.ballot_sync(0xFFFFFFFF, is_equal))
        ahead = shared[at(HISTOGRAM, base >> int32(5))]
        equals = int32(uint32(ahead >> uint32(16)) + uint32(cuda.popc(uint32(equal & lower_lanes))))
        if is_above or (is_equal and equals < missing):
            slot = uint32((ahead & uint32(0xFFFF)) + uint32(cuda.popc(uint32(above & lower_lanes))))
            slot = uint32(slot + uint32(min(equals, missing)))
            target[slot] = i
            if with_scores != 0:
                values[slot] = source[uint32(i)]
        base = int32(base + STEP)


@cuda.jit(device=True, inline="always")
def mark(shared, offset):
    """Sets the bit of a position, so far behind the window's first; none outside the window."""
    if offset < uint32(WINDOW):
        cuda.atomic.or_(shared, at(BITMAP, offset >> uint32(5)), uint32(uint32(1) << (offset & uint32(31))))


@cuda.jit(device=True, inline="always")
def write_marked(shared, source, target, values, with_scores, window, end, done, tid, warp):
    """Writes the positions of the window's set bits, ascending, from slot `done`; returns the slot behind them.

    A warp takes consecutive lines of the bitmap, and puts their positions in shared memory, where the keys were.
    """
    lane = tid & int32(31)
    num_lines = int32(int32(end - window + int32(1023)) >> int32(10))
    lines_per_warp = int32((num_lines + int32(NUM_WARPS - 1)) // int32(NUM_WARPS))
    first = min(int32(warp * lines_per_warp), num_lines)
    stop = min(int32(first + lines_per_warp), num_lines)
    mine = int32(0)
    line = first
    while line < stop:
        mine = int32(mine + int32(cuda.popc(shared[at(BITMAP + lane, line << int32(5))])))
        line = int32(line + int32(1))
    through = block_running_sum(shared, mine, tid)
    if tid == int32(THREADS - 1):
        shared[COUNT] = uint32(through)
    before = cuda.shfl_sync(0xFFFFFFFF, int32(through - mine), 0)       # set bits ahead of the warp's
    line = first
    while line < stop:
        index = int32(int32(line << int32(5)) + lane)
        word = shared[at(BITMAP, index)]
        ones = int32(cuda.popc(word))
        cuda.syncwarp()
        running = warp_running_sum(ones, lane)
        to = int32(before + running - ones)
        before = int32(before + cuda.shfl_sync(0xFFFFFFFF, running, 31))
        while word != uint32(0):
            shared[at(KEYS, to)] = uint32(uint32(window) + (uint32(index) << uint32(5)) + lowest_bit(word))
            word = uint32(word & uint32(word - uint32(1)))
            to = int32(to + int32(1))
        line = int32(line + int32(1))
    cuda.syncthreads()
    count = int32(shared[COUNT])
    i = tid
    while i < count:
        position = shared[at(KEYS, i)]
        slot = uint32(done + i)
        target[slot] = int32(position)
        if with_scores != 0:
            values[slot] = source[position]
        i = int32(i + STEP)
    return int32(done + count)


@cuda.jit(device=True, inline="always")
def lowest_bit(word):
    """Position of the lowest set bit of a uint32 that is not zero."""
    return uint32(uint32(cuda.ffs(word)) - uint32(1))


@cuda.jit(device=True, inline="always")
def is_selected(key, position, low, place_low):
    """Whether a key is at or above the bound: by itself, by place where it equals the bound's."""
    return key > low or (key == low and uint32(LAST_PLACE - position) >= place_low)


@cuda.jit(device=True, inline="always")
def row_and_piece(place, num_pieces):
    """What a block works on."""
    row = uint32(place) // uint32(num_pieces)
    return row, int32(uint32(place) - row * uint32(num_pieces))


@cuda.jit(device=True, inline="always")
def select_piece(source, row, out, out_scores, token, with_scores, candidates, piece, num_pieces, lists, row_state):
    """A block's part of the selection of a row: all of it, or a piece, and what follows the pieces where it is the last to finish.

    Thread t looks after keys t, t + THREADS, ... of what is searched: the row (`DIRECT` candidates or fewer), its sample, or what
    passed the bound. All is in loops that are not unrolled far, as few blocks run it more than once and code has to be fetched too.
    """
    shared = cuda.shared.array(0, uint32)
    item = cuda.local.array(ITEMS, uint32)
    tid = int32(cuda.threadIdx.x)
    lane = tid & int32(31)
    warp = cuda.shfl_sync(0xFFFFFFFF, tid >> int32(5), 0)     # so that the compiler, too, knows it to be one per warp
    top_k = int32(out.shape[1])
    wanted = min(top_k, candidates)
    if piece > 0 and candidates <= int32(DIRECT):
        return

    if candidates <= top_k:
        position = int32(tid)
        while position < candidates:
            out[token, uint32(position)] = position
            if with_scores != 0:
                out_scores[token, uint32(position)] = source[uint32(position)]
            position = int32(position + STEP)
    else:
        # What is searched: `count` keys in shared memory, with their positions; or, from_row, the row itself.
        sampled = candidates > int32(DIRECT)
        from_row = False
        count, spacing = candidates, int32(32)
        rank, slack = wanted, int32(0)        # the search ends with at most `slack` keys more than `rank`
        low, key_bits = uint32(0), int32(32)  # it still has to tell apart the keys low ... low + 2**key_bits - 1
        if sampled:
            # Five standard deviations more than the sample's share of the wanted; and a sample so large that eight fit.
            count = int32(FIRST_SAMPLE)
            share = float32(wanted) * float32(count) / float32(candidates)
            while count < int32(CAPACITY) and (share + float32(8) * math.sqrt(share) + float32(8)) * float32(candidates) > (
                    float32(0.9) * float32(CAPACITY) * float32(count)):
                count *= int32(2)
                share *= float32(2)
            rank = int32(share + float32(5) * math.sqrt(share)) + int32(8)
            slack = rank >> int32(3)
            spacing = candidates // (count >> int32(5))
        position, step = uint32(warp * spacing + lane), uint32(NUM_WARPS) * uint32(spacing)
        i = tid
        while i < count:
            rest = int32(count - i)           # key j of the group exists if j * THREADS is less
            for j in range(GROUP):
                if int32(j * THREADS) < rest:
                    item[j] = source[uint32(position + uint32(uint32(j) * step))]
            for j in range(GROUP):
                if int32(j * THREADS) < rest:
                    shared[at(KEYS + j * THREADS, i)] = sortable(item[j])
                    if sampled:
                        shared[at(POSITIONS + j * THREADS, i)] = uint32(position + uint32(uint32(j) * step))
            position = uint32(position + uint32(uint32(GROUP) * step))
            i = int32(i + int32(GROUP * THREADS))

        place_low = uint32(0)
        while True:
            # Radix search: digits of the key, then of the place, until the keys at or above the bound are few enough.
            place_low, place_bits = uint32(0), int32(PLACE_BITS)
            if candidates <= int32(DIRECT):
                place_bits = int32(0)         # equals of the bound are in order of their place already
            missing = rank
            extra = slack + int32(1)
            while extra > slack and key_bits + place_bits > int32(0):
                by_key = key_bits > int32(0)
                left = key_bits if by_key else place_bits
                shift = uint32(max(left - int32(DIGIT_BITS), int32(0)))
                span = uint32(uint32(0xFFFFFFFF) >> uint32(int32(32) - left))
                for b in range(BINS_PER_THREAD):
                    shared[at(HISTOGRAM + b * THREADS, tid)] = uint32(0)
                cuda.syncthreads()
                i = tid
                while i < count:
                    rest = int32(count - i)
                    if from_row:
                        for j in range(GROUP):
                            if int32(j * THREADS) < rest:
                                item[j] = sortable(source[at(i, j * THREADS)])
                    else:
                        for j in range(GROUP):
                            if int32(j * THREADS) < rest:
                                item[j] = shared[at(KEYS + j * THREADS, i)]
                    if by_key:
                        for j in range(GROUP):
                            if int32(j * THREADS) < rest:
                                offset = uint32(item[j] - low)
                                if offset <= span:
                                    cuda.atomic.add(shared, at(HISTOGRAM, offset >> shift), uint32(1))
                    else:
                        for j in range(GROUP):
                            if int32(j * THREADS) < rest and item[j] == low:
                                position = uint32(at(i, j * THREADS))
                                if not from_row:
                                    position = shared[at(POSITIONS + j * THREADS, i)]
                                offset = uint32(LAST_PLACE - position - place_low)
                                if offset <= span:
                                    cuda.atomic.add(shared, at(HISTOGRAM, offset >> shift), uint32(1))
                    i = int32(i + int32(GROUP * THREADS))
                cuda.syncthreads()
                choose_bin(shared, missing, tid)
                missing -= int32(shared[ABOVE])
                extra = int32(shared[IN_BIN]) - missing
                if by_key:
                    low = uint32(low + (shared[BIN] << shift))
                    key_bits = int32(shift)
                else:
                    place_low = uint32(place_low + (shared[BIN] << shift))
                    place_bits = int32(shift)
            if not sampled:
                break

            # Stream the piece past the bound (low, place_low). Behind a line of the sample there are as many more of the bound's
            # equals as it stands for.
            sampled = False
            place_low = uint32(place_low - min(place_low, uint32(spacing)))
            if tid == 0:
                shared[COUNT] = uint32(0)
                shared[HIGHEST] = uint32(0)
            cuda.syncthreads()
            num_tiles = (candidates + int32(WARP_TILE - 1)) // int32(WARP_TILE)
            tile = int32(int32(int64(num_tiles) * piece // num_pieces) + warp)
            stop_tile = int32(int64(num_tiles) * (piece + 1) // num_pieces)
            last_equal = int32(uint32(LAST_PLACE - place_low))        # the last position at which an equal of the bound passes
            while tile < stop_tile:
                first = int32(tile * int32(WARP_TILE))
                last = int32(first + int32(WARP_TILE - 1))
                start = int32(first + lane)
                whole = last < candidates
                if whole:
                    for j in range(ITEMS):
                        item[j] = source[uint32(start) + uint32(32 * j)]
                else:
                    for j in range(ITEMS):
                        item[j] = uint32(NAN_BITS)
                        if start + int32(32 * j) < candidates:
                            item[j] = source[uint32(start) + uint32(32 * j)]
                # Of the tiles only one has equals on both sides of the last that passes; in the others a score's bits tell.
                lowest = low
                if last_equal < last:
                    lowest = uint32(low + uint32(1))
                passed = uint32(0)
                if lowest > uint32(0x80000000):               # positive: from the bound to infinity
                    low_bits = min(uint32(lowest & uint32(0x7FFFFFFF)), uint32(INF_BITS + uint32(1)))
                    for j in range(ITEMS):
                        if uint32(item[j] - low_bits) < uint32(INF_BITS + uint32(1) - low_bits):
                            passed = uint32(passed | uint32(1 << j))
                elif lowest > uint32(0):                      # zero or negative: the positive ones, and from -0 to the bound
                    high_bits = min(max(uint32(lowest ^ uint32(0xFFFFFFFF)), uint32(0x80000000)), uint32(MINUS_INF_BITS))
                    for j in range(ITEMS):
                        if item[j] <= high_bits and uint32(item[j] - uint32(INF_BITS + uint32(1))) >= uint32(NAN_BITS - INF_BITS):
                            passed = uint32(passed | uint32(1 << j))
                else:
                    passed = uint32((1 << ITEMS) - 1)
                if not whole or (lowest != low and last_equal >= first):
                    for j in range(ITEMS):
                        position = int32(start + int32(32 * j))
                        if position < candidates and is_selected(sortable(item[j]), uint32(position), low, place_low):
                            passed = uint32(passed | uint32(1 << j))
                        else:
                            passed = uint32(passed & uint32(0xFFFFFFFF ^ (1 << j)))
                cuda.syncwarp()
                mine = int32(cuda.popc(passed))
                running = warp_running_sum(mine, lane)
                base = int32(0)
                if lane == 31:
                    base = int32(cuda.atomic.add(shared, COUNT, uint32(running)))
                base = cuda.shfl_sync(0xFFFFFFFF, base, 31)
                to = int32(base + running - mine)
                while passed != uint32(0) and to < int32(CAPACITY):
                    position = uint32(uint32(start) + (lowest_bit(passed) << uint32(5)))
                    shared[at(KEYS, to)] = sortable(source[position])
                    shared[at(POSITIONS, to)] = position
                    passed = uint32(passed & uint32(passed - uint32(1)))
                    to = int32(to + int32(1))
                tile = int32(tile + int32(NUM_WARPS))
            cuda.syncthreads()
            count = int32(shared[COUNT])
            if num_pieces > 1:
                # Hand over what was found; the last block to do so takes it all.
                listing, state = lists[row], row_state[row]
                if tid == 0:
                    shared[TICKET] = uint32(cuda.atomic.add(state, 0, count))
                cuda.syncthreads()
                base = int32(shared[TICKET])
                i = tid
                stop = min(count, int32(CAPACITY))
                while i < stop:
                    to = base + i
                    if to < int32(CAPACITY):
                        listing[at(KEYS, to)] = shared[at(KEYS, i)]
                        listing[at(POSITIONS, to)] = shared[at(POSITIONS, i)]
                    i = int32(i + STEP)
                cuda.threadfence()
                cuda.syncthreads()
                if tid == 0:
                    shared[TICKET] = uint32(cuda.atomic.add(state, 1, 1))
                cuda.syncthreads()
                if int32(shared[TICKET]) != num_pieces - int32(1):
                    return
                cuda.threadfence()
                count = state[0]
                cuda.syncthreads()
                if tid == 0:
                    state[0] = 0
                    state[1] = 0
                stop = min(count, int32(CAPACITY))
                i = tid
                while i < stop:
                    rest = int32(stop - i)
                    for j in range(GROUP):
                        if int32(j * THREADS) < rest:
                            item[j] = listing[at(KEYS + j * THREADS, i)]
                            item[GROUP + j] = listing[at(POSITIONS + j * THREADS, i)]
                    for j in range(GROUP):
                        if int32(j * THREADS) < rest:
                            shared[at(KEYS + j * THREADS, i)] = item[j]
                            shared[at(POSITIONS + j * THREADS, i)] = item[GROUP + j]
                    i = int32(i + int32(GROUP * THREADS))
            highest = uint32(0)
            i = tid
            stop = min(count, int32(CAPACITY))
            while i < stop:
                highest = uint32(max(highest, shared[at(KEYS, i)]))
                i = int32(i + STEP)
            cuda.atomic.max(shared, HIGHEST, highest)
            cuda.syncthreads()
            key_bits = int32(32) - int32(cuda.clz(uint32(shared[HIGHEST] - low)))
            rank, slack = wanted, int32(0)
            if count < wanted or count > int32(CAPACITY):     # the sample misled: search the row itself
                from_row, count = True, candidates
                low, key_bits = uint32(0), int32(32)
            cuda.syncthreads()

        if candidates <= int32(DIRECT):
            write_direct(shared, source, out[token], out_scores[token], with_scores, candidates, low, missing, tid, warp)
        else:
            selected = uint32(0)              # a bit per key of the thread
            if not from_row:
                bit = uint32(1)
                i = tid
                while i < count:
                    if is_selected(shared[at(KEYS, i)], shared[at(POSITIONS, i)], low, place_low):
                        selected = uint32(selected | bit)
                    bit = uint32(bit << uint32(1))
                    i = int32(i + STEP)
            window = done = int32(0)
            while window < candidates:
                end = min(int32(window + int32(WINDOW)), candidates)
                i = tid
                while i < ((end - window + int32(1023)) >> int32(10)) << int32(5):
                    shared[at(BITMAP, i)] = uint32(0)
                    i = int32(i + STEP)
                cuda.syncthreads()
                if from_row:
                    position = int32(window + tid)
                    while position < end:
                        if is_selected(sortable(source[uint32(position)]), uint32(position), low, place_low):
                            mark(shared, uint32(position - window))
                        position = int32(position + STEP)
                else:
                    bit = uint32(1)
                    i = tid
                    while i < count:
                        if selected & bit:
                            mark(shared, uint32(shared[at(POSITIONS, i)] - uint32(window)))
                        bit = uint32(bit << uint32(1))
                        i = int32(i + STEP)
                cuda.syncthreads()
                done = write_marked(shared, source, out[token], out_scores[token], with_scores, window, end, done, tid, warp)
                window = int32(window + int32(WINDOW))

    slot = int32(wanted + tid)
    while slot < top_k:
        out[token, uint32(slot)] = -1
        if with_scores != 0:
            out_scores[token, uint32(slot)] = MINUS_INF_BITS
        slot = int32(slot + STEP)


def _select_rows_sampled(bits, row_candidates, chunk, packing, out, out_scores, with_scores, reach, num_pieces, lists,
                         row_state):
    """out[token] = positions of the min(top_k, v) best scores of row ``token - start``, ascending, then -1.

    Place ``row * num_pieces + piece`` is that piece of a row; the blocks take the places in turn. What they take is found anew each
    time, as registers are scarce. Rows of up to `reach` candidates are left to others.
    """
    place = int32(cuda.blockIdx.x)
    while True:
        start, stop, pitch = chunk_rows(chunk, packing)
        row, piece = row_and_piece(place, num_pieces)
        token = start + int64(row)
        if cuda.shfl_sync(0xFFFFFFFF, int32(token >= stop), 0):
            break
        candidates = min(row_candidates[token], int32(pitch))
        if candidates > reach:
            select_piece(bits[int64(row) * pitch:(int64(row) + 1) * pitch], row, out, out_scores, token, with_scores, candidates,
                         piece, num_pieces, lists, row_state)
        if packing.shape[0] == 0:             # there is a block for every place
            break
        cuda.syncthreads()
        place = int32(place + int32(cuda.gridDim.x))


def _select_found_rows(bits, offsets, lengths, causal, kpool, chunk, packing, out, out_scores, with_scores, reach, num_pieces,
                       lists, row_state):
    """The same where no kernel has counted the rows' candidates before."""
    place = int32(cuda.blockIdx.x)
    while True:
        start, stop, pitch = chunk_rows(chunk, packing)
        row, piece = row_and_piece(place, num_pieces)
        token = start + int64(row)
        if cuda.shfl_sync(0xFFFFFFFF, int32(token >= stop), 0):
            break
        candidates = find_candidates(offsets, lengths, token, causal, kpool, pitch)
        if candidates > reach:
            select_piece(bits[int64(row) * pitch:(int64(row) + 1) * pitch], row, out, out_scores, token, with_scores, candidates,
                         piece, num_pieces, lists, row_state)
        if packing.shape[0] == 0:             # there is a block for every place
            break
        cuda.syncthreads()
        place = int32(place + int32(cuda.gridDim.x))


_PIECES = (
    types.int32,                              # reach, -1 for none
    types.int32,                              # num_pieces
    types.Array(types.uint32, 2, "C"),        # lists [rows, 2 * CAPACITY]: what the pieces of a row hand over; [1, 1] for one piece
    types.Array(types.int32, 2, "C"),         # row_state [rows, 2], zero before and after: entries in the list, pieces done
)
SELECT_ROWS_SAMPLED = Kernel(_select_rows_sampled, (*SELECT_SIGNATURE, *_PIECES), THREADS, blocks_per_multiprocessor=2)
SELECT_FOUND_ROWS = Kernel(_select_found_rows, (SELECT_SIGNATURE[0], *LENGTHS_SIGNATURE[:-1], *SELECT_SIGNATURE[2:], *_PIECES),
                           THREADS, blocks_per_multiprocessor=2)
