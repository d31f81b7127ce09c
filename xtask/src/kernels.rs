//! `cargo xtask kernels`: Debian's kernels from 5.10 to the newest, one after another in qemu: what
//! `doctor` says there, and whether a recording has the stacks a program is known to have. Emulated
//! (TCG), so it runs where there is no /dev/kvm, and slowly.

mod apt;
mod report;

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

pub(crate) use apt::{Apt, newest};
pub(crate) use report::{MachineReport, ReportPart};

use crate::{
    build,
    exec::{StepLog, output, run},
    paths::WorkspacePaths,
    setup::debian,
};

const PACKAGES: [debian::DebianPackage; 4] = [
    ("qemu-system-x86", "the virtual machine"),
    ("busybox-static", "its shell"),
    ("cpio", "packs its files"),
    ("debian-archive-keyring", "whose kernels it runs"),
];

const KERNELS: [TestedKernel; 4] = [
    TestedKernel {
        version: "5.10",
        prefix: "linux-image-5.10.0-",
        lacks: &["walks in the kernel", OFF_CPU_SCANS],
        locked_maps: true,
    },
    TestedKernel { version: "6.1", prefix: "linux-image-6.1.0-", lacks: &[], locked_maps: false },
    TestedKernel { version: "6.12", prefix: "linux-image-6.12.", lacks: &[], locked_maps: false },
    // Debian's newest kernels have the image in a package of its own.
    TestedKernel { version: "newest", prefix: "linux-binary-", lacks: &[], locked_maps: false },
];

/// A kernel, and what is to be found there.
#[derive(Clone, Copy, Debug)]
struct TestedKernel {
    version: &'static str,
    /// What is in front of a version in the names of its packages.
    prefix: &'static str,
    /// The checks of `doctor` that say it lacks something; all else is expected to work.
    lacks: &'static [&'static str],
    /// Maps count as locked memory, so that who may have little of it can record nothing, and is
    /// told so.
    locked_maps: bool,
}

/// `doctor`'s check of what takes the stacks of threads that sleep all the time.
const OFF_CPU_SCANS: &str = "sleeping threads";

/// What the machine does: its output goes to the serial line, each part behind a line of its own.
const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmp /tmp
say() { echo; echo \"@@ $1\"; }
say kernel; /bin/busybox uname -r; say 'exit 0'
say doctor; /bin/perfusion doctor --json 2> /dev/null; say \"exit $?\"
/bin/chain > /tmp/ready & pid=$!
until /bin/busybox grep -q ready /tmp/ready; do /bin/busybox usleep 100000; done
say confined; /bin/setpriv --bounding-set=-sys_resource /bin/perfusion doctor --json 2> /dev/null; \
     say \"exit $?\"
say 'confined record'; /bin/setpriv --bounding-set=-sys_resource /bin/perfusion --quiet record \
     --pid $pid --duration 1s -o /tmp/c.pb.gz 2>&1; say \"exit $?\"
account() {
say \"$1\"
while read -r up idle; do echo \"up $up\"; done < /proc/uptime
for task in /proc/$pid/task/*; do echo \"${task##*/} $(/bin/busybox cat $task/schedstat)\"; done
}
account before
/bin/perfusion record --pid $pid --duration 10s -o /tmp/p.pb.gz > /tmp/said 2>&1 & recorder=$!
until /bin/busybox grep -q '^recording ' /tmp/said 2> /dev/null || ! kill -0 $recorder; do \
     /bin/busybox usleep 100000; done
account 'from within'; /bin/busybox sleep 7; account 'until within'
wait $recorder; code=$?
account after
say record; /bin/busybox cat /tmp/said; say \"exit $code\"
say samples; /bin/perfusion report /tmp/p.pb.gz --format folded --type samples 2>&1; say \"exit \
     $?\"
for type in cpu runnable blocked; do
say $type; /bin/perfusion report /tmp/p.pb.gz --format folded --type $type --by thread_id --idle \
     2>&1; say \"exit $?\"
done
say log; PERFUSION_LOG=probes=debug /bin/perfusion record --pid $pid --duration 1s -o /tmp/g.pb.gz \
     2>&1; say \"exit $?\"
say dump; /bin/perfusion dump --pid $pid 2>&1; say \"exit $?\"
clocks() {
say \"$1\"
while read -r up idle; do echo \"up $up\"; done < /proc/uptime
while read -r now at ns rest; do [ \"$now $at\" = 'now at' ] && echo \"monotonic $ns\"; done \
     < /proc/timer_list
}
clocks 'before sleep'
/bin/perfusion record --pid $pid --spans --duration 5s -o /tmp/s.pb.gz > /tmp/said 2>&1 & \
     recorder=$!
until /bin/busybox grep -q '^recording ' /tmp/said 2> /dev/null || ! kill -0 $recorder; do \
     /bin/busybox usleep 100000; done
/bin/busybox date -s '2001-01-01 00:00:00' > /dev/null
echo 0 > /sys/class/rtc/rtc0/wakealarm; echo +4 > /sys/class/rtc/rtc0/wakealarm
echo mem > /sys/power/state
wait $recorder; code=$?
clocks 'after sleep'
say slept; /bin/busybox cat /tmp/said; say \"exit $code\"
for type in cpu runnable blocked; do
say \"slept $type\"; /bin/perfusion report /tmp/s.pb.gz --format folded --type $type --by \
     thread_id --idle 2>&1; say \"exit $?\"
done
/bin/busybox mount -t securityfs security /sys/kernel/security
for level in integrity confidentiality; do
echo $level > /sys/kernel/security/lockdown
say \"$level doctor\"; /bin/perfusion doctor --json 2> /dev/null; say \"exit $?\"
say \"$level\"; /bin/perfusion --quiet record --pid $pid --duration 1s -o /tmp/l.pb.gz 2>&1; say \
     \"exit $?\"
done
say end
/bin/busybox poweroff -f
";

pub(crate) fn kernels(paths: &WorkspacePaths, steps: &StepLog, only: Option<&str>) -> Result<()> {
    if let Some(only) = only.filter(|only| KERNELS.iter().all(|kernel| kernel.version != *only)) {
        bail!("no kernel `{only}`; there are {}", KERNELS.map(|kernel| kernel.version).join(", "));
    }
    debian::install(steps, &PACKAGES)?;
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    let folder = paths.target.join("kernels");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let apt = Apt::new(&folder, steps)?;
    let packages = apt.names()?;
    let files = pack(paths, &folder, &perfusion)?;
    let mut table = String::from(
        "| kernel | `doctor` | CPU samples whole | waits whole | threads' times | asleep since \
         before | `dump` |\n\
         |---|---|---|---|---|---|---|\n",
    );
    let mut wrong = Vec::new();
    for kernel in KERNELS {
        let TestedKernel { version, prefix, .. } = kernel;
        if only.is_some_and(|only| only != version) {
            continue;
        }
        let package = newest(&packages, prefix).with_context(|| {
            format!("no package {prefix}…; remove {} to look again", folder.display())
        })?;
        let image = apt.kernel(package, steps)?;
        steps.step(&format!("booting {package}"));
        let log = folder.join(format!("{version}.log"));
        boot(&image, &files, &log, 1024, "")?;
        let text = fs::read(&log).with_context(|| format!("{}: cannot be read", log.display()))?;
        let found = MachineReport::read(&String::from_utf8_lossy(&text));
        match found.line(&kernel) {
            Ok(line) => table.push_str(&line),
            Err(error) => {
                wrong.push(format!("{package}: {error:#}; all it said is in {}", log.display()))
            }
        }
    }
    print!("{table}");
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(())
}

/// Packs the machine's files: busybox, perfusion, the program with known stacks and the libraries
/// of both.
fn pack(paths: &WorkspacePaths, folder: &Path, perfusion: &Path) -> Result<PathBuf> {
    let root = folder.join("root");
    if root.exists() {
        fs::remove_dir_all(&root)
            .with_context(|| format!("{}: cannot be removed", root.display()))?;
    }
    for name in ["bin", "proc", "sys", "dev", "tmp"] {
        let part = root.join(name);
        fs::create_dir_all(&part).with_context(|| format!("{}: cannot be made", part.display()))?;
    }
    let copy = |from: &Path, to: PathBuf| -> Result<()> {
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)
                .with_context(|| format!("{}: cannot be made", parent.display()))?;
        }
        fs::copy(from, &to).with_context(|| format!("{}: cannot be copied", from.display()))?;
        Ok(())
    };
    let chain = root.join("bin/chain");
    output(
        Command::new("gcc")
            .args(["-O2", "-fomit-frame-pointer", "-pthread", "-o"])
            .arg(&chain)
            .arg(paths.root.join("tests/workloads/native/three_threads.c")),
    )?;
    copy(perfusion, root.join("bin/perfusion"))?;
    copy(Path::new("/bin/busybox"), root.join("bin/busybox"))?;
    let setpriv = Path::new("/usr/bin/setpriv");
    copy(setpriv, root.join("bin/setpriv"))?;
    let libraries = output(Command::new("ldd").arg(&chain).arg(perfusion).arg(setpriv))?;
    for word in
        libraries.split_whitespace().filter(|word| word.starts_with('/') && !word.ends_with(':'))
    {
        let inside = word.trim_start_matches('/');
        copy(Path::new(word), root.join(inside))?;
    }
    let init = root.join("init");
    fs::write(&init, INIT).with_context(|| format!("{}: cannot be written", init.display()))?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}: chmod", init.display()))?;
    let files = folder.join("files.cpio.gz");
    let script = "set -e; find . | cpio --quiet -o -H newc | gzip -1 > \"$1\"";
    output(Command::new("sh").args(["-c", script, "sh"]).arg(&files).current_dir(&root))?;
    Ok(files)
}

/// Runs a machine of so many MiB to its end, with these words more on the kernel's command line.
pub(crate) fn boot(
    kernel: &Path,
    files: &Path,
    log: &Path,
    mebibytes: u32,
    words: &str,
) -> Result<()> {
    let written =
        fs::File::create(log).with_context(|| format!("{}: cannot be made", log.display()))?;
    run(Command::new("timeout")
        .args(["1800", "qemu-system-x86_64", "-accel", "tcg"])
        // Debian's 6.12 does not boot with an emulated cmpxchg16b.
        .args(["-cpu", "max,-cx16", "-smp", "2", "-nographic", "-no-reboot"])
        .args(["-m", &mebibytes.to_string()])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(files)
        .args([
            "-append",
            &format!(
                "console=ttyS0 quiet panic=-1 loglevel=5 softlockup_all_cpu_backtrace=1 {words}"
            ),
        ])
        .stdin(std::process::Stdio::null())
        .stdout(written))
    .with_context(|| format!("the machine did not end by itself: see {}", log.display()))
}
