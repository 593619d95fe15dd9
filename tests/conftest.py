"""Fixtures that several test folders share (the two tiny checkpoints, written once; tests must not change them), and
the closing table of what each part of the run took."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from part_times import install_time, part_times

from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config, write_checkpoint

# Tests run side by side: two threads per process would only wait for each other.
os.environ.setdefault("K3PORT_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_k3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "k3", tiny_k3_config())


@pytest.fixture(scope="session")
def tiny_linear_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "linear", tiny_kimi_linear_config())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    lines = part_times(reports)
    if lines:
        lines += install_time(Path(sys.prefix))
        terminalreporter.section("what each part took")
        for line in lines:
            terminalreporter.line(line)
