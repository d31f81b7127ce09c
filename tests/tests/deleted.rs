//! Programs and libraries that are unlinked or replaced while they run, as every upgrade does:
//! their code keeps the names it has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use system_tests::app::{compile_c, copy_program};
use system_tests::environment::{Need, RECORD, RECORD_NET9, Runtime, begin_beside};
use system_tests::perfusion::{self, SLACK, Scratch, record_allocations};
use system_tests::schedstat::schedstat;
use system_tests::{App, Profile, Recording, Sample, Workload, wait_until};

/// A program and its library in a folder of their own, so that both can be taken away.
struct Program {
    folder: PathBuf,
    app: App,
}

/// The workload's program or library whose code is in `burn_NAME`.
fn built(output: &str, name: &str, flags: &[&str]) -> PathBuf {
    compile_c("gone", output, &[&[format!("-DNAME={name}").as_str()], flags].concat()).unwrap()
}

impl Program {
    fn start(folder: PathBuf) -> Self {
        fs::create_dir(&folder).unwrap();
        let (program, library) = (folder.join("gone"), folder.join("libgone.so"));
        copy_program(&built("gone", "program", &[]), &program).unwrap();
        copy_program(&built("libgone.so", "library", &["-shared", "-fPIC", "-DPLUGIN"]), &library)
            .unwrap();
        let app = Workload::program(program).arg(library).start().unwrap();
        Self { folder, app }
    }

    /// Another file with the same name, whose code lies at the same places under another name.
    fn replace(&self, name: &str) {
        let flags: &[&str] = if name == "gone" { &[] } else { &["-shared", "-fPIC", "-DPLUGIN"] };
        let new = self.folder.join("new");
        copy_program(&built(name, "another", flags), &new).unwrap();
        fs::rename(new, self.folder.join(name)).unwrap();
    }

    fn unlink(&self, name: &str) {
        fs::remove_file(self.folder.join(name)).unwrap();
    }

    /// How the files of its mappings are called by now.
    fn mapped(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.app.pid())).unwrap()
    }

    /// Waits until it has had a CPU for so long.
    fn burn(&self, time: Duration) {
        let pid = self.app.pid();
        let cpu = || u64::try_from(schedstat(pid).get(&pid)?.oncpu).ok();
        let end = cpu().unwrap() + u64::try_from(time.as_nanos()).unwrap();
        wait_until("time on a CPU", SLACK, || (cpu()? > end).then_some(())).unwrap();
    }
}

#[test]
fn programs_and_libraries_that_are_unlinked_or_replaced_keep_their_names() {
    let Some(_turn) = begin_beside("deleted: native", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("gone.pb.gz");
    // One whose files are gone when the recorder comes, and one whose files go while it records;
    // each in both ways.
    let (before, meanwhile) =
        (Program::start(scratch.path("before")), Program::start(scratch.path("meanwhile")));
    before.unlink("gone");
    before.replace("libgone.so");
    let mut command = perfusion::command(["record", "--no-attach", "--frequency", "999", "-o"]);
    command.arg(&file);
    for program in [&before, &meanwhile] {
        command.arg("--pid").arg(program.app.pid().to_string());
    }
    let mut recording = Recording::spawn(&mut command).unwrap();
    recording.await_progress("recording ", SLACK).unwrap();
    meanwhile.burn(Duration::from_millis(300));
    meanwhile.replace("gone");
    meanwhile.unlink("libgone.so");
    for program in [&before, &meanwhile] {
        program.burn(Duration::from_millis(500));
        let mapped = program.mapped();
        assert!(
            mapped.contains("/gone (deleted)") && mapped.contains("/libgone.so (deleted)"),
            "{mapped}"
        );
    }
    recording.signal(Signal::INT).unwrap();
    let outcome = recording.finish_well(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    for (what, program) in [("gone before", &before), ("gone meanwhile", &meanwhile)] {
        let pid = program.app.pid().to_string();
        let own = |sample: &Sample| sample.label("pid") == pid;
        let picture = || format!("{what}: {}\n{}", profile.describe("cpu", own), outcome.stderr);
        let cpu = |leaf: &str| {
            let whole =
                |sample: &Sample| own(sample) && sample.positions(&["main", leaf]).is_some();
            profile.sum("cpu", whole)
        };
        let (all, program, library) =
            (profile.sum("cpu", own), cpu("burn_program"), cpu("burn_library"));
        // What is between two turns, and the stack of a sample that met the kernel, are the rest.
        assert!(
            (program + library) * 100 >= all * 95,
            "{program} + {library} of {all} ns, {}",
            picture()
        );
        // They take turns of equal length.
        assert!(
            program * 4 >= all && library * 4 >= all,
            "{program} and {library} of {all} ns, {}",
            picture()
        );
        assert_eq!(
            profile.sum("cpu", |sample| own(sample) && sample.has("another")),
            0,
            "{}",
            picture()
        );
    }
}

/// Files below a folder that a process has mapped.
fn mapped_below(app: &App, folder: &Path) -> BTreeSet<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap();
    let paths = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    paths.map(PathBuf::from).filter(|path| path.starts_with(folder)).collect()
}

#[test]
fn a_runtime_and_an_app_whose_files_are_unlinked_are_attached_to_and_named() {
    let Some(_turn) = begin_beside("deleted: .NET", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let folder = scratch.path("installed");
    fs::create_dir(&folder).unwrap();
    // A runtime of its own, and the app beside it.
    let workload = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    let line = workload.command_line();
    let dll = Path::new(&line[1]);
    for (from, to) in [(Path::new(&line[0]).parent(), "runtime"), (dll.parent(), "app")] {
        let copied = std::process::Command::new("cp")
            .arg("-rL")
            .arg(from.unwrap())
            .arg(folder.join(to))
            .status();
        assert!(copied.unwrap().success());
    }
    let mut app = Workload::program(folder.join("runtime/dotnet"))
        .arg(folder.join("app").join(dll.file_name().unwrap()))
        .start()
        .unwrap();
    // What an upgrade takes away: all that it has mapped. (It finds what it may still load.)
    let mapped = mapped_below(&app, &folder);
    for name in ["dotnet", "libcoreclr.so", "System.Private.CoreLib.dll", "allocator.dll"] {
        assert!(mapped.iter().any(|path| path.ends_with(name)), "{name} is not mapped: {mapped:?}");
    }
    mapped.iter().for_each(|path| fs::remove_file(path).unwrap());

    let heard = record_allocations(&mut app, 1, Duration::from_secs(2)).unwrap();
    let (profile, outcome) = &heard.profiles[0];
    let picture =
        |column: &str| format!("{}\n{}", profile.describe(column, |_| true), outcome.stderr);
    let allocated =
        profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) as f64;
    heard.assert_holds(profile, allocated, picture("alloc_space"));
    let samples = |fits: &dyn Fn(&Sample) -> bool| profile.sum("samples", fits);
    let (all, named, unnamed) = (
        samples(&|_| true),
        samples(&|sample| sample.has("Allocator.Program.Run")),
        samples(&|sample| sample.has("[managed]")),
    );
    // As for one whose files are there, code that ran once may be past when its question is sent.
    assert!(unnamed <= 2 + all / 100, "{unnamed} of {all}: {}", picture("samples"));
    assert!(2 * named >= all, "{named} of {all}: {}", picture("samples"));
    // Its files' unwind data is there, that of the runtime's native code and of the framework's.
    let counter = |name: &str| profile.counter(name).unwrap();
    let (walked, broken, guessed) =
        (counter("stacks_walked"), counter("stacks_broken"), counter("stacks_guessed"));
    assert!(
        walked > 100 && (broken + guessed) * 50 <= walked,
        "{broken} + {guessed} of {walked}: {}",
        picture("samples")
    );
    assert!(
        profile.functions().iter().any(|name| name.contains("System.Threading.Thread")),
        "{}",
        picture("samples")
    );
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}
