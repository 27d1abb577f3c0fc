"""A drill: eight threads at once, each with a stream of its own, and every result is the oracle's."""
import os
import threading
import time
from collections import Counter

import numpy as np
import oracle
import pytest
from arrays import to_host
from assertions import assert_same_bits
from numba import cuda

import indexer
from indexer.__main__ import to_device
from indexer.batches import make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]

NUM_THREADS = 8
SECONDS = 180 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 5
HOW = ("plain", "new output", "host arrays", "plan", "graph")
# Every scorer and every selection; calls of one kernel with other dimensions; allocations of many sizes.
CASES = [
    {"new_tokens": [1, 1, 0, 1], "cached": [3000, 127, 9, 600], "top_k": 64},
    {"new_tokens": [2, 40, 1], "cached": [900, 300, 30], "top_k": 128, "order": "score"},
    {"new_tokens": [1], "cached": [30_000], "num_heads": 8, "head_dim": 32, "top_k": 2048},
    {"new_tokens": [1, 2], "cached": [20_000, 9000], "num_heads": 8, "head_dim": 32, "top_k": 2048, "order": "score"},
    {"new_tokens": [150, 20], "cached": [100, 700], "num_heads": 32, "head_dim": 64, "page_size": 16, "kpool": 4, "top_k": 100},
    {"new_tokens": [3, 3], "cached": [700, 80], "num_heads": 12, "head_dim": 20, "page_size": 3, "top_k": 50, "mask": "null"},
    {"new_tokens": [9, 1], "cached": [400, 8000], "num_heads": 16, "head_dim": 32, "fp8_dtype": "float8_e4m3fnuz", "top_k": 6000},
    {"new_tokens": [60], "cached": [2000], "num_heads": 64, "head_dim": 32, "top_k": 256, "scores_budget_bytes": 100_000}]


@pytest.fixture(autouse=True)
def poisoned_scratch():
    """In place of the one that fills scratch: memory that one call frees is what another one gets."""


def checked(result):
    """What a driver call returns behind its status."""
    from cuda.bindings import driver
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) > 1 else None


def non_blocking_stream():
    """A stream that neither waits for the default stream nor is waited for by it: it may be captured while others work there."""
    from cuda.bindings import driver
    cuda.current_context()
    return int(checked(driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))))


class Prepared:
    """A case as one thread calls it: arrays, a plan and a graph of its own."""

    def __init__(self, batch, handle):
        self.batch, self.handle, self.stream = batch, handle, cuda.external_stream(handle)
        self.arguments = batch.arguments(to_device)
        self.empty = np.full((batch.num_tokens, batch.top_k), -7, np.int32)
        self.out = to_device(self.empty)
        self.plan = indexer.IndexerPlan(
            max_tokens=batch.num_tokens, max_requests=len(batch.cache_lengths),
            max_candidates=batch.lookup_table.shape[1] * batch.blocks.shape[3], **batch.options)
        cuda.synchronize()                    # the uploads
        self.planned()                        # packs
        self.graph = None

    def planned(self):
        self.plan(*self.arguments, out=self.out, stream=self.handle)

    def captured(self):
        from cuda.bindings import driver
        checked(driver.cuStreamBeginCapture(self.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        self.planned()
        return checked(driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(self.handle)), 0))

    def call(self, how):
        """The indices, by one of `HOW`."""
        from cuda.bindings import driver
        select = indexer.mla_indexer_ragged_float8_paged
        if how == "host arrays":
            return self.batch.select(select, stream=self.handle)
        self.out.copy_to_device(self.empty, stream=self.stream)
        result = self.out
        if how == "plan":
            self.planned()
        elif how == "graph":
            if self.graph is None:
                self.graph = self.captured()
            checked(driver.cuGraphLaunch(self.graph, self.handle))
        else:
            options = {"out": self.out} if how == "plain" else {}
            result = select(*self.arguments, **self.batch.options, **options, stream=self.handle)
        self.stream.synchronize()
        return to_host(result)


def test_eight_threads_at_once(record_property):
    """For five seconds; for three minutes with ``HYPOTHESIS_PROFILE=nightly``. Says how many calls there were, by kind."""
    batches = [make_batch(np.random.default_rng(i), **case) for i, case in enumerate(CASES)]
    wants = [batch.select(oracle.select) for batch in batches]
    for batch in batches:
        batch.select(indexer.mla_indexer_ragged_float8_paged)           # compiles
    counts, failures, ready = Counter(), [], threading.Barrier(NUM_THREADS, timeout=300)

    def work(number):
        try:
            rng, handle, mine = np.random.default_rng(number), non_blocking_stream(), Counter()
            prepared = [Prepared(batch, handle) for batch in batches]
            ready.wait()                      # from here on some capture, which no other thread may disturb by waiting for all
            end = time.monotonic() + SECONDS
            while time.monotonic() < end and not failures:
                case, how = int(rng.integers(len(CASES))), HOW[rng.integers(len(HOW))]
                assert_same_bits(prepared[case].call(how), wants[case], f"{how}, thread {number}, case {case}, call {mine.total()}")
                mine[how] += 1
            counts.update(mine)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 300)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    print(f"{sum(counts.values())} calls in {SECONDS} s: {dict(counts)}")
    for how in HOW:
        record_property(how, counts[how])
        assert counts[how] >= NUM_THREADS, counts
