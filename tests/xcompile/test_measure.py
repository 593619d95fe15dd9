"""Reading compiled code, and the waves that a SIMD can hold."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

import torch
import triton
import xcompile_kernels as toys
from triton.compiler import ASTSource

from k3port.testing.launches import Launch, gpu_target, record
from k3port.testing.targets import AMD_TARGETS, TARGETS, shared_limit
from k3port.testing.xcompile.compute_units import (
    COMPUTE_UNITS,
    register_waves,
    waves_per_simd,
)
from k3port.testing.xcompile.measure import amd_resources, nvidia_resources


def compiled(launch: Launch) -> triton.compiler.CompiledKernel:
    source = ASTSource(launch.function, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    return triton.compile(source, target=gpu_target(launch.arch), options=dict(launch.options))


@pytest.mark.parametrize("arch", AMD_TARGETS)
@pytest.mark.parametrize("toy", [toys.copy, toys.product, toys.spilling])
def test_register_waves_are_what_the_compiler_says(arch: str, toy: Callable[..., torch.Tensor]) -> None:
    """LLVM writes the occupancy that registers allow into its assembly; Triton's LDS is not known to it."""
    with record(arch) as recording:
        toy(torch.empty(300, 7168, dtype=torch.bfloat16), torch.empty(7168), 1e-5)
    text = compiled(recording.launches[0]).asm["amdgcn"]
    said = re.search(r"; Occupancy: (\d+)", text)
    assert said is not None
    found = amd_resources(text, arch, 0, 4)
    assert register_waves(COMPUTE_UNITS[arch], found.registers) == int(said[1])


@pytest.mark.parametrize(
    ("arch", "vgprs", "shared", "num_warps", "waves"),
    [
        ("gfx942", 64, 0, 4, 8),
        ("gfx942", 65, 0, 4, 7),
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 512, 0, 4, 1),
        ("gfx942", 32, 65536, 4, 1),
        ("gfx942", 32, 32768, 4, 2),
        ("gfx942", 32, 32768, 8, 4),
        ("gfx942", 32, 32769, 4, 1),
        ("gfx950", 32, 32768, 4, 4),  # 26 granules of 1280 bytes: five times that is too much
        ("gfx942", 32, 0, 1, 8),
        ("gfx942", 32, 0, 2, 8),
        ("gfx942", 32, 65537, 4, 0),
        ("gfx1250", 64, 0, 4, 16),
        ("gfx1250", 128, 0, 4, 8),
        ("gfx1250", 129, 0, 4, 7),
    ],
)
def test_waves_per_simd(arch: str, vgprs: int, shared: int, num_warps: int, waves: int) -> None:
    assert waves_per_simd(arch, vgprs, shared, num_warps) == waves


def test_limits_come_from_the_platforms() -> None:
    limits = {arch: shared_limit(arch) for arch in TARGETS}
    assert limits["gfx942"] == 65536 and limits["sm_120"] == 101376 and limits["sm_90"] == 232448
    assert all(COMPUTE_UNITS[arch].lds_bytes == limits[arch] for arch in AMD_TARGETS)


ASSEMBLY = """
kernel:                 ; global_load_dwordx4 in a comment
\tbuffer_load_dwordx4 v1, s[8:11], 0 offen lds
\tbuffer_load_dwordx4 v[1:4], s[8:11], 0 offen
\tglobal_load_lds_dwordx4 v1, s[8:9]
\tglobal_load_async_to_lds_b128 v1, v2, s[0:1]
\tglobal_load_d16_hi_b16 v1, v2, s[0:1]
\ttensor_load_to_lds s[0:3], s[4:11]
\tbuffer_store_dwordx4 v[1:4], v0, s[8:11], 0 offen
\ts_load_b128 s[0:3], s[4:5], 0x0
\tv_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21
\tv_smfmac_f32_16x16x64_f16 v[0:3], v[4:7], v[8:15], v16
\tv_swmmac_f32_16x16x64_bf16 v[0:7], v[8:15], v[16:31], v32
\tv_dual_mov_b32 v1, v2 :: v_dual_add_f32 v3, v4, v5
\t.amdgpu_metadata
    .agpr_count:     4
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 16
    .sgpr_count:     33
    .sgpr_spill_count: 1
    .vgpr_count:     70
    .vgpr_spill_count: 2
\t.end_amdgpu_metadata
"""


def test_amd_assembly() -> None:
    found = amd_resources(ASSEMBLY, "gfx950", 31 * 1024, 4)
    assert (found.registers, found.accumulators, found.scalars) == (70, 4, 33)
    assert (found.spills, found.scalar_spills, found.scratch_bytes) == (2, 1, 16)
    assert found.waves == waves_per_simd("gfx950", 70, 32 * 1024, 4)
    assert found.matrix == {
        "v_mfma_scale_f32_16x16x128_f8f6f4": 1,
        "v_smfmac_f32_16x16x64_f16": 1,
        "v_swmmac_f32_16x16x64_bf16": 1,
    }
    assert found.loads == {
        "buffer_load_dwordx4": 1,
        "buffer_load_dwordx4 to LDS": 1,
        "global_load_async_to_lds_b128 to LDS": 1,
        "global_load_d16_hi_b16": 1,
        "global_load_lds_dwordx4 to LDS": 1,
        "tensor_load_to_lds": 1,
    }
    with pytest.raises(ValueError, match="amdgpu_metadata"):
        amd_resources("", "gfx950", 0, 4)


PTX = """
\tld.param.b64 %rd1, [p0];
\t@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
\t@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\tld.global.L1::evict_last.v2.b64 { %rd2, %rd3 }, [ %rd1 + 0 ];
\tld.acquire.gpu.global.b32 %r1, [%rd1];
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r3;
\tcp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
\ttcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r3, %p1;
"""
LOG = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers
"""


def test_ptx() -> None:
    found = nvidia_resources(PTX, LOG)
    assert (found.registers, found.spills, found.scratch_bytes) == (18, 28, 8)
    assert found.matrix == {"tcgen05 kind::f16": 1, "wgmma m64n128k16 f32.bf16.bf16": 1}
    assert found.loads == {
        "cp.async 16 bytes to shared memory": 1,
        "cp.async.bulk.tensor to shared memory": 1,
        "ld.global.b16": 1,
        "ld.global.b32": 1,
        "ld.global.v2.b64": 1,
        "ld.global.v4.b32": 1,
    }
    with pytest.raises(ValueError, match="ptxas did not report"):
        nvidia_resources(PTX, "")
