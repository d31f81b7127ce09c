//! Bringing the shim into processes and out of them again, against real runtimes, through the
//! daemon's own functions.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use perfusion_dotnet::attach::policy::{self, AttachObstacle, DetectedRuntime as Kind};
use perfusion_dotnet::attach::{AttachError, attach, ipc, launch, shim_copy};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::event::{Event, EventKind, MonotonicNs, RegionId, ShimEvent};
use perfusion_sources::shim::{ShimLimits, ShimSource};
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{MIN_UNITS, VERSION};
use profiler_protocol::position::{Extent, commit_word};
use rustix::process::Signal;
use serde_json::json;
use system_tests::environment::{Need, begin, begin_beside, long_form};
use system_tests::perfusion::{Scratch, memory, record_pid};
use system_tests::region::{counted, regions};
use system_tests::{App, Runtime, Workload, on_runtimes, wait_until};

const DEADLINE: Duration = Duration::from_secs(120);
const PREFIX: &str = "perfusion-shim-";

fn needs(runtime: Runtime) -> [Need; 3] {
    [Need::Root, Need::Shim, Need::Clr(runtime)]
}

/// One recorder: a source, and all it has heard.
struct Recorder {
    settings: ShimSettings,
    source: ShimSource,
    heard: Vec<Event>,
}

impl Recorder {
    fn new() -> Self {
        Self::with(ShimSettings::new(Subscriptions::default()).unwrap())
    }

    fn with(settings: ShimSettings) -> Self {
        Self {
            settings,
            source: ShimSource::new(settings.owner, ShimLimits::default()),
            heard: Vec::new(),
        }
    }

    fn attach(&mut self, pid: u32) {
        attach(pid, self.settings).unwrap();
        self.source.watch(pid);
    }

    fn drain(&mut self) {
        let heard = &mut self.heard;
        self.source.drain(&mut |event| heard.push(event));
    }

    /// Drains until an event satisfies `wanted`; its value.
    fn hear<T>(
        &mut self,
        what: &str,
        wanted: impl Fn(u32, RegionId, &ShimEvent) -> Option<T>,
    ) -> T {
        let mut seen = 0;
        wait_until(what, DEADLINE, || {
            self.drain();
            let new = self.heard.get(seen..).unwrap_or_default();
            seen = self.heard.len();
            new.iter().find_map(|event| match &event.kind {
                EventKind::Shim { pid, region, event } => wanted(*pid, *region, event),
                _ => None,
            })
        })
        .unwrap_or_else(|error| panic!("{error}\n{:#?}", self.counters()))
    }

    fn counters(&self) -> Vec<(String, u64)> {
        self.source.counters().into_iter().filter(|(_, value)| *value > 0).collect()
    }

    fn counter(&self, name: &str) -> u64 {
        self.source
            .counters()
            .into_iter()
            .find(|(n, _)| n == name)
            .unwrap_or_else(|| panic!("no {name}"))
            .1
    }

    /// Waits for the instance's first words; its runtime's major version and its region.
    fn hello(&mut self, of: u32) -> (u16, RegionId) {
        self.hear("Hello", |pid, region, event| match event {
            ShimEvent::Hello { runtime, .. } if pid == of => Some((runtime.0, region)),
            _ => None,
        })
    }

    /// Waits for a new allocation; its thread.
    fn allocation(&mut self, of: u32) -> u32 {
        self.heard.clear();
        self.hear("an allocation", |pid, _, event| match event {
            ShimEvent::Allocation(allocation) if pid == of => Some(allocation.tid),
            _ => None,
        })
    }

    /// Asks for whatever looks like a caller of an allocation until one of the answers is `name`.
    fn resolves(&mut self, of: u32, name: &str) {
        let mut seen = 0;
        let found = wait_until("the method's name", DEADLINE, || {
            let executable = executable_anonymous(of);
            self.drain();
            let new = self.heard.get(seen..).unwrap_or_default();
            seen = self.heard.len();
            for event in new {
                match &event.kind {
                    EventKind::Shim { pid, event: ShimEvent::Allocation(allocation), .. }
                        if *pid == of =>
                    {
                        let words = allocation.user.stack.chunks_exact(8);
                        words
                            .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
                            .filter(|word| {
                                executable.iter().any(|(start, end)| (*start..*end).contains(word))
                            })
                            .for_each(|word| self.source.ask(of, word, allocation.seen));
                    }
                    EventKind::Shim { pid, event: ShimEvent::Method(method), .. }
                        if *pid == of && method.name.contains(name) =>
                    {
                        return Some(());
                    }
                    _ => {}
                }
            }
            None
        });
        found.unwrap_or_else(|error| panic!("{error}: no {name}\n{:#?}", self.counters()));
    }

    fn regions(&self) -> HashSet<RegionId> {
        let region = |event: &Event| match event.kind {
            EventKind::Shim { region, .. } => Some(region),
            _ => None,
        };
        self.heard.iter().filter_map(region).collect()
    }

    fn detach(&mut self) {
        assert_eq!(
            self.source.detach_all(),
            Vec::<u32>::new(),
            "still attached\n{:#?}",
            self.counters()
        );
        self.drain();
        let last = self.heard.last().unwrap();
        assert!(
            matches!(last.kind, EventKind::Shim { event: ShimEvent::Bye, .. }),
            "the last word is not Bye"
        );
    }
}

/// Where JIT-compiled code may be.
fn executable_anonymous(pid: u32) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    ProcessHandle::open(pid)
        .unwrap()
        .maps(|line| {
            if line.executable && (line.inode == 0 || line.name.contains("doublemapper")) {
                ranges.push((line.start, line.end));
            }
            true
        })
        .unwrap();
    ranges
}

fn region_mappings(pid: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("/memfd:perfusion-shim")).count()
}

/// The runtime lets an instance go when no thread is inside one of its callbacks; it looks after
/// 0.3 s, and again after 5 s.
fn wait_for_regions(pid: u32, expected: usize) {
    wait_until("instances to leave", DEADLINE, || (region_mappings(pid) == expected).then_some(()))
        .unwrap();
}

fn library_mapped(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains(PREFIX)
}

/// Placed libraries below a process's root; of this test alone only where the process has both
/// directories for itself ([`OWN_DIRECTORIES`]).
fn libraries(pid: u32) -> Vec<PathBuf> {
    ["tmp", "dev/shm"]
        .iter()
        .filter_map(|folder| fs::read_dir(format!("/proc/{pid}/root/{folder}")).ok())
        .flatten()
        .map_while(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .map(|entry| entry.path())
        .collect()
}

/// A script that gives a program in a mount namespace of its own the directories where libraries
/// are placed: tests beside this one place theirs in those of the host.
const OWN_DIRECTORIES: &str =
    "mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; exec \"$@\"";

fn allocator(runtime: Runtime) -> Workload {
    Workload::dotnet(runtime, "allocator", &[]).unwrap()
}

/// The allocator behind `sh -c SCRIPT`, where the script ends in `exec "$@"`, in new namespaces.
fn allocator_in(runtime: Runtime, unshare: &[&str], script: &str) -> Workload {
    let mut workload = Workload::program("unshare");
    for flag in unshare {
        workload = workload.arg(*flag);
    }
    workload = workload.arg("sh").arg("-ec").arg(script).arg("sh");
    allocator(runtime)
        .command_line()
        .into_iter()
        .fold(workload, |workload, word: OsString| workload.arg(word))
}

on_runtimes!(
    a_runtime_tells_its_version:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11, net10_musl Net10Musl, net11_musl Net11Musl
);

fn a_runtime_tells_its_version(runtime: Runtime) {
    let name = format!("attach::a_runtime_tells_its_version {runtime}");
    let Some(_turn) = begin_beside(&name, &[Need::Root, Need::Clr(runtime)]) else { return };
    let app = allocator(runtime).start().unwrap();
    let target = ProcessHandle::open(app.pid()).unwrap();
    let info = ipc::process_info(&target, DEADLINE).unwrap();
    let version = &info.runtime_version;
    assert!(version.starts_with(&format!("{}.", runtime.major())), "{info:?}");
    assert_eq!(info.entry_assembly, "allocator");
    // Of a single file nothing but itself tells it.
    let one_file = runtime == Runtime::Net10Musl;
    let inspection = policy::inspect(&target, one_file.then_some(DEADLINE)).unwrap();
    let versions = vec![version.clone()];
    let expected =
        if one_file { Kind::SingleFile { versions } } else { Kind::CoreClr { versions } };
    assert_eq!(inspection.runtime, expected);
    assert_eq!(inspection.why_not, None);
    app.stop().unwrap();
}

// musl unloads no library (its `dlclose` does nothing).
on_runtimes!(
    attach_detach_and_attach_again:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11
);

fn attach_detach_and_attach_again(runtime: Runtime) {
    let name = format!("attach::attach_detach_and_attach_again {runtime}");
    let Some(_turn) = begin_beside(&name, &needs(runtime)) else { return };
    let app = allocator_in(runtime, &["-m"], OWN_DIRECTORIES).start().unwrap();
    for round in 0..2 {
        let mut recorder = Recorder::new();
        recorder.attach(app.pid());
        assert_eq!(libraries(app.pid()), Vec::<PathBuf>::new(), "round {round}");
        assert_eq!(u32::from(recorder.hello(app.pid()).0), runtime.major());
        recorder.resolves(app.pid(), "Allocator.Program.Make");
        recorder.detach();
        // When a thread is inside one of our callbacks as the runtime looks, the runtime sleeps 5 s
        // before it looks again.
        wait_until("the region to be unmapped", DEADLINE, || {
            (region_mappings(app.pid()) == 0).then_some(())
        })
        .unwrap();
        wait_until("the library to be unloaded", DEADLINE, || {
            (!library_mapped(app.pid())).then_some(())
        })
        .unwrap();
        assert_eq!(recorder.regions().len(), 1);
    }
    app.stop().unwrap();
}

on_runtimes!(
    attached_and_detached_again_and_again_under_load_it_survives:
    net10 Net10; long: net8 Net8, net9 Net9
);

/// Beside threads that allocate, throw and collect. Every other time the next one comes while the
/// one before is still on its way out.
fn attached_and_detached_again_and_again_under_load_it_survives(runtime: Runtime) {
    let name = format!("attach::attached_and_detached_again_and_again_under_load {runtime}");
    let needs = [&needs(runtime)[..], &[Need::C]].concat();
    let Some(_turn) = begin_beside(&name, &needs) else { return };
    let workload = Workload::dotnet(runtime, "survive", &["forks"]).unwrap();
    let mut app = workload.arg("exceptions").arg("120").start().unwrap();
    let pid = app.pid();
    // What is right is what it computes before anybody comes.
    app.perform("go").unwrap();
    let over = Arc::new(AtomicBool::new(false));
    // However this test ends, the load does, too.
    let end = OnDrop(Arc::clone(&over));
    let load = std::thread::spawn(move || {
        let mut rounds = 1;
        // Relaxed: nothing else is told by it.
        while !over.load(Ordering::Relaxed) {
            app.perform("go").unwrap();
            rounds += 1;
        }
        (app, rounds)
    });
    let begun = Instant::now();
    let times = if long_form() { 500 } else { 4 };
    // After the first ones: the runtime makes itself ready for profilers but once.
    let mut early = None;
    for time in 0..times {
        let mut recorder = Recorder::new();
        // Hundreds in a row, beside all that the app maps and unmaps, may be more than a machine
        // without a CPU to spare answers in time.
        wait_until("an attach", DEADLINE, || match attach(pid, recorder.settings) {
            Err(error @ AttachError::HeldUp { .. }) => {
                println!("{name}: {error}");
                None
            }
            done => Some(done.unwrap()),
        })
        .unwrap();
        recorder.source.watch(pid);
        recorder.resolves(pid, "Survive.");
        recorder.allocation(pid);
        recorder.detach();
        if time % 2 == 1 {
            wait_for_regions(pid, 0);
            let now = Holdings::of(pid);
            if time % 50 == 1 {
                println!("{name}: after {} times in {:.1?} {now:?}", time + 1, begun.elapsed());
            }
            early = early.or((time >= 10).then_some(now));
        }
    }
    wait_until("the library to be unloaded", DEADLINE, || (!library_mapped(pid)).then_some(()))
        .unwrap();
    drop(end);
    let (app, rounds) = load.join().unwrap();
    let now = Holdings::of(pid);
    println!(
        "{name}: {times} times in {:.1?}, {rounds} rounds of the app, {now:?}",
        begun.elapsed()
    );
    if let Some(early) = early {
        // Threads of its pool come and go; 490 times of one each would be more.
        assert!(
            now.files < early.files + 50 && now.threads < early.threads + 50,
            "{early:?}, then {now:?}"
        );
    }
    let truth = app.stop().unwrap();
    assert_eq!((&truth["rounds"], &truth["mistakes"]), (&json!(rounds), &json!(0)), "{truth}");
}

/// What a process has of what could be left behind in it.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    files: usize,
    threads: usize,
    #[expect(dead_code, reason = "shown")]
    mappings: usize,
    #[expect(dead_code, reason = "shown")]
    resident_mib: u64,
}

impl Holdings {
    fn of(pid: u32) -> Self {
        let entries = |folder| fs::read_dir(format!("/proc/{pid}/{folder}")).unwrap().count();
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        Self {
            files: entries("fd"),
            threads: entries("task"),
            mappings: maps.lines().count(),
            resident_mib: memory(pid, "VmRSS"),
        }
    }
}

/// Says that it is over.
struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn another_mount_namespace_with_its_own_tmp_is_reached() {
    let Some(_turn) = begin_beside("attach::another_mount_namespace", &needs(Runtime::Net9)) else {
        return;
    };
    let app = allocator_in(Runtime::Net9, &["-m"], OWN_DIRECTORIES).start().unwrap();
    let mut recorder = Recorder::new();
    recorder.attach(app.pid());
    recorder.resolves(app.pid(), "Allocator.Program.Make");
    assert_eq!(libraries(app.pid()), Vec::<PathBuf>::new());
    recorder.detach();
    app.stop().unwrap();
}

#[test]
fn a_user_namespace_that_does_not_know_root_is_reached() {
    let needs = [&needs(Runtime::Net9)[..], &[Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("attach::a_user_namespace", &needs) else { return };
    // The sources and the runtime must be readable for that user: a precondition of the test, not
    // of the attach.
    let mut workload = Workload::program("setpriv");
    for word in
        ["--reuid=1000", "--regid=1000", "--clear-groups", "unshare", "-Ur", "-m", "sh", "-ec"]
    {
        workload = workload.arg(word);
    }
    workload = workload.arg(OWN_DIRECTORIES).arg("sh");
    let command = allocator(Runtime::Net9).command_line();
    let app =
        command.into_iter().fold(workload, |workload, word| workload.arg(word)).start().unwrap();
    let mut recorder = Recorder::new();
    recorder.attach(app.pid());
    recorder.resolves(app.pid(), "Allocator.Program.Make");
    assert_eq!(libraries(app.pid()), Vec::<PathBuf>::new());
    recorder.detach();
    app.stop().unwrap();
}

#[test]
fn a_time_namespace_with_an_offset_has_its_events_when_they_were() {
    let Some(_turn) = begin_beside("attach::a_time_namespace", &needs(Runtime::Net9)) else {
        return;
    };
    // Its clocks are a day ahead of the host's. `unshare` becomes the program's parent: only a
    // child is in the new namespace.
    let day = "86400";
    let mut workload = Workload::program("unshare");
    for word in ["--time", "--monotonic", day, "--boottime", day, "--fork", "--kill-child"] {
        workload = workload.arg(word);
    }
    let command = allocator(Runtime::Net9).command_line();
    let app =
        command.into_iter().fold(workload, |workload, word| workload.arg(word)).start().unwrap();
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", app.pid())).unwrap();
    let pid: u32 = children.trim().parse().unwrap();
    let offsets = fs::read_to_string(format!("/proc/{pid}/timens_offsets")).unwrap();
    assert!(
        offsets.lines().any(|line| line.starts_with("monotonic") && line.contains(day)),
        "{offsets}"
    );
    let (profile, outcome) = record_pid(pid, Duration::from_secs(2), &[]).unwrap();
    let allocated = profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make"));
    assert!(allocated > 0, "{}", outcome.stderr);
    // By its own clock all of that will be tomorrow.
    assert_eq!(profile.counter("shim_times_corrected").unwrap_or(0), 0, "{}", outcome.stderr);
    app.stop().unwrap();
}

#[test]
fn a_tmp_without_exec_sends_the_library_elsewhere() {
    let Some(_turn) = begin_beside("attach::a_tmp_without_exec", &needs(Runtime::Net9)) else {
        return;
    };
    let script = "mount -t tmpfs -o noexec tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; exec \"$@\"";
    let app = allocator_in(Runtime::Net9, &["-m"], script).start().unwrap();
    let mut recorder = Recorder::new();
    recorder.attach(app.pid());
    recorder.hello(app.pid());
    assert_eq!(libraries(app.pid()), Vec::<PathBuf>::new());
    recorder.detach();
    app.stop().unwrap();
}

#[test]
fn nowhere_to_place_the_library_is_said_directory_by_directory() {
    let Some(_turn) = begin_beside("attach::nowhere_to_place", &needs(Runtime::Net9)) else {
        return;
    };
    let script =
        "mount -t tmpfs -o noexec tmpfs /tmp; mount -t tmpfs -o noexec tmpfs /dev/shm; exec \"$@\"";
    let app = allocator_in(Runtime::Net9, &["-m"], script).start().unwrap();
    let error = attach(app.pid(), Recorder::new().settings).unwrap_err();
    assert!(matches!(error, AttachError::ShimCopy(_)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("/tmp: mounted noexec") && text.contains("/dev/shm: mounted noexec"),
        "{text}"
    );
    app.stop().unwrap();
}

#[test]
fn thread_ids_of_a_pid_namespace_are_the_hosts() {
    let Some(_turn) = begin_beside("attach::thread_ids_of_a_pid_namespace", &needs(Runtime::Net9))
    else {
        return;
    };
    let flags = ["-p", "-f", "--mount-proc", "--kill-child"];
    let app = allocator_in(Runtime::Net9, &flags, "exec \"$@\"").start().unwrap();
    let unshare = app.pid();
    let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap();
    let pid: u32 = children.trim().parse().unwrap();
    assert_eq!(ProcessHandle::open(pid).unwrap().namespace_pid(), Ok(1));
    let mut recorder = Recorder::new();
    recorder.attach(pid);
    let tid = recorder.allocation(pid);
    let comm = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap();
    // The shim's own threads run a little managed code when a session starts.
    assert!(
        ["alloc-", ".NET", "perfusion"].iter().any(|own| comm.starts_with(own)),
        "{tid}: {comm}"
    );
    recorder.detach();
    app.stop().unwrap();
}

#[test]
fn two_recorders_have_an_instance_each_and_hear_everything_once() {
    let Some(_turn) = begin_beside("attach::two_recorders", &needs(Runtime::Net9)) else { return };
    let app = allocator(Runtime::Net9).start().unwrap();
    let mut recorders = [Recorder::new(), Recorder::new()];
    for recorder in &mut recorders {
        recorder.attach(app.pid());
    }
    assert_eq!(region_mappings(app.pid()), 2);
    for recorder in &mut recorders {
        recorder.hello(app.pid());
        recorder.resolves(app.pid(), "Allocator.Program.Make");
    }
    let [mut first, mut second] = recorders;
    first.detach();
    wait_for_regions(app.pid(), 1);
    for recorder in [&first, &second] {
        assert_eq!(recorder.regions().len(), 1, "{:#?}", recorder.counters());
        let allocations: Vec<u64> = recorder.heard.iter().filter_map(sample).collect();
        let distinct: HashSet<u64> = allocations.iter().copied().collect();
        assert_eq!(allocations.len(), distinct.len());
    }
    // The other one goes on.
    second.allocation(app.pid());
    second.detach();
    wait_for_regions(app.pid(), 0);
    app.stop().unwrap();
}

fn sample(event: &Event) -> Option<u64> {
    match &event.kind {
        EventKind::Shim { event: ShimEvent::Allocation(allocation), .. } => Some(allocation.sample),
        _ => None,
    }
}

#[test]
fn a_dead_recorders_instance_is_told_to_leave_by_the_next() {
    let Some(_turn) = begin_beside("attach::a_dead_recorders_instance", &needs(Runtime::Net9))
    else {
        return;
    };
    let app = allocator(Runtime::Net9).start().unwrap();
    let mut dead = Recorder::new();
    dead.attach(app.pid());
    dead.hello(app.pid());
    drop(dead);
    let mut next = Recorder::new();
    next.attach(app.pid());
    wait_until("the dead recorder's instance to leave", DEADLINE, || {
        next.drain();
        (region_mappings(app.pid()) == 1).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{:#?}", next.counters()));
    assert_eq!(next.counter("shim_regions_cleaned"), 1);
    next.resolves(app.pid(), "Allocator.Program.Make");
    next.detach();
    app.stop().unwrap();
}

#[test]
fn a_dead_recorders_instance_is_taken_over_by_one_that_does_not_attach() {
    let Some(_turn) = begin_beside("attach::taken_over", &needs(Runtime::Net9)) else { return };
    let app = allocator(Runtime::Net9).start().unwrap();
    let mut dead = Recorder::new();
    dead.attach(app.pid());
    dead.hello(app.pid());
    drop(dead);
    let mut next = Recorder::new();
    next.source.watch(app.pid());
    next.resolves(app.pid(), "Allocator.Program.Make");
    assert_eq!(next.regions().len(), 1);
    app.stop().unwrap();
}

#[test]
fn a_recorder_that_goes_without_something_else_has_another_session() {
    let Some(_turn) = begin_beside("attach::without", &needs(Runtime::Net9)) else { return };
    let mut app = Workload::dotnet(Runtime::Net9, "incidents", &[]).unwrap().start().unwrap();
    let mut recorder = Recorder::new();
    recorder.attach(app.pid());
    for (session, exceptions) in [(1, true), (2, false), (3, true)] {
        // As a daemon that has read another configuration.
        let settings =
            recorder.settings.subscribing(Subscriptions { exceptions, ..Subscriptions::default() });
        if session > 1 {
            drop(std::mem::replace(&mut recorder, Recorder::with(settings)));
            recorder.source.watch(app.pid());
        }
        wait_until("the session", DEADLINE, || {
            recorder.drain();
            (counted(&regions(&app), Counter::SessionsStarted) == session).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {session}\n{:#?}", recorder.counters()));
        recorder.heard.clear();
        app.perform("throw").unwrap();
        app.perform("contend").unwrap();
        // The thread that waits has thrown before.
        recorder.hear("a wait for a lock", |_, _, event| {
            matches!(event, ShimEvent::Contention(_)).then_some(())
        });
        let thrown = recorder.heard.iter().any(|event| {
            matches!(&event.kind, EventKind::Shim { event: ShimEvent::Exception(_), .. })
        });
        assert_eq!(thrown, exceptions, "session {session}");
    }
    recorder.detach();
    app.stop().unwrap();
}

#[test]
fn diagnostics_switched_off_is_a_reason_with_the_variables_name() {
    let needs = [Need::Root, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin_beside("attach::diagnostics_switched_off", &needs) else { return };
    for variable in [
        "DOTNET_EnableDiagnostics",
        "DOTNET_EnableDiagnostics_IPC",
        "DOTNET_EnableDiagnostics_Profiler",
    ] {
        let app = allocator(Runtime::Net9).env(variable, "0").start().unwrap();
        let inspection = policy::inspect(&ProcessHandle::open(app.pid()).unwrap(), None).unwrap();
        assert_eq!(inspection.why_not, Some(AttachObstacle::DiagnosticsOff(variable.to_owned())));
        app.stop().unwrap();
    }
}

/// A process that ends waits for last questions, but not for its whole timeout when the recorder
/// is awake. The first and the last thing its shim says of the end have the times of it.
#[test]
fn the_end_of_a_process_is_held_up_no_longer_than_an_awake_recorder_needs() {
    let Some(_turn) = begin_beside("attach::the_end_is_held_up", &needs(Runtime::Net10)) else {
        return;
    };
    let held_up = || {
        let app = allocator(Runtime::Net10).start().unwrap();
        let mut recorder = Recorder::new();
        let pid = app.pid();
        recorder.attach(pid);
        recorder.allocation(pid);
        recorder.heard.clear();
        let (done, over) = std::sync::mpsc::channel();
        let stop = std::thread::spawn(move || {
            app.stop().unwrap();
            done.send(()).unwrap();
        });
        // Rounds as the collector has them while a process waits with its end.
        let mut looked_at = 0;
        while over.recv_timeout(Duration::from_millis(5)).is_err() {
            recorder.drain();
            for event in recorder.heard.get(looked_at..).unwrap_or_default() {
                if let EventKind::Shim { region, event: ShimEvent::Mark, .. } = &event.kind {
                    recorder.source.heard(*region);
                }
            }
            looked_at = recorder.heard.len();
        }
        stop.join().unwrap();
        recorder.drain();
        let times = |wanted: fn(&ShimEvent) -> bool| {
            let of = move |event: &&Event| match &event.kind {
                EventKind::Shim { event, .. } => wanted(event),
                _ => false,
            };
            recorder.heard.iter().filter(of).map(|event| event.time.0).collect::<Vec<_>>()
        };
        let marks = times(|event| matches!(event, ShimEvent::Mark));
        let bye = times(|event| matches!(event, ShimEvent::Bye));
        assert!(!marks.is_empty() && bye.len() == 1, "{marks:?} {bye:?}");
        Duration::from_nanos(bye[0] - marks[0])
    };
    // A busy machine makes it longer: one of three is enough to show that it is not the whole
    // timeout of 45 ms.
    let found: Vec<Duration> = (0..3).map(|_| held_up()).collect();
    println!("the end was held up for {found:?}");
    assert!(found.iter().any(|time| *time < Duration::from_millis(40)), "{found:?}");
}

#[test]
fn a_killed_app_gives_what_it_had_written() {
    let Some(_turn) = begin_beside("attach::a_killed_app", &needs(Runtime::Net9)) else { return };
    let mut app = allocator(Runtime::Net9).start().unwrap();
    let mut recorder = Recorder::new();
    let pid = app.pid();
    recorder.attach(pid);
    recorder.allocation(pid);
    app.signal(Signal::KILL).unwrap();
    app.await_exit(DEADLINE).unwrap();
    recorder
        .hear("Bye", |of, _, event| (of == pid && matches!(event, ShimEvent::Bye)).then_some(()));
    let (written, read) =
        (recorder.counter("shim_records_written"), recorder.counter("shim_records_read"));
    // A record that was reserved but not finished when the process died is counted by neither side
    // but as a hole; its writers were at most the four threads and the shim's own.
    assert!(
        read <= written + 5 && read + recorder.counter("shim_holes") * 5 >= written,
        "{:#?}",
        recorder.counters()
    );
    assert!(!recorder.source.has_region(pid));
}

#[test]
fn a_program_started_with_the_shim_is_heard_from_its_start() {
    let Some(_turn) =
        begin_beside("attach::a_program_started_with_the_shim", &needs(Runtime::Net9))
    else {
        return;
    };
    let mut recorder = Recorder::new();
    let launch = launch::launch(&recorder.settings, false).unwrap();
    let library = PathBuf::from(launch.library.path());
    let mut workload = allocator(Runtime::Net9);
    for (name, value) in &launch.environment {
        workload = workload.env(name, value);
    }
    let mut app: App = workload.spawn().unwrap();
    recorder.source.watch(app.pid());
    recorder.hello(app.pid());
    app.await_ready().unwrap();
    recorder.resolves(app.pid(), "Allocator.Program.Make");
    assert!(library.exists());
    drop(launch);
    assert!(!library.exists());
    // Detaching works for an instance of the environment too.
    recorder.detach();
    wait_for_regions(app.pid(), 0);
    app.stop().unwrap();
}

/// What the library's path is to the processes of a recording is what it must be to nobody else:
/// not while they live, whatever their `TMPDIR` is, and not after the recorder, whose file has gone
/// while their environment still names it.
#[test]
fn nobody_else_can_use_the_path_that_a_started_program_hands_on() {
    let needs = [Need::Root, Need::Shim, Need::Program("setpriv")];
    let Some(_turn) = begin_beside("attach::a_started_programs_path", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let temporary = scratch.path("tmp");
    fs::create_dir(&temporary).unwrap();
    std::os::unix::fs::chown(&temporary, Some(1000), Some(1000)).unwrap();
    let seen = scratch.path("seen");
    let script = "printenv CORECLR_NOTIFICATION_PROFILERS > \"$1\"";
    let mut command = system_tests::perfusion::command(["record", "-o"]);
    command.arg(scratch.path("x.pb.gz")).args(["--", "/bin/sh", "-c", script, "sh"]).arg(&seen);
    let outcome =
        system_tests::perfusion::run(command.env("TMPDIR", &temporary), DEADLINE).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let list = fs::read_to_string(&seen).unwrap();
    let path = PathBuf::from(list.split_once('=').unwrap().0);
    assert!(!path.exists(), "{}", path.display());
    let mut touch = std::process::Command::new("setpriv");
    touch.args(["--reuid=1000", "--regid=1000", "--clear-groups", "touch"]).arg(&path);
    assert!(!touch.stderr(std::process::Stdio::null()).status().unwrap().success());
    for directory in path.ancestors().skip(1) {
        let found = fs::metadata(directory).unwrap();
        assert_eq!((found.uid(), found.mode() & 0o022), (0, 0), "{}", directory.display());
    }
}

#[test]
fn a_tmpdir_of_somebody_else_is_not_used() {
    let Some(_turn) = begin_beside("attach::a_tmpdir_of_somebody_else", &[Need::Root]) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let temporary = scratch.path("tmp");
    fs::create_dir(&temporary).unwrap();
    let place_of = |uid: u32| {
        std::os::unix::fs::chown(&temporary, Some(uid), None).unwrap();
        let app =
            Workload::program("/bin/sleep").arg("600").env("TMPDIR", &temporary).spawn().unwrap();
        let target = ProcessHandle::open(app.pid()).unwrap();
        wait_until("its environment", DEADLINE, || target.environment("TMPDIR").ok().flatten())
            .unwrap();
        let placed = shim_copy::write_copy(&target, b"x").unwrap();
        Path::new(placed.path()).parent().unwrap().to_owned()
    };
    assert_eq!(place_of(0), temporary);
    assert_eq!(place_of(1000), Path::new("/tmp"));
}

#[test]
fn the_sweep_reaches_other_mount_namespaces() {
    let needs = [Need::Root, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin_beside("attach::the_sweep", &needs) else { return };
    let app = allocator_in(Runtime::Net9, &["-m"], OWN_DIRECTORIES).start().unwrap();
    let root = PathBuf::from(format!("/proc/{}/root/tmp", app.pid()));
    let left = root.join(format!("{PREFIX}0123456789abcdef.so"));
    fs::write(&left, b"left by a crash").unwrap();
    let placed =
        shim_copy::write_copy(&ProcessHandle::open(app.pid()).unwrap(), b"in use").unwrap();
    let in_use = root.join(Path::new(placed.path()).file_name().unwrap());
    // Daemons of tests beside this one sweep, too: how many it removed itself says nothing.
    shim_copy::sweep();
    assert!(!left.exists() && in_use.exists());
    drop(placed);
    assert!(!in_use.exists());
    app.stop().unwrap();
}

#[test]
fn no_such_process_is_told_so() {
    let Some(_turn) = begin_beside("attach::no_such_process", &[Need::Shim]) else { return };
    // Above the kernel's highest pid (PID_MAX_LIMIT, 2^22).
    let error = attach(1 << 23, Recorder::new().settings).unwrap_err();
    assert!(matches!(error, AttachError::NoSuchProcess { .. }), "{error}");
}

/// A process that offers so many regions made for the recorder with this number, with full rings of
/// so many units: collections' ends, which have the numbers from 0 on. Then it waits.
const FULL: &str = r#"
import fcntl, mmap, os, struct, sys, time
owner, count, units, version, committed = (int(word) for word in sys.argv[1:])
slots = 16
commit = 4096 + 32 * slots
data = commit + 8 * units
words = [0, version | 4096 << 32, data + 64 * units, 4096, slots, commit, data, units, 7,
         os.getpid(), 1, 9, 0, owner]
kept = []
for _ in range(count):
    fd = os.memfd_create("perfusion-shim", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, data + 64 * units)
    memory = mmap.mmap(fd, data + 64 * units)
    kept.append(memory)
    memory[0:112] = struct.pack("<14Q", *words)
    memory[0x80:0x88] = struct.pack("<Q", units)
    memory[0xc8:0xd0] = struct.pack("<Q", 1)
    memory[commit:data] = struct.pack("<Q", committed) * units
    one = struct.pack("<HHIQIIQQQQQ", 8, 0, os.getpid(), time.monotonic_ns(), 5, 0, 0, 0, 0, 0, 0)
    memory[data:] = one * units
    fcntl.fcntl(fd, 1033, 7)
    os.close(fd)
for memory in kept:
    memory[0:8] = b"PERFSHIM"
print("ready {}", flush=True)
time.sleep(600)
"#;

fn full_regions(recorder: &Recorder, count: u32, units: u32) -> App {
    let python = Workload::program("python3").arg("-c").arg(FULL);
    let units = u64::from(units);
    let committed = commit_word(0, units, Extent { units: 1, bytes: 24 });
    let arguments = [recorder.settings.owner, count.into(), units, VERSION.into(), committed];
    arguments
        .map(|argument| argument.to_string())
        .into_iter()
        .fold(python, |python, argument| python.arg(argument))
        .start()
        .unwrap()
}

#[test]
fn a_process_that_offers_many_regions_has_a_few_read() {
    let Some(_turn) = begin_beside("attach::many_regions", &[Need::Root, Need::Program("python3")])
    else {
        return;
    };
    let mut recorder = Recorder::new();
    let app = full_regions(&recorder, 12, MIN_UNITS as u32);
    recorder.source.watch(app.pid());
    recorder.drain();
    assert_eq!(recorder.counter("shim_regions_adopted"), 4);
    assert_eq!(recorder.counter("shim_regions_too_many"), 8);
    assert_eq!(recorder.heard.len(), 4 * MIN_UNITS as usize);
}

/// A process of 65,000 mappings, whose list takes tens of milliseconds to read: in its first second
/// it is looked at 50 times when it is like others.
#[test]
fn a_process_with_many_mappings_has_a_small_part_of_the_collectors_time() {
    const MANY: &str = r#"
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
base = libc.mmap(None, 65000 * 4096, 3, 0x22, -1, 0)
for page in range(0, 65000, 2):
    libc.mprotect(base + page * 4096, 4096, 1)
print("ready {}", flush=True)
time.sleep(600)
"#;
    let Some(_turn) =
        begin_beside("attach::many_mappings", &[Need::Root, Need::Program("python3")])
    else {
        return;
    };
    let app = Workload::program("python3").arg("-c").arg(MANY).start().unwrap();
    let mut recorder = Recorder::new();
    let cpu = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let cpu = || Duration::try_from(cpu()).unwrap();
    recorder.source.watch(app.pid());
    let before = cpu();
    recorder.drain();
    let first = cpu() - before;
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        recorder.drain();
    }
    let all = cpu() - before;
    println!("one look takes {first:?}, a second of rounds {all:?}");
    assert!(first > Duration::from_millis(5), "{first:?}: the mappings are not there");
    assert!(all < first * 5, "{first:?} {all:?}");
}

#[test]
fn the_last_words_of_a_process_are_read_whole_but_not_at_once() {
    let Some(_turn) = begin_beside("attach::last_words", &[Need::Root, Need::Program("python3")])
    else {
        return;
    };
    let mut recorder = Recorder::new();
    // 32 MiB each.
    let units: usize = 1 << 19;
    let mut app = full_regions(&recorder, 2, 1 << 19);
    recorder.source.watch(app.pid());
    recorder.drain();
    assert_eq!(recorder.counter("shim_regions_adopted"), 2);
    app.signal(Signal::KILL).unwrap();
    app.await_exit(DEADLINE).unwrap();
    let (mut ends, mut rounds) = (0, 0);
    let is_end = |event: &Event| {
        matches!(event.kind, EventKind::Shim { event: ShimEvent::GcEnd { .. }, .. })
    };
    wait_until("the regions to be given up", DEADLINE, || {
        ends += recorder.heard.drain(..).filter(is_end).count();
        recorder.drain();
        rounds += 1;
        assert!(recorder.heard.len() <= 70_000, "{} events in a round", recorder.heard.len());
        (!recorder.source.has_region(app.pid())).then_some(())
    })
    .unwrap();
    ends += recorder.heard.drain(..).filter(is_end).count();
    assert_eq!(ends, 2 * units);
    assert!(rounds >= 16, "{rounds}");
}

/// A process that offers a region of its own making and, once it is told `lie`, scribbles over it
/// for as long as it lives. Arguments: seals (a sum of `F_SEAL_*`), bytes, whether the header is a
/// good one, and for it the recorder's number and the version.
const LIAR: &str = r#"
import fcntl, mmap, os, random, struct, sys
seals, size, honest_header = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "good"
owner, version = int(sys.argv[4]), int(sys.argv[5])
fd = os.memfd_create("perfusion-shim", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, size)
memory = mmap.mmap(fd, size)
words = [0] * 16
if honest_header:
    units, slots = 4096, 16
    commit = 4096 + 32 * slots
    data = commit + 8 * units
    words[1:14] = [version | 4096 << 32, data + 64 * units, 4096, slots, commit, data, units, 7,
                   os.getpid(), 1, 9, 0, owner]
memory[0:128] = struct.pack("<16Q", *words)
fcntl.fcntl(fd, 1033, seals)
os.close(fd)
memory[0:8] = b"PERFSHIM"
print("ready {}", flush=True)
sys.stdin.readline()
print("done lie", flush=True)
while True:
    at = random.randrange(16, size // 8)
    word = os.urandom(8) if random.random() < 0.5 else struct.pack("<Q", random.randrange(3000))
    memory[8 * at:8 * at + 8] = word
"#;

/// Most memory that a process which lies may cost.
const LIARS_MEMORY: u64 = 1 << 20;

/// Bytes this process has for itself.
fn own_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

// Alone: it looks at the memory of this process, which is that of all tests.
#[test]
fn a_lying_process_is_given_up_and_the_others_lose_nothing() {
    let needs = [&needs(Runtime::Net9)[..], &[Need::Program("python3")]].concat();
    let Some(_turn) = begin("attach::a_lying_process", &needs) else { return };
    let app = allocator(Runtime::Net9).start().unwrap();
    let mut recorder = Recorder::new();
    // SHRINK | GROW | SEAL is 7; the good header's region has 299,520 bytes.
    let mut liars: Vec<App> = [
        ("7", "299520", "good"),
        ("7", "299520", "bad"),
        ("7", "4096", "good"),
        ("1", "299520", "good"),
        ("0", "2048", "bad"),
    ]
    .into_iter()
    .map(|(seals, bytes, header)| {
        let python = Workload::program("python3").arg("-c").arg(LIAR);
        let python = python.arg(seals).arg(bytes).arg(header);
        python.arg(recorder.settings.owner.to_string()).arg(VERSION.to_string()).start().unwrap()
    })
    .collect();
    recorder.attach(app.pid());
    // All that the honest one has told of, and what the others have said while somebody listened to
    // them.
    let mut heard = [0, 0];
    let listen = |recorder: &mut Recorder, heard: &mut [u64; 2]| {
        recorder.drain();
        for event in recorder.heard.drain(..) {
            match event.kind {
                EventKind::Shim { pid, event: ShimEvent::Allocation(_), .. }
                    if pid == app.pid() =>
                {
                    heard[0] += 1;
                }
                EventKind::Shim { pid, .. } if pid != app.pid() => heard[1] += 1,
                _ => {}
            }
        }
    };
    // With the ring read through once, all that one honest process costs is there.
    wait_until("a thousand samples", DEADLINE, || {
        listen(&mut recorder, &mut heard);
        (heard[0] > 1000).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{:#?}", recorder.counters()));
    let (before, heard_before) = (own_memory(), heard[0]);
    liars.iter().for_each(|liar| recorder.source.watch(liar.pid()));
    // One is believed, since all it says is right until it begins to lie.
    wait_until("the good one's region", DEADLINE, || {
        listen(&mut recorder, &mut heard);
        let refused = recorder.counter("shim_regions_refused");
        (recorder.counter("shim_regions_adopted") == 2 && refused == 4).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{:#?}", recorder.counters()));
    liars.iter_mut().for_each(|liar| liar.perform("lie").unwrap());
    wait_until("every liar to be found out", DEADLINE, || {
        listen(&mut recorder, &mut heard);
        liars.iter().for_each(|liar| recorder.source.ask(liar.pid(), 4096, MonotonicNs::now()));
        (recorder.counter("shim_regions_disabled") == 1).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{:#?}", recorder.counters()));
    assert!(liars.iter().all(|liar| !recorder.source.has_region(liar.pid())));
    let found_out = heard;
    // They go on lying, and nobody listens any more.
    let until = heard[0] + if long_form() { 100_000 } else { 2000 };
    wait_until("samples as before", DEADLINE, || {
        listen(&mut recorder, &mut heard);
        (heard[0] > until).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}: {heard:?}\n{:#?}", recorder.counters()));
    let grown = own_memory().saturating_sub(before);
    assert_eq!(heard[1], found_out[1], "the given up were listened to");
    let of_app = |counter| counted(&regions(&app), counter);
    let told = of_app(Counter::AllocationSamples) - of_app(Counter::AllocationsDownsampled);
    // A round reads no more than its quota.
    let all = wait_until("what was told by then", DEADLINE, || {
        listen(&mut recorder, &mut heard);
        // Each of the app's four threads may have counted a sample and not written it yet.
        (heard[0] + 4 >= told).then_some(heard[0])
    });
    let picture = || {
        format!(
            "{heard:?} of {told}, {heard_before} before the liars came; {grown} bytes more\n{:#?}",
            recorder.counters()
        )
    };
    println!("{}", picture());
    assert!(all.is_ok(), "{}", picture());
    let lost = [
        Counter::RecordsDroppedFull,
        Counter::RecordsAbandoned,
        Counter::AllocationsDroppedFull,
        Counter::EventsMalformed,
        Counter::LeasesLost,
    ]
    .map(of_app);
    assert_eq!(lost, [0; 5], "{}", picture());
    assert!(grown <= LIARS_MEMORY * liars.len() as u64, "{}", picture());
    recorder.resolves(app.pid(), "Allocator.Program.Make");
    assert_eq!(recorder.counter("shim_names_unasked"), 0);
    recorder.detach();
    app.stop().unwrap();
}
