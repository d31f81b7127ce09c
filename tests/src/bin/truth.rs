//! The program behind `cargo xtask truth`: `truth OUTPUT-FOLDER [--seconds N] [--repetitions N]
//! [WORKLOAD… | downsampling | published]`. Writes truth.md and truth.json there.
//! `truth OUTPUT-FOLDER memory [--windows N]` is another: known allocations. Writes memory.md and
//! memory.json. `truth OUTPUT-FOLDER leaks [--runs N] [--at-once N]`: verdicts on known leaks.
//! Writes leaks.md and leaks.json.

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use system_tests::bpf;
use system_tests::environment::{Need, RECORD, Runtime};
use system_tests::truth::measure::{Measured, Options};
use system_tests::truth::report::{Entry, broken_promises, json, markdown, picture};
use system_tests::truth::{
    allocations, cases, downsampling, live, measure, perf, published, verdicts,
};

/// The word on the command line for the test of downsampled waits.
const DOWNSAMPLING: &str = "downsampling";
/// The word for the test of one program that was published in several ways.
const PUBLISHED: &str = "published";
/// Recordings of downsampled waits: the promise is of 100.
const REPETITIONS: usize = 100;

/// Windows of known allocations: eight cells each, and the promise is of 2,000.
const WINDOWS: usize = 260;

/// Times a program with leaks is watched on each runtime, and how many at the same time: they
/// hardly need a CPU.
const RUNS: usize = 20;
const AT_ONCE: usize = 6;
/// How long each is watched.
const WATCHED: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds: f64 = option(&mut arguments, "--seconds")?.unwrap_or(10.0);
    let count: usize = option(&mut arguments, "--repetitions")?.unwrap_or(REPETITIONS);
    let windows: usize = option(&mut arguments, "--windows")?.unwrap_or(WINDOWS);
    let runs: usize = option(&mut arguments, "--runs")?.unwrap_or(RUNS);
    let at_once: usize = option(&mut arguments, "--at-once")?.unwrap_or(AT_ONCE);
    ensure!(
        !arguments.is_empty(),
        "usage: truth OUTPUT-FOLDER [--seconds N] [--repetitions N] \
         [WORKLOAD… | downsampling | published]"
    );
    let folder = PathBuf::from(arguments.remove(0));
    if arguments.first().is_some_and(|word| word == "memory") {
        return memory(&folder, windows);
    }
    if arguments.first().is_some_and(|word| word == "leaks") {
        return leaks(&folder, runs, at_once);
    }
    let missing: Vec<String> = RECORD.iter().filter_map(|need| need.missing()).collect();
    ensure!(missing.is_empty(), "{}", missing.join("; "));
    // Two words stand beside the workloads: other questions to other programs.
    let are_all = arguments.is_empty();
    let mut asks = |word: &str| {
        let before = arguments.len();
        arguments.retain(|argument| argument != word);
        are_all || arguments.len() < before
    };
    let (downsamples, publishes) = (asks(DOWNSAMPLING), asks(PUBLISHED));
    let has_cases = are_all || !arguments.is_empty();
    let cases = if has_cases { cases::chosen(&arguments)? } else { Vec::new() };
    let options = Options { length: Duration::from_secs_f64(seconds), frequency_hz: 1999 };
    let machine = machine()?;
    let _statistics = bpf::statistics()?;

    let mut entries = Vec::new();
    for case in cases {
        let skipped = case.need().missing();
        if let Some(reason) = &skipped {
            println!("SKIPPED {}: {reason}", case.name);
            entries.push(Entry {
                name: case.name,
                about: case.about,
                skipped,
                results: Vec::new(),
            });
            continue;
        }
        let results = match case.build() {
            Err(error) => vec![Err(format!("{error:#}"))],
            Ok(workload) => {
                let mut results = vec![
                    tell(&case.name, measure::attached(&workload, options)),
                    tell(&case.name, measure::launched(&workload, options)),
                ];
                if case.beside_perf() {
                    match perf::missing() {
                        Some(reason) => println!("SKIPPED {} beside perf: {reason}", case.name),
                        None => results.push(tell(&case.name, perf::attached(&workload, options))),
                    }
                }
                results
            }
        };
        for reason in results.iter().filter_map(|result| result.as_ref().err()) {
            println!("{}: {reason}", case.name);
        }
        entries.push(Entry { name: case.name, about: case.about, skipped, results });
    }
    fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let head = format!("Measured on {machine}, {} Hz, {seconds} s each.\n", options.frequency_hz);
    let mut text = head + &markdown(&entries);
    let mut values = json(&machine, &entries);
    if downsamples {
        let length = Duration::from_secs(3);
        let repetitions = downsampling::repeat(count, length)?;
        let section = downsampling::markdown(&repetitions, length);
        println!("{section}");
        text += &section;
        values["downsampling"] = downsampling::json(&repetitions);
    }
    if publishes {
        let all = published::measure_all()?;
        let section = published::markdown(&all);
        println!("{section}");
        text += &section;
        values["published"] = published::json(&all);
    }
    write(&folder.join("truth.md"), &text)?;
    write(&folder.join("truth.json"), &format!("{values:#}\n"))?;
    let failed = entries
        .iter()
        .filter(|entry| entry.skipped.is_none() && entry.results.iter().any(Result::is_err));
    let failed: Vec<&str> = failed.map(|entry| entry.name.as_str()).collect();
    ensure!(failed.is_empty(), "not measured: {}", failed.join(", "));
    Ok(())
}

/// Known allocations, on each runtime, the newest first: most of what is promised is promised for
/// it. What is measured is written at once: it takes long.
fn memory(folder: &std::path::Path, windows: usize) -> anyhow::Result<()> {
    let machine = machine()?;
    let mut text = format!("Measured on {machine}.\n");
    let mut values = serde_json::json!({"machine": machine});
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    for runtime in Runtime::ALL.into_iter().rev() {
        if let Some(reason) = Need::Clr(runtime).missing() {
            println!("SKIPPED {runtime}: {reason}");
            continue;
        }
        let (cells, steps) = allocations::measure(runtime, windows)?;
        let section = allocations::markdown(runtime, &cells)?
            + &allocations::markdown(runtime, &steps)?
                .replace("windows", "windows in step with the stride");
        let downsampled = match runtime {
            runtime if runtime >= Runtime::Net10 => {
                allocations::measure_downsampled(runtime, windows / 4)?
            }
            _ => Vec::new(),
        };
        let section = match downsampled.is_empty() {
            true => section,
            false => {
                section
                    + &allocations::markdown(runtime, &downsampled)?
                        .replace("windows", "windows, a part of the samples told")
            }
        };
        let alive = live::measure(runtime, windows * 2, allocations::ALL_SAMPLES)?;
        let section = section + &live::markdown(runtime, &alive)?;
        println!("{section}");
        text += &section;
        values[runtime.major().to_string()] = serde_json::json!({"known": allocations::json(&cells),
        "steps": allocations::json(&steps), "alive": live::json(&alive)});
        write(&folder.join("memory.md"), &text)?;
        write(&folder.join("memory.json"), &format!("{values:#}\n"))?;
    }
    Ok(())
}

/// Verdicts on programs with leaks, on each runtime.
fn leaks(folder: &std::path::Path, runs: usize, at_once: usize) -> anyhow::Result<()> {
    let machine = machine()?;
    let runtimes: Vec<Runtime> = Runtime::ALL
        .into_iter()
        .filter(|&runtime| Need::Clr(runtime).missing().is_none())
        .collect();
    ensure!(!runtimes.is_empty(), "no .NET runtime");
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    let all = verdicts::repeat(&runtimes, runs, at_once, WATCHED, &mut |said| {
        println!("{}: {:?}, {:?}", said.runtime, said.worth(), said.other_leaks);
        if !said.is_right() {
            println!("{}", said.text);
        }
    })?;
    let table = verdicts::markdown(&all, &runtimes, WATCHED)?;
    println!("{table}");
    let text = format!("Measured on {machine}, {at_once} programs at a time.\n{table}");
    write(&folder.join("leaks.md"), &text)?;
    let mut values = verdicts::json(&all, &runtimes)?;
    values["machine"] = machine.into();
    write(&folder.join("leaks.json"), &format!("{values:#}\n"))
}

/// Takes an option with its value out of the arguments.
fn option<T: FromStr<Err: Error + Send + Sync + 'static>>(
    arguments: &mut Vec<String>,
    name: &str,
) -> anyhow::Result<Option<T>> {
    let Some(at) = arguments.iter().position(|word| word == name) else { return Ok(None) };
    let value = arguments.get(at + 1).with_context(|| format!("{name} needs a number"))?;
    let value = value.parse().with_context(|| format!("{name} {value}: no number"))?;
    arguments.drain(at..at + 2);
    Ok(Some(value))
}

/// Says at once how it went: a whole run takes long.
fn tell(name: &str, result: anyhow::Result<Measured>) -> Result<Measured, String> {
    let measured = result.map_err(|error| format!("{error:#}"))?;
    let broken = broken_promises(&measured);
    let verdict = if broken.is_empty() { "as promised".to_owned() } else { broken.join("; ") };
    println!("{name}, {}: {verdict}\n{}", measured.mode.name(), picture(&measured));
    Ok(measured)
}

fn write(path: &std::path::Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Kernel, processor, and how busy the machine is with other things.
fn machine() -> anyhow::Result<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let release = Command::new("uname").arg("-r").output().context("uname")?;
    let load = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    Ok(format!(
        "Linux {}, {} × {}, load average before it began {}",
        String::from_utf8_lossy(&release.stdout).trim(),
        cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        model.map_or("unknown", |(_, name)| name),
        load.split(' ').next().unwrap_or_default()
    ))
}
