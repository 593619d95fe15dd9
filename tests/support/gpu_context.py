"""Whether this process has started the driver of an NVIDIA GPU: what a look at the machine must not do."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_NOT_INITIALIZED = 3


def traces() -> list[str]:
    """What shows that a GPU was started in this process; empty where none was, and on a machine without one.

    The management library may map ``libcuda.so`` by itself, to ask for the version that it supports. That starts
    nothing: without ``cuInit`` the driver answers every question with "not initialized", and no context can exist.
    The runtime libraries (``libcudart``, ``libamdhip64``) come with torch or a vendor package only.
    """
    if sys.platform != "linux":
        return []
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found = [name for name in ("libcudart", "libamdhip64", "/dev/nvidia-uvm", "/dev/kfd") if name in maps]
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        found += [target] if target.startswith(("/dev/nvidia-uvm", "/dev/kfd")) else []
    if "libcuda.so" in maps:
        code = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
        found += [f"cuDeviceGetCount gives {code}: cuInit was called"] if code != _NOT_INITIALIZED else []
    return found
