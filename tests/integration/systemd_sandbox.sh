#!/usr/bin/env bash
# Boots a real systemd as process 1 of its own namespaces and ends when a unit says so
# (`systemctl exit N`, or SuccessAction= and FailureAction=exit).
#
#   systemd_sandbox.sh --units DIR --start UNIT [--keep DIR] [--show DIR] [--timeout SECONDS]
#
# DIR's unit files and drop-in folders are installed as runtime units, its sysusers.d and tmpfiles.d where they belong.
# Exit status: N; 77 where it cannot run (not root, no systemd, namespaces forbidden); 124 after SECONDS.
# The machine's files are visible, and what systemd writes at boot does not reach them: /etc is a copy; /run, /tmp,
# /mnt, /var/tmp, /var/log, /var/lib and /var/cache are private and empty; what is made in /opt is private. --keep DIR is
# seen at /mnt/keep; --show DIR stays where it is, even in one of the private folders.
set -euo pipefail

cannot() { echo "systemd_sandbox: $1" >&2; exit 77; }

seconds=60 units='' start='' keep='' show=''
while (($#)); do
  case $1 in
    --timeout) seconds=$2 ;;
    --units) units=$(realpath "$2") ;;
    --start) start=$2 ;;
    --keep) keep=$(realpath "$2") ;;
    --show) show=$(realpath "$2") ;;
    *) echo "systemd_sandbox: unknown argument $1" >&2; exit 2 ;;
  esac
  shift 2
done
[[ -n $units && -n $start ]] || { echo "systemd_sandbox: --units and --start are needed" >&2; exit 2; }

((EUID == 0)) || cannot "needs root"
[[ -x /lib/systemd/systemd ]] || cannot "there is no systemd here"
isolate=(unshare --fork --kill-child --pid --mount --uts --ipc --cgroup --mount-proc)
"${isolate[@]}" true 2>/dev/null || cannot "this machine allows no new namespaces"

export SANDBOX_UNITS=$units SANDBOX_START=$start SANDBOX_KEEP=$keep SANDBOX_SHOW=$show
exec timeout --kill-after=5 "$seconds" "${isolate[@]}" bash -c '
  set -euo pipefail
  mount --make-rprivate /
  mount -t tmpfs tmpfs /mnt
  mkdir /mnt/units /mnt/keep /mnt/show /mnt/etc /mnt/opt
  cp -r "$SANDBOX_UNITS/." /mnt/units/        # before /tmp is hidden: they may lie there
  [[ -z $SANDBOX_KEEP ]] || mount --bind "$SANDBOX_KEEP" /mnt/keep
  [[ -z $SANDBOX_SHOW ]] || mount --bind "$SANDBOX_SHOW" /mnt/show
  cp -a /etc/. /mnt/etc/
  mount --bind /mnt/etc /etc
  mount --bind /opt /mnt/opt
  mount -t tmpfs tmpfs /opt
  for folder in /mnt/opt/*/; do
    [[ -d $folder ]] || continue
    mkdir "/opt/$(basename "$folder")"
    mount --bind "$folder" "/opt/$(basename "$folder")"
  done
  # Never boot a systemd without a private /tmp: its tmpfiles rules empty the shared one.
  for folder in /tmp /var/tmp; do mount -t tmpfs tmpfs "$folder"; done
  for folder in /run /var/log /var/lib /var/cache; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
  if [[ -n $SANDBOX_SHOW && ! -d $SANDBOX_SHOW ]]; then
    mkdir -p "$SANDBOX_SHOW"
    mount --bind /mnt/show "$SANDBOX_SHOW"
  fi
  mkdir -p /run/systemd/system /run/sysusers.d /run/tmpfiles.d
  for entry in /mnt/units/*; do
    case ${entry##*/} in
      sysusers.d|tmpfiles.d) cp -r "$entry/." "/run/${entry##*/}/" ;;
      *) cp -r "$entry" /run/systemd/system/ ;;
    esac
  done
  hostname sandbox
  export container=docker                      # systemd then leaves the machine itself alone
  exec /lib/systemd/systemd --system --unit="$SANDBOX_START" \
    --log-target=console --log-level=notice --show-status=0
' </dev/null
