# rlhf_nb in a container. Build arguments: TORCH_INDEX, a package index with the wanted build of torch (the one that pytorch.org
# shows for CPU or for a version of CUDA; empty: pip's own), and EXTRAS (docs/README.md has the table).
#   docker build -t rlhf-nb .
#   docker run --rm -it -v "$PWD/shared:/shared" rlhf-nb demo
# `rlhf-nb launch METHOD --k8s IMAGE` takes the address that this image is pushed to.
FROM python:3.11-slim
ARG TORCH_INDEX=
ARG EXTRAS=serve,verify,gguf,deepspeed
# TOKENIZERS_PARALLELISM is no secret:
# hadolint ignore=DL3064
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
WORKDIR /opt/rlhf_nb
# torch alone first: it is the largest layer, and stays when the sources change
COPY constraints.txt ./
RUN pip install -c constraints.txt torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY setup.py settings.ini README.md LICENSE MANIFEST.in ./
COPY rlhf_nb ./rlhf_nb
RUN pip install -c constraints.txt ".[${EXTRAS}]" && rlhf-nb --version
# runs and fetched models lie in the volume; no process is root, and a number says so to a cluster that asks (runAsNonRoot)
RUN useradd --create-home --uid 1000 user && mkdir -p /shared && chown user /shared
USER 1000
WORKDIR /shared
ENV XDG_CACHE_HOME=/shared/cache
ENTRYPOINT ["rlhf-nb"]
CMD ["--help"]
