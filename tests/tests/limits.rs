//! Limits of the system are told as what they are: the error's name, the object, the limit in force
//! and the remedy. And with few of something a recording does what it can.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin, begin_beside, perfusion_bin};
use system_tests::perfusion::{self, Outcome, SLACK, Scratch};
use system_tests::{App, Profile, Runtime, Workload};

/// `perfusion ARGUMENTS` in a shell that has run `before`.
fn limited(before: &str, arguments: &[&str]) -> Outcome {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{before} exec \"$@\"")]).arg("sh").arg(perfusion_bin().unwrap());
    perfusion::run(command.args(arguments), SLACK).unwrap()
}

/// As one that may not raise its hard limits.
fn unprivileged(before: &str, arguments: &[&str]) -> Outcome {
    let mut command = Command::new("sh");
    let line = format!(
        "{before} exec setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource \"$@\""
    );
    command.args(["-c", &line]).arg("sh").arg(perfusion_bin().unwrap());
    perfusion::run(command.args(arguments), SLACK).unwrap()
}

/// All of `words` stand in one line of stderr.
fn assert_told(outcome: &Outcome, words: &[&str]) {
    let has_all = |line: &str| words.iter().all(|word| line.contains(word));
    assert!(outcome.stderr.lines().any(has_all), "no line with {words:?}:\n{}", outcome.stderr);
}

/// Share of `spin`'s samples whose function has its name.
fn named_share(file: &Path) -> f64 {
    let profile = Profile::read(file).unwrap();
    let all = profile.sum("samples", |sample| sample.label("process") == "spin");
    let named = profile
        .sum("samples", |sample| sample.label("process") == "spin" && sample.has("spin_here"));
    // Of some 200, on a CPU of its own.
    assert!(all > 5, "{}", profile.describe("samples", |_| true));
    named as f64 / all as f64
}

#[test]
fn few_open_files_are_raised_used_sparingly_or_refused_with_the_numbers() {
    let needs = [RECORD, &[Need::C, Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("limits::open_files", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let file = scratch.path("files.pb.gz");
    let pid = app.pid().to_string();
    let record =
        ["record", "-d", "2s", "--pid", &pid, "-o", &file.display().to_string()].map(str::to_owned);
    let record: Vec<&str> = record.iter().map(String::as_str).collect();
    // The soft limit is raised by everybody, the hard one by who may.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    const SYS_RESOURCE: u64 = 1 << 24;
    let may_raise = u64::from_str_radix(effective.trim(), 16).unwrap() & SYS_RESOURCE != 0;
    let raised = ["ulimit -n 64;", "ulimit -n 24;"].into_iter().filter(|_| may_raise);
    for before in ["ulimit -Sn 24;"].into_iter().chain(raised) {
        let outcome = limited(before, &record);
        assert_eq!(outcome.code(), 0, "{before} {}", outcome.stderr);
        assert!(named_share(&file) > 0.9, "{before} {}", outcome.stderr);
    }
    // As many as a recording takes: all names are there.
    let online = fs::read_dir("/sys/devices/system/cpu").unwrap().flatten();
    let is_cpu = |name: &str| name.strip_prefix("cpu").is_some_and(|id| id.parse::<u32>().is_ok());
    let cpus = online.filter(|entry| entry.file_name().to_str().is_some_and(is_cpu)).count();
    let needed = 84 + 3 * cpus;
    let outcome = unprivileged(&format!("ulimit -n {needed};"), &record);
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    assert!(named_share(&file) > 0.9, "{}", outcome.stderr);
    // With fewer it says so, and does not begin.
    for limit in [needed - 1, 24] {
        let outcome = unprivileged(&format!("ulimit -n {limit};"), &record);
        assert_eq!(outcome.code(), 4, "{}", outcome.stderr);
        assert_told(
            &outcome,
            &[
                "perfusion: RLIMIT_NOFILE",
                &format!("at least {needed} open files"),
                &format!("found {limit}:"),
                "ulimit -n",
            ],
        );
        let doctor = unprivileged(&format!("ulimit -n {limit};"), &["doctor"]);
        let told = |line: &str| {
            line.starts_with("BAD")
                && line.contains(&format!("at least {needed} open files"))
                && line.contains(&format!("found {limit}:"))
        };
        assert!(doctor.stdout.lines().any(told), "{}", doctor.stdout);
    }
}

#[test]
fn little_address_space_is_told_by_record_and_doctor_as_what_it_is() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin_beside("limits::address_space", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let (pid, file) = (app.pid().to_string(), scratch.path("as.pb.gz").display().to_string());
    let before = "ulimit -v 60000;";
    let outcome = limited(before, &["record", "-d", "1s", "--pid", &pid, "-o", &file]);
    assert_ne!(outcome.code(), 0, "{}", outcome.stderr);
    assert_told(&outcome, &["perfusion: ", "[ENOMEM]", "RLIMIT_AS is 61440000"]);
    assert!(!outcome.stderr.contains("CONFIG_DEBUG_INFO_BTF"), "{}", outcome.stderr);
    let doctor = limited(before, &["doctor"]);
    let told = |line: &str| line.starts_with("limited") && line.contains("found 61440000");
    assert!(doctor.stdout.lines().any(told), "{}", doctor.stdout);
}

#[test]
fn a_script_without_its_interpreter_is_refused_and_leaves_no_profile() {
    let Some(_turn) = begin_beside("limits::interpreter", RECORD) else { return };
    let scratch = Scratch::new().unwrap();
    let (script, file) = (scratch.path("bad.sh"), scratch.path("bad.pb.gz"));
    fs::write(&script, "#!/no/such/shell\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let (script, output) = (script.display().to_string(), file.display().to_string());
    let mut command = perfusion::command(["record", "-o", &output, "--", &script]);
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.code(), 127, "{}", outcome.stderr);
    assert_told(&outcome, &[&script, "its interpreter /no/such/shell: ", "[ENOENT]"]);
    assert!(!file.exists());
}

/// A setting of the kernel, set back at the end.
struct Sysctl {
    path: &'static str,
    before: String,
}

impl Sysctl {
    fn set(path: &'static str, value: &str) -> Self {
        let before = fs::read_to_string(path).unwrap();
        let sysctl = Self { path, before };
        fs::write(path, value).unwrap();
        sysctl
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        fs::write(self.path, self.before.trim()).ok();
    }
}

#[test]
fn a_lowered_rate_of_samples_is_told_by_record_and_doctor_alike() {
    let Some(_turn) = begin("limits::sample_rate", &[RECORD, &[Need::C]].concat()) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let pid = app.pid().to_string();
    let file = scratch.path("rate.pb.gz").display().to_string();
    let _rate = Sysctl::set("/proc/sys/kernel/perf_event_max_sample_rate", "50");
    let record = ["record", "-d", "1s", "--pid", &pid, "-o", &file];
    let outcome = perfusion::run(&mut perfusion::command(record), SLACK).unwrap();
    assert_eq!(outcome.code(), 4, "{}", outcome.stderr);
    let words = [
        "EINVAL",
        "kernel.perf_event_max_sample_rate is 50",
        "99 samples per second",
        "--frequency",
    ];
    assert_told(&outcome, &words);
    let doctor = perfusion::run(&mut perfusion::command(["doctor"]), SLACK).unwrap();
    assert_eq!(doctor.code(), 4, "{}", doctor.stdout);
    let line = doctor.stdout.lines().find(|line| line.starts_with("BAD")).unwrap();
    assert!(
        line.contains("recording") && words[..3].iter().all(|word| line.contains(word)),
        "{line}"
    );
    // The remedies work, and a dump takes what it can have.
    let outcome =
        perfusion::run(perfusion::command(record).args(["--frequency", "50"]), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let outcome = perfusion::run(&mut perfusion::command(["dump", "--pid", &pid]), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
}

#[test]
fn a_file_that_cannot_be_written_has_the_limit_or_the_file_system_as_its_reason() {
    let needs = [RECORD, &[Need::C, Need::Program("mount"), Need::Program("umount")]].concat();
    let Some(_turn) = begin_beside("limits::files", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let pid = app.pid().to_string();
    let file = scratch.path("long.pb.gz").display().to_string();
    let outcome = limited("ulimit -f 1;", &["record", "-d", "1s", "-a", "-o", &file]);
    assert_eq!(outcome.code(), 5, "{}", outcome.stderr);
    assert_told(&outcome, &["perfusion: ", &file, "[EFBIG]", "RLIMIT_FSIZE is "]);
    // A file system of one page, in a mount namespace of its own.
    let small = scratch.path("small");
    fs::create_dir(&small).unwrap();
    let line = format!(
        "mount -t tmpfs -o size=4k tmpfs {0} && head -c 4096 /dev/zero > {0}/full; exec \"$@\"",
        small.display()
    );
    let file = small.join("full.pb.gz").display().to_string();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &line]).arg("sh").arg(perfusion_bin().unwrap());
    command.args(["record", "-d", "1s", "--pid", &pid, "-o", &file]);
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.code(), 5, "{}", outcome.stderr);
    assert_told(&outcome, &["perfusion: ", &file, "[ENOSPC]"]);
}

/// What `ps` says of a process: how it can be profiled, and why not more.
fn seen(app: &App) -> (String, String) {
    let outcome = perfusion::run(&mut perfusion::command(["ps", "--json"]), SLACK).unwrap();
    let rows: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let row = rows.as_array().unwrap().iter().find(|row| row["pid"] == app.pid()).unwrap().clone();
    let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
    (text("mode"), text("why_not"))
}

#[test]
fn a_missing_diagnostics_socket_has_the_reason_that_can_be_seen() {
    let needs = [RECORD_NET9, &[Need::C, Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("limits::sockets", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let plain = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    // Relative to the directory it is in: its socket is found there.
    let folder = scratch.path("relative");
    fs::create_dir(&folder).unwrap();
    let line = plain.command_line();
    let shell = |script: String| {
        let workload = Workload::program("/bin/sh").arg("-c").arg(script).arg("sh");
        line.iter().fold(workload, |workload, word| workload.arg(word.clone()))
    };
    let below = format!("cd {}; TMPDIR=relative exec \"$@\"", scratch.path("").display());
    let app = shell(below).start().unwrap();
    assert_eq!(seen(&app), ("can_attach".to_owned(), String::new()));
    app.stop().unwrap();
    // A directory that is not there, one that is too long, and a filter.
    let missing = scratch.path("missing").display().to_string();
    let long = scratch.path(&"x".repeat(80)).display().to_string();
    fs::create_dir(&long).unwrap();
    let filter = compile_c("no_socket", "no_socket", &[]).unwrap();
    let filtered =
        line.iter().fold(Workload::program(filter), |workload, word| workload.arg(word.clone()));
    let file = scratch.path("file").display().to_string();
    fs::write(&file, "").unwrap();
    // Of somebody else, with the mode that directories usually have.
    let closed = scratch.path("closed").display().to_string();
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).unwrap();
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let user = user.into_iter().map(OsString::from).chain(line.iter().cloned());
    let user = user.fold(Workload::program("setpriv"), |workload, word| workload.arg(word));
    for (workload, words) in [
        (plain.clone().env("TMPDIR", &missing), [missing.as_str(), "ENOENT"]),
        (plain.clone().env("TMPDIR", &missing), ["make the directory", "start it again"]),
        (plain.clone().env("TMPDIR", &file), [file.as_str(), "is a file and no directory"]),
        (user.env("TMPDIR", &closed), ["(65534:65534) may make no file", "mode "]),
        (plain.clone().env("TMPDIR", &long), ["TMPDIR has ", " bytes"]),
        (filtered, ["seccomp filter", "bind(2)"]),
    ] {
        let app = workload.start().unwrap();
        // Whoever has just begun may still make one; these do not.
        let told = system_tests::wait_until("the reason", SLACK, || {
            let (mode, why) = seen(&app);
            (mode == "without_names" && words.iter().all(|word| why.contains(word))).then_some(())
        });
        assert!(told.is_ok(), "no {words:?} in {:?}", seen(&app));
        app.stop().unwrap();
    }
    // A directory that was there at the start.
    let removed = scratch.path("removed");
    fs::create_dir(&removed).unwrap();
    let app = plain.env("TMPDIR", removed.display().to_string()).start().unwrap();
    assert_eq!(seen(&app), ("can_attach".to_owned(), String::new()));
    fs::remove_dir_all(&removed).unwrap();
    let (mode, why) = seen(&app);
    let made = format!("it made {}/dotnet-diagnostic-", removed.display());
    assert!(mode == "without_names" && why.contains(&made), "no {made} in {why}");
    assert!(why.contains("deleted since") && why.contains("start it again"), "{why}");
    app.stop().unwrap();
}

#[test]
fn a_recording_of_seconds_says_why_there_is_no_shim() {
    let Some(_turn) = begin_beside("limits::short", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let missing = scratch.path("missing").display().to_string();
    let workload = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let app = workload.env("TMPDIR", &missing).start().unwrap();
    let reason = format!("process {}: no diagnostics socket: its TMPDIR is {missing}", app.pid());
    let told = |name: &str| {
        let file = scratch.path(name);
        let mut command = perfusion::command(["record", "--attach", "-d", "1s", "-o"]);
        command.arg(&file).args(["--pid", &app.pid().to_string()]);
        let outcome = perfusion::run(&mut command, SLACK).unwrap();
        assert_eq!(outcome.stderr.matches(&reason).count(), 1, "{reason}: {}", outcome.stderr);
        let comments = Profile::read(&file).unwrap().comments;
        let count = comments.iter().filter(|comment| comment.contains(&reason)).count();
        assert_eq!(count, 1, "{comments:#?}");
    };
    // As soon as it is ready, when it may still come to listen; and when it is old.
    told("young.pb.gz");
    system_tests::wait::let_pass(Duration::from_secs(6));
    told("old.pb.gz");
}

#[test]
fn a_process_too_young_for_a_socket_is_given_a_reason_at_the_end() {
    let Some(_turn) =
        begin_beside("limits::young", &[RECORD_NET9, &[Need::C, Need::Cgroup2]].concat())
    else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let name = format!("perfusion-test-young-{}", std::process::id());
    let group = crate::node::group(&name).unwrap();
    let line = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().command_line();
    let filter = compile_c("no_socket", "no_socket", &[]).unwrap();
    let workload =
        line.iter().fold(Workload::program(filter), |workload, word| workload.arg(word.clone()));
    let file = scratch.path("young.pb.gz");
    let mut command = perfusion::command(["record", "--attach", "-o"]);
    command.arg(&file).arg("--cgroup").arg(group.path());
    let mut recording = perfusion::Recording::spawn(&mut command).unwrap();
    recording.await_progress("recording ", SLACK).unwrap();
    let mut app = workload.spawn().unwrap();
    group.take(app.pid()).unwrap();
    app.await_ready().unwrap();
    // As soon as it is ready: it is younger than the two seconds after which it is asked no more.
    let reason = format!("process {}: no diagnostics socket", app.pid());
    system_tests::wait::let_pass(Duration::from_millis(700));
    recording.signal(rustix::process::Signal::INT).unwrap();
    recording.finish(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    assert!(
        profile.comments.iter().any(|comment| comment.contains(&reason)),
        "no {reason}: {:#?}",
        profile.comments
    );
}

/// `perfusion ARGUMENTS` as a user without rights, with a `/proc` that hides so much.
fn beside_hidden(scratch: &Scratch, hidepid: &str, arguments: &str) -> Outcome {
    let copy = scratch.path("perfusion");
    system_tests::app::copy_program(&perfusion_bin().unwrap(), &copy).unwrap();
    fs::set_permissions(copy.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let line = format!(
        "mount -t proc -o hidepid={hidepid} proc /proc && exec setpriv --reuid=65534 \
         --regid=65534 --clear-groups {} {arguments}",
        copy.display()
    );
    let mut command = Command::new("unshare");
    perfusion::run(command.args(["-m", "sh", "-c", &line]), SLACK).unwrap()
}

#[test]
fn a_process_that_a_mount_hides_is_not_said_to_be_absent() {
    let needs = [RECORD, &[Need::Program("unshare"), Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("limits::hidden_target", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    for hidepid in ["1", "2"] {
        let outcome = beside_hidden(&scratch, hidepid, "record -d 1s --pid 1");
        assert_eq!(outcome.code(), 4, "hidepid={hidepid}: {}", outcome.stderr);
        assert_told(&outcome, &["process 1 is there", "hidepid", "CAP_SYS_PTRACE"]);
    }
    // There is none with the highest pid there can be.
    let outcome = beside_hidden(&scratch, "2", "record -d 1s --pid 4194304");
    assert_eq!(outcome.code(), 3, "{}", outcome.stderr);
    assert_told(&outcome, &["no process with pid 4194304"]);
}

#[test]
fn processes_that_a_mount_hides_are_mentioned() {
    let needs = [RECORD, &[Need::Program("unshare"), Need::Program("setpriv")]].concat();
    let Some(_turn) = begin_beside("limits::hidden", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    for (option, hidden) in [("0", false), ("1", true), ("2", true)] {
        let outcome = beside_hidden(&scratch, option, "ps");
        assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
        assert_eq!(
            outcome.stderr.contains("hidepid="),
            hidden,
            "hidepid={option}: {}",
            outcome.stderr
        );
    }
}
