"""Who scores which tiles: the closed forms against counting, over drawn requests."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.device import SIMULATED

if SIMULATED:
    pytest.skip("the simulator's kernels do not use it", allow_module_level=True)

from host_functions import plain

from indexer import tile_schedule

BLOCK_QS = (1, 2, 4, 8, 16)
rows_to_score, slots_of_request, slots_before, query_block_at, divide, stretch = map(plain, (
    tile_schedule.rows_to_score, tile_schedule.slots_of_request, tile_schedule.slots_before, tile_schedule.query_block_at,
    tile_schedule.divide, tile_schedule.stretch))


@given(st.integers(0, 2**31 - 1), st.integers(1, tile_schedule.MAX_KPOOL))
def test_a_division_without_dividing(n, kpool):
    pool = tile_schedule.divisor(kpool)
    assert pool[1] < 2**32
    for value in (n, n // kpool * kpool, max(0, n // kpool * kpool - 1), 2**31 - 1):
        assert divide(value, pool) == value // kpool


requests = st.fixed_dictionaries({
    "new_tokens": st.integers(0, 300), "cached": st.integers(0, 5000), "kpool": st.sampled_from((1, 2, 3, 4, 7, 500)),
    "causal": st.booleans(), "offset": st.integers(0, 50), "start": st.integers(0, 100), "length": st.integers(1, 300),
    "skip_up_to": st.sampled_from((0, 0, 5, 100, 2048)), "block_q": st.sampled_from(BLOCK_QS), "spare": st.integers(0, 5)})


@given(requests)
def test_slots_are_counted_and_found(request):
    n, c, kpool, causal, offset, start, skip = (request[name] for name in (
        "new_tokens", "cached", "kpool", "causal", "offset", "start", "skip_up_to"))
    stop, block_q, width = start + request["length"], request["block_q"], (c + n) // kpool + request["spare"]
    candidates = {row: (c + (row - offset + 1 if causal else n)) // kpool for row in range(offset, offset + n)}
    wanted = [row for row in candidates if start <= row < stop and candidates[row] > skip]
    slots = [-(-candidates[wanted[min(i + block_q, len(wanted)) - 1]] // 128) + 1 for i in range(0, len(wanted), block_q)]

    first, before, count = rows_to_score(offset, offset + n, c, start, stop, tile_schedule.enough_visible(skip, kpool), int(causal),
                                         tile_schedule.visible_limit(width, kpool))
    pool = tile_schedule.divisor(kpool)
    assert (count, first if wanted else None) == (len(wanted), wanted[0] if wanted else None)
    assert slots_of_request(before, count, pool, int(causal), block_q) == sum(slots)
    ends = np.cumsum([0, *slots])
    for block in range(len(slots)):
        assert slots_before(block, before, pool, int(causal), block_q) == ends[block]
        for slot in {ends[block], ends[block + 1] - 1}:
            assert query_block_at(int(slot), before, count, pool, int(causal), block_q) == block


int32s = st.integers(-2**31, 2**31 - 1)


@given(int32s, int32s, int32s, st.booleans(), st.integers(1, 5000), st.sampled_from((1, 4, 500)), st.integers(0, 2**24),
       st.sampled_from(BLOCK_QS))
def test_untrue_metadata_stays_bounded(cached, offset, end, causal, width, kpool, rows, block_q):
    """Rows within the chunk, and no more slots than rows of full width have, whatever the metadata hold."""
    stop = 10 + rows
    first, before, count = rows_to_score(offset, end, cached, 10, stop, tile_schedule.enough_visible(0, kpool), int(causal),
                                         tile_schedule.visible_limit(width, kpool))
    assert count == 0 or 10 <= first < first + count <= stop
    assert before + (count if causal else 0) <= max(before, tile_schedule.visible_limit(width, kpool))
    if cached < 0:
        assert count == 0
    slots = slots_of_request(before, count, tile_schedule.divisor(kpool), int(causal), block_q)
    assert slots <= -(-count // block_q) * (1 + -(-(width + 1) // 128))


def test_a_request_longer_than_the_matrix_leaves_the_others_their_slots():
    """3 million new tokens against 8 positions: one tile for each block of rows that see no more than these."""
    limit, pool = tile_schedule.visible_limit(8, 1), tile_schedule.divisor(1)
    offsets, cached = [0, 3_000_000, 6_000_000, 6_000_001], [0, 0, 5]
    slots = []
    for b in range(3):
        _, before, count = rows_to_score(offsets[b], offsets[b + 1], cached[b], 0, 6_000_001, tile_schedule.enough_visible(0, 1), 1,
                                         limit)
        slots.append(slots_of_request(before, count, pool, 1, 16))
    assert slots == [2, 2, 2]


@given(st.integers(0, 2**31), st.integers(1, 132), st.sampled_from((1, 1024, 1025)), st.integers(0, 100), st.integers(0, 2**32 - 1))
def test_every_slot_is_somebodys_or_given_out(total, num_sharers, num_requests, min_fair, max_fair):
    stretches = [stretch(total, sharer, num_sharers, num_requests, min_fair, max_fair) for sharer in range(num_sharers)]
    ends = [0, *(end for _, end, _, _ in stretches)]
    assert [first for first, _, _, _ in stretches] == ends[:-1]         # own slots follow each other, up to the shared ones
    (shared,), (fair,) = {shared for _, _, shared, _ in stretches}, {fair for _, _, _, fair in stretches}
    assert ends[-1] == shared
    sizes = {end - first for first, end, _, _ in stretches}
    assert max(sizes) - min(sizes) <= 1
    if min_fair <= total // num_sharers <= max_fair and num_requests <= 1024:
        assert total / 4 - num_sharers <= total - shared <= total / 4 + 2 * num_sharers
    else:
        assert shared == total
    assert fair == total // num_sharers
