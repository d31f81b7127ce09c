#!/bin/sh
# After the files went: dpkg calls this with `remove`, `purge` or `upgrade`, rpm with 0 (removal) or 1 (upgrade). dpkg keeps configuration
# and data until `purge`; rpm knows no such step.
set -e
case "$1" in
remove) ;;
purge | 0) rm -rf /var/lib/perfusion /run/perfusion /run/perfusion-record /var/lib/perfusion-record ;;
*) exit 0 ;;
esac
if [ "$1" = purge ]; then rm -rf /etc/perfusion; fi
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
