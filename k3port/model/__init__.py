"""The one model definition: Kimi K3 and Kimi-Linear from a config, in terms of the ops table."""
