#!/usr/bin/env bash
# Makes sure that a container engine answers: `engine.sh start`, `stop`, `status`.
#
# Owns the installation of Debian's engine and the dockerd it started itself. It must never touch an engine that
# somebody else runs: if one answers (DOCKER_HOST is honoured), that is the one, and `start` installs only what else the
# images and `make up` need. Each command says one line; `start` and `status` end with 1 when there is no engine, and
# the line says why.
set -euo pipefail

readonly packages=(docker.io iptables docker-compose debootstrap)
readonly log=/var/log/eos-dockerd.log pid_file=/var/run/eos-dockerd.pid
readonly start_timeout_s=30

say() { echo "engine: $*"; }
fail() { say "none: $*"; exit 1; }
answers() { command -v docker >/dev/null && docker version --format '{{.Server.Version}}' 2>/dev/null; }

# Says why it cannot, or nothing.
install() { # PACKAGE...
  ((EUID == 0)) || { echo "that takes root"; return; }
  command -v apt-get >/dev/null || { echo "there is no apt-get"; return; }
  local output
  output=$(mktemp)
  # An old list of packages names versions that are gone by now, so it is brought up to date first.
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
    >"$output" 2>&1 </dev/null; then
    grep -m1 '^E:' "$output" || tail -n1 "$output"
  fi
  rm -f "$output"
}

install_engine() {
  local missing=() package why
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  why=$(install "${missing[@]}")
  [[ -z $why ]] || fail "${missing[*]} cannot be installed: $why"
}

# Beside somebody else's engine: a compose of whatever kind, and what makes the base image where that is not there yet.
install_tools() {
  local missing=() why
  docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || missing+=(docker-compose)
  docker image inspect "${EOS_BASE_IMAGE:-eos-base:bookworm}" >/dev/null 2>&1 || command -v debootstrap >/dev/null ||
    missing+=(debootstrap)
  ((${#missing[@]})) || return 0
  why=$(install "${missing[@]}")
  if [[ -n $why ]]; then echo "; ${missing[*]} cannot be installed: $why"; else echo "; installed ${missing[*]}"; fi
}

# Without the userland proxy a mapped port is an address translation in the kernel: packets that a test drops are
# dropped for the client too. With it the client would be connected to a proxy that still accepts.
launch() {
  : >"$log"
  setsid dockerd "$@" >>"$log" 2>&1 </dev/null &
  local pid=$! deadline=$((SECONDS + start_timeout_s))
  while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do
    if answers >/dev/null; then
      echo "$pid" >"$pid_file"
      return 0
    fi
    sleep 0.2
  done
  kill "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  return 1
}

start() {
  local version
  if version=$(answers); then
    say "$version answers$(install_tools)"
    return 0
  fi
  [[ -z ${DOCKER_HOST-} ]] || fail "DOCKER_HOST is $DOCKER_HOST and nothing answers there"
  ((EUID == 0)) || fail "nothing answers, and only root can start one"
  command -v apt-get >/dev/null || fail "nothing answers, and there is no apt-get to install one with"
  install_engine
  # With an init system the package's own service may be on its way.
  local deadline=$((SECONDS + 5))
  while [[ -d /run/systemd/system ]] && ((SECONDS < deadline)); do
    if version=$(answers); then
      say "$version answers"
      return 0
    fi
    sleep 0.2
  done
  if launch --userland-proxy=false || launch; then
    say "$(answers) started (log: $log)"
  else
    fail "dockerd does not start: $(grep -E 'failed|error|denied' "$log" | tail -n1 | cut -c1-300) (log: $log)"
  fi
}

# Is the pid of our file still our dockerd?
ours() { [[ -f $pid_file ]] && [[ $(cat "/proc/$(<"$pid_file")/comm" 2>/dev/null) == dockerd ]]; }

stop() {
  if ! ours; then
    say "none that was started here"
    return 0
  fi
  local pid
  pid=$(<"$pid_file")
  kill "$pid"
  local deadline=$((SECONDS + 30))
  while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
  rm -f "$pid_file"
  say "stopped"
}

status() {
  local version
  version=$(answers) || fail "nothing answers"
  say "$version answers"
}

case ${1-start} in
  start | stop | status) "${1-start}" ;;
  *) echo "usage: $0 [start|stop|status]" >&2; exit 64 ;;
esac
