//! `cargo xtask ci`: all that must hold before a change lands. CI adds nothing of its own.

use std::process::Command;

use anyhow::Result;

use crate::{
    build::{bpf_cargo, bpf_clippy},
    exec::{Steps, run},
    helm, image, package,
    paths::Paths,
    setup::{self, debian},
    test, tidy,
};

pub(crate) fn ci(paths: &Paths, steps: &Steps) -> Result<()> {
    steps.step("format");
    run(cargo(paths).args(["fmt", "--all", "--check"]))?;
    tidy::tidy(paths, steps, false)?;
    let ebpf = setup::build_tools(paths, steps)?;
    debian::install(steps, &[("rust-web-clippy", "lints of the eBPF crate")])?;

    steps.step("lints");
    run(cargo(paths).args([
        "clippy",
        "--workspace",
        "--exclude",
        "ebpf-probes",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    steps.step("lints of the eBPF crate");
    run(&mut bpf_clippy(paths, &ebpf, "ebpf-probes"))?;

    steps.step("documentation");
    run(cargo(paths)
        .args(["doc", "--workspace", "--exclude", "ebpf-probes", "--no-deps", "--document-private-items"])
        // Private items are documented too, so a link to one leads somewhere.
        .env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links"))?;

    // That target has `core` and nothing else: no std, no alloc. `profiler-protocol` wants more of atomics than it has; the shim's build
    // links it without std.
    steps.step("ebpf-common without std");
    run(&mut bpf_cargo(paths, &ebpf, "check", "ebpf-common"))?;

    helm::lint(paths, steps, false)?;
    package::check_unit(paths, steps)?;
    image::image(paths, steps)?;
    // Here everything a test needs is installed: one that skips itself is a failure.
    // The fuzz targets run on their corpus among them; the engine would have everything built a third time (`cargo xtask fuzz`).
    test::test(paths, steps, None, test::Mode { required: true, long: false })
}

fn cargo(paths: &Paths) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(&paths.root);
    command
}
