"""Which request a query token belongs to, and how many candidates it has; what lies outside them.

Whatever offsets and lengths hold, a request is one of them and a count is in [0, W].
"""
from __future__ import annotations

from numba import cuda, int32, int64
from numba.cuda import types

from .chunks import PACKING, packed
from .device import SIMULATED, Kernel
from .selection import MINUS_INF_BITS

THREADS = 8 if SIMULATED else 128
LENGTHS_SIGNATURE = (                         # what kernels take of the requests
    types.Array(types.int32, 1, "A"),         # offsets [B + 1]
    types.Array(types.int32, 1, "A"),         # lengths [B]
    types.int32, types.int64, types.int64,    # causal, kpool, width
)


@cuda.jit(device=True, inline="always")
def count_candidates(offsets, lengths, request, token, causal, kpool, width):
    """Candidates of a token of a request, clamped to [0, width]: none where the request's length is negative."""
    offset = int64(offsets[request])
    cached = int64(lengths[request])
    visible = cached + (int64(token) - offset + 1 if causal != 0 else int64(offsets[request + 1]) - offset)
    count = int64(0)
    if cached >= 0:
        count = max(visible, int64(0)) // int64(kpool)
    return int32(min(count, int64(width)))


@cuda.jit(device=True, inline="always")
def find_candidates(offsets, lengths, token, causal, kpool, width):
    """`count_candidates` of a token of the last request whose offset is not behind it, found by the whole block."""
    tid, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    num_requests = int32(lengths.shape[0])
    request = int32(0)
    first = int32(1)
    while first < num_requests:
        other = first + tid
        request += int32(cuda.syncthreads_count(int32(1) if other < num_requests and offsets[other] <= token else int32(0)))
        first = int32(first + threads)
    candidates = count_candidates(offsets, lengths, request, token, causal, kpool, width)
    return cuda.shfl_sync(0xFFFFFFFF, candidates, 0)          # so that the compiler, too, knows it to be one value per warp


def _locate_rows(offsets, lengths, causal, kpool, width, row_request, row_candidates):
    """Request and candidate count of every token, one thread each. The request is the last whose offset is not behind the token."""
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
        row_request[token] = low
        row_candidates[token] = 0
        if num_requests > 0:
            row_candidates[token] = count_candidates(offsets, lengths, low, token, causal, kpool, width)


def _pack_chunks(offsets, lengths, causal, kpool, width, num_scores, num_rows, packing):
    """`packed` for the live lengths: those of all requests that have tokens. One block."""
    longest = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    if tid == 0:
        longest[0] = 0
    cuda.syncthreads()
    for request in range(tid, lengths.shape[0], cuda.blockDim.x):
        end = offsets[request + 1]
        if offsets[request] < end:
            cuda.atomic.max(longest, 0, count_candidates(offsets, lengths, request, int64(end) - 1, causal, kpool, width))
    cuda.syncthreads()
    if tid == 0:
        packing[0], packing[1] = packed(int64(longest[0]), width, num_scores, num_rows)


def _fill_outside(bits, row_candidates, everywhere):
    """-inf at and behind each row's candidates, or everywhere; one block per row."""
    row = int64(cuda.blockIdx.x)
    first = int64(0) if everywhere != 0 else int64(row_candidates[row])
    for position in range(first + cuda.threadIdx.x, bits.shape[1], cuda.blockDim.x):
        bits[row, position] = MINUS_INF_BITS


LOCATE_ROWS = Kernel(
    _locate_rows,
    (*LENGTHS_SIGNATURE, types.Array(types.int32, 1, "C"), types.Array(types.int32, 1, "C")),
    THREADS)
PACK_CHUNKS = Kernel(
    _pack_chunks,
    (*LENGTHS_SIGNATURE, types.int64, types.int64, PACKING),         # num_scores, num_rows
    THREADS)
FILL_OUTSIDE = Kernel(_fill_outside, (types.Array(types.uint32, 2, "C"), types.Array(types.int32, 1, "C"), types.int32),
                      THREADS)
