# GPU image with the versions of constraints.txt. The host brings only a driver and the NVIDIA Container Toolkit: torch's own
# wheels carry CUDA, so a plain Python base is the smallest there is.
#
#   docker build -t swinv2-moe:1.0.0 -t swinv2-moe .
#   docker run --rm --gpus all --shm-size 8g --cap-drop ALL --security-opt no-new-privileges \
#     --user "$(id -u):$(id -g)" -v "$PWD/output:/app/output" swinv2-moe
#   docker run ... swinv2-moe torchrun --nproc_per_node 8 -m swinv2_moe train --cfg ...
#
# --shm-size: data workers hand batches on in shared memory, of which Docker's default is 64 MB.

FROM python:3.12.12-slim-trixie

LABEL org.opencontainers.image.title="swinv2-moe" \
      org.opencontainers.image.description="SwinV2-MoE vision training" \
      org.opencontainers.image.version="1.0.0" \
      org.opencontainers.image.licenses="MIT"

# g++: torch.compile and Triton build host code at run time. No version: Debian drops old ones, and the build would break.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /app

# The dependencies alone, against empty packages: editing the source below does not install 6 GB again.
COPY pyproject.toml constraints.txt ./
RUN mkdir moe_core swinv2_moe \
 && touch README.md moe_core/__init__.py swinv2_moe/__init__.py \
 && pip install --no-cache-dir --root-user-action=ignore -c constraints.txt -e .

# The install is editable, so the source takes the place of the empty packages without another one.
COPY . .

# Any --user may write results, and its compile caches below HOME; USER stands in for an account that /etc/passwd lacks.
RUN useradd --no-log-init --uid 1000 app && install -d -m 1777 output
ENV HOME=/tmp USER=app NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000

CMD ["python", "tools/train.py", "--cfg", "configs/quickstart_digits.yaml", "--output", "output/quickstart"]
