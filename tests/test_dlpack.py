"""Arrays of libraries that speak DLPack: what is read of a capsule, and on a GPU the oracle's bits from them."""
import ctypes
import gc
import weakref
from dataclasses import replace

import numpy as np
import oracle
import pytest
from arrays import to_host
from assertions import assert_same_bits
from test_gpu import small

import indexer
from indexer import dlpack
from indexer.problem import describe

SELECT = indexer.mla_indexer_ragged_float8_paged
DEVICE, HOST = (2, 0), (1, 0)
CODES = {"float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12}


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.kernels(test))


class Exporting:
    """An array that shows nothing of itself but DLPack: FP8 is exported as bytes, and its code put into the capsule."""

    def __init__(self, array, device=DEVICE, *, fp8=None, version=(1, 1), **shown):
        self.array, self.device, self.fp8, self.version, self.streams = array, device, fp8, version, []
        self.__dict__.update(shown)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        if self.version < (1, 0):
            if options:
                raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        else:
            options = {"max_version": self.version}
        on_host = isinstance(self.array, np.ndarray)
        capsule = self.array.__dlpack__(**options) if on_host else self.array.__dlpack__(stream=stream, **options)
        tensor = tensor_of(capsule)
        tensor.device_type, tensor.device_id = self.device
        if self.fp8:
            tensor.code = CODES[self.fp8]
        return capsule


def tensor_of(capsule):
    for name, structure in ((b"dltensor", dlpack._Managed), (b"dltensor_versioned", dlpack._ManagedVersioned)):
        if dlpack._capsule_is(capsule, name):
            return structure.from_address(dlpack._pointer_of(capsule, name)).tensor
    raise AssertionError("no capsule")


# ---------------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("version", [(0, 8), (1, 1)])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint32", "float32", "int64"])
def test_what_is_read_of_a_capsule(dtype, version):
    array = np.zeros((3, 4, 5), dtype)[:, 1:, ::2]
    exporting = Exporting(array, version=version)
    view = describe("q", exporting)
    assert (view.address, view.shape, view.strides, view.dtype) == (array.ctypes.data, array.shape, array.strides, dtype)
    assert (view.on_device, view.library, view.owner, view.writeable, view.stream) == (True, "cuda", exporting, True, 1)
    assert exporting.streams[-1] == 1                                   # what the contents are ordered with
    assert describe("q", Exporting(array, (13, 0), version=version)).on_device


@pytest.mark.parametrize("fp8", CODES)
def test_the_kinds_of_fp8(fp8):
    view = describe("q", Exporting(np.zeros((2, 3), np.uint8), fp8=fp8))
    assert (view.dtype, view.itemsize, view.strides) == (fp8, 1, (3, 1))


def test_strides_that_are_left_out_are_those_of_c():
    class Bare(Exporting):
        def __dlpack__(self, **options):
            capsule = super().__dlpack__(**options)
            tensor_of(capsule).strides = type(tensor_of(capsule).strides)()
            tensor_of(capsule).byte_offset = 8
            return capsule

    array = np.zeros((2, 3, 4), np.float32)
    view = describe("q", Bare(array))
    assert (view.address, view.strides) == (array.ctypes.data + 8, (48, 16, 4))


def test_read_only_arrays_are_no_outputs():
    array = np.zeros((2, 3), np.int32)
    array.flags.writeable = False
    assert not describe("out", Exporting(array)).writeable


def test_exported_memory_lives_as_long_as_what_was_made_of_its_view():
    class Owner(np.ndarray):
        pass

    array = np.zeros((4, 8), np.uint8).view(Owner)
    gone = weakref.ref(array)
    exporting = Exporting(array)
    view = describe("q", exporting)
    part = replace(view, owner=None).sliced(axes=(0,), offset=3).rows(1, 3)
    exporting.array = None
    del array, view, exporting
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("interface", "through_dlpack"), [
    ({"version": 2, "typestr": "<i4"}, True),                           # names no stream to wait for
    ({"version": 3, "typestr": "|V1"}, True),                           # knows no FP8
    ({"version": 3, "typestr": "<i4"}, False)])
def test_dlpack_or_the_array_interface(interface, through_dlpack):
    interface = {**interface, "shape": (2, 3), "data": (4096, False)}
    view = describe("q", Exporting(np.zeros((2, 3), np.int32), __cuda_array_interface__=interface))
    assert (view.address != 4096) == through_dlpack
    assert view.writeable
    interface["data"] = (4096, True)
    assert not describe("q", Exporting(np.zeros((2, 3), np.int32), __cuda_array_interface__=interface)).writeable
    on_host = Exporting(np.zeros((2, 3), np.int32), HOST, __cuda_array_interface__=interface)
    assert describe("q", on_host).address == 4096


def test_what_cannot_be_read_is_refused():
    class Refusing(Exporting):
        def __dlpack__(self, **_):
            raise BufferError("not now")

    class NoCapsule(Exporting):
        def __dlpack__(self, **_):
            return 5

    array = np.zeros((2, 3), np.int32)
    with pytest.raises(TypeError, match=r"^q must be an array that DLPack can export, got one of Refusing that gives BufferError"):
        describe("q", Refusing(array))
    with pytest.raises(TypeError, match="int instead of a DLPack capsule"):
        describe("q", NoCapsule(array))
    with pytest.raises(TypeError, match=r"^q must be a NumPy array, a torch tensor or .* or __dlpack__, got Exporting"):
        describe("q", Exporting(array, HOST))
    q, *others = small().arguments()
    with pytest.raises(TypeError, match=r"^q must be a NumPy array, got Exporting"):
        indexer.reference.mla_indexer_ragged_float8_paged(Exporting(q.view(np.uint8)), *others, top_k=4)


@pytest.mark.parametrize(("changes", "message"), [
    ({"device_type": 1}, "a capsule of DLPack device type 1 with 2 axes"),          # another one than the array said
    ({"device_type": 3}, "a capsule of DLPack device type 3 with 2 axes"),
    ({"ndim": -1}, "a capsule of DLPack device type 2 with -1 axes"),
    ({"shape": ctypes.POINTER(ctypes.c_int64)()}, "NULL pointer access"),
    ({"shape": (ctypes.c_int64 * 2)(-2, 3)}, r"shape \(-2, 3\), strides"),
    ({"byte_offset": 2**64 - 1}, r"shape \(2, 3\), strides \(12, 4\), address \d+"),
    ({"bits": 0}, "items of DLPack type code 0, 0 bits and 1 lanes"), ({"bits": 4}, "type code 0, 4 bits and 1 lanes"),
    ({"lanes": 4}, "32 bits and 4 lanes"), ({"code": 99}, "type code 99"), ({"code": 6}, "type code 6, 32 bits"),
    ({"code": 10}, "type code 10, 32 bits")])
def test_a_capsule_that_makes_no_sense_is_refused(changes, message):
    class Changed(Exporting):
        def __dlpack__(self, **options):
            capsule = super().__dlpack__(**options)
            for name, value in changes.items():
                setattr(tensor_of(capsule), name, value)
            return capsule

    with pytest.raises(TypeError, match=rf"^q must be an array that DLPack can export, got one of Changed that gives .*{message}"):
        describe("q", Changed(np.zeros((2, 3), np.int32)))


# ------------------------------------------------------------------------------------------------------------ with a GPU


def to_exporting(array):
    """On the GPU by torch, FP8 under its own code."""
    torch = pytest.importorskip("torch")
    fp8 = array.dtype.name if array.dtype.name in CODES else None
    bits = array.view(np.uint8) if fp8 else array.view(np.int32) if array.dtype == np.uint32 else array
    return Exporting(torch.from_numpy(bits).cuda(), fp8=fp8)


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_exported_arrays_give_the_oracles_bits(fused):
    batch = replace(small(page_size=64, order="score"), fused=fused)
    want_scores = np.empty((batch.num_tokens, batch.top_k), np.float32)
    want = batch.select(oracle.select, out_scores=want_scores)
    out, out_scores = to_exporting(np.zeros_like(want)), to_exporting(np.zeros_like(want_scores))
    assert batch.select(SELECT, to_exporting, out=out, out_scores=out_scores) is out
    assert_same_bits(to_host(out.array), want)
    assert_same_bits(to_host(out_scores.array), want_scores)
    assert_same_bits(to_host(batch.select(SELECT, to_exporting)), want)


@on_gpu
def test_a_plan_takes_exported_arrays():
    batch = small(page_size=64)
    plan = indexer.IndexerPlan(max_tokens=batch.num_tokens, max_requests=4, top_k=batch.top_k,
                               max_candidates=batch.lookup_table.shape[1] * 64)
    arguments, out = batch.arguments(to_exporting), to_exporting(np.zeros((batch.num_tokens, batch.top_k), np.int32))
    for _ in range(2):                                                  # packed, remembered
        out.array.fill_(-7)
        plan(*arguments, out=out)
        assert_same_bits(to_host(out.array), batch.select(oracle.select))


@on_gpu
def test_the_producer_of_an_exported_array_is_waited_for():
    torch = pytest.importorskip("torch")
    batch = small()
    q, *others = batch.arguments(to_exporting)
    SELECT(q, *others, top_k=batch.top_k)                               # compiles
    late, producer, consumer = torch.zeros_like(q.array), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
        late.copy_(q.array)
        got = SELECT(Exporting(late, fp8="float8_e4m3fn"), *others, top_k=batch.top_k, stream=consumer)
    assert not consumer.query()
    consumer.synchronize()
    assert_same_bits(to_host(got), batch.select(oracle.select))


@on_gpu
def test_jax_arrays():
    """FP8 as bytes, which every version exports, and as what it is."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    batch = small(page_size=64)
    want = batch.select(oracle.select)

    def as_bytes(array):
        return jax.device_put(array.view(np.uint8) if array.dtype.name.startswith("float8") else array)

    for to in (as_bytes, jax.device_put):
        got = SELECT(*batch.arguments(to), top_k=batch.top_k)
        assert_same_bits(to_host(got), want)
