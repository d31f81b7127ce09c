//! `cargo xtask collector`: an OpenTelemetry Collector with the profiles signal, built by its own
//! builder, and the tests that send to it.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    exec::{StepLog, need_root, output},
    paths::WorkspacePaths,
    setup::go,
    test,
};

const VERSION: &str = "v0.160.0";
const RECEIVER: &str = "go.opentelemetry.io/collector/receiver/otlpreceiver";
const EXPORTER: &str = "go.opentelemetry.io/collector/exporter/otlphttpexporter";

/// Builds a Collector unless it is there, and runs the tests that are ignored without one.
pub(crate) fn collector(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    need_root("recording")?;
    let program = install(paths, steps)?;
    test::with_servers(paths, steps, ("a Collector", "otlp::"), &[("PERFUSION_OTELCOL", &program)])
}

fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let folder = paths.toolchain.join("otelcol");
    let program = folder.join("build/otelcol");
    if go::has(&program, RECEIVER, VERSION) {
        return Ok(program);
    }
    steps.step(&format!("building a Collector {VERSION} (2 minutes)"));
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let module = |path: &str| format!("[{{ gomod: {path} {VERSION} }}]");
    let config = format!(
        "dist: {{ name: otelcol, output_path: ./build, version: {} }}\nreceivers: {}\nexporters: \
         {}\n",
        VERSION.trim_start_matches('v'),
        module(RECEIVER),
        module(EXPORTER),
    );
    fs::write(folder.join("builder.yaml"), config).context("the Collector's builder.yaml")?;
    let builder = format!("go.opentelemetry.io/collector/cmd/builder@{VERSION}");
    output(Command::new("go").args(["install", &builder]).env("GOBIN", &folder))?;
    output(
        Command::new(folder.join("builder"))
            .args(["--config", "builder.yaml"])
            .current_dir(&folder),
    )?;
    Ok(program)
}
