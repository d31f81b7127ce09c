//! `cargo xtask monitoring`: the alerts and the dashboard in `packaging/monitoring` by Prometheus'
//! own tools: whether they are valid, whether each alert is raised for what it is about and for
//! nothing else, and whether a real Prometheus that scrapes a real daemon finds what they ask for.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    exec::{StepLog, need_root, output},
    paths::WorkspacePaths,
    setup::{self, debian, package::clear},
    test,
};

/// Has promtool, too.
const PACKAGE: &str = "prometheus";

/// All of it.
pub(crate) fn monitoring(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    need_root("recording")?;
    let tools = check(paths, steps)?;
    let dashboard = queries(&folder_of(paths).join("dashboard.json"))?;
    let asked = paths.target.join("monitoring/dashboard.txt");
    fs::write(&asked, dashboard.join("\n"))
        .with_context(|| format!("{}: cannot be written", asked.display()))?;
    setup::pinned_dotnets(paths, steps)?;
    let (roots, csc) = (paths.dotnet_roots(), paths.csc());
    let given = [
        ("PERFUSION_PROMETHEUS", tools.as_path()),
        ("PERFUSION_DASHBOARD", asked.as_path()),
        ("PERFUSION_DOTNET_ROOTS", roots.as_path()),
        ("PERFUSION_CSC", csc.as_path()),
    ];
    test::with_servers(paths, steps, ("a Prometheus", "monitoring::"), &given)
}

/// What needs no recording; answers where the tools are.
pub(crate) fn check(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let promtool =
        debian::unpack(steps, &paths.toolchain.join("prometheus"), PACKAGE, "usr/bin/promtool")?;
    let tools = promtool.parent().context("the folder of promtool")?.to_path_buf();
    steps.step("alerts and dashboard: promtool");
    let folder = folder_of(paths);
    let promtool = || {
        let mut command = Command::new(tools.join("promtool"));
        command.current_dir(&folder);
        command
    };
    let lint = ["check", "rules", "--lint=all", "--lint-fatal"];
    output(promtool().args(lint).arg("rules.yaml"))?;
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))
    };
    let untested = untested(&read("rules.yaml")?, &read("rules_test.yaml")?);
    if !untested.is_empty() {
        bail!(
            "rules_test.yaml: expected an alert that is raised for each rule, found none of {}",
            untested.join(", ")
        );
    }
    output(promtool().args(["test", "rules", "rules_test.yaml"]))?;

    let own = paths.target.join("monitoring");
    clear(&own)?;
    fs::create_dir_all(&own).with_context(|| format!("{}: cannot be made", own.display()))?;
    let rules = own.join("dashboard.yaml");
    fs::write(&rules, as_rules(&queries(&folder.join("dashboard.json"))?))
        .with_context(|| format!("{}: cannot be written", rules.display()))?;
    output(promtool().args(lint).arg(&rules)).context("packaging/monitoring/dashboard.json")?;
    Ok(tools)
}

fn folder_of(paths: &WorkspacePaths) -> PathBuf {
    paths.root.join("packaging/monitoring")
}

/// The alerts of which no test expects that they are raised.
fn untested(rules: &str, tests: &str) -> Vec<String> {
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let raised = |alert: &str| {
        let mut lines = tests.lines().map(str::trim);
        lines.any(|line| line == format!("alertname: {alert}"))
            && lines.next() == Some("exp_alerts:")
    };
    alerts.filter(|alert| !raised(alert)).map(str::to_owned).collect()
}

/// What the panels of a dashboard ask for, of all nodes.
fn queries(dashboard: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(dashboard)
        .with_context(|| format!("{}: cannot be read", dashboard.display()))?;
    let json: Value = serde_json::from_str(&text)
        .with_context(|| format!("{}: not JSON", dashboard.display()))?;
    let panels = json["panels"].as_array().context("the dashboard has no panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let queries: Vec<String> = targets
        .filter_map(|target| Some(target["expr"].as_str()?.replace("$instance", ".*")))
        .collect();
    if queries.len() < panels.len() || queries.iter().any(|query| query.contains('$')) {
        bail!(
            "{}: expected a query in each panel, without variables but $instance",
            dashboard.display()
        );
    }
    Ok(queries)
}

/// As recording rules, which promtool checks. A JSON string is a YAML one.
fn as_rules(queries: &[String]) -> String {
    let rules = queries.iter().enumerate().map(|(number, query)| {
        format!(
            "      - record: panel:query{number}\n        expr: {}\n",
            Value::from(query.as_str())
        )
    });
    format!("groups:\n  - name: dashboard\n    rules:\n{}", rules.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::{as_rules, untested};

    #[test]
    fn an_alert_that_no_test_raises_is_named() {
        let rules = "rules:\n  - alert: A\n    expr: x\n  - alert: B\n    expr: y\n  - alert: C\n";
        let tests = "  - eval_time: 1m\n    alertname: A\n    exp_alerts:\n      - exp_labels: {}\n\
                     - { eval_time: 9m, alertname: B, exp_alerts: [] }\n";
        assert_eq!(untested(rules, tests), ["B", "C"]);
    }

    #[test]
    fn queries_are_quoted() {
        let text = as_rules(&["a{b=~\".*\"}".to_owned()]);
        assert!(
            text.ends_with("      - record: panel:query0\n        expr: \"a{b=~\\\".*\\\"}\"\n"),
            "{text}"
        );
    }
}
