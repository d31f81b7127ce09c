//! A daemon that runs for long while everything comes and goes: its memory does not grow, and no descriptor, thread, mapping or map entry is left
//! of what has gone. Seconds here; `cargo xtask soak MINUTES` goes on for longer and judges how fast memory grows.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use system_tests::app::{App, Workload};
use system_tests::environment::{Need, RECORD_NET9, Runtime, begin};
use system_tests::wait::{let_pass, wait_until};

use crate::node::{DEADLINE, Node, group};

/// New processes a second, beside the .NET apps that come and go one after the other.
const STARTS_A_SECOND: &str = "100";
/// Looks at the daemon a second, and seconds of whose least memory each is a point of the line that is laid through them: memory goes up and down with each window.
const LOOK: Duration = Duration::from_secs(1);
const POINT_SECONDS: f64 = 120.0;
/// Growth that is allowed.
const MIB_AN_HOUR: f64 = 1.0;

/// What the daemon holds.
#[derive(Clone, Debug)]
struct Held {
    seconds: f64,
    /// Of itself, of maps and of rings.
    mebibytes: [f64; 3],
    /// But for those of programs and libraries, which stay open as long as there is room: any other process may have them.
    descriptors: usize,
    threads: usize,
    mappings: usize,
}

impl Held {
    fn now(node: &Node, since: Instant) -> Self {
        let pid = node.daemon().pid();
        let metrics = node.get("/metrics");
        let part = |part: &str| {
            let name = format!("perfusion_memory_bytes{{part=\"{part}\"}}");
            crate::node::value(&metrics, &name).unwrap_or_else(|| panic!("no {name}:\n{metrics}"))
                / f64::from(1 << 20)
        };
        let entries = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().flatten();
        let is_image = |path: &Path| path.is_absolute() && !path.starts_with("/proc");
        let descriptors = entries("fd").filter_map(|entry| fs::read_link(entry.path()).ok());
        Self {
            seconds: since.elapsed().as_secs_f64(),
            mebibytes: ["resident", "maps", "rings"].map(part),
            descriptors: descriptors.filter(|path| !is_image(path)).count(),
            threads: entries("task").count(),
            mappings: fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count(),
        }
    }
}

/// Entries of each of the daemon's hash maps.
fn map_entries(pid: u32) -> Vec<(String, usize)> {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
    let texts = infos.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let of = |text: &str, word: &str| {
        text.lines().find_map(|line| line.strip_prefix(word)?.trim().parse::<u32>().ok())
    };
    // BPF_MAP_TYPE_HASH, PERCPU_HASH, LRU_HASH, LRU_PERCPU_HASH.
    let hashes = texts.filter(|text| matches!(of(text, "map_type:"), Some(1 | 5 | 9 | 10)));
    let mut ids: Vec<u32> = hashes.filter_map(|text| of(&text, "map_id:")).collect();
    ids.sort_unstable();
    ids.dedup();
    let bpftool = |arguments: &[&str]| {
        let output = std::process::Command::new("bpftool").args(arguments).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    ids.iter()
        .map(|id| {
            let id = id.to_string();
            let name = bpftool(&["-j", "map", "show", "id", &id])["name"].as_str().unwrap_or("?").to_owned();
            (name, bpftool(&["-j", "map", "dump", "id", &id]).as_array().map_or(0, Vec::len))
        })
        .collect()
}

/// Growth a second and its standard error, of a line through the least value of each stretch of time.
fn slope(held: &[Held], value: impl Fn(&Held) -> f64) -> Option<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    let mut at = f64::NEG_INFINITY;
    for look in held {
        if look.seconds - at >= POINT_SECONDS {
            at = look.seconds;
            points.push((look.seconds, value(look)));
        } else if let Some((_, least)) = points.last_mut() {
            *least = least.min(value(look));
        }
    }
    // The last stretch may be a short one.
    points.pop();
    let n = points.len() as f64;
    if points.len() < 5 {
        return None;
    }
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
    let rest: f64 = points.iter().map(|point| (point.1 - y - slope * (point.0 - x)).powi(2)).sum();
    Some((slope, (rest / (n - 2.0) / spread).sqrt()))
}

#[test]
fn what_comes_and_goes_leaves_nothing_in_a_daemon_that_runs_on() {
    let needs = [RECORD_NET9, &[Need::C, Need::Cgroup2, Need::Program("bpftool")]].concat();
    let Some(_turn) = begin("soak", &needs) else { return };
    let minutes: Option<u64> = std::env::var("PERFUSION_SOAK").ok().map(|minutes| minutes.parse().unwrap());
    let length = minutes.map_or(Duration::from_secs(15), |minutes| Duration::from_secs(60 * minutes));
    // Caches fill meanwhile.
    let warming = length / 6;
    let group = group("perfusion-test-soak").unwrap();
    let mut stays = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    group.take(stays.pid()).unwrap();

    let mut node = Node::new();
    let configure = |node: &Node, hertz: u32| {
        node.configure(&format!(
            "selection: {{only: [{{cgroup: /perfusion-test-soak*}}]}}\nattach: {{policy: all}}\n\
             recording: {{frequency: {hertz}}}\nlimits: {{cpu: 100%, {}}}\n",
            node.kill_switch()
        ));
    };
    configure(&node, 99);
    node.start();
    let windows = |node: &Node, more: f64| {
        let now = node.metric("perfusion_daemon_windows_total");
        wait_until("windows", DEADLINE, || {
            (node.metric("perfusion_daemon_windows_total") >= now + more).then_some(())
        })
        .unwrap();
    };
    let attached = |node: &Node, shims: f64| {
        wait_until("the shims there are", DEADLINE, || {
            (node.metric("perfusion_shim_processes") == shims).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    };
    attached(&node, 1.0);
    let comes = Workload::dotnet(Runtime::Net9, "trickle", &[]).unwrap();
    let come = |node: &Node| -> App {
        let mut app = comes.spawn().unwrap();
        group.take(app.pid()).unwrap();
        app.await_ready().unwrap();
        attached(node, 2.0);
        app
    };
    let go = |node: &Node, app: App| {
        app.stop().unwrap();
        attached(node, 1.0);
    };
    // Another recording begins, with maps and rings of its own.
    let reload = |node: &Node, hertz: u32| {
        let recordings = node.metric("perfusion_daemon_recordings_total");
        configure(node, hertz);
        node.daemon().signal(Signal::HUP).unwrap();
        wait_until("another recording", DEADLINE, || {
            (node.metric("perfusion_daemon_recordings_total") > recordings).then_some(())
        })
        .unwrap();
        attached(node, 1.0);
    };
    // What is there once everything has come and gone is what may be there later.
    let app = come(&node);
    go(&node, app);
    reload(&node, 97);
    windows(&node, 2.0);
    let begun = Instant::now();
    let (before, entries_before) = (Held::now(&node, begun), map_entries(node.daemon().pid()));

    let storm =
        Workload::native("storm", &["-static"]).unwrap().arg("0").arg(STARTS_A_SECOND).start().unwrap();
    group.take(storm.pid()).unwrap();
    let (mut held, mut apps, mut reloads) = (Vec::new(), 0, 0);
    while begun.elapsed() < length {
        let app = come(&node);
        let seen = Instant::now();
        // What passes meanwhile is looked at.
        while seen.elapsed() < 3 * LOOK {
            held.push(Held::now(&node, begun));
            let_pass(LOOK);
        }
        go(&node, app);
        apps += 1;
        if apps % 3 == 0 {
            reloads += 1;
            reload(&node, if reloads % 2 == 0 { 97 } else { 99 });
        }
    }
    let truth = {
        let mut storm = storm;
        storm.send_stop();
        storm.await_line("truth", DEADLINE).unwrap()
    };
    windows(&node, 2.0);
    // What a recording had is given back by and by.
    let is_back = |held: &Held| {
        held.descriptors <= before.descriptors + 8
            && held.threads <= before.threads + 2
            && held.mappings <= before.mappings + 32
    };
    let settled = wait_until("what has gone to be given back", DEADLINE, || {
        is_back(&Held::now(&node, begun)).then_some(())
    });
    let (after, entries_after) = (Held::now(&node, begun), map_entries(node.daemon().pid()));

    let warm = || held.iter().filter(|look| look.seconds >= warming.as_secs_f64());
    let resident = |look: &Held| look.mebibytes[0];
    let least = warm().map(resident).fold(f64::INFINITY, f64::min);
    let most = warm().map(resident).fold(0.0, f64::max);
    let mut text = format!(
        "\nsoak of {:.0} s: {} processes and {apps} .NET apps came and went, {reloads} reloads\n\
         resident {least:.1} to {most:.1} MiB after the first sixth; before and after: {:.1} and {:.1} MiB, {} and {} descriptors, \
         {} and {} threads, {} and {} mappings\nentries of hash maps: {entries_before:?} and {entries_after:?}\n",
        begun.elapsed().as_secs_f64(),
        truth["started"],
        before.mebibytes[0],
        after.mebibytes[0],
        before.descriptors,
        after.descriptors,
        before.threads,
        after.threads,
        before.mappings,
        after.mappings,
    );
    let warmed: Vec<Held> = warm().cloned().collect();
    let growth = slope(&warmed, resident).map(|(slope, error)| (slope * 3600.0, error * 3600.0));
    if let Some((slope, error)) = growth {
        writeln!(text, "growth: {slope:.2} ± {error:.2} MiB an hour (a line through the least of every {POINT_SECONDS} s)").unwrap();
    }
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    stays.ensure_alive().unwrap();
    assert!(settled.is_ok(), "{text}");
    for (name, entries) in &entries_after {
        let had = entries_before.iter().find(|(other, _)| other == name).map_or(0, |(_, entries)| *entries);
        // The app that stays has code that was not known yet.
        assert!(*entries <= 2 * had + 512, "{name}: {text}");
    }
    if let Some((slope, error)) = growth {
        assert!(slope - 2.0 * error <= MIB_AN_HOUR, "{text}");
    }
    node.end();
    let truth = stays.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}
