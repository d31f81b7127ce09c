//! A node with very many processes, cgroups and runtimes, of which some come and go all the time:
//! the daemon keeps to its memory, loses nothing it does not count, and has the time of all of
//! them. Small here; `cargo xtask scale` asks for more and prints what it costs.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{Need, RECORD_NET9, Runtime, begin};
use system_tests::profile::Profile;
use system_tests::wait::wait_until;

use crate::node::{DEADLINE, Node, group, spin, value};

/// How much there is of each.
struct Size {
    processes: usize,
    cgroups: usize,
    runtimes: usize,
    starts_a_second: usize,
    /// Of each measurement, and of a window.
    seconds: u64,
    window: u64,
}

/// What `cargo xtask scale` asks for, in this order: with it the figures are judged, too, which on
/// a machine that others use says little.
fn size() -> (Size, bool) {
    let asked = std::env::var("PERFUSION_SCALE").ok();
    let of = |text: &str| {
        text.split_whitespace().map(|word| word.parse().unwrap()).collect::<Vec<usize>>()
    };
    let [processes, cgroups, runtimes, starts_a_second, seconds] =
        asked.as_deref().map_or_else(|| vec![200, 20, 2, 100, 2], of).try_into().unwrap();
    let (seconds, window) = (seconds as u64, if asked.is_some() { 10 } else { 1 });
    (Size { processes, cgroups, runtimes, starts_a_second, seconds, window }, asked.is_some())
}

/// CPUs of the node that the figures are extended to, and the part of them that is busy there.
const NODE_CPUS: f64 = 64.0;
const NODE_BUSY: f64 = 0.5;

/// Cgroups 0 to N-1 in one.
struct Groups {
    top: Group,
    count: usize,
}

impl Groups {
    fn make(count: usize) -> Self {
        let top = group("perfusion-test-scale").unwrap();
        (0..count).for_each(|number| fs::create_dir(top.path().join(number.to_string())).unwrap());
        Self { top, count }
    }

    fn take(&self, app: &App, number: usize) {
        let procs = self.top.path().join((number % self.count).to_string()).join("cgroup.procs");
        fs::write(procs, app.pid().to_string()).unwrap();
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for number in 0..self.count {
            let path = self.top.path().join(number.to_string());
            // Its processes were told to end; the kernel takes them out when they have.
            wait_until("a cgroup to be empty", DEADLINE, || fs::remove_dir(&path).ok()).ok();
        }
    }
}

/// What the daemon has taken and lost, by its own word.
struct Taken {
    at: Instant,
    metrics: String,
}

impl Taken {
    fn now(node: &Node) -> Self {
        Self { at: Instant::now(), metrics: node.get("/metrics") }
    }

    fn value(&self, name: &str) -> f64 {
        value(&self.metrics, name).unwrap_or_else(|| panic!("no {name}:\n{}", self.metrics))
    }

    /// CPUs taken since: by the daemon, and by the probes as far as is known.
    fn cpus_since(&self, before: &Self) -> (f64, f64) {
        let seconds = (self.at - before.at).as_secs_f64();
        let of = |part: &str| {
            let name = format!("perfusion_cpu_seconds_total{{part=\"{part}\"}}");
            (self.value(&name) - before.value(&name)) / seconds
        };
        (of("daemon"), of("probes"))
    }

    /// MiB: of itself, of maps, of rings.
    fn memory(&self) -> [f64; 3] {
        ["resident", "maps", "rings"].map(|part| {
            self.value(&format!("perfusion_memory_bytes{{part=\"{part}\"}}")) / f64::from(1 << 20)
        })
    }
}

/// Looks at the memory every half second for so long; the most there was.
fn watch(node: &Node, seconds: u64) -> [f64; 3] {
    let (begin, mut most) = (Instant::now(), [0.0; 3]);
    let sum = |parts: &[f64; 3]| parts.iter().sum::<f64>();
    // It is what passes meanwhile that is looked at.
    while begin.elapsed() < Duration::from_secs(seconds) {
        let now = Taken::now(node).memory();
        if sum(&now) > sum(&most) {
            most = now;
        }
        system_tests::wait::let_pass(Duration::from_millis(500));
    }
    most
}

#[test]
fn a_node_of_very_many_processes_is_recorded_within_bounds() {
    let needs = [RECORD_NET9, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin("scale", &needs) else { return };
    let (size, judged) = size();
    let groups = Groups::make(size.cgroups);
    let top = groups.top.path();
    let crowd = Workload::native("crowd", &["-static"]).unwrap();
    let crowd = [size.processes, 1000, size.cgroups]
        .into_iter()
        .fold(crowd, |crowd, word| crowd.arg(word.to_string()));
    let crowd = crowd.arg(top).start().unwrap();
    let in_groups = || {
        let procs = |number: usize| {
            fs::read_to_string(top.join(number.to_string()).join("cgroup.procs")).unwrap()
        };
        (0..size.cgroups).map(|number| procs(number).lines().count()).sum::<usize>()
    };
    wait_until("the crowd in its cgroups", DEADLINE, || {
        (in_groups() >= size.processes).then_some(())
    })
    .unwrap();
    let workload = Workload::dotnet(Runtime::Net9, "trickle", &[]).unwrap();
    let mut runtimes: Vec<App> = (0..size.runtimes)
        .map(|number| {
            let app = workload.spawn().unwrap();
            groups.take(&app, number);
            app
        })
        .collect();
    runtimes.iter_mut().for_each(|app| app.await_ready().unwrap());
    let storm = Workload::native("storm", &["-static"])
        .unwrap()
        .arg("0")
        .arg(size.starts_a_second.to_string());
    let storm = storm.start().unwrap();
    groups.take(&storm, 0);

    let mut node = Node::new();
    let text = format!(
        "windows: {{length: {}s, aligned: false}}\nfiles: {{directory: {:?}, keep_free: 1MiB}}\n\
         telemetry: {{listen: 127.0.0.1:{}}}\nselection: \
         {{only: [{{cgroup: /perfusion-test-scale*}}]}}\n\
         attach: {{policy: all}}\nlimits: {{cpu: 100%, {}}}\n",
        size.window,
        node.scratch.path("out"),
        node.port,
        node.kill_switch()
    );
    fs::write(node.scratch.path("perfusion.yaml"), text).unwrap();
    node.start();
    let begun = Instant::now();
    let all = size.runtimes as f64;
    wait_until("all shims to be read", DEADLINE + DEADLINE * (size.runtimes / 20) as u32, || {
        (node.metric("perfusion_shim_processes") >= all).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!("{error}: {}\n{}", node.metric("perfusion_shim_processes"), node.daemon().progress())
    });
    let attached = begun.elapsed();
    let windows = |more: f64| {
        let now = node.metric("perfusion_daemon_windows_total");
        wait_until("windows", DEADLINE, || {
            (node.metric("perfusion_daemon_windows_total") >= now + more).then_some(())
        })
        .unwrap();
    };
    windows(1.0);
    let before = Taken::now(&node);
    let most = watch(&node, size.seconds);
    let quiet = Taken::now(&node);
    // The same with every CPU busy.
    let cpus = std::thread::available_parallelism().unwrap().get();
    let busy: Vec<App> = (0..cpus).map(|_| spin()).collect();
    busy.iter().enumerate().for_each(|(number, app)| groups.take(app, number));
    windows(1.0);
    let before_busy = Taken::now(&node);
    let most_busy = watch(&node, size.seconds);
    let after = Taken::now(&node);
    windows(1.0);
    // Whoever is refused has no time in the sums below.
    assert_eq!(node.metric("perfusion_processes_refused_total"), 0.0);

    // A window is counted before its file is there.
    let profiles = wait_until("three windows of the crowd", DEADLINE, || {
        let profiles = node.profiles();
        (profiles.iter().filter(|(service, _)| service == "crowd").count() >= 3).then_some(profiles)
    })
    .unwrap();
    let of = |service: &str| -> Vec<&Profile> {
        profiles.iter().filter(|(name, _)| name == service).map(|(_, profile)| profile).collect()
    };
    // Each window has the whole time of each sleeper, whoever else came and went; the first one
    // began before they were looked at.
    let crowds = of("crowd");
    let mut late: f64 = 0.0;
    for pair in crowds.windows(2).skip(1) {
        let profile = pair[1];
        let (length, wall) = (profile.duration_ns as f64, profile.sum("wall", |_| true) as f64);
        let processes = wall / length;
        let expected = size.processes as f64;
        assert!((processes - expected).abs() < expected * 0.01 + 1.0, "{processes} of {expected}");
        let gap = (pair[1].time_ns - pair[0].time_ns - pair[0].duration_ns).abs();
        assert!(gap < 500_000_000, "{gap} ns between two windows");
        late = late.max(length / 1e9 / size.window as f64 - 1.0);
    }
    let pids: BTreeSet<u32> = of("crowd")
        .last()
        .unwrap()
        .samples
        .iter()
        .filter_map(|sample| sample.label("pid").parse().ok())
        .collect();
    let allocations =
        of("trickle").iter().map(|profile| profile.sum("alloc_space", |_| true)).sum::<i64>();
    assert!(allocations > 0);

    let bound = after.value("perfusion_memory_limit_bytes") / f64::from(1 << 20);
    let (daemon, probes) = quiet.cpus_since(&before);
    let (daemon_busy, probes_busy) = after.cpus_since(&before_busy);
    // What is there however busy the CPUs are, and what each busy CPU adds: its samples, and the
    // walks and rules behind them.
    let added = (daemon_busy + probes_busy - daemon - probes).max(0.0) / cpus as f64;
    let of_node = (daemon + probes + added * NODE_CPUS * NODE_BUSY) / NODE_CPUS;
    let lost = |name: &str| after.value(&format!("perfusion_{name}_total"));
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let truth = {
        let mut storm = storm;
        storm.send_stop();
        storm.await_line("truth", DEADLINE).unwrap()
    };
    let starts = truth["started"].as_f64().unwrap() / truth["seconds"].as_f64().unwrap();
    let megabytes =
        |[resident, maps, rings]: [f64; 3]| format!("{resident:.0} + {maps:.0} + {rings:.0} MiB");
    let text = format!(
        "\nscale: {} processes in {} cgroups, {} runtimes, {starts:.0} starts a second; load {}\n\
         all shims read {:.1} s after the start; {} pids in the last window, windows late by {:.1} \
         % at most\n\
         memory at most {} quiet, {} busy, of {bound:.0} MiB (resident + maps + rings)\n\
         CPUs: quiet {daemon:.3} daemon + {probes:.4} probes; {cpus} busy ones: {daemon_busy:.3} + \
         {probes_busy:.4}\n\
         of a node of {NODE_CPUS} CPUs, half of them busy: {:.2} %\n\
         lost: {} CPU samples and {} waits for a full ring, {} processes refused, {} mappings \
         evicted, {} stacks of gone processes\n",
        size.processes,
        size.cgroups,
        size.runtimes,
        load.trim(),
        attached.as_secs_f64(),
        pids.len(),
        late * 100.0,
        megabytes(most),
        megabytes(most_busy),
        of_node * 100.0,
        lost("cpu_samples_ring_full"),
        lost("waits_ring_full"),
        lost("processes_refused"),
        lost("mappings_evicted"),
        lost("stacks_of_gone_processes"),
    );
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    // What comes between two looks of its own is given back at the next.
    for most in [most, most_busy] {
        assert!(most.iter().sum::<f64>() <= bound * 1.1, "{} of {bound} MiB", megabytes(most));
    }
    assert_eq!(after.value("perfusion_recording"), 1.0);
    if judged {
        assert!(of_node <= 0.01, "{} % of the node", of_node * 100.0);
        assert!(late <= 0.1, "a window was late by {} %", late * 100.0);
    }
    node.end();
    drop((busy, crowd));
    for app in runtimes {
        app.stop().unwrap();
    }
}
