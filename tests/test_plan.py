"""Plans: the bits of the plain function, in a workspace of fixed size, eager and captured, within bounds and refused beyond."""
import gc
import itertools
import threading
import weakref
from dataclasses import replace

import numpy as np
import oracle
import pytest
from arrays import to_cupy, to_host, to_torch
from assertions import assert_same_bits
from h200 import CLUSTERS, SHARED_BYTES
from numba import cuda
from test_gpu import planted, small

import indexer
from indexer import launches, sampled_selection
from indexer.__main__ import to_device as to_numba
from indexer.batches import make_batch
from indexer.device import SIMULATED, Memory

if SIMULATED:
    pytest.skip("a plan needs a GPU", allow_module_level=True)

from indexer import tma_tile
from indexer.launches import Plan
from indexer.plan import IndexerPlan, workspace_parts
from indexer.problem import check_call, describe


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.kernels(test))


# -------------------------------------------------------------------------------------------------------------- workspace


def test_parts_of_a_workspace():
    """64 rows of 32,768 candidates on 132 multiprocessors, hand-counted."""
    parts = workspace_parts(64, 32_768, 2048, 512 * 2**20, "index", 132)
    assert parts == {"zeros": 768, "scores": 64 * 32_768 * 4, "maps": 132 * 256, "lists": 64 * 65_536, "located": 512, "ranks": 0,
                     "packing": 256, "no scores": 256}
    assert workspace_parts(64, 32_768, 2048, 2**20, "index", 132)["scores"] == 2**20
    assert workspace_parts(64, 32_768, 2048, 1, "index", 132)["scores"] == 4 * 32_768
    assert workspace_parts(64, 1000, 2048, 1, "score", 132)["ranks"] == 64 * 1024 * 8


@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("budget", [1, 3 * 2**20, 512 * 2**20])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 44, 66, 67, 132, 300])
def test_every_call_within_the_bounds_fits(num_tokens, budget, order):
    """What the launches of a smaller call take, against the parts for 300 tokens and 30,000 candidates."""
    parts = workspace_parts(300, 30_000, 64, budget, order, 132)
    for context in (0, 10, 9000, 30_000 - num_tokens):
        batch = make_batch(np.random.default_rng(0), new_tokens=[num_tokens], cached=[context], num_heads=1, head_dim=16, top_k=64,
                           order=order, scores_budget_bytes=budget)
        call = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="auto", top_k=64, order=order,
                          scores_budget_bytes=budget)
        for use_tma, clusters in itertools.product((False, True), (None, CLUSTERS)):
            plan = Plan.of(call, 132, SHARED_BYTES, with_scores=False, use_tma=use_tma, max_clusters=clusters)
            for part, shape, itemsize in (("scores", plan.scores_shape, 4), ("maps", plan.maps_shape, 8),
                                          ("lists", plan.lists_shape, 4), ("zeros", plan.zeros_shape, 4),
                                          ("ranks", plan.ranks_shape, 8), ("packing", (2,), 4)):
                assert np.prod(shape) * itemsize <= parts[part], part


def test_what_one_finds_by_oneself():
    """The Hopper scorer before the sampled selection; an order by score needs the rows located, as do the other kernels."""
    batch = make_batch(np.random.default_rng(0), new_tokens=[3], cached=[5000], num_heads=64, head_dim=128, top_k=64)
    call = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="auto", top_k=64)
    ordered = check_call(*batch.arguments(), mask="causal", kpool=1, arithmetic="auto", top_k=64, order="score")
    assert Plan.of(call, 132, SHARED_BYTES, with_scores=False, use_tma=True).finds_rows
    assert not Plan.of(call, 132, SHARED_BYTES, with_scores=False, use_tma=False).finds_rows
    assert not Plan.of(call, 132, 64 * 1024, with_scores=False, use_tma=False).finds_rows
    assert not Plan.of(ordered, 132, SHARED_BYTES, with_scores=False, use_tma=True).finds_rows
    fixed = Plan.of(call, 132, SHARED_BYTES, with_scores=False, use_tma=True, tokens_per_request=1)
    assert fixed.tma == tma_tile.tile_for(64, 128, 1, SHARED_BYTES)


# ------------------------------------------------------------------------------------------------------------------ calls


def plan_for(batch, **options):
    bounds = {"max_tokens": max(1, batch.num_tokens), "max_requests": len(batch.cache_lengths),
              "max_candidates": batch.lookup_table.shape[1] * batch.blocks.shape[3]}
    return IndexerPlan(**{**bounds, "top_k": batch.top_k, "order": batch.order, **options})


def planned(plan, batch, to=to_torch, with_scores=False):
    out = to(np.full((batch.num_tokens, batch.top_k), -7, np.int32))
    out_scores = to(np.full((batch.num_tokens, batch.top_k), np.nan, np.float32)) if with_scores else None
    got = plan(*batch.arguments(to), out=out, out_scores=out_scores)
    assert got is out
    return to_host(out), to_host(out_scores) if with_scores else None


def test_a_remembered_call_is_told_apart_by_all_that_was_checked():
    view = describe("out", np.zeros((2, 3), np.int32))
    others = [replace(view, address=view.address + 4), replace(view, shape=(3, 3)), replace(view, strides=(4, 8)),
              replace(view, dtype="float32"), replace(view, on_device=True), replace(view, writeable=False),
              replace(view, stream=7)]
    assert len({view.fingerprint, *(other.fingerprint for other in others)}) == 8
    assert replace(view, owner=None, name="q", library="torch").fingerprint == view.fingerprint


@on_gpu
@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("to", [to_torch, to_cupy, to_numba])
def test_a_plan_returns_the_oracles_bits(to, order):
    batch = small(order=order, page_size=64)
    plan = plan_for(batch)
    want_scores = np.empty((batch.num_tokens, batch.top_k), np.float32)
    want = batch.select(oracle.select, out_scores=want_scores)
    for _ in range(2):                                                  # packed, remembered
        assert_same_bits(planned(plan, batch, to)[0], want)
        got, got_scores = planned(plan, batch, to, with_scores=True)
        assert_same_bits(got, want)
        assert_same_bits(got_scores, want_scores)


@on_gpu
@pytest.mark.parametrize("seed", range(12))
def test_one_plan_for_many_calls(seed):
    """Decode and prefill in turn, few and many rows, in a workspace that holds whatever the call before has left."""
    rng = np.random.default_rng([7, seed])
    plan = IndexerPlan(max_tokens=200, max_requests=8, max_candidates=40_000, top_k=128, scores_budget_bytes=2**20)
    for _ in range(4):
        requests = int(rng.integers(1, 9))
        new = [int(n) for n in rng.choice([0, 1, 1, 2, 6, 20], requests)]
        cached = [int(c) for c in rng.integers(0, rng.choice([100, 3000, 30_000]), requests)]
        batch = make_batch(rng, new_tokens=new, cached=cached, num_heads=16, head_dim=32, top_k=128, page_size=64,
                           scores_budget_bytes=2**20)
        assert_same_bits(planned(plan, batch)[0], batch.select(oracle.select))


@on_gpu
def test_a_workspace_of_the_callers():
    torch = pytest.importorskip("torch")
    batch = small(page_size=64)
    num_bytes = plan_for(batch).workspace_bytes
    memory = torch.full((num_bytes + 512,), 0x7F, dtype=torch.uint8, device="cuda")
    plan = plan_for(batch, workspace=memory[256:256 + num_bytes])
    assert_same_bits(planned(plan, batch)[0], batch.select(oracle.select))
    torch.cuda.synchronize()
    assert (memory[:256] == 0x7F).all()
    assert (memory[256 + num_bytes:] == 0x7F).all()
    with pytest.raises(ValueError, match="workspace must be contiguous and have shape"):
        plan_for(batch, workspace=memory[:num_bytes - 1])
    with pytest.raises(ValueError, match="aligned to 256 bytes"):
        plan_for(batch, workspace=memory[8:])
    with pytest.raises(TypeError, match="workspace must be uint8"):
        plan_for(batch, workspace=memory.view(torch.int8))


@on_gpu
def test_calls_beyond_the_bounds_are_refused():
    batch = small(page_size=64)
    plan = plan_for(batch, max_tokens=batch.num_tokens - 1)
    with pytest.raises(ValueError, match=f"q must have at most as many rows as the plan was made for, {batch.num_tokens - 1}"):
        planned(plan, batch)
    with pytest.raises(ValueError, match="lookup_table must have at most as many rows"):
        planned(plan_for(batch, max_requests=3), batch)
    with pytest.raises(ValueError, match="max_candidates = 100"):
        planned(plan_for(batch, max_candidates=100), batch)
    plan, (q, q_s, offsets, cache, _), out = plan_for(batch), batch.arguments(to_torch), to_torch(
        np.empty((batch.num_tokens, batch.top_k), np.int32))
    with pytest.raises(ValueError, match="input_row_offsets must be on the device in a call of a plan"):
        plan(q, q_s, batch.input_row_offsets, cache, out=out)
    with pytest.raises(TypeError, match="k_collection must be a PagedKeyCache"):
        plan(q, q_s, offsets, None, out=out)
    with pytest.raises(TypeError, match="out must be a NumPy array, a torch tensor"):
        plan(q, q_s, offsets, cache, out=None)


@on_gpu
def test_a_plan_keeps_no_array_alive():
    """CuPy's arrays name their stream, which a plan remembers; the arrays themselves may go."""
    cupy = pytest.importorskip("cupy")
    batch = small(page_size=64)
    plan, arguments = plan_for(batch), batch.arguments(to_cupy)
    out = cupy.zeros((batch.num_tokens, batch.top_k), np.int32)
    plan(*arguments, out=out)
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None


@on_gpu
def test_numpy_integers_are_bounds_too():
    batch = small(page_size=64, order="score")
    plan = plan_for(batch, top_k=np.int64(batch.top_k), max_tokens=np.int32(batch.num_tokens))
    assert_same_bits(planned(plan, batch)[0], batch.select(oracle.select))


@on_gpu
def test_nothing_is_allocated_after_the_first_call(monkeypatch):
    torch = pytest.importorskip("torch")
    batch = small(page_size=64)
    plan, arguments = plan_for(batch), batch.arguments(to_torch)
    out = to_torch(np.empty((batch.num_tokens, batch.top_k), np.int32))
    plan(*arguments, out=out)
    torch.cuda.synchronize()

    def refuse(*_, **__):
        raise AssertionError("a plan has allocated")

    for place, name in ((Memory, "empty"), (Memory, "scratch"), (cuda, "device_array"), (cuda, "to_device")):
        monkeypatch.setattr(place, name, refuse)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(1000):
        plan(*arguments, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_same_bits(to_host(out), batch.select(oracle.select))


@on_gpu
def test_a_captured_plan_follows_lengths_pages_and_data():
    """Captured once at its bounds; replayed with other lengths, offsets, tables and queries in the same memory."""
    torch = pytest.importorskip("torch")
    options = {"num_heads": 64, "head_dim": 128, "top_k": 2048, "page_size": 64}
    cases = [([1, 1, 4, 2], [300, 9000, 40_000, 12]), ([2, 2, 2, 2], [40_000, 3, 0, 20_000]), ([8, 0, 0, 0], [2050, 0, 7, 9]),
             ([1, 1, 4, 2], [300, 9000, 40_000, 12])]
    batches = [make_batch(np.random.default_rng(i), new_tokens=case[0], cached=case[1], **options) for i, case in enumerate(cases)]
    blocks = max(len(batch.blocks) for batch in batches)
    width = max(batch.lookup_table.shape[1] for batch in batches)

    def padded(array, shape):
        full = np.zeros(shape, array.dtype)
        full[tuple(slice(n) for n in array.shape)] = array
        return full

    def contents(batch):
        return (batch.q, batch.q_s, batch.input_row_offsets, padded(batch.blocks, (blocks, *batch.blocks.shape[1:])),
                padded(batch.scales, (blocks, *batch.scales.shape[1:])), batch.cache_lengths,
                padded(batch.lookup_table, (4, width)))

    memory = [to_torch(array) for array in contents(batches[0])]
    cache = indexer.PagedKeyCache(*memory[3:], max_prompt_length=8, max_context_length=2**20)
    plan = IndexerPlan(max_tokens=8, max_requests=4, max_candidates=width * 64, top_k=2048)
    out = torch.zeros((8, 2048), dtype=torch.int32, device="cuda")
    plan(*memory[:3], cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(*memory[:3], cache, out=out)
    for batch in batches:
        for target, source in zip(memory, contents(batch)):
            target.view(torch.uint8).copy_(to_torch(source).view(torch.uint8))
        out.fill_(-7)
        graph.replay()
        captured = to_host(out)
        plan(*memory[:3], cache, out=out)
        assert_same_bits(captured, to_host(out))
        alone = indexer.mla_indexer_ragged_float8_paged(*batch.arguments(to_torch), top_k=2048)
        assert_same_bits(captured, to_host(alone))
    want = batches[1].select(oracle.select)
    plan(*[to_torch(array) for array in contents(batches[1])[:3]], indexer.PagedKeyCache(*map(to_torch, contents(batches[1])[3:])),
         out=out)
    assert_same_bits(to_host(out), want)


@on_gpu
def test_a_plan_per_thread():
    torch = pytest.importorskip("torch")
    batches = [make_batch(np.random.default_rng(i), new_tokens=[1, 3], cached=[500 * i, 9000], num_heads=16, head_dim=32, top_k=64,
                          page_size=64) for i in range(4)]
    wants, failures = [batch.select(oracle.select) for batch in batches], []

    def work(batch, want):
        try:
            with torch.cuda.stream(torch.cuda.Stream()) as _:
                plan, arguments = plan_for(batch), batch.arguments(to_torch)
                out = to_torch(np.empty(want.shape, np.int32))
                for _ in range(200):
                    out.fill_(-7)
                    plan(*arguments, out=out)
                    assert_same_bits(to_host(out), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, wants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@on_gpu
@pytest.mark.parametrize("size", [sampled_selection.WINDOW - 1, sampled_selection.WINDOW, sampled_selection.WINDOW + 1, 300_001])
def test_more_candidates_than_a_window_of_the_bitmap(size, monkeypatch):
    """Rows whose best are all at the front, all at the back, everywhere; scores are planted, as in the reported faults."""
    monkeypatch.setattr(launches, "max_clusters", lambda _: {})
    scores = np.random.default_rng(1).random((3, size), np.float32)
    scores[0, :2500] += 2
    scores[1, -2500:] += 2
    batch = planted(scores, 2048)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :2048]
    assert_same_bits(planned(plan_for(batch), batch)[0], np.sort(best).astype(np.int32))
