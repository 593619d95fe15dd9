"""The Triton kernels and their adapters, one file per op. Imported only when a kernel was chosen."""
