//! `perfusion daemon`: windows, one profile per service, the policy of attaching, reloads, its end,
//! and what it says over HTTP.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use system_tests::app::Workload;
use system_tests::environment::{Need, RECORD_NET9, Runtime, begin_beside};
use system_tests::perfusion::{self, Recording, SLACK, Scratch};
use system_tests::profile::Profile;
use system_tests::wait::wait_until;

use crate::node::group;

/// A loaded machine may take long to start it; windows are of a second or two.
const DEADLINE: Duration = Duration::from_secs(180);

/// Of a daemon that records those in cgroups of this name.
fn configuration(scratch: &Scratch, group: &str, windows: &str, policy: &str) {
    let directory = scratch.path("");
    let text = format!(
        "windows: {{length: {windows}, aligned: false}}\n\
         selection: {{only: [{{cgroup: /{group}*}}]}}\n\
         files: {{directory: {0}/out, keep_free: 1MiB}}\n\
         attach: {{policy: {policy}, services: [orders, shy, stock]}}\n\
         telemetry: {{listen: null}}\n\
         limits: {{kill_switch: {0}/run/off}}\n",
        directory.display()
    );
    fs::write(scratch.path("perfusion.yaml"), text).unwrap();
}

fn daemon(scratch: &Scratch, more: &[&str]) -> Recording {
    let mut command = perfusion::command(["daemon", "--config"]);
    command.arg(scratch.path("perfusion.yaml")).args(more);
    let mut daemon = Recording::spawn(&mut command).unwrap();
    daemon.await_progress("ready", DEADLINE).unwrap();
    daemon
}

/// The files of a service, oldest first.
fn files(scratch: &Scratch, service: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(scratch.path("out").join(service)) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "gz"));
    files.sort();
    files
}

/// The profiles of a service, oldest first.
fn profiles(scratch: &Scratch, service: &str) -> Vec<Profile> {
    files(scratch, service).iter().map(|file| Profile::read(file).unwrap()).collect()
}

pub(crate) fn has_shim(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps"))
        .is_ok_and(|maps| maps.contains("perfusion-shim"))
}

/// `report` of several windows has the sum of what happened in them, and of what is alive the last
/// one's.
fn one_report_of_them_all(scratch: &Scratch, service: &str) {
    let files = files(scratch, service);
    let read: Vec<Profile> = files.iter().map(|file| Profile::read(file).unwrap()).collect();
    let report = |arguments: &[&str]| {
        // One of them twice: it counts once.
        let mut command = perfusion::command(["report"]);
        let output = command.args(&files).arg(&files[0]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for (column, last_only) in
        [("cpu", false), ("blocked", false), ("alloc_space", false), ("inuse_space", true)]
    {
        let folded = report(&["--format", "folded", "--idle", "--type", column]);
        let shown: i64 = folded
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<i64>().unwrap())
            .sum();
        let counted = if last_only { &read[read.len() - 1..] } else { &read[..] };
        let sum: i64 = counted.iter().map(|profile| profile.sum(column, |_| true)).sum();
        assert_eq!(shown, sum, "{column} of {} files", files.len());
    }
    let by_window = report(&["--type", "cpu", "--by", "window"]);
    assert_eq!(
        by_window.lines().filter(|line| line.ends_with('Z')).count(),
        files.len(),
        "{by_window}"
    );
}

#[test]
fn each_window_has_a_profile_of_each_service_and_processes_are_attached_as_the_policy_says() {
    let needs = [RECORD_NET9, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("daemon: windows and attach", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let name = "perfusion-test-windows";
    configuration(&scratch, name, "1s", "listed");
    let workload = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let mut app = workload.clone().env("OTEL_SERVICE_NAME", "orders").spawn().unwrap();
    let mut shy = workload.env("DD_SERVICE", "shy").env("PERFUSION_ATTACH", "off").spawn().unwrap();
    let group = group(name).unwrap();
    for app in [&mut app, &mut shy] {
        group.take(app.pid()).unwrap();
        app.await_ready().unwrap();
    }
    let daemon = daemon(&scratch, &[]);

    let named =
        |profile: &Profile| profile.functions().iter().any(|name| name.contains("CallHeavy"));
    wait_until("three profiles of the service, the last with managed names", DEADLINE, || {
        let profiles = profiles(&scratch, "orders");
        (profiles.len() >= 3 && profiles.last().is_some_and(named)).then_some(())
    })
    .unwrap_or_else(|error| {
        let profiles = profiles(&scratch, "orders");
        let last = profiles.last().map(|profile| profile.describe("cpu", |_| true));
        panic!("{error}: {} profiles\n{}\n{last:?}", profiles.len(), daemon.progress())
    });
    // Its times lie one behind the other, and no window has more of a thread than it is long.
    let windows = profiles(&scratch, "orders");
    for pair in windows.windows(2) {
        // The wall clock is asked when a window is over, which takes a CPU.
        assert!(
            pair[0].time_ns + pair[0].duration_ns <= pair[1].time_ns + 500_000_000,
            "they overlap"
        );
    }
    for profile in &windows {
        let by_thread = profile.sum_by("wall", "thread_name");
        assert!(!by_thread.is_empty());
        assert!(profile.samples.iter().all(|sample| sample.label("thread_id").is_empty()));
        assert!(profile.samples.iter().all(|sample| sample.label("pid") == app.pid().to_string()));
        assert!(profile.comments.iter().any(|line| line.starts_with("cost of the profiler: ")));
    }
    one_report_of_them_all(&scratch, "orders");
    assert!(!profiles(&scratch, "shy").is_empty(), "it is profiled");
    assert!(!has_shim(shy.pid()), "but not touched");
    assert!(has_shim(app.pid()));

    // A configuration that cannot be used changes nothing, and the next one is taken.
    fs::write(scratch.path("perfusion.yaml"), "windows: {lenght: 2s}\n").unwrap();
    let mut daemon = daemon;
    daemon.signal(Signal::HUP).unwrap();
    daemon.await_progress("did you mean `length`?", DEADLINE).unwrap();
    configuration(&scratch, name, "1h", "off");
    daemon.signal(Signal::HUP).unwrap();
    daemon.await_progress("was read again", DEADLINE).unwrap();
    wait_until("the shim to leave", DEADLINE, || (!has_shim(app.pid())).then_some(())).unwrap();

    // SIGTERM ends the window in progress, and its profiles are there.
    let before = profiles(&scratch, "orders").len();
    daemon.signal(Signal::TERM).unwrap();
    let outcome = daemon.finish(2 * SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    assert!(profiles(&scratch, "orders").len() > before, "{}", outcome.stderr);
    app.stop().unwrap();
    shy.stop().unwrap();
}

#[test]
fn metrics_and_health_are_told_over_http_and_a_second_daemon_is_refused() {
    let Some(_turn) = begin_beside("daemon: http", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    configuration(&scratch, "perfusion-test-http", "1h", "off");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("telemetry.listen=127.0.0.1:{port}");
    let first = daemon(&scratch, &["--set", &listen, "--set", "selection.only=[]"]);
    let get = |path: &str| {
        let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
        write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    };
    let value = |name: &str| {
        let text = get("/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
        line.and_then(|value| value.parse::<f64>().ok())
    };
    let samples = wait_until("samples in the metrics", DEADLINE, || {
        value("perfusion_cpu_samples_total").filter(|samples| *samples > 0.0)
    });
    assert!(samples.is_ok(), "{}", get("/metrics"));
    assert!(
        get("/healthz").starts_with("HTTP/1.1 200") && get("/readyz").starts_with("HTTP/1.1 200")
    );

    let mut second = perfusion::command(["daemon", "--config"]);
    second.arg(scratch.path("perfusion.yaml"));
    let refused = perfusion::run(&mut second, DEADLINE).unwrap();
    assert!(refused.stderr.contains(&format!("pid {}", first.pid())), "{}", refused.stderr);
    assert_eq!(refused.code(), 1);

    // The kill switch: a file.
    let switch = scratch.path("run/off");
    fs::write(&switch, "").unwrap();
    wait_until("the switch to be obeyed", DEADLINE, || {
        get("/readyz").starts_with("HTTP/1.1 503").then_some(())
    })
    .unwrap();
    // It is not ready from the moment on when it begins to end the recording.
    wait_until("the kernel to be left", DEADLINE, || {
        programs(first.pid()).is_empty().then_some(())
    })
    .unwrap();
    fs::remove_file(&switch).unwrap();
    wait_until("the recording to begin again", DEADLINE, || {
        get("/readyz").starts_with("HTTP/1.1 200").then_some(())
    })
    .unwrap();
    first.signal(Signal::TERM).unwrap();
    let said = first.finish_well(2 * SLACK).unwrap().stderr;
    let story = ["a recording begins", "switched off", "a recording begins", "told to end"];
    let mut rest = said.as_str();
    for line in story {
        rest =
            rest.split_once(line).unwrap_or_else(|| panic!("no `{line}` in its place: {said}")).1;
    }
}

/// Descriptors of eBPF programs a process holds.
fn programs(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).unwrap();
    let links = entries
        .filter_map(|entry| Some(fs::read_link(entry.ok()?.path()).ok()?.display().to_string()));
    links.filter(|link| link.contains("bpf-prog")).collect()
}

#[test]
fn leaks_are_told_from_caches_by_the_daemons_files() {
    let needs = [RECORD_NET9, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("daemon: leaks of files", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    // The verdict leak takes a minute (tests/memory.rs); a cache of five seconds shows in some
    // windows.
    let name = "perfusion-test-leaks";
    configuration(&scratch, name, "2s", "listed");
    let app = |name: &str| {
        Workload::dotnet(Runtime::Net9, "leaks", &[])
            .unwrap()
            .env("OTEL_SERVICE_NAME", name)
            .spawn()
            .unwrap()
    };
    let mut apps = [app("orders"), app("stock")];
    let group = group(name).unwrap();
    for app in &mut apps {
        group.take(app.pid()).unwrap();
        app.await_ready().unwrap();
    }
    let began = Instant::now();
    let daemon = daemon(&scratch, &[]);
    let pattern = |name: &str| {
        let mut files: Vec<_> = fs::read_dir(scratch.path("out").join(name))
            .into_iter()
            .flatten()
            .map_while(Result::ok)
            .map(|entry| entry.path())
            .collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "gz"));
        files
    };
    let mut text = String::new();
    wait_until("the verdict about both caches", DEADLINE, || {
        // In no order.
        let mut files = [pattern("orders"), pattern("stock")].concat();
        files.reverse();
        if files.len() < 8 {
            return None;
        }
        text = perfusion::run(perfusion::command(["leaks", "-n", "100"]).args(&files), DEADLINE)
            .unwrap()
            .stdout;
        let refreshed = |pid: u32| {
            text.contains(&format!(
                "\ncache refreshed: Leaks.Cached[] at Leaks.Program.Refresh() [leaks {pid}]"
            ))
        };
        apps.iter().all(|app| refreshed(app.pid())).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {text}\n{}", daemon.progress()));
    // Of a minute and more, where the machine is slow, it may tell them.
    let may_tell = began.elapsed() > Duration::from_secs(55);
    assert!((may_tell || !text.contains("\nleak: ")) && !text.contains("left out"), "{text}");
    daemon.signal(Signal::TERM).unwrap();
    daemon.finish_well(DEADLINE).unwrap();
}
