//! Debian's kernels, by apt with lists of its own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::exec::{StepLog, output};

/// Debian's releases that the kernels come from, oldest first.
const SOURCES: &str = "\
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian \
     bullseye main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
     http://deb.debian.org/debian-security bullseye-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian \
     bookworm main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
     http://deb.debian.org/debian-security bookworm-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie \
     main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid \
     main
";

/// Debian's package lists in a folder of their own: those of this machine stay as they are.
pub(crate) struct Apt {
    folder: PathBuf,
}

impl Apt {
    pub(crate) fn new(folder: &Path, steps: &StepLog) -> Result<Apt> {
        let apt = Apt { folder: folder.join("apt") };
        let lists = apt.folder.join("lists/partial");
        if lists.is_dir() {
            return Ok(apt);
        }
        steps.step("reading Debian's package lists (45 MB)");
        for part in [&lists, &apt.folder.join("archives/partial")] {
            fs::create_dir_all(part)
                .with_context(|| format!("{}: cannot be made", part.display()))?;
        }
        fs::write(apt.folder.join("sources.list"), SOURCES)
            .context("sources.list of the kernels")?;
        let updated = output(apt.command("apt-get").arg("update"));
        if updated.is_err() {
            // Half of the lists would look like all of them next time.
            fs::remove_dir_all(&apt.folder).ok();
        }
        updated.map(|_| apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (option, value) in [
            ("Dir::Etc::sourcelist", self.folder.join("sources.list")),
            ("Dir::Etc::sourceparts", "-".into()),
            ("Dir::State::lists", self.folder.join("lists")),
            ("Dir::Cache", self.folder.clone()),
            // It writes below our folder, which its own user may not be able to reach.
            ("APT::Sandbox::User", "root".into()),
            ("Acquire::Languages", "none".into()),
            ("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", "false".into()),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        command.current_dir(&self.folder);
        command
    }

    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let names = output(self.command("apt-cache").args(["pkgnames", "linux-"]))?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// The kernel's image of a package.
    pub(crate) fn kernel(&self, package: &str, steps: &StepLog) -> Result<PathBuf> {
        let image = self.folder.join(format!("{package}.vmlinuz"));
        if image.exists() {
            return Ok(image);
        }
        steps.step(&format!("fetching {package}"));
        output(self.command("apt-get").args(["download", package]))?;
        // Its modules are not needed: all the machine has is built in.
        let script = "set -e; dpkg-deb --fsys-tarfile \"$1\"_*.deb | tar -xO --wildcards \
             '*/vmlinuz*' > \"$1\".new; \
                      rm \"$1\"_*.deb; mv \"$1\".new \"$1\".vmlinuz";
        output(Command::new("sh").args(["-c", script, "sh", package]).current_dir(&self.folder))?;
        Ok(image)
    }
}

/// The newest of the packages called `prefix`, a version, `-amd64`.
pub(crate) fn newest<'a>(packages: &'a [String], prefix: &str) -> Option<&'a str> {
    let version = |name: &str| -> Option<Vec<u32>> {
        let version = name.strip_prefix(prefix)?.strip_suffix("-amd64")?;
        // Other words in it are other kernels: cloud, rt, unsigned.
        if !version.chars().all(|c| c.is_ascii_digit() || ".+deb".contains(c)) {
            return None;
        }
        Some(
            version
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|number| number.parse().ok())
                .collect(),
        )
    };
    packages
        .iter()
        .filter_map(|name| Some((version(name)?, name)))
        .max()
        .map(|(_, name)| name.as_str())
}

#[cfg(test)]
mod tests {
    use super::newest;

    #[test]
    fn the_newest_plain_kernel_is_chosen() {
        let names = [
            "linux-image-6.1.0-9-amd64",
            "linux-image-6.1.0-52-amd64",
            "linux-image-6.1.0-53-cloud-amd64",
            "linux-image-6.1.0-0.deb11.60-amd64",
            "linux-image-6.1-amd64",
        ]
        .map(str::to_owned);
        assert_eq!(newest(&names, "linux-image-6.1.0-"), Some("linux-image-6.1.0-52-amd64"));
        let names = [
            "linux-binary-7.2.9+deb14-amd64",
            "linux-binary-7.2.13+deb14-amd64",
            "linux-binary-unsigned-7.2.14+deb14-amd64",
        ]
        .map(str::to_owned);
        assert_eq!(newest(&names, "linux-binary-"), Some("linux-binary-7.2.13+deb14-amd64"));
    }
}
