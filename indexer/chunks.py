"""Rows of the score matrix that are held at a time: so many per chunk, each at a pitch.

The host knows bounds of lengths only. Where these need more than one chunk, `rows.PACK_CHUNKS` finds from the lengths how many rows
really fit in the score matrix. The host still launches a slot for every chunk that the bounds need; those behind the last row end
at once.
"""
from __future__ import annotations

from numba import cuda, int64
from numba.cuda import types

ALIGNMENT = 32                                # scores: a row begins with a line of 128 bytes
CHUNK = types.UniTuple(types.int64, 4)        # slot, rows per chunk, pitch, rows in all
PACKING = types.Array(types.int32, 1, "C")    # [2]: rows per chunk and pitch that take precedence; [0]: none do


@cuda.jit(device=True, inline="always")
def packed(longest, width, num_scores, num_rows):
    """(rows per chunk, pitch) for rows of up to `longest` candidates in a matrix of `num_scores`, at least `width`."""
    pitch = min(max((longest + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, 1), width)
    return min(num_scores // pitch, num_rows), pitch


@cuda.jit(device=True, inline="always")
def chunk_rows(chunk, packing):
    """(start, stop, pitch), int64: the rows [start, stop) of a chunk, none for a slot that is not used, and scores per row."""
    slot, rows_per_chunk, pitch, num_rows = chunk
    if packing.shape[0] > 0:
        rows_per_chunk = int64(packing[0])
        pitch = int64(packing[1])
    start = min(slot * rows_per_chunk, num_rows)
    return start, min(start + rows_per_chunk, num_rows), pitch
