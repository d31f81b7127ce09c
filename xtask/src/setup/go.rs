//! Published Go modules, and programs that are built from them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::exec::output;

/// What `go mod download` tells of a module (`MODULE@VERSION`) it has fetched, whose hash the
/// public list of modules knows.
pub(crate) fn downloaded(module: &str) -> Result<Value> {
    let mut go = Command::new("go");
    go.args(["mod", "download", "-json", module]).current_dir("/").env("GOFLAGS", "-mod=mod");
    serde_json::from_str(&output(&mut go)?).context("output of `go mod download`")
}

/// The folder with a module's files, for files that are no Go.
pub(crate) fn folder(module: &str) -> Result<PathBuf> {
    let told = downloaded(module)?;
    let folder = told["Dir"]
        .as_str()
        .with_context(|| format!("`go mod download` names no folder of {module}"))?;
    Ok(folder.into())
}

/// Whether a program is there that has this version of a module in it, by what Go wrote into its
/// file. One whose building was broken off, or that is of another version than is asked for now,
/// has not.
pub(crate) fn has(program: &Path, module: &str, version: &str) -> bool {
    output(Command::new("go").args(["version", "-m"]).arg(program))
        .is_ok_and(|told| is_among(&told, module, version))
}

/// Lines are `mod`, `dep` or `=>`, a module, its version and a hash.
fn is_among(told: &str, module: &str, version: &str) -> bool {
    told.lines().any(|line| line.split_whitespace().skip(1).take(2).eq([module, version]))
}

#[cfg(test)]
mod tests {
    use super::is_among;

    #[test]
    fn a_module_is_known_by_name_and_version() {
        let told = "/opt/x: go1.26.0\n\tpath\tx.org/x/cmd/x\n\tmod\tx.org/x\tv1.2.3\th1:abc=\n\
             \tdep\tx.org/y\tv0.1.0\th1:d=\n";
        assert!(is_among(told, "x.org/x", "v1.2.3") && is_among(told, "x.org/y", "v0.1.0"));
        assert!(!is_among(told, "x.org/x", "v1.2.4") && !is_among(told, "x.org/y", "v1.2.3"));
        assert!(!is_among("", "x.org/x", "v1.2.3"));
    }
}
