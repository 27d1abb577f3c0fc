"""Hopper's instructions as functions that a kernel can call: barriers, bulk copies, warpgroup matrix products.

Addresses of shared memory are uint32 byte addresses in the shared window, those of global memory uint64. The accumulators of a
matrix product live in PTX registers of their own, ``acc0 ...``, declared once per kernel by `declare` and named by the
instructions that write and read them: no value of the compiler's is tied to them, so a product can be in flight over a loop's back
edge.

Sources: the PTX ISA, sections on mbarrier, cp.async.bulk, wgmma, setmaxnreg and proxies.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.np import arrayobj

u32, u64, i32, f32, void = types.uint32, types.uint64, types.int32, types.float32, types.void

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_LLVM = {u32: _I32, i32: _I32, u64: _I64, f32: _F32}
_CONSTRAINT = {u32: "r", i32: "r", u64: "l", f32: "f"}


def instruction(text: str, result: Any, *argtypes: Any, memory: bool = True) -> Callable[..., Any]:
    """PTX as an intrinsic. Operands are $0, $1, ... in LLVM's syntax, the result first; it is never moved over another one.

    Parameters
    ----------
    text : str
        One or more instructions; in braces where they declare registers or labels.
    result : numba type
        `void` for none; a tuple type gives $0, $1, ... its items.
    *argtypes : numba types
        uint32, int32, uint64 or float32.
    memory : bool
        Whether it orders the compiler's loads and stores.
    """
    results = [] if result == void else list(result) if isinstance(result, types.BaseTuple) else [result]
    outputs = [_LLVM[t] for t in results]
    llvm_result = ir.VoidType() if not outputs else outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)
    function = ir.FunctionType(llvm_result, [_LLVM[t] for t in argtypes])
    constraints = ["=" + _CONSTRAINT[t] for t in results] + [_CONSTRAINT[t] for t in argtypes] + ["~{memory}"] * memory

    def codegen(context, builder, signature, args):
        value = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=True), args)
        if not outputs:
            return context.get_dummy_value()
        if len(outputs) == 1:
            return value
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(value, i) for i in range(len(outputs))])

    typed = result(*argtypes), codegen
    by_arity = (                                              # numba reads the number of arguments off the function
        lambda typingctx: typed, lambda typingctx, a: typed, lambda typingctx, a, b: typed, lambda typingctx, a, b, c: typed,
        lambda typingctx, a, b, c, d: typed, lambda typingctx, a, b, c, d, e: typed, lambda typingctx, a, b, c, d, e, f: typed)
    return intrinsic(by_arity[len(argtypes)])


# ------------------------------------------------------------------------------------------------------------- shared memory


@intrinsic
def shared_address(typingctx, array):
    """Byte address of a shared array in the shared window, uint32."""
    def codegen(context, builder, signature, args):
        pointer = builder.ptrtoint(arrayobj.make_array(signature.args[0])(context, builder, args[0]).data, _I64)
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return builder.call(ir.InlineAsm(ir.FunctionType(_I32, [_I64]), text, "=r,l", side_effect=False), [pointer])
    return u32(array), codegen


@intrinsic
def global_address(typingctx, array):
    """Byte address of an array in global memory, uint64."""
    def codegen(context, builder, signature, args):
        return builder.ptrtoint(arrayobj.make_array(signature.args[0])(context, builder, args[0]).data, _I64)
    return u64(array), codegen


@intrinsic
def at(typingctx, base, offset, stride, index):
    """Address of the `index`-th of things that are `stride` bytes apart, the first `offset` bytes behind `base`: uint32."""
    def codegen(context, builder, signature, args):
        offset, stride = (builder.trunc(value, _I32) for value in args[1:3])
        return builder.add(builder.add(args[0], offset), builder.mul(stride, args[3]))
    return u32(u32, types.int64, types.int64, u32), codegen


load_shared_u32 = instruction("ld.shared.u32 $0, [$1];", u32, u32)
load_shared_f32 = instruction("ld.shared.f32 $0, [$1];", f32, u32)
store_shared_u32 = instruction("st.shared.u32 [$0], $1;", void, u32, u32)
store_shared_f32 = instruction("st.shared.f32 [$0], $1;", void, u32, f32)
# orders this thread's ordinary shared stores before what the tensor cores and the copy engine read
fence_shared_to_async = instruction("fence.proxy.async.shared::cta;", void)

# ------------------------------------------------------------------------------------------------------------------- scores


def load_words(count: int, step: int) -> Callable[..., Any]:
    """Words of global memory `step` words apart, as far as there are any.

    Returns
    -------
    intrinsic(address, rest)
        `count` uint32: the j-th where ``rest > j step`` (int32), else 0. They share one address, that of the first.
    """
    text = "".join(f"setp.gt.s32 p, ${count + 1}, {step * j}; mov.u32 ${j}, 0; @p ld.global.u32 ${j}, [${count}+{4 * step * j}]; "
                   for j in range(count))
    return instruction(f"{{ .reg .pred p; {text}}}", types.UniTuple(u32, count), u64, i32)


# `selection.sortable` in five instructions; adding zero makes one of both zeros
sortable_bits = instruction(
    "{ .reg .f32 x; .reg .b32 bits, sign; .reg .pred nan; mov.b32 x, $1; add.rn.f32 x, x, 0f00000000; setp.nan.f32 nan, x, x; "
    "mov.b32 bits, x; shr.s32 sign, bits, 31; or.b32 sign, sign, 0x80000000; xor.b32 $0, bits, sign; @nan mov.u32 $0, 0; }",
    u32, u32, memory=False)

# ------------------------------------------------------------------------------------------------------------------ clusters

cluster_id = instruction("mov.u32 $0, %clusterid.x;", u32, memory=False)
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", u32, memory=False)
cluster_size = instruction("mov.u32 $0, %cluster_nctarank;", u32, memory=False)
# every thread of the cluster's blocks arrives, then waits; of memory, it orders barriers that were made before, and no more
cluster_arrive = instruction("barrier.cluster.arrive.relaxed.aligned;", void)
cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;", void)
# stores at this address in the shared memory of the cluster's block with that rank: its barrier, the last, counts 4 bytes
store_cluster_u32 = instruction(
    "{ .reg .u32 there, barrier; mapa.shared::cluster.u32 there, $0, $1; mapa.shared::cluster.u32 barrier, $3, $1; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], $2, [barrier]; }", void, u32, u32, u32, u32)

# ---------------------------------------------------------------------------------------------------------------------- warp

warp_sum = instruction("redux.sync.add.s32 $0, $1, 0xffffffff;", i32, i32)

# ------------------------------------------------------------------------------------------------------------------ barriers

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", void, u32, u32)
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", void)
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", void, u32)
# arrives where the second argument is not zero
mbarrier_arrive_if = instruction("{ .reg .pred p; setp.ne.u32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }",
                                 void, u32, u32)
mbarrier_expect_bytes = instruction("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", void, u32, u32)
mbarrier_arrive_expect_bytes = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", void, u32, u32)
# waits until the phase of this parity is complete
mbarrier_wait = instruction(
    "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra WAIT; }", void, u32, u32)

# --------------------------------------------------------------------------------------------------------------- bulk copies

TENSOR_MAP_WORDS = 16                         # uint64


@intrinsic
def store_tensor_map(typingctx, address, words):
    """Writes the 16 uint64 of a tensor map to global memory. The writer releases them, every user acquires them."""
    def codegen(context, builder, signature, args):
        operands = [args[0]] + [builder.extract_value(args[1], i) for i in range(TENSOR_MAP_WORDS)]
        text = "".join(f"st.global.u64 [$0+{8 * i}], ${i + 1}; " for i in range(TENSOR_MAP_WORDS))
        function = ir.FunctionType(ir.VoidType(), [_I64] * len(operands))
        builder.call(ir.InlineAsm(function, text, ",".join(["l"] * len(operands)) + ",~{memory}", side_effect=True), operands)
        return context.get_dummy_value()
    return void(u64, types.UniTuple(u64, TENSOR_MAP_WORDS)), codegen


prefetch_l2 = instruction("prefetch.global.L2 [$0];", void, u64)
release_tensor_map = instruction("fence.proxy.tensormap::generic.release.gpu;", void)
acquire_tensor_map = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", void, u64)
# a box of a 3-d tensor map: shared destination, map, coordinates (innermost first), barrier
copy_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];",
    void, u32, u64, i32, i32, i32, u32)
# contiguous bytes: shared destination, global source, number of bytes (all multiples of 16), barrier
copy_bytes = instruction("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                         void, u32, u64, u32, u32)

# ------------------------------------------------------------------------------------------------ warpgroup matrix products


def set_registers(direction: str, count: int) -> Callable[..., Any]:
    """Gives registers of every thread of this warpgroup up ("dec") or takes more ("inc")."""
    return instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {count};", void)


def declare(*, acc: int, weight: int = 0, predicates: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Declares registers by name, ``acc0 ...`` and ``weight0 ...``, float32, and predicates; called once, at a kernel's start."""
    text = f".reg .f32 acc<{acc}>; .reg .f32 weight<{max(1, weight)}>; "
    return instruction(text + "".join(f".reg .pred {name}; " for name in predicates), void)


wgmma_wait_0 = instruction("wgmma.wait_group.sync.aligned 0;", void)
wgmma_wait_1 = instruction("wgmma.wait_group.sync.aligned 1;", void)

# Upper half of a matrix descriptor: rows of 128 bytes in atoms of 8, 1024 bytes apart, 128-byte swizzle.
_SWIZZLED_ROWS = 1 << 30 | 1024 >> 4


def wgmma_e4m3(first: int, columns: int, num_steps: int, keep: bool = False) -> Callable[..., Any]:
    """One group of products ``acc = A B^T``, float32 from e4m3: A 64 x (32 num_steps), B columns x (32 num_steps).

    Parameters
    ----------
    first : int
        The first of the ``columns / 2`` accumulators. Thread (g, q) = divmod(lane, 4) of a warp holds rows g and g + 8 of its
        warp's 16: for ``j < columns / 8``, accumulator ``first + 4 j + {0, 1}`` is row g, column ``8 j + 2 q + {0, 1}``, and
        ``first + 4 j + {2, 3}`` row g + 8.
    columns : int
        8 to 256, a multiple of 8.
    num_steps : int
        Chained products of depth 32.
    keep : bool
        Whether the accumulators' values are added to; else the chain starts from zero.

    Returns
    -------
    intrinsic(a, b)
        `a`, `b`: uint32 shared addresses of the operands over 16 (the lower half of their descriptors). Committed, not waited for.

    Notes
    -----
    ptxas 13.5 drops products of a chain of up to 64 columns that is in no loop (13.0 does not). The tests count the products in the
    machine code of every kernel that they compile.
    """
    registers = ", ".join(f"acc{first + i}" for i in range(columns // 2))
    steps = "".join(
        f"add.u32 at, $0, {2 * k}; mov.b64 a, {{at, {_SWIZZLED_ROWS}}}; "
        f"add.u32 at, $1, {2 * k}; mov.b64 b, {{at, {_SWIZZLED_ROWS}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{registers}}}, a, b, {int(keep or k > 0)}, 1, 1; "
        for k in range(num_steps))
    return instruction(f"{{ .reg .u32 at; .reg .b64 a, b; wgmma.fence.sync.aligned; {steps}wgmma.commit_group.sync.aligned; }}",
                       void, u32, u32)
