//! What a test needs from the machine, where it is, and what happens when it is not there.

use std::env;
use std::fmt;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use crate::turn::{self, Sort, Turn, say};

/// A .NET runtime by its major version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Runtime {
    /// .NET 8.
    Net8,
    /// .NET 9: the one every test runs on.
    Net9,
    /// .NET 10.
    Net10,
    /// .NET 11: no package registry has it, so it is there only where a copy lies beside the
    /// checkout. Its tests are skipped elsewhere, in CI too.
    Net11,
    /// .NET 10 on musl, Alpine's C library: in single-file programs only.
    Net10Musl,
    /// .NET 11 on musl, as [`Net11`](Self::Net11).
    Net11Musl,
}

impl Runtime {
    /// Those that setup fetches, oldest first.
    pub const ALL: [Self; 3] = [Self::Net8, Self::Net9, Self::Net10];

    /// 8, 9, 10 or 11.
    pub fn major(self) -> u32 {
        match self {
            Self::Net8 => 8,
            Self::Net9 => 9,
            Self::Net10 | Self::Net10Musl => 10,
            Self::Net11 | Self::Net11Musl => 11,
        }
    }

    /// True when its C library is musl.
    pub fn on_musl(self) -> bool {
        matches!(self, Self::Net10Musl | Self::Net11Musl)
    }

    /// `11`, or `11-musl`.
    fn folder(self) -> String {
        format!("{}{}", self.major(), if self.on_musl() { "-musl" } else { "" })
    }

    /// The `dotnet` executable of this runtime: `$PERFUSION_DOTNET_ROOTS/MAJOR/dotnet`, on musl
    /// `MAJOR-musl/dotnet`.
    pub fn dotnet(self) -> Option<PathBuf> {
        let dotnet = env_path("PERFUSION_DOTNET_ROOTS")?.join(self.folder()).join("dotnet");
        dotnet.exists().then_some(dotnet)
    }

    /// The assemblies of this runtime.
    pub fn framework(self) -> Option<PathBuf> {
        let versions = self.dotnet()?.with_file_name("shared/Microsoft.NETCore.App");
        // A root has just one.
        Some(versions.read_dir().ok()?.next()?.ok()?.path())
    }

    /// A single-file program of this runtime, to make others of:
    /// `$PERFUSION_DOTNET_ROOTS/single-file-MAJOR`, on musl `single-file-MAJOR-musl/program`.
    pub fn single_file(self) -> Option<PathBuf> {
        let found =
            env_path("PERFUSION_DOTNET_ROOTS")?.join(format!("single-file-{}", self.folder()));
        let program = if self.on_musl() { found.join("program") } else { found };
        program.exists().then_some(program)
    }
}

/// The libraries of a program on musl: `$PERFUSION_DOTNET_ROOTS/musl`.
pub fn musl_libraries() -> Option<PathBuf> {
    let folder = env_path("PERFUSION_DOTNET_ROOTS")?.join("musl");
    folder.exists().then_some(folder)
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ".NET {}{}", self.major(), if self.on_musl() { " on musl" } else { "" })
    }
}

/// Something a test cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Effective user id 0.
    Root,
    /// The kernel's type information, which the probes are relocated with.
    Btf,
    /// The `perfusion` binary with probes and shim inside (`PERFUSION_BIN`).
    Perfusion,
    /// The shim inside the daemon's library that the tests are linked with (`PERFUSION_SHIM` when
    /// they were built).
    Shim,
    /// A runtime and the C# compiler.
    Clr(Runtime),
    /// What single-file programs of a runtime are made of, and the C# compiler.
    SingleFile(Runtime),
    /// Programs that an SDK has published ([`published`]): they are there only where a copy lies
    /// beside the checkout.
    Published,
    /// .NET 11, and a compiler that knows its own async methods.
    RuntimeAsync,
    /// A C compiler (`gcc`).
    C,
    /// The Go tool chain.
    Go,
    /// A program on PATH.
    Program(&'static str),
    /// A mounted cgroup v2 hierarchy.
    Cgroup2,
    /// A file, such as a program that is not on everybody's PATH.
    File(&'static str),
}

impl Need {
    /// True for what a machine may lack although setup ran: its tests are skipped even where
    /// `PERFUSION_TESTS_REQUIRED=1` makes other missing needs a failure.
    fn optional(self) -> bool {
        matches!(
            self,
            Self::Clr(Runtime::Net11 | Runtime::Net11Musl) | Self::Published | Self::RuntimeAsync
        )
    }

    /// Why this need is not met here, or `None`.
    pub fn missing(self) -> Option<String> {
        match self {
            Self::Root => (!rustix::process::geteuid().is_root()).then(|| "needs root".to_owned()),
            Self::Btf => (!Path::new("/sys/kernel/btf/vmlinux").exists())
                .then(|| "the kernel has no BTF (/sys/kernel/btf/vmlinux)".to_owned()),
            Self::Perfusion => perfusion_bin()
                .is_none()
                .then(|| "PERFUSION_BIN names no perfusion binary".to_owned()),
            Self::Shim => match perfusion_artefacts::provide_from_environment() {
                Err(error) => Some(format!("PERFUSION_SHIM: {error}")),
                Ok(()) => perfusion_artefacts::shim()
                    .is_none()
                    .then(|| "PERFUSION_SHIM names no shim".to_owned()),
            },
            Self::Clr(runtime) => {
                let there = match runtime {
                    Runtime::Net10Musl => runtime.single_file(),
                    _ => runtime.dotnet(),
                };
                if self.optional() && there.is_none() {
                    Some(format!(
                        "{runtime} is in no package registry, and no copy lies beside the checkout"
                    ))
                } else if there.is_none() {
                    Some(format!("no {runtime} below PERFUSION_DOTNET_ROOTS"))
                } else if csc().is_none() {
                    Some("PERFUSION_CSC names no C# compiler".to_owned())
                } else {
                    None
                }
            }
            Self::SingleFile(runtime) => {
                let donor = runtime.single_file().is_none();
                let missing =
                    || format!("no single-file program of {runtime} in PERFUSION_DOTNET_ROOTS");
                Self::Clr(runtime).missing().or_else(|| donor.then(missing))
            }
            Self::Published => published("aot").is_none().then(|| {
                "no programs that an SDK has published lie beside the checkout".to_owned()
            }),
            Self::RuntimeAsync => Self::Clr(Runtime::Net11).missing().or_else(|| {
                let missing = || "no compiler of runtime async lies beside the checkout".to_owned();
                runtime_async_compiler().is_none().then(missing)
            }),
            Self::C => (!runs("gcc", "--version")).then(|| "no gcc".to_owned()),
            Self::Go => (!runs("go", "version")).then(|| "no go".to_owned()),
            Self::Cgroup2 => {
                cgroup2().is_none().then(|| "no cgroup v2 hierarchy is mounted".to_owned())
            }
            Self::File(path) => (!Path::new(path).exists()).then(|| format!("no {path}")),
            Self::Program(name) => (!runs(name, "--version")).then(|| format!("no {name}")),
        }
    }
}

/// The needs of every test that records.
pub const RECORD: &[Need] = &[Need::Root, Need::Btf, Need::Perfusion];

/// The needs of every test that records a .NET 9 application.
pub const RECORD_NET9: &[Need] =
    &[Need::Root, Need::Btf, Need::Perfusion, Need::Clr(Runtime::Net9)];

/// The needs of a test that records an application on `runtime`.
pub fn record_on(runtime: Runtime) -> Vec<Need> {
    [RECORD, &[Need::Clr(runtime)]].concat()
}

fn runs(program: &str, argument: &str) -> bool {
    Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success())
}

fn env_path(name: &str) -> Option<PathBuf> {
    env::var_os(name).map(PathBuf::from).filter(|path| path.exists())
}

/// Where the cgroup v2 hierarchy is mounted.
pub fn cgroup2() -> Option<PathBuf> {
    mounted(|kind, _| kind == "cgroup2")
}

/// Where the cgroup v1 hierarchy of a controller is mounted.
pub fn cgroup1(controller: &str) -> Option<PathBuf> {
    mounted(|kind, options| {
        kind == "cgroup" && options.split(',').any(|option| option == controller)
    })
}

/// Where the first file system of that type, with these options, is mounted.
fn mounted(fits: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (folder, kind, options) = (words.next()?, words.next()?, words.next()?);
        fits(kind, options).then(|| PathBuf::from(folder))
    })
}

/// The `perfusion` binary under test.
pub fn perfusion_bin() -> Option<PathBuf> {
    env_path("PERFUSION_BIN")
}

/// The C# compiler: a program called as `csc OUT.dll SOURCE.cs…`.
pub fn csc() -> Option<PathBuf> {
    env_path("PERFUSION_CSC")
}

/// The program `Work` as an SDK has published it: as `aot`, `aotes`, `single` or `trim`.
pub fn published(way: &str) -> Option<PathBuf> {
    let program = env_path("PERFUSION_DOTNET_ROOTS")?.join("published").join(way).join("Work");
    program.exists().then_some(program)
}

/// The source of that program.
pub fn published_source() -> Option<PathBuf> {
    let source = env_path("PERFUSION_DOTNET_ROOTS")?.join("published/Work.cs");
    source.exists().then_some(source)
}

/// The C# compiler that knows .NET 11's own async methods: an assembly that .NET 11 runs.
pub fn runtime_async_compiler() -> Option<PathBuf> {
    let compiler = env_path("PERFUSION_DOTNET_ROOTS")?.join("csc-14/csc.dll");
    compiler.exists().then_some(compiler)
}

/// The directory `tests/` of the sources.
pub fn sources() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where compiled workloads are kept between runs.
pub fn cache_dir() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| sources().join("../target"), |dir| sources().join("..").join(dir));
    target.join("workloads")
}

/// True when the long forms of the tests are asked for (`PERFUSION_TESTS_LONG=1`): the durations
/// and counts the promises are stated with, instead of the shortest the statistics allow.
pub fn long_form() -> bool {
    env::var_os("PERFUSION_TESTS_LONG").is_some_and(|value| value == "1")
}

/// Begins the test `name`, which needs the machine to itself, because it measures time or looks at
/// all of the machine: waits for its turn and checks its needs. `None` means skip (said on stderr).
///
/// # Panics
/// When a need is missing and `PERFUSION_TESTS_REQUIRED=1`: in CI a skipped test is a failed one.
pub fn begin(name: &str, needs: &[Need]) -> Option<Turn> {
    begin_with(name, needs, Sort::Alone)
}

/// Begins the test `name`, whose subject is one process of its own, on a machine that may be busy:
/// a few of these run at a time. They spend most of their time waiting for what they record.
/// Otherwise as [`begin`].
///
/// # Panics
/// As [`begin`].
pub fn begin_beside(name: &str, needs: &[Need]) -> Option<Turn> {
    begin_with(name, needs, Sort::Beside)
}

fn begin_with(name: &str, needs: &[Need], sort: Sort) -> Option<Turn> {
    let missing: Vec<(bool, String)> =
        needs.iter().filter_map(|need| Some((need.optional(), need.missing()?))).collect();
    if !missing.is_empty() {
        let reasons: Vec<&str> = missing.iter().map(|(_, reason)| reason.as_str()).collect();
        if missing.iter().all(|&(optional, _)| optional) {
            say(&format!("SKIPPED {name}: {}", reasons.join("; ")));
        } else {
            skip(name, &reasons.join("; "));
        }
        return None;
    }
    tell_failures_at_once();
    turn::take(name, sort)
}

/// Says that the test `name` is skipped, for a need that is not met: also where that shows only
/// once it has begun.
///
/// # Panics
/// When `PERFUSION_TESTS_REQUIRED=1`: in CI a skipped test is a failed one.
pub fn skip(name: &str, reason: &str) {
    let required = env::var_os("PERFUSION_TESTS_REQUIRED").is_some_and(|value| value == "1");
    assert!(!required, "{name} cannot run: {reason}");
    say(&format!("SKIPPED {name}: {reason}"));
}

/// Has a failing test's words beside its name as well, past the capture of the test runner, which
/// keeps them for the end of the log.
fn tell_failures_at_once() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |failure| {
            say(&format!("FAILING: {failure}"));
            others(failure);
        }));
    });
}

/// Says that the test `name` is left to the long form.
pub fn only_in_the_long_form(name: &str) {
    say(&format!("SKIPPED {name}: in the long form only (cargo xtask test --long)"));
}

/// One test per runtime from a function that takes a [`Runtime`]: `on_runtimes!(names_are_complete:
/// net8 Net8, net10 Net10; long: net9 Net9)` makes `names_are_complete::net8` and so on, so that
/// one runtime's failure or absence hides no other's result. Those after `long` are left to the
/// long form: most often the one between the oldest and the newest.
#[macro_export]
macro_rules! on_runtimes {
    (
        $function:ident: $($test:ident $runtime:ident),+
        $(; long: $($late:ident $later:ident),+)?
    ) => {
        mod $function {
            $(
                #[test]
                fn $test() {
                    super::$function($crate::Runtime::$runtime);
                }
            )+
            $($(
                #[test]
                fn $late() {
                    if $crate::environment::long_form() {
                        super::$function($crate::Runtime::$later);
                    } else {
                        $crate::environment::only_in_the_long_form(
                            concat!(stringify!($function), "::", stringify!($late)),
                        );
                    }
                }
            )+)?
        }
    };
}
