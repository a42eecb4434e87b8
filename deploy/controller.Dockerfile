# The controller: REST, dashboard, decisions. It holds no torch and runs no user code.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# Options for pip, such as where packages are found.
ARG PIP_OPTIONS=

ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN groupadd --gid 10001 meshloom \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /var/lib/meshloom meshloom \
    && install -d -o meshloom -g meshloom /var/lib/meshloom/acl \
    && install -d -m 0750 -o meshloom -g meshloom /var/lib/meshloom/checkpoints

WORKDIR /opt/meshloom
# A folder of its own: a distribution's Python takes no packages from pip.
RUN python3 -m venv /opt/venv
COPY pyproject.toml constraints.txt README.md ./
COPY fsdp_core fsdp_core
COPY meshloom meshloom
COPY services services
# With pools of Kubernetes: EXTRAS=controller,kubernetes
ARG EXTRAS=controller
# hadolint ignore=SC2086
RUN pip install ${PIP_OPTIONS} --constraint constraints.txt ".[${EXTRAS}]"

USER 10001:10001
WORKDIR /var/lib/meshloom
ENV MESHLOOM_HOST=0.0.0.0 MESHLOOM_PORT=8400
EXPOSE 8400

HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=6 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['MESHLOOM_PORT'] + '/readyz', timeout=2)"]

ENTRYPOINT ["python", "-m", "services.controller"]
