"""A serving engine's decode loop: 61 layers, 20 steps, one captured graph per bucket of tokens.

Lengths grow, requests join and leave, speculative widths are mixed. Every step's bits equal those of the plain function on arrays
without padding, and two rows of one layer those of the oracle.
"""
from dataclasses import dataclass, field

import numpy as np
import oracle
import pytest
from arrays import to_host, to_torch
from assertions import assert_same_bits

import indexer

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE, TOP_K = 61, 64, 128, 64, 2048
NUM_STEPS = 20
MAX_PAGES = 320                               # 20,480 tokens
WIDTHS = (1, 2, 4)                            # new tokens of a request in a step: with none, one and three speculated
MAX_REQUESTS = 16
BUCKETS = (8, 16, 32, MAX_REQUESTS * max(WIDTHS))      # tokens that a graph has been captured for
NUM_BLOCKS = MAX_REQUESTS * MAX_PAGES


# --------------------------------------------------------------------------------------------------------------- on the host


@dataclass(eq=False)
class Request:
    """One that is served: its cached tokens, the new ones of this step, its pages."""

    cached: int
    width: int
    pages: list = field(default_factory=list)


class Traffic:
    """Requests that come, grow and go, and the blocks that they hold."""

    def __init__(self, rng):
        self.rng, self.requests = rng, []
        self.free = [int(block) for block in rng.permutation(NUM_BLOCKS)]

    def advance(self):
        """Some leave, the others have taken in some of their new tokens, some join; every one has pages for all its tokens."""
        for request in list(self.requests):
            if self.rng.random() < 0.2:
                self.requests.remove(request)
                self.free += request.pages
            request.cached += int(self.rng.integers(1, request.width + 1))
            request.width = int(self.rng.choice(WIDTHS))
        for _ in range(min(self.rng.integers(0, 6), MAX_REQUESTS - len(self.requests)) + (not self.requests)):
            joined = Request(int(self.rng.integers(1000, 20_000)), int(self.rng.choice(WIDTHS)))
            self.requests.insert(int(self.rng.integers(0, len(self.requests) + 1)), joined)
        for request in self.requests:
            while len(request.pages) * PAGE_SIZE < request.cached + request.width:
                request.pages.append(self.free.pop())

    def metadata(self):
        """(offsets, lengths, table) of the requests, int32."""
        table = np.full((len(self.requests), MAX_PAGES), -1, np.int32)
        for row, request in zip(table, self.requests):
            row[:len(request.pages)] = request.pages
        widths = [request.width for request in self.requests]
        return np.cumsum([0, *widths], dtype=np.int32), np.int32([request.cached for request in self.requests]), table


def padded(offsets, lengths, table, num_tokens):
    """The same for `num_tokens` tokens of as many requests and one: those behind the real ones have no tokens, but the last, which
    has all that are left and a negative length."""
    spare = num_tokens + 1 - len(lengths)
    return (np.int32([*offsets, *[offsets[-1]] * (spare - 1), num_tokens]), np.int32([*lengths, *[0] * (spare - 1), -1]),
            np.pad(table, ((0, spare), (0, 0)), constant_values=-1))


def test_padding_a_step():
    offsets, lengths, table = padded(np.int32([0, 2, 3]), np.int32([70, 5]), np.int32([[4, 9], [2, -1]]), 5)
    assert offsets.tolist() == [0, 2, 3, 3, 3, 3, 5]
    assert lengths.tolist() == [70, 5, 0, 0, 0, -1]
    assert table.tolist() == [[4, 9], [2, -1], *[[-1, -1]] * 4]


def bucket_of(num_tokens):
    return next(bucket for bucket in BUCKETS if num_tokens <= bucket)


def test_the_traffic_has_all_that_it_is_for():
    """Requests grow, join and leave; no block is held twice; widths are mixed; three buckets or more are used."""
    traffic, buckets, widths, grown, joined, left = Traffic(np.random.default_rng(0)), set(), set(), 0, 0, 0
    for _ in range(NUM_STEPS):
        before = {id(request): request.cached for request in traffic.requests}
        requests = list(traffic.requests)                               # keeps them alive, and so their ids
        traffic.advance()
        held = [block for request in traffic.requests for block in request.pages]
        assert sorted([*held, *traffic.free]) == list(range(NUM_BLOCKS))
        offsets, lengths, table = traffic.metadata()
        assert (-(-(lengths + np.diff(offsets)) // PAGE_SIZE) <= (table >= 0).sum(axis=1)).all()
        buckets.add(bucket_of(offsets[-1]))
        widths |= {request.width for request in traffic.requests}
        grown += sum(request.cached > before[id(request)] for request in traffic.requests if id(request) in before)
        joined += sum(id(request) not in before for request in traffic.requests)
        left += sum(request not in traffic.requests for request in requests)
    assert len(buckets) >= 3
    assert widths == set(WIDTHS)
    assert min(grown, joined, left) >= 20


# -------------------------------------------------------------------------------------------------------------- on the device


def random_fp8(torch, shape, generator):
    """Any bytes but the NaNs."""
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    return values.masked_fill_((values & 0x7F) == 0x7F, 0x3A)


class Bucket:
    """The static arrays of a number of tokens, its plan, and the graph of all layers."""

    def __init__(self, torch, num_tokens, blocks, scales):
        self.num_tokens = num_tokens
        self.q = torch.zeros((NUM_LAYERS, num_tokens, NUM_HEADS, HEAD_DIM), dtype=torch.uint8, device="cuda")
        self.q_s = torch.zeros((NUM_LAYERS, num_tokens, NUM_HEADS), device="cuda")
        self.out = torch.zeros((NUM_LAYERS, num_tokens, TOP_K), dtype=torch.int32, device="cuda")
        nothing = np.int32([0]), np.zeros(0, np.int32), np.zeros((0, MAX_PAGES), np.int32)
        self.metadata = [to_torch(array) for array in padded(*nothing, num_tokens)]
        offsets, lengths, table = self.metadata
        cache = indexer.PagedKeyCache(blocks, scales, lengths, table)
        self.plan = indexer.IndexerPlan(max_tokens=num_tokens, max_requests=num_tokens + 1, max_candidates=MAX_PAGES * PAGE_SIZE,
                                        top_k=TOP_K)

        def all_layers():
            for layer in range(NUM_LAYERS):
                self.plan(self.q[layer], self.q_s[layer], offsets, cache, layer, out=self.out[layer])

        all_layers()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            all_layers()

    def replay(self, metadata, q, q_s):
        """The positions of a step's tokens, and of those behind them."""
        for target, source in zip(self.metadata, padded(*metadata, self.num_tokens)):
            target.copy_(to_torch(source))
        self.q[:, :q.shape[1]] = q
        self.q_s[:, :q.shape[1]] = q_s
        self.out.fill_(-7)
        self.graph.replay()
        return self.out[:, :q.shape[1]], self.out[:, q.shape[1]:]


def positions_of_the_oracle(metadata, q, q_s, blocks, scales, layer, row):
    """One token's, from the pages of its request alone."""
    offsets, lengths, table = metadata
    request = int(np.searchsorted(offsets, row, side="right")) - 1
    seen = int(lengths[request] + row - offsets[request])               # before the token itself
    pages = table[request, :-(-(seen + 1) // PAGE_SIZE)]
    keys, key_scales = (to_host(array[to_torch(pages).long(), :, layer:layer + 1]) for array in (blocks, scales))
    cache = indexer.PagedKeyCache(keys, key_scales, np.int32([seen]), np.arange(len(pages), dtype=np.int32)[None])
    return oracle.select(to_host(q[layer, row:row + 1]), to_host(q_s[layer, row:row + 1]), np.int32([0, 1]), cache, top_k=TOP_K)


@pytest.mark.gpu
@pytest.mark.kernels
def test_every_step_of_every_layer_equals_eager_and_oracle():
    torch = pytest.importorskip("torch")
    generator, rng = torch.Generator("cuda").manual_seed(0), np.random.default_rng(1)
    blocks = random_fp8(torch, (NUM_BLOCKS, 1, NUM_LAYERS, PAGE_SIZE, 1, HEAD_DIM), generator)          # 2.6 GB
    scales = torch.rand((NUM_BLOCKS, 1, NUM_LAYERS, PAGE_SIZE, 1, 1), device="cuda", generator=generator)
    traffic, buckets = Traffic(np.random.default_rng(0)), {}
    for step in range(NUM_STEPS):
        traffic.advance()
        metadata = traffic.metadata()
        num_tokens = int(metadata[0][-1])
        size = bucket_of(num_tokens)
        if size not in buckets:
            buckets[size] = Bucket(torch, size, blocks, scales)
        q = random_fp8(torch, (NUM_LAYERS, num_tokens, NUM_HEADS, HEAD_DIM), generator)
        q_s = torch.randn((NUM_LAYERS, num_tokens, NUM_HEADS), device="cuda", generator=generator)
        got, behind = buckets[size].replay(metadata, q, q_s)
        assert (behind == -1).all()

        offsets, lengths, table = map(to_torch, metadata)
        cache = indexer.PagedKeyCache(blocks, scales, lengths, table)
        for layer in range(NUM_LAYERS):
            eager = indexer.mla_indexer_ragged_float8_paged(q[layer], q_s[layer], offsets, cache, layer, top_k=TOP_K)
            if not torch.equal(got[layer], eager):
                assert_same_bits(to_host(got[layer]), to_host(eager), f"step {step}, layer {layer}")

        layer = int(rng.integers(NUM_LAYERS))
        for row in rng.choice(num_tokens, min(2, num_tokens), replace=False):
            want = positions_of_the_oracle(metadata, q, q_s, blocks, scales, layer, int(row))
            assert_same_bits(to_host(got[layer, row:row + 1]), want, f"step {step}, layer {layer}, row {row}")
    assert len(buckets) >= 3
