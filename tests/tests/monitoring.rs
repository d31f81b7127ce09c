//! The alerts and the dashboard beside a real Prometheus that scrapes a real daemon: all they ask
//! for is there, and a daemon that is well raises no alert.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use system_tests::app::Workload;
use system_tests::environment::{RECORD_NET9, Runtime, begin, sources};
use system_tests::perfusion::Scratch;
use system_tests::wait::{kill, wait_until};

use crate::node::{DEADLINE, Node, free_port};

/// A Prometheus of this test.
struct Prometheus {
    child: std::process::Child,
    port: u16,
    tools: PathBuf,
}

impl Prometheus {
    fn start(scratch: &Scratch, daemon: u16) -> Self {
        let tools = PathBuf::from(
            std::env::var("PERFUSION_PROMETHEUS").expect("PERFUSION_PROMETHEUS is not set"),
        );
        let (port, rules) = (free_port(), sources().join("../packaging/monitoring/rules.yaml"));
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [{rules:?}]\n\
             scrape_configs:\n\
             - {{job_name: perfusion, static_configs: [{{targets: [\"127.0.0.1:{daemon}\"]}}]}}\n\
             - {{job_name: itself, static_configs: [{{targets: [\"127.0.0.1:{port}\"]}}]}}\n"
        );
        fs::write(scratch.path("prometheus.yml"), config).unwrap();
        let child = Command::new(tools.join("prometheus"))
            .arg("--config.file")
            .arg(scratch.path("prometheus.yml"))
            .arg("--storage.tsdb.path")
            .arg(scratch.path("prometheus"))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(fs::File::create(scratch.path("prometheus.log")).unwrap())
            .spawn()
            .unwrap();
        Self { child, port, tools }
    }

    /// The values it has for a query now.
    fn values(&self, query: &str) -> Vec<Value> {
        let server = format!("http://127.0.0.1:{}", self.port);
        let asked = Command::new(self.tools.join("promtool"))
            .args(["query", "instant", "--format", "json", &server, query])
            .output()
            .unwrap();
        // It may not listen yet.
        let values: Option<Vec<Value>> = serde_json::from_slice(&asked.stdout).ok();
        values.unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It has ended by itself otherwise.
        kill(&mut self.child).ok();
    }
}

#[test]
#[ignore = "needs a Prometheus: cargo xtask monitoring"]
fn a_prometheus_finds_all_that_the_dashboard_asks_for_and_a_daemon_that_is_well_raises_no_alert() {
    let Some(_turn) = begin("monitoring: Prometheus", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    let mut node = Node::new();
    // A sink with a spool has the counters of both.
    node.configure(&format!(
        "selection: {{only: [{{command: dotnet}}]}}\nattach: {{policy: all}}\nlimits: \
         {{cpu: 100%, {}}}\n\
         spool: {{directory: {:?}, keep_free: 0B}}\notlp: \
         [{{url: \"http://127.0.0.1:{}\", protocol: http}}]\n",
        node.kill_switch(),
        node.scratch.path("spool"),
        free_port(),
    ));
    node.start();
    let prometheus = Prometheus::start(&node.scratch, node.port);
    let log = || fs::read_to_string(node.scratch.path("prometheus.log")).unwrap();
    wait_until("a scrape", DEADLINE, || {
        (!prometheus.values("up{job=\"perfusion\"} == 1").is_empty()).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", log()));
    let asked = std::env::var("PERFUSION_DASHBOARD").expect("PERFUSION_DASHBOARD is not set");
    let asked = fs::read_to_string(asked).unwrap();
    assert!(asked.lines().count() > 15, "{asked}");
    for query in asked.lines() {
        wait_until(query, DEADLINE, || {
            // Nothing is divided by nothing once stacks are walked.
            let number =
                |value: &Value| value["value"][1].as_str().is_some_and(|text| text != "NaN");
            let values = prometheus.values(query);
            (!values.is_empty() && values.iter().all(number)).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}\n{}", node.get("/metrics"), log()));
    }
    // As it sees it, each sample came in a form it knows.
    let scraped = prometheus.values("scrape_samples_scraped{job=\"perfusion\"}");
    let samples: f64 = scraped[0]["value"][1].as_str().unwrap().parse().unwrap();
    assert!(samples > 150.0, "{samples}");
    // The rules were evaluated, each of them, and more than once.
    wait_until("the rules to be evaluated", DEADLINE, || {
        (!prometheus.values("prometheus_rule_evaluations_total > 30").is_empty()).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", log()));
    assert_eq!(
        prometheus.values("prometheus_rule_evaluation_failures_total > 0"),
        Vec::<Value>::new(),
        "{}",
        log()
    );
    // There is no receiver, which is on its way to become an alert.
    let alerts = prometheus.values("ALERTS{alertname!=\"PerfusionReceiverAway\"}");
    assert_eq!(alerts, Vec::<Value>::new());
    drop(prometheus);
    app.stop().unwrap();
    node.end();
}
