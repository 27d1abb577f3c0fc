"""Arrays of other libraries with the contents of NumPy's, and back. numba's are made by `indexer.__main__.to_device`."""
import numpy as np
import pytest


def to_torch(array, device="cuda"):
    torch = pytest.importorskip("torch")
    if array.dtype.name.startswith("float8"):
        return torch.from_numpy(array.view(np.uint8)).to(device).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).to(device)


def to_cupy(array):
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(array.view(np.uint8) if array.dtype.name.startswith("float8") else array)


def to_host(array):
    for method in ("copy_to_host", "get"):
        if hasattr(array, method):
            return getattr(array, method)()
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)
