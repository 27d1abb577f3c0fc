"""How a ragged batch's key tiles are shared out: equal runs of tiles per block of threads, found from device lengths alone.

The query tokens of a request are taken `block_q` at a time, a power of two. Such a *query block* has one key tile for every
`BLOCK_KV` candidates of its last token. It has a *slot* for each, and one more behind them, since to begin a query block takes
about as long as a tile. The slots of all query blocks of all requests stand in one line, request after request, query block after
query block, and every block of threads takes an equal stretch of it. Nothing is stored per tile or query block: the number of slots
before a query block has a closed form, so any place in the line is found by a search.

All values are uint32. Sums are modulo 2**32, which is exact for every score matrix of fewer than 2**38 entries. No request has more
tiles than rows as wide as the matrix have, whatever offsets and lengths hold; offsets that are not true can still make requests
overlap, and then leave rows unscored. What is done per request has no division in it but by powers of two, as that takes longer
than the memory it waits for.
"""
from __future__ import annotations

from numba import cuda, uint32, uint64

BLOCK_KV = 128                                # keys of a tile
MAX_KPOOL = 2**16                             # up to here no intermediate value overflows 32 bits
MAX_VISIBLE = 2**31 - 1
MAX_GIVEN_REQUESTS = 1024                     # whoever takes slots on demand walks past all requests to them


def visible_limit(width: int, kpool: int) -> int:
    """Tokens beyond which a request has no more than `width` candidates: bounds the work of lengths that are not true."""
    return min((width + 1) * kpool, MAX_VISIBLE)


def enough_visible(skip_up_to: int, kpool: int) -> int:
    """The most tokens that one may see who has at most `skip_up_to` candidates: such a token needs no scores."""
    return min((skip_up_to + 1) * kpool - 1, MAX_VISIBLE)


def divisor(kpool: int) -> tuple[int, int, int]:
    """What `divide` divides by: (kpool, factor, shift) with ``n // kpool == n * factor >> shift`` for n < 2**31.

    With ``2**shift >= 2**31 kpool`` and ``factor = ceil(2**shift / kpool)`` the factor is too large by less than ``kpool / 2**shift
    <= 2**-31`` of the quotient's unit per unit of n.
    """
    shift = 31 + (kpool - 1).bit_length()
    return kpool, -(-2**shift // kpool), shift


@cuda.jit(device=True, inline="always")
def divide(n, pool):
    """``n // kpool`` for n < 2**31, without a division; `pool` is a `divisor`."""
    return uint32((uint64(n) * uint64(pool[1])) >> uint64(pool[2]))


@cuda.jit(device=True, inline="always")
def rows_to_score(offset, end, cached, start, stop, enough, causal, limit):
    """(first, before, count): the query rows of a request that need scores, within [start, stop).

    `offset`, `end`, `start`, `stop` are int32 rows; `cached` is the request's length, int32: no rows where it is negative. Row
    ``first + k``, k < count, sees ``before + k + 1`` tokens under the causal mask, `before` without it; never more than `limit`.
    """
    first = max(offset, start)
    last = min(end, stop)
    count = uint32(0)
    if first < last and cached >= 0:
        count = uint32(last - first)
    before = min(uint32(cached), limit)
    if causal != uint32(0):
        before = min(uint32(before + uint32(first - offset)), limit)
        count = min(count, uint32(limit - before))
        if before < enough:
            skipped = min(uint32(enough - before), count)
            first += skipped
            before += skipped
            count -= skipped
    else:
        before = min(uint32(before + uint32(end - offset)), limit)
        if before <= enough:
            count = uint32(0)
    return uint32(first), uint32(before), uint32(count)


@cuda.jit(device=True, inline="always")
def tiles_for(visible, pool):
    """Key tiles of a token that sees so many tokens: ``ceil((visible // kpool) / BLOCK_KV)``."""
    return uint32(uint32(divide(visible, pool) + uint32(BLOCK_KV - 1)) // uint32(BLOCK_KV))


@cuda.jit(device=True, inline="always")
def floor_sum(m, pool, factor):
    """Sum of ``u // (factor kpool)`` over u = 1 ... m."""
    quotient = divide(uint32(m // factor), pool)
    span = uint32(factor * pool[0])
    rest = uint32(m - uint32(quotient * span))
    pairs = uint32((uint64(quotient) * (uint64(quotient) + uint64(0xFFFFFFFFFFFFFFFF))) >> uint64(1))     # q (q - 1) / 2
    return uint32(uint32(pairs * span) + uint32(quotient * uint32(rest + uint32(1))))


@cuda.jit(device=True, inline="always")
def slots_before(query_block, before, pool, causal, block_q):
    """Slots of the query blocks ahead of this one in its request; all of those are full.

    Under the causal mask query block j has ``(before + (j + 1) block_q + (BLOCK_KV - 1) kpool) // (BLOCK_KV kpool)`` tiles; as
    `block_q` divides BLOCK_KV, that is ``(a + j + 1) // (BLOCK_KV / block_q kpool)`` with the `a` below.
    """
    tiles = uint32(query_block * tiles_for(before, pool))
    if causal != uint32(0):
        a = uint32(uint32(before + uint32(uint32(BLOCK_KV - 1) * pool[0])) // block_q)
        factor = uint32(uint32(BLOCK_KV) // block_q)
        tiles = uint32(floor_sum(uint32(a + query_block), pool, factor) - floor_sum(a, pool, factor))
    return uint32(tiles + query_block)


@cuda.jit(device=True, inline="always")
def last_visible(query_block, before, count, causal, block_q):
    """Tokens that the last token of a query block sees."""
    visible = before
    if causal != uint32(0):
        visible = uint32(before + min(uint32(uint32(query_block + uint32(1)) * block_q), count))
    return visible


@cuda.jit(device=True, inline="always")
def slots_of_request(before, count, pool, causal, block_q):
    """Slots of all query blocks of a request."""
    slots = uint32(0)
    if count > uint32(0):
        last = uint32(uint32(count - uint32(1)) // block_q)
        slots = uint32(tiles_for(last_visible(last, before, count, causal, block_q), pool) + uint32(1))
        if last > uint32(0):
            slots = uint32(slots + slots_before(last, before, pool, causal, block_q))
    return slots


@cuda.jit(device=True, inline="always")
def query_block_at(slot, before, count, pool, causal, block_q):
    """The query block of a request that has its `slot`-th slot: the last one with no more slots before it."""
    low = uint32(0)
    high = uint32(uint32(count + uint32(block_q - uint32(1))) // block_q)
    while uint32(high - low) > uint32(1):
        middle = uint32(uint32(low + high) >> uint32(1))
        if slots_before(middle, before, pool, causal, block_q) <= slot:
            low = middle
        else:
            high = middle
    return low


@cuda.jit(device=True, inline="always")
def stretch(total, sharer, num_sharers, num_requests, min_fair, max_fair):
    """(first, end, shared, fair): a sharer's own slots [first, end) of the line; those from `shared` on are given out on demand.

    All are own slots unless the fair share is one of `min_fair` to `max_fair`; then everybody's last quarter is given out.
    """
    fair = uint32(total // num_sharers)
    rest = uint32(total - uint32(fair * num_sharers))
    first = uint32(uint32(fair * sharer) + min(sharer, rest))
    end = uint32(first + fair)
    if sharer < rest:
        end = uint32(end + uint32(1))
    shared = total
    if uint32(min_fair) <= fair and fair <= uint32(max_fair) and num_requests <= uint32(MAX_GIVEN_REQUESTS):
        own = uint32(fair - uint32(fair >> uint32(2)))
        first = uint32(own * sharer)
        end = uint32(first + own)
        shared = uint32(own * num_sharers)
    return first, end, shared, fair
