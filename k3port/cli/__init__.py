"""The command line. Nothing here imports torch before a model is really loaded."""
