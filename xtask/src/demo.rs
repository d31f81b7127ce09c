//! `cargo xtask run`: everything from a clean checkout to a flame graph of a running .NET program.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    build,
    exec::{StepLog, need_root, output, run as run_command, write_if_changed},
    paths::WorkspacePaths,
    setup::Dotnet,
};

/// Heading and sample type of the tables shown at the end.
const TABLES: [(&str, &str); 4] = [
    ("CPU time", "cpu"),
    ("waiting (blocked)", "blocked"),
    ("allocated bytes", "alloc_space"),
    ("live bytes", "inuse_space"),
];

pub(crate) fn run(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    need_root("profiling (eBPF programs, perf events)")?;
    let (perfusion, dotnet) = build::for_demo(paths, steps)?;
    let folder = paths.target.join("demo");
    steps.step("compiling the demo app");
    let app = compile(paths, &dotnet, &folder.join("app").join(dotnet.id()))?;

    steps.step("starting the demo app");
    let demo = Demo::start(&dotnet, &app)?;
    steps.step(&format!("profiling process {} for 10 s", demo.child.id()));
    let profile = folder.join("profile.pb.gz");
    run_command(
        Command::new(&perfusion)
            .args([
                "record",
                "--duration",
                "10s",
                "--pid",
                &demo.child.id().to_string(),
                "--output",
            ])
            .arg(&profile),
    )?;
    demo.end()?;

    steps.step("writing the flame graph");
    let flame = folder.join("flame.html");
    run_command(
        Command::new(&perfusion)
            .arg("report")
            .arg(&profile)
            .args(["--format", "flame", "--output"])
            .arg(&flame),
    )?;
    for (heading, sample_type) in TABLES {
        println!("\n== Top 10 by {heading}");
        run_command(Command::new(&perfusion).arg("report").arg(&profile).args([
            "--type",
            sample_type,
            "--rows",
            "10",
        ]))?;
    }
    println!();
    steps.step("done");
    println!("profile:     {}", profile.display());
    println!("flame graph: {}", flame.display());
    Ok(())
}

/// Compiles the app and its native half, each only when its source changed; returns the app.
fn compile(paths: &WorkspacePaths, dotnet: &Dotnet, folder: &Path) -> Result<PathBuf> {
    let workloads = paths.root.join("tests/workloads");
    let app = folder.join("demo.dll");
    when_changed(&workloads.join("dotnet/demo/demo.cs"), &app, folder, |source| {
        dotnet.compile(source, &app)
    })?;
    let native = folder.join("libshop_native.so");
    when_changed(&workloads.join("native/shop_native.c"), &native, folder, |source| {
        output(
            Command::new("gcc")
                .args(["-O2", "-fomit-frame-pointer", "-g", "-shared", "-fPIC", "-o"])
                .arg(&native)
                .arg(source),
        )
        .map(drop)
    })?;
    Ok(app)
}

/// Runs `compile` on a copy of the source below `folder`, unless the product of the same text is
/// there.
fn when_changed(
    source: &Path,
    product: &Path,
    folder: &Path,
    compile: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let text = fs::read(source).with_context(|| format!("{}: cannot be read", source.display()))?;
    let copy = folder.join(source.file_name().unwrap_or_default());
    if product.exists() && fs::read(&copy).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if product.exists() {
        fs::remove_file(product)
            .with_context(|| format!("{}: cannot be removed", product.display()))?;
    }
    write_if_changed(&copy, &text)?;
    compile(&copy)
}

/// The running app; ends with this value.
struct Demo {
    child: Child,
    /// Kept open: the app may print more.
    _stdout: Option<BufReader<ChildStdout>>,
}

impl Demo {
    /// Starts it and waits for its first line, printed once its threads run.
    fn start(dotnet: &Dotnet, app: &Path) -> Result<Demo> {
        let child = dotnet
            .command()
            .arg(app)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{}: did not start", app.display()))?;
        let mut demo = Demo { child, _stdout: None };
        let stdout = demo.child.stdout.take().context("the demo app has no standard output")?;
        let mut stdout = BufReader::new(stdout);
        let mut line = String::new();
        stdout.read_line(&mut line).context("the demo app's first line")?;
        print!("{line}");
        demo._stdout = Some(stdout);
        Ok(demo)
    }

    /// Ends it; fails when it has ended by itself, for then the recording is not one of 10 s.
    fn end(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait().context("asking after the demo app")? {
            bail!(
                "the demo app: expected it to run on, found that it ended during the recording: \
                 {status}"
            );
        }
        Ok(())
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // It may have ended by itself; nothing is lost then.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
