//! Steps with their time, and child processes whose failure says which command, what it returned
//! and what it printed.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::paths::WorkspacePaths;

/// Prints one line per step, each with the time since the command began.
pub(crate) struct StepLog {
    began: Instant,
}

impl StepLog {
    pub(crate) fn start() -> StepLog {
        StepLog { began: Instant::now() }
    }

    /// Announces the step that begins now.
    pub(crate) fn step(&self, what: &str) {
        println!("[{:>6.1} s] {what}", self.began.elapsed().as_secs_f64());
    }
}

/// A cargo in the workspace. `cargo run`, which began us, has set variables that describe this
/// program; a build script that looks at such (ring's does) would run anew, and all that depends on
/// it be built anew, whenever a cargo of ours and one that a person types take turns.
pub(crate) fn cargo(paths: &WorkspacePaths) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(&paths.root);
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_a_package)) {
        command.env_remove(name);
    }
    command
}

/// Variables that cargo sets for the program it runs (the Cargo book, "Environment variables Cargo
/// sets for crates").
fn is_of_a_package(name: &str) -> bool {
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// The command as a person would type it.
fn typed(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}

/// What a thread found. Its panic goes on in this one.
pub(crate) fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs a command that talks to the person itself.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| {
        format!("`{}` did not start: is it installed, and on PATH?", typed(command))
    })?;
    if !status.success() {
        bail!("`{}` failed: expected exit code 0, found {status}", typed(command));
    }
    Ok(())
}

/// Runs a command and returns all it said, whatever its exit code.
pub(crate) fn outcome(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().with_context(|| {
        format!("`{}` did not start: is it installed, and on PATH?", typed(command))
    })
}

/// Runs a quiet command and returns its standard output; the error has the end of its standard
/// error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = outcome(command)?;
    if !output.status.success() {
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let lines: Vec<&str> = said.lines().collect();
        let end = lines.get(lines.len().saturating_sub(30)..).unwrap_or_default().join("\n");
        bail!("`{}` failed: expected exit code 0, found {}\n{end}", typed(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command whose words somebody else's would get between: returns all it said, and whether
/// it exited with 0.
pub(crate) fn told(command: &mut Command) -> Result<(bool, String)> {
    let line = typed(command);
    let (mut reader, writer) = io::pipe().with_context(|| format!("a pipe for `{line}`"))?;
    let other = writer.try_clone().with_context(|| format!("a pipe for `{line}`"))?;
    command.stdin(Stdio::null()).stdout(writer).stderr(other);
    let mut child = command
        .spawn()
        .with_context(|| format!("`{line}` did not start: is it installed, and on PATH?"))?;
    // As in `watch`.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut said = Vec::new();
    reader.read_to_end(&mut said).with_context(|| format!("output of `{line}`"))?;
    let status = child.wait().with_context(|| format!("waiting for `{line}`"))?;
    Ok((status.success(), String::from_utf8_lossy(&said).into_owned()))
}

/// Runs a command, passing on line by line what it says, if `see` returns true of the line. Returns
/// whether it exited with 0.
pub(crate) fn watch(command: &mut Command, mut see: impl FnMut(&str) -> bool) -> Result<bool> {
    let line = typed(command);
    let (reader, writer) = io::pipe().with_context(|| format!("a pipe for `{line}`"))?;
    let other = writer.try_clone().with_context(|| format!("a pipe for `{line}`"))?;
    let mut child = command
        .stdout(writer)
        .stderr(other)
        .spawn()
        .with_context(|| format!("`{line}` did not start: is it installed, and on PATH?"))?;
    // The command holds the writing ends; reading would never end while we hold them too.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    for text in BufReader::new(reader).split(b'\n') {
        let text = text.with_context(|| format!("output of `{line}`"))?;
        let text = String::from_utf8_lossy(&text);
        if see(&text) {
            println!("{text}");
        }
    }
    let status = child.wait().with_context(|| format!("waiting for `{line}`"))?;
    Ok(status.success())
}

/// Whether this process may do what only root may.
pub(crate) fn is_root() -> Result<bool> {
    Ok(output(Command::new("id").arg("-u"))?.trim() == "0")
}

/// Fails with what to do when this process is not root.
pub(crate) fn need_root(what_for: &str) -> Result<()> {
    if !is_root()? {
        bail!("{what_for} needs root: run this command with sudo, or in a root shell");
    }
    Ok(())
}

/// A command whose root is `root` and which has /proc there, as everything that starts programs
/// gives them. For root only; gone with the command.
pub(crate) fn chroot(root: &Path) -> Command {
    let script = "mount -t proc proc \"$1/proc\" && exec chroot \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(root);
    command
}

/// First line a tool prints when asked for its version, or `None` when it is not there.
pub(crate) fn version(command: &mut Command) -> Option<String> {
    let text = output(command).ok()?;
    Some(text.lines().next().unwrap_or_default().to_owned())
}

/// Writes a file only when its content changes, so that cargo's and our own freshness checks by
/// time stay true.
pub(crate) fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    fs::write(path, content).with_context(|| format!("{}: cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::cargo;
    use crate::paths::WorkspacePaths;

    #[test]
    fn our_cargo_is_told_nothing_of_this_package() {
        // Cargo, which runs this, has set them.
        let paths = WorkspacePaths::find().unwrap();
        let command = cargo(&paths);
        let removed = |name: &str| {
            std::env::var_os(name).is_some()
                && command.get_envs().any(|set| set == (OsStr::new(name), None))
        };
        assert!(
            removed("CARGO_MANIFEST_DIR")
                && removed("CARGO_PKG_NAME")
                && removed("CARGO_PKG_VERSION_PRE")
        );
        assert!(
            command.get_envs().all(|(name, _)| name != "CARGO_HOME" && name != "CARGO_TARGET_DIR")
        );
    }
}
