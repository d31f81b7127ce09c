//! Profilers in C that figures are compared with (`xtask/native`).

use std::{path::PathBuf, process::Command};

use anyhow::Result;

use crate::{exec::output, paths::WorkspacePaths};

/// A class id for them. Whichever: each library makes its profiler for all.
pub(super) const CLASS: &str = "{cf0d821e-299b-5307-a3d8-b283c03916dd}";

/// Compiles `xtask/native/NAME.c` to a library in target/bench, which is there.
pub(super) fn library(paths: &WorkspacePaths, name: &str) -> Result<PathBuf> {
    let library = paths.target.join(format!("bench/lib{name}.so"));
    let source = paths.root.join(format!("xtask/native/{name}.c"));
    output(Command::new("gcc").args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(source))?;
    Ok(library)
}
