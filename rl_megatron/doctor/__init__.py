"""Checks of a machine before a run: its versions, devices, network and storage, and the needs of an experiment."""
