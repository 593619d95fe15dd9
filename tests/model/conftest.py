"""All tests of this folder run on one thread, and some ask for the published Kimi K3 configuration."""

from one_thread import one_thread  # noqa: F401
from published_k3 import k3, k3_values  # noqa: F401
