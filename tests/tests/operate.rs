//! What whoever runs a daemon relies on: the three forms of its kill switch, that it makes way for
//! others, that its metrics are those that are listed, what it says each process costs, and that a
//! reload makes it forget nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, getpriority_process};
use system_tests::app::Workload;
use system_tests::environment::{Need, RECORD, RECORD_NET9, Runtime, begin, begin_beside};
use system_tests::perfusion::{self, SLACK};
use system_tests::profile::Sample;
use system_tests::wait::{let_pass, wait_until};

use crate::node::{DEADLINE, Node, free_port, group, spin, value};

/// Nobody runs this command: what these daemons record does not matter.
const NOBODY: &str = "selection: {only: [{command: no-such-command}]}";

#[test]
fn the_kill_switch_is_a_signal_a_value_and_a_file_and_each_is_named_and_undone_by_itself() {
    let Some(_turn) = begin_beside("operate: kill switch", RECORD) else { return };
    let mut node = Node::new();
    let limits =
        |off: bool| format!("{NOBODY}\nlimits: {{switched_off: {off}, {}}}\n", node.kill_switch());
    let (on, off) = (limits(false), limits(true));
    node.configure(&on);
    node.start();
    let is_off = |by: &[&str]| {
        let text = node.get("/readyz");
        wait_until(&format!("off by {by:?}"), DEADLINE, || {
            let ready = node.get("/readyz");
            let named = |by: &&str| ready.contains(by);
            (ready.starts_with("HTTP/1.1 503") && by.iter().all(named)).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {text}\n{}", node.daemon().progress()));
        let text = node.get("/metrics");
        assert_eq!(value(&text, "perfusion_recording"), Some(0.0));
        for (form, word) in
            [("file", "run/off"), ("signal", "SIGUSR1"), ("config", "limits.switched_off")]
        {
            let metric = format!("perfusion_switched_off{{by=\"{form}\"}}");
            assert_eq!(
                value(&text, &metric),
                Some(f64::from(u8::from(by.contains(&word)))),
                "{form}"
            );
        }
        // A daemon that is switched off lives.
        assert!(node.get("/healthz").starts_with("HTTP/1.1 200"));
    };
    let is_on = || {
        wait_until("it to record", DEADLINE, || {
            node.get("/readyz").starts_with("HTTP/1.1 200").then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    };
    is_on();
    node.daemon().signal(Signal::USR1).unwrap();
    is_off(&["SIGUSR1"]);
    node.daemon().signal(Signal::USR2).unwrap();
    is_on();
    node.configure(&off);
    node.daemon().signal(Signal::HUP).unwrap();
    is_off(&["limits.switched_off"]);
    // Each is undone by itself.
    fs::write(node.scratch.path("run/off"), "").unwrap();
    is_off(&["limits.switched_off", "run/off"]);
    let mut ps = perfusion::command(["ps", "--config"]);
    let said =
        perfusion::run(ps.arg(node.scratch.path("perfusion.yaml")), DEADLINE).unwrap().stderr;
    assert!(said.contains("switched off by the file"), "{said}");
    node.configure(&on);
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the file alone", DEADLINE, || {
        (!node.get("/readyz").contains("limits.switched_off")).then_some(())
    })
    .unwrap();
    is_off(&["run/off"]);
    fs::remove_file(node.scratch.path("run/off")).unwrap();
    is_on();
    let daemon = node.take();
    daemon.signal(Signal::TERM).unwrap();
    let said = daemon.finish_well(2 * SLACK).unwrap().stderr;
    for line in [
        "switched off by SIGUSR1",
        "switched off by limits.switched_off",
        "switched off by the file",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

/// `oom_score_adj` of a process, and of each of its threads name, nice, and what ionice(1) calls
/// the I/O priority.
fn standing(pid: u32) -> (i32, BTreeSet<(String, i32, String)>) {
    let read = |path: &str| fs::read_to_string(format!("/proc/{pid}/{path}")).unwrap();
    let mut threads = BTreeSet::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let tid = thread.unwrap().file_name().into_string().unwrap();
        let io = Command::new("ionice").args(["-p", &tid]).output().unwrap();
        // Threads that answer somebody come and go.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")) else { continue };
        if io.status.success() {
            let name = stat.split(['(', ')']).nth(1).unwrap().to_owned();
            threads.insert((
                name,
                nice(&stat),
                String::from_utf8(io.stdout).unwrap().trim().to_owned(),
            ));
        }
    }
    (read("oom_score_adj").trim().parse().unwrap(), threads)
}

/// The nineteenth field.
fn nice(stat: &str) -> i32 {
    let (_, behind_name) = stat.rsplit_once(") ").unwrap();
    behind_name.split(' ').nth(16).unwrap().parse().unwrap()
}

#[test]
fn it_makes_way_for_others_with_all_its_threads_unless_told_and_what_record_starts_does_not() {
    let needs = [RECORD, &[Need::Program("ionice")]].concat();
    let Some(_turn) = begin_beside("operate: priorities", &needs) else { return };
    // What these tests run with, the daemon has as well: it never raises itself.
    let own_nice = getpriority_process(None).unwrap();
    let (own_oom, _) = standing(std::process::id());
    for (lower, oom, of_others) in
        [(true, own_oom.max(500), own_nice.max(10)), (false, own_oom, own_nice)]
    {
        let mut node = Node::new();
        let switch = node.kill_switch();
        node.configure(&format!("{NOBODY}\nlimits: {{lower_priority: {lower}, {switch}}}\n"));
        node.start();
        let last = |io: &str| io == "best-effort: prio 7" || io == "idle";
        // Each begins with it, a moment after it was made.
        wait_until("six threads as they should be", DEADLINE, || {
            let (found_oom, threads) = standing(node.daemon().pid());
            let mut seen = BTreeSet::new();
            for (name, nice, io) in &threads {
                let expected = match name.as_str() {
                    "collector" | "processor" => own_nice,
                    "sink" | "control" | "http" | "attacher" => of_others,
                    _ => continue,
                };
                let is_so = *nice == expected && (!lower || last(io));
                seen.extend(is_so.then_some(name.clone()));
            }
            (found_oom == oom && seen.len() == 6).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {:?}", standing(node.daemon().pid())));
        assert!(
            !node.daemon().progress().contains("stays as it is"),
            "{}",
            node.daemon().progress()
        );
        node.end();
    }
    let scratch = system_tests::perfusion::Scratch::new().unwrap();
    let mut record = perfusion::command(["record", "-o"]);
    record.arg(scratch.path("x.pb.gz")).args([
        "--",
        "cat",
        "/proc/self/oom_score_adj",
        "/proc/self/stat",
    ]);
    let said = perfusion::run(&mut record, SLACK).unwrap();
    let (oom, stat) = said.stdout.split_once('\n').unwrap_or_else(|| panic!("{said:?}"));
    assert_eq!((oom.parse(), nice(stat)), (Ok(own_oom), own_nice));
}

/// What OpenMetrics 1.0 says of a document, as far as it can be seen from outside: type and sample
/// names of each family.
fn parse(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let body = text.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no end: {text}"));
    let is_name = |name: &str| {
        !name.is_empty()
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !name.starts_with(|c: char| c.is_ascii_digit())
    };
    // Neither a quote nor a backslash stands alone.
    let is_escaped = |text: &str| {
        let mut letters = text.chars();
        std::iter::from_fn(|| {
            letters.next().map(|c| (c, (c == '\\').then(|| letters.next()).flatten()))
        })
        .collect::<Vec<_>>()
        .iter()
        .all(|(c, next)| *c != '"' && (*c != '\\' || matches!(next, Some('n' | '\\' | '"'))))
    };
    let mut families: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    let (mut current, mut described, mut series) = (String::new(), String::new(), BTreeSet::new());
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(is_name(name) && ["counter", "gauge", "info"].contains(&kind), "{line}");
            assert!(!name.ends_with("_total") && !name.ends_with("_info"), "{line}");
            let before = families.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
            assert!(before.is_none(), "twice: {line}");
            current = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(name == current && described != name, "{line}");
            assert!(help.len() > 3 && help != "not described" && is_escaped(help), "{line}");
            described = name.to_owned();
        } else {
            let (series_name, number) = line.rsplit_once(' ').unwrap();
            assert!(series.insert(series_name.to_owned()), "twice: {line}");
            let number: f64 = number.parse().unwrap();
            let (name, labels) = series_name.split_once('{').unwrap_or((series_name, "}"));
            let (kind, samples) = families.get_mut(&current).unwrap();
            let suffix = match kind.as_str() {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert_eq!(name, format!("{current}{suffix}"), "{line}");
            assert!(kind == "gauge" || number >= 0.0, "{line}");
            let labels = labels.strip_suffix('}').unwrap();
            // Values have no `","` in them.
            for label in labels.split("\",").filter(|label| !label.is_empty()) {
                let (label, value) = label.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
                assert!(
                    is_name(label) && is_escaped(value.strip_suffix('"').unwrap_or(value)),
                    "{line}"
                );
            }
            samples.insert(name.to_owned());
        }
        assert!(described == current || line.starts_with("# TYPE"), "no HELP: {line}");
    }
    families
}

/// Of each row the second column, which the code's lists are written to by
/// `cargo xtask tidy --fix`.
fn listed() -> BTreeSet<String> {
    let rows = include_str!("../../docs/metrics.md").lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| row.split('|').nth(2).unwrap().trim().trim_matches('`').to_owned()).collect()
}

#[test]
fn metrics_are_those_that_are_listed_each_with_its_meaning_and_in_the_form_of_openmetrics() {
    let Some(_turn) = begin_beside("operate: metrics", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let app = spin();
    let mut node = Node::new();
    // Nobody is there to take it: what such a sink counts is counted all the same.
    let receivers = [free_port(), free_port()];
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}]}}\nlimits: {{{}}}\n\
         spool: {{directory: {:?}, keep_free: 0B}}\notlp: \
         [{{url: \"http://127.0.0.1:{}\", protocol: http}}]\n\
         pyroscope: [{{url: \"http://127.0.0.1:{}\"}}]\n",
        node.kill_switch(),
        node.scratch.path("spool"),
        receivers[0],
        receivers[1],
    ));
    node.start();
    let made = format!(
        "perfusion_sink_requests_made_total{{sink=\"otlp http://127.0.0.1:{}\"}}",
        receivers[0]
    );
    wait_until("a window with the sinks", DEADLINE, || {
        let text = node.get("/metrics");
        (value(&text, &made)? > 0.0 && value(&text, "perfusion_stacks_walked_total")? > 0.0)
            .then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.get("/metrics")));
    let answer = node.get("/metrics");
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("application/openmetrics-text; version=1.0.0; charset=utf-8"), "{head}");
    let families = parse(text);
    let told: BTreeSet<String> =
        families.values().flat_map(|(_, samples)| samples.clone()).collect();
    assert_eq!(told, listed(), "those of /metrics and those of docs/metrics.md");

    // What the daemon says a process costs it, by the same daemon.
    let ps = |json: &[&str]| {
        let mut ps = perfusion::command(["ps"]);
        let outcome = perfusion::run(
            ps.args(json).arg("--config").arg(node.scratch.path("perfusion.yaml")),
            DEADLINE,
        );
        outcome.unwrap().stdout
    };
    let row = wait_until("a cost", DEADLINE, || {
        let row = node.ps(app.pid());
        (row["daemon"]["cpu_us"].as_u64()? > 0).then_some(row)
    })
    .unwrap_or_else(|error| panic!("{error}: {}", node.ps(app.pid())));
    let of = |name: &str| row["daemon"][name].as_u64().unwrap();
    assert!(
        of("records") >= of("stacks")
            && of("known_for_ms") > 0
            && of("cpu_us") >= of("lookup_ms") * 1000
    );
    let all: serde_json::Value = serde_json::from_str(&ps(&["--json"])).unwrap();
    let costs = all.as_array().unwrap().iter().filter_map(|row| row["daemon"]["cpu_us"].as_u64());
    let (sum, daemon) =
        (costs.sum::<u64>(), node.metric("perfusion_cpu_seconds_total{part=\"daemon\"}"));
    // Some of it is an estimate, from one record in sixteen.
    assert!(sum as f64 / 1e6 < 1.5 * daemon + 0.05, "{sum} of {daemon}");
    let table = ps(&[]);
    let line = table
        .lines()
        .find(|line| line.trim_start().starts_with(&format!("{} ", app.pid())))
        .unwrap();
    assert!(table.lines().next().unwrap().contains("   COST  ") && line.contains('%'), "{table}");
    node.end();
}

#[test]
fn who_cannot_be_attached_to_is_not_tried_again_when_the_configuration_begins_a_new_recording() {
    let needs = [RECORD_NET9, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("operate: failed attaches and reloads", &needs) else { return };
    let name = "perfusion-test-failed";
    let workload = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let (app, silent) = (workload.clone().start().unwrap(), {
        workload.env("DOTNET_EnableDiagnostics", "0").start().unwrap()
    });
    let group = group(name).unwrap();
    for app in [&app, &silent] {
        group.take(app.pid()).unwrap();
    }
    let mut node = Node::new();
    let switch = node.kill_switch();
    let with = |frequency: u32| {
        format!(
            "selection: {{only: [{{cgroup: /{name}*}}]}}\nattach: \
             {{policy: all, retry_after: 1s}}\n\
             recording: {{frequency: {frequency}}}\nlimits: {{cpu: 100%, {switch}}}\n"
        )
    };
    node.configure(&with(99));
    node.start();
    let become_so = |recordings: f64| {
        wait_until("one attached and one failed", DEADLINE, || {
            let text = node.get("/metrics");
            let is = |name: &str, expected: f64| {
                value(&text, name).is_some_and(|found| found >= expected)
            };
            let done = is("perfusion_daemon_attached_total", recordings)
                && is("perfusion_daemon_attach_failed_total", 1.0)
                && is("perfusion_daemon_recordings_total", recordings);
            let known = node.ps(silent.pid())["daemon"]["why_not"].is_string();
            (done && known).then_some(())
        })
        .unwrap_or_else(|error| {
            panic!("{error}\n{}\n{}", node.daemon().progress(), node.get("/metrics"))
        });
    };
    become_so(1.0);
    node.configure(&with(49));
    node.daemon().signal(Signal::HUP).unwrap();
    become_so(2.0);
    // Processes are considered every second.
    let_pass(Duration::from_millis(2500));
    assert_eq!(
        node.metric("perfusion_daemon_attach_failed_total"),
        1.0,
        "{}",
        node.daemon().progress()
    );
    let why = node.ps(silent.pid())["daemon"]["why_not"].clone();
    assert!(why.as_str().unwrap().contains("DOTNET_EnableDiagnostics"), "{why}");
    // Frames of the one that has nobody to ask are not counted as names that are missing.
    wait_until("named frames", DEADLINE, || {
        (node.metric("perfusion_managed_frames_total") > 20.0).then_some(())
    })
    .unwrap();
    let (all, unnamed) = (
        node.metric("perfusion_managed_frames_total"),
        node.metric("perfusion_managed_frames_unnamed_total"),
    );
    assert!(unnamed < all / 3.0, "{unnamed} of {all}");
    node.end();
    drop((app, silent));
}

/// The most samples a second that this kernel gives anybody, until the end of the test.
struct SampleRate(String);

impl SampleRate {
    const FILE: &str = "/proc/sys/kernel/perf_event_max_sample_rate";

    fn at_most(hertz: u32) -> Self {
        let before = fs::read_to_string(Self::FILE).unwrap();
        fs::write(Self::FILE, hertz.to_string()).unwrap();
        Self(before)
    }
}

impl Drop for SampleRate {
    fn drop(&mut self) {
        fs::write(Self::FILE, self.0.trim()).unwrap();
    }
}

#[test]
fn what_the_host_refuses_of_a_good_configuration_stays_as_it_was() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin("operate: the host refuses", &needs) else { return };
    let _rate = SampleRate::at_most(2000);
    let group = group("perfusion-test-refused").unwrap();
    let app = spin();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    let good = format!(
        "selection: {{only: [{{cgroup: /perfusion-test-refused*}}]}}\nlimits: {{cpu: 100%, {}}}\n",
        node.kill_switch()
    );
    node.configure(&good);
    node.start();
    wait_until("a window", DEADLINE, || (!node.profiles().is_empty()).then_some(())).unwrap();
    node.configure(&format!("{good}recording: {{frequency: 5000}}\nservices: {{max: 7}}\n"));
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("a reload", DEADLINE, || {
        (node.metric("perfusion_daemon_reloads_failed_total") > 0.0).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    let before = node.profiles().len();
    wait_until("windows as before", DEADLINE, || {
        (node.profiles().len() >= before + 2).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert_eq!(node.metric("perfusion_frequency_hertz"), 99.0);
    assert!(node.daemon().progress().contains("what is recorded stays as it was"));
    // And a good one is taken afterwards.
    node.configure(&format!("{good}recording: {{frequency: 199}}\n"));
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the new frequency", DEADLINE, || {
        (node.metric("perfusion_frequency_hertz") == 199.0).then_some(())
    })
    .unwrap();
    node.end();
}

#[test]
fn a_program_whose_every_stack_is_another_does_not_take_it_beyond_its_memory() {
    let Some(_turn) = begin("operate: stacks and memory", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let mut node = Node::new();
    // Only what must end the window does.
    fs::write(
        node.scratch.path("perfusion.yaml"),
        format!(
            "windows: {{length: 1h, aligned: false}}\n\
             files: {{directory: {0}/out, keep_free: 1MiB}}\ntelemetry: \
             {{listen: 127.0.0.1:{1}}}\n\
             selection: {{only: [{{command: differ}}]}}\n\
             recording: {{wait_stacks: 64MiB}}\n\
             limits: {{memory: 192MiB, cpu: 100%, {2}}}\n",
            node.scratch.path("").display(),
            node.port,
            node.kill_switch()
        ),
    )
    .unwrap();
    let app = Workload::native("differ", &[]).unwrap().start().unwrap();
    node.start();
    let bound = node.metric("perfusion_memory_limit_bytes");
    let cuts = || node.metric("perfusion_daemon_memory_cuts_total");
    let mut most = 0.0_f64;
    wait_until("two windows to end for their stacks", DEADLINE, || {
        most = most.max(node.memory());
        (cuts() >= 2.0 && node.profiles().len() >= 2).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {}", node.daemon().progress()));
    let mib = f64::from(1 << 20);
    writeln!(std::io::stderr(), "most {:.1} MiB of {:.1}", most / mib, bound / mib).unwrap();
    // As docs/reliability.md has it.
    assert!(
        most <= 1.25 * bound,
        "{:.1} MiB of {:.1}: {}",
        most / mib,
        bound / mib,
        node.daemon().progress()
    );
    // Windows go on from each other, and each has what its stacks were, or says that there was no
    // room for them.
    let profiles = node.profiles();
    for pair in profiles.windows(2) {
        let gap = (pair[1].1.time_ns - pair[0].1.time_ns - pair[0].1.duration_ns).abs();
        assert!(gap < 500_000_000, "{gap} ns between two windows");
    }
    for (_, profile) in &profiles[..2] {
        let text = || profile.describe("blocked", |_| true);
        let blocked = |fits: &dyn Fn(&Sample) -> bool| profile.sum("blocked", fits) as f64;
        let all = blocked(&|_| true);
        let own = blocked(&|sample| sample.has("wander"));
        let said = blocked(&|sample| sample.has("[other stacks]") || sample.has("[stack lost]"));
        assert!(own + said > 0.95 * all, "{own} + {said} of {all}: {}", text());
        // How many find no room, in the table or in the ring, depends on how fast the machine is.
        assert!(own > 0.2 * all, "{own} of {all}: {}", text());
    }
    drop(app);
    node.end();
}
