"""Processes that run users' and models' code."""

from rl_megatron.workers import confinement as confinement
