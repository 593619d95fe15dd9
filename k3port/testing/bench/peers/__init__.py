"""Other people's kernels, and our own in another combination, as calls beside the kernel that is measured."""
