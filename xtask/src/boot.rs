//! `cargo xtask boot`: the Debian package in a Debian with systemd that was really booted, in qemu: installed, recording under the unit's whole
//! hardening, reloaded, killed, stopped and purged. Emulated (TCG), so it runs where there is no /dev/kvm.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    bench,
    exec::{Steps, need_root, output},
    kernels::{self, Apt, Found, Part},
    package,
    paths::Paths,
    setup::{self, debian, package::clear},
};

const PACKAGES: [debian::Package; 5] = [
    ("qemu-system-x86", "the virtual machine"),
    ("busybox-static", "unpacks its root"),
    ("cpio", "packs its files"),
    ("debootstrap", "its Debian"),
    ("debian-archive-keyring", "whose kernel it runs"),
];
const KERNEL: &str = "linux-image-6.1.0-";
const MEBIBYTES: u32 = 3072;

/// Unpacks the root into memory and goes on there: services' own mounts need a root that can be moved, which the kernel's first one is not.
const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox mkdir -p /root
/bin/busybox mount -t tmpfs -o size=2500m root /root
umask 0
/bin/busybox tar -xzpf /root.tar.gz -C /root && /bin/busybox rm /root.tar.gz
exec /bin/busybox switch_root /root /lib/systemd/systemd
";

/// Runs once everything else has been started. The machine ends with it, whatever becomes of it.
const UNIT: &str = "\
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=LC_ALL=C DEBIAN_FRONTEND=noninteractive
ExecStart=/bin/bash /opt/check/check.sh
ExecStopPost=/bin/systemctl poweroff --force --force
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=graphical.target
";

/// What is tried there: each part is said to the serial line, and how it ended.
const CHECK: &str = r#"
say() { echo; echo "@@ $1"; }
# Until it is true, for four minutes at most.
until_true() { local end=$((SECONDS + 240)); until "$@"; do [ $SECONDS -lt $end ] || return 1; sleep 0.5; done; }
files() { find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /var/lib/systemd -o -path /opt/check \) -prune -o -printf '%p %M %U %G\n' | sort; }
metric() { exec 3<> /dev/tcp/127.0.0.1/7071 || return 1; printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3; grep "^perfusion_$1 " <&3 | cut -d' ' -f2; exec 3>&-; }
main_pid() { systemctl show --value -p MainPID perfusion; }
at_least() { local value; value=$(metric "$1" 2> /dev/null); [ "${value%.*}" -ge "$2" ] 2> /dev/null; }
configure() { printf 'windows: {length: %s, aligned: false}\nfiles: {directory: /var/lib/perfusion/profiles}\nattach: {policy: all}\nlimits: {cpu: 100%%}\n' "$1" > /etc/perfusion/perfusion.yaml; }
report() { for file in /var/lib/perfusion/profiles/*/*.pb.gz; do perfusion report "$file" --format folded --type "$1" --idle 2> /dev/null; done; }
reported() { report "$1" | grep -q -- "$2"; }

say kernel; uname -r; say 'exit 0'
useradd --system shop
files > /tmp/before

say install; dpkg --install /opt/check/perfusion.deb; say "exit $?"
said() { journalctl --no-pager --output=cat --unit=perfusion --lines=40; }
say active; systemctl is-active perfusion; code=$?; [ $code = 0 ] || said; say "exit $code"
say unit; systemctl show -p Type -p WatchdogUSec -p NRestarts -p UnitFileState perfusion; say 'exit 0'
say exposure; systemd-analyze security --no-pager perfusion | tail -1; say 'exit 0'

# An emulated CPU is slow, and there is a system to be run on two of them.
setpriv --reuid=shop --clear-groups nice -n 19 /opt/check/chain > /tmp/chain &
# Its standard input stays open: at its end it would end.
mkfifo /tmp/orders; exec 4<> /tmp/orders
export HOME=/tmp DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_PROCESSOR_COUNT=1
setpriv --reuid=shop --clear-groups nice -n 19 /opt/check/dotnet/dotnet /opt/check/load.dll work < /tmp/orders > /tmp/load 2>&1 &
say configured; configure 10s; systemctl restart perfusion; code=$?; [ $code = 0 ] || said; say "exit $code"
why() { said; perfusion ps 2>&1; cat /tmp/load; for type in cpu blocked alloc_space; do report $type | grep -v chain | cut -c 1-600 | tail -3; done; }
say attached; until_true at_least daemon_attached_total 1; code=$?; [ $code = 0 ] || why; say "exit $code"
say native; until_true reported cpu spin_inner; say "exit $?"
say waits; until_true reported blocked wait_inner; say "exit $?"
say kernel-frames; until_true reported blocked do_syscall_64; say "exit $?"
say managed; until_true reported cpu 'Load.Leaf'; code=$?; [ $code = 0 ] || why; say "exit $code"
say allocations; until_true reported alloc_space 'Load.Leaf'; say "exit $?"
say live; until_true reported inuse_space 'Load.Leaf'; say "exit $?"
say services; ls /var/lib/perfusion/profiles; say 'exit 0'
say doctor; perfusion ps 2>&1 | head -20; say 'exit 0'

say reload; configure 5s; systemctl reload perfusion && until_true at_least daemon_reloads_total 1; say "exit $?"
say broken; echo 'windows: {lenght: 5s}' > /etc/perfusion/perfusion.yaml; systemctl reload perfusion; code=$?; systemctl is-active perfusion; say "exit $code"
configure 5s
restarted() { [ "$(systemctl show --value -p NRestarts perfusion)" -ge "$1" ] && systemctl --quiet is-active perfusion; }
say killed; kill -KILL "$(main_pid)"; until_true restarted 1; say "exit $?"
say again; until_true at_least daemon_windows_total 1; say "exit $?"
# Stopped by a signal it says nothing to systemd any more.
say watchdog; kill -STOP "$(main_pid)"; until_true restarted 2; say "exit $?"

say stopped; systemctl stop perfusion; say "exit $?"
held() { cat /proc/[0-9]*/fdinfo/* 2> /dev/null | grep -q '^prog_id'; }
none_held() { ! held; }
programs() { cat /proc/[0-9]*/fdinfo/* 2> /dev/null | grep '^prog_id' | sort -u; }
say programs; cat /proc/[0-9]*/comm 2> /dev/null | grep -c perfusion; say 'exit 0'
no_region() { ! cat /proc/[0-9]*/maps 2> /dev/null | grep -q 'memfd:perfusion'; }
say region; until_true no_region; say "exit $?"
kill %1 %2; exec 4>&-; wait

say purged; dpkg --purge perfusion; say "exit $?"
say left; files > /tmp/after; diff /tmp/before /tmp/after; say "exit $?"
say forgotten; systemctl is-enabled perfusion 2>&1; ls -d /run/perfusion 2>&1; say 'exit 0'
say end
"#;

pub(crate) fn boot(paths: &Paths, steps: &Steps) -> Result<()> {
    need_root("a Debian of its own")?;
    debian::install(steps, &PACKAGES)?;
    let packages = package::packages(paths, steps)?;
    setup::pinned_dotnets(paths, steps)?;
    let folder = paths.target.join("boot");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let apt = Apt::new(&folder, steps)?;
    let names = apt.names()?;
    let kernel = kernels::newest(&names, KERNEL)
        .with_context(|| format!("no package {KERNEL}…; remove {} to look again", folder.display()))?;
    let image = apt.kernel(kernel, steps)?;
    let files = pack(paths, steps, &folder, &packages.deb)?;
    steps.step(&format!("booting Debian with {kernel} (some minutes)"));
    let log = folder.join("boot.log");
    kernels::boot(&image, &files, &log, MEBIBYTES, "systemd.show_status=false systemd.log_target=null")?;
    let text = fs::read(&log).with_context(|| format!("{}: cannot be read", log.display()))?;
    let found = Found::read(&String::from_utf8_lossy(&text));
    let wrong = judge(&found);
    if !wrong.is_empty() {
        bail!("{}\nall it said is in {}", wrong.join("\n"), log.display());
    }
    Ok(())
}

/// Packs the machine: busybox, and a Debian with the package, a runtime and two programs in it, not installed yet.
fn pack(paths: &Paths, steps: &Steps, folder: &Path, deb: &Path) -> Result<PathBuf> {
    let root = folder.join("debian");
    let done = folder.join("debian.made");
    if !done.exists() {
        clear(&root)?;
        steps.step("making a Debian with systemd and nothing else (75 s)");
        output(
            Command::new("debootstrap")
                .args(["--variant=minbase", "--include=systemd,dbus", "bookworm"])
                .arg(&root),
        )?;
        fs::write(&done, "").with_context(|| format!("{}: cannot be written", done.display()))?;
    }
    steps.step("packing it");
    let check = root.join("opt/check");
    clear(&check)?;
    fs::create_dir_all(&check).with_context(|| format!("{}: cannot be made", check.display()))?;
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))
    };
    write(check.join("check.sh"), CHECK)?;
    write(root.join("etc/systemd/system/check.service"), UNIT)?;
    let wants = root.join("etc/systemd/system/graphical.target.wants");
    fs::create_dir_all(&wants).with_context(|| format!("{}: cannot be made", wants.display()))?;
    let link = wants.join("check.service");
    if link.symlink_metadata().is_err() {
        std::os::unix::fs::symlink("../check.service", &link)
            .with_context(|| format!("{}: cannot be made", link.display()))?;
    }
    fs::copy(deb, check.join("perfusion.deb")).context("the deb cannot be copied")?;
    output(
        Command::new("gcc")
            .args(["-O2", "-fomit-frame-pointer", "-pthread", "-static", "-o"])
            .arg(check.join("chain"))
            .arg(paths.root.join("tests/workloads/native/three_threads.c")),
    )?;
    bench::compile_load(paths)?;
    let load = paths.target.join("bench");
    for name in ["load.dll", "load.runtimeconfig.json"] {
        fs::copy(load.join(name), check.join(name)).with_context(|| format!("{name} cannot be copied"))?;
    }
    let runtime = check.join("dotnet");
    fs::create_dir_all(runtime.join("shared")).context("a place for the runtime")?;
    let dotnet = paths.dotnet_roots().join("9");
    for part in ["dotnet", "host", "shared/Microsoft.NETCore.App"] {
        let to = runtime.join(part);
        output(Command::new("cp").args(["-r"]).arg(dotnet.join(part)).arg(&to))?;
    }

    let initrd = folder.join("initrd");
    clear(&initrd)?;
    for part in ["bin", "dev", "proc"] {
        fs::create_dir_all(initrd.join(part))
            .with_context(|| format!("{}: cannot be made", initrd.display()))?;
    }
    fs::copy("/bin/busybox", initrd.join("bin/busybox")).context("busybox cannot be copied")?;
    let init = initrd.join("init");
    write(init.clone(), INIT)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}: chmod", init.display()))?;
    let script = "set -e; tar -C \"$1\" --exclude=./var/cache/apt --exclude=./var/lib/apt/lists \
                  --exclude=./usr/share/doc -c . | gzip -1 > root.tar.gz; find . | cpio --quiet -o -H newc > \"$2\"";
    let files = folder.join("files.cpio");
    output(Command::new("sh").args(["-c", script, "sh"]).arg(&root).arg(&files).current_dir(&initrd))?;
    Ok(files)
}

/// Parts that end with 0 when all is well.
const WELL: [(&str, &str); 18] = [
    ("install", "the package installs"),
    ("active", "and its service runs"),
    ("configured", "it starts with a configuration"),
    ("attached", "it attaches to a .NET program of another user"),
    ("native", "CPU samples of a native program"),
    ("waits", "waits with their stacks"),
    ("kernel-frames", "kernel functions have names"),
    ("managed", ".NET methods have names"),
    ("allocations", "allocations"),
    ("live", "live objects"),
    ("reload", "a reload is used"),
    ("killed", "killed, it is started again"),
    ("again", "and records"),
    ("watchdog", "hanging, it is started again"),
    ("stopped", "it stops"),
    ("region", "its library leaves the program"),
    ("purged", "the package can be purged"),
    ("left", "and leaves nothing"),
];

/// Prints what was found; answers what is not as it must be.
fn judge(found: &Found) -> Vec<String> {
    let mut wrong = Vec::new();
    let text = |part: &Part| part.lines.iter().filter(|line| !line.is_empty()).cloned().collect::<Vec<_>>();
    let mut check = |name: &str, what: &str, is_well: &dyn Fn(&Part) -> bool| match found.part(name) {
        Ok(part) if is_well(part) => println!("  ok      {what}"),
        Ok(part) => {
            println!("  FAILED  {what}");
            wrong.push(format!("{what} ({name}): exit {:?}, {:?}", part.exit, text(part)));
        }
        Err(error) => {
            println!("  FAILED  {what}");
            wrong.push(format!("{what}: {error:#}"));
        }
    };
    for (name, what) in WELL {
        check(name, what, &|part| part.exit == Some(0));
    }
    let has = |part: &Part, wanted: &str| part.lines.iter().any(|line| line.contains(wanted));
    check("unit", "the unit says when it is ready and has a watchdog", &|part| {
        has(part, "Type=notify") && has(part, "WatchdogUSec=1min") && has(part, "UnitFileState=enabled")
    });
    check("exposure", "systemd gives its exposure at most 3.5", &|part| {
        let words = part.lines.iter().flat_map(|line| line.split_whitespace());
        words.filter_map(|word| word.parse::<f64>().ok()).next().is_some_and(|level| level <= 3.5)
    });
    check("broken", "a broken configuration is refused at the reload, and the service goes on", &|part| {
        part.exit.is_some_and(|code| code != 0) && part.lines.iter().any(|line| line == "active")
    });
    check("services", "each service has its profiles", &|part| has(part, "load") && has(part, "chain"));
    check("programs", "no process of ours is left", &|part| part.lines.iter().any(|line| line == "0"));
    check("forgotten", "systemd knows it no more", &|part| {
        let is_there = part.lines.iter().any(|line| line == "/run/perfusion");
        !has(part, "enabled") && has(part, "No such file or directory") && !is_there
    });
    wrong
}
