# NVIDIA's PyTorch container image carries torch, Transformer Engine, Apex and NCCL that were built for each other; all of
# them stay as they are, and megatron-core and this package are added.
#   docker build -t rl_megatron .
#   docker run --rm --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" rl_megatron \
#       torchrun --nproc-per-node gpu -m rl_megatron train experiment=quickstart
# Add --user "$(id -u):$(id -g)" for outputs of your own: nothing here needs root.
ARG PYTORCH_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${PYTORCH_IMAGE}

ARG MEGATRON_CORE=0.19.2
COPY . /opt/rl_megatron
# pip stops, rather than replace the image's torch, if something asks for another one.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" >/tmp/torch.txt \
    && PIP_CONSTRAINT=/tmp/torch.txt pip install --no-cache-dir --prefer-binary \
       "megatron-core==${MEGATRON_CORE}" /opt/rl_megatron \
    && rm /tmp/torch.txt

# Any user may write here; HOME and USER are for libraries that ask who runs them.
ENV HOME=/workspace USER=trainer OMP_NUM_THREADS=1
WORKDIR /workspace
RUN chmod 1777 /workspace

CMD ["rl-megatron", "--help"]
