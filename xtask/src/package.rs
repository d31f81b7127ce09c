//! `cargo xtask package`: deb and rpm with the program, its unit, manual pages and completions,
//! made by nfpm from `packaging/nfpm.yaml`, and checked. The program's debug information lies
//! beside them. With `--install` they are installed into and removed from a Debian with nothing
//! else in it.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    build,
    exec::{StepLog, chroot, need_root, outcome, output, version},
    paths::WorkspacePaths,
    setup::{debian, package::clear},
    strip,
};

const NFPM: &str = "v2.43.4";
/// Ten times the score of `systemd-analyze security` that the unit may have.
const MOST_EXPOSED: &str = "35";
const UNIT: &str = "packaging/perfusion.service";
/// What the deb adds to it.
const DROP_IN: &str = "packaging/debian-kernels.conf";
/// Where packages are unpacked, packed and tried.
const FOLDER: &str = "packages";

/// Makes both packages, and tries them when asked to.
pub(crate) fn package(paths: &WorkspacePaths, steps: &StepLog, install: bool) -> Result<()> {
    check_unit(paths, steps)?;
    let packages = packages(paths, steps)?;
    for made in [&packages.deb, &packages.rpm, &packages.debug] {
        let bytes =
            fs::metadata(made).with_context(|| format!("{}: not made", made.display()))?.len();
        println!("  {} ({:.1} MB)", made.display(), bytes as f64 / 1e6);
    }
    if install {
        need_root("a chroot")?;
        install_and_remove(&paths.target.join(FOLDER), steps, &packages)?;
    }
    Ok(())
}

/// Makes both. `PERFUSION_BIN` names a program to pack in place of one that is built now.
pub(crate) fn packages(paths: &WorkspacePaths, steps: &StepLog) -> Result<Packages> {
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    make(paths, steps, &perfusion, &paths.target.join(FOLDER))
}

/// What was made.
pub(crate) struct Packages {
    pub(crate) deb: PathBuf,
    pub(crate) rpm: PathBuf,
    /// Debug information of the program in both.
    debug: PathBuf,
}

/// The unit by systemd's own judgement.
pub(crate) fn check_unit(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    debian::install(steps, &[("systemd", "checks the unit")])?;
    steps.step("unit: systemd-analyze");
    let unit = paths.root.join(UNIT);
    let text =
        fs::read_to_string(&unit).with_context(|| format!("{}: cannot be read", unit.display()))?;
    let folder = paths.target.join(FOLDER).join("unit");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    // `verify` wants to see the programs, and there is no perfusion in /usr/bin of the machine that
    // checks.
    let checked = folder.join("perfusion.service");
    fs::write(&checked, text.replace("/usr/bin/perfusion", "/bin/true"))
        .with_context(|| format!("{}: cannot be written", checked.display()))?;
    let verified =
        outcome(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&checked))?;
    // It exits with 0 even for a key it does not know. Of other units on the machine it may
    // complain, too.
    let said = String::from_utf8_lossy(&verified.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("perfusion")).collect();
    if !verified.status.success() || !ours.is_empty() {
        bail!("{UNIT}: systemd-analyze verify: {said}");
    }
    let added = paths.root.join(DROP_IN);
    let added = fs::read_to_string(&added)
        .with_context(|| format!("{}: cannot be read", added.display()))?;
    for text in [text.clone(), text + &added] {
        fs::write(&checked, text)
            .with_context(|| format!("{}: cannot be written", checked.display()))?;
        output(
            Command::new("systemd-analyze")
                .args([
                    "security",
                    "--no-pager",
                    "--offline=true",
                    &format!("--threshold={MOST_EXPOSED}"),
                ])
                .arg(&checked),
        )?;
    }
    Ok(())
}

/// Stages the files and has nfpm pack them.
fn make(
    paths: &WorkspacePaths,
    steps: &StepLog,
    perfusion: &Path,
    folder: &Path,
) -> Result<Packages> {
    let nfpm = install_nfpm(paths, steps)?;
    steps.step("packages: manual pages, completions, deb, rpm");
    let stage = folder.join("stage");
    clear(&stage)?;
    let man = stage.join("man");
    let completions = stage.join("completions");
    for part in [&man, &completions] {
        fs::create_dir_all(part).with_context(|| format!("{}: cannot be made", part.display()))?;
    }
    output(Command::new(perfusion).arg("man").arg(&man))?;
    for page in listed(&man)? {
        output(Command::new("gzip").args(["-9n"]).arg(man.join(page)))?;
    }
    for (shell, name) in
        [("bash", "perfusion.bash"), ("fish", "perfusion.fish"), ("zsh", "_perfusion")]
    {
        let script = output(Command::new(perfusion).args(["completions", shell]))?;
        fs::write(completions.join(name), script)
            .with_context(|| format!("completions of {shell}"))?;
    }
    let (stripped, debug) = (stage.join("perfusion"), folder.join("perfusion.debug"));
    strip::program(perfusion, &stripped, &debug)?;

    let mut made = BTreeMap::new();
    for kind in ["deb", "rpm"] {
        let target = folder.join(format!("perfusion.{kind}"));
        output(
            Command::new(&nfpm)
                .args([
                    "package",
                    "--config",
                    "packaging/nfpm.yaml",
                    "--packager",
                    kind,
                    "--target",
                ])
                .arg(&target)
                .current_dir(&paths.root)
                .env("PERFUSION_STAGE", &stage)
                .env("PERFUSION_ARCH", "amd64")
                .env("PERFUSION_VERSION", own_version(perfusion)?)
                .env("PERFUSION_GLIBC", newest_glibc(&stripped)?),
        )?;
        made.insert(kind, target);
    }
    let take = |kind| made.get(kind).cloned().context("a package was not made");
    Ok(Packages { deb: take("deb")?, rpm: take("rpm")?, debug })
}

/// nfpm is one Go program, so Go builds it.
fn install_nfpm(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let own = paths.toolchain.join("go/bin/nfpm");
    if version(Command::new(&own).arg("--version")).is_none() {
        steps.step(&format!("building nfpm {NFPM}"));
        output(
            Command::new("go")
                .args(["install", &format!("github.com/goreleaser/nfpm/v2/cmd/nfpm@{NFPM}")])
                .env("GOBIN", paths.toolchain.join("go/bin")),
        )?;
    }
    Ok(own)
}

fn own_version(perfusion: &Path) -> Result<String> {
    let line = output(Command::new(perfusion).arg("--version"))?;
    line.split_whitespace()
        .nth(1)
        .map(str::to_owned)
        .context("`perfusion --version` printed no version")
}

/// The newest glibc of which the program asks a symbol: what the packages must depend on.
fn newest_glibc(program: &Path) -> Result<String> {
    let symbols = output(Command::new("readelf").args(["--wide", "--version-info"]).arg(program))?;
    newest_version(&symbols).context("readelf: the program asks no version of glibc")
}

fn newest_version(symbols: &str) -> Option<String> {
    let versions = symbols.split(|letter: char| letter.is_whitespace() || "(),".contains(letter));
    let numbers = |text: &str| -> Option<Vec<u32>> {
        text.split('.').map(|part| part.parse().ok()).collect()
    };
    let known = versions.filter_map(|word| word.strip_prefix("GLIBC_"));
    known.filter_map(|text| Some((numbers(text)?, text))).max().map(|(_, text)| text.to_owned())
}

fn listed(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("{}: cannot be listed", folder.display()))?;
    let names = entries.map(|entry| entry.map(|entry| PathBuf::from(entry.file_name())));
    names
        .collect::<Result<_, _>>()
        .with_context(|| format!("{}: cannot be listed", folder.display()))
}

/// Files of these folders are the package managers' own: lists of what is installed, their logs and
/// caches.
const BOOKS: [&str; 6] =
    ["var/lib/dpkg", "var/lib/rpm", "var/log", "var/cache", "root/.rpmdb", "var/lib/apt"];

fn install_and_remove(folder: &Path, steps: &StepLog, packages: &Packages) -> Result<()> {
    debian::install(
        steps,
        &[("debootstrap", "a Debian to install packages on"), ("rpm", "installs the rpm")],
    )?;
    let root = folder.join("debian");
    let done = folder.join("debian.made");
    if !done.exists() {
        clear(&root)?;
        steps.step("making a Debian with systemd and nothing else (75 s)");
        output(
            Command::new("debootstrap")
                .args(["--variant=minbase", "--include=systemd,dbus", "bookworm"])
                .arg(&root),
        )?;
        fs::write(&done, "").with_context(|| format!("{}: cannot be written", done.display()))?;
    }
    let before = tree(&root)?;
    let inside = |arguments: &[&str]| {
        let mut command = chroot(&root);
        command.args(arguments).env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        command
    };

    steps.step("deb: install, use, remove, purge");
    fs::copy(&packages.deb, root.join("tmp/perfusion.deb")).context("the deb cannot be copied")?;
    // The second time over what `remove` leaves.
    for _ in 0..2 {
        output(&mut inside(&["dpkg", "--install", "/tmp/perfusion.deb"]))?;
        in_use(&root, &inside)?;
        output(&mut inside(&["dpkg", "--verify", "perfusion"]))?;
        fs::create_dir_all(root.join("var/lib/perfusion/profiles")).context("state of a run")?;
        output(&mut inside(&["dpkg", "--remove", "perfusion"]))?;
        if !root.join("etc/perfusion/perfusion.yaml").exists()
            || !root.join("var/lib/perfusion").exists()
        {
            bail!("deb: `remove` took configuration or data, which stay until `purge`");
        }
    }
    fs::remove_file(root.join("tmp/perfusion.deb")).context("the deb cannot be removed")?;
    output(&mut inside(&["dpkg", "--purge", "perfusion"]))?;
    nothing_left("deb", &before, &tree(&root)?)?;

    steps.step("rpm: install, use, erase");
    let rpm = |arguments: &[&OsStr]| {
        let mut command = Command::new("rpm");
        // There is no rpm database of a Debian's packages.
        command.arg("--root").arg(&root).arg("--nodeps").args(arguments);
        command
    };
    output(&mut rpm(&[OsStr::new("--install"), packages.rpm.as_os_str()]))?;
    in_use(&root, &inside)?;
    fs::create_dir_all(root.join("var/lib/perfusion/profiles")).context("state of a run")?;
    output(&mut rpm(&[OsStr::new("--erase"), OsStr::new("perfusion")]))?;
    nothing_left("rpm", &before, &tree(&root)?)
}

/// What an installed package must be good for.
fn in_use(root: &Path, inside: &dyn Fn(&[&str]) -> Command) -> Result<()> {
    let perfusion = ["/usr/bin/perfusion"];
    let version = output(inside(&perfusion).arg("--version"))?;
    if !version.starts_with("perfusion ") {
        bail!("installed: `perfusion --version` printed `{version}`");
    }
    output(inside(&perfusion).args([
        "config",
        "check",
        "--config",
        "/etc/perfusion/perfusion.yaml",
    ]))?;
    let enabled = root.join("etc/systemd/system/multi-user.target.wants/perfusion.service");
    if enabled.symlink_metadata().is_err() {
        bail!("installed: {} is not there: the unit is not enabled", enabled.display());
    }
    // Names of pages and completions are what their readers look for.
    for file in [
        "man/man1/perfusion.1.gz",
        "man/man1/perfusion-record.1.gz",
        "bash-completion/completions/perfusion",
    ] {
        let path = root.join("usr/share").join(file);
        if fs::metadata(&path).map_or(0, |found| found.len()) == 0 {
            bail!("installed: {} is missing or empty", path.display());
        }
    }
    Ok(())
}

/// Path -> what it is, of everything but the books of package managers.
fn tree(root: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for name in listed(&folder)? {
            let path = folder.join(name);
            let inside = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            if BOOKS.iter().any(|book| inside.starts_with(book)) {
                continue;
            }
            let facts =
                path.symlink_metadata().with_context(|| format!("{}: its kind", path.display()))?;
            let mode = facts.permissions().mode();
            if facts.is_dir() {
                found.insert(inside, format!("{mode:o}"));
                folders.push(path);
            } else {
                found.insert(inside, format!("{mode:o} {} {}", facts.len(), facts.mtime()));
            }
        }
    }
    Ok(found)
}

fn nothing_left(
    kind: &str,
    before: &BTreeMap<PathBuf, String>,
    after: &BTreeMap<PathBuf, String>,
) -> Result<()> {
    let before: BTreeSet<_> = before.iter().collect();
    let after: BTreeSet<_> = after.iter().collect();
    let changed: Vec<String> = before
        .symmetric_difference(&after)
        .map(|(path, what)| format!("/{}: {what}", path.display()))
        .collect();
    if !changed.is_empty() {
        bail!(
            "{kind}: expected the host as it was before, found differences:\n{}",
            changed.join("\n")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::newest_version;

    #[test]
    fn versions_are_compared_by_number() {
        let symbols = "  0x00a0:   Name: GLIBC_2.9  Flags: none  Version: 7\n  001: 4 \
             (GLIBC_2.34)   5 (GLIBC_2.2.5)\n (GCC_3.0)";
        assert_eq!(newest_version(symbols).as_deref(), Some("2.34"));
        assert_eq!(newest_version("(GCC_3.0)"), None);
    }
}
