"""The custom ops of torch: schemas and fake kernels without a GPU; on one the plain function's bits, compiled and captured, and the
README's example for engines."""
import inspect
import pathlib

import numpy as np
import oracle
import pytest
from arrays import to_host, to_torch
from assertions import assert_same_bits
from test_gpu import small

import indexer
from indexer.batches import make_batch

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("indexer.torch_ops")

OP, OUT_OP = torch.ops.indexer.mla_indexer_ragged_float8_paged, torch.ops.indexer.mla_indexer_ragged_float8_paged_out
OPTIONS = "mask", "kpool", "scores_budget_bytes", "order", "arithmetic"


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.kernels(test))


def tensors(batch, device="cuda"):
    """The op's tensors with the contents of a batch."""
    arrays = batch.q, batch.q_s, batch.input_row_offsets, batch.fused_pages, batch.cache_lengths, batch.lookup_table
    return tuple(to_torch(array, device) for array in arrays)


# ---------------------------------------------------------------------------------------------------------- without a GPU


def test_the_schemas():
    """No argument but `out` is written; options have the plain function's defaults."""
    plain = inspect.signature(indexer.mla_indexer_ragged_float8_paged).parameters
    for op, written, returned in ((OP, [], ["Tensor"]), (OUT_OP, ["out"], [])):
        schema = op.default._schema
        assert [str(value.type) for value in schema.returns] == returned
        arguments = {argument.name: argument for argument in schema.arguments}
        assert [name for name, argument in arguments.items() if argument.alias_info and argument.alias_info.is_write] == written
        assert list(arguments) == ["q", "q_s", "input_row_offsets", "pages", "cache_lengths", "lookup_table", "top_k", *written,
                                   "max_prompt_length", "max_context_length", *OPTIONS]
        for name in OPTIONS:
            assert arguments[name].default_value == plain[name].default


def empty_tensors(device, num_tokens):
    shapes = ((num_tokens, 64, 128), torch.float8_e4m3fn), ((num_tokens, 64), torch.float32), ((3,), torch.int32), (
        (9, 64, 1, 132), torch.uint8), ((2,), torch.int32), ((2, 4), torch.int32)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_fake_tensors(num_tokens, device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        arguments = empty_tensors(device, num_tokens)
        got = OP(*arguments, 2048, order="score")
        assert (got.shape, got.dtype, got.device) == ((num_tokens, 2048), torch.int32, arguments[0].device)
        assert got.is_contiguous()
        assert OUT_OP(*arguments, 2048, out=got, kpool=4) is None


def test_a_trace_holds_the_op_with_any_number_of_tokens():
    from torch.fx.experimental.proxy_tensor import make_fx
    traced = make_fx(lambda *tensors: OP(*tensors, 100) + 1, tracing_mode="symbolic")(*empty_tensors("cpu", 5))
    nodes = [node for node in traced.graph.nodes if node.target is OP.default]
    assert len(nodes) == 1
    rows, columns = nodes[0].meta["val"].shape
    assert isinstance(rows, torch.SymInt)
    assert columns == 100


def oracle_on_tensors(q, q_s, input_row_offsets, cache, *, out=None, arithmetic="auto", **options):
    """The plain function's stand-in on the host."""
    def to_numpy(tensor):
        return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).numpy()

    numpy_cache = indexer.PagedKeyCache(cache.blocks.numpy(), cache.scales.numpy(), cache.cache_lengths.numpy(),
                                        cache.lookup_table.numpy(), fp8_dtype=cache.fp8_dtype,
                                        max_prompt_length=cache.max_prompt_length, max_context_length=cache.max_context_length)
    result = indexer.reference.mla_indexer_ragged_float8_paged(
        to_numpy(q), to_numpy(q_s), to_numpy(input_row_offsets), numpy_cache,
        arithmetic="exact" if arithmetic == "auto" else arithmetic, **options)
    if out is not None:
        out.copy_(torch.from_numpy(result))
    return torch.from_numpy(result)


@pytest.fixture
def on_the_host(monkeypatch):
    """The ops' own functions for host tensors, the oracle behind them, for the length of a test."""
    monkeypatch.setattr(torch_ops.cuda_kernels, "mla_indexer_ragged_float8_paged", oracle_on_tensors)
    with torch.library._scoped_library("indexer", "FRAGMENT") as library:
        for op in (torch_ops.mla_indexer_ragged_float8_paged, torch_ops.mla_indexer_ragged_float8_paged_out):
            library.impl(op._name, op._init_fn, "CPU")
        yield


CASES = {
    "decode": {},
    "pooled": {"kpool": 4, "mask": "null", "order": "score"},
    "fnuz": {"fp8_dtype": "float8_e4m3fnuz"},
    "bounded": {"max_prompt_length": 3, "max_context_length": 300},
    "int32": {"metadata_dtype": "int32"},
}


def case(name):
    batch = make_batch(np.random.default_rng(3), new_tokens=[1, 0, 3], cached=[150, 9, 300], num_heads=4, head_dim=32, top_k=40,
                       page_size=16, **CASES[name])
    options = {"mask": batch.mask, "kpool": batch.kpool, "order": batch.order, "max_prompt_length": batch.max_prompt_length,
               "max_context_length": batch.max_context_length}
    return batch, options


@pytest.mark.parametrize("name", CASES)
def test_the_ops_hand_everything_on(name, on_the_host):
    batch, options = case(name)
    want = batch.select(indexer.reference.mla_indexer_ragged_float8_paged)
    assert_same_bits(OP(*tensors(batch, "cpu"), 40, **options).numpy(), want)
    out = torch.full(want.shape, -7, dtype=torch.int32)
    version = out._version
    assert OUT_OP(*tensors(batch, "cpu"), 40, out=out, **options) is None
    assert out._version > version
    assert_same_bits(out.numpy(), want)


def check_by_torch(device):
    """Queries as bytes, since the check multiplies arguments, which torch cannot do in FP8."""
    batch, options = case("int32")
    q, *others = tensors(batch, device)
    out = torch.zeros(batch.num_tokens, 40, dtype=torch.int32, device=device)
    torch.library.opcheck(OP.default, (q.view(torch.uint8), *others, 40), options)
    torch.library.opcheck(OUT_OP.default, (q.view(torch.uint8), *others, 40, out), options)


def test_what_torch_checks_of_an_op(on_the_host):
    check_by_torch("cpu")


def around_the_ops(q, q_s, *others):
    """A small piece of a model: what is before, between and after."""
    indices = OP(q, q_s * 2, *others, 40)
    out = torch.zeros_like(indices)
    OUT_OP(q, q_s * -2, *others, 40, out=out)
    return indices, out.clamp(min=0), (indices >= 0).sum(dim=1)


def assert_compiled_equals_eager(device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(around_the_ops, fullgraph=True, backend=backend)
    for new_tokens in ([1, 0, 3], [2, 5, 1], [1, 1, 1]):                    # the second changes the number of tokens
        batch = make_batch(np.random.default_rng(3), new_tokens=new_tokens, cached=[150, 9, 300], num_heads=4, head_dim=32,
                           page_size=16, metadata_dtype="int32")
        arguments = tensors(batch, device)
        for got, want in zip(compiled(*arguments), around_the_ops(*arguments)):
            assert_same_bits(to_host(got), to_host(want))


def test_compiled_on_the_host(on_the_host):
    assert_compiled_equals_eager("cpu", "aot_eager")


def test_host_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="CPU"):
        OP(*tensors(case("decode")[0], "cpu"), 40)


# ------------------------------------------------------------------------------------------------------------ with a GPU


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_the_op_equals_the_plain_function(name):
    batch, options = case(name)
    arguments = tensors(batch)
    cache = indexer.PagedKeyCache.from_fused(*arguments[3:], fp8_dtype=batch.fp8_dtype,
                                             max_prompt_length=batch.max_prompt_length, max_context_length=batch.max_context_length)
    plain = to_host(indexer.mla_indexer_ragged_float8_paged(*arguments[:3], cache, top_k=40, mask=batch.mask, kpool=batch.kpool,
                                                            order=batch.order))
    got = OP(*arguments, 40, **options)
    assert got.device == arguments[0].device
    assert_same_bits(to_host(got), plain)
    assert_same_bits(to_host(got), batch.select(oracle.select))
    out = torch.full(plain.shape, -7, dtype=torch.int32, device="cuda")
    OUT_OP(*arguments, 40, out=out, **options)
    assert_same_bits(to_host(out), plain)


@on_gpu
def test_bytes_for_queries():
    batch = small(page_size=64)
    q, *others = tensors(batch)
    assert_same_bits(to_host(OP(q.view(torch.uint8), *others, batch.top_k)), batch.select(oracle.select))


@on_gpu
def test_errors_are_the_plain_functions():
    batch = small(page_size=64)
    q, q_s, *others = tensors(batch)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        OP(q, q_s, *others, 0)
    with pytest.raises(TypeError, match="q_s must be float32, got float64"):
        OP(q, q_s.double(), *others, 4)
    with pytest.raises(ValueError, match="out must have shape"):
        OUT_OP(q, q_s, *others, 4, out=torch.empty(batch.num_tokens, 5, dtype=torch.int32, device="cuda"))


@on_gpu
def test_compiled_on_a_gpu():
    pytest.importorskip("triton")
    assert_compiled_equals_eager("cuda", "inductor")


@on_gpu
def test_what_torch_checks_of_an_op_on_a_gpu():
    check_by_torch("cuda")


@on_gpu
def test_the_out_op_in_a_captured_graph():
    """Replayed with other queries and lengths in the same memory."""
    first, second = small(page_size=64), small(1, page_size=64)
    arguments = tensors(first)
    out = torch.full((first.num_tokens, first.top_k), -7, dtype=torch.int32, device="cuda")
    OUT_OP(*arguments, first.top_k, out=out)                                # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OUT_OP(*arguments, first.top_k, out=out)
    for batch in (first, second):
        for target, source in zip(arguments, tensors(batch)):
            target.view(torch.uint8).copy_(source.view(torch.uint8))
        out.fill_(-7)
        graph.replay()
        assert_same_bits(to_host(out), batch.select(oracle.select))


@on_gpu
def test_the_readme_example_for_engines():
    """The captured step, then replayed after the engine has changed lengths; padded requests have rows of -1."""
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    scope = {}
    exec(readme.split("```python\n")[2].split("```")[0], scope)
    q, next_n = scope["q"], scope["next_n"]

    def check():
        total = scope["context_lens"].cpu().numpy()
        real = np.flatnonzero(total)
        rows = (real[:, None] * next_n + np.arange(next_n)).ravel()
        cache = indexer.PagedKeyCache.from_fused(scope["fused_kv_cache"].cpu().numpy(), (total[real] - next_n).astype(np.int32),
                                                 scope["block_tables"].cpu().numpy()[real])
        queries = q.view(torch.uint8).flatten(0, 1).cpu().numpy()
        want = np.full((len(queries), scope["top_k"]), -1, np.int32)
        want[rows] = oracle.select(queries[rows], scope["weights"].cpu().numpy()[rows],
                                   np.arange(len(real) + 1, dtype=np.int32) * next_n, cache, top_k=scope["top_k"])
        assert 0 < len(real) < len(total)
        assert_same_bits(to_host(scope["topk_indices"]), want)

    check()
    scope["context_lens"].copy_(torch.tensor([0, 2, 450, 3990], dtype=torch.int32))
    scope["block_tables"].copy_(scope["block_tables"].flip(0))
    scope["topk_indices"].fill_(-7)
    scope["graph"].replay()
    check()
