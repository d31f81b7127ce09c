//! The daemon as a neighbour on its node: it stays within its CPU time and memory, says how each
//! process stands, and records whom it is told to.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{
    Need, RECORD, RECORD_NET9, Runtime, begin, begin_beside, long_form, skip,
};
use system_tests::perfusion::{self, Recording, SLACK, Scratch};
use system_tests::profile::Profile;
use system_tests::wait::{let_pass, wait_until};

/// A loaded machine may take long; windows are one second.
pub(crate) const DEADLINE: Duration = Duration::from_secs(180);

/// A daemon with windows of a second, its files and its port.
pub(crate) struct Node {
    pub(crate) scratch: Scratch,
    pub(crate) port: u16,
    daemon: Option<Recording>,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self { scratch: Scratch::new().unwrap(), port: free_port(), daemon: None }
    }

    /// Writes the configuration, with these lines more.
    pub(crate) fn configure(&self, more: &str) {
        let text = format!(
            "windows: {{length: 1s, aligned: false}}\n\
             files: {{directory: {0}/out, keep_free: 1MiB}}\n\
             telemetry: {{listen: 127.0.0.1:{1}}}\n{more}",
            self.scratch.path("").display(),
            self.port
        );
        fs::write(self.scratch.path("perfusion.yaml"), text).unwrap();
    }

    pub(crate) fn kill_switch(&self) -> String {
        format!("kill_switch: {}", self.scratch.path("run/off").display())
    }

    pub(crate) fn start(&mut self) {
        let mut command = perfusion::command(["daemon", "--config"]);
        self.run(command.arg(self.scratch.path("perfusion.yaml")));
    }

    pub(crate) fn run(&mut self, command: &mut std::process::Command) {
        let mut daemon = Recording::spawn(command).unwrap();
        daemon.await_progress("ready", DEADLINE).unwrap();
        self.daemon = Some(daemon);
    }

    pub(crate) fn daemon(&self) -> &Recording {
        self.daemon.as_ref().unwrap()
    }

    /// It is another's to end.
    pub(crate) fn take(&mut self) -> Recording {
        self.daemon.take().unwrap()
    }

    pub(crate) fn get(&self, path: &str) -> String {
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    }

    /// What `perfusion ps` says of a process, by this daemon's word.
    pub(crate) fn ps(&self, pid: u32) -> Value {
        let mut ps = perfusion::command(["ps", "--json", "--config"]);
        let outcome =
            perfusion::run(ps.arg(self.scratch.path("perfusion.yaml")), DEADLINE).unwrap();
        assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
        let rows: Value = serde_json::from_str(&outcome.stdout).unwrap();
        rows.as_array().unwrap().iter().find(|row| row["pid"] == pid).unwrap().clone()
    }

    /// A value of /metrics.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        value(&text, name).unwrap_or_else(|| panic!("no {name}:\n{text}"))
    }

    /// Bytes it takes: resident and of rings as the kernel says now, and of maps, which change with
    /// a recording only, as it says itself.
    pub(crate) fn memory(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon().pid())).unwrap();
        let kib = |name: &str| -> f64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0.0)
        };
        1024.0 * (kib("RssAnon") + kib("RssShmem") + kib("VmPin"))
            + self.metric("perfusion_memory_bytes{part=\"maps\"}")
    }

    /// Looks twice a second how much memory it has, until so many windows more are over, for ten
    /// seconds at least.
    pub(crate) fn watch_memory(&self, windows: f64) -> Vec<f64> {
        let over = || self.metric("perfusion_daemon_windows_total");
        let (first, begun, mut seen) = (over(), Instant::now(), Vec::new());
        while over() < first + windows || seen.len() < 20 {
            assert!(
                begun.elapsed() < DEADLINE,
                "{} windows of {windows}: {}",
                over() - first,
                self.daemon().progress()
            );
            seen.push(self.memory());
            let_pass(Duration::from_millis(500));
        }
        seen
    }

    /// The profiles there are, of all services, oldest first within each.
    pub(crate) fn profiles(&self) -> Vec<(String, Profile)> {
        let mut found = Vec::new();
        for service in fs::read_dir(self.scratch.path("out")).into_iter().flatten().flatten() {
            let name = service.file_name().to_string_lossy().into_owned();
            let files = fs::read_dir(service.path())
                .into_iter()
                .flatten()
                .flatten()
                .map(|file| file.path());
            let mut files: Vec<_> = files
                .filter(|file| file.extension().is_some_and(|ending| ending == "gz"))
                .collect();
            files.sort();
            found.extend(files.iter().filter_map(|file| match Profile::read(file) {
                Ok(profile) => Some((name.clone(), profile)),
                // To make room the daemon takes old ones away.
                Err(_) if !file.exists() => None,
                Err(error) => panic!("{error:#}"),
            }));
        }
        found
    }

    /// The pids in the profiles.
    pub(crate) fn pids(&self) -> BTreeSet<u32> {
        let profiles = self.profiles();
        let samples = profiles.iter().flat_map(|(_, profile)| &profile.samples);
        samples.filter_map(|sample| sample.label("pid").parse().ok()).collect()
    }

    pub(crate) fn end(mut self) {
        self.told_to_end().finish_well(2 * SLACK).unwrap();
    }

    pub(crate) fn told_to_end(&mut self) -> Recording {
        let daemon = self.daemon.take().unwrap();
        daemon.signal(Signal::TERM).unwrap();
        daemon
    }
}

/// A port nobody listens at.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A value in what /metrics says.
pub(crate) fn value(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// A cgroup that no other run of these tests has.
pub(crate) fn group(name: &str) -> std::io::Result<Group> {
    Group::new(&format!("{name}-{}", std::process::id()))
}

pub(crate) fn spin() -> App {
    Workload::native("spin", &[]).unwrap().start().unwrap()
}

#[test]
fn over_its_cpu_budget_it_records_at_lower_rates_says_so_and_comes_back() {
    let Some(_turn) = begin_beside("node: CPU budget", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let mut node = Node::new();
    // The rest of a busy machine would only keep it busy.
    let (selection, switch) = ("selection: {only: [{command: spin}]}", node.kill_switch());
    let limits = |cpu: &str| format!("{selection}\nlimits: {{cpu: {cpu}, {switch}}}\n");
    node.configure(&limits("0.1%"));
    // The budget is a part of all CPUs, so as many of them are busy on a large machine as on a
    // small one.
    let cpus = std::thread::available_parallelism().unwrap().get();
    let app = spin();
    let _more: Vec<_> = (1..cpus / 2).map(|_| spin()).collect();
    node.start();
    // 99 a second were asked for; two steps are a quarter of that.
    wait_until("two steps", DEADLINE, || {
        let text = node.get("/metrics");
        let at_least =
            |name: &str, least: f64| value(&text, name).is_some_and(|found| found >= least);
        let most = value(&text, "perfusion_frequency_hertz").is_some_and(|hertz| hertz <= 24.0);
        (at_least("perfusion_rate_steps", 2.0) && most).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!("{error}\n{}\n{}", node.daemon().progress(), node.get("/metrics"))
    });
    assert!(node.metric("perfusion_daemon_windows_over_cpu_total") >= 2.0);
    let is_lowered = |profile: &Profile| {
        profile.comments.iter().any(|line| line.starts_with("rates lowered, to stay within"))
    };
    let lowered = wait_until("a profile that says so", DEADLINE, || {
        node.profiles().into_iter().find(|(name, profile)| name == "spin" && is_lowered(profile))
    });
    let (_, lowered) = lowered.unwrap();
    // The rate it names is the rate it was taken at, and the time is exact whatever the rate.
    assert!(
        lowered
            .comments
            .iter()
            .any(|line| line.starts_with("cpu: 49 samples") || line.starts_with("cpu: 24 samples"))
    );
    let cpu = lowered.sum("cpu", |sample| sample.label("pid") == app.pid().to_string());
    assert!(
        cpu > 0 && cpu <= lowered.duration_ns + lowered.duration_ns / 100,
        "{cpu} of {}",
        lowered.duration_ns
    );

    node.configure(&limits("100%"));
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the rates to come back", DEADLINE, || {
        (node.metric("perfusion_rate_steps") == 0.0).then_some(())
    })
    .unwrap();
    assert_eq!(node.metric("perfusion_frequency_hertz"), 99.0);
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0, "without a new recording");
    wait_until("a profile at full rates", DEADLINE, || {
        let profiles = node.profiles();
        let last = profiles.iter().rfind(|(name, _)| name == "spin");
        last.filter(|(_, profile)| !is_lowered(profile)).map(drop)
    })
    .unwrap();
    node.end();
}

/// Processes that come and go in a cgroup: each run maps other files and walks other stacks, and
/// some of each round a file that nobody has seen before (in `folder`), so that what is remembered
/// of them grows without end.
fn churn(group: &Group, folder: &Path) -> std::process::Child {
    let churn = "perl=$(command -v perl); n=0; while :; do \
        for i in sed tail grep sort ls date env id python3 perl gcc ld readelf tar; do $i \
         --version; done; \
        for i in 1 2 3 4; do n=$((n+1)); cp \"$perl\" \"$1/$n\"; \"$1/$n\" -e '1 while $i++ < \
         1e6'; rm \"$1/$n\"; done; \
        done";
    let mut shell = std::process::Command::new("/bin/sh");
    let shell = shell
        .args(["-c", churn, "sh"])
        .arg(folder)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    group.take(shell.id()).unwrap();
    shell
}

/// Looks at the daemon's memory all the time over so many windows that all that is done against too
/// much of it would have its turn; of more than it may have there is at no time more than what may
/// be on its way: a sixteenth of the bound is the ring to the probes, and four times that its
/// records behind it (`daemon/src/daemon/mode.rs`). Memory is looked at once a second, and what is
/// found then to be too much is given back.
fn assert_within(what: &str, node: &Node, bound: f64) {
    let slack = bound / 4.0;
    let seen = node.watch_memory(if long_form() { 120.0 } else { 12.0 });
    let (least, most) = seen
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(least, most), look| (least.min(*look), most.max(*look)));
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let over = seen.iter().filter(|look| **look > bound).count();
    let [shed, cuts] =
        ["shed", "cuts"].map(|what| node.metric(&format!("perfusion_daemon_memory_{what}_total")));
    let text = format!(
        "{what}: {:.1} to {:.1} MiB in {} looks, {over} of them above the bound of {:.1} MiB; \
         caches dropped {shed} times, windows cut {cuts} times",
        mib(least),
        mib(most),
        seen.len(),
        mib(bound)
    );
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
    assert!(seen.len() >= 20, "{text}");
    assert!(most <= bound + slack, "{text}\n{}", node.daemon().progress());
    // And it is no state that lasts.
    assert!(3 * over <= seen.len(), "{text}\n{}", node.daemon().progress());
}

/// The least that may be asked for. What is recorded here takes minutes to reach it; what is done
/// then is seen in a small cgroup, whose bound is below what the daemon would have otherwise.
const BOUND_MIB: u32 = 64;

#[test]
fn with_a_small_bound_its_memory_stays_within_it_on_a_host_where_processes_come_and_go() {
    let Some(_turn) = begin_beside("node: memory bound", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let Ok(group) = group("perfusion-test-churn") else {
        skip("node: memory bound", "no cgroup v2 hierarchy to write to");
        return;
    };
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-churn*}}]}}\nlimits: \
         {{memory: {BOUND_MIB}MiB, {}}}\n",
        node.kill_switch()
    ));
    let app = spin();
    let mut churn = churn(&group, &node.scratch.path(""));
    group.take(app.pid()).unwrap();
    node.start();
    let bound = node.metric("perfusion_memory_limit_bytes");
    assert_eq!(bound, f64::from(BOUND_MIB << 20));
    wait_until("three windows", DEADLINE, || {
        (node.metric("perfusion_daemon_windows_total") >= 3.0).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert_within("with a bound of its own", &node, bound);
    churn.kill().unwrap();
    churn.wait().unwrap();
    drop(app);
    node.end();
}

/// What its cgroup allows: so little that what it would have otherwise, some 40 MiB, is more than
/// its part of that.
const LITTLE: u64 = 60 << 20;

#[test]
fn with_little_memory_in_its_cgroup_it_starts_in_a_reduced_mode_that_it_names() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("node: reduced mode", &needs) else { return };
    let name = format!("perfusion-test-little-{}", std::process::id());
    let Ok(little) = Group::with_memory(&name, LITTLE) else {
        skip("node: reduced mode", "no memory controller");
        return;
    };
    let recorded = group("perfusion-test-reduced").unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-reduced*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    let app = spin();
    recorded.take(app.pid()).unwrap();
    let mut churn = churn(&recorded, &node.scratch.path(""));
    // In it before it begins: a shell moves itself and becomes the daemon.
    let daemon = perfusion::command(["daemon"]);
    let mut command = std::process::Command::new("/bin/sh");
    command.args(["-c", "echo $$ > \"$1\" && exec \"$2\" daemon --config \"$3\"", "sh"]);
    command.arg(little.path().join("cgroup.procs")).arg(daemon.get_program());
    command.arg(node.scratch.path("perfusion.yaml"));
    node.run(&mut command);
    assert!(node.daemon().progress().contains("reduced mode: its cgroup allows 60 MiB of memory"));
    assert_eq!(node.metric("perfusion_reduced"), 1.0);
    // Three fifths of it are its own.
    let bound = node.metric("perfusion_memory_limit_bytes");
    assert_eq!(bound, (LITTLE as f64 * 0.6).floor());
    assert!(node.metric("perfusion_frequency_hertz") <= 49.0);
    wait_until("three windows that say so", DEADLINE, || {
        let says =
            |line: &String| line.starts_with("reduced mode: its cgroup allows 60 MiB of memory");
        let profiles = node.profiles();
        let of_app = profiles.iter().filter(|(name, _)| name == "spin");
        (of_app.filter(|(_, profile)| profile.comments.iter().any(says)).count() >= 3).then_some(())
    })
    .unwrap();
    // A bound that is never reached holds nothing.
    wait_until("memory to be short", DEADLINE, || {
        (node.metric("perfusion_daemon_memory_shed_total") >= 1.0).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!("{error}: {} of {bound}\n{}", node.memory(), node.daemon().progress())
    });
    assert_within("in a small cgroup", &node, bound);
    churn.kill().unwrap();
    churn.wait().unwrap();
    assert_eq!(little.ended_for_memory().unwrap(), 0);
    drop(app);
    node.end();
}

#[test]
fn a_daemon_says_how_each_process_stands_to_root_alone_and_nobody_holds_it_up() {
    let Some(_turn) = begin_beside("node: control socket", RECORD_NET9) else { return };
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{command: dotnet}}]}}\nattach: \
         {{policy: listed, services: [told]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    let workload =
        Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().env("OTEL_SERVICE_NAME", "told");
    let app = workload.start().unwrap();
    let shy = workload.env("PERFUSION_ATTACH", "off").start().unwrap();
    node.start();
    let socket = node.scratch.path("run/control.sock");
    // Those who connect and say nothing, as many as are served at once.
    let silent: Vec<UnixStream> = (0..16).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let rows = || (node.ps(app.pid()), node.ps(shy.pid()));
    let (row, shy_row) = wait_until("the daemon to know both", DEADLINE, || {
        let (row, shy) = rows();
        let knows = row["daemon"]["shim"] == true && row["daemon"]["stacks"].as_u64() > Some(20);
        (knows && shy["daemon"]["why_not"].is_string()).then_some((row, shy))
    })
    .unwrap_or_else(|error| panic!("{error}: {:?}\n{}", rows(), node.daemon().progress()));
    drop(silent);
    assert_eq!(
        (row["mode"].as_str(), row["daemon"]["is_clr"].as_bool()),
        (Some("shim_loaded"), Some(true))
    );
    assert!(row["daemon"]["stacks_broken"].as_u64() <= row["daemon"]["stacks"].as_u64());
    assert_eq!(shy_row["daemon"]["shim"], false);
    assert_eq!(shy_row["why_not"], "it opted out with PERFUSION_ATTACH=off");
    let maps = fs::read_to_string(format!("/proc/{}/maps", shy.pid())).unwrap();
    assert!(!maps.contains("perfusion-shim"), "touched");

    // Another user gets no word, even where the file has lost its rights.
    let python = "import socket,sys,os\nos.setgid(65534);os.setuid(65534)\n\
         s=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
         s.send(b'GET /processes HTTP/1.1\\r\\n\\r\\n')\nsys.exit(len(s.recv(100)))";
    let ask = || {
        std::process::Command::new("python3").args(["-c", python]).arg(&socket).output().unwrap()
    };
    if std::process::Command::new("python3").arg("--version").output().is_ok() {
        assert!(String::from_utf8_lossy(&ask().stderr).contains("PermissionError"));
        for (path, mode) in [
            (socket.clone(), 0o666),
            (node.scratch.path("run"), 0o755),
            (node.scratch.path(""), 0o755),
        ] {
            fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        }
        let refused = ask();
        // Closed without a word, at once or while it still spoke.
        let reset = String::from_utf8_lossy(&refused.stderr).contains("Broken pipe")
            || String::from_utf8_lossy(&refused.stderr).contains("reset");
        assert!(refused.status.success() || reset, "{refused:?}");
        wait_until("the refusal in the log", DEADLINE, || {
            node.daemon().progress().contains("refused at the control socket").then_some(())
        })
        .unwrap();
    }
    assert!(node.get("/debug/pipeline").contains("\"recording\": true"));
    app.stop().unwrap();
    shy.stop().unwrap();
    node.end();
    assert!(!socket.exists());
}

#[test]
fn only_those_are_recorded_that_the_rules_choose_and_no_word_is_heard_of_others() {
    let Some(_turn) = begin("node: selection", &[RECORD, &[Need::C]].concat()) else { return };
    let (Ok(wanted), Ok(unwanted)) =
        (group("perfusion-test-wanted"), group("perfusion-test-unwanted"))
    else {
        skip("node: selection", "no cgroup v2 hierarchy to write to");
        return;
    };
    let mut node = Node::new();
    let rules = |text: &str| format!("selection: {text}\nlimits: {{{}}}\n", node.kill_switch());
    let by_cgroup =
        rules("{only: [{cgroup: /perfusion-test-*}], except: [{cgroup: /perfusion-test-unw*}]}");
    let by_command = rules("{only: [{command: spin}]}");
    // Others than root run on many a host.
    let by_user = rules("{only: [{command: spin}], except: [{user: root}]}");
    let (inside, outside, excepted) = (spin(), spin(), spin());
    wanted.take(inside.pid()).unwrap();
    unwanted.take(excepted.pid()).unwrap();
    node.configure(&by_cgroup);
    node.start();
    let has = |pid: u32| node.pids().contains(&pid).then_some(());
    wait_until("the one in the cgroup", DEADLINE, || has(inside.pid())).unwrap();
    // One that comes into it later, and a group that is made later.
    let late = spin();
    wanted.take(late.pid()).unwrap();
    wait_until("the one that came later", DEADLINE, || has(late.pid())).unwrap();
    let young = group("perfusion-test-young").unwrap();
    young.take(outside.pid()).unwrap();
    wait_until("the one in a new cgroup", DEADLINE, || has(outside.pid())).unwrap();
    let expected = BTreeSet::from([inside.pid(), late.pid(), outside.pid()]);
    assert_eq!(node.pids(), expected, "nobody else");

    // By command: those four and no others, among them the one that was excepted.
    node.configure(&by_command);
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the one that was excepted", DEADLINE, || has(excepted.pid())).unwrap();
    assert_eq!(
        node.pids(),
        [&expected, &BTreeSet::from([excepted.pid()])].into_iter().flatten().copied().collect()
    );
    // The user of all of them: nothing is recorded any more.
    node.configure(&by_user);
    node.daemon().signal(Signal::HUP).unwrap();
    wait_until("the third recording", DEADLINE, || {
        (node.metric("perfusion_daemon_recordings_total") == 3.0).then_some(())
    })
    .unwrap();
    let before = node.metric("perfusion_daemon_windows_total");
    wait_until("two windows", DEADLINE, || {
        (node.metric("perfusion_daemon_windows_total") >= before + 2.0).then_some(())
    })
    .unwrap();
    assert_eq!(
        node.metric("perfusion_events_cpu_samples_total"),
        0.0,
        "{}",
        node.get("/debug/pipeline")
    );
    node.end();
}

#[test]
fn a_process_is_called_what_its_sdk_publishes_and_lies_change_nothing() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("node: published names", &needs) else { return };
    let group = group("perfusion-test-publishes").unwrap();
    let workload = Workload::native("publishes", &[]).unwrap().env("DD_SERVICE", "by-variable");
    let mut app = workload.start().unwrap();
    app.perform("early").unwrap();
    let liars = ["?size", "?address", "?payload", "?version"].map(|lie| {
        let mut liar = workload.start().unwrap();
        liar.perform(lie).unwrap();
        liar
    });
    for app in liars.iter().chain([&app]) {
        group.take(app.pid()).unwrap();
    }
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-publishes*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let await_service = |node: &Node, service: &str, pid: u32| {
        let found = wait_until("a profile of the service", DEADLINE, || {
            let of = |profile: &Profile| {
                profile.samples.iter().any(|sample| sample.label("pid") == pid.to_string())
            };
            node.profiles().into_iter().rfind(|(name, profile)| name == service && of(profile))
        });
        found.unwrap_or_else(|error| panic!("{service}: {error}\n{}", node.daemon().progress())).1
    };
    for name in ["early", "late"] {
        app.perform(name).unwrap();
        let profile = await_service(&node, name, app.pid());
        let own =
            profile.samples.iter().filter(|sample| sample.label("pid") == app.pid().to_string());
        let labels: BTreeSet<&str> =
            own.map(|sample| sample.label("service.instance.id")).collect();
        assert_eq!(labels, BTreeSet::from(["one"]));
    }
    // By now each has been looked at as often as that one.
    for liar in &liars {
        await_service(&node, "by-variable", liar.pid());
    }
    let pids = liars.each_ref().map(|liar| liar.pid().to_string());
    for (service, profile) in node.profiles().iter().filter(|(service, _)| service != "by-variable")
    {
        assert!(
            !profile.samples.iter().any(|sample| pids.iter().any(|pid| pid == sample.label("pid"))),
            "{service}"
        );
    }
    node.end();
    drop((app, liars));
}
