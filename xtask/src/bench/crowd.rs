//! Fifty processes of many programs, large ones among them: what a recorder of a whole host has to
//! remember.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};

use super::load;
use crate::paths::WorkspacePaths;

/// What the budget speaks of.
pub(super) const PROCESSES: usize = 50;
const EXECUTABLES: usize = 30;

/// Debian's packages of what is started here.
pub(super) const PACKAGES: [(&str, &str); 3] =
    [("chromium", "a large program"), ("perl", "a program"), ("gdb", "a large program")];

/// Programs of LLVM 22, a package that everything is built with. Each is a file of its own, and all
/// share a library of 130 MB. They read standard input, which nobody writes: their stacks are those
/// of a thread asleep.
const LLVM: &str = "/usr/lib/llvm-22/bin";

/// Works for some milliseconds, 20 times a second.
const NODE: &str =
    "setInterval(() => { let s = 0; for (let i = 0; i < 1e6; i++) s += i % 7; }, 50)";
const PYTHON: &str = "import time\nwhile True: sum(i % 7 for i in range(10000)); time.sleep(0.05)";
const PERL: &str =
    "while (1) { my $s = 0; $s += $_ % 7 for 1..10000; select(undef, undef, undef, 0.05) }";
const PAGE: &str = "data:text/html,<script>setInterval(() => \
     { document.title += [...Array(1e5).keys()].length }, 50)</script>";

/// The running processes; they end with this value.
pub(super) struct Crowd {
    children: Vec<Child>,
    profile: PathBuf,
    dotnet: Vec<load::App>,
}

impl Crowd {
    /// Starts them; returns when there are enough.
    pub(super) fn start(paths: &WorkspacePaths) -> Result<Crowd> {
        let profile = paths.target.join("bench/chromium");
        let mut crowd = Crowd {
            children: Vec::new(),
            profile: profile.clone(),
            dotnet: vec![load::App::start(paths)?, load::App::start_allocating(paths, "9")?],
        };
        for _ in 0..4 {
            crowd.add(Command::new("node").args(["-e", NODE]))?;
            crowd.add(Command::new("python3").args(["-c", PYTHON]))?;
            crowd.add(Command::new("perl").args(["-e", PERL]))?;
        }
        crowd.add(Command::new("gdb").arg("--quiet"))?;
        // In a group of its own, so that its children end with it.
        crowd.add(
            Command::new("chromium")
                .args(["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"])
                .arg(format!("--user-data-dir={}", profile.display()))
                .arg(PAGE),
        )?;
        let mut tools: Vec<PathBuf> = fs::read_dir(LLVM)
            .with_context(|| format!("{LLVM}: cannot be listed"))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        tools.sort();
        for tool in tools {
            // Those that want other arguments, or no input, end at once and leave the count.
            crowd.add(Command::new(tool).arg("-"))?;
        }
        load::pass(3.0); // browsers start their processes, and what does not read has ended
        let (processes, executables) = crowd.count()?;
        if processes < PROCESSES || executables < EXECUTABLES {
            bail!(
                "expected {PROCESSES} processes of {EXECUTABLES} executables, found {processes} of \
                 {executables}"
            );
        }
        Ok(crowd)
    }

    fn add(&mut self, command: &mut Command) -> Result<()> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name} did not start"))?;
        self.children.push(child);
        Ok(())
    }

    /// Processes of the groups that are alive, the .NET ones, and their distinct executables.
    pub(super) fn count(&self) -> Result<(usize, usize)> {
        let groups: BTreeSet<u32> = self.children.iter().map(Child::id).collect();
        let mut executables = BTreeSet::new();
        let mut processes = 0;
        for entry in fs::read_dir("/proc").context("/proc")? {
            let path = entry.context("/proc")?.path();
            // A process may end meanwhile; a zombie has no executable.
            let (Ok(stat), Ok(executable)) =
                (fs::read_to_string(path.join("stat")), fs::read_link(path.join("exe")))
            else {
                continue;
            };
            // proc(5): behind the name come state, parent and process group.
            let group = stat
                .rsplit(')')
                .next()
                .and_then(|rest| rest.split_whitespace().nth(2)?.parse().ok());
            if group.is_some_and(|group| groups.contains(&group)) {
                processes += 1;
                executables.insert(executable);
            }
        }
        Ok((processes + self.dotnet.len(), executables.len() + 1))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The whole group: a browser is many processes.
            Command::new("kill")
                .args(["-KILL", "--", &format!("-{}", child.id())])
                .stderr(Stdio::null())
                .status()
                .ok();
            child.wait().ok();
        }
        fs::remove_dir_all(&self.profile).ok();
    }
}
