//! The Debian package: installed, recording under the unit's whole hardening, reloaded, killed,
//! stopped and purged.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{PROFILED, Trial, Verdicts, has};
use crate::{exec::StepLog, package, paths::WorkspacePaths};

pub(super) const TRIAL: Trial =
    Trial { name: "unit", packages: &[], kernel_words: "", script: SCRIPT, fill, judge };

const SCRIPT: &str = r#"
PERFUSION=perfusion
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp \
  -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /var/lib/systemd \
  -o -path /opt/check \) -prune -o -printf '%p %M %U %G\n' | sort; }
metric() { exec 3<> /dev/tcp/127.0.0.1/7071 || return 1; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
  grep "^perfusion_$1 " <&3 | cut -d' ' -f2; exec 3>&-; }
main_pid() { systemctl show --value -p MainPID perfusion; }
at_least() { local value; value=$(metric "$1" 2> /dev/null); [ "${value%.*}" -ge "$2" ] 2> /dev/null
  }
configure() { printf '%s\n' "windows: {length: $1, aligned: false}" \
  'files: {directory: /var/lib/perfusion/profiles}' 'attach: {policy: all}' \
  'limits: {cpu: 100%}' > /etc/perfusion/perfusion.yaml; }
files > /tmp/before

say install; dpkg --install /opt/check/perfusion.deb; say "exit $?"
said() { journalctl --no-pager --output=cat --unit=perfusion --lines=40; }
say active; systemctl is-active perfusion; code=$?; [ $code = 0 ] || said; say "exit $code"
say unit; systemctl show -p Type -p WatchdogUSec -p NRestarts -p UnitFileState perfusion
  say 'exit 0'
say exposure; systemd-analyze security --no-pager perfusion | tail -1; say 'exit 0'

native &
managed &
say configured; configure 10s; systemctl restart perfusion; code=$?; [ $code = 0 ] || said
  say "exit $code"
why() { said; perfusion ps 2>&1; cat /tmp/load; ls -ld /tmp /tmp/*; grep dotnet- /proc/net/unix
  cut -d' ' -f1,2,22 /proc/[0-9]*/stat | grep dotnet; for type in cpu blocked alloc_space
  do report $type | grep -v chain | cut -c 1-600 | tail -3; done; }
profiled
say services; ls /var/lib/perfusion/profiles; say 'exit 0'
say doctor; perfusion ps 2>&1 | head -20; say 'exit 0'

say reload; configure 5s; systemctl reload perfusion && until_true at_least daemon_reloads_total 1
  code=$?; [ $code = 0 ] || said; say "exit $code"
say broken; echo 'windows: {lenght: 5s}' > /etc/perfusion/perfusion.yaml; systemctl reload perfusion
  code=$?; systemctl is-active perfusion; say "exit $code"
configure 5s
restarted() { [ "$(systemctl show --value -p NRestarts perfusion)" -ge "$1" ] &&
  systemctl --quiet is-active perfusion; }
say killed; kill -KILL "$(main_pid)"; until_true restarted 1; say "exit $?"
say again; until_true at_least daemon_windows_total 1; say "exit $?"
# Stopped by a signal it says nothing to systemd any more.
say watchdog; kill -STOP "$(main_pid)"; until_true restarted 2; say "exit $?"

# Above that the kernel throttles: what it does for it is counted, and is nothing as long as the
# daemon keeps to its part.
drop_ins=/run/systemd/system/perfusion.service.d
limit() { printf '[Service]\nMemoryHigh=%s\n' "$1" > $drop_ins/limit.conf
  systemctl daemon-reload; systemctl restart perfusion; }
mkdir -p $drop_ins; limit 160M
say throttled; until_true at_least daemon_windows_total 4; code=$?
echo "reduced $(metric reduced)"
  grep -h . /sys/fs/cgroup/system.slice/perfusion.service/memory.events
  cat /sys/fs/cgroup/system.slice/perfusion.service/memory.peak; say "exit $code"
rm -r /run/systemd/system/perfusion.service.d; systemctl daemon-reload

say stopped; systemctl stop perfusion; say "exit $?"
say programs; cat /proc/[0-9]*/comm 2> /dev/null | grep -c perfusion; say 'exit 0'
say region; until_true no_region; say "exit $?"
kill %1 %2; exec 4>&-; wait

say purged; dpkg --purge perfusion; say "exit $?"
say left; files > /tmp/after; diff /tmp/before /tmp/after; say "exit $?"
say forgotten; systemctl is-enabled perfusion 2>&1; ls -d /run/perfusion 2>&1; say 'exit 0'
say end
"#;

fn fill(paths: &WorkspacePaths, steps: &StepLog, check: &Path) -> Result<()> {
    let packages = package::packages(paths, steps)?;
    fs::copy(packages.deb, check.join("perfusion.deb")).context("the deb cannot be copied")?;
    Ok(())
}

/// Parts that end with 0 when all is well.
const WELL: [(&str, &str); 11] = [
    ("install", "the package installs"),
    ("active", "and its service runs"),
    ("configured", "it starts with a configuration"),
    ("reload", "a reload is used"),
    ("killed", "killed, it is started again"),
    ("again", "and records"),
    ("watchdog", "hanging, it is started again"),
    ("stopped", "it stops"),
    ("region", "its library leaves the program"),
    ("purged", "the package can be purged"),
    ("left", "and leaves nothing"),
];

fn judge(verdicts: &mut Verdicts<'_>) {
    verdicts.all_end_well(&PROFILED);
    verdicts.all_end_well(&WELL);
    verdicts.check("unit", "the unit says when it is ready and has a watchdog", |part| {
        has(part, "Type=notify")
            && has(part, "WatchdogUSec=1min")
            && has(part, "UnitFileState=enabled")
    });
    verdicts.check("exposure", "systemd gives its exposure at most 3.5", |part| {
        let words = part.lines.iter().flat_map(|line| line.split_whitespace());
        words.filter_map(|word| word.parse::<f64>().ok()).next().is_some_and(|level| level <= 3.5)
    });
    verdicts.check(
        "broken",
        "a broken configuration is refused at the reload, and the service goes on",
        |part| {
            part.exit.is_some_and(|code| code != 0)
                && part.lines.iter().any(|line| line == "active")
        },
    );
    verdicts.check("services", "each service has its profiles", |part| {
        has(part, "load") && has(part, "chain")
    });
    verdicts.check("programs", "no process of ours is left", |part| {
        part.lines.iter().any(|line| line == "0")
    });
    verdicts.check("forgotten", "systemd knows it no more", |part| {
        let is_there = part.lines.iter().any(|line| line == "/run/perfusion");
        !has(part, "enabled") && has(part, "No such file or directory") && !is_there
    });
}
