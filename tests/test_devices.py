"""Two GPUs: arrays, plans and streams of the one that is not current, threads on both, and what is refused."""
import threading

import numpy as np
import oracle
import pytest
from arrays import to_host, to_torch
from assertions import assert_same_bits
from numba import cuda
from test_gpu import small

import indexer
from indexer.__main__ import to_device
from indexer.batches import make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]

SELECT = indexer.mla_indexer_ragged_float8_paged


@pytest.fixture(autouse=True)
def two_devices():
    """Skips machines with one device; every test leaves device 0 current."""
    if len(cuda.gpus) < 2:
        pytest.skip("needs two GPUs")
    yield
    assert cuda.get_current_device().id == 0


def by_numba(device):
    def to(array):
        with cuda.gpus[device]:
            return to_device(array)
    return to


def by_torch(device):
    return lambda array: to_torch(array, f"cuda:{device}")


def device_of(array):
    interface = array.__cuda_array_interface__
    from cuda.bindings import driver
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, device = driver.cuPointerGetAttribute(attribute, interface["data"][0])
    assert int(error) == 0
    return int(device)


def plan_for(batch, **options):
    return indexer.IndexerPlan(max_tokens=batch.num_tokens, max_requests=len(batch.cache_lengths), top_k=batch.top_k,
                               max_candidates=batch.lookup_table.shape[1] * batch.blocks.shape[3], **options)


# ---------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("budget", [512 * 2**20, 20_000])
@pytest.mark.parametrize("library", [by_numba, by_torch])
def test_arrays_of_the_device_that_is_not_current(library, budget):
    batch = small(page_size=64, scores_budget_bytes=budget)
    want = batch.select(oracle.select)
    for device in (1, 0, 1):
        got = batch.select(SELECT, library(device))
        assert device_of(got) == device
        with cuda.gpus[device]:
            assert_same_bits(to_host(got), want)
        scores = batch.score(indexer.index_scores, library(device))
        assert device_of(scores) == device


def test_host_metadata_go_where_the_data_are():
    batch = small(page_size=64)
    q, q_s, _, _, _ = batch.arguments(by_torch(1))
    cache = indexer.PagedKeyCache(by_torch(1)(batch.blocks), by_torch(1)(batch.scales), batch.cache_lengths, batch.lookup_table)
    got = SELECT(q, q_s, batch.input_row_offsets, cache, top_k=batch.top_k)
    assert got.device.index == 1
    assert_same_bits(to_host(got), batch.select(oracle.select))


def test_a_plan_belongs_to_the_device_that_was_current():
    torch = pytest.importorskip("torch")
    batch = small(page_size=64)
    want = batch.select(oracle.select)
    with torch.cuda.device(1):
        plan = plan_for(batch)
    arguments = batch.arguments(by_torch(1))
    out = torch.full(want.shape, -7, dtype=torch.int32, device="cuda:1")
    for _ in range(2):                                                  # packed, remembered; device 0 is current
        out.fill_(-7)
        plan(*arguments, out=out)
        assert_same_bits(to_host(out), want)
    with pytest.raises(ValueError, match=r"^q must be on the plan's device, 1, got device 0$"):
        plan(*batch.arguments(by_torch(0)), out=out.to("cuda:0"))
    memory = torch.zeros(plan.workspace_bytes, dtype=torch.uint8, device="cuda:1")
    with pytest.raises(ValueError, match=r"^workspace must be on the plan's device, 0, got device 1$"):
        plan_for(batch, workspace=memory)


def test_a_captured_plan_on_the_device_that_is_not_current():
    torch = pytest.importorskip("torch")
    batch = small(page_size=64)
    want = batch.select(oracle.select)
    arguments = batch.arguments(by_torch(1))
    with torch.cuda.device(1):
        plan, out = plan_for(batch), torch.full(want.shape, -7, dtype=torch.int32, device="cuda")
        plan(*arguments, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):       # torch's own may be of another device
            plan(*arguments, out=out)
    out.fill_(-7)
    graph.replay()
    torch.cuda.synchronize(1)
    assert_same_bits(to_host(out), want)


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("elsewhere", ["q_s", "blocks", "scales", "input_row_offsets", "cache_lengths", "lookup_table", "out"])
def test_arrays_on_two_devices_are_refused_by_name(elsewhere):
    batch = small(page_size=64)

    def on(name):
        return by_torch(1 if name == elsewhere else 0)(getattr(batch, name))

    cache = indexer.PagedKeyCache(*map(on, ("blocks", "scales", "cache_lengths", "lookup_table")))
    out = to_torch(np.full((batch.num_tokens, batch.top_k), -7, np.int32), "cuda:1" if elsewhere == "out" else "cuda:0")
    arguments = on("q"), on("q_s"), on("input_row_offsets"), cache
    message = rf"^{elsewhere} must be on device 0 as q is, got device 1$"
    with pytest.raises(ValueError, match=message):
        SELECT(*arguments, top_k=batch.top_k, out=out)
    with pytest.raises(ValueError, match=message):
        plan_for(batch)(*arguments, out=out)
    assert (to_host(out) == -7).all()


def test_a_stream_of_another_device_is_refused():
    torch = pytest.importorskip("torch")
    from cuda.bindings import driver
    error, version = driver.cuDriverGetVersion()
    if int(error) or version < 12_080:
        pytest.skip("the driver cannot tell a stream's device")
    batch = small(page_size=64)
    arguments, stream, plan = batch.arguments(by_torch(0)), torch.cuda.Stream("cuda:1"), plan_for(batch)
    out = torch.full((batch.num_tokens, batch.top_k), -7, dtype=torch.int32, device="cuda:0")
    for function, options in ((SELECT, {"top_k": batch.top_k}), (plan, {})):
        for given in (stream, stream.cuda_stream):
            with pytest.raises(ValueError, match=r"^stream must be of device 0, as the arrays are, got one of device 1$"):
                function(*arguments, out=out, stream=given, **options)
    assert (to_host(out) == -7).all()
    SELECT(*batch.arguments(by_torch(1)), top_k=batch.top_k, stream=stream)


# ---------------------------------------------------------------------------------------------------------------- threads


def test_threads_each_with_a_device():
    """Two threads per device, plain function and plan in turn."""
    torch = pytest.importorskip("torch")
    batches = [make_batch(np.random.default_rng(i), new_tokens=[1, 3], cached=[500 * i, 9000], num_heads=64, head_dim=128, top_k=64,
                          page_size=64) for i in range(4)]
    wants, failures = [batch.select(oracle.select) for batch in batches], []

    def work(index):
        try:
            batch, want, device = batches[index], wants[index], index % 2
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
                plan, arguments = plan_for(batch), batch.arguments(by_torch(device))
                out = torch.empty(want.shape, dtype=torch.int32, device=f"cuda:{device}")
                for _ in range(100):
                    out.fill_(-7)
                    plan(*arguments, out=out)
                    assert_same_bits(to_host(out), want)
                    assert_same_bits(to_host(SELECT(*arguments, top_k=batch.top_k)), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
