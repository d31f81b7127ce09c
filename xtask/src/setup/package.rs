//! Files of the npm and PyPI registries: fetched with their plain clients, exact versions, checked
//! before use.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::exec::output;

/// A part of what stands in a folder that is complete: raise it when the layout changes.
const LAYOUT: &str = "layout 1";

/// Whose client fetches it.
pub(crate) enum Registry {
    Npm,
    Pypi,
    /// PyPI's wheels of CPython 3.10 for musl.
    PypiOnMusl,
}

/// One pinned file.
pub(crate) struct PinnedPackage {
    pub(crate) registry: Registry,
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Name of the file the client leaves.
    pub(crate) file: &'static str,
    pub(crate) sha256: &'static str,
}

impl PinnedPackage {
    /// Fetches the file into `folder` and unpacks it into a new folder there, which is returned.
    /// Only `members` of an npm package are unpacked; an empty list means all.
    pub(crate) fn unpack(&self, folder: &Path, members: &[&str]) -> Result<PathBuf> {
        fs::create_dir_all(folder)
            .with_context(|| format!("{}: cannot be made", folder.display()))?;
        let file = folder.join(self.file);
        if !file.exists() {
            self.fetch(folder)?;
        }
        self.verify(&file)?;
        let unpacked = folder.join(format!("{}.unpacked", self.file));
        clear(&unpacked)?;
        fs::create_dir_all(&unpacked)
            .with_context(|| format!("{}: cannot be made", unpacked.display()))?;
        match self.registry {
            Registry::Npm => untar(&file, &unpacked, members)?,
            Registry::Pypi | Registry::PypiOnMusl => {
                output(
                    Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&file).arg(&unpacked),
                )?;
            }
        }
        Ok(unpacked)
    }

    fn fetch(&self, folder: &Path) -> Result<()> {
        let mut command = match self.registry {
            Registry::Npm => {
                let mut npm = Command::new("npm");
                npm.args(["pack", "--silent", "--pack-destination"])
                    .arg(folder)
                    .arg(format!("{}@{}", self.name, self.version));
                npm
            }
            Registry::Pypi => {
                let platforms = ["manylinux2014_x86_64", "manylinux1_x86_64"];
                self.pip(folder, platforms.iter().flat_map(|platform| ["--platform", platform]))
            }
            Registry::PypiOnMusl => {
                self.pip(folder, ["--platform", "musllinux_1_1_x86_64", "--python-version", "3.10"])
            }
        };
        output(&mut command).with_context(|| {
            format!(
                "fetching {} {}: setup needs the package registry once, later runs do not",
                self.name, self.version
            )
        })?;
        Ok(())
    }

    fn pip<'a>(&self, folder: &Path, which: impl IntoIterator<Item = &'a str>) -> Command {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check"])
            .args(["--no-deps", "--only-binary", ":all:"])
            .args(which)
            .arg("--dest")
            .arg(folder)
            .arg(format!("{}=={}", self.name, self.version));
        pip
    }

    fn verify(&self, file: &Path) -> Result<()> {
        let sum = output(Command::new("sha256sum").arg(file))?;
        let found = sum.split_whitespace().next().unwrap_or_default();
        if found != self.sha256 {
            fs::remove_file(file)
                .with_context(|| format!("{}: cannot be removed", file.display()))?;
            bail!(
                "{}: wrong checksum: expected sha256 {}, found {found}; the file was removed, run \
                 setup again",
                file.display(),
                self.sha256
            );
        }
        Ok(())
    }
}

/// Makes the folder `done` unless it is there and bears this stamp: `make` fills a fresh one, which
/// gets its name at the end.
pub(super) fn unless_done(
    done: &Path,
    stamp: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let stamp = format!("{LAYOUT}\n{stamp}\n");
    if fs::read_to_string(done.join("stamp")).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    let fresh = done.with_extension("new");
    clear(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("{}: cannot be made", fresh.display()))?;
    make(&fresh)?;
    fs::write(fresh.join("stamp"), stamp)
        .with_context(|| format!("{}: cannot be written", fresh.display()))?;
    clear(done)?;
    fs::rename(&fresh, done).with_context(|| format!("{}: cannot be put in place", done.display()))
}

/// Unpacks a tar.xz without its outermost folder.
pub(super) fn untar_inside(file: &Path, folder: &Path) -> Result<()> {
    output(
        Command::new("tar")
            .args(["--no-same-owner", "--strip-components=1", "-xJf"])
            .arg(file)
            .arg("-C")
            .arg(folder),
    )?;
    Ok(())
}

/// Unpacks a tar.gz.
pub(crate) fn untar(file: &Path, folder: &Path, members: &[&str]) -> Result<()> {
    output(
        Command::new("tar")
            .args(["--no-same-owner", "-xzf"])
            .arg(file)
            .arg("-C")
            .arg(folder)
            .args(members),
    )?;
    Ok(())
}

/// Removes a folder that may be there.
pub(crate) fn clear(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("{}: cannot be removed", folder.display()))?;
    }
    Ok(())
}
