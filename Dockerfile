# Palimpsest and all that it needs, for CPUs or for NVIDIA GPUs:
#
#   docker build --build-arg DEVICE=cpu --tag palimpsest:0.1.0-cpu .
#   docker build --build-arg DEVICE=cuda --tag palimpsest:0.1.0-cuda .
#
# The CUDA libraries come inside torch's wheels, so both begin with the same small image; the
# driver is the machine's.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS packages

ARG DEVICE=cpu
# PyTorch keeps its wheels for CPUs apart; a mirror of one's own can stand here.
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu

ENV VIRTUAL_ENV=/usr/local/palimpsest \
    PIP_CACHE_DIR=/var/cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv "${VIRTUAL_ENV}"
ENV PATH=${VIRTUAL_ENV}/bin:${PATH}

# With bytecode, as pip does by itself: in pods with a read-only root it could not be kept later.
# Dependencies first: this layer stays as long as these two files do.
WORKDIR /build
COPY pyproject.toml constraints.txt ./
COPY docker/requirements.py docker/
# pip's cache is a mount, and stays out of the image.
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    if [ "${DEVICE}" = cpu ]; then export PIP_EXTRA_INDEX_URL="${CPU_WHEELS}"; fi \
    && python docker/requirements.py serve worker > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

COPY LICENSE README.md ./
COPY cluster cluster
COPY configs configs
COPY scheduler scheduler
COPY worker worker
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip pip install --no-deps .


FROM python:${PYTHON_VERSION}-slim

# A compiler, because kernels are built for the machine that runs them (on CPUs by ourselves, on
# GPUs by Triton); wget, with which KubeRay before 1.6 probes its pods.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home --home-dir /var/lib/palimpsest palimpsest

COPY --from=packages /usr/local/palimpsest /usr/local/palimpsest
ENV PATH=/usr/local/palimpsest/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 1000:1000
WORKDIR /var/lib/palimpsest
EXPOSE 8000
# Alone it serves on its one machine; the chart starts Ray instead.
ENTRYPOINT []
CMD ["palimpsest", "serve", "--host", "0.0.0.0"]
