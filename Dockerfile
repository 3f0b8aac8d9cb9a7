# An image of the trainer. It can be pushed to any registry.
#
#   docker build --build-arg COMMIT="$(git describe --always --dirty)" --target cuda --tag trainer:cuda .
#   docker build --build-arg COMMIT="$(git describe --always --dirty)" --target cpu --tag trainer:cpu .
#
# There is no git in the image. The first lines of a log name the COMMIT instead.
# The code is in /app. Data and checkpoints belong on a volume, which user 1000 can write.

FROM python:3.11.14-slim-bookworm AS base
# For compile=true, which compiles C++ for the CPU, and C for Triton. Debian keeps only the newest
# version of a package, so that a pinned one would soon be missing.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home trainer
ENV PYTHONUNBUFFERED=1
WORKDIR /app
COPY requirements.txt .

FROM base AS cpu
# The registry's torch for Linux brings several GB of CUDA packages. This index has builds without.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN grep '^torch==' requirements.txt > torch.txt \
    && python -m pip install --no-cache-dir --index-url "$TORCH_INDEX" --requirement torch.txt \
    && python -m pip install --no-cache-dir --requirement requirements.txt \
    && rm torch.txt
COPY . .
ARG COMMIT
RUN echo "$COMMIT" > COMMIT
USER 1000
CMD ["python", "pretrain.py", "--help"]

FROM base AS cuda
RUN python -m pip install --no-cache-dir --requirement requirements.txt
COPY . .
ARG COMMIT
RUN echo "$COMMIT" > COMMIT
USER 1000
CMD ["python", "pretrain.py", "--help"]
