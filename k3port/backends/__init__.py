"""Kernels by where they run; each package registers its specs through the hooks."""
