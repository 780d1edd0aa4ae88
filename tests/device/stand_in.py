"""A device other than the CPU, without a GPU: the C++ next to this file, built and registered with torch.

A process that has it keeps it, so tests with it run in a separate process.
"""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

NAME = "stand_in"
SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """The compiled module; needs g++."""
    module = folder / f"{NAME}.so"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}", "-w"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    flags += [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths()]
    libraries += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(module), *libraries], check=True)
    return module


def load(module: Path) -> Any:
    """Make the device known to torch, by its name."""
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location(NAME, module)
    assert spec is not None and spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    face = ModuleType(f"torch.{NAME}")
    known: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 4,
        "current_device": device.current_device,
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    vars(face).update(known)
    torch._register_device_module(NAME, face)
    torch.utils.generate_methods_for_privateuse1_backend()
    return device
