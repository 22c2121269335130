"""The bandwidths of links and networks, and the cluster of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.plan import PlanConfig
from rl_megatron.topology.gpus import GPUS, Gpu

GIB = 2**30


# Bandwidths of one GPU in one direction, in 10⁹ bytes per second.
LINKS = {"nvlink3": 300.0, "nvlink4": 450.0, "nvlink5": 900.0, "pcie4": 32.0, "pcie5": 64.0}
NETWORKS = {
    "infiniband_hdr": 25.0,
    "infiniband_ndr": 50.0,
    "infiniband_xdr": 100.0,
    "ethernet_100g": 12.5,
    "ethernet_400g": 50.0,
}


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes with equal GPUs.

    Attributes:
        link_gb_per_s: The bandwidth of a GPU within its node, in one direction.
        network_gb_per_s: The bandwidth of a GPU between nodes, in one direction.
        memory_margin: The share of memory to leave free.
        compute_efficiency: The share of the GPU's peak FLOP/s that matrix products achieve.
        memory_efficiency: The share of the GPU's memory bandwidth that operators achieve.
        link_efficiency: The share of the links' bandwidth that collectives achieve.
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    link_gb_per_s: float
    network_gb_per_s: float
    memory_margin: float
    compute_efficiency: float
    memory_efficiency: float
    link_efficiency: float

    @classmethod
    def from_config(cls, plan: PlanConfig, gpu: str, nodes: int, gpus_per_node: int) -> Cluster:
        """Return the cluster that the options and the section `plan` describe.

        Raises:
            ConfigError: The table lacks the GPU or a link, and `plan` lacks its numbers.
        """
        for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
            if value < 1:
                raise ConfigError(f"{option} {value}: must be at least 1")
        chosen = _gpu(plan, gpu)
        link = _bandwidth("link", plan.link or chosen.link, LINKS, plan.link_gb_per_s)
        network = _bandwidth("network", plan.network, NETWORKS, plan.network_gb_per_s)
        return cls(
            chosen, nodes, gpus_per_node, link, network, plan.memory_margin, plan.compute_efficiency,
            plan.memory_efficiency, plan.link_efficiency,
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        """Return the number of GPUs, which is also the number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> float:
        """Return the bytes of a GPU that a run may use: all but the margin."""
        return (1 - self.memory_margin) * self.gpu.memory_gib * GIB


def _gpu(plan: PlanConfig, name: str) -> Gpu:
    """Return the table's GPU, with numbers of `plan` in place of its own; an unknown GPU has only those of `plan`."""
    numbers = {
        "memory_gib": plan.gpu_memory_gib,
        "bf16_tflops": plan.gpu_bf16_tflops,
        "fp32_tflops": plan.gpu_fp32_tflops,
        "memory_gb_per_s": plan.gpu_memory_gb_per_s,
    }
    overrides = {key: value for key, value in numbers.items() if value is not None}
    if name in GPUS:
        return replace(GPUS[name], **overrides)
    missing = [f"plan.gpu_{key}=…" for key in ("memory_gib", "bf16_tflops", "memory_gb_per_s") if key not in overrides]
    if missing:
        raise ConfigError(
            f"--gpu {name}: the table has no such GPU{nearest(name.lower(), GPUS)}; for another one, give its numbers: "
            f"{' '.join(missing)}"
        )
    if plan.link is None and plan.link_gb_per_s is None:
        raise ConfigError(
            f"--gpu {name}: the link within a node is unknown; give plan.link, one of {', '.join(LINKS)}, or "
            "plan.link_gb_per_s=…"
        )
    return Gpu(name=name, link=plan.link or "", **({"fp32_tflops": overrides["bf16_tflops"] / 16} | overrides))


def _bandwidth(key: str, name: str, table: dict[str, float], override: float | None) -> float:
    """Return `override` or, if it is None, the bandwidth of `name`. Refuse an unknown name in both cases."""
    if name and name not in table:
        raise ConfigError(
            f"plan.{key}={name}: the table has no such {key}{nearest(name, table)}; for another one, give "
            f"plan.{key}_gb_per_s=… without plan.{key}"
        )
    return table[name] if override is None else override
