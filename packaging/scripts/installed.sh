#!/bin/sh
# After the files are in place: dpkg calls this with `configure [OLD-VERSION]`, rpm with 1 (new) or 2 (upgrade).
set -e
removed=/var/lib/perfusion/.removed
case "$1" in
# A package that was removed but not purged still has a version; it was switched off then, and is new to this system.
configure) if [ -z "$2" ] || [ -e "$removed" ]; then new=yes; fi ;;
1) new=yes ;;
2) ;;
*) exit 0 ;;
esac

rm -f "$removed"
# Without systemd (a container's image, a chroot without it) there is nothing to start.
if ! command -v systemctl >/dev/null; then exit 0; fi

if [ "$new" = yes ]; then
    # Works in a chroot, too: it makes links, nothing runs.
    # One that is masked stays so, and the package is installed all the same.
    systemctl enable --quiet perfusion.service || echo "perfusion: the service was not enabled" >&2
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    # A service that an administrator stopped stays so after an upgrade.
    if [ "$new" = yes ]; then
        systemctl start perfusion.service || echo "perfusion: the service did not start; \`systemctl status perfusion\` says why" >&2
    else
        systemctl try-restart perfusion.service || true
    fi
fi
