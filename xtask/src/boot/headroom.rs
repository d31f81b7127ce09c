//! Surveys of .NET programs whose cgroup leaves them little memory, in a machine with cgroup
//! version 2 and in one with version 1. No program is killed, and each survey is taken or refused
//! with its figures.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{Trial, Verdicts};
use crate::{
    build,
    exec::{StepLog, output},
    kernels::ReportPart,
    paths::WorkspacePaths,
};

pub(super) const VERSION_2: Trial = Trial {
    name: "headroom",
    packages: &[],
    kernel_words: "",
    script: SCRIPT,
    fill,
    judge: |verdicts| judge(verdicts, "2"),
};

pub(super) const VERSION_1: Trial = Trial {
    name: "headroom-v1",
    packages: &[],
    kernel_words: "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller",
    script: SCRIPT,
    fill,
    judge: |verdicts| judge(verdicts, "1"),
};

/// MB of small objects that a program has.
const SIZES: [u32; 3] = [50, 300, 2000];
/// MiB that its cgroup leaves it.
const LEFT: [u32; 4] = [4, 16, 64, 320];

const SCRIPT: &str = r#"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
version=2; groups=/sys/fs/cgroup; limit=memory.max; used=memory.current; killed=memory.events
  none=max
echo +memory > $groups/cgroup.subtree_control
else
version=1; groups=/sys/fs/cgroup/memory; limit=memory.limit_in_bytes; used=memory.usage_in_bytes
  killed=memory.oom_control; none=-1
fi
say version; echo $version; say 'exit 0'
# The program's memory, once it has come to rest.
resting() {
local last=0 now; now=$(cat "$group/$used")
until [ $((now > last ? now - last : last - now)) -lt 262144 ]; do sleep 2; last=$now
  now=$(cat "$group/$used"); done
echo "$now"
}
for size in 50 300 2000; do
group=$groups/small-$size; mkdir "$group"; rm -f /tmp/ready; mkfifo /tmp/input; exec 5<> /tmp/input
( echo $BASHPID > "$group/cgroup.procs"
  exec /opt/check/dotnet/dotnet /opt/check/smallobjects.dll $size < /tmp/input > /tmp/ready 2>&1
  ) & pid=$!
is_ready() { grep -q '^ready' /tmp/ready; }
until_true is_ready || { cat /tmp/ready; kill -0 $pid && echo 'is still starting'; }
for left in 4 16 64 320; do
say "$size $left"
echo $(($(resting) + left * 1048576)) > "$group/$limit"
/opt/check/perfusion heap --pid $pid --rows 3 > /tmp/survey 2>&1; code=$?
cut -c 1-400 /tmp/survey
kill -0 $pid && echo 'the program is alive'
grep '^oom_kill ' "$group/$killed"
echo $none > "$group/$limit"
say "exit $code"
done
echo stop >&5; wait $pid; exec 5>&-; rm /tmp/input; rmdir "$group"
done
say end
"#;

fn fill(paths: &WorkspacePaths, steps: &StepLog, check: &Path) -> Result<()> {
    let program = match &paths.profile {
        Some(_) => paths.perfusion(),
        None => build::build(paths, steps)?,
    };
    fs::copy(program, check.join("perfusion")).context("the program cannot be copied")?;
    let workloads = paths.root.join("tests/workloads/dotnet");
    output(
        Command::new(paths.csc())
            .arg(check.join("smallobjects.dll"))
            .arg(workloads.join("smallobjects/smallobjects.cs"))
            .arg(workloads.join("Workload.cs")),
    )?;
    fs::copy(check.join("load.runtimeconfig.json"), check.join("smallobjects.runtimeconfig.json"))
        .context("the configuration of its runtime cannot be copied")?;
    Ok(())
}

fn judge(verdicts: &mut Verdicts<'_>, version: &str) {
    verdicts.check("version", &format!("cgroup version {version} has the memory"), |part| {
        part.lines.iter().any(|line| line == version)
    });
    for size in SIZES {
        for left in LEFT {
            let name = format!("{size} {left}");
            let what = verdicts.found.part(&name).ok().and_then(what_became_of_it);
            let said = what.unwrap_or("neither taken nor refused with figures");
            verdicts.check(&name, &format!("{size} MB, {left} MiB left: {said}"), |part| {
                let has = |wanted: &str| part.lines.iter().any(|line| line == wanted);
                what.is_some() && has("the program is alive") && has("oom_kill 0")
            });
        }
    }
}

/// What a survey says that became of it.
fn what_became_of_it(part: &ReportPart) -> Option<&'static str> {
    let says = |words: &str| part.lines.iter().any(|line| line.contains(words));
    let is_refused = ["has ", " MiB left", "memory.", "--force"].into_iter().all(says);
    match part.exit? {
        0 if says("events of the walk are missing") => Some("taken in part"),
        0 => Some("taken"),
        1 if is_refused => Some("refused"),
        _ => None,
    }
}
