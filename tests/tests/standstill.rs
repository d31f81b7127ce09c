//! Nothing that children of a recorded program inherit holds them up for long, whatever has become
//! of the recorder.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use system_tests::environment::{begin, long_form, record_on};
use system_tests::perfusion::{Scratch, command};
use system_tests::{Recording, Runtime, Workload, on_runtimes, wait_until};

/// For a machine that is busy with other things, too.
const DEADLINE: Duration = Duration::from_secs(120);
/// What a child may take longer than alone while nobody records, on a machine that is busy. A
/// recorder that is alive and does not answer costs a second at most.
const NOTHING: Duration = Duration::from_millis(300);
const WAIT_AT_START: Duration = Duration::from_millis(2000);

/// The ways to count from the start, all of which have something in the environment.
const MODES: [&[&str]; 3] = [&["--exact"], &["--alloc-counts", "high"], &[]];

/// A child that starts when it is told to, by a file, and how long it has taken.
struct Child {
    scratch: Scratch,
    line: String,
}

impl Child {
    fn new(runtime: Runtime) -> Self {
        let app = Workload::dotnet(runtime, "ends", &[]).unwrap().arg("end").arg("1");
        let line: Vec<String> =
            app.command_line().iter().map(|part| part.to_string_lossy().into_owned()).collect();
        Self { scratch: Scratch::new().unwrap(), line: line.join(" ") }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.scratch.path("said")).unwrap_or_default()
    }

    /// A script that starts the child whenever there is another file `go.N`, within `wrapper`, and
    /// says how many milliseconds it took.
    fn script(&self, runs: usize, wrapper: &str) -> String {
        format!(
            "echo ready >> {said}; n=0; while [ $n -lt {runs} ]; do until [ -e {go}.$n ]; do sleep \
             0.02; done; \
             s=$(date +%s%N); {wrapper} timeout -s KILL 60 {line} > {out}; rc=$?; e=$(date +%s%N); \
             echo \"took $(( (e - s) / 1000000 )) rc $rc $(grep -c done {out})\" >> {said}; n=$((n \
             + 1)); done",
            said = self.scratch.path("said").display(),
            go = self.scratch.path("go").display(),
            out = self.scratch.path("out").display(),
            line = self.line,
        )
    }

    fn recording(&self, mode: &[&str], more: &[&str], script: &str) -> Command {
        let mut recording = command(["record", "-q", "-o"]);
        recording
            .arg(self.scratch.path("app.pb.gz"))
            .args(mode)
            .args(more)
            .args(["--", "sh", "-c", script]);
        recording
    }

    /// Starts it once more and answers how long it took; it ended well.
    fn run(&self, number: usize) -> Duration {
        std::fs::write(self.scratch.path(&format!("go.{number}")), "").unwrap();
        let line = wait_until("the child", DEADLINE, || {
            self.said()
                .lines()
                .filter(|line| line.starts_with("took"))
                .nth(number)
                .map(str::to_owned)
        });
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(words[2..], ["rc", "0", "1"], "{line}");
        Duration::from_millis(words[1].parse().unwrap())
    }

    /// The same without any recorder.
    fn alone(&self) -> Duration {
        let words: Vec<&str> = self.line.split(' ').collect();
        let run = || {
            let begin = Instant::now();
            let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
            assert!(output.status.success());
            begin.elapsed()
        };
        (0..3).map(|_| run()).max().unwrap()
    }
}

fn runs() -> usize {
    if long_form() { 100 } else { 4 }
}

/// Runs the child; prints what docs/reliability.md has. A wait for somebody who is not there is in
/// each run, and what other programs do to the machine is not: so the shortest run has none, and
/// the longest one is no longer than a wait with an end.
fn assert_waits_for_nobody(child: &Child, name: &str, alone: Duration, is_recorded: bool) {
    let mut took: Vec<Duration> = (0..runs()).map(|number| child.run(number)).collect();
    took.sort();
    let (shortest, middle, longest) = (took[0], took[took.len() / 2], took[took.len() - 1]);
    println!(
        "{name}: of {}: {shortest:.2?} to {longest:.2?}, half below {middle:.2?}; alone \
         {alone:.2?}",
        runs()
    );
    // Whoever waits for a recorder that is there waits for its answer, which comes late on a busy
    // machine.
    let least = if is_recorded { WAIT_AT_START } else { NOTHING };
    assert!(shortest < alone + least, "{name}: {took:?} and {alone:?} alone");
    assert!(longest < alone + 2 * WAIT_AT_START, "{name}: {took:?} and {alone:?} alone");
}

on_runtimes!(
    a_child_after_the_end_of_the_recording_waits_for_nobody:
    net8 Net8, net10 Net10; long: net9 Net9, net11 Net11
);

fn a_child_after_the_end_of_the_recording_waits_for_nobody(runtime: Runtime) {
    let name = format!("standstill::after on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    for mode in MODES {
        let child = Child::new(runtime);
        let alone = child.alone();
        let script = child.script(runs(), "");
        let recording =
            Recording::spawn(&mut child.recording(mode, &["-d", "1s"], &script)).unwrap();
        wait_until("the profile", DEADLINE, || {
            child.scratch.path("app.pb.gz").exists().then_some(())
        })
        .unwrap();
        assert_waits_for_nobody(&child, &format!("{name} {mode:?}"), alone, false);
        recording.finish_well(DEADLINE).unwrap();
    }
}

on_runtimes!(
    a_child_of_a_killed_recorder_waits_for_nobody:
    net8 Net8, net10 Net10; long: net9 Net9, net11 Net11
);

fn a_child_of_a_killed_recorder_waits_for_nobody(runtime: Runtime) {
    let name = format!("standstill::killed on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    for mode in MODES {
        let child = Child::new(runtime);
        let alone = child.alone();
        let script = child.script(runs(), "");
        let recording = Recording::spawn(&mut child.recording(mode, &[], &script)).unwrap();
        wait_until("the shell", DEADLINE, || child.said().contains("ready").then_some(())).unwrap();
        recording.kill().unwrap();
        assert_waits_for_nobody(&child, &format!("{name} {mode:?}"), alone, false);
    }
}

on_runtimes!(a_child_of_a_stopped_recorder_waits_a_second_at_most: net8 Net8, net10 Net10);

fn a_child_of_a_stopped_recorder_waits_a_second_at_most(runtime: Runtime) {
    let name = format!("standstill::stopped on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    for mode in MODES {
        let child = Child::new(runtime);
        let alone = child.alone();
        let script = child.script(1, "");
        let recording = Recording::spawn(&mut child.recording(mode, &[], &script)).unwrap();
        wait_until("the shell", DEADLINE, || child.said().contains("ready").then_some(())).unwrap();
        recording.signal(Signal::STOP).unwrap();
        let took = child.run(0);
        recording.signal(Signal::CONT).unwrap();
        recording.finish_well(DEADLINE).unwrap();
        println!("{name} {mode:?}: {took:.2?}, alone {alone:.2?}");
        // A second at the start; without a reader half of one at the end.
        assert!(took < alone + WAIT_AT_START + Duration::from_millis(500), "{mode:?}: {took:?}");
    }
}

on_runtimes!(
    a_child_in_namespaces_of_its_own_starts_and_ends:
    net10 Net10; long: net8 Net8, net9 Net9, net11 Net11
);

fn a_child_in_namespaces_of_its_own_starts_and_ends(runtime: Runtime) {
    let name = format!("standstill::namespaces on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    // Without our directory: `sh` runs what follows it there.
    let hidden = "unshare -m sh -c 'mount -t tmpfs none /run; exec \"$@\"' sh";
    let wrappers = [
        hidden,
        "unshare -n",
        "unshare -p -f --mount-proc",
        "unshare -T --monotonic 100000 --boottime 100000",
    ];
    for wrapper in wrappers {
        for mode in MODES {
            let child = Child::new(runtime);
            let alone = child.alone();
            let script = child.script(runs(), wrapper);
            let recording = Recording::spawn(&mut child.recording(mode, &[], &script)).unwrap();
            wait_until("the shell", DEADLINE, || child.said().contains("ready").then_some(()))
                .unwrap();
            assert_waits_for_nobody(
                &child,
                &format!("{name} {wrapper} {mode:?}"),
                alone,
                wrapper != hidden,
            );
            recording.finish_well(DEADLINE).unwrap();
        }
    }
}
