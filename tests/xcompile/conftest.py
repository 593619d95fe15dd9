from __future__ import annotations

from importlib.util import find_spec

# Triton exists for Linux only; the package works without it, these tools do not.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
