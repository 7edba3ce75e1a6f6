# An image with diloco, for CPUs or, with --build-arg EXTRA=gpu, for NVIDIA GPUs (CUDA
# comes from PyPI). It was never built; tests/test_dockerfile.py checks its text.
#
#   mkdir -p runs && docker build -t diloco .
#   docker run --rm --user "$(id -u)" -v "$PWD/runs:/runs" diloco \
#     main --config=sample --workdir=/runs/sample
#   docker build -t diloco:gpu --build-arg EXTRA=gpu .
#   docker run --rm --user "$(id -u)" --gpus all -v "$PWD/runs:/runs" diloco:gpu \
#     main --config=sample --workdir=/runs/gpu
FROM python:3.12-slim
ARG EXTRA=export
WORKDIR /diloco
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY scripts/launchers scripts/launchers
COPY docs/ladder.csv docs/ladder.csv
COPY diloco diloco
RUN pip install --no-cache-dir ".[${EXTRA}]"
WORKDIR /
RUN useradd --create-home diloco
USER diloco
ENTRYPOINT ["python", "-m", "diloco"]
CMD ["--help"]
