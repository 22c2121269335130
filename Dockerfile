# NVIDIA's PyTorch container image has builds of torch, Transformer Engine, Apex and NCCL that fit together. This file
# keeps all of them and adds megatron-core and this package with what data sets and reward functions need.
#   docker build -t rl_megatron .
#   docker run --rm --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" rl_megatron \
#       torchrun --nproc-per-node gpu -m rl_megatron train experiment=quickstart
# The container's user is `trainer` (1000). Add --user "$(id -u):$(id -g)" to own the outputs; nothing here needs root.
# The digest is that of the tag 26.05-py3, for x86-64 and ARM together, and keeps the image what it is if the tag moves.
# This prints the digest of a tag: docker buildx imagetools inspect nvcr.io/nvidia/pytorch:26.05-py3
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3@sha256:222d8b18e671be5c3ef91cb41727a2572a0b23f59ded6c39f373a96946f6f2ba
FROM ${PYTORCH_IMAGE}

ARG MEGATRON_CORE=0.19.2
COPY . /opt/rl_megatron
# The image's own constraints hold what its Transformer Engine and Apex were built with. The second file makes pip stop
# if a package needs another torch than the image's. The third has our pins of all packages that the image does not have,
# and that are not pinned above.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python -c "import torch; print(f'torch=={torch.__version__}')" >/tmp/torch.txt \
    && { echo "${PIP_CONSTRAINT:-/dev/null}" | xargs cat; pip list --format=freeze; echo megatron-core==; echo triton==; } \
       | sed -nE 's/^([A-Za-z0-9._-]+) *[=<>!~@].*/^\1==/p' | sed 's/[-_.]/[-_.]/g' >/tmp/held.txt \
    && grep -viEf /tmp/held.txt /opt/rl_megatron/constraints.txt >/tmp/pins.txt \
    && PIP_CONSTRAINT="${PIP_CONSTRAINT:-} /tmp/torch.txt /tmp/pins.txt" pip install --no-cache-dir --prefer-binary \
       "megatron-core==${MEGATRON_CORE}" "/opt/rl_megatron[data,rewards]" \
    && rm /tmp/torch.txt /tmp/held.txt /tmp/pins.txt

# Any user may write to /workspace. Some libraries need HOME and USER.
ENV HOME=/workspace USER=trainer OMP_NUM_THREADS=1
WORKDIR /workspace
RUN chmod 1777 /workspace
USER 1000:1000

# Versions, GPUs, shared memory and storage; a failing check is listed in `docker inspect`.
HEALTHCHECK --interval=5m --timeout=2m --start-period=1m --retries=2 CMD ["rl-megatron", "doctor"]
CMD ["rl-megatron", "--help"]
