"""What k3port is told about the kernel. Imports neither torch nor triton: every k3port command reads this file."""

from k3port.hookspecs import hookimpl
from k3port.oracle.spec import PRIORITY_PORTABLE, AxisRule, KernelSpec, Requires

KERNELS = (
    KernelSpec(
        name="example.rms_norm",
        op="rms_norm",
        load="k3port_example_kernel.rms_norm:rms_norm",
        doc="several short rows per program",
        requires=Requires(
            vendors=("nvidia", "amd"),
            dtypes=("bfloat16", "float16", "float32"),
            axes=(AxisRule("D", maximum=8192, why="a row is held in registers"),),
            packages=("triton>=3.6",),
        ),
        # Below k3port's own kernel: it is for those who ask for it.
        priority=PRIORITY_PORTABLE - 1,
        source="k3port's example plugin",
    ),
)


@hookimpl
def k3port_kernels():
    return KERNELS
