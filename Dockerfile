# docker build -t distributed-deep-rl . && docker run --rm -it -v "$PWD/logs:/work/logs" -v "$PWD/models:/work/models" distributed-deep-rl
# Tests:  docker run --rm distributed-deep-rl make test
# GPU:    docker run --gpus all ...  (the torch wheel of PyPI brings CUDA's libraries)
# A row:  docker run ... distributed-deep-rl make train ARGS="--config dqn-cartpole"
FROM python:3.11-slim

RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*

WORKDIR /work
COPY Makefile pyproject.toml requirements*.lock ./
RUN make .venv/.installed-test
COPY . .

# Replay is memfd memory: it counts as the container's own, so --shm-size need not be raised (several GPUs: --shm-size 1g, for NCCL)
CMD ["make", "train"]
