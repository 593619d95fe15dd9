"""Executes AMD CDNA3 and CDNA4 code (gfx942, gfx950) that Triton compiled, instruction by instruction, on CPU tensors.

The assembly text that Triton assembles into its binary is interpreted, so encoding and loading are not covered and
everything before them is. Sources: AMD's documents "AMD Instinct MI300 (CDNA3) Instruction Set Architecture" and "AMD
Instinct CDNA4 Instruction Set Architecture", and LLVM's AMDGPU usage guide for launch and metadata.

Modelled: scalar, vector, packed, SDWA and DPP instructions; permlane swaps, ds_permute, ds_bpermute, ds_swizzle; MFMA
of f32, xf32, f16, bf16, fp8, i8, f64 (dense shapes) and scaled f8f6f4 MFMA with E8M0 scales; global, buffer, scratch
and LDS memory, transposing LDS reads, atomics; direct-to-LDS copies, which land at the s_waitcnt that covers them;
barriers; 3-D grids. fp8 is FNUZ on gfx942 and OCP on gfx950.

Checked: registers start as NaN patterns, reads of LDS that was never written are reported; global accesses must lie in
the storage of a passed tensor, buffer offsets in the descriptor unless masked, LDS accesses in the allocation, and the
error names tensor, instruction and source line; LDS accesses of two waves that conflict without a barrier between them
are reported. An opcode, modifier or operand that is not modelled is an error with its text, once it is reached.

Not modelled: timing, occupancy, register limits, cache coherence, out-of-order completion of ordinary loads and of
LDS accesses (a missing s_waitcnt for a register, or of lgkmcnt, goes unseen), workgroups at the same time (one that
waits for another runs into the instruction limit), another order of waves and atomics than 0, 1, 2, ...; the roundings
inside an MFMA; f32 and f16 FMA are rounded from f64; sparse MFMA and MFMA broadcast; calls; named barriers; global
scratch; rounding and denormal modes other than nearest-even with denormals; exceptions; races in global memory.

See docs/amd-emulator.md.
"""

from k3port.testing.amd_isa.core import EmuError
from k3port.testing.amd_isa.execute import HangError
from k3port.testing.amd_isa.launch import LaunchReport, emulate, run_kernel
from k3port.testing.amd_isa.mutate import Mutant, MutationReport, mutate

__all__ = ["EmuError", "HangError", "LaunchReport", "Mutant", "MutationReport", "emulate", "mutate", "run_kernel"]
