"""Whole calls under watch: the watch itself, what the draws reach, and seeded runs on the GPU or in the simulator."""
import numpy as np
import pytest
import test_sanitizer
from assertions import assert_same_bits
from h200 import CLUSTERS, SHARED_BYTES
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeded_batches

import indexer.__main__ as cli
from indexer.batches import make_batch
from indexer.device import SIMULATED, Memory
from indexer.fuzz import FILLERS, GUARD_BYTES, Guarded, compare, draw, filled_memory, random_way
from indexer.problem import check_call

NUM_BATCHES = 440 if SIMULATED else 60                                  # of the seeded run: a minute and a half


# -------------------------------------------------------------------------------------------------------------- the watch

PLACES = pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.kernels)])
CONTENTS = np.arange(24, dtype=np.float32).reshape(4, 3, 2)             # 24 bytes an item of the first axis


@PLACES
@pytest.mark.parametrize("filler", FILLERS)
@pytest.mark.parametrize(("pitch", "shift"), [(0, 0), (16, 0), (4, 4)])
def test_a_guarded_array_holds_its_contents(on_device, filler, pitch, shift):
    guarded = Guarded("x", CONTENTS, filler, on_device=on_device, pitch=pitch, shift=shift)
    assert tuple(guarded.array.shape) == CONTENTS.shape
    assert guarded.array.strides == (24 + pitch, 8, 4)
    assert_same_bits(guarded.fetch(), CONTENTS)
    assert guarded.changes() == []


@PLACES
@pytest.mark.parametrize("is_output", [False, True])
def test_a_byte_that_changes_is_found(on_device, is_output):
    """In front, within, between the items of the first axis, behind: of an output, all but within."""
    around = "around it " if is_output else ""
    for at in (-GUARD_BYTES - 4, -1, 0, 24, 39, 40, 159, 160, 160 + GUARD_BYTES - 1):
        guarded = Guarded("x", CONTENTS, FILLERS[0], on_device=on_device, is_output=is_output, pitch=16, shift=4)
        memory = guarded._now()
        old = memory[GUARD_BYTES + 4 + at]
        memory[GUARD_BYTES + 4 + at] ^= 1
        guarded._memory.copy_to_device(memory) if on_device else np.copyto(guarded._memory, memory)
        within = at in (0, 40)
        assert guarded.changes() == ([] if is_output and within else [
            f"x: 1 bytes {around}have changed, the first at offset {at}, from {old:#04x} to {old ^ 1:#04x}"])
        guarded.restore()
        assert guarded.changes() == []
        assert_same_bits(guarded.fetch(), CONTENTS)


@pytest.mark.kernels
@pytest.mark.parametrize("allocate", [Memory.empty, Memory.scratch])
def test_memory_that_a_call_allocates_is_filled_and_watched(allocate):
    memory, watched = Memory("numba", 0), []
    for zones in (None, watched):
        with filled_memory(0xA5, zones):
            array = getattr(memory, allocate.__name__)((3, 5), "int32")
        assert (array.copy_to_host().view(np.uint32) == 0xA5A5A5A5).all()
    assert watched[0].array is array
    assert watched[0].is_output


# ------------------------------------------------------------------------------------------------------------- the draws


def test_a_draw_depends_on_seed_and_number_alone():
    batch, way = draw(3, 5, on_gpu=True)
    draw(3, 6, on_gpu=True)
    again, same_way = draw(3, 5, on_gpu=True)
    assert way == same_way
    assert_same_bits(batch.q.view(np.uint8), again.q.view(np.uint8))
    assert_same_bits(batch.lookup_table, again.lookup_table)
    assert draw(4, 5, on_gpu=True)[1] != way


@pytest.mark.skipif(SIMULATED, reason="the simulator has neither the scorers of Hopper nor the sampled selection")
def test_the_draws_reach_every_path_of_a_hopper_gpu():
    from indexer.launches import Plan
    from indexer.tma_tile import supports
    scorers, selections, ways = set(), set(), []
    for i in range(150):
        batch, way = draw(0, i, on_gpu=True)
        if not batch.num_tokens:
            continue
        arithmetic = "wgmma" if batch.fp8_dtype == "float8_e4m3fn" and way.arithmetic == "auto" else "exact"
        call = check_call(*batch.arguments(), **batch.options, arithmetic=arithmetic)
        plan = Plan.of(call, 132, SHARED_BYTES, with_scores=way.with_scores, max_clusters=CLUSTERS,
                       use_tma=arithmetic == "wgmma" and supports(call, call.q, call.keys, call.key_scales))
        scorers.add(("tma" if plan.tma else arithmetic, way.planned))
        name = "clusters" if plan.cluster_blocks else "sampled" if plan.num_pieces else "portable"
        selections.add((name, batch.order, way.planned))
        ways.append(way)
    assert scorers >= {(name, planned) for name in ("tma", "wgmma", "exact") for planned in (False, True)}
    assert selections >= {(name, order, planned) for name in ("clusters", "sampled") for order in ("index", "score")
                          for planned in (False, True)}
    assert {order for name, order, _ in selections if name == "portable"} == {"index", "score"}
    for field in ("on_device", "host_metadata", "planned", "with_scores", "with_out", "with_index_scores", "own_stream",
                  "arithmetic", "filler", "pitch", "shift"):
        assert len({getattr(way, field) for way in ways}) >= 2, field


@pytest.mark.skipif(SIMULATED, reason="the simulator has neither the scorers of Hopper nor the sampled selection")
def test_the_calls_for_the_sanitizer_reach_every_selection():
    from indexer.launches import Plan
    from indexer.tma_tile import supports
    selections = set()
    for name, options in test_sanitizer.BATCHES.items():
        batch = make_batch(np.random.default_rng(0), **options)
        arithmetic = "wgmma" if batch.fp8_dtype == "float8_e4m3fn" else "exact"
        call = check_call(*batch.arguments(), **batch.options, arithmetic=arithmetic)
        plan = Plan.of(call, 132, SHARED_BYTES, with_scores=False,
                       max_clusters={} if name.startswith(test_sanitizer.WITHOUT_CLUSTERS) else CLUSTERS,
                       use_tma=arithmetic == "wgmma" and supports(call, call.q, call.keys, call.key_scales))
        selection = ("clusters" if plan.cluster_blocks else "portable" if not plan.num_pieces
                     else "shared" if plan.num_pieces > 1 else "sampled")
        assert selection == ("clusters" if name.startswith("clusters") else "shared" if name.startswith("shared")
                             else "portable" if name.startswith("portable") else "sampled"), name
        selections.add((selection, batch.order))
    assert selections == {(selection, order) for selection in ("clusters", "shared", "sampled", "portable")
                          for order in ("index", "score")}


# --------------------------------------------------------------------------------------------------------- calls under it


@pytest.mark.kernels
def test_a_seeded_run_finds_nothing(capsys):
    assert cli.main(["check", "--batches", str(NUM_BATCHES), "--seed", "6"]) == 0, capsys.readouterr().out


@pytest.mark.kernels
@given(batch=seeded_batches(), seed=st.integers(0, 2**32 - 1))
def test_a_batch_in_any_way(batch, seed):
    way = random_way(np.random.default_rng(seed), batch, on_gpu=not SIMULATED)
    assert compare(batch, way) == [], way
