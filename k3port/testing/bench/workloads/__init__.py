"""The shapes that are measured, one file per family of ops. K3's sizes; 96 heads are one rank's at TP 1, 12 at TP 8."""

from __future__ import annotations

from k3port.testing.bench.workload import Workload
from k3port.testing.bench.workloads import (
    attn_res,
    kda_block,
    kda_commit,
    kda_core,
    norms,
    sample,
    short_conv,
    vision_patch,
)

WORKLOADS: tuple[Workload, ...] = (
    *kda_core.WORKLOADS,
    *kda_block.WORKLOADS,
    *kda_commit.WORKLOADS,
    *attn_res.WORKLOADS,
    *norms.WORKLOADS,
    *short_conv.WORKLOADS,
    *vision_patch.WORKLOADS,
    *sample.WORKLOADS,
)
