//! Where things are: the workspace, its target folder and what setup lays out.

use std::{env, path::PathBuf};

use anyhow::{Context, Result};

/// Folders every command needs. All are absolute.
pub(crate) struct WorkspacePaths {
    /// The workspace's root.
    pub(crate) root: PathBuf,
    /// Cargo's target folder; nothing outside it is written.
    pub(crate) target: PathBuf,
    /// What `setup` installs.
    pub(crate) toolchain: PathBuf,
    /// The profile that the program and its tests are built with, if not the usual ones: CI builds
    /// both with one, and what they share once.
    pub(crate) profile: Option<String>,
}

impl WorkspacePaths {
    pub(crate) fn find() -> Result<WorkspacePaths> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map(PathBuf::from)
            .context("CARGO_MANIFEST_DIR is not set: run this as `cargo xtask`")?;
        let root = manifest
            .parent()
            .with_context(|| format!("{} has no parent", manifest.display()))?
            .to_path_buf();
        let target = env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| root.join("target"), |path| root.join(path));
        let toolchain = env::var_os("PERFUSION_TOOLCHAIN")
            .map_or_else(|| target.join("toolchain"), |path| root.join(path));
        let profile = env::var("PERFUSION_PROFILE").ok();
        Ok(WorkspacePaths { root, target, toolchain, profile })
    }

    /// The `dotnet` command of one root; `major` is "8", "9", "10", "11" or "11-musl".
    pub(crate) fn dotnet(&self, major: &str) -> PathBuf {
        self.dotnet_roots().join(major).join("dotnet")
    }

    /// Folder with the roots `8`, `9`, `10` and, where there are copies of them, `11` and
    /// `11-musl`, each with just its own runtime.
    pub(crate) fn dotnet_roots(&self) -> PathBuf {
        self.toolchain.join("dotnet")
    }

    /// The C# compiler: `csc [--framework 8|9|10|aspnet] OUT.dll SOURCE.cs…`.
    pub(crate) fn csc(&self) -> PathBuf {
        self.toolchain.join("csc/csc")
    }

    /// The eBPF object, where the daemon's build takes it from.
    pub(crate) fn probes(&self) -> PathBuf {
        self.target.join("artifacts/ebpf-probes.o")
    }

    /// The shim, where the daemon's build takes it from.
    pub(crate) fn shim(&self) -> PathBuf {
        self.target.join("artifacts/libperfusion_shim.so")
    }

    /// The profile to build with. `usual` is not "dev": its folder is called otherwise.
    pub(crate) fn profile_or<'a>(&'a self, usual: &'a str) -> &'a str {
        self.profile.as_deref().unwrap_or(usual)
    }

    /// The complete program, as it is deployed.
    pub(crate) fn perfusion(&self) -> PathBuf {
        self.program("release")
    }

    /// The complete program of this profile, if no other one is asked for.
    pub(crate) fn program(&self, usual: &str) -> PathBuf {
        self.target.join(self.profile_or(usual)).join("perfusion")
    }
}
