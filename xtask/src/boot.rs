//! `cargo xtask boot [unit|pod|headroom|headroom-v1]`: a Debian with systemd that is really booted,
//! in qemu, and what is to be deployed or tried in it. Emulated (TCG), so it runs where there is no
//! /dev/kvm.

mod headroom;
mod pod;
mod unit;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    bench,
    exec::{StepLog, need_root, output},
    kernels::{self, Apt, MachineReport, ReportPart},
    paths::WorkspacePaths,
    setup::{self, debian, package::clear},
};

const PACKAGES: [debian::DebianPackage; 5] = [
    ("qemu-system-x86", "the virtual machine"),
    ("busybox-static", "unpacks its root"),
    ("cpio", "packs its files"),
    ("debootstrap", "its Debian"),
    ("debian-archive-keyring", "whose kernel it runs"),
];
const KERNEL: &str = "linux-image-6.1.0-";
/// Memory of a machine: the root, which is in memory, and the largest program.
const MEBIBYTES: u32 = 6144;

/// Unpacks the root into memory and goes on there: services' own mounts need a root that can be
/// moved, which the kernel's first one is not.
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

/// What all trials begin with: words of their scripts. Each part is said to the serial line, and
/// how it ended.
const WORDS: &str = r#"
say() { echo; echo "@@ $1"; }
# Until it is true, for four minutes at most.
until_true() { local end=$((SECONDS + 240)); until "$@"; do [ $SECONDS -lt $end ] || return 1
  sleep 0.5; done; }
newest() { ls -t /var/lib/perfusion/profiles/{chain,load}/*.pb.gz 2> /dev/null | head -4; }
report() { for file in $(newest)
  do $PERFUSION report "$file" --format folded --type "$1" --idle 2> /dev/null; done; }
reported() { report "$1" | grep -q -- "$2"; }
no_region() { ! cat /proc/[0-9]*/maps 2> /dev/null | grep -q 'memfd:perfusion'; }
export HOME=/tmp DOTNET_SYSTEM_GLOBALIZATION_INVARIANT=1 DOTNET_PROCESSOR_COUNT=1
# An emulated CPU is slow, and there is a system to be run on two of them.
as_shop() { exec setpriv --reuid=shop --clear-groups nice -n 19 "$@"; }
native() { as_shop /opt/check/chain > /tmp/chain; }
managed() { as_shop /opt/check/dotnet/dotnet /opt/check/load.dll work < /tmp/orders > /tmp/load 2>&1
  }
# What of both programs must be in the profiles. `at_least` and `why` are the trial's: a metric, and
# what helps to understand a failure.
profiled() {
say attached; until_true at_least daemon_attached_total 1; code=$?; [ $code = 0 ] || why
  say "exit $code"
say native; until_true reported cpu spin_inner; say "exit $?"
say waits; until_true reported blocked wait_inner; say "exit $?"
say kernel-frames; until_true reported blocked do_syscall_64; say "exit $?"
say managed; until_true reported cpu 'Load.Leaf'; code=$?; [ $code = 0 ] || why; say "exit $code"
say allocations; until_true reported alloc_space 'Load.Leaf'; say "exit $?"
say live; until_true reported inuse_space 'Load.Leaf'; say "exit $?"
}
say kernel; uname -r; say 'exit 0'
useradd --system shop
# The load's standard input stays open: at its end it would end.
mkfifo /tmp/orders; exec 4<> /tmp/orders
"#;

/// The parts of `profiled`.
const PROFILED: [(&str, &str); 7] = [
    ("attached", "it attaches to a .NET program of another user"),
    ("native", "CPU samples of a native program"),
    ("waits", "waits with their stacks"),
    ("kernel-frames", "kernel functions have names"),
    ("managed", ".NET methods have names"),
    ("allocations", "allocations"),
    ("live", "live objects"),
];

/// What is tried in a machine of its own.
struct Trial {
    name: &'static str,
    /// Packages that its Debian has, beside systemd and dbus.
    packages: &'static [&'static str],
    /// Added to its kernel's command line.
    kernel_words: &'static str,
    script: &'static str,
    /// Puts what the script needs below this folder, which is `/opt/check` in the machine.
    fill: fn(&WorkspacePaths, &StepLog, &Path) -> Result<()>,
    judge: fn(&mut Verdicts<'_>),
}

const TRIALS: [Trial; 4] = [unit::TRIAL, pod::TRIAL, headroom::VERSION_2, headroom::VERSION_1];

pub(crate) fn boot(paths: &WorkspacePaths, steps: &StepLog, only: Option<&str>) -> Result<()> {
    if let Some(only) = only.filter(|only| TRIALS.iter().all(|trial| trial.name != *only)) {
        bail!(
            "nothing to boot is called `{only}`; there are {}",
            TRIALS.map(|trial| trial.name).join(", ")
        );
    }
    need_root("a Debian of its own")?;
    debian::install(steps, &PACKAGES)?;
    setup::pinned_dotnets(paths, steps)?;
    let folder = paths.target.join("boot");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let apt = Apt::new(&folder, steps)?;
    let names = apt.names()?;
    let kernel = kernels::newest(&names, KERNEL).with_context(|| {
        format!("no package {KERNEL}…; remove {} to look again", folder.display())
    })?;
    let image = apt.kernel(kernel, steps)?;
    for trial in TRIALS.iter().filter(|trial| only.is_none_or(|only| only == trial.name)) {
        let files = pack(paths, steps, &folder, trial)?;
        steps.step(&format!("booting Debian with {kernel} for `{}` (some minutes)", trial.name));
        let log = folder.join(format!("{}.log", trial.name));
        kernels::boot(
            &image,
            &files,
            &log,
            MEBIBYTES,
            &format!("systemd.show_status=false systemd.log_target=null {}", trial.kernel_words),
        )?;
        let text = fs::read(&log).with_context(|| format!("{}: cannot be read", log.display()))?;
        let found = MachineReport::read(&String::from_utf8_lossy(&text));
        let mut verdicts = Verdicts { found: &found, wrong: Vec::new() };
        (trial.judge)(&mut verdicts);
        if !verdicts.wrong.is_empty() {
            bail!("{}\nall it said is in {}", verdicts.wrong.join("\n"), log.display());
        }
    }
    Ok(())
}

/// Packs the machine: busybox, and a Debian with a runtime, two programs and what the trial needs
/// in it, nothing of ours installed yet.
fn pack(paths: &WorkspacePaths, steps: &StepLog, folder: &Path, trial: &Trial) -> Result<PathBuf> {
    let root = folder.join(format!("debian-{}", trial.name));
    let done = folder.join(format!("debian-{}.made", trial.name));
    if !done.exists() {
        clear(&root)?;
        let packages: Vec<&str> =
            ["systemd", "dbus"].iter().chain(trial.packages).copied().collect();
        steps
            .step(&format!("making a Debian with {} and nothing else (75 s)", packages.join(", ")));
        output(
            Command::new("debootstrap")
                .args([
                    "--variant=minbase",
                    &format!("--include={}", packages.join(",")),
                    "bookworm",
                ])
                .arg(&root),
        )?;
        fs::write(&done, "").with_context(|| format!("{}: cannot be written", done.display()))?;
    }
    let check = root.join("opt/check");
    clear(&check)?;
    fs::create_dir_all(&check).with_context(|| format!("{}: cannot be made", check.display()))?;
    write(&check.join("check.sh"), &format!("{WORDS}{}", trial.script))?;
    write(&root.join("etc/systemd/system/check.service"), UNIT)?;
    let wants = root.join("etc/systemd/system/graphical.target.wants");
    fs::create_dir_all(&wants).with_context(|| format!("{}: cannot be made", wants.display()))?;
    let link = wants.join("check.service");
    if link.symlink_metadata().is_err() {
        std::os::unix::fs::symlink("../check.service", &link)
            .with_context(|| format!("{}: cannot be made", link.display()))?;
    }
    programs(paths, &check)?;
    (trial.fill)(paths, steps, &check)?;

    steps.step("packing it");
    let initrd = folder.join("initrd");
    clear(&initrd)?;
    for part in ["bin", "dev", "proc"] {
        fs::create_dir_all(initrd.join(part))
            .with_context(|| format!("{}: cannot be made", initrd.display()))?;
    }
    fs::copy("/bin/busybox", initrd.join("bin/busybox")).context("busybox cannot be copied")?;
    let init = initrd.join("init");
    write(&init, INIT)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}: chmod", init.display()))?;
    let script = "set -e; tar -C \"$1\" --exclude=./var/cache/apt --exclude=./var/lib/apt/lists \
                  --exclude=./usr/share/doc -c . | gzip -1 > root.tar.gz; find . | cpio --quiet -o \
         -H newc > \"$2\"";
    let files = folder.join("files.cpio");
    output(
        Command::new("sh").args(["-c", script, "sh"]).arg(&root).arg(&files).current_dir(&initrd),
    )?;
    Ok(files)
}

/// What is profiled there: a native program and a .NET one, with its runtime.
fn programs(paths: &WorkspacePaths, check: &Path) -> Result<()> {
    output(
        Command::new("gcc")
            .args(["-O2", "-fomit-frame-pointer", "-pthread", "-static", "-o"])
            .arg(check.join("chain"))
            .arg(paths.root.join("tests/workloads/native/three_threads.c")),
    )?;
    bench::compile_load(paths)?;
    let load = paths.target.join("bench");
    for name in ["load.dll", "load.runtimeconfig.json"] {
        fs::copy(load.join(name), check.join(name))
            .with_context(|| format!("{name} cannot be copied"))?;
    }
    let runtime = check.join("dotnet");
    fs::create_dir_all(runtime.join("shared")).context("a place for the runtime")?;
    let dotnet = paths.dotnet_roots().join("9");
    for part in ["dotnet", "host", "shared/Microsoft.NETCore.App"] {
        output(Command::new("cp").arg("-r").arg(dotnet.join(part)).arg(runtime.join(part)))?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))
}

/// Prints what was found, and keeps what is not as it must be.
struct Verdicts<'a> {
    found: &'a MachineReport,
    wrong: Vec<String>,
}

impl Verdicts<'_> {
    fn check(&mut self, name: &str, what: &str, is_well: impl Fn(&ReportPart) -> bool) {
        let text = |part: &ReportPart| {
            part.lines.iter().filter(|line| !line.is_empty()).cloned().collect::<Vec<_>>()
        };
        match self.found.part(name) {
            Ok(part) if is_well(part) => println!("  ok      {what}"),
            Ok(part) => {
                println!("  FAILED  {what}");
                self.wrong.push(format!("{what} ({name}): exit {:?}, {:?}", part.exit, text(part)));
            }
            Err(error) => {
                println!("  FAILED  {what}");
                self.wrong.push(format!("{what}: {error:#}"));
            }
        }
    }

    /// Parts that end with 0 when all is well.
    fn all_end_well(&mut self, parts: &[(&str, &str)]) {
        for (name, what) in parts {
            self.check(name, what, |part| part.exit == Some(0));
        }
    }
}

fn has(part: &ReportPart, wanted: &str) -> bool {
    part.lines.iter().any(|line| line.contains(wanted))
}
