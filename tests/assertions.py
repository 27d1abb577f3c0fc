"""Comparisons that print what differs. Never a tolerance."""
import numpy as np


def assert_same_bits(got, want, what="array"):
    """Equal shape, dtype and bits; on a difference, how many entries differ and the first few, with their bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    bits = np.dtype(f"uint{8 * got.dtype.itemsize}")
    different = np.argwhere(np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits))
    if len(different):
        lines = [f"{what}: {len(different)} of {got.size} entries differ"]
        for at in map(tuple, different[:5]):
            lines.append(f"  at {tuple(map(int, at))}: got {got[at]!r} ({got[at].view(bits):#x}), "
                         f"expected {want[at]!r} ({want[at].view(bits):#x})")
        raise AssertionError("\n".join(lines))
