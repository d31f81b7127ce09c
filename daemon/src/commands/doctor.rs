//! `perfusion doctor`: what this machine, this user and this binary allow, tried one by one, with
//! what to do about each lack.

use super::output::unless_closed;
use crate::cli::exit;
use crate::error::Error;
use perfusion_artefacts as embedded;
use perfusion_dotnet::attach::shim_copy::write_copy_for_start;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::{
    MANY_OPEN_FILES, explain, needed_open_files, raise_open_files,
};
use perfusion_report::ReportError;
use perfusion_sources::kernel::features;
use perfusion_sources::kernel::{KernelError, KernelOptions, KernelSelection, KernelSource};
use serde::Serialize;
use std::io::{self, Write};

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    /// As needed.
    Good,
    /// Something can be recorded, with less in it.
    Limited,
    /// Nothing can be recorded.
    Bad,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorCheck {
    /// What was looked at.
    pub name: &'static str,
    /// How it ended.
    pub outcome: CheckOutcome,
    /// What was expected and found, and what to do; empty when good.
    pub message: String,
}

/// All checks, those that recording cannot do without first.
#[must_use]
pub fn checks() -> Vec<DoctorCheck> {
    // As a recording does before it begins.
    let open_files = raise_open_files();
    let mut all: Vec<DoctorCheck> = features::checks()
        .into_iter()
        .map(|(name, result)| {
            check(name, CheckOutcome::Bad, result.map_err(|error| error.to_string()))
        })
        .collect();
    let built = |part: Option<&[u8]>| {
        part.map(|_| ()).ok_or_else(|| {
            "this binary was built without it: build with `cargo xtask build`".to_owned()
        })
    };
    let probes_at = all.len();
    all.push(check("eBPF probes", CheckOutcome::Bad, built(embedded::probes())));
    all.push(check("shim for .NET", CheckOutcome::Limited, built(embedded::shim())));
    all.extend(features::limits(perfusion_dotnet::attach::helper::is_used()).into_iter().map(
        |(name, result)| {
            check(name, CheckOutcome::Limited, result.map_err(|limit| limit.to_string()))
        },
    ));
    let needed = needed_open_files();
    let lack = if open_files < needed { CheckOutcome::Bad } else { CheckOutcome::Limited };
    all.push(check("open files", lack, enough_open_files(open_files, needed)));
    if all.iter().all(|check| check.outcome != CheckOutcome::Bad) {
        all.insert(probes_at + 1, check("recording", CheckOutcome::Bad, recording()));
    }
    let counted = features::probes_time().map_err(|limit| limit.to_string());
    all.push(check("probes' CPU time", CheckOutcome::Limited, counted));
    all.push(check("placing the shim", CheckOutcome::Limited, placing()));
    all
}

fn check(name: &'static str, lack: CheckOutcome, result: Result<(), String>) -> DoctorCheck {
    match result {
        Ok(()) => DoctorCheck { name, outcome: CheckOutcome::Good, message: String::new() },
        Err(message) => DoctorCheck { name, outcome: lack, message },
    }
}

/// Starts what a recording starts, with the same numbers, on this process, and ends it.
fn recording() -> Result<(), String> {
    let options = KernelOptions {
        selection: KernelSelection::Pids(vec![std::process::id()]),
        ..KernelOptions::default()
    };
    KernelSource::start(&options).map(drop).map_err(|error| explain(&error))
}

fn enough_open_files(found: u64, needed: u64) -> Result<(), String> {
    if found >= MANY_OPEN_FILES {
        return Ok(());
    }
    if found < needed {
        return Err(KernelError::FewOpenFiles { needed, found }.to_string());
    }
    Err(format!(
        "RLIMIT_NOFILE: expected at least {MANY_OPEN_FILES} open files, found {found}, of which a \
         recording needs {needed}, and more with each process: with fewer, files of short-lived \
         processes may be gone before their functions have names; allow more (ulimit -n, \
         LimitNOFILE=)"
    ))
}

fn me() -> Result<ProcessHandle, String> {
    ProcessHandle::open(std::process::id())
        .map_err(|error| format!("/proc/self: {error}; mount /proc"))
}

/// Places a file as the shim is placed for `record -- CMD`, and removes it.
fn placing() -> Result<(), String> {
    let placed = write_copy_for_start(&me()?, b"").map_err(|error| error.to_string());
    placed.map(drop).map_err(|error| {
        format!("{error}; have one of these writable for you alone and not mounted noexec")
    })
}

/// Prints the checks as text or as one JSON array. True when recording can start.
///
/// # Errors
/// When `out` cannot be written.
pub fn print(json: bool, out: &mut dyn Write) -> io::Result<bool> {
    let all = checks();
    if json {
        serde_json::to_writer_pretty(&mut *out, &all)?;
        writeln!(out)?;
    } else {
        for check in &all {
            let outcome = match check.outcome {
                CheckOutcome::Good => "good",
                CheckOutcome::Limited => "limited",
                CheckOutcome::Bad => "BAD",
            };
            let line = format!("{outcome:<8}{:<18}{}", check.name, check.message);
            writeln!(out, "{}", line.trim_end())?;
        }
    }
    Ok(all.iter().all(|check| check.outcome != CheckOutcome::Bad))
}

/// `perfusion doctor`. Its exit code says whether recording can start.
///
/// # Errors
/// When the output cannot be written.
pub fn doctor(json: bool) -> Result<u8, Error> {
    match print(json, &mut io::stdout().lock()) {
        Ok(true) => Ok(0),
        Ok(false) => Ok(exit::NOT_PERMITTED),
        Err(error) => unless_closed(Err(error))
            .map(|()| exit::OTHER)
            .map_err(|error| Error::Report(ReportError::Write(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::{CheckOutcome, checks, print};

    #[test]
    fn each_lack_comes_with_advice() {
        for check in checks() {
            assert_eq!(check.outcome == CheckOutcome::Good, check.message.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn the_json_form_has_every_check() {
        let mut json = Vec::new();
        let can_record = print(true, &mut json).unwrap();
        let parsed: serde_json::Value = serde_json::from_slice(&json).unwrap();
        let bad = parsed.as_array().unwrap().iter().any(|check| check["outcome"] == "bad");
        assert_eq!(can_record, !bad);
    }
}
