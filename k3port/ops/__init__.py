"""The ops a model is made of: a torch-free catalog, and per family the contract with its reference."""
