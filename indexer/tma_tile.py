"""What the Hopper scorer's kernel is made for: its tile, its place in shared memory, the calls it takes, its tensor maps.

Everything that the kernel (`tma_scoring`) and its launch know is here, in host functions.
"""
from __future__ import annotations

from dataclasses import dataclass

from .problem import ArrayView, Call
from .tile_schedule import BLOCK_KV, MAX_KPOOL

ROW_BYTES = 128                               # of a tile row in shared memory: a key or a head, zeros behind its depth
SWIZZLE_ATOM_BYTES = 1024
KEYS_PER_WARPGROUP = 64                       # rows of a product
MATH_WARPS = 4 * (BLOCK_KV // KEYS_PER_WARPGROUP)
SCHEDULE_WARP, KEY_WARP = MATH_WARPS, MATH_WARPS + 1
NUM_WARPS = MATH_WARPS + 4                    # registers move between whole warpgroups
THREADS = 32 * NUM_WARPS
PRODUCER_REGISTERS, MATH_REGISTERS = 56, 224
MAX_HEADS, MAX_COLUMNS, MAX_BLOCK_Q = 128, 256, 16
MIN_PART = 3                                  # slots that are given out at a time: to ask for fewer takes as long as they do
Q_FULL_ARRIVALS = 32                          # who has brought an item's weights: the lanes of the schedule warp
Q_EMPTY_ARRIVALS = MATH_WARPS + 1             # who is done with an item: the math warps and the key warp
KV_EMPTY_ARRIVALS = MATH_WARPS                # who is done with a key tile

# Words of an item in shared memory; its tokens' candidate counts and its weights are behind them.
ITEM_REQUEST, ITEM_ROW, ITEM_NUM_ROWS, ITEM_TILE, ITEM_NUM_TILES, ITEM_CANDIDATES, ITEM_IS_HALVABLE = range(7)
ITEM_WORDS = 8


@dataclass(frozen=True)
class TmaTile:
    """What one block of threads works on, and where it lies in shared memory.

    Attributes
    ----------
    heads : int
        Heads per token, with padding: 8, 16, 32, 64 or 128.
    block_q : int
        Query tokens of a query block: a power of two.
    depth_steps : int
        Products of depth 32 per dot product.
    num_q_stages, num_kv_stages : int
        Items and key tiles in flight.
    """

    heads: int
    block_q: int
    depth_steps: int
    num_q_stages: int
    num_kv_stages: int

    @property
    def columns(self) -> int:
        return self.heads * self.block_q

    @property
    def num_groups(self) -> int:
        """Groups of products per tile: two of whole tokens, or one token."""
        return min(2, self.block_q)

    @property
    def group_tokens(self) -> int:
        return self.block_q // self.num_groups

    @property
    def is_memory_bound(self) -> bool:
        """Whether the tensor cores wait for keys, not the other way round."""
        return self.columns <= MAX_COLUMNS // 2

    @property
    def given_out(self) -> tuple[int, int, int]:
        """(min_fair, max_fair, parts): a fair share of so many slots is given out on demand in its last quarter (`tile_schedule`),
        in parts of 1 / parts of it, but `MIN_PART` at least.

        Where memory is the limit, the multiprocessors' shares of its bandwidth differ. Elsewhere it pays only where many short
        query blocks make stretches of unequal cost, and to begin an item costs more.
        """
        return (16, 2**32 - 1, 64) if self.is_memory_bound else (64, 512, 16)

    @property
    def q_tile_bytes(self) -> int:
        return self.columns * ROW_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return BLOCK_KV * ROW_BYTES

    # byte offsets in shared memory, from a base that is aligned to a swizzle atom
    @property
    def kv_offset(self) -> int:
        return self.num_q_stages * self.q_tile_bytes

    @property
    def scales_offset(self) -> int:
        return self.kv_offset + self.num_kv_stages * self.kv_tile_bytes

    @property
    def items_offset(self) -> int:
        return self.scales_offset + self.num_kv_stages * 4 * BLOCK_KV

    @property
    def item_bytes(self) -> int:
        """Of an item: its fields, the candidates of its tokens, its weights; a multiple of 8."""
        return 4 * (ITEM_WORDS + self.block_q + self.block_q % 2 + self.columns)

    @property
    def candidates_offset(self) -> int:
        """Within an item."""
        return 4 * ITEM_WORDS

    @property
    def weights_offset(self) -> int:
        """Within an item."""
        return self.item_bytes - 4 * self.columns

    # barriers of 8 bytes: per item, its query tile and weights are there, all are done with it, its fields are there; per key tile,
    # it is there, all are done with it
    @property
    def q_full(self) -> int:
        return self.items_offset + self.num_q_stages * self.item_bytes

    @property
    def q_empty(self) -> int:
        return self.q_full + 8 * self.num_q_stages

    @property
    def item_full(self) -> int:
        return self.q_empty + 8 * self.num_q_stages

    @property
    def kv_full(self) -> int:
        return self.item_full + 8 * self.num_q_stages

    @property
    def kv_empty(self) -> int:
        return self.kv_full + 8 * self.num_kv_stages

    @property
    def num_barriers(self) -> int:
        return 3 * self.num_q_stages + 2 * self.num_kv_stages

    # a word per warp
    @property
    def scratch_offset(self) -> int:
        return self.kv_empty + 8 * self.num_kv_stages

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, with what it takes to align the base."""
        return SWIZZLE_ATOM_BYTES + self.scratch_offset + 4 * NUM_WARPS


def tile_for(num_heads: int, head_dim: int, tokens_per_request: int, shared_bytes_limit: int) -> TmaTile:
    """The tile for these dimensions: query blocks of one or two tokens where requests have so many, else as long as can be."""
    heads = next(h for h in (8, 16, 32, 64, 128) if num_heads <= h)
    block_q = min(max(1, tokens_per_request), MAX_COLUMNS // heads)
    if block_q > 2:
        block_q = min(MAX_COLUMNS // heads, MAX_BLOCK_Q)
    depth_steps = 2 if head_dim <= 64 else 4                  # products of zeros change nothing; few kernels compile sooner
    # Where memory is the limit, more in flight are no faster, and what is given out on demand is asked for too early.
    num_q_stages, most = (3, 6) if heads * block_q <= MAX_COLUMNS // 2 else (2, 12)
    tiles = (TmaTile(heads, block_q, depth_steps, num_q_stages, stages) for stages in range(most, 1, -1))
    return next(tile for tile in tiles if tile.shared_bytes <= shared_bytes_limit)


# ------------------------------------------------------------------------------------------------------------- tensor maps


def supports(call: Call, q: ArrayView, keys: ArrayView, key_scales: ArrayView) -> bool:
    """Whether the kernel takes these arrays, on a device: their dimensions, and the copy engine's alignment of 16 bytes.

    Parameters
    ----------
    q, keys, key_scales : ArrayView
        [T, H, D], [num_blocks, P, D] and [num_blocks, P], where the kernel would read them.
    """
    num_blocks, page_size, head_dim = keys.shape
    whole_pages = page_size in (8, 16, 32, 64) or page_size % BLOCK_KV == 0
    if not (whole_pages and num_blocks and call.table.size and call.num_heads <= MAX_HEADS and head_dim <= ROW_BYTES
            and call.kpool <= MAX_KPOOL):
        return False
    scale_slot, scale_block = key_scales.strides[1], key_scales.strides[0]
    return (_is_mappable(q) and _is_mappable(keys) and scale_slot == key_scales.itemsize and key_scales.address % 16 == 0
            and (num_blocks == 1 or (scale_block % 16 == 0 and scale_block >= 0)))


def _is_mappable(view: ArrayView) -> bool:
    """Whether a tensor map can describe a [., ., D] array of bytes."""
    return view.address % 16 == 0 and all(n == 1 or (0 < s < 2**40 and s % 16 == 0) for n, s in zip(view.shape[:2], view.strides))


def tensor_map(view: ArrayView, box: tuple[int, int]) -> tuple[int, ...]:
    """Tensor map of a [n, m, D] array of bytes, as 16 uint64: boxes of ``box`` x 128, zeros outside, 128-byte swizzle."""
    from cuda.bindings import driver
    outer, inner, depth = view.shape
    strides = [s if n > 1 else ROW_BYTES for n, s in ((inner, view.strides[1]), (outer, view.strides[0]))]
    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, view.address,
        [driver.cuuint64_t(n) for n in (depth, inner, outer)], [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(n) for n in (ROW_BYTES, box[1], box[0])], [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    if int(error):
        raise RuntimeError(f"{view.name} has no tensor map, shape {list(view.shape)}, strides {list(view.strides)}: {error.name}")
    return tuple(int(word) for word in encoded.opaque)
