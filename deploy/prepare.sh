#!/bin/sh
# Makes what docker-compose.yml needs: secrets in .secrets, and in .env what the worker may use of this machine.
# What is there already stays; delete a secret to have another made.
set -eu
cd "$(dirname "$0")/.."
umask 077
mkdir -p .secrets
# A container's user reads its own mounted file; on this machine the folder keeps all but its owner out.
chmod 0700 .secrets

secret() {
  if [ ! -s ".secrets/$1" ]; then
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >".secrets/.new"
    chmod "$2" .secrets/.new
    mv -f .secrets/.new ".secrets/$1"
  fi
}

secret token 0444
secret redis-controller-password 0444
# Ranks share a container with their agent: they are no root there, and cannot read it.
secret redis-agent-password 0400
secret grafana-password 0444
# Empty until `meshloom tokens create prometheus --scope viewer` has made it.
[ -e .secrets/prometheus-token ] || : >.secrets/prometheus-token
chmod 0644 .secrets/prometheus-token

# A tenth of the memory, and at least 4 GiB, stays for the others; the worker has 1 GiB at least.
memory=$(awk '/^MemTotal:/ { mib = $2 / 1024; rest = (mib > 40960) ? mib / 10 : 4096
  printf("%d", (mib - rest > 1024) ? mib - rest : 1024) }' /proc/meminfo)

setting() {
  if ! grep -q "^$1=" .env; then
    # Its last line may have no end: it would be one with this.
    [ -z "$(tail -c 1 .env)" ] || echo >>.env
    echo "$1=$2" >>.env
  fi
}

[ -e .env ] || cp .env.example .env
setting MESHLOOM_WORKER_MEMORY "${memory}m"
setting MESHLOOM_WORKER_CPUS "$(nproc)"
echo "secrets are in .secrets, settings in .env"
