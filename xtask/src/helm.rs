//! The chart: linted by helm itself, rendered with the values of each scenario in `helm/ci`,
//! compared with what `helm/rendered` keeps, and checked against Kubernetes' own schemas; values
//! that the chart must refuse are tried, too.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    exec::{StepLog, outcome, output, write_if_changed},
    paths::WorkspacePaths,
    setup::{go, package::clear},
};

const HELM: &str = "v3.19.0";
const VALIDATOR: &str = "kubernetes-validate==1.37.0";
/// The Kubernetes versions whose schemas the rendered chart must fit: oldest and newest supported.
const KUBERNETES: [&str; 2] = ["1.28", "1.36"];
/// API groups of others, whose schemas no Kubernetes has.
const FOREIGN: [&str; 2] = ["security.openshift.io/", "monitoring.coreos.com/"];
/// `--set`, and what the refusal must name.
const REFUSED: [(&str, &str); 17] = [
    ("config.fils.max_size=1GiB", "fils"),
    ("config.otlp[0].urll=http://collector:4317", "urll"),
    ("privileged=true", "privileged"),
    ("image.name=x", "name"),
    ("image.digest=latest", "digest"),
    ("attach.enabled=maybe", "enabled"),
    ("seccomp.type=Off", "type"),
    ("pods.source=kubelet", "source"),
    ("podMonitor.enabled=true,config.telemetry.listen=127.0.0.1:7071", "telemetry.listen"),
    ("config.attach.policy=all", "attach.enabled"),
    ("config.attach.policy=listed,config.attach.services[0]=shop", "attach.enabled"),
    ("attach.enabled=true,config.attach.policy=off", "attach.enabled"),
    ("pods.source=logs,config.kubernetes.pods=api", "pods.source"),
    ("pods.source=none,config.kubernetes.pods=api", "pods.source"),
    ("config.kubernetes.pods=logs", "pods.source"),
    ("storage.hostPath=,config.files.max_size=3GiB", "storage.sizeLimit"),
    (
        "storage.hostPath=,storage.sizeLimit=1Gi,config.otlp[0].url=http://x:4317,\
         config.spool.max_size=768MiB",
        "storage.sizeLimit",
    ),
];
/// `--set`, and a word of the warning in the notes.
const WARNED: [(&str, &str); 11] = [
    ("attach.enabled=false", "attach.enabled is false"),
    ("seccomp.type=Unconfined", "every system call is allowed"),
    ("storage.hostPath=", "storage.hostPath is empty"),
    ("image.repository=perfusion", "is the placeholder"),
    ("sysAdmin=false", "kernel.bpf_stats_enabled=1"),
    ("pods.source=none", "pods.source is none"),
    ("pods.source=logs", "no pod can opt out"),
    ("pods.source=logs,attach.enabled=true", "and attached to"),
    ("podMonitor.enabled=true,networkPolicy.enabled=true", "networkPolicy.metricsFrom is empty"),
    ("rbac.create=false", "rbac.create"),
    ("config.files.max_count=9", "no receiver is configured"),
];

/// Lints and validates `helm/`; with `fix` what it renders is kept anew.
pub(crate) fn lint(paths: &WorkspacePaths, steps: &StepLog, fix: bool) -> Result<()> {
    let helm = install_helm(paths, steps)?;
    let validator = install_validator(paths, steps)?;
    steps.step("chart: lint, scenarios, schemas, refusals, notes");
    let chart = paths.root.join("helm");
    let folder = paths.target.join("helm");
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let mut different = Vec::new();
    for scenario in scenarios(&chart)? {
        let values = chart.join("ci").join(format!("{scenario}.yaml"));
        for kubernetes in KUBERNETES {
            output(
                Command::new(&helm)
                    .args(["lint", "--strict", "--kube-version", kubernetes, "--values"])
                    .arg(&values)
                    .arg(&chart),
            )?;
            let rendered = render(&helm, &chart, &values, kubernetes)?;
            let manifest = folder.join(format!("{scenario}-{kubernetes}.yaml"));
            fs::write(&manifest, own(&rendered))
                .with_context(|| format!("{}: cannot be written", manifest.display()))?;
            output(
                Command::new(validator.join("bin/kubernetes-validate"))
                    .env("PYTHONPATH", &validator)
                    .args(["--strict", "-k", kubernetes])
                    .arg(&manifest),
            )?;
            let kept = chart.join("rendered").join(format!("{scenario}-{kubernetes}.yaml"));
            if fix {
                write_if_changed(&kept, rendered.as_bytes())?;
            } else if !fs::read_to_string(&kept).is_ok_and(|found| found == rendered) {
                different.push(format!("{}: differs from what the chart renders", kept.display()));
            }
        }
    }
    if !different.is_empty() {
        bail!("{}\nif that is meant, `cargo xtask helm --fix` keeps it", different.join("\n"));
    }
    refusals(&helm, &chart)?;
    notes(&helm, &chart, &folder)
}

/// Names of the files in `helm/ci`.
fn scenarios(chart: &Path) -> Result<Vec<String>> {
    let folder = chart.join("ci");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("{}: cannot be listed", folder.display()))?
    {
        let path = entry.with_context(|| format!("{}: cannot be listed", folder.display()))?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        names
            .extend(stem.filter(|_| path.extension().is_some_and(|extension| extension == "yaml")));
    }
    names.sort();
    Ok(names)
}

fn render(helm: &Path, chart: &Path, values: &Path, kubernetes: &str) -> Result<String> {
    output(
        Command::new(helm)
            .args(["template", "perfusion"])
            .arg(chart)
            .args(["--namespace", "perfusion", "--kube-version", kubernetes, "--values"])
            .arg(values),
    )
}

/// The objects whose kinds Kubernetes itself knows.
fn own(rendered: &str) -> String {
    let foreign =
        |object: &str| FOREIGN.iter().any(|group| object.contains(&format!("apiVersion: {group}")));
    rendered.split("---\n").filter(|object| !foreign(object)).collect::<Vec<_>>().join("---\n")
}

/// A typing error in the values must not install something else.
fn refusals(helm: &Path, chart: &Path) -> Result<()> {
    for (set, names) in REFUSED {
        let got = outcome(
            Command::new(helm)
                .args(["template", "perfusion", "--kube-version", KUBERNETES[1]])
                .arg(chart)
                .args(["--set", set]),
        )?;
        let said = String::from_utf8_lossy(&got.stderr);
        if got.status.success() || !said.contains(names) {
            bail!(
                "helm template --set {set}: expected a refusal that names `{names}`, found {}: \
                 {said}",
                got.status
            );
        }
    }
    Ok(())
}

/// What an installation says to the person who made it. helm shows notes only of what a cluster
/// took, so they are rendered as an object here.
fn notes(helm: &Path, chart: &Path, folder: &Path) -> Result<()> {
    let copy = folder.join("notes");
    clear(&copy)?;
    output(Command::new("cp").arg("-r").arg(chart).arg(&copy))?;
    fs::write(
        copy.join("templates/notes.yaml"),
        "notes: {{ include \"perfusion.notes\" . | toJson }}\n",
    )
    .with_context(|| format!("{}: cannot be written", copy.display()))?;
    for (set, warning) in WARNED {
        let said = output(
            Command::new(helm)
                .args(["template", "perfusion", "--kube-version", KUBERNETES[1]])
                .arg(&copy)
                .args([
                    "--namespace",
                    "perfusion",
                    "--show-only",
                    "templates/notes.yaml",
                    "--set",
                    set,
                ]),
        )?;
        if !said.contains(warning)
            || !said.contains("pod-security.kubernetes.io/enforce=privileged")
        {
            bail!("notes with --set {set}: expected `{warning}`, found:\n{said}");
        }
    }
    Ok(())
}

/// What templates of the chart make with a file of values, as JSON.
pub(crate) fn as_json<const N: usize>(
    paths: &WorkspacePaths,
    steps: &StepLog,
    values: &Path,
    templates: [&str; N],
) -> Result<[Value; N]> {
    let helm = install_helm(paths, steps)?;
    let copy = paths.target.join("helm/json");
    clear(&copy)?;
    fs::create_dir_all(paths.target.join("helm")).context("a folder for the chart")?;
    output(Command::new("cp").arg("-r").arg(paths.root.join("helm")).arg(&copy))?;
    let mut made = [const { Value::Null }; N];
    for (template, made) in templates.iter().zip(&mut made) {
        // helm prints nothing but YAML, of which JSON on one line is a part.
        let line = format!(
            "object: {{{{ include (print .Template.BasePath \"/{template}\") . | fromYaml | \
             toJson }}}}\n"
        );
        fs::write(copy.join("templates/object.yaml"), line)
            .with_context(|| format!("{}: cannot be written", copy.display()))?;
        let said = output(
            Command::new(&helm)
                .args(["template", "perfusion", "--kube-version", KUBERNETES[1]])
                .arg(&copy)
                .args([
                    "--namespace",
                    "perfusion",
                    "--show-only",
                    "templates/object.yaml",
                    "--values",
                ])
                .arg(values),
        )?;
        let object = said.lines().find_map(|line| line.strip_prefix("object: "));
        let object =
            object.with_context(|| format!("{template}: expected an object, found {said}"))?;
        *made = serde_json::from_str(object).with_context(|| format!("{template} as JSON"))?;
    }
    Ok(made)
}

/// helm is one Go program, so Go builds it.
pub(crate) fn install_helm(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let own = paths.toolchain.join("go/bin/helm");
    if !go::has(&own, "helm.sh/helm/v3", HELM) {
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
fn install_validator(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
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

#[cfg(test)]
mod tests {
    use super::own;

    #[test]
    fn objects_of_others_are_left_out() {
        let rendered = "---\napiVersion: v1\nkind: A\n---\napiVersion: \
             security.openshift.io/v1\nkind: B\n---\napiVersion: apps/v1\nkind: C\n";
        assert_eq!(
            own(rendered),
            "---\napiVersion: v1\nkind: A\n---\napiVersion: apps/v1\nkind: C\n"
        );
    }
}
