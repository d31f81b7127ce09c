//! `record --all`: the whole host in one file, with no process named beforehand.

use system_tests::cgroup::Group;
use system_tests::environment::{Need, RECORD_NET9, begin};
use system_tests::perfusion::{self, SLACK, Scratch};
use system_tests::{Profile, Runtime, Workload, gotool};

#[test]
fn record_all_sees_every_busy_process_and_accounts_for_every_event() {
    let needs = [RECORD_NET9, &[Need::C, Need::Go]].concat();
    let Some(_turn) = begin("host::record_all", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("host.pb.gz");
    let managed = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let native = Workload::native("spin", &[]).unwrap().start().unwrap();
    let mut command = perfusion::command(["record", "--all", "--duration", "2s", "-o"]);
    let outcome = perfusion::run(command.arg(&file), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let cpu = profile.sum_by("cpu", "pid");
    for (name, app) in [("callheavy", &managed), ("spin", &native)] {
        // At 99 Hz even a tenth of one CPU is 20 samples in 2 s.
        let own = cpu.get(&app.pid().to_string()).copied().unwrap_or(0);
        assert!(own > 0, "{name} has no CPU:\n{cpu:?}\n{}", profile.describe("cpu", |_| true));
    }
    // Each process keeps its own stacks: a host's worth of them is told apart by pid.
    let spins = profile.sum("cpu", |sample| {
        sample.label("pid") == native.pid().to_string()
            && sample.positions(&["main", "spin_here"]).is_some()
    });
    assert!(
        spins > 0,
        "{}",
        profile.describe("cpu", |sample| sample.label("pid") == native.pid().to_string())
    );
    gotool::check_valid(&file).unwrap();
    let loss = profile
        .comments
        .iter()
        .find(|comment| comment.starts_with("loss: "))
        .expect("no loss line");
    assert!(!loss.contains("unaccounted"), "{loss}\n{:#?}", profile.comments);
    assert!(outcome.stderr.contains(loss.as_str()), "not on stderr: {loss}\n{}", outcome.stderr);
    managed.stop().unwrap();
}

#[test]
fn a_cgroup_is_attached_to_when_asked_and_told_about_when_not() {
    let needs = [RECORD_NET9, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin("host::a_cgroup_is_attached_to", &needs) else { return };
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let group = Group::new(&format!("perfusion-test-{}", std::process::id())).unwrap();
    group.take(app.pid()).unwrap();
    let scratch = Scratch::new().unwrap();
    let record = |options: &[&str]| {
        let file = scratch.path("group.pb.gz");
        let mut command = perfusion::command(["record", "--duration", "2s", "--cgroup"]);
        command.arg(group.path()).args(options).arg("-o").arg(&file);
        let outcome = perfusion::run(&mut command, SLACK).unwrap();
        assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
        let profile = Profile::read(&file).unwrap();
        let named = profile.sum("cpu", |sample| sample.has("CallHeavy.Program.Root"));
        (named, outcome.stderr, profile)
    };
    // Names are read from memory where there is no shim; allocations are not.
    let (_, said, profile) = record(&[]);
    assert!(
        profile.sum("alloc_objects", |_| true) == 0 && said.contains("--attach"),
        "{said}\n{}",
        profile.describe("cpu", |_| true)
    );
    let (named, said, profile) = record(&["--attach"]);
    assert!(
        named > 0 && !said.contains("without --attach"),
        "{said}\n{}",
        profile.describe("cpu", |_| true)
    );
    app.stop().unwrap();
}
