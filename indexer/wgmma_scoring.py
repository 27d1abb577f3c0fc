"""The plain Hopper scorer: the bits of FP8 tensor cores for every head count, depth, page size and stride.

Bytes are loaded one by one, so nothing need be aligned; `tma_scoring` is the fast way for the shapes that models have.
"""
from __future__ import annotations

from numba import cuda, float32, int32, uint8, uint32
from numba.cuda import types

from . import ptx
from .chunks import chunk_rows
from .device import Kernel
from .scoring import SIGNATURE as EXACT_SIGNATURE
from .scoring import locate_key

THREADS = 128
BLOCK_KV, BLOCK_H, BLOCK_D = 64, 64, 128      # one product of a warpgroup; a tile row is 128 bytes
TILE_BYTES = BLOCK_D * BLOCK_KV
NAN_BYTE = 0x7F                               # stands in for the keys of a block that does not exist
SIGNATURE = (*EXACT_SIGNATURE[:8], *EXACT_SIGNATURE[9:13])    # without the scores as bits and the FP8 code


def _chain_text() -> str:
    """PTX: four chains $0 ... $3, from $4 ... $7, over `BLOCK_H` heads; weights from shared memory at $8.

    ``$(2 key + parity)`` is a chain of fused multiply-adds of ReLU and weight for this thread's key g + 8 key.
    """
    text = "".join(f"mov.f32 s{i}, ${4 + i}; " for i in range(4))
    for j in range(BLOCK_H // 8):
        text += f"ld.shared.v2.f32 {{w0, w1}}, [$8+{32 * j}]; "
        for i in range(4):
            text += f"max.NaN.f32 r, acc{4 * j + i}, 0f00000000; fma.rn.f32 s{i}, r, w{i % 2}, s{i}; "
    return f"{{ .reg .f32 r, w0, w1, s<4>; {text}" + "".join(f"mov.f32 ${i}, s{i}; " for i in range(4)) + "}"


declare = ptx.declare(acc=BLOCK_H // 2)
multiply = ptx.wgmma_e4m3(0, BLOCK_H, BLOCK_D // 32)
multiply_and_add = ptx.wgmma_e4m3(0, BLOCK_H, BLOCK_D // 32, keep=True)
extend_chains = ptx.instruction(_chain_text(), types.UniTuple(ptx.f32, 4), *[ptx.f32] * 4, ptx.u32)


@cuda.jit(device=True, inline="always")
def swizzled(row, column):
    """Byte offset of a tile element: the 16-byte column is permuted by the row within its atom of 8."""
    return uint32((row << uint32(7)) | (((column >> uint32(4)) ^ (row & uint32(7))) << uint32(4)) | (column & uint32(15)))


def _score_rows(q, q_s, keys, key_scales, table, row_request, row_candidates, scores, chunk, packing, skip_up_to, num_splits):
    """``scores[row, key]`` of token ``start + row`` for key < the row's candidates, where they are more than `skip_up_to`.

    Place ``row * num_splits + split`` is every `num_splits`-th tile of 64 keys of a row; the blocks take the places in turn, 64
    keys x 64 heads x 128 deep at a time.
    """
    declare()
    q_tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
    k_tile = cuda.shared.array(TILE_BYTES, uint8, alignment=1024)
    weights = cuda.shared.array(BLOCK_H, float32, alignment=16)
    key_block = cuda.shared.array(BLOCK_KV, int32)            # -1: no such key
    key_slot = cuda.shared.array(BLOCK_KV, int32)

    tid = uint32(cuda.threadIdx.x)
    start, stop, pitch = chunk_rows(chunk, packing)
    num_heads, head_dim = int32(q.shape[1]), int32(q.shape[2])
    num_blocks, page_size = int32(keys.shape[0]), int32(keys.shape[1])
    q_at = uint32(ptx.shared_address(q_tile) >> uint32(4))
    k_at = uint32(ptx.shared_address(k_tile) >> uint32(4))
    lane = uint32(tid & uint32(31))
    quarter = uint32(lane & uint32(3))
    odd = (quarter & uint32(1)) != uint32(0)
    my_key = int32((tid >> uint32(5)) * uint32(16) + (lane >> uint32(2)))
    if odd:
        my_key += int32(8)
    weights_at = uint32(ptx.shared_address(weights) + uint32(8) * quarter)
    is_one_tile = num_heads <= BLOCK_H and head_dim <= BLOCK_D

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
            if tid < uint32(BLOCK_KV):
                block, slot = locate_key(tile_start + int32(tid), candidates, table, request, page_size, num_blocks)
                key_block[tid] = block
                key_slot[tid] = slot
            s0 = float32(0)
            s1 = float32(0)
            s2 = float32(0)
            s3 = float32(0)
            for first_head in range(0, num_heads, BLOCK_H):
                for first_d in range(0, head_dim, BLOCK_D):
                    cuda.syncthreads()
                    d = first_d + int32(tid)
                    for local in range(BLOCK_KV):
                        at = swizzled(uint32(local), tid)
                        byte = uint8(0)
                        if key_block[local] < 0:
                            byte = uint8(NAN_BYTE)
                        elif d < head_dim:
                            byte = keys[key_block[local], key_slot[local], d]
                        k_tile[at] = byte
                        if not is_one_tile or tile_start < num_splits * BLOCK_KV:         # else it is there already
                            byte = uint8(0)
                            if first_head + local < num_heads and d < head_dim:
                                byte = q[token, first_head + local, d]
                            q_tile[at] = byte
                    if tid < uint32(BLOCK_H):
                        weight = float32(-0.0)                    # of a head that is not there: adds nothing to a chain
                        if first_head + int32(tid) < num_heads:
                            weight = q_s[token, first_head + int32(tid)]
                        weights[tid] = weight
                    ptx.fence_shared_to_async()
                    cuda.syncthreads()
                    if first_d == 0:
                        multiply(k_at, q_at)
                    else:
                        multiply_and_add(k_at, q_at)
                    ptx.wgmma_wait_0()
                s0, s1, s2, s3 = extend_chains(s0, s1, s2, s3, weights_at)
            upper = s0 + s1
            lower = s2 + s3
            keep = lower if odd else upper
            give = upper if odd else lower
            half = keep + cuda.shfl_xor_sync(0xFFFFFFFF, give, 1)
            total = half + cuda.shfl_xor_sync(0xFFFFFFFF, half, 2)
            if quarter < uint32(2) and tile_start + my_key < candidates:
                scale = float32(1)
                if key_block[my_key] >= 0:
                    scale = key_scales[key_block[my_key], key_slot[my_key]]
                scores[row_at + tile_start + my_key] = total * scale


SCORE_ROWS = Kernel(_score_rows, SIGNATURE, THREADS)
