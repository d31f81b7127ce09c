//! Workloads: compiled once per source text, started, spoken to, and killed when dropped.
//!
//! A workload is `workloads/dotnet/NAME/NAME.cs` compiled with `workloads/dotnet/Workload.cs` (the
//! demo stands alone). It prints `ready {json}` when its threads run, and on the line `stop` (or
//! the end) of its stdin `truth {json}`: what it knows about itself, against which its profile is
//! judged.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash as _, Hasher as _};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use crate::environment::{
    Runtime, cache_dir, csc, musl_libraries, published_source, runtime_async_compiler, sources,
};
use crate::single_file::Packing;
use crate::{single_file, wait};

/// Longest wait for a workload to say that it runs: a cold .NET start on a slow machine that is
/// busy with other things.
const READY_DEADLINE: Duration = Duration::from_secs(120);
/// Longest wait for a workload to stop and tell its truth.
const STOP_DEADLINE: Duration = Duration::from_secs(120);

/// How the names of single-file programs begin.
pub const SINGLE_FILE: &str = "single-file-";

/// A compiled program and how to start it.
#[derive(Clone, Debug)]
pub struct Workload {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl Workload {
    /// The C# workload `name` on `runtime`, with the C libraries `native` (sources in
    /// `workloads/native/`) beside it. In one file where that is all there is of a runtime.
    ///
    /// # Errors
    /// When a compiler fails; its output is in the error.
    pub fn dotnet(runtime: Runtime, name: &str, native: &[&str]) -> anyhow::Result<Self> {
        if runtime == Runtime::Net10Musl {
            ensure!(native.is_empty(), "no C libraries beside single-file programs");
            return Self::single_file(runtime, name, Packing::Plain);
        }
        let dll = compile_dotnet(name, native, runtime.on_musl())?;
        let program = runtime.dotnet().with_context(|| format!("no {runtime}"))?;
        Ok(Self { program, args: vec![dll.into_os_string()], env: Vec::new() })
    }

    /// A C# workload whose source a test has made, on `runtime`.
    ///
    /// # Errors
    /// When the compiler fails.
    pub fn made(runtime: Runtime, name: &str, source: &str) -> anyhow::Result<Self> {
        let file = cached(name, hash_of([], source)?, &format!("{name}.cs"), |dir| {
            Ok(fs::write(dir.join(format!("{name}.cs")), source)?)
        })?;
        let dll = compile_sources(name, &[file, sources().join("workloads/dotnet/Workload.cs")])?;
        let program = runtime.dotnet().with_context(|| format!("no {runtime}"))?;
        Ok(Self { program, args: vec![dll.into_os_string()], env: Vec::new() })
    }

    /// The C# workload `name` and `runtime` in one file.
    ///
    /// # Errors
    /// When the compiler fails, or what it is made from is not as expected.
    pub fn single_file(runtime: Runtime, name: &str, packing: Packing) -> anyhow::Result<Self> {
        Self::in_one_file(runtime, name, &compile_dotnet(name, &[], runtime.on_musl())?, packing)
    }

    /// The program `Work`, which an SDK has published in other ways too
    /// ([`published`](crate::environment::published)), for
    /// `runtime` as it is installed, or with the runtime in one file.
    ///
    /// # Errors
    /// When the compiler fails, or something is not there.
    pub fn work(runtime: Runtime, packing: Option<Packing>) -> anyhow::Result<Self> {
        const USINGS: &str = "global using System; global using System.Collections.Generic; \
             global using System.Linq; global using System.Threading; \
             global using System.Threading.Tasks;\n";
        let source = published_source().context("no source of the published programs")?;
        let usings = cached("usings", hash_of([], USINGS)?, "Usings.cs", |dir| {
            Ok(fs::write(dir.join("Usings.cs"), USINGS)?)
        })?;
        let dll = compile_anew("Work", runtime, &[source, usings], &["-nullable:enable"])?;
        if let Some(packing) = packing {
            return Self::in_one_file(runtime, "Work", &dll, packing);
        }
        let program = runtime.dotnet().with_context(|| format!("no {runtime}"))?;
        Ok(Self { program, args: vec![dll.into_os_string()], env: Vec::new() })
    }

    fn in_one_file(
        runtime: Runtime,
        name: &str,
        dll: &Path,
        packing: Packing,
    ) -> anyhow::Result<Self> {
        let donor = runtime
            .single_file()
            .with_context(|| format!("no single-file program of {runtime}"))?;
        let (framework, libraries) = if runtime.on_musl() {
            (None, Some(musl_libraries().context("no libraries for musl")?))
        } else {
            (Some(runtime.framework().with_context(|| format!("no {runtime}"))?), None)
        };
        let hash = hash_of(
            [&dll.to_owned()],
            &format!(
                "{framework:?} {libraries:?} {:?} {packing:?}",
                fs::metadata(&donor)?.modified()?
            ),
        )?;
        // The runtime's native frames are in the program's file: its name says that it is one of
        // these.
        let output = format!("{SINGLE_FILE}{name}");
        let program = cached(&output, hash, &output, |dir| {
            single_file::bundle(
                &donor,
                framework.as_deref(),
                libraries.as_deref(),
                runtime.major(),
                dll,
                packing,
                &dir.join(&output),
            )
        })?;
        Ok(Self { program, args: Vec::new(), env: Vec::new() })
    }

    /// The C# workload `name` on .NET 11, whose async methods are the runtime's own: they have no
    /// state machines.
    ///
    /// # Errors
    /// When the compiler fails.
    pub fn runtime_async(name: &str) -> anyhow::Result<Self> {
        let runtime = Runtime::Net11;
        let program = runtime.dotnet().context("no .NET 11")?;
        let folder = sources().join("workloads/dotnet");
        let inputs = [folder.join(name).join(format!("{name}.cs")), folder.join("Workload.cs")];
        let dll = compile_anew(name, runtime, &inputs, &["-features:runtime-async=on"])?;
        Ok(Self { program, args: vec![dll.into_os_string()], env: Vec::new() })
    }

    /// The C program `workloads/native/NAME.c`, built with `flags`.
    ///
    /// # Errors
    /// When the compiler fails.
    pub fn native(name: &str, flags: &[&str]) -> anyhow::Result<Self> {
        Ok(Self { program: compile_c(name, name, flags)?, args: Vec::new(), env: Vec::new() })
    }

    /// The program `workloads/native/FILE`, built by the compiler its language needs.
    ///
    /// # Errors
    /// When the compiler fails.
    pub fn compiled(compiler: Compiler, file: &str, flags: &[&str]) -> anyhow::Result<Self> {
        Ok(Self { program: compile(compiler, file, flags)?, args: Vec::new(), env: Vec::new() })
    }

    /// Any program.
    pub fn program(path: impl Into<PathBuf>) -> Self {
        Self { program: path.into(), args: Vec::new(), env: Vec::new() }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Program and arguments, as `perfusion record --` wants them.
    pub fn command_line(&self) -> Vec<OsString> {
        let mut line = vec![self.program.clone().into_os_string()];
        line.extend(self.args.iter().cloned());
        line
    }

    /// Variables it is to have beside those of this process.
    pub fn environment(&self) -> &[(OsString, OsString)] {
        &self.env
    }

    /// A command that runs it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Starts it and waits for its `ready` line.
    ///
    /// # Errors
    /// When it cannot be started, ends or stays silent.
    pub fn start(&self) -> anyhow::Result<App> {
        let mut app = self.spawn()?;
        app.await_ready()?;
        Ok(app)
    }

    /// Starts it without waiting for anything.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self) -> anyhow::Result<App> {
        let mut child = self
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("stdout was not piped")?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(App { child, stdin, lines, ready: Value::Null })
    }
}

/// Who builds a native program from one source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// `gcc`, against the system's C library.
    C,
    /// `g++`.
    Cpp,
    /// `musl-gcc`.
    MuslC,
    /// `rustc`.
    Rust,
    /// `go build`.
    Go,
}

impl Compiler {
    /// The program to run.
    pub fn program(self) -> &'static str {
        match self {
            Self::C => "gcc",
            Self::Cpp => "g++",
            Self::MuslC => "musl-gcc",
            Self::Rust => "rustc",
            Self::Go => "go",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::C | Self::MuslC => &["-Wall", "-Werror", "-pthread"],
            Self::Cpp => &["-Wall", "-Werror", "-pthread", "-std=c++17"],
            Self::Rust => &["--edition", "2024"],
            Self::Go => &["build"],
        }
    }
}

/// What a workload said about itself at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// Bytes allocated by all threads since the process began.
    pub allocated_bytes: f64,
    /// CLOCK_MONOTONIC.
    pub wall_ns: f64,
}

impl Mark {
    /// Bytes allocated a second between two marks.
    pub fn bytes_per_second(self, later: Self) -> f64 {
        (later.allocated_bytes - self.allocated_bytes) / (later.wall_ns - self.wall_ns) * 1e9
    }
}

/// A running workload. Dropping it kills it.
#[derive(Debug)]
pub struct App {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    ready: Value,
}

impl App {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said in its `ready` line, such as the OS ids of its threads.
    pub fn ready(&self) -> &Value {
        &self.ready
    }

    /// The OS thread id it gave in its `ready` line under `name`.
    ///
    /// # Panics
    /// When it gave none: the workload is wrong then.
    pub fn thread(&self, name: &str) -> u32 {
        let id = self.ready.get(name).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
        id.unwrap_or_else(|| panic_missing(name, &self.ready))
    }

    /// Waits for the line `ready {json}`.
    ///
    /// # Errors
    /// When it ends or stays silent.
    pub fn await_ready(&mut self) -> anyhow::Result<()> {
        self.ready = self.await_line("ready", READY_DEADLINE)?;
        Ok(())
    }

    /// Asks it to stop and returns its `truth` line; it has ended with exit code 0 then.
    ///
    /// # Errors
    /// When it does not answer or ends badly: a workload that fails under the profiler is the worst
    /// finding there is.
    pub fn stop(mut self) -> anyhow::Result<Value> {
        self.send_stop();
        let truth = self.await_line("truth", STOP_DEADLINE)?;
        let status = wait::wait_for_exit(&mut self.child, STOP_DEADLINE)?;
        ensure!(status.success(), "the workload ended with {status}");
        Ok(truth)
    }

    /// How far it has come: bytes it has allocated since its start, and its clock.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn mark(&mut self) -> anyhow::Result<Mark> {
        self.send("mark")?;
        let answer = self.await_line("mark", STOP_DEADLINE)?;
        let number = |name: &str| {
            answer
                .get(name)
                .and_then(Value::as_f64)
                .with_context(|| format!("no {name} in {answer}"))
        };
        Ok(Mark { allocated_bytes: number("allocated_bytes")?, wall_ns: number("wall_ns")? })
    }

    /// Has it do what its workload calls `name`, and waits until it has.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn perform(&mut self, name: &str) -> anyhow::Result<()> {
        self.send(name)?;
        self.await_text(&format!("done {name}"), STOP_DEADLINE).map(drop)
    }

    /// Writes a line and waits for the line that begins with `word`; the rest of that as JSON.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn ask(&mut self, line: &str, word: &str) -> anyhow::Result<Value> {
        self.send(line)?;
        self.await_line(word, STOP_DEADLINE)
    }

    /// Makes it abort from inside (`Environment.FailFast`: SIGABRT by its own hand).
    ///
    /// # Errors
    /// When it is gone.
    pub fn abort(&mut self) -> anyhow::Result<()> {
        self.send("abort")
    }

    /// Writes a line to which there is no answer.
    ///
    /// # Errors
    /// When it is gone.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        let stdin = self.stdin.as_mut().context("it was stopped")?;
        stdin.write_all(format!("{line}\n").as_bytes()).context("it does not listen")
    }

    /// Writes the line `stop` and closes its stdin.
    pub fn send_stop(&mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // It may be dead already; then its truth line will be missed.
            stdin.write_all(b"stop\n").ok();
        }
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_exit(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        wait::wait_for_exit(&mut self.child, deadline)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).with_context(|| format!("kill {}", self.pid()))
    }

    /// Fails unless it still runs.
    ///
    /// # Errors
    /// Its exit status.
    pub fn ensure_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the workload died: {status}, signal {:?}", status.signal()),
        }
    }

    /// The next line on stdout that starts with `word`; the rest of it as JSON.
    ///
    /// # Errors
    /// When none comes, or it is no JSON.
    pub fn await_line(&mut self, word: &str, deadline: Duration) -> anyhow::Result<Value> {
        let rest = self.await_text(word, deadline)?;
        serde_json::from_str(&rest).with_context(|| format!("not JSON after `{word}`: {rest}"))
    }

    /// What follows `word` on the next line on stdout that starts with it.
    ///
    /// # Errors
    /// When none comes.
    pub fn await_text(&mut self, word: &str, deadline: Duration) -> anyhow::Result<String> {
        let end = Instant::now() + deadline;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    let Some(rest) = line.strip_prefix(word) else { continue };
                    return Ok(rest.trim().to_owned());
                }
                Err(RecvTimeoutError::Timeout) => bail!("no line `{word}` within {deadline:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = wait::wait_for_exit(&mut self.child, STOP_DEADLINE)?;
                    bail!("the workload ended ({status}) before it said `{word}`");
                }
            }
        }
    }
}

#[allow(clippy::panic, reason = "called by tests only; a missing name is a bug of the workload")]
fn panic_missing(name: &str, ready: &Value) -> u32 {
    panic!("the workload's ready line has no thread {name}: {ready}")
}

impl Drop for App {
    fn drop(&mut self) {
        // Already dead is fine.
        wait::kill(&mut self.child).ok();
    }
}

/// Compiles `workloads/dotnet/NAME/NAME.cs`; returns the path of the assembly. C libraries beside
/// it are for musl or for the system's C library.
fn compile_dotnet(name: &str, native: &[&str], on_musl: bool) -> anyhow::Result<PathBuf> {
    let workloads = sources().join("workloads");
    let own = workloads.join("dotnet").join(name).join(format!("{name}.cs"));
    let mut inputs = vec![own];
    if name != "demo" {
        inputs.push(workloads.join("dotnet/Workload.cs"));
    }
    let native_sources: Vec<PathBuf> = native
        .iter()
        .map(|library| workloads.join("native").join(format!("{library}.c")))
        .collect();
    let of_c = if on_musl { Compiler::MuslC } else { Compiler::C };
    let flags = if native.is_empty() { "" } else { of_c.program() };
    let hash = hash_of(inputs.iter().chain(&native_sources), flags)?;
    cached(name, hash, &format!("{name}.dll"), |dir| {
        let compiler = csc().context("no C# compiler")?;
        run_compiler(Command::new(compiler).arg(dir.join(format!("{name}.dll"))).args(&inputs))?;
        for library in native {
            let source = workloads.join("native").join(format!("{library}.c"));
            // No frame pointers: only unwind tables lead through this code, as through most of a
            // distribution's.
            let flags =
                ["-shared", "-fPIC", "-O2", "-fomit-frame-pointer", "-Wall", "-Werror", "-o"];
            run_compiler(
                Command::new(of_c.program())
                    .args(flags)
                    .arg(dir.join(format!("lib{library}.so")))
                    .arg(source),
            )?;
        }
        Ok(())
    })
}

/// Where the C and assembler sources are.
pub fn sources_of_native() -> PathBuf {
    sources().join("workloads/native")
}

/// Compiles `workloads/native/NAME.c` with `flags` to a file called `output`.
///
/// # Errors
/// When the compiler fails.
pub fn compile_c(name: &str, output: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    let source = sources().join("workloads/native").join(format!("{name}.c"));
    let hash = hash_of([&source], &flags.join(" "))?;
    cached(name, hash, output, |dir| {
        run_compiler(
            Command::new("gcc")
                .args(["-O2", "-Wall", "-Werror"])
                .arg(&source)
                .args(flags)
                .arg("-o")
                .arg(dir.join(output)),
        )
    })
}

/// Makes a 32-bit program of `workloads/native/NAME.S`.
///
/// # Errors
/// When the assembler or the linker fails.
pub fn assemble_32_bit(name: &str) -> anyhow::Result<PathBuf> {
    let source = sources_of_native().join(format!("{name}.S"));
    cached(name, hash_of([&source], "")?, name, |dir| {
        let object = dir.join(format!("{name}.o"));
        run_compiler(Command::new("as").args(["--32", "-o"]).arg(&object).arg(&source))?;
        run_compiler(
            Command::new("ld").args(["-m", "elf_i386", "-o"]).arg(dir.join(name)).arg(&object),
        )
    })
}

/// Compiles `workloads/native/FILE` with `flags`.
fn compile(compiler: Compiler, file: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    let source = sources_of_native().join(file);
    let hash = hash_of([&source], &format!("{} {}", compiler.program(), flags.join(" ")))?;
    let output = file.split('.').next().unwrap_or(file);
    cached(output, hash, output, |dir| {
        let mut command = Command::new(compiler.program());
        command.args(compiler.arguments()).args(flags).arg("-o").arg(dir.join(output)).arg(&source);
        run_compiler(&mut command)
    })
}

/// Compiles these C# files; returns the path of the assembly.
fn compile_sources(name: &str, inputs: &[PathBuf]) -> anyhow::Result<PathBuf> {
    cached(name, hash_of(inputs, "")?, &format!("{name}.dll"), |dir| {
        let compiler = csc().context("no C# compiler")?;
        run_compiler(Command::new(compiler).arg(dir.join(format!("{name}.dll"))).args(inputs))
    })
}

/// Compiles these files for `runtime` with the newest compiler; returns the path of the assembly.
fn compile_anew(
    name: &str,
    runtime: Runtime,
    inputs: &[PathBuf],
    flags: &[&str],
) -> anyhow::Result<PathBuf> {
    let newest = Runtime::Net11.dotnet().context("no .NET 11")?;
    let compiler = runtime_async_compiler().context("no compiler of runtime async")?;
    let framework = runtime.framework().with_context(|| format!("no {runtime}"))?;
    let hash = hash_of(inputs, &format!("{} {}", framework.display(), flags.join(" ")))?;
    cached(name, hash, &format!("{name}.dll"), |dir| {
        let mut command = Command::new(&newest);
        command.arg(&compiler).args([
            "-noconfig",
            "-nostdlib",
            "-nologo",
            "-optimize+",
            "-unsafe",
            "-langversion:preview",
            "-debug:portable",
        ]);
        for file in fs::read_dir(&framework)? {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "dll") {
                command.arg(format!("-r:{}", path.display()));
            }
        }
        command.arg(format!("-out:{}", dir.join(format!("{name}.dll")).display()));
        run_compiler(command.args(flags).args(inputs))?;
        let major = runtime.major();
        let config = json!({ "runtimeOptions": {
            "tfm": format!("net{major}.0"),
            "framework": { "name": "Microsoft.NETCore.App", "version": format!("{major}.0.0") },
            "configProperties": { "System.Globalization.Invariant": true },
        } });
        fs::write(dir.join(format!("{name}.runtimeconfig.json")), config.to_string())?;
        Ok(())
    })
}

fn hash_of<'a>(files: impl IntoIterator<Item = &'a PathBuf>, flags: &str) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    flags.hash(&mut hasher);
    for file in files {
        fs::read(file)
            .with_context(|| format!("cannot read {}", file.display()))?
            .hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Copies an executable, so that everybody may run it. By a process of its own: one that this
/// process starts meanwhile would inherit the file open for writing, and the kernel starts no
/// program that is (`ETXTBSY`).
///
/// # Errors
/// When it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) -> anyhow::Result<()> {
    let output = Command::new("install").arg("--mode=755").args([from, to]).output()?;
    ensure!(output.status.success(), "install: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The file `output` of the build `name`-`hash`, made by `build` in a fresh directory that gets its
/// final name when complete.
fn cached(
    name: &str,
    hash: u64,
    output: &str,
    build: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let root = cache_dir();
    let dir = root.join(format!("{name}-{hash:016x}"));
    if !dir.join(output).exists() {
        fs::create_dir_all(&root)?;
        let fresh = tempfile::Builder::new().prefix(name).tempdir_in(&root)?;
        build(fresh.path())?;
        let fresh = fresh.keep();
        if fs::rename(&fresh, &dir).is_err() {
            // Another run was quicker; its result is the same.
            fs::remove_dir_all(&fresh)?;
        }
    }
    Ok(dir.canonicalize()?.join(output))
}

fn run_compiler(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
