# One peer in a container. Build arguments: TORCH_SPEC (what to install for torch) and pip's own PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL and PIP_NO_INDEX. Wheels in the folder wheels/, if there is one, are preferred to downloads.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_SPEC=torch==2.13.0
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels
WORKDIR /src
COPY constraints.txt wheel[s] /wheels/
RUN python3 -m venv /opt/geomesh
RUN /opt/geomesh/bin/pip install --constraint /wheels/constraints.txt "$TORCH_SPEC"
# What the package needs, before its own code: a change of the code installs nothing of this again.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir geomesh_p2p && touch geomesh_p2p/__init__.py && \
    /opt/geomesh/bin/pip install --constraint /wheels/constraints.txt ".[gpu]" && rm -rf build geomesh_p2p *.egg-info
COPY geomesh_p2p geomesh_p2p
RUN /opt/geomesh/bin/pip install --no-deps --force-reinstall .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home geomesh && install -d -o geomesh -g geomesh /app /app/runs /shared
COPY --from=build /opt/geomesh /opt/geomesh
WORKDIR /app
COPY configs configs
COPY peers peers
COPY deploy/compose deploy/compose
ENV PATH=/opt/geomesh/bin:$PATH PYTHONUNBUFFERED=1
USER geomesh
EXPOSE 31337 9464
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=4 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
# Run it with an init (docker run --init, compose: init: true), which passes signals on and reaps what the peer leaves.
ENTRYPOINT ["geomesh"]
