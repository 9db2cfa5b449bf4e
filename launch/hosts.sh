#!/usr/bin/env bash
# One run over several hosts that ssh reaches, without a scheduler; from the repository's root:
#
#   launch/hosts.sh gpu1,gpu2 configs/a100_prod.py --workdir=/shared/runs/a100_prod [flags of train.py]
#
# The repository and its .venv lie at the same path on every host; the first host runs process 0. Ctrl-C saves and stops.
#   PORT     where process 0 listens (default 12345); the other hosts must reach it
#   ADDRESS  under which the other hosts know the first one (default: its name)
#   PYTHON   interpreter on the hosts (default .venv/bin/python)
#   SSH      how to run a command on a host (default: ssh -o BatchMode=yes)
set -euo pipefail

usage="usage: launch/hosts.sh HOST1,HOST2,... CONFIG [flags of train.py]"
IFS=, read -r -a hosts <<<"${1:?$usage}"
config=${2:?$usage}
shift 2
ssh=${SSH:-ssh -o BatchMode=yes}
port=${PORT:-12345}
pid_file=/tmp/nsa_jax-$port.pid # on the first host

# shellcheck disable=SC2086  # SSH may hold options
on_host() { $ssh "$1" "$2" </dev/null; }

# One process that is asked to stop makes all of them save and stop. It gets the same signal: after Ctrl-C the status is
# 0, after SIGTERM 75, by which a supervisor starts the run again.
stop() { on_host "${hosts[0]}" "kill -$1 \$(cat $pid_file)" || true; }
trap 'stop INT' INT
trap 'stop TERM' TERM

# A signal interrupts bash's wait, whose status is then the signal's; the processes go on until they have saved.
wait_for() {
  until wait "$1"; do
    kill -0 "$1" 2>/dev/null && continue
    wait "$1" # it may have ended while the signal was passed on: bash still has its own status
    return
  done
}

processes=()
for index in "${!hosts[@]}"; do
  command=("${PYTHON:-.venv/bin/python}" -u train.py --config="$config" --coordinator="${ADDRESS:-${hosts[0]}}:$port"
    --num_processes="${#hosts[@]}" --process_id="$index" "$@")
  remote="cd $(printf %q "$PWD") && "
  if [ "$index" -eq 0 ]; then remote+="echo \$\$ > $pid_file && "; fi
  remote+="exec $(printf '%q ' "${command[@]}")"
  on_host "${hosts[$index]}" "$remote" > >(sed -u "s/^/${hosts[$index]}: /") 2>&1 &
  processes+=($!)
done

status=0
for index in "${!hosts[@]}"; do
  code=0
  wait_for "${processes[$index]}" || code=$?
  if [ "$code" -ne 0 ]; then echo "${hosts[$index]}: status $code" >&2; fi
  # 75 (start again) says what to do; the status of a process that was lost does not.
  if [ "$status" -eq 0 ] || [ "$code" -eq 75 ]; then status=$code; fi
done
exit "$status"
