//! A daemon that runs for long while everything comes and goes: its memory does not grow, and no
//! descriptor, thread, mapping or map entry is left of what has gone. Seconds here;
//! `cargo xtask soak MINUTES` goes on for longer and judges how fast memory grows.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use system_tests::app::{App, Workload};
use system_tests::environment::{Need, RECORD_NET9, Runtime, begin, cgroup2};
use system_tests::perfusion;
use system_tests::wait::{let_pass, wait_until};

use crate::node::{DEADLINE, Node, group};
use crate::restart::bpf_objects;

/// Profiles kept; each second brings some.
const FILES: &str = "500";
/// New processes a second, beside the .NET apps that come and go one after the other.
const STARTS_A_SECOND: &str = "100";
/// Looks at the daemon a second, and seconds of whose least memory each is a point of the line that
/// is laid through them: memory goes up and down with each window.
const LOOK: Duration = Duration::from_secs(1);
const POINT_SECONDS: f64 = 120.0;
/// Growth of memory that is allowed: in a soak of an hour or more with twice its standard error, so
/// that it is shown and not only not refuted.
const MIB_AN_HOUR: f64 = 1.0;
const LONG: Duration = Duration::from_secs(3600);
/// In a shorter one memory may not be shown to grow by more, and at its end come down to no more
/// than this part above the most it was at its beginning: seconds tell no slope, buffers for the
/// largest window so far are still being made, and what is free is given back every ten seconds.
const GROWTH: f64 = 0.15;
/// How soon nothing of what has gone is left: exited processes are kept for ten seconds, and a
/// recording that is over is taken apart by and by.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// Most descriptors of programs and libraries (`crates/host/src/process/images.rs`): a cache, for
/// any other process may have them.
const MOST_IMAGES: usize = 512;

/// What a thread reads of its own CPU time, with its ids left out.
const SCHEDSTAT: &str = "/proc//task//schedstat";

/// What the daemon holds.
#[derive(Clone, Debug)]
struct Held {
    seconds: f64,
    /// Of itself, of maps and of rings.
    mebibytes: [f64; 3],
    /// By what they are of, without numbers.
    descriptors: BTreeMap<String, usize>,
    images: usize,
    threads: usize,
    mappings: usize,
    /// BPF maps and programs.
    objects: usize,
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
        let is_image = |path: &Path| {
            path.is_absolute() && !path.starts_with("/proc") && !path.starts_with("/dev")
        };
        let (mut images, mut descriptors) = (0, BTreeMap::new());
        for path in entries("fd").filter_map(|entry| fs::read_link(entry.path()).ok()) {
            let kind =
                path.to_string_lossy().replace(|character: char| character.is_ascii_digit(), "");
            if is_image(&path) && !kind.starts_with("/memfd:perfusion") {
                images += 1;
            } else {
                *descriptors.entry(kind).or_default() += 1;
            }
        }
        Self {
            seconds: since.elapsed().as_secs_f64(),
            mebibytes: ["resident", "maps", "rings"].map(part),
            descriptors,
            images,
            threads: entries("task").count(),
            mappings: fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count(),
            objects: bpf_objects(pid).len(),
        }
    }

    fn memory(&self) -> f64 {
        self.mebibytes.iter().sum()
    }

    fn parts(&self) -> String {
        self.mebibytes.map(|part| format!("{part:.1}")).join(" + ")
    }

    fn all_descriptors(&self) -> usize {
        let counted = self.descriptors.iter().filter(|(kind, _)| *kind != SCHEDSTAT);
        counted.map(|(_, count)| count).sum()
    }

    /// What there is more of than there was, by more than what it says and does just now: fewer
    /// than what one that is left of each app would be.
    fn more_than(&self, before: &Self) -> Vec<String> {
        let kinds = self.descriptors.iter().map(|(kind, count)| {
            let most = match kind.as_str() {
                // One of each thread that reads what others may hold up
                // (`host::process::guarded_io`).
                SCHEDSTAT => self.threads,
                _ => before.descriptors.get(kind).copied().unwrap_or(0) + 1,
            };
            (format!("descriptors of {kind}"), *count, most)
        });
        let others = [
            ("descriptors", self.all_descriptors(), before.all_descriptors() + 2),
            ("files of programs", self.images, MOST_IMAGES),
            ("threads", self.threads, before.threads + 2),
            // Of the allocator, which takes and gives back.
            ("mappings", self.mappings, before.mappings + 32),
            ("BPF objects", self.objects, before.objects),
        ];
        let others = others.into_iter().map(|(what, now, most)| (what.to_owned(), now, most));
        let more = kinds.chain(others).filter(|(_, now, most)| now > most);
        more.map(|(what, now, most)| format!("{now} {what}, of {most}")).collect()
    }
}

/// A map of the daemon's and its keys.
struct Map {
    name: String,
    keys: Vec<Vec<u8>>,
}

/// The daemon's hash maps: what comes and goes has an entry in some of them. (All others are
/// arrays, which never grow, and none is a cache: an LRU map would be one, and hold what it likes.)
fn maps(pid: u32) -> Vec<Map> {
    let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
    let texts = infos.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let of = |text: &str, word: &str| {
        text.lines().find_map(|line| line.strip_prefix(word)?.trim().parse::<u32>().ok())
    };
    // BPF_MAP_TYPE_HASH, PERCPU_HASH, LRU_HASH, LRU_PERCPU_HASH.
    let hashes = texts.filter(|text| matches!(of(text, "map_type:"), Some(1 | 5 | 9 | 10)));
    let ids: BTreeSet<u32> = hashes.filter_map(|text| of(&text, "map_id:")).collect();
    let bpftool = |arguments: &[&str]| {
        let output = std::process::Command::new("bpftool").args(arguments).output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).ok()
    };
    let byte =
        |byte: &serde_json::Value| u8::from_str_radix(byte.as_str()?.strip_prefix("0x")?, 16).ok();
    let key = |entry: &serde_json::Value| {
        entry["key"].as_array()?.iter().map(byte).collect::<Option<Vec<u8>>>()
    };
    ids.iter()
        .filter_map(|id| {
            let id = id.to_string();
            // One that a recording that is over has let go of just now is not asked about.
            let name = bpftool(&["-j", "map", "show", "id", &id])?["name"].as_str()?.to_owned();
            let entries = bpftool(&["-j", "map", "dump", "id", &id])?;
            let keys = entries.as_array()?.iter().map(|entry| key(entry).unwrap()).collect();
            Some(Map { name, keys })
        })
        .collect()
}

/// The ids of the cgroups there are.
fn cgroups(folder: &Path, found: &mut BTreeSet<u64>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.insert(entry.ino());
            cgroups(&entry.path(), found);
        }
    }
}

/// How many entries of each map are of what is not there.
fn of_the_gone(maps: &[Map]) -> BTreeMap<&str, usize> {
    let mut groups = BTreeSet::new();
    let top = cgroup2().unwrap();
    groups.insert(fs::metadata(&top).unwrap().ino());
    cgroups(&top, &mut groups);
    let number =
        |key: &[u8]| key.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let is_there = |map: &Map, key: &[u8]| match map.name.as_str() {
        // By thread and by process: the kernel knows both by such a path.
        "THREADS" | "SELECTED" | "SPACES" | "SPANS" | "PASSED_OVER" => {
            Path::new(&format!("/proc/{}", number(key))).exists()
        }
        "CGROUPS" => groups.contains(&number(key)),
        // What the configuration names.
        "USERS" | "COMMANDS" => true,
        other => panic!("say what the entries of {other} are of"),
    };
    let gone = |map: &Map| map.keys.iter().filter(|key| !is_there(map, key)).count();
    maps.iter().map(|map| (map.name.as_str(), gone(map))).filter(|(_, gone)| *gone > 0).collect()
}

fn entries(maps: &[Map]) -> BTreeMap<&str, usize> {
    maps.iter().map(|map| (map.name.as_str(), map.keys.len())).collect()
}

/// Says how far it is.
fn tell(held: &[Held], apps: u32, reloads: u32) {
    let least = held.iter().min_by(|one, other| one.memory().total_cmp(&other.memory())).unwrap();
    let most = held.iter().map(Held::memory).fold(0.0, f64::max);
    let text = format!(
        "{:5.0} s: {:.1} ({}) to {most:.1} MiB, {apps} apps, {reloads} reloads\n",
        held[0].seconds,
        least.memory(),
        least.parts()
    );
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}

/// Growth a second and its standard error, of a line through the least value of each stretch of
/// time.
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
    let minutes: Option<u64> =
        std::env::var("PERFUSION_SOAK").ok().map(|minutes| minutes.parse().unwrap());
    let length =
        minutes.map_or(Duration::from_secs(15), |minutes| Duration::from_secs(60 * minutes));
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
    // So few files that for each new one an old one goes before the caches are full: the list of
    // those that are kept grows until then.
    let mut command = perfusion::command(["daemon", "--config"]);
    command.arg(node.scratch.path("perfusion.yaml")).env("PERFUSION_FILES_MAX_COUNT", FILES);
    node.run(&mut command);
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
    // No recording before the last one is being taken apart any more.
    let one_recording =
        || maps(node.daemon().pid()).iter().filter(|map| map.name == "THREADS").count() == 1;
    wait_until("the recording before to be gone", GONE_WITHIN, || one_recording().then_some(()))
        .unwrap();
    let most_before = node.watch_memory(2.0).into_iter().fold(0.0, f64::max) / f64::from(1 << 20);
    let begun = Instant::now();
    let (before, maps_before) = (Held::now(&node, begun), maps(node.daemon().pid()));

    let storm = Workload::native("storm", &["-static"])
        .unwrap()
        .arg("0")
        .arg(STARTS_A_SECOND)
        .start()
        .unwrap();
    group.take(storm.pid()).unwrap();
    let (mut held, mut apps, mut reloads): (Vec<Held>, _, _) = (Vec::new(), 0, 0);
    let mut told = 0;
    // Where a machine is slow, until one that is left of each would be seen: three apps, a reload,
    // and one after it.
    while begun.elapsed() < length || apps < 4 {
        let app = come(&node);
        let seen = Instant::now();
        // What passes meanwhile is looked at.
        while seen.elapsed() < 3 * LOOK {
            held.push(Held::now(&node, begun));
            let_pass(LOOK);
        }
        go(&node, app);
        apps += 1;
        // An hour without a word would be a long one.
        if held[told].seconds + POINT_SECONDS <= begun.elapsed().as_secs_f64() {
            tell(&held[told..], apps, reloads);
            told = held.len() - 1;
        }
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
    let ended = Instant::now();
    let look = || (Held::now(&node, begun), maps(node.daemon().pid()));
    let most_after = most_before * (1.0 + GROWTH);
    let is_little = |after: &Held| length >= LONG || after.memory() <= most_after;
    let nothing_left = |(after, maps): &(Held, Vec<Map>)| {
        after.more_than(&before).is_empty() && of_the_gone(maps).is_empty() && is_little(after)
    };
    let settled = wait_until("what has gone to be given back", GONE_WITHIN, || {
        // Each look starts two programs for every map: without a pause that is a storm of five
        // hundred a second, which the daemon has to follow.
        let_pass(LOOK);
        Some(look()).filter(nothing_left)
    });
    let took = ended.elapsed();
    let is_settled = settled.is_ok();
    let (after, maps_after) = settled.unwrap_or_else(|_| look());

    let warmed: Vec<Held> =
        held.iter().filter(|look| look.seconds >= warming.as_secs_f64()).cloned().collect();
    let least = warmed.iter().map(Held::memory).fold(f64::INFINITY, f64::min);
    let most = warmed.iter().map(Held::memory).fold(0.0, f64::max);
    let mut text = format!(
        "\nsoak of {:.0} s: {} processes and {apps} .NET apps came and went, {reloads} reloads\n\
         memory {least:.1} to {most:.1} MiB after the first sixth; before and after: {:.1} and \
         {:.1} MiB (itself, maps and rings: {} and {}), \
         {} and {} descriptors, {} and {} of programs, {} and {} threads, {} and {} mappings, {} \
         and {} BPF objects, {took:.1?} after the last had gone\n\
         entries of hash maps: {:?} and {:?}, of what has gone: {:?}\n",
        begun.elapsed().as_secs_f64(),
        truth["started"],
        before.memory(),
        after.memory(),
        before.parts(),
        after.parts(),
        before.all_descriptors(),
        after.all_descriptors(),
        before.images,
        after.images,
        before.threads,
        after.threads,
        before.mappings,
        after.mappings,
        before.objects,
        after.objects,
        entries(&maps_before),
        entries(&maps_after),
        of_the_gone(&maps_after),
    );
    let growth =
        slope(&warmed, Held::memory).map(|(slope, error)| (slope * 3600.0, error * 3600.0));
    if let Some((slope, error)) = growth {
        writeln!(
            text,
            "growth: {slope:.2} ± {error:.2} MiB an hour (a line through the least of \
             every {POINT_SECONDS} s)"
        )
        .unwrap();
    }
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    stays.ensure_alive().unwrap();
    // One that is left of each would be more than what is allowed.
    assert!(apps >= 4 && reloads >= 1, "{text}");
    assert!(
        is_settled,
        "{:?}, {:.1} MiB of {most_after:.1}, {:?}\n{:#?} and {:#?}\n{text}",
        after.more_than(&before),
        after.memory(),
        of_the_gone(&maps_after),
        before.descriptors,
        after.descriptors
    );
    let named = |maps: &[Map]| {
        entries(maps)
            .into_iter()
            .filter(|(name, _)| ["USERS", "COMMANDS"].contains(name))
            .map(|(_, count)| count)
            .sum::<usize>()
    };
    assert_eq!(named(&maps_after), named(&maps_before), "{text}");
    match growth {
        Some((slope, error)) if length >= LONG => {
            assert!(slope + 2.0 * error <= MIB_AN_HOUR, "{text}")
        }
        Some((slope, error)) => assert!(slope - 2.0 * error <= MIB_AN_HOUR, "{text}"),
        None => assert!(length < LONG, "too few points for a line: {text}"),
    }
    node.end();
    let truth = stays.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}
