"""The built-in kernels as tests see them: which ones run here, built with reference parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3port.model.config import ModelConfig
from k3port.ops.catalog import Phase, slot_name
from k3port.ops.table import OpTable
from k3port.oracle.resolve import reject, resolve
from k3port.oracle.spec import Device, KernelSpec, OpQuery, Plan, Target
from k3port.plugins import make_registry
from k3port.runtime.binding import bind_table
from k3port.runtime.planner import Workload, model_queries
from k3port.testing.harness import build_kernel, dtype_name

REGISTRY = make_registry(entry_points=False)
KERNELS: tuple[KernelSpec, ...] = REGISTRY.kernels
CPU = Target("cpu", Device("cpu", "cpu", "cpu", "fake"))
_SMALL = {"E": 1, "I": 1, "L": 1}


def runnable(op: str, phase: Phase | None = None, dtype: torch.dtype = torch.float32) -> list[KernelSpec]:
    """The kernels of one slot that a small model could get on this machine."""
    query = OpQuery(op, phase, _SMALL, dtype_name(dtype))
    return [spec for spec in KERNELS if spec.op == op and reject(spec, query, CPU) is None]


def functions(op: str, phase: Phase | None = None, dtype: torch.dtype = torch.float32) -> list[Callable[..., Any]]:
    """The same kernels as callables, composites made of reference parts."""
    return [build_kernel(spec, KERNELS, phase) for spec in runnable(op, phase, dtype)]


def reference_pins(config: ModelConfig) -> dict[str, str]:
    """Pins that make a plan of references only."""
    pins = {}
    for query in model_queries(config, Workload("float32")):
        spec = next(
            s for s in KERNELS if s.op == query.op and s.is_reference and query.phase in (s.phases or (query.phase,))
        )
        pins[slot_name(query.op, query.phase)] = spec.name
    return pins


def small_plan(config: ModelConfig, dtype: torch.dtype, references: bool, weight_format: str = "mxfp4") -> Plan:
    queries = model_queries(config, Workload(dtype_name(dtype), weight_format))
    pins = reference_pins(config) if references else None
    return resolve(queries, KERNELS, CPU, pins=pins)


def small_table(config: ModelConfig, dtype: torch.dtype, references: bool, **overrides: Any) -> OpTable:
    """The table of a model of references, or of the default CPU plan; ``overrides`` replace slots."""
    by_name = {spec.name: spec for spec in KERNELS}
    return bind_table(small_plan(config, dtype, references), by_name, overrides=overrides)
