# Two images from one file:
#   --target init     sandbox-init alone (from scratch, a few MB): what sandbox pods mount
#   --target server   operator, mover and facade (the default)
# BASE may be any image with Python 3.11 or newer and pip, so that it also builds where no registry can be reached:
#   python3 tools/build_guest.py && buildah build --build-arg BASE=localhost/python-root --target server -t localhost/agent-sandbox:dev .
ARG BASE=docker.io/library/python:3.13-slim

FROM scratch AS init
ARG TARGETARCH=amd64
LABEL org.opencontainers.image.title="agent-sandbox-init" \
      org.opencontainers.image.description="PID 1 of every sandbox: runs commands, keeps files safe, streams snapshots" \
      org.opencontainers.image.licenses="Apache-2.0"
# 0555 and not 0111: gVisor cannot load a binary that it cannot read.
COPY --chmod=0555 api/agent_sandbox_core/_guest/sandbox-init-linux-${TARGETARCH} /sandbox-init
USER 65532:65532
ENTRYPOINT ["/sandbox-init"]

FROM ${BASE} AS build
USER 0:0
# For a build without a network: PIP_OPTIONS="--no-index --find-links /wheels", and that folder as a volume of the build.
ARG PIP_OPTIONS=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements-server.lock ./
RUN python3 -m venv /opt/agent-sandbox && /opt/agent-sandbox/bin/pip install --quiet ${PIP_OPTIONS} --require-hashes -r requirements-server.lock
COPY . .
ENV AGENT_SANDBOX_INIT_DIR=/src/api/agent_sandbox_core/_guest
RUN /opt/agent-sandbox/bin/pip install --quiet --no-build-isolation --no-deps . \
 && /opt/agent-sandbox/bin/pip uninstall --quiet --yes hatchling pip \
 && /opt/agent-sandbox/bin/python -m compileall -q -j 0 /opt/agent-sandbox/lib

FROM ${BASE} AS server
LABEL org.opencontainers.image.title="agent-sandbox" \
      org.opencontainers.image.description="Operator, mover and HTTP API of agent-sandbox" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/agent-sandbox /opt/agent-sandbox
ENV PATH=/opt/agent-sandbox/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=agent-sandbox
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["sandboxctl"]
CMD ["--help"]
