"""What declared Triton kernels of both vendors have in common."""

from __future__ import annotations

from k3port.backends.limits import AMPERE_AND_LATER, TRITON_AMD
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

GPU_ARCHS = (*AMPERE_AND_LATER, *TRITON_AMD)
ACTIVATIONS = ("bfloat16", "float16", "float32")
CACHE = {"mla_cache": "paged:latent"}


def triton_requires(**limits: object) -> Requires:
    """A kernel in Triton for every GPU that k3port knows; ``limits`` are added."""
    fields: dict[str, object] = {
        "vendors": ("nvidia", "amd"),
        "archs": GPU_ARCHS,
        "dtypes": ACTIVATIONS,
        "packages": ("triton>=3.6",),
        **limits,
    }
    return Requires(**fields)  # type: ignore[arg-type]


def triton_kernel(
    name: str, op: str, doc: str, *, load: str = "", requires: Requires | None = None, **fields: object
) -> KernelSpec:
    """A kernel of the portable backend; without ``load`` it is only declared."""
    spec: dict[str, object] = {"priority": PRIORITY_PORTABLE, "source": "k3port's own kernels", **fields}
    return KernelSpec(
        name=f"portable.{name}",
        op=op,
        load=load,
        doc=doc,
        requires=requires or triton_requires(),
        **spec,  # type: ignore[arg-type]
    )
