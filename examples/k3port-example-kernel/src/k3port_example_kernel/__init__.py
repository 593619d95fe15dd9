"""An example of a kernel plugin for k3port."""
