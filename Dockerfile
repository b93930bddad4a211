# Thinwire with all of its programs, on CPUs:
#
#     docker build --tag thinwire .
#     docker run --rm thinwire selftest
#     docker run --rm --volume "$PWD/runs:/runs" thinwire train --out first
#     docker run --rm --privileged --volume "$PWD/runs:/runs" thinwire compare --out compare
#
# It runs as root, which `thinwire compare` needs to make network namespaces.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends iproute2 \
    && rm -rf /var/lib/apt/lists/*

# First torch, which changes seldom. Its default wheel for Linux brings gigabytes of CUDA.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"

COPY . /source
RUN pip install --no-cache-dir "/source[all]" "$TORCH" && rm -rf /source

WORKDIR /runs
ENTRYPOINT ["thinwire"]
CMD ["--help"]
