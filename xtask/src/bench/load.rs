//! The app that is profiled while we measure: `xtask/csharp/Load.cs` on .NET 9.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{exec::output, paths::Paths};

fn app(paths: &Paths) -> PathBuf {
    paths.target.join("bench/load.dll")
}

/// Compiles the app.
pub(super) fn compile(paths: &Paths) -> Result<()> {
    let app = app(paths);
    fs::create_dir_all(paths.target.join("bench")).context("target/bench: cannot be made")?;
    output(Command::new(paths.csc()).arg(&app).arg(paths.root.join("xtask/csharp/Load.cs")))?;
    Ok(())
}

/// Lets the app run: time is what is measured against here, not a condition that is waited for.
pub(super) fn pass(seconds: f64) {
    thread::sleep(Duration::from_secs_f64(seconds));
}

/// The running app; ends with this value.
pub(super) struct App {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl App {
    /// Returns once its threads run.
    pub(super) fn start(paths: &Paths) -> Result<App> {
        let mut child = Command::new(paths.dotnet("9"))
            .arg(app(paths))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the load app did not start")?;
        let input = child.stdin.take().context("the load app has no standard input")?;
        let output = BufReader::new(child.stdout.take().context("the load app has no standard output")?);
        let mut app = App { child, input, output };
        app.line()?;
        Ok(app)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Operations per second over the next `seconds`.
    pub(super) fn rate(&mut self, seconds: f64) -> Result<f64> {
        let (operations_before, time_before) = self.progress()?;
        pass(seconds);
        let (operations_after, time_after) = self.progress()?;
        Ok((operations_after - operations_before) / (time_after - time_before) * 1e9)
    }

    /// Operations so far, and when that was in nanoseconds.
    fn progress(&mut self) -> Result<(f64, f64)> {
        self.input.write_all(b"\n").context("asking the load app")?;
        let line = self.line()?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers.as_slice() {
            [operations, time] => Ok((*operations, *time)),
            _ => anyhow::bail!("the load app: expected \"OPERATIONS NANOSECONDS\", found {line:?}"),
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("answer of the load app")?;
        Ok(line)
    }
}

impl Drop for App {
    fn drop(&mut self) {
        // It may have ended by itself; nothing is lost then.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
