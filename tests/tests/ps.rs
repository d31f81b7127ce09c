//! `perfusion ps`: every column says what is true of a process, and why not more.

use std::fs;
use std::process::Command;
use std::time::Duration;

use ::perfusion_dotnet::attach::launch::launch;
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use serde_json::Value;
use system_tests::app::{assemble_32_bit, copy_program};
use system_tests::cgroup::Group;
use system_tests::environment::{
    Need, RECORD, RECORD_NET9, begin_beside, perfusion_bin, record_on,
};
use system_tests::perfusion::{self, SLACK, Scratch, record_pid};
use system_tests::region::regions;
use system_tests::{App, Recording, Runtime, Workload, on_runtimes, wait_until};

const DEADLINE: Duration = Duration::from_secs(120);

/// A process's line of the table and its object of the JSON form.
struct Row {
    line: String,
    json: Value,
}

impl Row {
    /// The cells of the line: columns begin where their headings do.
    fn cells(&self, heading: &str) -> [String; 7] {
        let starts: Vec<usize> =
            ["NAME", "RUNTIME", "CONTAINER", "MODE", "COMMAND", "WHY NOT MORE"]
                .map(|word| heading.find(word).unwrap_or_else(|| panic!("no {word}: {heading}")))
                .to_vec();
        let bounds: Vec<usize> = [0].into_iter().chain(starts).chain([usize::MAX]).collect();
        let cell = |at: usize| {
            let (begin, end) = (bounds[at], bounds[at + 1]);
            self.line.chars().skip(begin).take(end - begin).collect::<String>().trim().to_owned()
        };
        [cell(0), cell(1), cell(2), cell(3), cell(4), cell(5), cell(6)]
    }
}

/// What `ps` says of a process: its cells, which must agree with the JSON form, but for the command
/// line.
fn seen_by(mut ps: Command, mut ps_json: Command, pid: u32) -> [String; 6] {
    let text = perfusion::run(&mut ps, DEADLINE).unwrap();
    let json = perfusion::run(&mut ps_json, DEADLINE).unwrap();
    assert_eq!((text.code(), json.code()), (0, 0), "{}{}", text.stderr, json.stderr);
    let heading = text.stdout.lines().next().unwrap();
    let is_it = |line: &&str| line.split_whitespace().next() == Some(&pid.to_string());
    let line =
        text.stdout.lines().find(is_it).unwrap_or_else(|| panic!("no {pid}:\n{}", text.stdout));
    let rows: Value = serde_json::from_str(&json.stdout).unwrap();
    let object = rows.as_array().unwrap().iter().find(|row| row["pid"] == pid).unwrap();
    let row = Row { line: line.to_owned(), json: object.clone() };
    let [id, name, runtime, container_id, mode, command, why_not] = row.cells(heading);
    let whole = row.json["command"].as_str().unwrap();
    // A long one has its paths' last parts, and an end where it is cut.
    let kept = command.trim_end_matches('…');
    let is_part = |(shown, word): (&str, &str)| match shown.strip_prefix('…') {
        Some(name) => word.contains(name),
        None => word.starts_with(shown),
    };
    assert!(
        kept.split(' ').zip(whole.split(' ')).all(is_part) && !kept.is_empty()
            || mode == "not seen",
        "{command:?} of {whole:?}"
    );
    let cells = [id, name, runtime, container_id, mode, why_not];
    assert_eq!(row.json["name"], cells[1].as_str());
    let container = row.json["container"].as_str().map_or("-", |id| &id[..12]);
    assert_eq!(container, cells[3]);
    assert_eq!(row.json["why_not"].as_str().unwrap_or_default(), cells[5]);
    cells
}

fn seen(pid: u32) -> [String; 6] {
    seen_by(perfusion::command(["ps"]), perfusion::command(["ps", "--json"]), pid)
}

/// A version as the folder of the runtime is called.
fn version(runtime: Runtime) -> String {
    let root = runtime.dotnet().unwrap();
    let shared = root.parent().unwrap().join("shared/Microsoft.NETCore.App");
    fs::read_dir(shared).unwrap().next().unwrap().unwrap().file_name().into_string().unwrap()
}

on_runtimes!(
    a_dotnet_process_has_its_version_and_how_it_can_be_profiled:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11, net11_musl Net11Musl
);

fn a_dotnet_process_has_its_version_and_how_it_can_be_profiled(runtime: Runtime) {
    let name = format!("ps::a_dotnet_process on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
    let dotnet = format!(".NET {}", version(runtime));
    let expected = |mode: &str, why: &str| {
        [&app.pid().to_string(), "callheavy", &dotnet, "-", mode, why].map(str::to_owned)
    };
    assert_eq!(seen(app.pid()), expected("can attach", ""));
    let scratch = Scratch::new().unwrap();
    let recording = Recording::of_pid(app.pid(), &scratch.path("x.pb.gz"), &[]).unwrap();
    wait_until("the region", SLACK, || (!regions(&app).is_empty()).then_some(())).unwrap();
    assert_eq!(seen(app.pid()), expected("shim loaded", ""));
    recording.signal(rustix::process::Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    // The runtime takes the library out a moment after its region.
    let can_attach = wait_until("the shim to go", SLACK, || {
        let row = seen(app.pid());
        (row == expected("can attach", "")).then_some(())
    });
    assert!(can_attach.is_ok(), "{:?}", seen(app.pid()));
    app.stop().unwrap();
}

#[test]
fn each_reason_why_not_more_is_said() {
    let needs =
        [RECORD_NET9, &[Need::Program("as"), Need::Program("ld"), Need::Program("setpriv")]]
            .concat();
    let Some(_turn) = begin_beside("ps::each_reason", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let callheavy = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let row = |app: &App| {
        let [_, _, runtime, _, mode, why] = seen(app.pid());
        (runtime, mode, why)
    };
    let dotnet = format!(".NET {}", version(Runtime::Net9));

    let native = Workload::program("/bin/sleep").arg("600").spawn().unwrap();
    assert_eq!(row(&native), ("native".to_owned(), "native".to_owned(), String::new()));

    for knob in ["DOTNET_EnableDiagnostics", "DOTNET_EnableDiagnostics_Profiler"] {
        let off = callheavy.clone().env(knob, "0").start().unwrap();
        let (runtime, mode, why) = row(&off);
        assert_eq!((runtime.as_str(), mode.as_str()), (dotnet.as_str(), "no names"));
        assert!(why.contains(&format!("{knob}=0")), "{why}");
    }
    // The socket is where TMPDIR says; without it nobody can ask the runtime for anything.
    let sockets = scratch.path("sockets");
    fs::create_dir(&sockets).unwrap();
    let mute = callheavy.clone().env("TMPDIR", &sockets).start().unwrap();
    assert_eq!(row(&mute).1, "can attach");
    fs::remove_dir_all(&sockets).unwrap();
    let (runtime, mode, why) = row(&mute);
    assert_eq!((runtime.as_str(), mode.as_str()), (dotnet.as_str(), "no names"));
    assert!(why.contains("no diagnostics socket"), "{why}");

    let small = Workload::program(assemble_32_bit("spin32").unwrap()).spawn().unwrap();
    let (runtime, mode, why) = row(&small);
    assert_eq!((runtime.as_str(), mode.as_str()), ("native", "native"));
    assert!(why.contains("32-bit"), "{why}");

    // Another user may not look at root's processes, and is told what it takes.
    let copy = scratch.path("perfusion");
    copy_program(&perfusion_bin().unwrap(), &copy).unwrap();
    let nobody = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&copy)
            .args(arguments);
        command
    };
    std::os::unix::fs::chown(copy.parent().unwrap(), Some(65534), Some(65534)).unwrap();
    let [_, name, runtime, _, mode, why] =
        seen_by(nobody(&["ps"]), nobody(&["ps", "--json"]), native.pid());
    assert_eq!((name.as_str(), runtime.as_str(), mode.as_str()), ("sleep", "?", "not seen"));
    assert!(why.contains("CAP_SYS_PTRACE"), "{why}");
}

#[test]
fn a_process_whose_files_may_not_be_that_long_is_left_alone() {
    let Some(_turn) = begin_beside("ps::file_limit", &[RECORD_NET9, &[Need::Shim]].concat()) else {
        return;
    };
    let callheavy = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    // 1,000 blocks of 512 bytes. Without the runtime's own large file (doubly mapped code), for
    // which such a limit is too small as well.
    let line = callheavy.command_line().into_iter();
    let limited = Workload::program("/bin/sh").arg("-c").arg("ulimit -f 1000; exec \"$0\" \"$@\"");
    let limited = line.fold(limited, Workload::arg).env("DOTNET_EnableWriteXorExecute", "0");
    let limited =
        callheavy.environment().iter().fold(limited, |app, (name, value)| app.env(name, value));
    let app = limited.start().unwrap();
    let [.., mode, why] = seen(app.pid());
    assert_eq!(mode, "no names");
    assert!(why.contains("no file of more than 512000 bytes (`ulimit -f`)"), "{why}");
    // Whoever is loaded at the start finds out by itself.
    let with = launch(&ShimSettings::new(Subscriptions::default()).unwrap(), false).unwrap();
    let loaded = with.environment.iter().fold(limited, |app, (name, value)| app.env(name, value));
    let truth = loaded.start().unwrap().stop().unwrap();
    assert!(truth["rounds"].as_i64() > Some(0), "{truth}");
}

#[test]
fn a_process_in_a_container_has_the_containers_id() {
    let needs = [RECORD, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("ps::a_process_in_a_container", &needs) else { return };
    // As Docker calls it under systemd; what makes it a container's is the name alone, on every
    // host.
    let id = format!("{:016x}", std::process::id()).repeat(4);
    let group = Group::new(&format!("docker-{id}.scope")).unwrap();
    let app = Workload::program("/bin/sleep").arg("600").spawn().unwrap();
    assert_eq!(seen(app.pid())[3], "-");
    group.take(app.pid()).unwrap();
    assert_eq!(seen(app.pid())[3], id[..12]);
    // The whole id is in the profile.
    let (profile, _) = record_pid(app.pid(), Duration::from_millis(500), &[]).unwrap();
    let walls = profile.sum_by("wall", "container_id");
    assert!(walls.keys().eq([&id]) && walls[&id] > 0, "{walls:?}");
    drop(app);
    drop(group);
}
