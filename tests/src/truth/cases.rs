//! The workloads: what each is made from, what it needs, and what a reader must know about its
//! truth.

use crate::app::{Compiler, Workload};
use crate::environment::{Need, Runtime};
use crate::single_file::Packing;

/// One workload.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name in the report and on the command line.
    pub name: String,
    /// What its known stacks are.
    pub about: &'static str,
    recipe: Recipe,
}

type Environment = &'static [(&'static str, &'static str)];

#[derive(Clone, Copy, Debug)]
enum Recipe {
    Dotnet {
        runtime: Runtime,
        one_file: Option<Packing>,
        program: &'static str,
        environment: Environment,
    },
    Native {
        compiler: Compiler,
        file: &'static str,
        flags: &'static [&'static str],
    },
}

impl Case {
    /// What it needs beside what every recording needs.
    pub fn need(&self) -> Need {
        match self.recipe {
            Recipe::Dotnet { runtime, one_file: Some(_), .. } => Need::SingleFile(runtime),
            Recipe::Dotnet { runtime, .. } => Need::Clr(runtime),
            Recipe::Native { compiler: Compiler::Go, .. } => Need::Go,
            Recipe::Native { compiler, .. } => Need::Program(compiler.program()),
        }
    }

    /// True when the report shows it as `perf record -g` sees it too.
    pub fn beside_perf(&self) -> bool {
        self.name.starts_with("callheavy")
    }

    /// Compiles it.
    ///
    /// # Errors
    /// When a compiler fails.
    pub fn build(&self) -> anyhow::Result<Workload> {
        match self.recipe {
            Recipe::Native { compiler, file, flags } => Workload::compiled(compiler, file, flags),
            Recipe::Dotnet { runtime, one_file, program, environment } => {
                let workload = match one_file {
                    Some(packing) => Workload::single_file(runtime, program, packing)?,
                    None => Workload::dotnet(runtime, program, &[])?,
                };
                Ok(environment
                    .iter()
                    .fold(workload, |workload, (name, value)| workload.env(name, value)))
            }
        }
    }
}

/// Name, source file, compiler, flags, about.
type Native = (&'static str, &'static str, Compiler, &'static [&'static str], &'static str);

const C_CHAIN: &str = "8 functions from a loop to a tiny one, one of them with 8 arguments, one \
     with a frame of variable size; a thread that sleeps";

const NATIVE: [Native; 13] = [
    ("c-O0", "chain.c", Compiler::C, &["-O0", "-fno-omit-frame-pointer"], C_CHAIN),
    ("c-O1", "chain.c", Compiler::C, &["-O1", "-fno-omit-frame-pointer"], C_CHAIN),
    ("c-O2", "chain.c", Compiler::C, &["-O2", "-fno-omit-frame-pointer"], C_CHAIN),
    ("c-O3", "chain.c", Compiler::C, &["-O3", "-fno-omit-frame-pointer"], C_CHAIN),
    ("c-O0-nofp", "chain.c", Compiler::C, &["-O0", "-fomit-frame-pointer"], C_CHAIN),
    ("c-O1-nofp", "chain.c", Compiler::C, &["-O1", "-fomit-frame-pointer"], C_CHAIN),
    ("c-O2-nofp", "chain.c", Compiler::C, &["-O2", "-fomit-frame-pointer"], C_CHAIN),
    ("c-O3-nofp", "chain.c", Compiler::C, &["-O3", "-fomit-frame-pointer"], C_CHAIN),
    (
        "c++-throw",
        "throwing.cpp",
        Compiler::Cpp,
        &["-O2"],
        "work before a throw, in a destructor while unwinding, in the catch block",
    ),
    (
        "rust",
        "chain_rust.rs",
        Compiler::Rust,
        &["-O"],
        "5 functions from a loop to a tiny one, no frame pointers; a thread that sleeps",
    ),
    (
        "go",
        "chain_go.go",
        Compiler::Go,
        &[],
        "5 functions of a goroutine locked to its thread; another in a system call",
    ),
    ("musl", "chain.c", Compiler::MuslC, &["-O2"], C_CHAIN),
    ("musl-static", "chain.c", Compiler::MuslC, &["-O2", "-static"], C_CHAIN),
];

/// Program, environment, about.
type Dotnet = (&'static str, Environment, &'static str);

const DOTNET: [Dotnet; 13] = [
    ("callheavy", &[], "a loop over 10 tiny methods, Root > L1 > … > L8 > Tiny, tiered up"),
    ("recursion", &[], "work below 400 frames of one method, sleep below 350"),
    (
        "genericchain",
        &[],
        "generic methods of generic types over value types and over reference types (shared code)",
    ),
    ("asyncchain", &[], "async methods inside each other, and one that is continued from a queue"),
    (
        "exceptions",
        &[],
        "work before a throw, in a finally block on the way, in the catch block: the frames that \
         were left, the dispatcher and the funclets are all there",
    ),
    (
        "tailcalls",
        &[],
        "methods that leave by explicit tail calls, direct, virtual and through the runtime's \
         dispatcher: who left has no frame",
    ),
    ("gcheavy", &[], "two threads that allocate all the time"),
    (
        "readytorun",
        &[("DOTNET_TieredCompilation", "0")],
        "precompiled framework code between methods of the program, four times; the framework's \
         own frames there are only checked to be some",
    ),
    ("churn", &[], "new methods at tier 0 all the time"),
    ("dynamicmethods", &[], "methods made at run time, unloaded by the collector"),
    (
        "collectible",
        &[],
        "an assembly in a collectible load context that is loaded and unloaded again and again",
    ),
    ("threads500", &[], "500 threads, mostly asleep"),
    (
        "truthwaits",
        &[],
        "threads asleep, waiting for a lock and reading from a pipe; they know how long",
    ),
];

/// Those that are made one file with their runtime too: how their names begin then. There is no
/// host of .NET 8.
const IN_ONE_FILE: [(&str, &str, Packing, &str); 6] = [
    ("callheavy", "single-file", Packing::Plain, "callheavy in one file with its runtime"),
    ("exceptions", "single-file", Packing::Plain, "exceptions in one file with its runtime"),
    ("readytorun", "single-file", Packing::Plain, "readytorun in one file with its runtime"),
    ("readytorun", "compressed", Packing::Compressed, "the same, compressed in that file"),
    ("truthwaits", "single-file", Packing::Plain, "truthwaits in one file with its runtime"),
    ("truthwaits", "compressed", Packing::Compressed, "the same, compressed in that file"),
];

/// All workloads, in the report's order.
pub fn all() -> Vec<Case> {
    let mut cases: Vec<Case> = NATIVE
        .iter()
        .map(|&(name, file, compiler, flags, about)| Case {
            name: name.to_owned(),
            about,
            recipe: Recipe::Native { compiler, file, flags },
        })
        .collect();
    for (program, environment, about) in DOTNET {
        for runtime in Runtime::ALL {
            cases.push(Case {
                name: format!("{program}-{}", runtime.major()),
                about,
                recipe: Recipe::Dotnet { runtime, one_file: None, program, environment },
            });
        }
        for (_, kind, packing, about) in IN_ONE_FILE.into_iter().filter(|(of, ..)| *of == program) {
            for runtime in [Runtime::Net9, Runtime::Net10] {
                cases.push(Case {
                    name: format!("{kind}-{program}-{}", runtime.major()),
                    about,
                    recipe: Recipe::Dotnet {
                        runtime,
                        one_file: Some(packing),
                        program,
                        environment,
                    },
                });
            }
        }
    }
    cases
}

/// Those whose name begins with one of the words; all without words.
///
/// # Errors
/// Names the words that fit none.
pub fn chosen(words: &[String]) -> anyhow::Result<Vec<Case>> {
    let cases = all();
    for word in words {
        anyhow::ensure!(
            cases.iter().any(|case| case.name.starts_with(word.as_str())),
            "no workload is called `{word}…`: there are {}",
            cases.iter().map(|case| case.name.as_str()).collect::<Vec<_>>().join(", ")
        );
    }
    let fits = |case: &Case| {
        words.is_empty() || words.iter().any(|word| case.name.starts_with(word.as_str()))
    };
    Ok(cases.into_iter().filter(fits).collect())
}
