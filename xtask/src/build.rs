//! `cargo xtask build`: the eBPF object, the shim, and the daemon with both inside. What is fresh
//! is decided by cargo alone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context, Result};

use crate::{
    exec::{StepLog, cargo, joined, run, write_if_changed},
    paths::WorkspacePaths,
    setup::{self, Dotnet, EbpfToolchain},
    shim, strip,
};

const BPF_TARGET: &str = "bpfel-unknown-none";
/// The profile of the demo: it is built in half the time.
const QUICK: &str = "quick";

/// What `rustup` and an outer cargo put into the environment and another toolchain's cargo must not
/// see.
const INHERITED: [&str; 8] = [
    "CARGO",
    "CARGO_BUILD_TARGET",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_TARGET_DIR",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_WRAPPER",
    "RUSTDOC",
    "RUSTUP_TOOLCHAIN",
];

/// Sets up, builds everything, and returns the program's path.
pub(crate) fn build(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let ebpf = setup::build_tools(paths, steps)?;
    build_with(paths, steps, &ebpf)
}

/// Builds what the program has inside: the eBPF object and the shim.
pub(crate) fn inside(paths: &WorkspacePaths, steps: &StepLog, ebpf: &EbpfToolchain) -> Result<()> {
    probes(paths, steps, ebpf)?;
    shim::build(paths, steps)
}

/// Builds the eBPF object.
fn probes(paths: &WorkspacePaths, steps: &StepLog, ebpf: &EbpfToolchain) -> Result<()> {
    steps.step("building the eBPF object");
    run(bpf_cargo(paths, ebpf, "build", "ebpf-probes").args(["--quiet", "--release"]))?;
    let built = ebpf_target(paths).join(BPF_TARGET).join("release/ebpf-probes");
    // BTF is made from debug information, and nobody reads that of the object afterwards.
    let shipped = built.with_extension("shipped");
    strip::probes(&ebpf.objcopy, &built, &shipped)?;
    take(&shipped, &paths.probes())
}

/// Builds everything with tools that are known to be there.
pub(crate) fn build_with(
    paths: &WorkspacePaths,
    steps: &StepLog,
    ebpf: &EbpfToolchain,
) -> Result<PathBuf> {
    inside(paths, steps, ebpf)?;
    program(paths, steps, "release")
}

/// Builds the program around what is inside, and returns its path.
fn program(paths: &WorkspacePaths, steps: &StepLog, profile: &str) -> Result<PathBuf> {
    steps.step("building perfusion");
    run(cargo(paths)
        .args(["build", "--package", "perfusion", "--profile", paths.profile_or(profile)])
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim()))?;
    Ok(paths.program(profile))
}

/// Builds everything for the demo, and finds a .NET for it. The shim and the libraries are built
/// while the tools for the probes are installed and .NET is fetched: neither needs the other.
pub(crate) fn for_demo(paths: &WorkspacePaths, steps: &StepLog) -> Result<(PathBuf, Dotnet)> {
    let (libraries, dotnet) = thread::scope(|scope| {
        let libraries = scope.spawn(|| {
            shim::build(paths, steps)?;
            libraries(paths, steps, QUICK)
        });
        let dotnet = setup::build_tools_and_dotnet(paths, steps)
            .and_then(|(ebpf, dotnet)| probes(paths, steps, &ebpf).map(|()| dotnet));
        if dotnet.is_err() {
            steps.step("that failed; the reason follows once the libraries are built");
        }
        (joined(libraries), dotnet)
    });
    let dotnet = dotnet?;
    libraries?;
    Ok((program(paths, steps, QUICK)?, dotnet))
}

/// Builds what the program is made of, with nothing inside. Its own library is made again later:
/// all it is made of is built with the same features as then, which no choice of packages has.
fn libraries(paths: &WorkspacePaths, steps: &StepLog, profile: &str) -> Result<()> {
    steps.step("building the libraries");
    run(cargo(paths)
        .args(["build", "--quiet", "--package", "perfusion", "--lib"])
        .args(["--profile", paths.profile_or(profile)])
        .env_remove("PERFUSION_PROBES")
        .env_remove("PERFUSION_SHIM"))
}

/// A cargo command on one package, for the BPF target. Alone, because features must not mix with
/// the workspace's: `ebpf-common` has one for the daemon that needs std.
pub(crate) fn bpf_cargo(
    paths: &WorkspacePaths,
    ebpf: &EbpfToolchain,
    subcommand: &str,
    package: &str,
) -> Command {
    let mut command = Command::new(&ebpf.cargo);
    for name in INHERITED {
        command.env_remove(name);
    }
    command
        .args([subcommand, "--package", package, "--target", BPF_TARGET, "--target-dir"])
        .arg(ebpf_target(paths))
        .current_dir(&paths.root)
        .env("RUSTC", &ebpf.rustc)
        // The target is tier 3: inline assembly and some attributes of aya-ebpf are unstable there.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &ebpf.linker)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
        .env_remove("CARGO_PROFILE_RELEASE_LTO")
        // The target cannot unwind; BTF is made from debug information.
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("RUSTFLAGS", "-C debuginfo=2 -C link-arg=--btf");
    command
}

/// Lints one package for the BPF target. Not `cargo clippy`: cargo prefers the `cargo-clippy` of
/// rustup, whose driver has no such target.
pub(crate) fn bpf_clippy(paths: &WorkspacePaths, ebpf: &EbpfToolchain, package: &str) -> Command {
    let mut command = bpf_cargo(paths, ebpf, "check", package);
    command
        .env("RUSTC_WORKSPACE_WRAPPER", &ebpf.clippy)
        // How cargo-clippy hands `-D warnings` to its driver.
        .env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    command
}

fn ebpf_target(paths: &WorkspacePaths) -> PathBuf {
    paths.target.join("ebpf")
}

/// Copies a product to where the daemon's build reads it, keeping the old file when it is the same.
fn take(product: &Path, artifact: &Path) -> Result<()> {
    let bytes = fs::read(product)
        .with_context(|| format!("{}: expected the build to leave it there", product.display()))?;
    write_if_changed(artifact, &bytes)
}
