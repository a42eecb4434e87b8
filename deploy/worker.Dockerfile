# A worker node: the agent, and the ranks that it forks. With the NVIDIA runtime it sees GPUs;
# without one the same image runs CPU ranks.
ARG BASE=python:3.12-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# Any pip requirement for torch, and options for pip, such as where other builds are found.
ARG TORCH=torch==2.13.0
ARG PIP_OPTIONS=

ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN groupadd --gid 10001 meshloom \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /var/lib/meshloom meshloom \
    && useradd --uid 10002 --user-group --create-home meshloom-rank \
    && install -d -m 0750 -o meshloom -g meshloom /var/lib/meshloom/checkpoints

WORKDIR /opt/meshloom
# A folder of its own: a distribution's Python takes no packages from pip.
RUN python3 -m venv /opt/venv
COPY constraints.txt ./
# hadolint ignore=SC2086
RUN pip install ${PIP_OPTIONS} --constraint constraints.txt "${TORCH}" numpy
COPY pyproject.toml README.md ./
COPY fsdp_core fsdp_core
COPY meshloom meshloom
COPY services services
# hadolint ignore=SC2086
RUN pip install ${PIP_OPTIONS} --constraint constraints.txt '.[agent,rank]'

# Started as root, with MESHLOOM_RANK_USER=meshloom-rank, ranks run as that user (docker-compose.yml).
USER 10001:10001
WORKDIR /var/lib/meshloom
ENV MESHLOOM_HOME=/var/lib/meshloom

HEALTHCHECK --interval=5s --timeout=5s --start-period=20s --retries=6 \
  CMD ["python", "-m", "services.worker.agent", "--check"]

ENTRYPOINT ["python", "-m", "services.worker.agent"]
