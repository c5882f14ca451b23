"""The families of models: one module for each, behind the protocol of `protocol.Family`."""
