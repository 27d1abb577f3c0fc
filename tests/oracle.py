"""The oracle in the arithmetic that the GPU functions take for "auto"."""
import indexer
from indexer import reference


def _in_auto(function, q, q_s, input_row_offsets, cache, args, options):
    arithmetic = indexer.default_arithmetic(getattr(cache, "fp8_dtype", "float8_e4m3fn"))
    return function(q, q_s, input_row_offsets, cache, *args, **{"arithmetic": arithmetic, **options})


def select(q, q_s, input_row_offsets, cache, *args, **options):
    """`reference.mla_indexer_ragged_float8_paged`."""
    return _in_auto(reference.mla_indexer_ragged_float8_paged, q, q_s, input_row_offsets, cache, args, options)


def scores(q, q_s, input_row_offsets, cache, *args, **options):
    """`reference.index_scores`."""
    return _in_auto(reference.index_scores, q, q_s, input_row_offsets, cache, args, options)
