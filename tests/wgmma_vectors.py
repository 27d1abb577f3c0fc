"""Operands that tell Hopper's FP8 tensor cores from every other way to add 32 products, and the bits that an H200 returned."""
import ml_dtypes
import numpy as np


def cancelling(a, b, p=0, q=1):
    """Products a*b at p and -a*b at q."""
    return {p: (a, b), q: (-a, b)}


def filled(products, ks, pair):
    """The products, and `pair` at every other k of `ks`."""
    return {**dict.fromkeys(ks, pair), **products}


TINY = 2.0**-6                               # the smallest normal e4m3fn; subnormals are multiples of 2**-9
# name, depth, {k: (a, b)} (every other k is 0 x 0), bits of C, bits that an H200 returned
WGMMA_VECTORS = [
    ("F bits, lost terms", 32, {**cancelling(128, 128), 2: (1, 2), 3: (1, 1), 4: (1, 1)}, 0, 0x40000000),
    ("sign of truncation", 32, {**cancelling(128, 128), 2: (-1.5, 1), 3: (-1.5, 1), 4: (-1.5, 1), 5: (1.5, 1)}, 0, 0x00000000),
    ("product not renormalised", 32, {**cancelling(192, 192), 2: (1, 2)}, 0, 0x40000000),
    ("emax over products", 32, {0: (256, TINY), 1: (TINY, 256)}, 0, 0x41000000),
    ("one group of 32", 32, filled(cancelling(128, 128, 0, 4), range(32), (1, 1)), 0, 0x00000000),
    ("C in the alignment", 32, filled({}, range(32), (1, 1)), 0x46800000, 0x46800000),
    ("C cut to 13 bits", 32, {}, 0xBFFFFFFF, 0xBFFFFC00),
    ("C cut before the sum", 32, {0: (-1, 1)}, 0x3F800300, 0x00000000),
    ("output truncation", 32, filled({8: (-1.75 * 2**-5, TINY)}, range(8), (-1, 1)), 0, 0xC1000000),
    ("subnormal exponent", 32, filled(cancelling(2**-9, 256), range(32), (TINY, TINY)), 0, 0x00000000),
    ("subnormals kept", 32, {k: ((k + 1) * 2**-9, 1) for k in range(7)}, 0, 0x3D600000),
    ("zero product ignored", 32, filled({0: (0, 448), 1: (448, 0)}, range(32), (TINY, TINY)), 0, 0x3BF00000),
    ("sign of zero", 32, filled({}, range(32), (-0.0, 1)), 0x80000000, 0x00000000),
    ("NaN times zero", 32, {0: (np.nan, 0)}, 0x3F800000, 0x7FFFFFFF),
    ("NaN payload of C", 32, {0: (1, 1)}, 0xFFC12345, 0x7FFFFFFF),
    ("C infinite", 32, {0: (448, 448)}, 0xFF800000, 0xFF800000),
    ("fused or added", 32, {0: (1.5 * TINY, 2**-8)}, 0x44800000, 0x44800000),
    ("grouping", 32, {**cancelling(256, 256), 2: (2**-5, 2**-5), 3: (2**-5, 2**-5)}, 0, 0x00000000),
    ("chain of four", 128, filled({32: (128, 128), 96: (-128, 128)}, [*range(32), *range(64, 128)], (1, 1)), 0, 0x42000000),
    ("chain, C grows", 128, {k: (1.875, 1.875) if k % 32 else (448, 1.125) for k in range(128)}, 0, 0x45192000),
]


def operands(depth, products):
    """Bytes [depth] of a and of b for the products of a vector."""
    a, b = np.zeros((2, depth), np.float32)
    for k, pair in products.items():
        a[k], b[k] = pair
    return tuple(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for values in (a, b))
