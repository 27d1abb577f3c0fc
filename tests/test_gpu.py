"""What only a real GPU shows: real sizes, arrays of other libraries, streams, capture, and metadata on the device."""
import pathlib

import numpy as np
import oracle
import pytest
from arrays import to_cupy, to_host, to_torch
from assertions import assert_same_bits
from numba import cuda

import indexer
from indexer import cuda_kernels, launches, reference, sampled_selection
from indexer.__main__ import to_device as to_numba
from indexer.batches import make_batch, random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]

SELECT, ORACLE = indexer.mla_indexer_ragged_float8_paged, oracle.select


def small(seed=0, **options):
    """A ragged batch: decode, a prefill chunk, an empty request."""
    options = {"num_heads": 64, "top_k": 64, **options}
    return make_batch(np.random.default_rng(seed), new_tokens=[1, 40, 0, 3], cached=[900, 300, 7, 0], **options)


# ------------------------------------------------------------------------------------------------------------- real sizes


@pytest.mark.parametrize("kpool", [1, 4])
def test_a_real_sized_batch_equals_the_oracle(kpool):
    """512 tokens of 4 requests with up to 32,768 cached keys, 64 heads, top_k 2048, causal: indices and scores."""
    batch = make_batch(np.random.default_rng(kpool), new_tokens=[300, 1, 211, 0], cached=[32468, 32767, 12000, 500], kpool=kpool,
                       num_heads=64, head_dim=128, top_k=2048, order="score", scores_budget_bytes=16 * 2**20)
    want_scores = np.empty((512, 2048), np.float32)
    want = batch.select(ORACLE, out_scores=want_scores, arithmetic="exact")
    out, out_scores = to_numba(np.full(want.shape, 0x7FFFFFFF, np.int32)), to_numba(np.full(want.shape, np.nan, np.float32))
    batch.select(SELECT, to_numba, out=out, out_scores=out_scores, arithmetic="exact")
    assert_same_bits(to_host(out), want)
    assert_same_bits(to_host(out_scores), want_scores)
    by_index = to_host(batch.select(SELECT, to_numba, order="index", arithmetic="exact"))
    assert_same_bits(by_index, np.sort(want.view(np.uint32)).view(np.int32))


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_with_device_metadata(seed):
    """Lengths, offsets and table are not read back: W comes from the bounds, and nothing else changes."""
    batch = random_batch(np.random.default_rng([11, seed]))
    want = batch.score(oracle.scores)
    got = to_host(batch.score(indexer.index_scores, to_numba))
    assert_same_bits(got[:, :want.shape[1]], want)
    assert (got[:, want.shape[1]:] == -np.inf).all()
    assert_same_bits(to_host(batch.select(SELECT, to_numba)), batch.select(ORACLE))


@pytest.mark.parametrize("num_keys", [1000, 100_000, 1_000_000])
@pytest.mark.parametrize("regime", ["one-bin", "all-ties", "relu-plateau", "nan-laced"])
def test_long_rows(regime, num_keys):
    batch = make_batch(np.random.default_rng(1), new_tokens=[2], cached=[num_keys - 2], num_heads=1, head_dim=4, regime=regime,
                       top_k=2048, order="score")
    assert_same_bits(batch.select(SELECT), batch.select(ORACLE))


def planted(rows, top_k, **options):
    """Decode requests with these rows of scores: queries and keys are one-hot, so the score of a key is its scale."""
    batch = make_batch(np.random.default_rng(0), new_tokens=[1] * len(rows), cached=[len(row) - 1 for row in rows], num_heads=1,
                       head_dim=4, page_size=64, regime="one-bin", top_k=top_k, **options)
    for row, table in zip(rows, batch.lookup_table):
        at = np.arange(len(row))
        batch.scales[table[at // 64], 0, 0, at % 64, 0, 0] = row
    return batch


def row_of(kind, size, rng):
    """A row of scores of a kind that has misled selections elsewhere."""
    gaussian = rng.standard_normal(size).astype(np.float32)
    if kind == "ascending":
        return np.sort(gaussian)
    if kind == "descending":
        return np.sort(gaussian)[::-1]
    if kind == "plateau":
        return np.maximum(gaussian - 2, np.float32(0))
    if kind == "ties":
        return np.ones_like(gaussian)
    if kind == "nan":
        return np.where(rng.random(size) < 0.97, np.float32(np.nan), gaussian)
    if kind == "infinite":
        return rng.choice(np.float32([np.inf, -np.inf, 1, -0.0, 0.0]), size)
    if kind == "low bits":
        return (np.uint32(0x3F800000) + rng.integers(0, 1024, size, np.uint32)).view(np.float32)
    if kind == "bits":
        return rng.integers(0, 2**32, size, np.uint32).view(np.float32)
    return gaussian


KINDS = ("gaussian", "ascending", "descending", "plateau", "ties", "nan", "infinite", "low bits", "bits")


def selected(batch, function, **extra):
    out_scores = np.full((batch.num_tokens, batch.top_k), np.nan, np.float32)
    return batch.select(function, out_scores=out_scores, **extra), out_scores


@pytest.fixture(params=["clusters", "no clusters"])
def with_and_without_clusters(request, monkeypatch):
    """Few rows are selected by clusters where there are some; else by blocks that hand over."""
    if request.param == "no clusters":
        monkeypatch.setattr(launches, "max_clusters", lambda _: {})


@pytest.mark.usefixtures("with_and_without_clusters")
@pytest.mark.parametrize("top_k", [1, 777, 2048, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_of_every_kind_of_row(kind, top_k):
    """Rows around every limit of the kernels: as long as top_k, as a block holds, sampled, shared among blocks."""
    rng = np.random.default_rng([top_k, len(kind)])
    sizes = 1, top_k, top_k + 1, 8192, 8193, 8223, 20_000, 70_001, 131_072
    rows = [row_of(kind, size, rng) for size in sizes]
    few = planted(rows, top_k)
    for batch in (few, planted(rows[2:6] * 40, top_k)):                 # blocks share the rows, or have one each
        for got, want in zip(selected(batch, SELECT), selected(batch, ORACLE)):
            assert_same_bits(got, want)


@pytest.mark.parametrize("top_k", [1, 2048, 9000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 5000), (2, 1_200_000), (8, 65_537), (16, 20_479), (40, 20_001), (40, 90_001),
                                                (70, 5001), (70, 50_001)])
def test_selection_by_clusters_of_any_size(num_rows, size, kind, top_k):
    """Of 1, 2, 4, 8 and 16 blocks; pieces that a block cannot hold; rows of other lengths in between, all selected from some; rows
    that clusters leave to another selection beside those that they take."""
    rng = np.random.default_rng([num_rows, len(kind)])
    rows = [row_of(kind, size if i % 3 == 0 else int(rng.integers(1, size)), rng) for i in range(num_rows)]
    batch = planted(rows, top_k)
    for got, want in zip(selected(batch, SELECT), selected(batch, ORACLE)):
        assert_same_bits(got, want)


@pytest.mark.usefixtures("with_and_without_clusters")
@pytest.mark.parametrize("num_rows", [1, 140])
@pytest.mark.parametrize("sample_is_best", [True, False])
def test_a_sample_that_misleads_changes_nothing(sample_is_best, num_rows):
    """Scores planted where the bound is sampled: with the best all there it is too high, with the worst all there too low."""
    size, rng = 40_000, np.random.default_rng(4)
    lines = 64                                                          # of 32 scores each: 2048
    sampled = (np.arange(lines)[:, None] * (size // lines) + np.arange(32)).ravel()
    row = rng.random(size, np.float32)
    row[sampled] += np.float32(2 if sample_is_best else -2)
    batch = planted([row] * num_rows, 3000)
    want = ORACLE(*planted([row], 3000).arguments(), top_k=3000)
    assert_same_bits(batch.select(SELECT), np.repeat(want, num_rows, axis=0))


@pytest.mark.usefixtures("with_and_without_clusters")
@pytest.mark.parametrize("kind", ["gaussian", "plateau"])
def test_selection_is_the_same_on_every_run(kind):
    rng = np.random.default_rng(5)
    batch = planted([row_of(kind, 50_000, rng) for _ in range(3)], 2048)
    arguments = batch.arguments(to_numba)
    first = to_host(SELECT(*arguments, top_k=2048))
    for _ in range(25):
        assert_same_bits(to_host(SELECT(*arguments, top_k=2048)), first)


def test_the_portable_selection_on_a_gpu(monkeypatch):
    """What other cards and the simulator use, on the same batches."""
    monkeypatch.setattr(sampled_selection, "supports", lambda *_: False)
    monkeypatch.setattr(launches, "max_clusters", lambda _: {})
    for seed in range(60):
        batch = random_batch(np.random.default_rng([12, seed]))
        for got, want in zip(selected(batch, SELECT), selected(batch, ORACLE)):
            assert_same_bits(got, want)


@pytest.mark.parametrize("top_k", [1, 4096, 10_000])
def test_any_top_k(top_k):
    batch = make_batch(np.random.default_rng(2), new_tokens=[3], cached=[9000], num_heads=4, head_dim=16, top_k=top_k,
                       order="score")
    assert_same_bits(batch.select(SELECT), batch.select(ORACLE))


# ------------------------------------------------------------------------------------------------------ libraries, streams


@pytest.mark.parametrize("order", ["index", "score"])
def test_torch_tensors(order):
    torch = pytest.importorskip("torch")
    batch = small(order=order)
    out_scores = torch.full((batch.num_tokens, batch.top_k), torch.nan, device="cuda")
    got = batch.select(SELECT, to_torch, out_scores=out_scores)
    want_scores = np.empty(out_scores.shape, np.float32)
    want = batch.select(ORACLE, out_scores=want_scores)
    assert isinstance(got, torch.Tensor)
    assert got.is_cuda
    assert_same_bits(to_host(got), want)
    assert_same_bits(to_host(out_scores), want_scores)


def test_torch_tensors_on_the_host():
    torch = pytest.importorskip("torch")
    batch = small()
    got = batch.select(SELECT, lambda array: to_torch(array, "cpu"))
    assert isinstance(got, torch.Tensor)
    assert not got.is_cuda
    assert_same_bits(got.numpy(), batch.select(ORACLE))


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    batch = small()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arguments = batch.arguments(to_cupy)
        got = SELECT(*arguments, top_k=batch.top_k)
        stream.synchronize()
    assert isinstance(got, cupy.ndarray)
    assert_same_bits(got.get(), batch.select(ORACLE))


def test_fused_torch_pages():
    batch = small(page_size=64)
    cache = indexer.PagedKeyCache.from_fused(*map(to_torch, (batch.fused_pages, batch.cache_lengths, batch.lookup_table)))
    got = SELECT(to_torch(batch.q), to_torch(batch.q_s), to_torch(batch.input_row_offsets), cache, top_k=batch.top_k)
    assert_same_bits(to_host(got), batch.select(ORACLE))


def test_work_follows_the_current_and_the_given_stream():
    """Inputs that a long-running kernel on the same stream has still to produce are waited for; the host is not held up."""
    torch = pytest.importorskip("torch")
    batch = small()
    want = batch.select(ORACLE)
    q, *others = batch.arguments(to_torch)
    SELECT(q, *others, top_k=batch.top_k)                               # compiles
    for given in (False, True):
        stream = torch.cuda.Stream()
        late = torch.zeros_like(q.view(torch.uint8))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            late.copy_(q.view(torch.uint8))
        if given:
            got = SELECT(late, *others, top_k=batch.top_k, stream=stream)
        else:
            with torch.cuda.stream(stream):
                got = SELECT(late, *others, top_k=batch.top_k)
        assert not stream.query()
        stream.synchronize()
        assert_same_bits(to_host(got), want)


def test_a_producer_on_another_stream_is_waited_for():
    """numba arrays name their stream in the array interface."""
    torch = pytest.importorskip("torch")
    batch = small()
    q, *others = batch.arguments(to_numba)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    late = torch.zeros(q.shape, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
        late.copy_(torch.as_tensor(q, device="cuda"))
    named = cuda.as_cuda_array(late, sync=False)
    named.stream = cuda.external_stream(producer.cuda_stream)
    got = SELECT(named, *others, top_k=batch.top_k, stream=consumer)
    consumer.synchronize()
    assert_same_bits(to_host(got), batch.select(ORACLE))


@pytest.mark.parametrize("is_given", [False, True])
def test_capture_into_a_graph(is_given):
    """On the current stream, or on one that the call is given: about that, the driver may not even be asked."""
    torch = pytest.importorskip("torch")
    batch = small()
    arguments = batch.arguments(to_torch)
    out = torch.empty((batch.num_tokens, batch.top_k), dtype=torch.int32, device="cuda")
    SELECT(*arguments, top_k=batch.top_k, out=out)                      # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SELECT(*arguments, top_k=batch.top_k, out=out, stream=torch.cuda.current_stream() if is_given else None)
    out.fill_(-7)
    graph.replay()
    assert_same_bits(to_host(out), batch.select(ORACLE))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("which", [2, 3])
def test_host_metadata_is_refused_during_capture(which):
    torch = pytest.importorskip("torch")
    batch = small()
    arguments = list(batch.arguments(to_torch))
    SELECT(*arguments, top_k=batch.top_k)
    if which == 2:
        arguments[2] = batch.input_row_offsets
    else:
        arguments[3] = indexer.PagedKeyCache(to_torch(batch.blocks), to_torch(batch.scales), batch.cache_lengths,
                                             to_torch(batch.lookup_table))
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="must be on the device during stream capture"):
        SELECT(*arguments, top_k=batch.top_k)


@pytest.mark.parametrize("which", ["input_row_offsets", "cache_lengths", "lookup_table"])
def test_host_metadata_with_device_data(which):
    batch = small()
    on_host = {id(getattr(batch, which))}
    got = batch.select(SELECT, lambda array: array if id(array) in on_host else to_numba(array))
    assert_same_bits(to_host(got), batch.select(ORACLE))


def test_mixed_places_are_refused():
    batch = small()
    q, q_s, offsets, cache, layer = batch.arguments(to_numba)
    with pytest.raises(ValueError, match="q_s must be on a device as q is, got an array on the host"):
        SELECT(q, batch.q_s, offsets, cache, layer, top_k=4)
    with pytest.raises(ValueError, match="out must be on a device as q is"):
        SELECT(q, q_s, offsets, cache, layer, top_k=4, out=np.empty((batch.num_tokens, 4), np.int32))
    with pytest.raises(ValueError, match="must be on the host as q is"):
        SELECT(batch.q, batch.q_s, offsets, cache, layer, top_k=4)
    with pytest.raises(TypeError, match="q must be a NumPy array"):
        reference.mla_indexer_ragged_float8_paged(q, q_s, offsets, cache, layer, top_k=4)
    with pytest.raises(TypeError, match="stream must be"):
        SELECT(q, q_s, offsets, cache, layer, top_k=4, stream="0")


def test_wgmma_is_refused_on_other_cards(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "is_hopper", lambda: False)
    assert indexer.default_arithmetic() == "exact"
    with pytest.raises(ValueError, match=r'arithmetic must be "auto" or "exact".*got "wgmma"'):
        small().select(SELECT, arithmetic="wgmma")


def test_the_readme_example():
    torch = pytest.importorskip("torch")
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    scope = {}
    exec(code, scope)
    host = [scope[name].view(torch.uint8).cpu().numpy() if name in ("q", "keys") else scope[name].cpu().numpy()
            for name in ("q", "q_s", "offsets", "keys", "scales", "lengths", "pages")]
    want = ORACLE(*host[:3], indexer.PagedKeyCache(*host[3:]), top_k=2048)
    assert_same_bits(to_host(scope["indices"]), want)


def test_device_memory_is_flat_over_growing_calls():
    """60 calls with a score matrix that grows to 30 MB: what is in use after each is what was in use before."""
    free = []
    for step in range(60):
        batch = make_batch(np.random.default_rng(step), new_tokens=[64], cached=[2000 * step], num_heads=1, head_dim=4, top_k=16)
        arguments = batch.arguments(to_numba)
        for _ in range(4):
            SELECT(*arguments, top_k=16)
        cuda.synchronize()
        del arguments
        cuda.current_context().deallocations.clear()
        free.append(cuda.current_context().get_memory_info().free)
    assert max(free[5:]) - min(free[5:]) <= 96 * 2**20, free
