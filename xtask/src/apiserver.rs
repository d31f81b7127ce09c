//! `cargo xtask apiserver`: a real Kubernetes API server, built by Go from its published modules,
//! and the tests that speak to it: the chart, and the daemon that asks it for pods. Takes minutes
//! to build, so `ci` does without: there recorded answers of this server stand for it.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    exec::{StepLog, need_root, output},
    helm,
    paths::WorkspacePaths,
    setup::{debian, go},
    test,
};

const MODULE: &str = "k8s.io/kubernetes";
const VERSION: &str = "v1.36.3";
/// Its parts are modules of their own with this version.
const STAGING: &str = "v0.36.3";
/// A server that was not built by the project's own scripts calls itself this otherwise, and charts
/// ask for its version.
const NAMED: &str = "-X k8s.io/component-base/version.gitVersion=";

/// What the chart makes of kinds that others bring: their definitions, by module and file.
const OTHERS_KINDS: [(&str, &str); 2] = [
    (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    (
        "github.com/openshift/api@v0.0.0-20260213204242-d34f11c515b3",
        "security/v1/zz_generated.crd-manifests/\
         0000_03_config-operator_01_securitycontextconstraints.crd.yaml",
    ),
];

/// Builds the server unless it is there, and runs the tests that are ignored without one.
pub(crate) fn apiserver(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    need_root("recording")?;
    // What the API server keeps its objects in.
    let etcd = debian::unpack(steps, &paths.toolchain.join("etcd"), "etcd-server", "usr/bin/etcd")?;
    let server = install(paths, steps)?;
    let helm = helm::install_helm(paths, steps)?;
    let [pod_monitors, constraints] = OTHERS_KINDS.map(|(module, file)| {
        steps.step(&format!("{module} for its {file}"));
        go::folder(module).map(|folder| folder.join(file))
    });
    let (pod_monitors, constraints) = (pod_monitors?, constraints?);
    let servers = [
        ("PERFUSION_APISERVER", server.as_path()),
        ("PERFUSION_ETCD", etcd.as_path()),
        ("PERFUSION_HELM", helm.as_path()),
        ("PERFUSION_POD_MONITORS", pod_monitors.as_path()),
        ("PERFUSION_CONSTRAINTS", constraints.as_path()),
    ];
    test::with_servers(paths, steps, ("an API server", "kubernetes::"), &servers)
}

fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let folder = paths.toolchain.join("kubernetes");
    let program = folder.join("kube-apiserver");
    if go::has(&program, MODULE, VERSION) {
        return Ok(program);
    }
    steps.step(&format!("building Kubernetes' API server {VERSION} (5 to 10 minutes)"));
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let go = || {
        let mut command = Command::new("go");
        command.current_dir(&folder).env("GOFLAGS", "-mod=mod");
        command
    };
    let told = go::downloaded(&format!("{MODULE}@{VERSION}"))?;
    let theirs = told["GoMod"].as_str().context("`go mod download` names no go.mod")?;
    let theirs = fs::read_to_string(theirs).with_context(|| format!("{theirs}: cannot be read"))?;
    fs::write(folder.join("go.mod"), own_module(&theirs)).context("the server's go.mod")?;
    output(
        go().args(["build", "-trimpath", "-ldflags", &format!("-s -w {NAMED}{VERSION}"), "-o"])
            .arg(&program)
            .arg(format!("{MODULE}/cmd/kube-apiserver")),
    )?;
    Ok(program)
}

/// A module that has the server as a dependency. Its parts, which its own go.mod has in folders
/// beside it, are the published ones.
fn own_module(theirs: &str) -> String {
    let part = |line: &str| {
        let (name, version) = line.trim().split_once(' ')?;
        // Others have a time and a commit behind it.
        (name.starts_with("k8s.io/") && version.split(' ').next() == Some("v0.0.0"))
            .then(|| name.to_owned())
    };
    let mut parts: Vec<String> =
        theirs.lines().filter_map(|line| part(line.trim_start_matches("require "))).collect();
    parts.sort();
    parts.dedup();
    let go = theirs.lines().find(|line| line.starts_with("go ")).unwrap_or("go 1.26");
    let replaced: Vec<String> =
        parts.iter().map(|part| format!("replace {part} => {part} {STAGING}\n")).collect();
    format!(
        "module perfusion/apiserver\n\n{go}\n\nrequire {MODULE} {VERSION}\n\n{}",
        replaced.concat()
    )
}

#[cfg(test)]
mod tests {
    use super::own_module;

    #[test]
    fn the_parts_of_the_server_are_the_published_ones() {
        let theirs = "module k8s.io/kubernetes\n\ngo 1.26.0\n\nrequire (\n\tk8s.io/api \
             v0.0.0\n\tk8s.io/utils v0.0.0-20250604\n\tgithub.com/x/y v0.0.0-1\n\tk8s.io/kms \
             v0.0.0 // indirect\n)\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n";
        assert_eq!(
            own_module(theirs),
            "module perfusion/apiserver\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes \
             v1.36.3\n\nreplace k8s.io/api => k8s.io/api v0.36.3\nreplace k8s.io/kms => k8s.io/kms \
             v0.36.3\n"
        );
    }
}
