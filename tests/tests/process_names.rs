//! A process has one name, however it was started and whatever it did to its arguments and threads:
//! in the label, in `ps`, `dump` and `heap`, and as the daemon's service. docs/names.md has the
//! table that these programs are the rows of.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use system_tests::environment::{Need, RECORD_NET9, begin_beside};
use system_tests::perfusion::{self, Recording, SLACK, Scratch};
use system_tests::{App, Profile, Runtime, Workload, on_runtimes, wait_until};

use system_tests::cgroup::Group;

use crate::node::group;

const NAME: &str = "named";
const DEADLINE: Duration = Duration::from_secs(180);

/// A program: how the row is called, and what starts it.
struct Program {
    how: &'static str,
    workload: Workload,
}

/// What a host of one application has in place of the application's path: the digest of "foobar"
/// (src/native/corehost/corehost.cpp of dotnet/runtime).
const PLACEHOLDER: &[u8] = b"c3ab8ff13720e8ad9047dd39466b3c8974e592c2fa383d4a3960714caef0c4f2";

/// The host of one application, made of the SDK's template as the SDK makes it.
fn apphost(template: &Path, dll: &Path, folder: &Path) -> PathBuf {
    let mut bytes = fs::read(template).unwrap();
    let at = bytes.windows(PLACEHOLDER.len()).position(|window| window == PLACEHOLDER).unwrap();
    let name = dll.file_name().unwrap().as_encoded_bytes();
    bytes[at..at + PLACEHOLDER.len()].fill(0);
    bytes[at..at + name.len()].copy_from_slice(name);
    for end in ["dll", "runtimeconfig.json"] {
        let from = dll.with_extension(end);
        fs::copy(&from, folder.join(from.file_name().unwrap())).unwrap();
    }
    let host = folder.join(dll.file_stem().unwrap());
    fs::write(&host, bytes).unwrap();
    fs::set_permissions(&host, fs::Permissions::from_mode(0o755)).unwrap();
    host
}

fn programs(runtime: Runtime, scratch: &Scratch) -> Vec<Program> {
    let plain = Workload::dotnet(runtime, NAME, &[]).unwrap();
    let line = plain.command_line();
    let (dotnet, dll) = (PathBuf::from(&line[0]), PathBuf::from(&line[1]));
    let with = |arguments: &[&str], more: &[&str]| {
        let mut workload = Workload::program(&dotnet);
        for argument in arguments {
            workload = workload.arg(argument);
        }
        workload = workload.arg(dll.clone());
        more.iter().fold(workload, |workload, argument| workload.arg(argument))
    };
    let link = scratch.path("shop");
    symlink(&dotnet, &link).unwrap();
    let mut programs = vec![
        Program { how: "dotnet App.dll", workload: with(&[], &[]) },
        Program { how: "dotnet exec App.dll", workload: with(&["exec"], &[]) },
        Program {
            how: "dotnet --additionalprobingpath /x/y.dll App.dll",
            workload: with(&["--additionalprobingpath", "/x/y.dll"], &[]),
        },
        Program { how: "a link to dotnet", workload: Workload::program(link).arg(dll.clone()) },
        Program { how: "first thread renamed", workload: with(&[], &["rename"]) },
        Program { how: "arguments overwritten", workload: with(&[], &["argv"]) },
        Program { how: "both", workload: with(&["exec"], &["argv", "rename"]) },
    ];
    // Only the SDK of one version is here; its host runs applications of any.
    let roots = dotnet.parent().unwrap().parent().unwrap().to_owned();
    let template = roots.join("11/apphost");
    if template.exists() {
        let folder = scratch.path("apphost");
        fs::create_dir(&folder).unwrap();
        let host = apphost(&template, &dll, &folder);
        let link = scratch.path("linked-host");
        symlink(&host, &link).unwrap();
        for (how, host) in [("host of one application", host), ("a link to that", link)] {
            let root = dotnet.parent().unwrap().as_os_str().to_owned();
            programs
                .push(Program { how, workload: Workload::program(host).env("DOTNET_ROOT", root) });
        }
    }
    programs
}

/// The names that `perfusion ARGUMENTS` has of these processes, found by `of` in what it printed.
fn printed(arguments: &[OsString], of: impl Fn(&str, &str) -> Option<String>) -> Option<String> {
    let outcome = perfusion::run(&mut perfusion::command(arguments), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{arguments:?}: {}", outcome.stderr);
    of(&outcome.stdout, &outcome.stderr)
}

fn arguments(words: &[&str]) -> Vec<OsString> {
    words.iter().map(|word| OsString::from(*word)).collect()
}

fn ps_names(apps: &[App]) -> Vec<String> {
    let outcome = perfusion::run(&mut perfusion::command(["ps", "--json"]), SLACK).unwrap();
    let rows: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let name = |app: &App| {
        let row = rows.as_array().unwrap().iter().find(|row| row["pid"] == app.pid()).unwrap();
        row["name"].as_str().unwrap().to_owned()
    };
    apps.iter().map(name).collect()
}

fn labels(apps: &[App], scratch: &Scratch) -> Vec<String> {
    let file = scratch.path("names.pb.gz");
    let mut command = perfusion::command(["record", "--no-attach", "--duration", "2s", "-o"]);
    command.arg(&file);
    for app in apps {
        command.args(["--pid", &app.pid().to_string()]);
    }
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let name = |app: &App| {
        let pid = app.pid().to_string();
        let mut names: Vec<&str> = profile
            .samples
            .iter()
            .filter(|sample| sample.label("pid") == pid)
            .map(|sample| sample.label("process"))
            .collect();
        names.sort_unstable();
        names.dedup();
        names.join(" and ")
    };
    apps.iter().map(name).collect()
}

/// `cgroup` is called `name`, and ends the apps when it goes.
fn services(apps: &mut [App], cgroup: &Group, name: &str, scratch: &Scratch) -> Vec<String> {
    for app in apps.iter() {
        cgroup.take(app.pid()).unwrap();
    }
    let directory = scratch.path("");
    let text = format!(
        "windows: {{length: 2s, aligned: false}}\n\
         selection: {{only: [{{cgroup: /{name}*}}]}}\n\
         files: {{directory: {0}/out, keep_free: 1MiB}}\n\
         attach: {{policy: \"off\"}}\n\
         telemetry: {{listen: null}}\n\
         limits: {{kill_switch: {0}/run/off}}\n",
        directory.display()
    );
    fs::write(scratch.path("perfusion.yaml"), text).unwrap();
    let mut command = perfusion::command(["daemon", "--config"]);
    command.arg(scratch.path("perfusion.yaml"));
    let mut daemon = Recording::spawn(&mut command).unwrap();
    daemon.await_progress("ready", DEADLINE).unwrap();
    let service_of = |pid: u32| {
        let services = fs::read_dir(scratch.path("out")).ok()?;
        services.flatten().find_map(|service| {
            let files = fs::read_dir(service.path()).ok()?;
            let files = files.flatten().map(|file| file.path());
            let mut profiles = files
                .filter(|file| file.extension().is_some_and(|end| end == "gz"))
                .filter_map(|file| Profile::read(&file).ok());
            let is_in = profiles
                .any(|profile| profile.samples.iter().any(|s| s.label("pid") == pid.to_string()));
            is_in.then(|| service.file_name().into_string().unwrap())
        })
    };
    let found = wait_until("a profile with each process", DEADLINE, || {
        apps.iter().map(|app| service_of(app.pid())).collect::<Option<Vec<String>>>()
    });
    daemon.signal(Signal::TERM).unwrap();
    daemon.finish_well(SLACK).unwrap();
    found.unwrap()
}

on_runtimes!(a_process_has_one_name_everywhere: net9 Net9; long: net8 Net8, net10 Net10);

fn a_process_has_one_name_everywhere(runtime: Runtime) {
    let needs = [RECORD_NET9, &[Need::Cgroup2, Need::Clr(runtime)]].concat();
    let name = format!("process_names::one_name on {runtime}");
    let Some(_turn) = begin_beside(&name, &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let programs = programs(runtime, &scratch);
    let mut apps: Vec<App> = programs
        .iter()
        .map(|program| {
            program.workload.start().unwrap_or_else(|error| panic!("{}: {error:#}", program.how))
        })
        .collect();
    let group_name = format!("perfusion-test-names-{}", std::process::id());
    let cgroup = group(&group_name).unwrap();
    let columns = [
        ("ps", ps_names(&apps)),
        ("label", labels(&apps, &scratch)),
        ("service", services(&mut apps, &cgroup, &group_name, &scratch)),
        (
            "dump",
            apps.iter()
                .map(|app| {
                    let pid = app.pid().to_string();
                    let arguments = arguments(&["dump", "--no-attach", "--json", "--pid", &pid]);
                    printed(&arguments, |stdout, _| {
                        let dump: Value = serde_json::from_str(stdout).ok()?;
                        Some(dump["process"].as_str()?.to_owned())
                    })
                    .unwrap()
                })
                .collect(),
        ),
        (
            "heap",
            apps.iter()
                .map(|app| {
                    let pid = app.pid().to_string();
                    let arguments = arguments(&["heap", "--pid", &pid]);
                    printed(&arguments, |_, stderr| {
                        let (_, rest) = stderr.split_once(&format!("pid {pid} ("))?;
                        Some(rest.split_once(')')?.0.to_owned())
                    })
                    .unwrap()
                })
                .collect(),
        ),
    ];
    let mut wrong = Vec::new();
    for (at, program) in programs.iter().enumerate() {
        for (place, names) in &columns {
            if names[at] != NAME {
                wrong.push(format!("{}: {place} has {:?}", program.how, names[at]));
            }
        }
    }
    assert!(wrong.is_empty(), "expected {NAME} in each place:\n{}", wrong.join("\n"));
    for app in apps {
        app.stop().unwrap();
    }
}
