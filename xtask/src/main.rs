//! Dispatch of `cargo xtask …`: every development command that is not plain cargo. Depends on no
//! member of the workspace but `ebpf-common`, so that it builds in seconds on a bare machine. What
//! a command does lives in the module of its name.

mod apiserver;
mod bench;
mod boot;
mod build;
mod ci;
mod collector;
mod demo;
mod deny;
mod documents;
mod exec;
mod fuzz;
mod helm;
mod image;
mod kernels;
mod modules;
mod monitoring;
mod package;
mod paths;
mod scale;
mod setup;
mod shim;
mod strip;
mod test;
mod tidy;
mod truth;

use std::{env, process::ExitCode};

use crate::{exec::StepLog, paths::WorkspacePaths};

const HELP: &str = "\
cargo xtask COMMAND

  run             set up, build, start the demo app, profile it for 10 s, show the profile (root)
  setup           install what `run` misses: eBPF toolchain; .NET and a C# compiler unless PATH \
     has an SDK; print versions
  build           eBPF object, shim and target/release/perfusion with both inside
  test [--long] [FILTER]
                  every test, system tests on the real kernel and CLRs included (root); --long \
     takes the full durations and counts
  fuzz [TARGET] [--executions N]
                  look for inputs that break a fuzz target, 10 million executions each unless told \
     (docs/fuzzing.md)
  kernels [5.10|6.1|6.12|newest]
                  boot Debian's kernels in qemu and record a program with known stacks on each \
     (root; docs/kernel-policy.md)
  boot [unit|pod|headroom|headroom-v1]
                  boot a Debian with systemd in qemu: install the package, use it under its unit, \
     purge it; run the chart's pod; heaps
                  surveyed where memory is short, by both versions of cgroups (root, an hour)
  bench [FIGURE [--write]]
                  measure what the profiler costs; writes docs/benchmarks.md, of one figure with \
     --write only (root)
  truth [--seconds N] [--repetitions N] [WORKLOAD… | downsampling | published]
                  how true profiles of programs with known stacks and times are; writes \
     docs/truth.md (root)
  memory [--windows N]
                  how true allocations and live objects of programs with known ones are; writes \
     the figures in docs/memory.md (root)
  collector       profiles sent to a real OpenTelemetry Collector, which is built first (root)
  leaks [--runs N] [--at-once N]
                  how often `perfusion leaks` is right about programs with known leaks; writes the \
     figures in docs/leaks.md (root)
  apiserver       the chart and the daemon against a real Kubernetes API server, which is built \
     first (root, 10 minutes)
  scale [PROCESSES CGROUPS RUNTIMES STARTS SECONDS]
                  what the daemon takes on a node with very many processes, some of which come and \
     go: 2000 200 50 100 60 unless told (root)
  soak [MINUTES]  how the daemon's memory grows while processes, .NET apps and recordings come and \
     go: an hour unless told (root)
  monitoring      alerts and dashboard by Prometheus' promtool, and beside a real Prometheus and a \
     real daemon (root)
  tidy [--fix]    rules no compiler checks: crate edges, first lines of files, documents locked to \
     code
  deny            dependencies by deny.toml, before a release: known faults too, whose database CI \
     does not reach
  helm [--fix]    lint the chart, compare what it renders with helm/rendered, check that against \
     Kubernetes' schemas
  image           the files of the container image in target/image, and whether they are all it \
     needs
  package [--install]
                  deb and rpm in target/packages; --install tries both in a Debian with nothing \
     else in it (root)
  ci              format, lints, docs, tidy, dependencies, no_std builds, chart, tests, a short \
     run of every fuzz target

Everything made lies below target/. PERFUSION_TOOLCHAIN names another folder for what setup \
     installs, so that checkouts can share it.
";

const SHORT: test::TestMode = test::TestMode { required: false, long: false, until: None };
const LONG: test::TestMode = test::TestMode { required: false, long: true, until: None };

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = WorkspacePaths::find().and_then(|paths| {
        let steps = StepLog::start();
        match words.as_slice() {
            ["run"] => demo::run(&paths, &steps),
            ["setup"] => setup::everything(&paths, &steps),
            ["build"] => build::build(&paths, &steps).map(|_| ()),
            ["test"] => test::test(&paths, &steps, None, SHORT),
            ["test", "--long"] => test::test(&paths, &steps, None, LONG),
            ["test", "--long", filter] => test::test(&paths, &steps, Some(filter), LONG),
            ["test", filter] => test::test(&paths, &steps, Some(filter), SHORT),
            ["fuzz"] => fuzz::fuzz(&paths, &steps, None, fuzz::LONG),
            ["fuzz", "--executions", count] => fuzz::fuzz(&paths, &steps, None, executions(count)?),
            ["fuzz", target] => fuzz::fuzz(&paths, &steps, Some(target), fuzz::LONG),
            ["fuzz", target, "--executions", count] => {
                fuzz::fuzz(&paths, &steps, Some(target), executions(count)?)
            }
            ["boot"] => boot::boot(&paths, &steps, None),
            ["boot", name] => boot::boot(&paths, &steps, Some(name)),
            ["kernels"] => kernels::kernels(&paths, &steps, None),
            ["kernels", version] => kernels::kernels(&paths, &steps, Some(version)),
            ["bench"] => bench::bench(&paths, &steps, None, true),
            ["bench", figure] => bench::bench(&paths, &steps, Some(figure), false),
            ["bench", figure, "--write"] => bench::bench(&paths, &steps, Some(figure), true),
            ["truth", arguments @ ..] => truth::truth(&paths, &steps, arguments),
            ["memory", arguments @ ..] => truth::memory(&paths, &steps, arguments),
            ["leaks", arguments @ ..] => truth::leaks(&paths, &steps, arguments),
            ["apiserver"] => apiserver::apiserver(&paths, &steps),
            ["scale", arguments @ ..] => scale::scale(&paths, &steps, arguments),
            ["soak", arguments @ ..] => scale::soak(&paths, &steps, arguments),
            ["monitoring"] => monitoring::monitoring(&paths, &steps),
            ["collector"] => collector::collector(&paths, &steps),
            ["tidy"] => tidy::tidy(&paths, &steps, false),
            ["tidy", "--fix"] => tidy::tidy(&paths, &steps, true),
            ["deny"] => deny::all(&paths, &steps),
            ["helm"] => helm::lint(&paths, &steps, false),
            ["helm", "--fix"] => helm::lint(&paths, &steps, true),
            ["image"] => image::image(&paths, &steps).map(|_| ()),
            ["package"] => package::package(&paths, &steps, false),
            ["package", "--install"] => package::package(&paths, &steps, true),
            ["ci"] => ci::ci(&paths, &steps),
            ["help" | "--help" | "-h"] => {
                print!("{HELP}");
                Ok(())
            }
            [] => Err(anyhow::anyhow!("no command given\n\n{HELP}")),
            other => Err(anyhow::anyhow!("unknown command `{}`\n\n{HELP}", other.join(" "))),
        }
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn executions(count: &str) -> anyhow::Result<u64> {
    count.parse().map_err(|_| anyhow::anyhow!("--executions {count}: expected a number"))
}
