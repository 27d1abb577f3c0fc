"""A real wgmma, as small as it can be: what `reference.wgmma_chain` claims to be, on Hopper's tensor cores.

One block computes 64 x 128 outputs at depth 128: ``d = c + a @ b.T`` by four chained ``wgmma m64n128k32 f32.e4m3.e4m3``.
"""
from llvmlite import ir
from numba import cuda, uint8, uint32, uint64
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

from indexer.device import Kernel

BLOCK_M, BLOCK_N, DEPTH, THREADS = 64, 128, 128, 128
A_TILE_BYTES, B_TILE_BYTES = BLOCK_M * DEPTH, BLOCK_N * DEPTH
ACCUMULATORS = BLOCK_M * BLOCK_N // THREADS
# Shared-memory descriptor bits: rows of 128 bytes in atoms of 8 (1024 bytes apart), 128-byte swizzle.
DESCRIPTOR = (1024 >> 4) << 32 | 1 << 62

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


@intrinsic
def descriptor(typingctx, tile):
    """uint64 matrix descriptor of a shared uint8 tile that is aligned to 1024 bytes."""
    def codegen(context, builder, signature, args):
        data = builder.ptrtoint(arrayobj.make_array(signature.args[0])(context, builder, args[0]).data, _I64)
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; and.b64 t, t, 0x3FFFF; shr.u64 t, t, 4; or.b64 $0, t, $2; }"
        asm = ir.InlineAsm(ir.FunctionType(_I64, [_I64, _I64]), text, "=l,l,l", side_effect=False)
        return builder.call(asm, [data, ir.Constant(_I64, DESCRIPTOR)])
    return types.uint64(tile), codegen


@intrinsic
def wgmma_chain(typingctx, accumulators, a, b):
    """Four wgmma over 4 x 32 bytes of depth, accumulators (a local float32 array) in and out, waited for."""
    def codegen(context, builder, signature, args):
        base = arrayobj.make_array(signature.args[0])(context, builder, args[0]).data
        slots = [builder.gep(base, [ir.Constant(_I32, i)]) for i in range(ACCUMULATORS)]
        registers = ", ".join(f"${i}" for i in range(ACCUMULATORS))
        a_at, b_at = f"${2 * ACCUMULATORS}", f"${2 * ACCUMULATORS + 1}"
        steps = "".join(
            f"add.u64 da, {a_at}, {2 * k}; add.u64 db, {b_at}, {2 * k}; "
            f"wgmma.mma_async.sync.aligned.m64n{BLOCK_N}k32.f32.e4m3.e4m3 {{{registers}}}, da, db, 1, 1, 1; " for k in range(4))
        text = (f"{{ .reg .u64 da, db; fence.proxy.async.shared::cta; wgmma.fence.sync.aligned; {steps}"
                "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
        constraints = ",".join(["=f"] * ACCUMULATORS + [str(i) for i in range(ACCUMULATORS)] + ["l", "l", "~{memory}"])
        result = ir.LiteralStructType([_F32] * ACCUMULATORS)
        asm = ir.InlineAsm(ir.FunctionType(result, [_F32] * ACCUMULATORS + [_I64] * 2), text, constraints, side_effect=True)
        out = builder.call(asm, [builder.load(slot) for slot in slots] + list(args[1:]))
        for i, slot in enumerate(slots):
            builder.store(builder.extract_value(out, i), slot)
        return context.get_dummy_value()
    return types.void(accumulators, types.uint64, types.uint64), codegen


def _wgmma(a, b, c, d):
    """d[m, n] = c[m, n] + sum_k a[m, k] * b[n, k].

    A thread holds rows r and r + 8 of its warp's 16, and columns 8 j + 2 q + {0, 1}.
    """
    a_tile = cuda.shared.array(A_TILE_BYTES, uint8, alignment=1024)
    b_tile = cuda.shared.array(B_TILE_BYTES, uint8, alignment=1024)
    accumulators = cuda.local.array(ACCUMULATORS, types.float32)
    tid = uint32(cuda.threadIdx.x)
    block, blocks_n = uint32(cuda.blockIdx.x), uint32(d.shape[1] // BLOCK_N)
    first_m, first_n = block // blocks_n * uint32(BLOCK_M), block % blocks_n * uint32(BLOCK_N)
    for row in range(BLOCK_N):
        # one byte each; the 16-byte column is swizzled by the row within its atom
        at = uint32(row) * uint32(DEPTH) + ((((tid >> uint32(4)) ^ uint32(row & 7)) << uint32(4)) | (tid & uint32(15)))
        b_tile[at] = b[first_n + uint32(row), tid]
        if row < BLOCK_M:
            a_tile[at] = a[first_m + uint32(row), tid]
    row = first_m + (tid >> uint32(5)) * uint32(16) + ((tid & uint32(31)) >> uint32(2))
    column = first_n + uint32(2) * (tid & uint32(3))
    for j in range(BLOCK_N // 8):
        for e in range(2):
            accumulators[4 * j + e] = c[row, column + uint32(8 * j + e)]
            accumulators[4 * j + 2 + e] = c[row + uint32(8), column + uint32(8 * j + e)]
    cuda.syncthreads()
    wgmma_chain(accumulators, uint64(descriptor(a_tile)), uint64(descriptor(b_tile)))
    for j in range(BLOCK_N // 8):
        for e in range(2):
            d[row, column + uint32(8 * j + e)] = accumulators[4 * j + e]
            d[row + uint32(8), column + uint32(8 * j + e)] = accumulators[4 * j + 2 + e]


_BYTES, _FLOATS = types.Array(types.uint8, 2, "C"), types.Array(types.float32, 2, "C")
WGMMA = Kernel(_wgmma, (_BYTES, _BYTES, _FLOATS, _FLOATS), THREADS)


def wgmma(a, b, c):
    """Runs the kernel on NumPy arrays: uint8 [M, 128], uint8 [N, 128], float32 [M, N] with M and N multiples of 64 and 128."""
    d = cuda.device_array(c.shape, c.dtype)
    num_blocks = c.shape[0] // BLOCK_M * (c.shape[1] // BLOCK_N)
    WGMMA.launch(num_blocks, 0, cuda.to_device(a), cuda.to_device(b), cuda.to_device(c), d)
    return d.copy_to_host()
