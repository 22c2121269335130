"""Checks of a machine before a run: versions, devices, the network, storage, and what the experiment needs of them."""
