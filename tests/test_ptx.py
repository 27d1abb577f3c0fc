"""Every PTX wrapper: the instruction it stands for is in the machine code, with its operands in their places."""
import re

import pytest
from codegen import assemble
from numba import cuda, float32, uint32, uint64
from numba.cuda import types

from indexer import ptx

WORDS, FLOATS = (types.Array(t, 1, "C") for t in (types.uint32, types.float32))
MAP = types.UniTuple(types.uint64, ptx.TENSOR_MAP_WORDS)


def compiled(kernel, *signature):
    """(PTX, SASS) for Hopper."""
    text, _ = cuda.compile(kernel, signature, cc=(9, 0, "a"), device=False, abi="numba", launch_bounds=(128, 1))
    _, sass = assemble(text, "sm_90a")
    return text, sass


# wrapper, the types of its operands, the PTX, an instruction in the machine code
PLAIN = [
    (ptx.store_shared_u32, (uint32, uint32), r"st\.shared\.u32 \[%r\d+\], %r\d+;", "STS"),
    (ptx.store_shared_f32, (uint32, float32), r"st\.shared\.f32 \[%r\d+\], %f\d+;", "STS"),
    (ptx.fence_shared_to_async, (), r"fence\.proxy\.async\.shared::cta;", "FENCE.VIEW.ASYNC"),
    (ptx.mbarrier_init, (uint32, uint32), r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], %r\d+;", "SYNCS.EXCH.64"),
    (ptx.fence_mbarrier_init, (), r"fence\.mbarrier_init\.release\.cluster;", None),
    (ptx.mbarrier_arrive, (uint32,), r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "SYNCS.ARRIVE.TRANS64"),
    (ptx.mbarrier_arrive_if, (uint32, uint32), r"setp\.ne\.u32 p, %r\d+, 0; @p mbarrier\.arrive", "SYNCS.ARRIVE.TRANS64"),
    (ptx.mbarrier_expect_bytes, (uint32, uint32), r"mbarrier\.expect_tx\.relaxed\.cta\.shared::cta\.b64 \[%r\d+\], %r\d+;",
     "SYNCS"),
    (ptx.mbarrier_arrive_expect_bytes, (uint32, uint32), r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], %r\d+;",
     "SYNCS.ARRIVE.TRANS64"),
    (ptx.mbarrier_wait, (uint32, uint32), r"mbarrier\.try_wait\.parity\.shared::cta\.b64 done, \[%r\d+\], %r\d+; @!done bra",
     "SYNCS.PHASECHK.TRANS64.TRYWAIT"),
    (ptx.release_tensor_map, (), r"fence\.proxy\.tensormap::generic\.release\.gpu;", "MEMBAR"),
    (ptx.acquire_tensor_map, (uint64,), r"fence\.proxy\.tensormap::generic\.acquire\.gpu \[%rd\d+\], 128;", "UTMACCTL.IV"),
    (ptx.prefetch_l2, (uint64,), r"prefetch\.global\.L2 \[%rd\d+\];", "CCTL.E.PF2"),
    (ptx.copy_box, (uint32, uint64, types.int32, types.int32, types.int32, uint32),
     r"cp\.async\.bulk\.tensor\.3d\S+ \[%r\d+\], \[%rd\d+, \{%r\d+, %r\d+, %r\d+\}\], \[%r\d+\];", "UTMALDG.3D"),
    (ptx.copy_bytes, (uint32, uint64, uint32, uint32),
     r"cp\.async\.bulk\.shared\S+ \[%r\d+\], \[%rd\d+\], %r\d+, \[%r\d+\];", "UBLKCP"),
    (ptx.cluster_arrive, (), r"barrier\.cluster\.arrive\.relaxed\.aligned;", "UCGABAR_ARV"),
    (ptx.cluster_wait, (), r"barrier\.cluster\.wait\.acquire\.aligned;", "UCGABAR_WAIT"),
    (ptx.store_cluster_u32, (uint32, uint32, uint32, uint32),
     r"mapa\.shared::cluster\.u32 there, (%r\d+), (%r\d+); mapa\.shared::cluster\.u32 barrier, (%r\d+), \2; "
     r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.u32 \[there\], %r\d+, \[barrier\];", "STAS"),
    (ptx.wgmma_wait_0, (), r"wgmma\.wait_group\.sync\.aligned 0;", None),
    (ptx.wgmma_wait_1, (), r"wgmma\.wait_group\.sync\.aligned 1;", None),
]


def caller(function, arity):
    """A kernel that calls the wrapper with its own arguments."""
    return (lambda: function(), lambda a: function(a), lambda a, b: function(a, b), lambda a, b, c: function(a, b, c),
            lambda a, b, c, d: function(a, b, c, d), lambda a, b, c, d, e: function(a, b, c, d, e),
            lambda a, b, c, d, e, f: function(a, b, c, d, e, f))[arity]


@pytest.mark.parametrize(("function", "argtypes", "pattern", "opcode"), PLAIN, ids=lambda value: getattr(value, "__name__", None))
def test_instructions(function, argtypes, pattern, opcode):
    text, sass = compiled(caller(function, len(argtypes)), *argtypes)
    assert re.search(pattern, text), text
    if opcode:
        assert opcode in sass, sass


def test_loads_return_what_they_load():
    load_u32, load_f32 = ptx.load_shared_u32, ptx.load_shared_f32

    def kernel(words, floats, address, other):
        words[0] = load_u32(address)
        floats[0] = load_f32(other)

    text, sass = compiled(kernel, WORDS, FLOATS, uint32, uint32)
    assert re.search(r"ld\.shared\.u32 %r\d+, \[%r\d+\];", text)
    assert re.search(r"ld\.shared\.f32 %f\d+, \[%r\d+\];", text)
    assert sass.count("LDS") == 2


@pytest.mark.parametrize(("count", "step"), [(8, 32), (8, 1), (2, 5)])
def test_words_are_loaded_as_far_as_there_are_any(count, step):
    load, global_address = ptx.load_words(count, step), ptx.global_address

    def kernel(words, rest):
        loaded = load(global_address(words) + uint64(4096), rest)
        for j in range(count):
            words[j] = loaded[j]

    text, sass = compiled(kernel, WORDS, types.int32)
    assert [int(least) for least in re.findall(r"setp\.gt\.s32 p, %r\d+, (\d+);", text)] == [step * j for j in range(count)]
    loads = re.findall(r"mov\.u32 (%r\d+), 0; @p ld\.global\.u32 (%r\d+), \[%rd\d+\+(\d+)\];", text)
    assert [int(offset) for _, _, offset in loads] == [4 * step * j for j in range(count)]
    assert all(zeroed == loaded for zeroed, loaded, _ in loads)
    assert len(re.findall(r"@!?P\d LDG", sass)) == count


def test_a_score_s_key():
    sortable_bits = ptx.sortable_bits

    def kernel(words):
        words[0] = sortable_bits(words[1])

    text, sass = compiled(kernel, WORDS)
    assert "add.rn.f32 x, x, 0f00000000; setp.nan.f32 nan, x, x;" in text
    assert re.search(r"FADD R\d+, RZ, R\d+|FADD R\d+, R\d+, RZ", sass), sass                # no FTZ: subnormals are kept


@pytest.mark.parametrize(("function", "register"), [
    (ptx.cluster_id, "%clusterid.x"), (ptx.cluster_rank, "%cluster_ctarank"), (ptx.cluster_size, "%cluster_nctarank")])
def test_places_in_a_cluster(function, register):
    def kernel(words):
        words[0] = function()

    text, _ = compiled(kernel, WORDS)
    assert f", {register};" in text


def test_a_sum_over_a_warp():
    warp_sum = ptx.warp_sum

    def kernel(numbers):
        numbers[0] = warp_sum(numbers[1])

    text, sass = compiled(kernel, types.Array(types.int32, 1, "C"))
    assert re.search(r"redux\.sync\.add\.s32 %r\d+, %r\d+, 0xffffffff;", text)
    assert "REDUX.SUM.S32" in sass


def test_addresses_of_shared_arrays_are_in_the_shared_window():
    shared_address, at, store = ptx.shared_address, ptx.at, ptx.store_shared_u32

    def kernel(index):
        array = cuda.shared.array(64, types.uint32)
        store(at(shared_address(array), 16, 8, index), index)

    text, sass = compiled(kernel, uint32)
    assert "cvta.to.shared.u64" in text
    assert "STS" in sass
    assert "ST.E" not in sass


def test_a_tensor_map_is_written_whole():
    store = ptx.store_tensor_map

    def kernel(address, words):
        store(address, words)

    text, sass = compiled(kernel, uint64, MAP)
    assert [int(at) for at in re.findall(r"st\.global\.u64 \[%rd\d+\+(\d+)\]", text)] == [8 * i for i in range(16)]
    assert sass.count("STG") >= 8


@pytest.mark.parametrize(("direction", "opcode"), [("dec", "USETMAXREG.DEALLOC"), ("inc", "USETMAXREG.TRY_ALLOC")])
def test_registers_move(direction, opcode):
    move = ptx.set_registers(direction, 40 if direction == "dec" else 232)

    def kernel(words):
        move()
        words[0] = uint32(1)

    text, sass = compiled(kernel, WORDS)
    assert f"setmaxnreg.{direction}.sync.aligned.u32" in text
    assert opcode in sass


@pytest.mark.parametrize(("columns", "num_steps"), [(8, 1), (64, 2), (128, 4), (256, 4)])
def test_products(columns, num_steps):
    """One wgmma per 32 of depth, 32 bytes (2 sixteenths) apart, from zero; and to what is there where it is to be kept.

    In a loop, as kernels use them: outside of one, ptxas 13.5 drops products of a chain of up to 64 columns.
    """
    declare, wait = ptx.declare(acc=columns // 2), ptx.wgmma_wait_0
    multiply, multiply_and_add = (ptx.wgmma_e4m3(0, columns, num_steps, keep) for keep in (False, True))
    read = ptx.instruction(f"mov.f32 $0, acc{columns // 2 - 1};", ptx.f32)

    def kernel(floats, a, b, count):
        declare()
        for i in range(count):
            multiply(a, b)
            wait()
            multiply_and_add(b, a)
            wait()
            floats[i] = read()

    text, sass = compiled(kernel, FLOATS, uint32, uint32, uint32)
    products = re.findall(rf"m64n{columns}k32\.f32\.e4m3\.e4m3 \{{(.*?)\}}, a, b, (\d), 1, 1;", text)
    copies = len(products) // (2 * num_steps)                           # LLVM may unroll the loop
    assert copies >= 1
    assert [int(scale) for _, scale in products] == copies * [0, *[1] * (2 * num_steps - 1)]
    assert all(registers.split(", ") == [f"acc{i}" for i in range(columns // 2)] for registers, _ in products)
    offsets = [int(offset) for offset in re.findall(r"add\.u32 at, %r\d+, (\d+);", text)]
    assert offsets == 2 * copies * [2 * (i // 2) for i in range(2 * num_steps)]
    assert sass.count(f"QGMMA.64x{columns}x32") == len(products)


def test_descriptors_are_those_of_swizzled_rows_of_128_bytes():
    """PTX ISA, matrix descriptor: stride offset over 16 in bits 32-45, layout type 1 (128-byte swizzle) in bits 62-63."""
    upper = ptx._SWIZZLED_ROWS
    assert upper & 0x3FFF == 8 * 128 // 16
    assert upper >> 30 == 1
    assert upper >> 14 & 0xFFFF == 0
