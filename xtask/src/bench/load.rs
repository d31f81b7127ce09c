//! The app that is profiled while we measure: `xtask/csharp/Load.cs`, on .NET 9 unless a figure is
//! about all.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use super::listening::Listener;
use crate::{exec::output, paths::WorkspacePaths};

/// The compiled app, for all runtimes.
pub(super) fn dll(paths: &WorkspacePaths) -> PathBuf {
    paths.target.join("bench/load.dll")
}

/// Compiles the app.
pub(super) fn compile(paths: &WorkspacePaths) -> Result<()> {
    fs::create_dir_all(paths.target.join("bench")).context("target/bench: cannot be made")?;
    output(Command::new(paths.csc()).arg(dll(paths)).arg(paths.root.join("xtask/csharp/Load.cs")))?;
    Ok(())
}

/// Lets the app run: time is what is measured against here, not a condition that is waited for.
pub(super) fn pass(seconds: f64) {
    thread::sleep(Duration::from_secs_f64(seconds));
}

/// Time that all threads of a process have been on a CPU, those that have ended included.
pub(super) fn cpu_seconds(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    // proc(5): utime and stime are fields 14 and 15; field 3 follows the name in parentheses, which
    // may hold anything.
    let fields: Vec<&str> =
        text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 =
        fields.iter().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    let per_second: f64 = output(Command::new("getconf").arg("CLK_TCK"))?
        .trim()
        .parse()
        .context("getconf CLK_TCK")?;
    Ok(ticks / per_second)
}

/// Milliseconds that the threads a process has now have been on a CPU: the first number of a
/// thread's schedstat.
pub(super) fn threads_cpu_milliseconds(pid: u32) -> Result<f64> {
    let mut nanoseconds = 0.0;
    let folder = format!("/proc/{pid}/task");
    for entry in fs::read_dir(&folder).with_context(|| folder.clone())? {
        // A thread may have ended meanwhile.
        let text = entry.and_then(|entry| fs::read_to_string(entry.path().join("schedstat")));
        let first = text.ok().and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
        nanoseconds += first.unwrap_or_default();
    }
    Ok(nanoseconds / 1e6)
}

fn program(paths: &WorkspacePaths, runtime: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(paths.dotnet(runtime));
    command.arg(dll(paths)).args(arguments);
    command
}

/// The running app; ends with this value.
pub(super) struct App {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl App {
    /// Starts it to work and to switch threads.
    pub(super) fn start(paths: &WorkspacePaths) -> Result<App> {
        App::start_with(paths, &[])
    }

    /// Starts it to do what the arguments say, with a profiler in it that can listen.
    pub(super) fn start_with_listener(
        paths: &WorkspacePaths,
        runtime: &str,
        arguments: &[&str],
        listener: &Listener,
    ) -> Result<App> {
        App::started(listener.load_into(&mut program(paths, runtime, arguments), runtime))
    }

    /// Starts it to allocate a lot.
    pub(super) fn start_allocating(paths: &WorkspacePaths, runtime: &str) -> Result<App> {
        App::start_on(paths, runtime, &["allocate"])
    }

    /// Starts it to work only: every CPU is busy with it, and it hardly switches.
    pub(super) fn start_working(paths: &WorkspacePaths) -> Result<App> {
        App::start_with(paths, &["work"])
    }

    /// Starts it to work through more memory than a CPU's own caches have.
    pub(super) fn start_streaming(paths: &WorkspacePaths, megabytes: u32) -> Result<App> {
        App::start_with(paths, &["stream", &megabytes.to_string()])
    }

    /// Starts it to switch threads so many times a second, and nothing else.
    pub(super) fn start_switching(paths: &WorkspacePaths, per_second: u32) -> Result<App> {
        App::start_with(paths, &["switch", &per_second.to_string()])
    }

    fn start_with(paths: &WorkspacePaths, arguments: &[&str]) -> Result<App> {
        App::start_on(paths, "9", arguments)
    }

    fn start_on(paths: &WorkspacePaths, runtime: &str, arguments: &[&str]) -> Result<App> {
        App::started(&mut program(paths, runtime, arguments))
    }

    /// Returns once its threads run.
    fn started(command: &mut Command) -> Result<App> {
        let mut app = App::begin(command)?;
        app.line()?;
        Ok(app)
    }

    /// Runs a command that is or becomes the app; it has said nothing yet.
    pub(super) fn begin(command: &mut Command) -> Result<App> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the load app did not start")?;
        let input = child.stdin.take().context("the load app has no standard input")?;
        let output =
            BufReader::new(child.stdout.take().context("the load app has no standard output")?);
        Ok(App { child, input, output })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Operations over the next `seconds`: per second, and per second of CPU time that the app got.
    pub(super) fn rates(&mut self, seconds: f64) -> Result<[f64; 2]> {
        self.rates_of(self.pid(), seconds)
    }

    /// The same of the process `pid`, where another one has started it.
    pub(super) fn rates_of(&mut self, pid: u32, seconds: f64) -> Result<[f64; 2]> {
        let cpu_before = cpu_seconds(pid)?;
        let (operations_before, time_before) = self.progress()?;
        pass(seconds);
        let (operations_after, time_after) = self.progress()?;
        let cpu = cpu_seconds(pid)? - cpu_before;
        let operations = operations_after - operations_before;
        Ok([operations / (time_after - time_before) * 1e9, operations / cpu])
    }

    /// Operations so far, and when that was in nanoseconds.
    fn progress(&mut self) -> Result<(f64, f64)> {
        let line = self.ask("")?;
        let numbers: Vec<f64> =
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers.as_slice() {
            [operations, time] => Ok((*operations, *time)),
            _ => bail!("the load app: expected \"OPERATIONS NANOSECONDS\", found {line:?}"),
        }
    }

    /// Its answer to a line.
    pub(super) fn ask(&mut self, what: &str) -> Result<String> {
        writeln!(self.input, "{what}").context("asking the load app")?;
        self.line()
    }

    /// Has it end, and whoever started it.
    pub(super) fn end(mut self) -> Result<()> {
        writeln!(self.input, "exit").context("asking the load app")?;
        let status = self.child.wait().context("waiting for the load app")?;
        if !status.success() {
            bail!("the load app: expected exit code 0, found {status}");
        }
        Ok(())
    }

    /// The next line it says, empty when it has ended.
    pub(super) fn line(&mut self) -> Result<String> {
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
