# Targets: router (default), worker-agent (beside a real SGLang), worker-simulated (CPU only).
#   docker build --target router -t laneway .
# The full image has C's compiler; the hot path is compiled (docs/design.md).
FROM python:3.11-bookworm AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY router router
COPY workers workers
COPY loadtest loadtest
RUN python -m venv /opt/laneway && LANEWAY_COMPILE=1 /opt/laneway/bin/pip install --no-cache-dir '.[worker]'

FROM python:3.11-slim-bookworm AS base
RUN useradd --system --uid 10001 --no-create-home laneway
COPY --from=build /opt/laneway /opt/laneway
ENV PATH=/opt/laneway/bin:$PATH PYTHONUNBUFFERED=1
USER 10001

FROM base AS worker-agent
EXPOSE 30100
ENTRYPOINT ["laneway", "worker"]

FROM base AS worker-simulated
EXPOSE 31000
ENTRYPOINT ["laneway", "worker", "--host", "0.0.0.0", "--simulated"]
CMD ["1"]

FROM base AS router
COPY configs/laneway.yaml /etc/laneway/laneway.yaml
EXPOSE 30000
HEALTHCHECK --interval=5s --timeout=2s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/livez', timeout=1)"]
ENTRYPOINT ["laneway", "serve"]
CMD ["--config", "/etc/laneway/laneway.yaml", "--host", "0.0.0.0"]
