"""Which kernels a test is for: the record decides, not the name."""

from __future__ import annotations

from typing import Any

from k3port.oracle.spec import KernelSpec, Requires
from k3port.testing.subject import gpu_kernels, triton_kernels


def kernel(name: str, load: str = "m:f", parts: tuple[str, ...] = (), **requires: Any) -> KernelSpec:
    return KernelSpec(name, "rms_norm", load, "", requires=Requires(**requires), parts=parts)


TRITON = ("triton>=3.3",)
KERNELS = (
    kernel("cpu.norm", vendors=("cpu",)),
    kernel("reference.norm"),
    kernel("portable.here", vendors=("cpu", "nvidia")),
    kernel("mine.norm", vendors=("amd",), packages=TRITON),
    kernel("anyone.norm", packages=TRITON),
    kernel("cuda.norm", vendors=("nvidia",), packages=("flashinfer-python>=0.2",)),
    kernel("cuda.declared", load="", vendors=("nvidia",), packages=TRITON),
    kernel("mine.whole", parts=("rms_norm",), vendors=("nvidia",), packages=TRITON),
)


def test_kernels_for_gpus() -> None:
    names = [spec.name for spec in gpu_kernels(KERNELS)]
    assert names == ["mine.norm", "anyone.norm", "cuda.norm", "mine.whole"]


def test_kernels_in_triton() -> None:
    assert [spec.name for spec in triton_kernels(KERNELS)] == ["mine.norm", "anyone.norm"]
