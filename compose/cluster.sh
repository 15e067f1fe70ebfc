#!/usr/bin/env bash
# The three brokers of docker-compose.yml: `cluster.sh up | down [-v] | ps | worker | shim`; anything else is handed to compose.
#
# Owns the choice between compose v2 and v1 and the wait until the brokers are healthy. EOS_PROJECT names the cluster
# (default: eos), so that several can run beside each other on ports of their own (EOS_PORT_1, _2, _3).
set -euo pipefail
cd "$(dirname "$0")"
readonly start_timeout_s=180

if docker compose version >/dev/null 2>&1; then command=(docker compose); else command=(docker-compose); fi
fail() { echo "cluster: $*" >&2; exit 1; }
command -v "${command[0]}" >/dev/null || fail "no compose is installed: compose/engine.sh start installs it, as root"
compose() { "${command[@]}" -p "${EOS_PROJECT:-eos}" -f docker-compose.yml --profile worker --profile shim "$@"; }

health() { docker inspect -f '{{.State.Health.Status}}' "$(compose ps -q "$1")" 2>/dev/null || echo missing; }

await() { # SERVICE...
  local deadline=$((SECONDS + start_timeout_s)) node
  for node in "$@"; do
    until [[ $(health $node) == healthy ]]; do
      ((SECONDS < deadline)) || { compose ps; fail "$node is not healthy"; }
      sleep 0.5
    done
  done
}

up() {
  compose up -d kafka-1 kafka-2 kafka-3
  await kafka-1 kafka-2 kafka-3
  echo "KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:${EOS_PORT_1:-19092},127.0.0.1:${EOS_PORT_2:-19093},127.0.0.1:${EOS_PORT_3:-19094}"
}

# The brokers are started where they are not and stay as `up` made them: with another KAFKA_IMAGE or KAFKA_HEAP in the
# environment compose would make them anew. An image of ours is in no registry.
beside() { # SERVICE IMAGE
  [[ $2 != eos-* ]] || docker image inspect "$2" >/dev/null 2>&1 ||
    fail "the image $2 is not built: make $1, or make image"
  compose up -d --no-recreate kafka-1 kafka-2 kafka-3
  await kafka-1 kafka-2 kafka-3
  compose up -d --no-deps "$1"
}

case ${1-} in
  up) up ;;
  worker) beside worker "${EOS_WORKER_IMAGE:-eos-worker:latest}" ;;
  shim)
    beside shim "${EOS_SHIM_IMAGE:-eos-shim:latest}"
    await shim
    echo "KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:${EOS_SHIM_PORT_1:-19192}"
    ;;
  '') echo "usage: $0 up | down [-v] | ps | worker | shim | ..." >&2; exit 64 ;;
  *) compose "$@" ;;
esac
