//! What a machine said, and whether it is as it must be.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{OFF_CPU_SCANS, TestedKernel};

/// Functions of `three_threads.c` on the way to where its threads are.
const SPINS: [&str; 4] = ["spin_thread", "spin_outer", "spin_middle", "spin_inner"];
const WAITS: [&str; 3] = ["wait_thread", "wait_outer", "wait_inner"];
const ASLEEP: [&str; 3] = ["asleep_thread", "asleep_outer", "asleep_inner"];

/// What the machine said, by part.
#[derive(Debug, Default)]
pub(crate) struct MachineReport {
    parts: BTreeMap<String, ReportPart>,
}

#[derive(Debug, Default)]
pub(crate) struct ReportPart {
    pub(crate) lines: Vec<String>,
    pub(crate) exit: Option<i32>,
}

impl MachineReport {
    pub(crate) fn read(text: &str) -> MachineReport {
        let mut found = MachineReport::default();
        let mut current = String::new();
        for line in text.lines().map(|line| line.trim_end_matches('\r')) {
            match line.strip_prefix("@@ ").map(|said| (said, said.strip_prefix("exit "))) {
                Some((_, Some(code))) => {
                    found.parts.entry(current.clone()).or_default().exit = code.trim().parse().ok();
                }
                Some((part, None)) => part.clone_into(&mut current),
                None => found.parts.entry(current.clone()).or_default().lines.push(line.to_owned()),
            }
        }
        found
    }

    pub(crate) fn part(&self, name: &str) -> Result<&ReportPart> {
        self.parts.get(name).with_context(|| format!("it never came to `{name}`"))
    }

    /// The table's line; an error when something is not as it must be.
    pub(super) fn line(&self, expected: &TestedKernel) -> Result<String> {
        let kernel =
            self.part("kernel")?.lines.iter().find(|line| !line.is_empty()).context("no name")?;
        let (doctor, record) = (self.part("doctor")?, self.part("record")?);
        let lacks = lacks(doctor)?;
        if doctor.exit != Some(0) || record.exit != Some(0) {
            bail!(
                "doctor ended with {:?} ({lacks:?}), record with {:?}: {:?}",
                doctor.exit,
                record.exit,
                record.lines
            );
        }
        if !lacks.iter().map(|(name, _)| name).eq(expected.lacks) {
            bail!("doctor was expected to find {:?} lacking, and found {lacks:?}", expected.lacks);
        }
        // Who records is told the same.
        for (name, message) in &lacks {
            if !record.lines.iter().any(|line| line.strip_prefix("limited: ") == Some(message)) {
                bail!("record did not say that {name} is lacking: {:?}", record.lines);
            }
        }
        self.check_confined(expected)?;
        self.check_lockdown()?;
        self.check_log()?;
        self.check_suspended()?;
        let cpu = self.part("samples")?.share(&SPINS);
        let waits = self.part("blocked")?.share(&WAITS);
        for (what, (whole, all)) in [("CPU samples", cpu), ("waits' time", waits)] {
            if all == 0 || (all - whole) * 1000 > all {
                bail!("{whole} of {all} of the {what} are under their whole stack");
            }
        }
        let (least, most) = self.check_times()?;
        let slept = self.part("blocked")?.share(&ASLEEP);
        let dump = self.part("dump")?;
        let has = |text: &str| dump.lines.iter().any(|line| line.contains(text));
        let (asleep, dumped) = if expected.lacks.contains(&OFF_CPU_SCANS) {
            if slept.1 != 0 || dump.exit != Some(4) || !has("it takes Linux 5.18 or newer") {
                bail!(
                    "sleeper's stack {slept:?}, dump ended with {:?}: {:?}",
                    dump.exit,
                    dump.lines
                );
            }
            ("its time", "refused, exit code 4")
        } else {
            let dumped =
                ["asleep_inner", "asleep_outer", "wait_outer", "spin_inner"].into_iter().all(has);
            if slept.0 == 0 || dump.exit != Some(0) || !dumped {
                bail!(
                    "sleeper's stack {slept:?}, dump ended with {:?}: {:?}",
                    dump.exit,
                    dump.lines
                );
            }
            ("whole", "whole")
        };
        let names: Vec<&str> = lacks.iter().map(|(name, _)| name.as_str()).collect();
        Ok(format!(
            "| {kernel} | {} | {} of {} | {} | within {} µs | {asleep} | {dumped} |\n",
            if names.is_empty() {
                "lacks nothing".to_owned()
            } else {
                format!("lacks {}", names.join(", "))
            },
            cpu.0,
            cpu.1,
            percent(waits),
            (most - least).div_ceil(1000),
        ))
    }

    /// The probes' own log loads with the probes.
    fn check_log(&self) -> Result<()> {
        let log = self.part("log")?;
        let told = ["probes: waits begin", "probes: CPU samples begin"]
            .into_iter()
            .all(|what| log.lines.iter().any(|line| line.contains(what)));
        if log.exit != Some(0) || !told {
            bail!("the probes' log ended with {:?}: {:?}", log.exit, log.lines);
        }
        Ok(())
    }

    /// Without the capability to allow itself more locked memory. `doctor` tries a recording, so
    /// both end alike.
    fn check_confined(&self, expected: &TestedKernel) -> Result<()> {
        let doctor = self.part("confined")?;
        let lacks = lacks(doctor)?;
        let told = lacks
            .iter()
            .any(|(name, text)| name == "locked memory" && text.contains("CAP_SYS_RESOURCE"));
        let record = self.part("confined record")?;
        let exit = if expected.locked_maps { 4 } else { 0 };
        let named = record.lines.iter().any(|line| line.contains("LimitMEMLOCK"));
        if [told, named] != [expected.locked_maps; 2]
            || (doctor.exit, record.exit) != (Some(exit), Some(exit))
        {
            bail!(
                "without CAP_SYS_RESOURCE doctor ended with {:?}: {lacks:?}, record with {:?}: \
                 {:?}",
                doctor.exit,
                record.exit,
                record.lines
            );
        }
        Ok(())
    }

    /// Locked down, first as far as is no hindrance (`integrity`), then so far that eBPF may not
    /// read memory.
    fn check_lockdown(&self) -> Result<()> {
        let (allowed, locked) = (self.part("integrity")?, self.part("confidentiality")?);
        let doctor = self.part("confidentiality doctor")?;
        let named = |part: &ReportPart| {
            part.lines.iter().any(|line| line.contains("lockdown=confidentiality"))
        };
        if allowed.exit != Some(0) || named(self.part("integrity doctor")?) {
            bail!(
                "under lockdown's integrity record ended with {:?}: {:?}",
                allowed.exit,
                allowed.lines
            );
        }
        if (locked.exit, doctor.exit) != (Some(4), Some(4)) || !named(locked) || !named(doctor) {
            bail!(
                "under lockdown's confidentiality record ended with {:?}: {:?}; doctor with {:?}: \
                 {:?}",
                locked.exit,
                locked.lines,
                doctor.exit,
                doctor.lines
            );
        }
        Ok(())
    }

    /// The clock was set back by years and the machine slept for seconds while it recorded: each
    /// thread has the time by the clock that does both not.
    fn check_suspended(&self) -> Result<()> {
        let recorded = self.part("slept")?;
        let (before, after) = (self.part("before sleep")?, self.part("after sleep")?);
        let since = |part: &ReportPart| Some((part.told().0, part.value("monotonic")?));
        let (Some((up, awake)), Some((up_after, awake_after))) = (since(before), since(after))
        else {
            bail!("no clocks: {before:?}, {after:?}");
        };
        let (all, awake) = (up_after.saturating_sub(up), awake_after.saturating_sub(awake));
        let asleep = all.saturating_sub(awake);
        if asleep < SLEPT_NS {
            bail!("it did not sleep: {all} ns passed, it was awake for {awake} of them");
        }
        let columns = self.columns("slept ")?;
        let sums: Vec<u64> = columns.values().map(|of| of.iter().sum()).collect();
        let whole = |sum: &u64| (SHORT_NS..SHORT_NS + asleep / 2).contains(sum);
        if recorded.exit != Some(0) || sums.len() != 4 || !sums.iter().all(whole) {
            bail!(
                "while the machine slept record ended with {:?}: {:?}; the times of its threads \
                 add up to {sums:?} ns, it slept for {asleep}",
                recorded.exit,
                recorded.lines
            );
        }
        Ok(())
    }

    /// Each thread's times against the kernel's own account: of a part of the recording, of which
    /// they have at least as much, and of all the time around it, of which they have no more.
    /// Answers the least and the most that one thread's add up to.
    fn check_times(&self) -> Result<(u64, u64)> {
        let columns = self.columns("")?;
        let sums = columns.values().map(|of| of.iter().sum::<u64>());
        let (least, most) = (sums.clone().min().unwrap_or(0), sums.max().unwrap_or(0));
        let (within, around) =
            (self.told("from within", "until within")?, self.told("before", "after")?);
        let (from, to) = (RECORDED_NS, around.0 + SLACK_NS);
        if columns.len() != 4 || (most - least) * 1000 > most || least < from || most > to {
            bail!(
                "the times of {} threads, of 4 that lived through it all, add up to {least} to \
                 {most} ns; that should be {from} to {to}",
                columns.len()
            );
        }
        for ((tid, &[cpu, runnable, blocked]), role) in columns.iter().zip(ROLES) {
            let kernels = |told: &SchedstatReading| {
                told.1.get(tid).copied().context("a thread has no schedstat")
            };
            let ([ran, waited], [ran_at_most, waited_at_most]) =
                (kernels(&within)?, kernels(&around)?);
            let sum = cpu + runnable + blocked;
            let sleeps = if role == SPINNER {
                blocked <= SLACK_NS
            } else {
                blocked + sum / 10 >= sum.saturating_sub(ran_at_most + waited_at_most)
            };
            // A CPU that runs nothing of the thread that has it, as for an interrupt, makes that
            // thread wait as well, but not by the kernel's account.
            if !sleeps
                || !(ran..=ran_at_most + 2 * SLACK_NS).contains(&(cpu + SLACK_NS))
                || runnable + SLACK_NS < waited
            {
                bail!(
                    "thread {tid} ({role}) ran for {cpu} ns, waited {runnable} for a CPU and \
                     {blocked} for something else; by its schedstat it ran for {ran} \
                     and waited {waited} for a CPU in a part of that time, and ran for \
                     {ran_at_most} and waited {waited_at_most} in all of it and more"
                );
            }
        }
        Ok((least, most))
    }

    /// Each thread's time on a CPU, without one, and asleep.
    fn columns(&self, of: &str) -> Result<BTreeMap<u32, [u64; 3]>> {
        let mut threads: BTreeMap<u32, [u64; 3]> = BTreeMap::new();
        for (column, part) in ["cpu", "runnable", "blocked"].into_iter().enumerate() {
            for line in &self.part(&format!("{of}{part}"))?.lines {
                let Some((stack, value)) = line.rsplit_once(' ') else { continue };
                let Some((thread, _)) = stack.split_once(';') else { continue };
                let (Ok(thread), Ok(value)) = (thread.parse(), value.parse::<u64>()) else {
                    continue;
                };
                if let Some(sum) = threads.entry(thread).or_default().get_mut(column) {
                    *sum += value;
                }
            }
        }
        Ok(threads)
    }

    /// What passed between two parts by the kernel's account.
    fn told(&self, from: &str, to: &str) -> Result<SchedstatReading> {
        let (from, to) = (self.part(from)?.told(), self.part(to)?.told());
        let mut threads = BTreeMap::new();
        for (tid, after) in to.1 {
            let before = from.1.get(&tid).copied().context("a thread has no schedstat")?;
            let since = |column: usize| {
                let of = |told: &[u64; 2]| told.get(column).copied().unwrap_or(0);
                of(&after).saturating_sub(of(&before))
            };
            threads.insert(tid, [since(0), since(1)]);
        }
        Ok((to.0.saturating_sub(from.0), threads))
    }
}

/// How long it records at least.
const RECORDED_NS: u64 = 10_000_000_000;

/// The same where it sleeps meanwhile, and how long it sleeps at least.
const SHORT_NS: u64 = 5_000_000_000;
const SLEPT_NS: u64 = 2_000_000_000;

/// By how much two of the kernel's accounts may be apart: that of a thread that runs is brought up
/// to date at ticks, and `/proc/uptime` has two decimals.
const SLACK_NS: u64 = 100_000_000;

/// The threads of `three_threads.c` in the order they are made.
const ROLES: [&str; 4] = ["main", SPINNER, "waiter", "sleeper"];
const SPINNER: &str = "spinner";

/// Nanoseconds, and by thread those it ran and those it waited for a CPU
/// (`/proc/PID/task/TID/schedstat`).
type SchedstatReading = (u64, BTreeMap<u32, [u64; 2]>);

fn percent((part, all): (u64, u64)) -> String {
    format!("{} ‰ of {} ms", part * 1000 / all.max(1), all / 1_000_000)
}

/// What `doctor --json` finds missing: its checks, and what they say.
fn lacks(doctor: &ReportPart) -> Result<Vec<(String, String)>> {
    let json = doctor.lines.join("\n");
    let from = json.find('[').context("doctor printed no JSON")?;
    let to = json.rfind(']').context("doctor printed no JSON")?;
    let checks: Vec<Value> =
        serde_json::from_str(json.get(from..=to).unwrap_or_default()).context("doctor's JSON")?;
    let bad = checks.iter().filter(|check| check["outcome"] != "good");
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    Ok(bad.map(|check| (text(check, "name"), text(check, "message"))).collect())
}

impl ReportPart {
    /// The number behind a word.
    fn value(&self, name: &str) -> Option<u64> {
        self.lines.iter().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    /// Time since boot, and the account of each thread.
    fn told(&self) -> SchedstatReading {
        let mut told = SchedstatReading::default();
        for line in &self.lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["up", seconds] => {
                    let hundredths: u64 = seconds.replace('.', "").parse().unwrap_or(0);
                    told.0 = hundredths * 10_000_000;
                }
                [tid, ran, waited, _] => {
                    if let (Ok(tid), Ok(ran), Ok(waited)) =
                        (tid.parse(), ran.parse(), waited.parse())
                    {
                        told.1.insert(tid, [ran, waited]);
                    }
                }
                _ => {}
            }
        }
        told
    }

    /// Of the folded stacks with one of the functions of `chain` in them, the values of those that
    /// have the chain from its first function on, unbroken (a sample may have met any of them as
    /// the innermost), and of all.
    fn share(&self, chain: &[&str]) -> (u64, u64) {
        let mut share = (0, 0);
        for line in &self.lines {
            let Some((stack, value)) = line.rsplit_once(' ') else { continue };
            let there: Vec<&str> = stack.split(';').filter(|frame| chain.contains(frame)).collect();
            let Some(value) = value.parse::<u64>().ok().filter(|_| !there.is_empty()) else {
                continue;
            };
            share.1 += value;
            let whole = chain.starts_with(&there)
                && stack.contains(&there.join(";"))
                && !stack.contains("guessed");
            share.0 += if whole { value } else { 0 };
        }
        share
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OFF_CPU_SCANS, TestedKernel};
    use super::MachineReport;

    /// What a machine says of which `doctor` finds lacking what is given, as JSON.
    fn log(samples: &str, record: &str, lacks: &str) -> String {
        let limited = if lacks.is_empty() { "" } else { "limited: too old\r\n" };
        let asleep = if lacks.is_empty() {
            "4;x;asleep_thread;asleep_outer;asleep_inner;pause"
        } else {
            "4;[waiting]"
        };
        let dump = if lacks.is_empty() {
            "spin_inner\r\nwait_outer\r\nasleep_outer\r\nasleep_inner\r\n@@ exit 0"
        } else {
            "it takes Linux 5.18 or newer\r\n@@ exit 4"
        };
        let told = |part: &str, seconds: u64| {
            let spun = seconds * 900_000_000;
            let waited = seconds * 90_000_000;
            format!(
                "@@ {part}\r\nup {seconds}.00\r\n1 5 5 1\r\n2 {spun} {waited} 9\r\n3 5 5 1\r\n4 5 \
                 5 1\r\n"
            )
        };
        let told = [
            told("before", 20),
            told("from within", 22),
            told("until within", 29),
            told("after", 34),
        ];
        format!(
            "@@ kernel\r\n6.1.0-52-amd64\r\n@@ exit 0\r\n@@ doctor\r\n[{lacks}]\r\n@@ exit 0\r\n\
             @@ confined\r\n[{lacks}]\r\n@@ exit 0\r\n@@ confined record\r\n@@ exit 0\r\n\
             @@ log\r\nprobes: CPU samples begin\r\nprobes: waits begin\r\n@@ exit 0\r\n{}@@ \
             record\r\n{limited}@@ exit {record}\r\n\
             @@ samples\r\n{samples}\r\n@@ exit 0\r\n\
             @@ cpu\r\n2;x;spin_thread 9000000000\r\n3;x;wait_thread 10000000\r\n@@ exit 0\r\n\
             @@ runnable\r\n2;x;spin_thread 1000000000\r\n@@ exit 0\r\n\
             @@ blocked\r\n1;[waiting] \
             10000001000\r\n3;x;wait_thread;wait_outer;wait_inner;nanosleep 9990000000\r\n\
             {asleep} 10000000000\r\n@@ exit 0\r\n@@ dump\r\n{dump}\r\n{}@@ end\r\n",
            told.concat(),
            asleep_and_locked(5),
        )
    }

    /// What it says of its sleep, of which a thread's times count so many seconds, and of lockdown.
    fn asleep_and_locked(counted: u64) -> String {
        let threads: String = (1..5).map(|tid| format!("{tid};x {counted}000000001\r\n")).collect();
        format!(
            "@@ before sleep\r\nup 10.00\r\nmonotonic 9000000000\r\n@@ after sleep\r\nup \
             20.00\r\nmonotonic 15000000000\r\n\
             @@ slept\r\n@@ exit 0\r\n@@ slept cpu\r\n@@ exit 0\r\n@@ slept runnable\r\n@@ exit \
             0\r\n@@ slept blocked\r\n{threads}@@ exit 0\r\n\
             @@ integrity doctor\r\n[]\r\n@@ exit 0\r\n@@ integrity\r\n@@ exit 0\r\n\
             @@ confidentiality doctor\r\nboot without lockdown=confidentiality\r\n@@ exit 4\r\n\
             @@ confidentiality\r\nboot without lockdown=confidentiality\r\n@@ exit 4\r\n"
        )
    }

    const GOOD: &str = "x;spin_thread;spin_outer;spin_middle;spin_inner 400";
    const WHOLE: TestedKernel =
        TestedKernel { version: "", prefix: "", lacks: &[], locked_maps: false };
    const OLD: TestedKernel = TestedKernel { lacks: &[OFF_CPU_SCANS], ..WHOLE };
    const SAID: &str =
        r#"{"name": "sleeping threads", "outcome": "limited", "message": "too old"}"#;

    #[test]
    fn a_stack_that_is_not_whole_is_told() {
        let line = MachineReport::read(&log(GOOD, "0", "")).line(&WHOLE).unwrap();
        assert_eq!(
            line,
            "| 6.1.0-52-amd64 | lacks nothing | 400 of 400 | 1000 ‰ of 9990 ms | within 1 µs | \
             whole | whole |\n"
        );
        let bad = format!("{GOOD}\r\nx;spin_middle;spin_inner 3");
        assert!(MachineReport::read(&log(&bad, "0", "")).line(&WHOLE).is_err());
        assert!(MachineReport::read(&log(GOOD, "1", "")).line(&WHOLE).is_err());
        assert!(MachineReport::read("").line(&WHOLE).is_err());
    }

    #[test]
    fn times_that_do_not_add_up_are_told() {
        let good = log(GOOD, "0", "");
        let told = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            MachineReport::read(&good.replace(from, to)).line(&WHOLE).unwrap_err().to_string()
        };
        let error = told("spin_thread 1000000000", "spin_thread 900000000");
        assert!(error.contains("4 threads"), "{error}");
        // They add up, but the time is in another column than the kernel has it in.
        let moved = |cpu: u64, runnable: u64, blocked: u64| {
            let (from, to) = ("2;x;spin_thread 9000000000", format!("2;x;spin_thread {cpu}"));
            let moved = good.replace(from, &to);
            let (from, to) = ("2;x;spin_thread 1000000000", format!("2;x;spin_thread {runnable}"));
            let moved = moved.replace(from, &format!("{to}\r\n@@ blocked\r\n2;x {blocked}"));
            MachineReport::read(&moved).line(&WHOLE).map_err(|error| error.to_string())
        };
        assert!(moved(9_000_000_000, 1_000_000_000, 0).is_ok());
        for (cpu, runnable, blocked) in [
            (0, 10_000_000_000, 0),
            (6_000_000_000, 4_000_000_000, 0),
            (9_900_000_000, 100_000_000, 0),
            (9_000_000_000, 0, 1_000_000_000),
        ] {
            let error = moved(cpu, runnable, blocked).unwrap_err();
            assert!(error.contains("thread 2 (spinner)"), "{error}");
        }
        let half =
            good.replace("wait_inner;nanosleep 9990000000", "wait_inner;nanosleep 4990000000");
        let half = half.replace("@@ runnable", "@@ runnable\r\n3;x 5000000000");
        let error = MachineReport::read(&half).line(&WHOLE).unwrap_err().to_string();
        assert!(error.contains("thread 3 (waiter)"), "{error}");
        // Less than was recorded, and more than has passed.
        assert!(told("up 34.00", "up 29.00").contains("4 threads"));
    }

    #[test]
    fn time_of_sleep_that_is_counted_and_a_lock_that_is_not_named_are_told() {
        let good = log(GOOD, "0", "");
        let told = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            MachineReport::read(&good.replace(from, to)).line(&WHOLE).unwrap_err().to_string()
        };
        assert!(
            told(&asleep_and_locked(5), &asleep_and_locked(9)).contains("while the machine slept")
        );
        assert!(told("monotonic 15000000000", "monotonic 19000000000").contains("did not sleep"));
        assert!(told("boot without lockdown=", "it has ").contains("confidentiality"));
        assert!(
            told("@@ integrity\r\n@@ exit 0", "@@ integrity\r\n@@ exit 4").contains("integrity")
        );
    }

    #[test]
    fn what_an_old_kernel_lacks_is_said_by_name_and_nothing_else_is_lacking() {
        let line = MachineReport::read(&log(GOOD, "0", SAID)).line(&OLD).unwrap();
        assert!(
            line.contains("lacks sleeping threads")
                && line.ends_with("| its time | refused, exit code 4 |\n")
        );
        assert!(MachineReport::read(&log(GOOD, "0", SAID)).line(&WHOLE).is_err());
        assert!(MachineReport::read(&log(GOOD, "0", "")).line(&OLD).is_err());
        let silent = log(GOOD, "0", SAID).replace("limited: too old", "");
        assert!(MachineReport::read(&silent).line(&OLD).is_err());
        let locked = TestedKernel { locked_maps: true, ..OLD };
        assert!(MachineReport::read(&log(GOOD, "0", SAID)).line(&locked).is_err());
    }
}
