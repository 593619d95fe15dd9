"""Measures kernels: a correctness gate first, then interleaved timings of kernels and their peers, with a receipt."""
