"""From PTX to machine code and back to text, without a GPU: ptxas and nvdisasm."""
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path


def tool(name):
    """Path of ptxas or nvdisasm: from its wheel, or from a CUDA toolkit."""
    site = Path(sysconfig.get_paths()["purelib"])
    found = [path for path in site.glob(f"nvidia/**/bin/{name}") if path.is_file()]
    path = str(found[0]) if found else shutil.which(name, path="/usr/local/cuda/bin") or shutil.which(name)
    assert path, f"{name} is missing: install the extra 'test'"
    return path


def assemble(ptx, target):
    """(ptxas report, SASS) of a kernel for a target such as "sm_90a"."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        ptxas = subprocess.run([tool("ptxas"), "-v", f"-arch={target}", source, "-o", cubin], capture_output=True, text=True)
        assert ptxas.returncode == 0, ptxas.stderr
        sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True)
        assert sass.returncode == 0, sass.stderr
    return ptxas.stderr, sass.stdout
