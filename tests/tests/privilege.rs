//! Who has CAP_DAC_OVERRIDE while a daemon runs: the helper that attaches, and nobody else.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{Need, RECORD, RECORD_NET9, Runtime, begin_beside, perfusion_bin};
use system_tests::profile::Profile;
use system_tests::wait::wait_until;

use crate::daemon::has_shim;
use crate::errors::as_nobody;
use crate::node::{DEADLINE, Node, group};

const DAC_OVERRIDE: u64 = 1 << 1;
const SYS_PTRACE: u64 = 1 << 19;
const SETS: [&str; 4] = ["CapInh", "CapPrm", "CapEff", "CapAmb"];

/// A line of each thread's `status`, as hexadecimal digits.
fn of_threads(pid: u32, line: &str) -> Vec<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // One may end meanwhile.
    let texts =
        threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("status")).ok());
    let value = |text: String| {
        let value = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
        u64::from_str_radix(value.unwrap().trim(), 16).unwrap()
    };
    texts.map(value).collect()
}

/// The one process that a daemon has started.
fn helper(daemon: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children")).unwrap();
    let mut children = children.split_ascii_whitespace().map(|pid| pid.parse().unwrap());
    let helper = children.next().expect("no helper");
    assert_eq!(children.next(), None, "more than one");
    helper
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal).unwrap();
}

/// A daemon as the unit runs it: root, but with the unit's capabilities, of which CAP_SETPCAP is
/// none, and without ways to new ones.
fn as_the_unit_does(node: &Node) -> Command {
    let unit = include_str!("../../packaging/perfusion.service");
    let listed = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let mut set = listed.to_lowercase().replace("cap_", "+").replace(' ', ",");
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap();
    if paranoid.trim().parse::<i32>().unwrap() > 2 {
        // As the deb's drop-in does.
        set.push_str(",+sys_admin");
    }
    let mut command = Command::new("setpriv");
    command.arg(format!("--bounding-set=-all,{set}")).args(["--inh-caps=-all", "--no-new-privs"]);
    command
        .arg(perfusion_bin().unwrap())
        .args(["daemon", "--config"])
        .arg(node.scratch.path("perfusion.yaml"));
    command
}

fn started(workload: &Workload, group: &Group) -> App {
    let mut app = workload.clone().spawn().unwrap();
    group.take(app.pid()).unwrap();
    app.await_ready().unwrap();
    app
}

fn await_shim(node: &Node, app: &App) {
    wait_until("the shim", DEADLINE, || has_shim(app.pid()).then_some(())).unwrap_or_else(
        |error| {
            panic!("{error}: {}\n{}", node.ps(app.pid()), node.daemon().progress());
        },
    );
}

#[test]
fn the_capability_that_attach_needs_is_the_helpers_alone() {
    let needs = [RECORD_NET9, &[Need::Program("setpriv"), Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("privilege: the helper", &needs) else { return };
    let mut node = Node::new();
    let name = "perfusion-test-helper";
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /{name}*}}]}}\nattach: {{policy: all}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    let group = group(name).unwrap();
    // Another user's programs, and a directory for temporary files that only he can use: the
    // library goes there as well.
    fs::set_permissions(node.scratch.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let temporary = node.scratch.path("temporary");
    fs::create_dir(&temporary).unwrap();
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&temporary, Some(65534), Some(65534)).unwrap();
    let roots = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let theirs = as_nobody(&node.scratch, &roots);

    let mut command = as_the_unit_does(&node);
    node.run(&mut command);
    let daemon = node.daemon().pid();
    let helper = helper(daemon);
    // What a service manager sends to all of a service's processes is not for it.
    for sent in [Signal::TERM, Signal::HUP, Signal::USR1] {
        signal(helper, sent);
    }
    let app = started(&theirs.clone().env("TMPDIR", &temporary), &group);
    await_shim(&node, &app);
    wait_until("a profile with managed names", DEADLINE, || {
        let named =
            |profile: &Profile| profile.functions().iter().any(|name| name.contains("CallHeavy"));
        node.profiles().iter().any(|(_, profile)| named(profile)).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    wait_until("the library's file to be gone", DEADLINE, || {
        library(&temporary).is_none().then_some(())
    })
    .unwrap();
    let maps = fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap();
    assert!(
        maps.contains(&format!("{}/perfusion-shim-", temporary.display())),
        "not placed there: {maps}"
    );

    for set in SETS {
        let had = of_threads(daemon, set);
        assert!(had.len() > 3 && had.iter().all(|set| set & DAC_OVERRIDE == 0), "{set}: {had:x?}");
    }
    for set in ["CapPrm", "CapEff"] {
        let had = of_threads(helper, set);
        assert!(had.iter().all(|set| *set == DAC_OVERRIDE | SYS_PTRACE), "{set}: {had:x?}");
    }
    for set in ["CapInh", "CapAmb"] {
        assert!(of_threads(helper, set).iter().all(|set| *set == 0), "{set}");
    }
    for process in [daemon, helper] {
        assert!(of_threads(process, "NoNewPrivs").iter().all(|value| *value == 1));
    }

    signal(helper, Signal::KILL);
    wait_until("the daemon to say so", DEADLINE, || {
        node.daemon().progress().contains("the helper that attaches has ended").then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert_eq!(node.metric("perfusion_daemon_helpers_ended_total"), 1.0);
    // Of another user's process that comes now the reason is shown; one of its own user needs no
    // helper; who was attached to stays so.
    let late = started(&theirs, &group);
    let why = wait_until("a reason", DEADLINE, || {
        node.ps(late.pid())["why_not"]
            .as_str()
            .filter(|why| why.contains("helper"))
            .map(str::to_owned)
    })
    .unwrap_or_else(|error| {
        panic!("{error}: {}\n{}", node.ps(late.pid()), node.daemon().progress())
    });
    assert!(why.contains("restart the daemon"), "{why}");
    let own = started(&roots, &group);
    await_shim(&node, &own);
    assert!(has_shim(app.pid()) && !has_shim(late.pid()));
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0);
    for app in [app, late, own] {
        app.stop().unwrap();
    }
    node.end();
}

/// What lies in a directory and has the library's kind of name.
fn library(directory: &Path) -> Option<String> {
    let mut names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    names
        .find_map(|name| name.into_string().ok().filter(|name| name.starts_with("perfusion-shim-")))
}

#[test]
fn the_helper_ends_with_its_daemon_however_that_ends() {
    let Some(_turn) = begin_beside("privilege: the helper's end", RECORD) else { return };
    for told in [Signal::TERM, Signal::KILL] {
        let mut node = Node::new();
        node.configure(&format!(
            "selection: {{only: [{{command: none}}]}}\nlimits: {{{}}}\n",
            node.kill_switch()
        ));
        node.start();
        let daemon = node.daemon().pid();
        let helper = helper(daemon);
        // Root can give it up for whatever it starts, too.
        for set in SETS.into_iter().chain(["CapBnd"]) {
            let had = of_threads(daemon, set);
            assert!(had.iter().all(|set| set & DAC_OVERRIDE == 0), "{set}: {had:x?}");
        }
        assert!(of_threads(helper, "CapEff").iter().all(|set| *set == DAC_OVERRIDE | SYS_PTRACE));
        if told == Signal::TERM {
            node.end()
        } else {
            node.take().kill().unwrap()
        }
        wait_until("the helper's end", DEADLINE, || {
            let status = fs::read_to_string(format!("/proc/{helper}/status")).unwrap_or_default();
            // Where nobody waits for orphans it stays a zombie.
            (status.is_empty() || status.contains("State:\tZ")).then_some(())
        })
        .unwrap();
    }
}
