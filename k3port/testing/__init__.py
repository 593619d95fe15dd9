"""Helpers for tests of k3port and of kernels written for it."""
