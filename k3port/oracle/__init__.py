"""The capability oracle: what kernels exist, which one an op gets on a device, and why not each other one."""
