"""Trajectories, which rollout workers produce with a rollout engine, environments and tools."""
