"""Exact selection from float32 score rows, on any CUDA GPU: radix search for the k-th best, then one pass in position order.

A score's bits are mapped to an unsigned integer of the same order (`sortable`). Digit by digit, from the top, a histogram tells
which digit the k-th best score has, and how many of its equals are still wanted. Nothing is collected on the way, so no number of
ties can overflow anything. Scores at or past a row's candidates are never read.
"""
from __future__ import annotations

from numba import cuda, int32, int64, uint32, uint64
from numba.cuda import types

from .chunks import CHUNK, PACKING, chunk_rows
from .device import SIMULATED, Kernel

MINUS_INF_BITS = uint32(0xFF800000)
RADIX_BITS = 4 if SIMULATED else 8            # of a digit; a block has one thread per value of a digit
NUM_BINS = 1 << RADIX_BITS
NUM_DIGITS = 32 // RADIX_BITS
THREADS = NUM_BINS
ITEMS = 2 if SIMULATED else 8                 # consecutive scores of one thread in the pass that writes positions
EMPTY_RANK = uint64(0xFFFFFFFFFFFFFFFF)       # behind every key: no position is 2**32 - 1


@cuda.jit(device=True, inline="always")
def sortable(bits):
    """uint32 that orders as the scores do: NaN lowest (0), then -inf ... +inf, both zeros equal. `bits` is a score's uint32."""
    key = bits ^ uint32(0xFFFFFFFF) if bits >> uint32(31) else bits | uint32(0x80000000)
    if bits == uint32(0x80000000):
        key = uint32(0x80000000)
    if bits & uint32(0x7FFFFFFF) > uint32(0x7F800000):
        key = uint32(0)
    return uint32(key)


@cuda.jit(device=True, inline="always")
def inclusive_scan(values, tid):
    """Replaces shared int32 values[0 ... THREADS - 1] by their running sums; called by the whole block, synchronised at its end."""
    distance = 1
    while distance < THREADS:
        cuda.syncthreads()
        value = values[tid]
        if tid >= distance:
            value += values[tid - distance]
        cuda.syncthreads()
        values[tid] = value
        distance *= 2
    cuda.syncthreads()


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n, for n of at least 1."""
    return 1 << (n - 1).bit_length()


SELECT_SIGNATURE = (
    types.Array(types.uint32, 1, "C"),        # bits: scores, a row at every `pitch`
    types.Array(types.int32, 1, "C"),         # row_candidates [T]
    CHUNK, PACKING,                           # the rows of `bits`
    types.Array(types.int32, 2, "C"),         # out [T, top_k]
    types.Array(types.uint32, 2, "C"),        # out_scores [T, top_k], as bits; [1, 1] where none are wanted
    types.int32,                              # with_scores
)
RANK_SIGNATURE = (*SELECT_SIGNATURE, types.Array(types.uint64, 2, "C"))       # ranks [blocks, power of two]


@cuda.jit(device=True, inline="always")
def select_row(scores, candidates, target, values, with_scores):
    """target = positions of the min(top_k, candidates) best scores, ascending, then -1; their scores into `values`.

    Called by a whole block. The histogram has one bin per thread; `scan` holds running sums over bins (from the top) or threads.
    """
    histogram = cuda.shared.array(NUM_BINS, int32)
    scan = cuda.shared.array(THREADS, int32)
    found = cuda.shared.array(2, int32)                   # the k-th best's digit; scores above it
    tid = int32(cuda.threadIdx.x)
    top_k = int64(target.shape[0])
    count = min(top_k, candidates)

    if candidates <= top_k:
        for position in range(tid, candidates, THREADS):
            target[position] = position
            if with_scores != 0:
                values[position] = scores[position]
    else:
        threshold = uint32(0)                             # digits of the k-th best so far, the rest zero
        known = uint32(0)                                 # mask of those digits
        wanted = int32(count)                             # of the scores that share them
        for digit in range(NUM_DIGITS):
            shift = uint32(32 - RADIX_BITS * (digit + 1))
            histogram[tid] = 0
            cuda.syncthreads()
            for position in range(tid, candidates, THREADS):
                key = sortable(scores[position])
                if key & known == threshold:
                    cuda.atomic.add(histogram, int32((key >> shift) & uint32(NUM_BINS - 1)), 1)
            cuda.syncthreads()
            scan[tid] = histogram[NUM_BINS - 1 - tid]     # best digit first
            inclusive_scan(scan, tid)
            up_to_here = scan[tid]
            above = up_to_here - histogram[NUM_BINS - 1 - tid]
            if above < wanted and wanted <= up_to_here:   # true for one thread
                found[0] = NUM_BINS - 1 - tid
                found[1] = above
            cuda.syncthreads()
            threshold |= uint32(found[0]) << shift
            known |= uint32(NUM_BINS - 1) << shift
            wanted -= found[1]
            cuda.syncthreads()

        better = int64(0)                                 # scores above, and equal to, the threshold before this chunk
        equal = int64(0)
        for chunk in range(0, candidates, THREADS * ITEMS):
            if better + min(equal, int64(wanted)) == count:
                break
            first = chunk + tid * ITEMS
            stop = min(first + ITEMS, candidates)
            packed = int32(0)                             # better in the low half, equal in the high half
            for position in range(first, stop):
                key = sortable(scores[position])
                if key > threshold:
                    packed += 1
                elif key == threshold:
                    packed += 1 << 16
            scan[tid] = packed
            inclusive_scan(scan, tid)
            before = scan[tid] - packed
            my_better = better + (before & 0xFFFF)
            my_equal = equal + (before >> 16)
            for position in range(first, stop):
                score = scores[position]
                key = sortable(score)
                taken = key > threshold or (key == threshold and my_equal < wanted)
                if taken:
                    slot = my_better + min(my_equal, int64(wanted))
                    target[slot] = position
                    if with_scores != 0:
                        values[slot] = score
                if key > threshold:
                    my_better += 1
                elif key == threshold:
                    my_equal += 1
            better += scan[THREADS - 1] & 0xFFFF
            equal += scan[THREADS - 1] >> 16
            cuda.syncthreads()

    for slot in range(count + tid, top_k, THREADS):
        target[slot] = -1
        if with_scores != 0:
            values[slot] = MINUS_INF_BITS


@cuda.jit(device=True, inline="always")
def rank_row(scores, candidates, target, values, with_scores, ranks):
    """Reorders what `select_row` selected, best score first, equal scores by position.

    Called by a whole block: bitonic sort in global memory of ``(inverted score, position)`` as one unique uint64 each.
    """
    tid = int32(cuda.threadIdx.x)
    count = min(int64(target.shape[0]), candidates)
    size = int64(1)
    while size < count:
        size *= 2
    for slot in range(tid, size, THREADS):
        rank = EMPTY_RANK
        if slot < count:
            position = target[slot]
            rank = uint64(sortable(scores[position]) ^ uint32(0xFFFFFFFF)) << uint64(32) | uint64(uint32(position))
        ranks[slot] = rank
    cuda.syncthreads()

    run = int64(2)                                        # lengths of the runs that are sorted after this round
    while run <= size:
        distance = run // 2
        while distance > 0:
            for pair in range(tid, size // 2, THREADS):
                low = pair // distance * distance * 2 + pair % distance
                high = low + distance
                a = ranks[low]
                b = ranks[high]
                ascending = low & run == 0
                if (a > b) == ascending:
                    ranks[low] = b
                    ranks[high] = a
            cuda.syncthreads()
            distance //= 2
        run *= 2

    for slot in range(tid, count, THREADS):
        position = int64(ranks[slot] & uint64(0xFFFFFFFF))
        target[slot] = position
        if with_scores != 0:
            values[slot] = scores[position]


def _select_rows(bits, row_candidates, chunk, packing, out, out_scores, with_scores):
    """`select_row` of every row of a chunk; the blocks take them in turn."""
    start, stop, pitch = chunk_rows(chunk, packing)
    for row in range(cuda.blockIdx.x, stop - start, cuda.gridDim.x):
        token = start + row
        values = out_scores[token if with_scores != 0 else 0]
        select_row(bits[row * pitch:(row + 1) * pitch], min(int64(row_candidates[token]), pitch), out[token], values, with_scores)
        cuda.syncthreads()


def _rank_rows(bits, row_candidates, chunk, packing, out, out_scores, with_scores, ranks):
    """`rank_row` of every row of a chunk; the blocks take them in turn."""
    start, stop, pitch = chunk_rows(chunk, packing)
    for row in range(cuda.blockIdx.x, stop - start, cuda.gridDim.x):
        token = start + row
        values = out_scores[token if with_scores != 0 else 0]
        rank_row(bits[row * pitch:(row + 1) * pitch], min(int64(row_candidates[token]), pitch), out[token], values, with_scores,
                 ranks[cuda.blockIdx.x])
        cuda.syncthreads()


SELECT_ROWS = Kernel(_select_rows, SELECT_SIGNATURE, THREADS)
RANK_ROWS = Kernel(_rank_rows, RANK_SIGNATURE, THREADS)
