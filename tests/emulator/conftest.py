"""All tests of this folder run on one thread."""

from one_thread import one_thread  # noqa: F401
