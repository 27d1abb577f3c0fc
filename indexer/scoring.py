"""The portable scorer: exact dot products on any CUDA GPU, weighted over the heads in the pinned order.

An e4m3 value is an integer of at most 18 bits times a fixed power of two (the *unit*), so a dot product is an integer sum, exact in
64 bits at any depth; one conversion to float32 rounds it. No tensor cores, shuffles or other hardware-only instructions: the same
source runs in numba's simulator.
"""
from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint32
from numba.cuda import types

from .chunks import CHUNK, PACKING, chunk_rows
from .device import SIMULATED, Kernel

NUM_CHAINS = 8                                # of fused multiply-adds: one for each head % 8
NAN_BITS = uint32(0x7FFFFFFF)                 # the one NaN a score can be
ALIGNMENT = None if SIMULATED else 16         # of shared tiles: loads of four operands at once


@dataclass(frozen=True)
class Fp8Code:
    """How a kernel reads an FP8 byte: a NaN where ``byte & nan_mask == nan_bits``, else an integer times `unit`."""

    nan_mask: int
    nan_bits: int
    unit: float


FP8_CODES = {
    "float8_e4m3fn": Fp8Code(0x7F, 0x7F, 2.0**-9),
    "float8_e4m3fnuz": Fp8Code(0xFF, 0x80, 2.0**-10),
}


@dataclass(frozen=True)
class ScoreTile:
    """What one block of threads works on: `heads` x `block_kv` dot products of one token, `block_d` deep at a time.

    A thread owns ``heads / 8`` heads of one chain and `keys_per_thread` keys.
    """

    heads: int
    block_kv: int
    block_d: int
    keys_per_thread: int

    @property
    def threads(self) -> int:
        return NUM_CHAINS * self.block_kv // self.keys_per_thread

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: both operand tiles, decoded bytes, chain sums, three words per key, one flag per head."""
        operands = 4 * self.block_d * (self.heads + self.block_kv)
        return operands + 4 * (256 + NUM_CHAINS * self.block_kv + 3 * self.block_kv + self.heads)


def score_tile(num_heads: int) -> ScoreTile:
    """The tile for a head count: heads in passes of 8, 16, 32 or 64, the smallest that takes them all."""
    if SIMULATED:
        return ScoreTile(heads=8 if num_heads <= 8 else 16, block_kv=4, block_d=8, keys_per_thread=2)
    heads = next((h for h in (8, 16, 32) if num_heads <= h), 64)
    return ScoreTile(heads=heads, block_kv=64, block_d=64, keys_per_thread=4)


def splits_per_row(num_rows: int, num_tiles: int, num_multiprocessors: int) -> int:
    """Blocks that share a row's key tiles: enough to give every multiprocessor several blocks, at most one per tile."""
    return max(1, min(num_tiles, -(-8 * num_multiprocessors // num_rows)))


if SIMULATED:
    def fma(a: Any, b: Any, c: Any) -> Any:
        """float32 a * b + c with one rounding: the simulator's own has two."""
        product, addend = float(a) * float(b), float(c)                # the product is exact
        total = product + addend
        z = total - product
        error = (product - (total - z)) + (addend - z)
        if error and math.isfinite(total) and not np.float64(total).view(np.int64) & 1:
            total = float(np.nextafter(total, math.copysign(math.inf, error)))    # round to odd
        return np.float32(total)
else:
    @cuda.jit(device=True, inline="always")
    def fma(a, b, c):
        """float32 a * b + c with one rounding."""
        return cuda.fma(a, b, c)


@cuda.jit(device=True, inline="always")
def decode(byte):
    """Integer value of an e4m3 byte (either kind) in units of its least subnormal; NaN bytes are the caller's business."""
    exponent = (byte >> 3) & 15
    fraction = byte & 7
    magnitude = (fraction + 8) << (exponent - 1) if exponent > 0 else fraction
    return -magnitude if byte & 128 else magnitude


@cuda.jit(device=True, inline="always")
def locate_key(key, candidates, table, request, page_size, num_blocks):
    """(block, slot) of a request's key; block -1 for one that is no candidate or on a page that does not exist."""
    block = int32(-1)
    slot = int32(0)
    if key < candidates:
        page = key // page_size
        slot = key - page * page_size
        block = table[request, page]
        if block < 0 or block >= num_blocks:
            block = int32(-1)
    return block, slot


SIGNATURE = (
    types.Array(types.uint8, 3, "A"),         # q [T, H, D]
    types.Array(types.float32, 2, "A"),       # q_s [T, H]
    types.Array(types.uint8, 3, "A"),         # keys [num_blocks, P, D]
    types.Array(types.float32, 2, "A"),       # key_scales [num_blocks, P]
    types.Array(types.int32, 2, "A"),         # table [B, max_pages]
    types.Array(types.int32, 1, "C"),         # row_request [T]
    types.Array(types.int32, 1, "C"),         # row_candidates [T]
    types.Array(types.float32, 1, "C"),       # scores, a row at every `pitch`
    types.Array(types.uint32, 1, "C"),        # the same memory as bits
    CHUNK, PACKING,                           # the rows of `scores`
    types.int32,                              # skip_up_to: rows with at most so many candidates need no scores
    types.int32,                              # num_splits
    types.int32, types.int32,                 # nan_mask, nan_bits
    types.float32,                            # unit of a dot product: the square of the byte's unit
)


@functools.cache
def exact_scorer(tile: ScoreTile) -> Kernel:
    """The scoring kernel for a tile.

    ``scores[row, key] = key_scale[key] * sum_h(relu(sum_d q[h, d] * k[key, d]) * q_s[h])`` of token ``start + row``, for key < the
    row's candidates; nothing else is written. Place ``row * num_splits + split`` is every `num_splits`-th key tile of a row; the
    blocks take the places in turn.
    """
    HEADS, BLOCK_KV, BLOCK_D, KEYS = tile.heads, tile.block_kv, tile.block_d, tile.keys_per_thread
    THREADS, GROUPS = tile.threads, tile.heads // NUM_CHAINS
    PRODUCTS = GROUPS * KEYS

    def score_rows(q, q_s, keys, key_scales, table, row_request, row_candidates, scores, bits, chunk, packing, skip_up_to,
                   num_splits, nan_mask, nan_bits, unit):
        decoded = cuda.shared.array(256, int32)
        q_tile = cuda.shared.array((BLOCK_D, NUM_CHAINS, GROUPS), int32, alignment=ALIGNMENT)
        k_tile = cuda.shared.array((BLOCK_D, BLOCK_KV), int32, alignment=ALIGNMENT)
        head_is_nan = cuda.shared.array(HEADS, int32)
        key_is_nan = cuda.shared.array(BLOCK_KV, int32)
        key_block = cuda.shared.array(BLOCK_KV, int32)        # -1: no such key
        key_slot = cuda.shared.array(BLOCK_KV, int32)
        chain_sums = cuda.shared.array((NUM_CHAINS, BLOCK_KV), float32)
        products = cuda.local.array(PRODUCTS, int64)
        sums = cuda.local.array(KEYS, float32)
        q_values = cuda.local.array(GROUPS, int32)
        k_values = cuda.local.array(KEYS, int32)

        tid = int32(cuda.threadIdx.x)
        start, stop, pitch = chunk_rows(chunk, packing)
        num_heads, head_dim = int32(q.shape[1]), int32(q.shape[2])
        num_blocks, page_size = int32(keys.shape[0]), int32(keys.shape[1])
        chain, first_key = tid % NUM_CHAINS, tid // NUM_CHAINS * KEYS
        for byte in range(tid, 256, THREADS):
            decoded[byte] = decode(byte)

        for place in range(cuda.blockIdx.x, (stop - start) * num_splits, cuda.gridDim.x):
            row = place // num_splits
            split = int32(place - row * num_splits)
            token = start + row
            candidates = min(row_candidates[token], int32(pitch))
            if candidates <= skip_up_to:
                candidates = int32(0)
            request = row_request[token]
            row_at = row * pitch
            for tile_start in range(split * BLOCK_KV, candidates, num_splits * BLOCK_KV):
                cuda.syncthreads()
                if tid < BLOCK_KV:
                    block, slot = locate_key(tile_start + tid, candidates, table, request, page_size, num_blocks)
                    key_block[tid] = block
                    key_slot[tid] = slot
                    key_is_nan[tid] = 1 if block < 0 else 0
                for i in range(KEYS):
                    sums[i] = float32(0)

                for first_head in range(0, num_heads, HEADS):
                    for i in range(PRODUCTS):
                        products[i] = int64(0)
                    cuda.syncthreads()
                    if tid < HEADS:
                        head_is_nan[tid] = 0
                    for first_d in range(0, head_dim, BLOCK_D):
                        cuda.syncthreads()
                        for at in range(tid, HEADS * BLOCK_D, THREADS):
                            local_head, d = at // BLOCK_D, at % BLOCK_D
                            head = first_head + local_head
                            value = int32(0)
                            if head < num_heads and first_d + d < head_dim:
                                byte = int32(q[token, head, first_d + d])
                                if byte & nan_mask == nan_bits:
                                    head_is_nan[local_head] = 1
                                value = decoded[byte]
                            q_tile[d, local_head % NUM_CHAINS, local_head // NUM_CHAINS] = value
                        for at in range(tid, BLOCK_KV * BLOCK_D, THREADS):
                            local_key, d = at // BLOCK_D, at % BLOCK_D
                            value = int32(0)
                            if key_block[local_key] >= 0 and first_d + d < head_dim:
                                byte = int32(keys[key_block[local_key], key_slot[local_key], first_d + d])
                                if byte & nan_mask == nan_bits:
                                    key_is_nan[local_key] = 1
                                value = decoded[byte]
                            k_tile[d, local_key] = value
                        cuda.syncthreads()
                        for d in range(BLOCK_D):
                            for j in range(GROUPS):
                                q_values[j] = q_tile[d, chain, j]
                            for i in range(KEYS):
                                k_values[i] = k_tile[d, first_key + i]
                            for j in range(GROUPS):
                                for i in range(KEYS):
                                    products[j * KEYS + i] += int64(q_values[j]) * int64(k_values[i])
                    for j in range(GROUPS):
                        head = first_head + NUM_CHAINS * j + chain
                        if head < num_heads:
                            weight = q_s[token, head]
                            for i in range(KEYS):
                                relu = float32(max(products[j * KEYS + i], int64(0))) * unit
                                if head_is_nan[NUM_CHAINS * j + chain] != 0 or key_is_nan[first_key + i] != 0:
                                    relu = float32(np.nan)
                                sums[i] = fma(relu, weight, sums[i])

                for i in range(KEYS):
                    chain_sums[chain, first_key + i] = sums[i]
                cuda.syncthreads()
                if tid < BLOCK_KV and tile_start + tid < candidates:
                    low = (chain_sums[0, tid] + chain_sums[1, tid]) + (chain_sums[2, tid] + chain_sums[3, tid])
                    high = (chain_sums[4, tid] + chain_sums[5, tid]) + (chain_sums[6, tid] + chain_sums[7, tid])
                    score = float32(np.nan)
                    if key_block[tid] >= 0:
                        score = (low + high) * key_scales[key_block[tid], key_slot[tid]]
                    if score == score:
                        scores[row_at + tile_start + tid] = score
                    else:
                        bits[row_at + tile_start + tid] = NAN_BITS

    return Kernel(score_rows, SIGNATURE, tile.threads)
