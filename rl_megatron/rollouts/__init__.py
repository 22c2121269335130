"""Trajectories: what rollout workers make with a rollout engine, with environments and with tools."""
