"""What compiled code says of itself: registers, spills, matrix instructions, widths of global loads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from k3port.testing.xcompile.compute_units import waves_per_simd


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: per thread (NVIDIA), or vector registers per lane with the accumulation registers (AMD).
        accumulators: of those, accumulation registers (gfx942 and gfx950).
        scalars: scalar registers (AMD).
        spills: spilled vector registers (AMD), or bytes of spill stores and loads (NVIDIA).
        scalar_spills: spilled scalar registers (AMD); they go to vector registers, or to memory.
        scratch_bytes: private memory of a lane (AMD), stack frame of a thread (NVIDIA): spills and local arrays.
        waves: waves per SIMD at once (AMD); 0 for NVIDIA.
        matrix: matrix instructions in the code by kind.
        loads: loads from global memory in the code by instruction, ``to LDS`` where the data go there directly.
    """

    registers: int
    spills: int
    scratch_bytes: int
    accumulators: int = 0
    scalars: int = 0
    scalar_spills: int = 0
    waves: int = 0
    matrix: Mapping[str, int] = field(default_factory=dict)
    loads: Mapping[str, int] = field(default_factory=dict)


_DOT = re.compile(r"= tt\.dot .*: tensor<[\dx]*x(f8\w+)[^>]*> \* tensor<[\dx]*x(f8\w+)")
_FP8_MATRIX = re.compile(r"fp8|bf8|f8f6f4|e4m3|e5m2|kind::\w*f8")


def widened(ir: str, matrix: Iterable[str]) -> tuple[str, ...]:
    """Kinds of 8-bit floats that ``tl.dot`` multiplies in Triton's IR, where the machine code does so in another type.

    The compiler does it without a word where the target has no matrix instruction for this flavour: the numbers are
    right, and neither speed nor memory is that of fp8.

    Args:
        ir: ``asm["ttir"]``.
        matrix: kinds of matrix instructions in the code; a product without any is widened too.
    """
    asked = dict.fromkeys(" x ".join(dict.fromkeys(match.groups())) for match in _DOT.finditer(ir))
    return () if any(_FP8_MATRIX.search(kind) for kind in matrix) else tuple(asked)


_METADATA = re.compile(r"\.amdgpu_metadata(.*?)\.end_amdgpu_metadata", re.DOTALL)
_AMD_LOAD = re.compile(r"(global|buffer|flat)_(s?load_\w+)")
_TENSOR_LOAD = re.compile(r"(tensor|cluster)_load\w*")
_MATRIX = re.compile(r"v_(s?mfmac?|s?wmmac?)_\w+")


def amd_resources(assembly: str, arch: str, shared: int, num_warps: int) -> Resources:
    """Reads the code object's metadata and the instructions of ``asm["amdgcn"]``.

    Args:
        shared: LDS bytes of a workgroup; Triton's is allocated at launch, so the metadata do not have it.

    Raises:
        ValueError: the text has no metadata of a kernel.
    """
    found = _METADATA.search(assembly)
    if found is None:
        raise ValueError("the assembly has no .amdgpu_metadata")
    values = {key: int(text) for key, text in re.findall(r"\.(\w+):\s+(\d+)\s*$", found[1], re.MULTILINE)}
    if "vgpr_count" not in values:
        raise ValueError("the metadata have no vgpr_count")
    names = list(_amd_instructions(assembly))
    registers = values["vgpr_count"]
    return Resources(
        registers=registers,
        accumulators=values.get("agpr_count", 0),
        scalars=values["sgpr_count"],
        spills=values["vgpr_spill_count"],
        scalar_spills=values["sgpr_spill_count"],
        scratch_bytes=values["private_segment_fixed_size"],
        waves=waves_per_simd(arch, registers, shared + values["group_segment_fixed_size"], num_warps),
        matrix=_counted(name for name, _ in names if _MATRIX.fullmatch(name)),
        loads=_counted(_amd_load(name, to_lds) for name, to_lds in names),
    )


def _amd_instructions(assembly: str) -> Iterator[tuple[str, bool]]:
    """Mnemonics in order, and whether the ``lds`` modifier sends the data to LDS. Two may share a line (dual issue)."""
    for line in assembly.splitlines():
        code = line.partition(";")[0]
        if not line[:1].isspace() or code.lstrip().startswith("."):
            continue
        for part in code.split("::"):
            words = part.split()
            if words:
                yield words[0], "lds" in words[1:]


def _amd_load(name: str, to_lds: bool) -> str:
    if _TENSOR_LOAD.fullmatch(name):
        return name
    if _AMD_LOAD.fullmatch(name):
        return f"{name} to LDS" if to_lds or "_lds" in name else name
    return ""


_PTX_LOAD = re.compile(r"ld\.(?:weak\.|volatile\.|relaxed\.\w+\.|acquire\.\w+\.)?global(?:\.[\w:]+)*")
_PTX_MATRIX = re.compile(r"(?:wgmma\.mma_async|mma\.sync|mma\.sp|tcgen05\.mma)[\w.:]*")
_PTXAS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def nvidia_resources(ptx: str, log: str) -> Resources:
    """Reads registers and spills from the report of ``ptxas -v``, instructions from the PTX.

    ptxas may still merge or split loads: widths are those that Triton asked for.

    Raises:
        ValueError: the log is no report of ptxas.
    """
    memory, registers = _PTXAS.search(log), re.search(r"Used (\d+) registers", log)
    if memory is None or registers is None:
        raise ValueError("ptxas did not report registers and spills")
    stack, stores, loads = map(int, memory.groups())
    return Resources(
        registers=int(registers[1]),
        spills=stores + loads,
        scratch_bytes=stack,
        matrix=_counted(_ptx_matrix(match[0]) for match in _PTX_MATRIX.finditer(ptx)),
        loads=_counted(_ptx_loads(ptx)),
    )


def _ptx_matrix(name: str) -> str:
    """The kind, shape and types: ``wgmma m64n128k16 f32.bf16.bf16``."""
    parts = name.split(".")
    shape = next((part for part in parts if re.fullmatch(r"m\d+n\d+k\d+", part)), "")
    types = ".".join(part for part in parts if re.fullmatch(r"(?:b?f|tf|[us]|e\dm)\d+(?:x\d+)?|kind::\w+", part))
    return " ".join(filter(None, (parts[0], shape, types)))


def _ptx_loads(ptx: str) -> Iterator[str]:
    for match in _PTX_LOAD.finditer(ptx):
        parts = match[0].split(".")
        vector = next((part for part in parts if re.fullmatch(r"v\d", part)), "")
        yield ".".join(filter(None, ("ld.global", vector, parts[-1])))
    for match in re.finditer(r"cp\.async\.c[ag]\.shared\.global(?:\.[\w:]+)*\s+\[[^\]]*\],\s*\[[^\]]*\],\s*(\w+)", ptx):
        yield f"cp.async {int(match[1], 0)} bytes to shared memory"
    for _ in re.finditer(r"cp\.async\.bulk\.tensor[\w.:]*\.global", ptx):
        yield "cp.async.bulk.tensor to shared memory"


def _counted(names: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(name for name in names if name).items()))
