//! `cargo xtask collector`: an OpenTelemetry Collector with the profiles signal, built by its own builder, and the tests that send to it.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    build,
    exec::{Steps, need_root, output, run},
    paths::Paths,
};

const VERSION: &str = "v0.160.0";

/// Builds a Collector unless it is there, and runs the tests that are ignored without one.
pub(crate) fn collector(paths: &Paths, steps: &Steps) -> Result<()> {
    need_root("recording")?;
    let program = install(paths, steps)?;
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    steps.step("tests with a Collector");
    run(Command::new("cargo")
        .args(["test", "--package", "system-tests", "otlp::", "--", "--ignored", "--test-threads=1"])
        .current_dir(&paths.root)
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim())
        .env("PERFUSION_BIN", perfusion)
        .env("PERFUSION_OTELCOL", program)
        .env("PERFUSION_TESTS_REQUIRED", "1"))
}

fn install(paths: &Paths, steps: &Steps) -> Result<PathBuf> {
    let folder = paths.toolchain.join("otelcol");
    let program = folder.join("build/otelcol");
    if program.exists() {
        return Ok(program);
    }
    steps.step(&format!("building a Collector {VERSION} (2 minutes)"));
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let module = |path: &str| format!("[{{ gomod: go.opentelemetry.io/collector/{path} {VERSION} }}]");
    let config = format!(
        "dist: {{ name: otelcol, output_path: ./build, version: {} }}\nreceivers: {}\nexporters: {}\n",
        VERSION.trim_start_matches('v'),
        module("receiver/otlpreceiver"),
        module("exporter/otlphttpexporter"),
    );
    fs::write(folder.join("builder.yaml"), config).context("the Collector's builder.yaml")?;
    let builder = format!("go.opentelemetry.io/collector/cmd/builder@{VERSION}");
    output(Command::new("go").args(["install", &builder]).env("GOBIN", &folder))?;
    output(Command::new(folder.join("builder")).args(["--config", "builder.yaml"]).current_dir(&folder))?;
    Ok(program)
}
