//! `cargo xtask image`: the files of the container image in `target/image`, checked without a
//! container engine: what is there, that it is all the program needs (it runs with that folder as
//! its root), and that the Dockerfile adds nothing. The program's debug information lies beside
//! that, in `target/image-debug`.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    build,
    exec::{StepLog, chroot, is_root, output},
    paths::WorkspacePaths,
    setup::package::clear,
    strip,
};

const PROGRAM: &str = "usr/bin/perfusion";
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Where the chart mounts something; a read-only root cannot grow them.
const MOUNTED: [&str; 6] =
    ["dev", "etc/perfusion", "proc", "run/perfusion", "sys", "var/lib/perfusion"];
/// Who root is, and that names are looked up in /etc/hosts, then asked of a name server.
const TEXTS: [(&str, &str); 3] = [
    ("etc/passwd", "root:x:0:0:root:/:/nonexistent\n"),
    ("etc/group", "root:x:0:\n"),
    ("etc/nsswitch.conf", "hosts: files dns\n"),
];
/// The last stage of the Dockerfile.
const LAST_STAGE: [&str; 4] = [
    "FROM scratch",
    "COPY --from=build /src/target/image/ /",
    "ENTRYPOINT [\"/usr/bin/perfusion\"]",
    "CMD [\"daemon\", \"--config\", \"/etc/perfusion/perfusion.yaml\"]",
];
/// More means that something came along.
const MOST_BYTES: u64 = 48 << 20;
/// The same of a program that was not optimized: it is 67 MB of unoptimized code, and no file came
/// along.
const MOST_BYTES_UNOPTIMIZED: u64 = 80 << 20;

/// Lays the image's files out and checks them.
pub(crate) fn image(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    steps.step("image: its files");
    let root = paths.target.join("image");
    clear(&root)?;
    // Not in the image, and found by the program's link to it.
    let debug = paths.target.join("image-debug");
    fs::create_dir_all(&debug).with_context(|| format!("{}: cannot be made", debug.display()))?;
    let expected = lay_out(&perfusion, &root, &debug.join("perfusion.debug"))?;
    let most = if paths.profile.is_none() { MOST_BYTES } else { MOST_BYTES_UNOPTIMIZED };
    check_files(&root, &expected, most)?;
    check_dockerfile(paths)?;
    check_program(&root, steps)?;
    Ok(root)
}

/// Returns what is there then.
fn lay_out(perfusion: &Path, root: &Path, debug: &Path) -> Result<BTreeSet<PathBuf>> {
    for folder in MOUNTED.into_iter().chain(["usr/bin"]) {
        let folder = root.join(folder);
        fs::create_dir_all(&folder)
            .with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    let mut files = BTreeSet::from([PathBuf::from(PROGRAM)]);
    strip::program(perfusion, &root.join(PROGRAM), debug)?;
    let libraries = output(Command::new("ldd").arg(perfusion))?;
    let libraries =
        libraries.split_whitespace().filter(|word| word.starts_with('/') && !word.ends_with(':'));
    for from in libraries.chain([AUTHORITIES]) {
        let inside = from.trim_start_matches('/');
        let to = root.join(inside);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("{}: cannot be made", folder.display()))?;
        }
        // Of a link, what it leads to.
        fs::copy(from, &to).with_context(|| format!("{from}: cannot be copied"))?;
        files.insert(inside.into());
    }
    for (file, text) in TEXTS {
        fs::write(root.join(file), text).with_context(|| format!("{file}: cannot be written"))?;
        files.insert(file.into());
    }
    Ok(files)
}

fn check_files(root: &Path, expected: &BTreeSet<PathBuf>, most: u64) -> Result<()> {
    let mut found = BTreeSet::new();
    let mut bytes = 0;
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)
            .with_context(|| format!("{}: cannot be listed", folder.display()))?
        {
            let path =
                entry.with_context(|| format!("{}: cannot be listed", folder.display()))?.path();
            let facts =
                path.symlink_metadata().with_context(|| format!("{}: its kind", path.display()))?;
            if facts.is_dir() {
                folders.push(path);
            } else {
                bytes += facts.len();
                found.insert(path.strip_prefix(root).unwrap_or(&path).to_path_buf());
            }
        }
    }
    if found != *expected || bytes > most {
        bail!("image: expected {expected:?} of at most {most} bytes, found {found:?} of {bytes}");
    }
    println!("  {} files, {:.1} MB", found.len(), bytes as f64 / 1e6);
    Ok(())
}

fn check_dockerfile(paths: &WorkspacePaths) -> Result<()> {
    let path = paths.root.join("Dockerfile");
    let text =
        fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let lines: Vec<&str> =
        text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let last =
        lines.iter().rposition(|line| line.starts_with("FROM ")).context("Dockerfile: no FROM")?;
    let (first, last) = lines.split_at(last);
    if last != LAST_STAGE || first.last() != Some(&"RUN cargo xtask image") {
        bail!(
            "Dockerfile: expected its last stage to be\n{}\nfound\n{}",
            LAST_STAGE.join("\n"),
            last.join("\n")
        );
    }
    Ok(())
}

/// Both parts that travel in the program are in it, and it misses no library.
fn check_program(root: &Path, steps: &StepLog) -> Result<()> {
    if !is_root()? {
        steps.step("image: not root, so the program was not run in it");
        return Ok(());
    }
    let said = chroot(root)
        .args(["/usr/bin/perfusion", "doctor", "--json"])
        .output()
        .context("chroot did not start")?;
    let checks: Vec<Value> = serde_json::from_slice(&said.stdout).with_context(|| {
        format!("image: the program printed no JSON: {}", String::from_utf8_lossy(&said.stderr))
    })?;
    for part in ["eBPF probes", "shim for .NET"] {
        let check = checks
            .iter()
            .find(|check| check["name"] == part)
            .context("doctor does not look at it")?;
        if check["outcome"] != "good" {
            bail!("image: {part}: {}", check["message"]);
        }
    }
    Ok(())
}
