"""The scratch memory that a plan counts for KDA prefill is never less than what a call of that size takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3port.backends.portable.kda_slabs import prefill_workspace, scratch_bytes, slabs
from k3port.backends.portable.tuning import entries
from k3port.oracle.spec import OpQuery

CONFIGS = [dict(entry.config) for entry in entries("kda_chunk")]


def query(tokens: int, requests: int, heads: int) -> OpQuery:
    axes = {"H": heads, "K": 128, "V": 128, "B": requests}
    return OpQuery(op="kda_core", phase="prefill", dtype="bfloat16", axes=axes, tokens=(1, tokens))


@given(st.integers(1, 70000), st.data())
@settings(max_examples=60, deadline=None)
def test_no_step_takes_more_than_the_plan_counts(most: int, data: st.DataObject) -> None:
    requests = data.draw(st.integers(1, 64))
    tokens = data.draw(st.integers(1, most))
    counted = prefill_workspace(query(most, requests, 12))
    for config in CONFIGS:
        chunks = (tokens >> config["bits"]) + data.draw(st.integers(1, requests))
        assert scratch_bytes(config, chunks, 12, 128, 128, 2) <= counted


@pytest.mark.parametrize("chunks", [1, 64, 127, 191, 192, 193, 1000])
def test_slabs_cover_all_chunks_evenly(chunks: int) -> None:
    count, size = slabs({"slab_chunks": 128}, chunks)
    assert (count - 1) * size < chunks <= count * size
    assert size <= 192
