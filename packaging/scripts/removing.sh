#!/bin/sh
# Before the files go: dpkg calls this with `remove` or `upgrade`, rpm with 0 (removal) or 1 (upgrade).
set -e
case "$1" in
remove | deconfigure | 0) ;;
*) exit 0 ;;
esac
# `installed.sh` looks for it.
if [ "$1" != 0 ]; then mkdir -p -m 0700 /var/lib/perfusion && touch /var/lib/perfusion/.removed; fi
if ! command -v systemctl >/dev/null; then exit 0; fi
if [ -d /run/systemd/system ]; then
    # The daemon takes its libraries out of the processes they are in, and ends.
    systemctl stop perfusion.service || true
fi
systemctl disable --quiet perfusion.service
