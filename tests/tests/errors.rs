//! Show 10: bad input gives one clear error and the exit code that `--help` names; what can be
//! profiled partly, is.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use system_tests::app::{assemble_32_bit, compile_c, copy_program, sources_of_native};
use system_tests::environment::{
    Need, RECORD, RECORD_NET9, begin_beside, cache_dir, long_form, only_in_the_long_form,
    perfusion_bin,
};
use system_tests::perfusion::{self, Outcome, SLACK, Scratch, record_pid};
use system_tests::{App, Profile, Recording, Runtime, Sample, Workload, wait_until};

const DEADLINE: Duration = Duration::from_secs(120);

/// A process to point at that does nothing and needs no CLR.
fn sleeper() -> App {
    Workload::program("/bin/sleep").arg("600").spawn().unwrap()
}

fn record_args(pid: u32, output: &Path) -> Vec<String> {
    ["record", "--duration", "1s", "--pid", &pid.to_string(), "-o", &output.display().to_string()]
        .map(str::to_owned)
        .to_vec()
}

/// One clear error: the expected exit code, and on stderr one line `perfusion: …` with every word
/// of `words`.
fn assert_error(outcome: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(outcome.code(), code, "stderr:\n{}", outcome.stderr);
    let errors: Vec<&str> =
        outcome.stderr.lines().filter(|line| line.starts_with("perfusion: ")).collect();
    assert_eq!(errors.len(), 1, "one error, not {}:\n{}", errors.len(), outcome.stderr);
    for word in words {
        assert!(errors[0].contains(word), "no word of `{word}`: {}", errors[0]);
    }
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
}

/// `perfusion` where everyone may run it.
fn public_copy(scratch: &Scratch) -> PathBuf {
    let copy = scratch.path("perfusion");
    copy_program(&perfusion_bin().unwrap(), &copy).unwrap();
    fs::set_permissions(copy.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
    copy
}

#[test]
fn help_names_every_exit_code() {
    let Some(_turn) = begin_beside("errors::help_names_every_exit_code", &[Need::Perfusion]) else {
        return;
    };
    let outcome = perfusion::run(&mut perfusion::command(["record", "--help"]), DEADLINE).unwrap();
    assert_eq!(outcome.code(), 0);
    for code in ["0 ", "1 ", "2 ", "3 ", "4 ", "5 "] {
        assert!(
            outcome.stdout.lines().any(|line| line.trim_start().starts_with(code)),
            "no {code}:\n{}",
            outcome.stdout
        );
    }
}

#[test]
fn wrong_command_lines_end_with_2() {
    let Some(_turn) = begin_beside("errors::wrong_command_lines", &[Need::Perfusion]) else {
        return;
    };
    for args in [
        &["record"][..],
        &["record", "--pid", "1", "--all"],
        &["record", "--pid", "x"],
        &["record", "--all", "--duration", "soon"],
    ] {
        let outcome = perfusion::run(&mut perfusion::command(args), DEADLINE).unwrap();
        assert_eq!(outcome.code(), 2, "{args:?}:\n{}", outcome.stderr);
    }
}

#[test]
fn no_such_process_ends_with_3() {
    let Some(_turn) = begin_beside("errors::no_such_process", RECORD) else { return };
    let scratch = Scratch::new().unwrap();
    let mut gone = Workload::program("/bin/true").spawn().unwrap();
    gone.await_exit(DEADLINE).unwrap();
    let pid = gone.pid();
    let output = scratch.path("none.pb.gz");
    let outcome =
        perfusion::run(&mut perfusion::command(record_args(pid, &output)), DEADLINE).unwrap();
    assert_error(&outcome, 3, &[&pid.to_string()]);
    assert!(!output.exists());
}

#[test]
fn without_root_it_ends_with_4_and_says_so() {
    let needs = [RECORD, &[Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("errors::without_root", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(public_copy(&scratch));
    let outcome = perfusion::run(
        command.args(record_args(app.pid(), &scratch.path("nobody.pb.gz"))),
        DEADLINE,
    )
    .unwrap();
    assert_error(&outcome, 4, &["root"]);
}

/// `program` by root, without these capabilities.
fn without(capabilities: &[&str], program: &Path) -> Command {
    let dropped: Vec<String> = capabilities.iter().map(|name| format!("-{name}")).collect();
    let dropped = dropped.join(",");
    let mut command = Command::new("setpriv");
    // Root's new program gets what is in the bounding set.
    command
        .arg(format!("--bounding-set={dropped}"))
        .arg(format!("--inh-caps={dropped}"))
        .arg(program);
    command
}

#[test]
fn a_missing_capability_ends_with_4_and_is_named() {
    let needs = [RECORD, &[Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("errors::a_missing_capability", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    // CAP_SYS_ADMIN stands in for the first two in the kernel (capable(CAP_X) ||
    // capable(CAP_SYS_ADMIN)), so it goes with each.
    for (dropped, named) in [
        (&["bpf", "sys_admin"][..], "CAP_BPF"),
        (&["perfmon", "sys_admin"], "CAP_PERFMON"),
        (&["sys_ptrace"], "CAP_SYS_PTRACE"),
    ] {
        let output = scratch.path("caps.pb.gz");
        let mut command = without(dropped, &perfusion_bin().unwrap());
        let outcome =
            perfusion::run(command.args(record_args(app.pid(), &output)), DEADLINE).unwrap();
        assert_error(&outcome, 4, &[named]);
        assert!(!output.exists());
    }
}

/// Records `app` in `command`, and returns the profile and what it said of its limits, on stderr
/// and in the profile alike.
fn recorded_with_limits(
    mut command: Command,
    app: &App,
    scratch: &Scratch,
) -> (Profile, Vec<String>) {
    let file = scratch.path("limited.pb.gz");
    command.args(["record", "--duration", "3s", "--pid", &app.pid().to_string(), "-o"]).arg(&file);
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    // Shown when the test fails: what the recording said of the attach is the first thing to know
    // then.
    eprintln!("{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let limits = |lines: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        lines.filter(|line| line.starts_with("limited: ")).map(str::to_owned).collect()
    };
    let said = limits(&mut outcome.stderr.lines());
    assert_eq!(
        said,
        limits(&mut profile.comments.iter().map(String::as_str)),
        "{}",
        outcome.stderr
    );
    (profile, said)
}

/// Whether the loop has its name, in most of what its thread does; that is asked alone, because on
/// a loaded machine the start of the EventPipe session may cost more than the loop gets.
fn loop_is_named(profile: &Profile) -> bool {
    let on_thread = |sample: &Sample| sample.label("thread_name") == "callheavy";
    let all = profile.sum("cpu", on_thread);
    let named =
        profile.sum("cpu", |sample| on_thread(sample) && sample.has("CallHeavy.Program.Root"));
    assert!(all > 0 && (named == 0 || named * 2 > all), "{}", profile.describe("cpu", |_| true));
    named > 0
}

#[test]
fn a_capability_less_is_less_in_the_recording_and_said() {
    let needs = [RECORD_NET9, &[Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("errors::a_capability_less", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let bin = perfusion_bin().unwrap();
    // Each recording has an app of its own: the runtime takes up to five seconds to let go of a
    // profiler before it takes the next.
    let recorded = |command: Command| {
        let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
        let recorded = recorded_with_limits(command, &app, &scratch);
        app.stop().unwrap();
        recorded
    };

    let (complete, limits) = recorded(Command::new(&bin));
    assert!(limits.is_empty() && loop_is_named(&complete), "{limits:?}");
    let kernel = |profile: &Profile, named: bool| {
        let frames = profile.samples.iter().flat_map(|sample| &sample.stack);
        frames
            .filter(|frame| {
                frame.mapping.contains("kernel") && frame.function.starts_with('[') != named
            })
            .count()
    };
    assert!(
        kernel(&complete, true) > 0,
        "no kernel function has a name: {}",
        complete.describe("wall", |_| true)
    );

    let (profile, limits) = recorded(without(&["checkpoint_restore", "sys_admin"], &bin));
    assert!(limits.len() == 1 && limits[0].contains("CAP_CHECKPOINT_RESTORE"), "{limits:?}");
    // Names are read from memory then.
    assert!(loop_is_named(&profile));

    let (profile, limits) = recorded(without(&["syslog"], &bin));
    assert!(limits.len() == 1 && limits[0].contains("CAP_SYSLOG"), "{limits:?}");
    assert!(loop_is_named(&profile));
    assert_eq!(kernel(&profile, true), 0, "{}", profile.describe("wall", |_| true));

    // Both capabilities about files of others; the app is root's own, so nothing of it is missing.
    let (profile, limits) = recorded(without(&["dac_override", "dac_read_search"], &bin));
    assert!(limits.len() == 1 && limits[0].contains("CAP_DAC_OVERRIDE"), "{limits:?}");
    assert!(loop_is_named(&profile));
}

/// A copy of a compiled workload, and a command by which nobody's user runs it.
pub(crate) fn as_nobody(scratch: &Scratch, workload: &Workload) -> Workload {
    let line = workload.command_line();
    let (dotnet, dll) = (&line[0], PathBuf::from(&line[1]));
    let folder = scratch.path("app");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(dll.parent().unwrap()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let mut copy = Workload::program("setpriv");
    for argument in ["--reuid=65534", "--regid=65534", "--clear-groups"] {
        copy = copy.arg(argument);
    }
    copy.arg(dotnet).arg(folder.join(dll.file_name().unwrap()))
}

#[test]
fn the_capabilities_it_asks_for_are_those_a_user_needs() {
    if !long_form() {
        return only_in_the_long_form("errors::the_capabilities_it_asks_for");
    }
    let needs = [RECORD_NET9, &[Need::Program("setpriv"), Need::File("/usr/sbin/setcap")]].concat();
    let Some(_turn) = begin_beside("errors::the_capabilities_it_asks_for", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let copy = public_copy(&scratch);
    let nobody = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy);
        command
    };
    let callheavy = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let theirs = as_nobody(&scratch, &callheavy).start().unwrap();
    let roots = callheavy.start().unwrap();

    let refused = perfusion::run(
        nobody().args(record_args(theirs.pid(), &scratch.path("x.pb.gz"))),
        DEADLINE,
    )
    .unwrap();
    let asked = refused.stderr.split("(setcap ").nth(1).and_then(|rest| rest.split(')').next());
    let asked = asked.unwrap_or_else(|| panic!("no advice: {}", refused.stderr));
    let granted = |capabilities: &str| {
        let status =
            Command::new("/usr/sbin/setcap").arg(capabilities).arg(&copy).status().unwrap();
        assert!(status.success(), "setcap {capabilities}");
    };
    granted(asked);
    for app in [&theirs, &roots] {
        let (profile, limits) = recorded_with_limits(nobody(), app, &scratch);
        assert!(
            limits.is_empty() && loop_is_named(&profile),
            "{limits:?}: {}",
            profile.describe("cpu", |_| true)
        );
    }
    // Without the one for other users' files: complete for its own process, not for root's.
    granted(&asked.replace("cap_dac_override,", ""));
    let (own, limits) = recorded_with_limits(nobody(), &theirs, &scratch);
    assert!(limits.len() == 1 && limits[0].contains("CAP_DAC_OVERRIDE"), "{limits:?}");
    assert!(loop_is_named(&own), "{}", own.describe("cpu", |_| true));
    let (others, _) = recorded_with_limits(nobody(), &roots, &scratch);
    assert!(!loop_is_named(&others), "{}", others.describe("cpu", |_| true));
    theirs.stop().unwrap();
    roots.stop().unwrap();
}

/// Runs `perfusion record` after `setup`, a line of shell, in a mount namespace of its own.
fn in_own_mounts(setup: &str, args: &[String]) -> Outcome {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec"]);
    command.arg(format!("{setup}\nexec \"$@\"")).arg("sh").arg(perfusion_bin().unwrap()).args(args);
    perfusion::run(&mut command, DEADLINE).unwrap()
}

#[test]
fn a_kernel_without_btf_ends_with_4_and_says_so() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::a_kernel_without_btf", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let outcome = in_own_mounts(
        "mount -t tmpfs none /sys/kernel/btf",
        &record_args(app.pid(), &scratch.path("btf.pb.gz")),
    );
    assert_error(&outcome, 4, &["BTF", "/sys/kernel/btf/vmlinux"]);
}

/// What the kernel says is played: to be locked down is for good until it boots again, so no test
/// has this one be.
#[test]
fn a_kernel_that_is_locked_down_ends_with_4_and_is_named_as_the_cause() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::a_kernel_that_is_locked_down", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let (app, output) = (sleeper(), scratch.path("locked.pb.gz"));
    let says = |level: &str| {
        format!(
            "mount -t tmpfs none /sys/kernel/security; echo '{level}' > \
             /sys/kernel/security/lockdown"
        )
    };
    let locked = says("none integrity [confidentiality]");
    let outcome = in_own_mounts(&locked, &record_args(app.pid(), &output));
    assert_error(
        &outcome,
        4,
        &["/sys/kernel/security/lockdown", "found confidentiality", "boot without"],
    );
    assert!(!output.exists());
    let doctor = in_own_mounts(&locked, &["doctor".to_owned()]);
    assert_eq!(doctor.code(), 4, "{}", doctor.stderr);
    let line = doctor.stdout.lines().find(|line| line.contains("lockdown")).unwrap_or_default();
    assert!(line.contains("confidentiality"), "{}", doctor.stdout);
    // The weaker one forbids nothing that is needed.
    let doctor = in_own_mounts(&says("none [integrity] confidentiality"), &["doctor".to_owned()]);
    assert!(!doctor.stdout.contains("found confidentiality"), "{}", doctor.stdout);
}

#[test]
fn without_tracefs_and_debugfs_it_records_all_the_same() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::without_tracefs", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let file = scratch.path("no-tracefs.pb.gz");
    let outcome = in_own_mounts(
        "mount -t tmpfs none /sys/kernel/debug; mount -t tmpfs none /sys/kernel/tracing",
        &record_args(app.pid(), &file),
    );
    assert_eq!(outcome.code(), 0, "tp_btf and perf need no tracefs:\n{}", outcome.stderr);
    system_tests::Profile::read(&file).unwrap();
}

/// As in a container: the first process has another list of users than ours. It is one of our own
/// here, since not every root may look at the machine's.
#[test]
fn users_of_rules_are_the_hosts_and_one_it_does_not_have_is_warned_of_and_not_refused() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::users_of_rules", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let ours = scratch.path("passwd");
    fs::write(&ours, "inside:x:7:7::/:/bin/sh\n").unwrap();
    let host = fs::read_to_string("/etc/passwd").unwrap();
    let last = host.lines().last().and_then(|line| line.split(':').next()).unwrap();
    let script = format!(
        "unshare --mount --propagation private sh -ec 'mount --bind {} /etc/passwd; exec \"$@\"' \
         sh \"$@\"; exit",
        ours.display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec", &script, "sh"]);
    command.arg(perfusion_bin().unwrap()).args([
        "config",
        "check",
        "--set",
        "files.directory=/x",
        "--set",
    ]);
    command.arg(format!("selection.except=[{{user: {last}}}, {{user: inside}}]"));
    let outcome = perfusion::run(&mut command, DEADLINE).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    assert!(outcome.stdout.ends_with(": good\n"), "{}", outcome.stdout);
    assert!(outcome.stderr.contains("found no `inside`"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.lines().count(), 1, "{last} is the host's: {}", outcome.stderr);
}

#[test]
fn perf_refused_ends_with_4_and_says_what_to_allow() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin_beside("errors::perf_refused", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let output = scratch.path("perf.pb.gz");
    let mut command =
        Workload::native("no_perf", &[]).unwrap().arg(perfusion_bin().unwrap()).command();
    let outcome = perfusion::run(command.args(record_args(app.pid(), &output)), DEADLINE).unwrap();
    assert_error(&outcome, 4, &["perf_event_open", "seccomp", "CAP_PERFMON"]);
    assert!(!output.exists());
}

#[test]
fn an_output_that_cannot_be_written_ends_with_5_before_anything_is_recorded() {
    let Some(_turn) = begin_beside("errors::an_output_that_cannot_be_written", RECORD) else {
        return;
    };
    let app = sleeper();
    for output in ["/nonexistent/directory/profile.pb.gz", "/proc/profile.pb.gz", "/tmp"] {
        let mut args = record_args(app.pid(), Path::new(output));
        // An error that waits for the end of the recording would miss the deadline.
        args[2] = format!("{}s", 2 * DEADLINE.as_secs());
        let outcome = perfusion::run(&mut perfusion::command(args), DEADLINE).unwrap();
        assert_error(&outcome, 5, &[output]);
    }
}

/// `heap` and `leaks` are about managed memory: without a runtime they say so, and nothing of a
/// pause that does not come.
#[test]
fn what_needs_a_runtime_says_so_before_anything_else() {
    let needs = [RECORD, &[Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("errors::what_needs_a_runtime", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let pid = app.pid().to_string();
    let public = public_copy(&scratch);
    for command in ["heap", "leaks"] {
        let arguments = [command, "--pid", &pid];
        let outcome = perfusion::run(&mut perfusion::command(arguments), DEADLINE).unwrap();
        assert_error(&outcome, 1, &[&pid, "(sleep)", "no .NET runtime", "perfusion ps"]);
        assert!(!outcome.stderr.contains("stopped"), "{}", outcome.stderr);
        let mut nobody = Command::new("setpriv");
        nobody
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&public)
            .args(arguments);
        let outcome = perfusion::run(&mut nobody, DEADLINE).unwrap();
        assert_error(&outcome, 4, &[&pid, "root with CAP_SYS_PTRACE"]);
    }
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&public);
    let outcome =
        perfusion::run(nobody.args(["inspect", "unwind", &pid, "0x1000"]), DEADLINE).unwrap();
    assert_error(&outcome, 4, &[&pid, "another user's", "as root"]);
}

#[test]
fn a_full_disk_ends_with_5_and_leaves_nothing_partial() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::a_full_disk", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = sleeper();
    let disk = scratch.path("disk");
    fs::create_dir(&disk).unwrap();
    let shown = disk.display();
    // Room for the directory and the filler, not for a page more. What is left is listed by the
    // same shell, in whose namespace alone the disk is.
    let script = format!(
        "mount -t tmpfs -o size=4k none {shown}\ncat /dev/zero > {shown}/filler 2>/dev/null || \
         true\nset +e\n\"$@\"\ncode=$?\nls -A {shown}\nexit $code"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", &script, "sh"]);
    command.arg(perfusion_bin().unwrap()).args(record_args(app.pid(), &disk.join("full.pb.gz")));
    let outcome = perfusion::run(&mut command, DEADLINE).unwrap();
    assert_error(&outcome, 5, &["full.pb.gz"]);
    let left: Vec<&str> = outcome.stdout.lines().filter(|line| *line != "filler").collect();
    assert!(left.is_empty(), "left on the disk: {left:?}");
}

/// `perfusion record` on `app`, in a shell that limits the length of files to `blocks` of 512 bytes
/// (POSIX).
fn with_short_files(blocks: u32, app: &App, file: &Path) -> Outcome {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -f {blocks}; exec \"$@\""), "sh"])
        .arg(perfusion_bin().unwrap());
    perfusion::run(command.args(record_args(app.pid(), file)), DEADLINE).unwrap()
}

#[test]
fn where_files_must_be_short_a_profile_lacks_names_or_is_not_written_and_says_so() {
    let Some(_turn) = begin_beside("errors::short_files", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let file = scratch.path("short.pb.gz");
    // Less than a profile has, less than a C library has.
    let outcome = with_short_files(1, &app, &file);
    assert_error(&outcome, 5, &["short.pb.gz", "ulimit -f"]);
    assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 0, "nothing partial is left");
    let outcome = with_short_files(512, &app, &file);
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let limited = |line: &str| {
        line.starts_with("limited: ") && line.contains("262144 bytes") && line.contains("ulimit -f")
    };
    assert!(outcome.stderr.lines().any(limited), "{}", outcome.stderr);
    assert!(profile.comments.iter().any(|line| limited(line)), "{:?}", profile.comments);
    assert!(
        profile.sum("cpu", |sample| sample.has("spin_here")) > 0,
        "{}",
        profile.describe("cpu", |_| true)
    );
}

#[test]
fn an_app_with_diagnostics_off_has_its_names_and_the_reason_for_what_it_lacks_is_shown() {
    let Some(_turn) = begin_beside("errors::diagnostics_off", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[])
        .unwrap()
        .env("DOTNET_EnableDiagnostics", "0")
        .start()
        .unwrap();
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
    let ps = perfusion::run(&mut perfusion::command(["ps"]), DEADLINE).unwrap();
    let thread = app.thread("callheavy").to_string();
    let pid = app.pid().to_string();
    app.stop().unwrap();
    let cpu = profile.sum("cpu", |sample| sample.label("thread_id") == thread);
    let unnamed =
        profile.sum("cpu", |sample| sample.label("thread_id") == thread && sample.has("[managed]"));
    let chain = profile.sum("cpu", |sample| {
        let parts = ["CallHeavy.Program.Loop", "CallHeavy.Program.Root", "CallHeavy.Program.L1"];
        sample.label("thread_id") == thread && sample.positions(&parts).is_some()
    });
    assert!(
        cpu > 0 && chain * 2 > cpu && unnamed * 100 <= cpu,
        "{unnamed} of {cpu} ns:\n{}",
        profile.describe("cpu", |_| true)
    );
    let reason = format!("{}\n{}", outcome.stderr, profile.comments.join("\n")).to_lowercase();
    assert!(reason.contains("diagnostic"), "no reason given:\n{reason}");
    let kept = profile.comments.join("\n");
    assert!(kept.contains("DOTNET_EnableDiagnostics=0"), "the profile does not say why: {kept}");
    let line = ps
        .stdout
        .lines()
        .find(|line| line.contains(&pid))
        .unwrap_or_else(|| panic!("ps has no line for {pid}:\n{}", ps.stdout));
    assert!(line.to_lowercase().contains("diagnostic"), "ps does not say why: {line}");
}

#[test]
fn a_program_started_with_diagnostics_off_has_its_reason_too() {
    let Some(_turn) = begin_beside("errors::started_with_diagnostics_off", RECORD_NET9) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("off.pb.gz");
    let program = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().arg("3");
    let mut command = perfusion::command(["record", "-o"]);
    command.arg(&file).arg("--").args(program.command_line()).env("DOTNET_EnableDiagnostics", "0");
    let outcome = perfusion::run(&mut command, 4 * SLACK).unwrap();
    assert_eq!(outcome.code(), 7, "{}", outcome.stderr);
    let kept = Profile::read(&file).unwrap().comments.join("\n");
    for said in [&outcome.stderr, &kept] {
        assert!(said.contains("DOTNET_EnableDiagnostics=0"), "no reason given:\n{said}");
    }
}

#[test]
fn a_zombie_is_no_target() {
    let Some(_turn) = begin_beside("errors::a_zombie", RECORD) else { return };
    let mut child = std::process::Command::new("/bin/true").spawn().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    wait_until("the child to end", SLACK, || {
        fs::read_to_string(&stat).unwrap().contains(") Z ").then_some(())
    })
    .unwrap();
    let scratch = Scratch::new().unwrap();
    let mut command =
        perfusion::command(["record", "--duration", "1s", "--pid", &child.id().to_string(), "-o"]);
    let outcome = perfusion::run(command.arg(scratch.path("x.pb.gz")), DEADLINE).unwrap();
    assert_error(&outcome, 3, &[&child.id().to_string(), "zombie"]);
    child.wait().unwrap();
}

/// Such as pid 1 of a machine whose security module protects it.
#[test]
fn a_process_nobody_may_look_at_is_no_target() {
    let needs = [RECORD, &[Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("errors::a_process_nobody_may_look_at", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let (app, output) = (sleeper(), scratch.path("x.pb.gz"));
    let maps = format!("/proc/{}/maps", app.pid());
    // The kernel opens no device on such a mount, for nobody (`may_open`, fs/namei.c): the same
    // answer, with all capabilities there are.
    let setup = format!(
        "cd {0:?}; mount -t tmpfs -o nodev none .; cd {0:?}; mknod closed c 1 3; mount --bind \
         closed {maps}",
        scratch.path(""),
    );
    let outcome = in_own_mounts(&setup, &record_args(app.pid(), &output));
    assert_error(&outcome, 4, &[&maps, "(sleep)", "Permission denied", "perfusion ps"]);
    assert!(!output.exists());
    // Before a file of an earlier recording is replaced.
    fs::write(&output, "earlier").unwrap();
    let args = record_args(2, &output);
    let is_thread_of_kernel = fs::read_to_string("/proc/2/comm").unwrap() == "kthreadd\n";
    assert!(is_thread_of_kernel, "pid 2 is another one's");
    let outcome = perfusion::run(&mut perfusion::command(args), DEADLINE).unwrap();
    assert_error(&outcome, 3, &["pid 2 (kthreadd)", "thread of the kernel", "perfusion ps"]);
    assert_eq!(fs::read_to_string(&output).unwrap(), "earlier");
}

#[test]
fn a_musl_process_is_profiled_by_name() {
    let needs = [RECORD, &[Need::C, Need::Program("musl-gcc")]].concat();
    let Some(_turn) = begin_beside("errors::a_musl_process", &needs) else { return };
    let program = cache_dir().join("spin-musl");
    let source = sources_of_native().join("spin.c");
    let built = Command::new("musl-gcc")
        .args(["-O1", "-g", "-o"])
        .arg(&program)
        .arg(source)
        .status()
        .unwrap();
    assert!(built.success());
    let app = Workload::program(program).start().unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
    let cpu = profile.sum("cpu", |_| true);
    let here = profile.sum("cpu", |sample| sample.positions(&["main", "spin_here"]).is_some());
    assert!(
        cpu > 0 && here * 10 >= cpu * 9,
        "{here} of {cpu} ns:\n{}",
        profile.describe("cpu", |_| true)
    );
}

#[test]
fn a_32_bit_process_is_timed_and_named_as_what_it_is() {
    let needs = [RECORD, &[Need::Program("as"), Need::Program("ld")]].concat();
    let Some(_turn) = begin_beside("errors::a_32_bit_process", &needs) else { return };
    let app = Workload::program(assemble_32_bit("spin32").unwrap()).spawn().unwrap();
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
    // Asleep 10 of every 10 ms, and what it then waits for a CPU: known from the scheduler,
    // whatever the stack is.
    let (blocked, runnable) = (profile.sum("blocked", |_| true), profile.sum("runnable", |_| true));
    assert!(
        blocked * 10 > (profile.duration_ns - runnable) * 8 && blocked > runnable,
        "{blocked} and {runnable} of {} ns:\n{}",
        profile.duration_ns,
        profile.describe("blocked", |_| true)
    );
    let said = format!("{}\n{}", outcome.stderr, profile.comments.join("\n"));
    assert!(said.contains("32-bit"), "nothing says that it is a 32-bit process:\n{said}");
}

#[test]
fn a_command_that_cannot_be_started_ends_with_127() {
    let Some(_turn) = begin_beside("errors::a_command_that_cannot_be_started", RECORD) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("x.pb.gz");
    fs::write(&file, "an earlier profile").unwrap();
    for program in ["/nonexistent/program", "dotnett"] {
        let mut command = perfusion::command(["record", "-o"]);
        command.arg(&file).args(["--", program]);
        let outcome = perfusion::run(&mut command, DEADLINE).unwrap();
        assert_error(&outcome, 127, &[program]);
        assert_eq!(fs::read_to_string(&file).unwrap(), "an earlier profile");
    }
}

#[test]
fn ps_and_doctor_say_what_they_see() {
    let Some(_turn) = begin_beside("errors::ps_and_doctor", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let ps = perfusion::run(&mut perfusion::command(["ps"]), DEADLINE).unwrap();
    assert_eq!(ps.code(), 0, "{}", ps.stderr);
    let line = ps.stdout.lines().find(|line| line.contains(&app.pid().to_string()));
    assert!(
        line.is_some_and(|line| line.contains("9.0")),
        "no line with pid {} and its version:\n{}",
        app.pid(),
        ps.stdout
    );
    for command in ["ps", "doctor"] {
        let json = perfusion::run(&mut perfusion::command([command, "--json"]), DEADLINE).unwrap();
        let parsed: Result<serde_json::Value, _> = serde_json::from_str(&json.stdout);
        assert!(parsed.is_ok(), "{command} --json: {}", json.stdout);
    }
    app.stop().unwrap();
    // A recording started while another runs is nobody's error.
    let sleeper = sleeper();
    let scratch = Scratch::new().unwrap();
    let first =
        Recording::of_pid(sleeper.pid(), &scratch.path("a.pb.gz"), &["--duration", "1s"]).unwrap();
    let second =
        Recording::of_pid(sleeper.pid(), &scratch.path("b.pb.gz"), &["--duration", "1s"]).unwrap();
    first.finish_well(SLACK).unwrap();
    second.finish_well(SLACK).unwrap();
}

#[test]
fn the_c_workloads_compile() {
    let Some(_turn) = begin_beside("errors::the_c_workloads_compile", &[Need::C]) else { return };
    compile_c("spin", "spin", &[]).unwrap();
    compile_c("main_profiler", "main_profiler.so", &["-shared", "-fPIC"]).unwrap();
}

#[test]
fn a_file_that_is_no_profile_is_refused_by_name() {
    let Some(_turn) = begin_beside("errors::a_file_that_is_no_profile", &[Need::Perfusion]) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let gzip_header = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
    for (name, bytes, why) in [
        ("empty", &b""[..], "the file is empty"),
        ("text", b"not a profile\n", "found text: name a file"),
        ("cut.gz", &gzip_header, "ends in the middle"),
    ] {
        let file = scratch.path(name);
        fs::write(&file, bytes).unwrap();
        let outcome = perfusion::run(perfusion::command(["report"]).arg(&file), DEADLINE).unwrap();
        assert_error(&outcome, 1, &[name, why]);
    }
    let missing = scratch.path("missing.pb.gz");
    let outcome = perfusion::run(perfusion::command(["report"]).arg(&missing), DEADLINE).unwrap();
    assert_error(&outcome, 1, &["missing.pb.gz"]);
}

#[test]
fn a_recorded_command_keeps_its_own_exit_code_and_signal() {
    let Some(_turn) = begin_beside("errors::a_recorded_command_keeps_its_exit_code", RECORD) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    for (script, code) in [("exit 0", 0), ("exit 42", 42), ("kill -KILL $$", 128 + 9)] {
        let mut command = perfusion::command(["record", "-o"]);
        command.arg(scratch.path("x.pb.gz")).args(["--", "/bin/sh", "-c", script]);
        let outcome = perfusion::run(&mut command, DEADLINE).unwrap();
        assert_eq!(outcome.code(), code, "{script}:\n{}", outcome.stderr);
        system_tests::Profile::read(&scratch.path("x.pb.gz")).unwrap();
    }
}
