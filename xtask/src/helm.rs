//! The chart: linted by helm itself, rendered, and the result checked against Kubernetes' own schemas.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    exec::{Steps, output, version},
    paths::Paths,
};

const HELM: &str = "v3.19.0";
const VALIDATOR: &str = "kubernetes-validate==1.37.0";
/// The Kubernetes versions whose schemas the rendered chart must fit: oldest and newest supported.
const KUBERNETES: [&str; 2] = ["1.28", "1.36"];

/// Lints and validates `helm/` with its defaults.
pub(crate) fn lint(paths: &Paths, steps: &Steps) -> Result<()> {
    let helm = install_helm(paths, steps)?;
    let validator = install_validator(paths, steps)?;
    steps.step("chart: helm lint, schemas");
    let chart = paths.root.join("helm");
    let folder = paths.target.join("helm");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    for kubernetes in KUBERNETES {
        let version = ["--kube-version", kubernetes];
        output(Command::new(&helm).args(["lint", "--strict"]).args(version).arg(&chart))?;
        let rendered = output(Command::new(&helm).args(["template", "perfusion"]).args(version).arg(&chart))?;
        let manifest = folder.join(format!("rendered-{kubernetes}.yaml"));
        fs::write(&manifest, rendered)
            .with_context(|| format!("{}: cannot be written", manifest.display()))?;
        output(
            Command::new(validator.join("bin/kubernetes-validate"))
                .env("PYTHONPATH", &validator)
                .args(["--strict", "-k", kubernetes])
                .arg(&manifest),
        )?;
    }
    Ok(())
}

/// helm is one Go program, so Go builds it.
fn install_helm(paths: &Paths, steps: &Steps) -> Result<PathBuf> {
    let own = paths.toolchain.join("go/bin/helm");
    if version(Command::new(&own).args(["version", "--short"])).is_none() {
        steps.step(&format!("building helm {HELM}"));
        output(
            Command::new("go")
                .args(["install", &format!("helm.sh/helm/v3/cmd/helm@{HELM}")])
                .env("GOBIN", paths.toolchain.join("go/bin")),
        )?;
    }
    Ok(own)
}

/// A folder of Python packages.
fn install_validator(paths: &Paths, steps: &Steps) -> Result<PathBuf> {
    let folder = paths.toolchain.join("python");
    if !folder.join("bin/kubernetes-validate").exists() {
        steps.step(&format!("installing {VALIDATOR}"));
        output(
            Command::new("python3")
                .args([
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--root-user-action",
                    "ignore",
                    "--target",
                ])
                .arg(&folder)
                .arg(VALIDATOR),
        )?;
    }
    Ok(folder)
}
