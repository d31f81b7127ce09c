//! `perfusion leaks` on a program whose objects stay, or come and go, in known ways (`leaks.cs`):
//! is each verdict right, time after time?

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use profiler_protocol::counter::Counter;
use serde_json::{Value, json};

use crate::app::{App, Workload};
use crate::environment::Runtime;
use crate::perfusion::{Recording, SLACK, command};
use crate::region::{counted, regions};
use crate::wait_until;

/// The types of `leaks.cs`, what becomes of their objects, and the verdict that is right.
const PLACES: [(&str, &str, &str); 5] = [
    ("Fast", "200 objects of 10 KB a second stay", "leak"),
    ("Slow", "10 objects of 10 KB a second stay", "leak"),
    ("Cached", "1,000 objects of 10 KB, made anew every 5 s", "cache refreshed"),
    ("Pooled", "1,000 objects of 10 KB, made once", "steady"),
    (
        "Warming",
        "50 objects of 10 KB a second stay, until three quarters of the time are over",
        TOO_EARLY,
    ),
];
/// The verdict that claims nothing.
const TOO_EARLY: &str = "too early to tell";

/// A program and who watches it.
pub struct Watched {
    runtime: Runtime,
    app: App,
    watching: Recording,
}

/// What was said of a program.
#[derive(Clone, Debug)]
pub struct Said {
    /// The runtime.
    pub runtime: Runtime,
    /// Verdicts on each of [`PLACES`]; none where it was not mentioned, several where it was more
    /// than once.
    verdicts: [Vec<String>; PLACES.len()],
    /// Other types that were called leaks.
    pub other_leaks: Vec<String>,
    /// All of it.
    pub text: String,
}

/// What the verdict on a place was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// The one that is true.
    Right,
    /// It claims nothing, or there is none.
    TooEarly,
    /// Another one, or several.
    Wrong,
}

/// Starts the program and somebody who watches it for `length`. Returns once allocations are heard
/// of and the pool was made.
///
/// # Errors
/// When that does not come about.
pub fn start(runtime: Runtime, length: Duration) -> anyhow::Result<Watched> {
    let mut app =
        Workload::dotnet(runtime, "leaks", &[])?.arg(length.as_secs().to_string()).start()?;
    let watching = Recording::spawn(
        command(["leaks", "--duration", &format!("{}s", length.as_secs()), "--pid"])
            .arg(app.pid().to_string()),
    )?;
    let listened = wait_until("allocations to be listened to", SLACK, || {
        (counted(&regions(&app), Counter::AllocationSamples) > 0).then_some(())
    });
    ensure!(listened.is_ok(), "{}", watching.progress());
    app.perform("pool")?;
    Ok(Watched { runtime, app, watching })
}

impl Watched {
    /// Waits for the verdicts, and ends the program.
    ///
    /// # Errors
    /// When the watcher or the program fails.
    pub fn said(self) -> anyhow::Result<Said> {
        let text = self.watching.finish_well(SLACK * 8)?.stdout;
        let truth = self.app.stop()?;
        ensure!(truth["slow"].as_f64() > Some(0.0), "nothing leaked: {truth}");
        Ok(Said::read(self.runtime, text))
    }
}

impl Said {
    fn read(runtime: Runtime, text: String) -> Self {
        let mut said = Self {
            runtime,
            verdicts: Default::default(),
            other_leaks: Vec::new(),
            text: String::new(),
        };
        // `leak: Leaks.Fast[] at Leaks.Program.LeakFast() [leaks 4242]`
        for (verdict, place) in text.lines().filter_map(|line| line.split_once(": ")) {
            let type_name = place.split(" [").next().and_then(|place| place.split(" at ").next());
            let type_name = type_name.unwrap_or_default();
            let known = PLACES.iter().position(|(name, ..)| type_name == format!("Leaks.{name}[]"));
            match known.and_then(|at| said.verdicts.get_mut(at)) {
                Some(verdicts) => verdicts.push(verdict.to_owned()),
                None if verdict == "leak" => said.other_leaks.push(type_name.to_owned()),
                None => {}
            }
        }
        Self { text, ..said }
    }

    /// What each verdict was worth, in the order of the places.
    pub fn worth(&self) -> [Worth; PLACES.len()] {
        let mut worth = [Worth::Wrong; PLACES.len()];
        for ((worth, verdicts), (.., right)) in worth.iter_mut().zip(&self.verdicts).zip(PLACES) {
            *worth = match verdicts.as_slice() {
                [one] if one == right => Worth::Right,
                [one] if one == TOO_EARLY => Worth::TooEarly,
                [] => Worth::TooEarly,
                _ => Worth::Wrong,
            };
        }
        worth
    }

    /// True when all is right, and nothing else is called a leak.
    pub fn is_right(&self) -> bool {
        self.other_leaks.is_empty() && self.worth() == [Worth::Right; PLACES.len()]
    }
}

/// Watches `runs` programs on each of the runtimes for `length`, `at_once` at a time. `tell` is
/// given each result as it comes.
///
/// # Errors
/// When one cannot be watched.
pub fn repeat(
    runtimes: &[Runtime],
    runs: usize,
    at_once: usize,
    length: Duration,
    tell: &mut dyn FnMut(&Said),
) -> anyhow::Result<Vec<Said>> {
    let each: Vec<Runtime> = (0..runs).flat_map(|_| runtimes).copied().collect();
    let mut all = Vec::new();
    for together in each.chunks(at_once.max(1)) {
        let watched: Vec<Watched> = together
            .iter()
            .map(|&runtime| start(runtime, length))
            .collect::<anyhow::Result<_>>()?;
        for one in watched {
            let said = one.said()?;
            tell(&said);
            all.push(said);
        }
    }
    Ok(all)
}

fn of(all: &[Said], runtime: Runtime) -> impl Iterator<Item = &Said> {
    all.iter().filter(move |said| said.runtime == runtime)
}

fn count(all: &[Said], runtime: Runtime, at: usize, worth: Worth) -> usize {
    of(all, runtime).filter(|said| said.worth().get(at) == Some(&worth)).count()
}

/// A table of what was said.
///
/// # Errors
/// Never, but writing to text can by its type.
pub fn markdown(all: &[Said], runtimes: &[Runtime], length: Duration) -> anyhow::Result<String> {
    let mut text = format!("\n| `perfusion leaks` for {} s, of so many runs", length.as_secs());
    for &runtime in runtimes {
        write!(text, " | {runtime}: {}", of(all, runtime).count())?;
    }
    writeln!(text, " |\n|---|{}", "---|".repeat(runtimes.len()))?;
    for (at, (_, what, right)) in PLACES.into_iter().enumerate() {
        write!(text, "| {what}: *{right}*")?;
        for &runtime in runtimes {
            let [right, early, wrong] = [Worth::Right, Worth::TooEarly, Worth::Wrong]
                .map(|worth| count(all, runtime, at, worth));
            write!(text, " | {right} right, {early} too early to tell, {wrong} wrong")?;
        }
        writeln!(text, " |")?;
    }
    write!(text, "| other types, 24 MB a second of garbage among them, called a leak")?;
    for &runtime in runtimes {
        write!(text, " | {}", of(all, runtime).map(|said| said.other_leaks.len()).sum::<usize>())?;
    }
    writeln!(text, " |")?;
    Ok(text)
}

/// For machines.
///
/// # Errors
/// When there is a place without a name.
pub fn json(all: &[Said], runtimes: &[Runtime]) -> anyhow::Result<Value> {
    let mut values = json!({});
    for &runtime in runtimes {
        let mut places = json!({});
        for (at, (name, ..)) in PLACES.into_iter().enumerate() {
            places[name] = json!({
                "right": count(all, runtime, at, Worth::Right),
                "too_early": count(all, runtime, at, Worth::TooEarly),
                "wrong": count(all, runtime, at, Worth::Wrong),
            });
        }
        let others: Vec<&String> = of(all, runtime).flat_map(|said| &said.other_leaks).collect();
        places["other_leaks"] = json!(others);
        values[runtime.major().to_string()] = places;
    }
    values.is_object().then_some(values).context("no values")
}

#[cfg(test)]
mod tests {
    use super::{Said, Worth};
    use crate::Runtime;

    #[test]
    fn verdicts_are_read_from_what_is_printed() {
        let text = "25 moments in 120 s: 2 leaks, 1 caches, 1 steady, 0 too early to tell\n\n\
            leak: Leaks.Fast[] [leaks 7]\n  why     of 9: more\n\nleak: string[] [leaks 7]\n\n\
            too early to tell: Leaks.Slow[] [leaks 7]\n\nleak: Leaks.Cached[] [leaks 7]\n\n\
            steady: Leaks.Pooled[] [leaks 7]\n\nsteady: Leaks.Pooled[] [leaks 7]\n\nleak: \
             Leaks.Warming[] [leaks 7]\n";
        let said = Said::read(Runtime::Net8, text.to_owned());
        assert_eq!(
            said.worth(),
            [Worth::Right, Worth::TooEarly, Worth::Wrong, Worth::Wrong, Worth::Wrong]
        );
        assert_eq!(said.other_leaks, ["string[]"]);
    }
}
