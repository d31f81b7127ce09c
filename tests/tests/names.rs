//! Show 5: names are complete, however the profiler and the program met and parted.

use std::fs;
use std::time::Duration;

use profiler_protocol::counter::Counter;
use rustix::process::Signal;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin_beside, long_form, record_on};
use system_tests::perfusion::{self, SLACK, Scratch, record_pid};
use system_tests::profile::is_libc;
use system_tests::region::{counted, regions};
use system_tests::wait::let_pass;
use system_tests::{Profile, Recording, Runtime, Sample, Workload, on_runtimes, wait_until};

/// Share of cpu in `samples` whose stack has a managed frame without a name.
fn unnamed_share(profile: &Profile, fits: impl Fn(&Sample) -> bool) -> f64 {
    let all = profile.sum("cpu", &fits);
    let unnamed = profile.sum("cpu", |sample| fits(sample) && sample.has("[managed]"));
    unnamed as f64 / all.max(1) as f64
}

const CHAIN: [&str; 3] =
    ["CallHeavy.Program.Loop", "CallHeavy.Program.Root", "CallHeavy.Program.L1"];

/// The loop's thread shows the loop by name, and hardly anything has none. Only that thread is
/// asked how much of it is the loop: on a busy machine the start of the runtime costs more than a
/// loop of a second or two gets.
fn assert_named(profile: &Profile) {
    assert_loop_named(profile, |_| true);
    let samples = |fits: &dyn Fn(&Sample) -> bool| profile.sum("samples", fits);
    let (all, unnamed) = (samples(&|_| true), samples(&|sample| sample.has("[managed]")));
    // Code that runs once, while the runtime or the EventPipe session starts, may be past when its
    // question is sent; it is not asked about then, for it may have been unloaded. 2 samples and 2
    // %: such code is met a few times in a start, however long the recording.
    let nameless = || profile.describe("cpu", |sample| sample.has("[managed]"));
    assert!(unnamed <= 2 + all / 50, "{unnamed} of {all} samples: {}", nameless());
}

/// The same of one process, and of the loop alone: its frames have their names.
fn assert_loop_named(profile: &Profile, of_app: impl Fn(&Sample) -> bool) {
    let picture = || profile.describe("cpu", &of_app);
    let on_thread = |sample: &Sample| of_app(sample) && sample.label("thread_name") == "callheavy";
    let all = profile.sum("cpu", on_thread);
    let in_loop =
        profile.sum("cpu", |sample| on_thread(sample) && sample.positions(&CHAIN[..2]).is_some());
    let chain =
        profile.sum("cpu", |sample| on_thread(sample) && sample.positions(&CHAIN).is_some());
    // The rest is the runtime on that thread: its start, and the counting of calls until the
    // methods have reached tier 1.
    assert!(in_loop * 2 > all, "{in_loop} of {all} ns in the loop:\n{}", picture());
    assert!(
        chain * 2 > in_loop,
        "{chain} of {in_loop} ns below the loop in the chain:\n{}",
        picture()
    );
    // Until a method has reached tier 1 its calls are counted by a stub, which is thrown away then,
    // and with it the one sample that may fall on its last call.
    let unnamed =
        |sample: &Sample| of_app(sample) && sample.has("CallHeavy.") && sample.has("[managed]");
    assert!(profile.sum("samples", unnamed) <= 1, "{}", picture());
}

on_runtimes!(
    a_process_that_ran_before_the_profiler_came_has_all_its_names:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11, net10_musl Net10Musl, net11_musl Net11Musl
);

fn a_process_that_ran_before_the_profiler_came_has_all_its_names(runtime: Runtime) {
    let name = format!("names::a_process_that_ran_before on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
    // The promise says a minute; what matters is that everything was compiled before (`ready` says
    // so).
    let_pass(Duration::from_secs(if long_form() { 60 } else { 0 }));
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(3), &[]).unwrap();
    app.stop().unwrap();
    assert_named(&profile);
}

#[test]
fn a_recorded_process_is_left_as_it_was_found() {
    let Some(_turn) = begin_beside("names::left_as_it_was_found", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let ours = || {
        let maps = fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap();
        let left: Vec<String> = maps
            .lines()
            .filter(|line| line.contains("perfusion-shim"))
            .map(str::to_owned)
            .collect();
        (!left.is_empty()).then_some(left)
    };
    for round in 0..2 {
        let (profile, _) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
        assert_named(&profile);
        // The runtime unloads the library some 0.3 s after the detach was asked for (up to 5 s with
        // a GC in the way).
        let gone = wait_until("shim and region to leave the process", SLACK, || {
            ours().is_none().then_some(())
        });
        assert!(gone.is_ok(), "round {round}: still mapped: {:?}", ours());
        let fds = fs::read_dir(format!("/proc/{}/fd", app.pid())).unwrap();
        let links: Vec<String> = fds
            .filter_map(|fd| Some(fs::read_link(fd.ok()?.path()).ok()?.display().to_string()))
            .collect();
        assert!(
            !links.iter().any(|link| link.contains("perfusion-shim")),
            "round {round}: {links:?}"
        );
    }
    app.stop().unwrap();
}

#[test]
fn a_process_that_exits_during_the_recording_keeps_its_names() {
    let Some(_turn) = begin_beside("names::a_process_that_exits", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("exits.pb.gz");
    let mut app =
        Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().arg("2").start().unwrap();
    // However long the recorder takes to start, the app has all of its two seconds before it.
    app.signal(Signal::STOP).unwrap();
    // Without a duration the recording ends when its target has.
    let mut recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    app.signal(Signal::CONT).unwrap();
    let status = app.await_exit(4 * SLACK).unwrap();
    assert_eq!(status.code(), Some(7));
    recording.finish_well(SLACK).unwrap();
    assert_named(&Profile::read(&file).unwrap());
}

#[test]
fn a_killed_process_keeps_the_names_asked_before() {
    let Some(_turn) = begin_beside("names::a_killed_process", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("killed.pb.gz");
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let asked = wait_until("names to be asked for", SLACK, || {
        (counted(&regions(&app), Counter::NamesFound) >= 10).then_some(())
    });
    assert!(asked.is_ok(), "{}", recording.progress());
    // Of what has its names.
    let_pass(Duration::from_secs(2));
    app.signal(Signal::KILL).unwrap();
    recording.finish_well(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    // As for one that lives, so that a profile without the app's stacks does not pass for one
    // without a nameless frame.
    assert_named(&profile);
}

on_runtimes!(
    record_dash_dash_profiles_from_the_first_instruction_and_exits_with_the_programs_code:
    net8 Net8, net9 Net9, net10 Net10, net11 Net11, net10_musl Net10Musl, net11_musl Net11Musl
);

fn record_dash_dash_profiles_from_the_first_instruction_and_exits_with_the_programs_code(
    runtime: Runtime,
) {
    let name = format!("names::record_dash_dash on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("launched.pb.gz");
    let program = Workload::dotnet(runtime, "callheavy", &[]).unwrap().arg("1");
    let mut command = perfusion::command(["record", "-o"]);
    command.arg(&file).arg("--").args(program.command_line());
    let outcome = perfusion::run(&mut command, 4 * SLACK).unwrap();
    assert_eq!(outcome.code(), 7, "the program's own code is 7:\n{}", outcome.stderr);
    assert!(
        outcome.stdout.contains("ready"),
        "the program's stdout is its own: {}",
        outcome.stdout
    );
    let profile = Profile::read(&file).unwrap();
    assert_named(&profile);
    // From the first instruction: the host that loads the runtime is in it, and before that the
    // loader. The host of a single file is the program.
    let first = if runtime == Runtime::Net10Musl { "libc.so" } else { "libhostfxr" };
    let hosting =
        profile.sum("cpu", |sample| sample.stack.iter().any(|frame| frame.mapping.contains(first)));
    assert!(hosting > 0, "nothing of {first}:\n{}", profile.describe("cpu", |_| true));
    if runtime == Runtime::Net10Musl {
        // In a single file the runtime's code cannot be told from the program's.
        return;
    }
    // The runtime's thread that waits until the profiler wants to leave is called as the program
    // is: not the program's wait all the same.
    let of_runtime = |sample: &Sample| {
        let in_clr = |mapping: &str| mapping.ends_with("libcoreclr.so");
        let alone =
            |mapping: &str| in_clr(mapping) || is_libc(mapping) || mapping.contains("kernel");
        sample.label("thread_role") == "app"
            && sample.stack.iter().any(|frame| in_clr(&frame.mapping))
            && sample.stack.iter().all(|frame| alone(&frame.mapping))
    };
    let parked = |sample: &Sample| sample.label("wait_kind") == "idle";
    let idle = profile.sum("blocked", |sample| of_runtime(sample) && parked(sample));
    let shown = profile.sum("blocked", |sample| of_runtime(sample) && !parked(sample));
    assert!(
        idle > shown * 10,
        "{idle} ns, and {shown}:\n{}",
        profile.describe("blocked", of_runtime)
    );
}

#[test]
fn net8_and_net9_at_once_are_told_apart() {
    two_runtimes_at_once_are_told_apart([Runtime::Net8, Runtime::Net9]);
}

#[test]
fn net9_and_net10_at_once_are_told_apart() {
    two_runtimes_at_once_are_told_apart([Runtime::Net9, Runtime::Net10]);
}

fn two_runtimes_at_once_are_told_apart(pair: [Runtime; 2]) {
    let name = format!("names::two_runtimes_at_once {} and {}", pair[0], pair[1]);
    let needs = [RECORD, &pair.map(Need::Clr)].concat();
    let Some(_turn) = begin_beside(&name, &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("two.pb.gz");
    let apps =
        pair.map(|runtime| Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap());
    let pids = format!("{},{}", apps[0].pid(), apps[1].pid());
    let mut command = perfusion::command(["record", "--duration", "4s", "--pid", &pids, "-o"]);
    Recording::spawn(command.arg(&file)).unwrap().finish_well(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    for (runtime, app) in pair.iter().zip(&apps) {
        let pid = app.pid().to_string();
        let of_app = |sample: &Sample| sample.label("pid") == pid;
        assert_loop_named(&profile, of_app);
        // As everywhere: code that runs once, while the session starts, may be past when its
        // question is sent.
        let samples = |fits: &dyn Fn(&Sample) -> bool| {
            profile.sum("samples", |sample| of_app(sample) && fits(sample))
        };
        let (all, unnamed) = (samples(&|_| true), samples(&|sample| sample.has("[managed]")));
        assert!(unnamed <= 2 + all / 100, "{runtime}: {}", profile.describe("cpu", of_app));
        // No frame of one runtime's libraries in the other's process.
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let own = maps.lines().find_map(|line| {
            line.find('/').map(|at| &line[at..]).filter(|path| path.ends_with("/libcoreclr.so"))
        });
        let own = own.unwrap();
        for frame in
            profile.samples.iter().filter(|sample| of_app(sample)).flat_map(|sample| &sample.stack)
        {
            if frame.mapping.ends_with("/libcoreclr.so") {
                assert_eq!(frame.mapping, own, "{runtime}");
            }
        }
    }
    for app in apps {
        app.stop().unwrap();
    }
}

#[test]
fn children_of_a_recorded_command_are_recorded_with_names() {
    let Some(_turn) = begin_beside("names::children_of_a_recorded_command", RECORD_NET9) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("children.pb.gz");
    let program = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().arg("2");
    let mut command = perfusion::command(["record", "-o"]);
    command
        .arg(&file)
        .args(["--", "/bin/sh", "-c", "\"$@\"; exit 5", "sh"])
        .args(program.command_line());
    let outcome = perfusion::run(&mut command, 4 * SLACK).unwrap();
    assert_eq!(outcome.code(), 5, "the shell's code, not its child's:\n{}", outcome.stderr);
    // Shown when the test fails.
    println!("{}", outcome.stderr);
    assert_named(&Profile::read(&file).unwrap());
}

#[test]
fn a_dotnet_child_of_a_recorded_process_gets_its_names() {
    let Some(_turn) = begin_beside("names::a_dotnet_child", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("child.pb.gz");
    let program = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().arg("6");
    // The shell waits for a line, so that its child begins within the recording.
    let mut shell = std::process::Command::new("/bin/sh")
        .args(["-c", "read line; \"$@\"; exit 5", "sh"])
        .args(program.command_line())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut recording = Recording::of_pid(shell.id(), &file, &[]).unwrap();
    recording.await_progress("recording ", SLACK).unwrap();
    std::io::Write::write_all(&mut shell.stdin.take().unwrap(), b"go\n").unwrap();
    assert_eq!(shell.wait().unwrap().code(), Some(5));
    let outcome = recording.finish_well(4 * SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    let adopted = profile.counter("shim_regions_adopted").unwrap_or(0);
    let all = profile.sum("cpu", |sample| sample.label("thread_name") == "callheavy");
    let named = profile
        .sum("cpu", |sample| sample.has("CallHeavy.Program.Root") && !sample.has("[managed]"));
    // The child is looked at a few times a second: what ran only before the attach, such as the
    // loop's first tier, has no name.
    assert!(
        named * 2 > all && adopted == 1,
        "{named} of {all} ns, {adopted} regions\n{}\n{}",
        outcome.stderr,
        profile.describe("cpu", |_| true)
    );
}

#[test]
fn async_methods_that_are_state_machines_have_their_names_on_net11() {
    let Some(_turn) = begin_beside("names::state_machines", &record_on(Runtime::Net11)) else {
        return;
    };
    let workload = Workload::dotnet(Runtime::Net11, "asyncchain", &[]).unwrap();
    assert_async_chains(&workload, "Resumed(…)+async", |sample| sample.has("+async"));
}

#[test]
fn async_methods_of_the_runtimes_own_have_their_names_on_net11() {
    let needs = [RECORD, &[Need::RuntimeAsync]].concat();
    let Some(_turn) = begin_beside("names::runtime_async", &needs) else { return };
    let workload = Workload::runtime_async("asyncchain").unwrap();
    assert_async_chains(&workload, "DispatchContinuations", |sample| !sample.has("+async"));
}

/// Async methods inside each other are all there, from the thread's loop on. One that is continued
/// later is below what continues it, `by`. Of both `fits` must be true.
fn assert_async_chains(workload: &Workload, by: &str, fits: impl Fn(&Sample) -> bool) {
    let app = workload.start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(3), &[]).unwrap();
    app.stop().unwrap();
    let program = |method: &str| format!("AsyncChain.Program.{method}");
    let [nested, outer, inner, resumed, work] =
        ["Nested", "Outer", "Inner", "Resumed", "Work"].map(program);
    for (thread, chain) in [
        ("nested", vec![&nested, &outer, &inner, &work]),
        ("continued", vec![&"AsyncChain.Queue.Run".to_owned(), &by.to_owned(), &work]),
    ] {
        let chain: Vec<&str> = chain.into_iter().map(String::as_str).collect();
        let at_work = |sample: &Sample| sample.label("thread_name") == thread && sample.has(&work);
        let right = |sample: &Sample| {
            at_work(sample)
                && sample.positions(&chain).is_some()
                && (thread == "nested" || sample.has(&resumed))
                && fits(sample)
        };
        let (all, right) = (profile.sum("samples", at_work), profile.sum("samples", right));
        assert!(
            all >= 20 && right * 100 >= all * 99,
            "{thread}: {right} of {all}\n{}",
            profile.describe("cpu", |sample| sample.label("thread_name") == thread)
        );
    }
}

on_runtimes!(
    generic_types_and_methods_show_their_type_arguments:
    net8 Net8, net10 Net10, net11 Net11; long: net9 Net9
);

fn generic_types_and_methods_show_their_type_arguments(runtime: Runtime) {
    let name = format!("names::generic_types_and_methods on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "generics", &[]).unwrap().start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(3), &[]).unwrap();
    app.stop().unwrap();
    for method in [
        "Generics.Table<Generics.Price>.Fill(Price)",
        "Generics.Table<long>.Convert<short>(short[])",
        // One body serves all reference types.
        "Generics.Table<__Canon>.Fill(__Canon)",
        "Generics.Table<int>.Row<Generics.Price>.Walk(int)",
    ] {
        let samples = profile.sum("samples", |sample| {
            sample.stack.last().is_some_and(|frame| frame.function == method)
        });
        assert!(samples > 0, "{runtime}: no {method} in {:#?}", generics(&profile));
    }
    // And nothing else of the program but what calls them, and what waits for their end.
    let callers = ["Generics.Program.Loop(", "Generics.Program.Main("];
    let found = generics(&profile);
    let others = found.iter().filter(|name| !callers.iter().any(|caller| name.starts_with(caller)));
    assert_eq!(others.count(), 4, "{runtime}: {found:#?}");
}

on_runtimes!(
    ordinary_code_is_named_beside_assemblies_that_are_unloaded:
    net10 Net10; long: net8 Net8, net9 Net9
);

/// Whoever unloads something now and then keeps the names of everything else: the runtime may be
/// asked about code that was on a stack since.
fn ordinary_code_is_named_beside_assemblies_that_are_unloaded(runtime: Runtime) {
    let name =
        format!("names::ordinary_code_is_named_beside_assemblies_that_are_unloaded on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app =
        Workload::dotnet(runtime, "unloading", &[]).unwrap().arg("200").arg("1").start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let truth = app.stop().unwrap();
    assert!(
        truth["unloaded"].as_i64() > Some(0) && truth["mistakes"].as_i64() == Some(0),
        "{truth}"
    );
    let on_thread = |sample: &Sample| sample.label("thread_name") == "work";
    let picture = || profile.describe("cpu", on_thread);
    let loops = ["Unloading.Program.Loop", "Unloading.Program.Root", "Unloading.Program.Burn"];
    let chain =
        profile.sum("cpu", |sample| on_thread(sample) && sample.positions(&loops).is_some());
    assert!(chain * 2 > profile.sum("cpu", on_thread), "{chain} ns in the loop:\n{}", picture());
    assert!(unnamed_share(&profile, on_thread) <= 0.01, "{}", picture());
}

on_runtimes!(
    a_process_survives_questions_about_code_that_comes_and_goes:
    net8 Net8; long: net9 Net9, net10 Net10
);

/// Asked about code of an unloaded module, the runtime ends the process. So questions are asked as
/// often as can be while modules go.
fn a_process_survives_questions_about_code_that_comes_and_goes(runtime: Runtime) {
    let name =
        format!("names::a_process_survives_questions_about_code_that_comes_and_goes on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("unloads.pb.gz");
    // The promise says tens of thousands.
    let unloads = if long_form() { 30_000 } else { 2_000 };
    let mut app = Workload::dotnet(runtime, "unloading", &[])
        .unwrap()
        .arg("20")
        .arg("25")
        .arg(unloads.to_string())
        .start()
        .unwrap();
    // Without a duration the recording ends when its target has.
    let recording = Recording::of_pid(app.pid(), &file, &["--frequency", "999"]).unwrap();
    let truth =
        app.await_line("truth", Duration::from_secs(if long_form() { 3600 } else { 300 })).unwrap();
    assert_eq!(app.await_exit(4 * SLACK).unwrap().code(), Some(7), "{truth}");
    assert!(
        truth["unloaded"].as_i64() >= Some(unloads) && truth["mistakes"].as_i64() == Some(0),
        "{truth}"
    );
    recording.finish_well(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    assert!(profile.sum("alloc_objects", |_| true) > 0, "no allocations");
    // Some of it between two unloads.
    let asked = profile.counter("shim_names_found");
    assert!(asked > Some(10), "{asked:?} names");
}

fn generics(profile: &Profile) -> Vec<&str> {
    profile.functions().into_iter().filter(|name| name.starts_with("Generics.")).collect()
}
