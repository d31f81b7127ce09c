//! `perfusion ps`: every process as the profiler sees it, what profiling it allows, and why not
//! more; where a daemon runs, what it has of it.

use super::output::unless_closed;
use crate::cli::PsArgs;
use crate::config::{LimitsConfig, load};
use crate::daemon::control;
use crate::daemon::processes::{DaemonProcess, ProcessesResponse};
use crate::error::{Error, say};
use perfusion_dotnet::attach::policy::{
    AttachObstacle, DetectedRuntime, Inspection, inspect, opted_out,
};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::name;
use perfusion_host::process::table::ProcessStatus;
use perfusion_model::text::clean;
use perfusion_sources::kernel::features;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::time::Duration;

/// A runtime that does not answer within this has its version left out.
const ASK_TIMEOUT: Duration = Duration::from_millis(300);

/// Why a process that the daemon does not record has nothing.
const UNSELECTED: &str = "not selected by the daemon's rules";

/// Bytes of a command line that are read, and characters of it that a line of the table has at
/// most.
const COMMAND_BYTES: u64 = 256;
const COMMAND_CHARACTERS: usize = 40;
/// The same of a service's and a process's name.
const NAME_CHARACTERS: usize = 30;

/// What the daemon of this host says.
pub enum DaemonAnswer {
    /// There is none.
    None,
    /// There is one that does not say anything of processes.
    Silent,
    /// It has said this.
    Told(ProcessesResponse),
}

impl DaemonAnswer {
    /// Whether a process may be asked something over its diagnostics socket. Where there is a
    /// daemon its rules and its owner's annotations say who is not to be touched, and it has
    /// touched those already in which it has a shim.
    fn lets_ask(&self) -> impl Fn(u32) -> bool {
        let with_shim: Option<HashSet<u32>> = match self {
            Self::None => None,
            Self::Silent => Some(HashSet::new()),
            Self::Told(answer) => {
                let with_shim = answer.processes.iter().filter(|told| told.shim);
                Some(with_shim.map(|told| told.standing.pid).collect())
            }
        };
        move |pid| with_shim.as_ref().is_none_or(|with_shim| with_shim.contains(&pid))
    }
}

/// One process.
#[derive(Clone, Debug, Serialize)]
pub struct ProcessRow {
    /// Pid in the initial namespace.
    pub pid: u32,
    /// Its name (`host::process::name`).
    pub name: String,
    /// Command line, arguments joined by spaces, at most 256 bytes; empty when it cannot be read.
    pub command: String,
    /// What runs its code.
    pub runtime: DetectedRuntime,
    /// Container id, if it runs in one.
    pub container: Option<String>,
    /// What a recording of it has.
    pub mode: ProfilingMode,
    /// Why it has no more, in words; what rules leave out of it included.
    pub why_not: Option<String>,
    /// What the daemon has of it, if one runs and has seen it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub daemon: Option<DaemonProcess>,
}

/// What a recording of a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProfilingMode {
    /// A shim is loaded: names, allocations and live objects.
    ShimLoaded,
    /// A shim can be attached.
    CanAttach,
    /// .NET without a shim: exact stacks, managed frames as addresses or by a perf map.
    WithoutNames,
    /// Native code: complete without a shim.
    Native,
    /// This user may not look at it.
    Unseen,
}

impl ProfilingMode {
    fn text(self) -> &'static str {
        match self {
            Self::ShimLoaded => "shim loaded",
            Self::CanAttach => "can attach",
            Self::WithoutNames => "no names",
            Self::Native => "native",
            Self::Unseen => "not seen",
        }
    }
}

/// All processes but the kernel's threads, managed ones first, then by pid.
///
/// # Errors
/// When `/proc` cannot be listed.
pub fn list(daemon: &DaemonAnswer) -> io::Result<Vec<ProcessRow>> {
    let pids = perfusion_host::process::all_pids()?.into_iter();
    let lets_ask = daemon.lets_ask();
    let mut rows: Vec<ProcessRow> = pids.filter_map(|pid| row(pid, lets_ask(pid))).collect();
    rows.sort_by_key(|row| {
        (matches!(row.runtime, DetectedRuntime::Native | DetectedRuntime::Unseen), row.pid)
    });
    Ok(rows)
}

/// `None` when the process is gone, a zombie, or a thread of the kernel.
fn row(pid: u32, may_be_asked: bool) -> Option<ProcessRow> {
    let target = ProcessHandle::open(pid).ok()?;
    if target.is_kernel_thread() || !target.is_alive() {
        return None;
    }
    // Asking means to connect to its diagnostics socket.
    let ask = (may_be_asked && matches!(opted_out(&target), Ok(false))).then_some(ASK_TIMEOUT);
    let Inspection { runtime, shim_loaded, why_not } = inspect(&target, ask).ok()?;
    let mode = match (&runtime, &why_not) {
        _ if shim_loaded => ProfilingMode::ShimLoaded,
        (DetectedRuntime::Unseen, _) => ProfilingMode::Unseen,
        (DetectedRuntime::Native | DetectedRuntime::NativeAot, _) => ProfilingMode::Native,
        (_, None) => ProfilingMode::CanAttach,
        (_, Some(_)) => ProfilingMode::WithoutNames,
    };
    // Being native is no lack.
    let why_not = why_not
        .filter(|why| *why != AttachObstacle::NotDotnet && mode != ProfilingMode::ShimLoaded);
    Some(ProcessRow {
        pid,
        name: name::of(&target),
        command: target.command_line(COMMAND_BYTES).unwrap_or_default(),
        runtime,
        container: target.container().ok().flatten(),
        mode,
        why_not: why_not.map(|why| why.to_string()),
        daemon: None,
    })
}

/// Adds what the daemon says of the same processes.
fn join(rows: &mut [ProcessRow], answer: ProcessesResponse) {
    let mut told: HashMap<u32, DaemonProcess> =
        answer.processes.into_iter().map(|told| (told.standing.pid, told)).collect();
    let unselected: HashMap<u32, u64> =
        answer.unselected.iter().map(|process| (process.pid, process.start_ticks)).collect();
    for row in rows {
        let now = || ProcessHandle::open(row.pid).and_then(|target| target.start_ticks()).ok();
        // The daemon may have seen another process with this pid.
        row.daemon = told.remove(&row.pid).filter(|told| told.standing.start_ticks == now());
        if unselected.get(&row.pid).is_some_and(|ticks| Some(*ticks) == now()) {
            // What else it could have does not matter then.
            row.why_not = Some(UNSELECTED.to_owned());
            continue;
        }
        let Some(told) = &row.daemon else { continue };
        if let Some(why) = &told.why_not {
            row.why_not.get_or_insert_with(|| why.clone());
        }
        if let Some(left_out) = left_out(told) {
            row.why_not = Some(
                row.why_not.take().map_or(left_out.clone(), |why| format!("{why}; {left_out}")),
            );
        }
    }
}

/// What rules leave out of a process, in words.
fn left_out(told: &DaemonProcess) -> Option<String> {
    let mut left_out = told.left_out.clone();
    if told.one_sample_in > 1 {
        left_out.push(format!("all but one in {} CPU samples", told.one_sample_in));
    }
    (!left_out.is_empty()).then(|| format!("left out by rules: {}", left_out.join(", ")))
}

/// Prints the list, as a table or as one JSON array. The note about what this user cannot see goes
/// to `notes`.
///
/// # Errors
/// When `/proc` cannot be listed or `out` not be written.
pub fn print(
    json: bool,
    daemon: DaemonAnswer,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> io::Result<()> {
    let mut rows = list(&daemon)?;
    if let DaemonAnswer::Told(answer) = daemon {
        for remark in &answer.remarks {
            writeln!(notes, "{remark}")?;
        }
        join(&mut rows, answer);
    }
    if json {
        serde_json::to_writer_pretty(&mut *out, &rows)?;
        writeln!(out)?;
    } else {
        table(&rows, out)?;
    }
    if let Some(hidden) = hidden() {
        writeln!(notes, "{hidden}")?;
    }
    let unseen = rows.iter().filter(|row| row.mode == ProfilingMode::Unseen).count();
    if unseen > 0 {
        let processes = if unseen == 1 { "process" } else { "processes" };
        writeln!(
            notes,
            "{unseen} {processes} cannot be looked at: {}.",
            AttachObstacle::NotPermitted
        )?;
    }
    Ok(())
}

/// That there may be processes which are not in the list, and why, in words.
fn hidden() -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let is_hidden = |pid: &u32| {
        let stat = std::fs::File::open(format!("/proc/{pid}/stat"));
        stat.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    };
    let closed = perfusion_host::process::all_pids()
        .unwrap_or_default()
        .iter()
        .filter(|pid| is_hidden(pid))
        .count();
    // Who may trace all processes sees them all, whatever the mount says (`has_pid_permissions`,
    // fs/proc/base.c).
    let sees_init = std::fs::read("/proc/1/stat").is_ok();
    let hides = hides_processes(&mounts).filter(|_| !sees_init || closed > 0);
    let others = "other users' processes are not listed: run perfusion as root, or with \
         CAP_SYS_PTRACE, or in the group of the mount's gid=";
    let by_mount = hides.map(|option| {
        let how_many = if closed > 0 { format!(" ({closed} of them)") } else { String::new() };
        format!("/proc is mounted with {option}: {others}{how_many}")
    });
    by_mount.or_else(|| {
        let own = std::fs::read_link("/proc/self/ns/pid").ok()?;
        (own.to_string_lossy() != features::INITIAL_PID_NAMESPACE).then(|| {
            "this is not the initial pid namespace: processes outside it are not listed; run with \
             hostPID: true or --pid=host"
                .to_owned()
        })
    })
}

/// The option of the mount at `/proc` that hides processes (proc(5)), as mountinfo has it. The last
/// mount there is the one in force.
fn hides_processes(mountinfo: &str) -> Option<&str> {
    let of_proc = |line: &&str| line.split(' ').nth(4) == Some("/proc");
    let line = mountinfo.lines().rfind(of_proc)?;
    let option =
        line.rsplit(' ').next()?.split(',').find(|option| option.starts_with("hidepid="))?;
    (!matches!(option, "hidepid=0" | "hidepid=off")).then_some(option)
}

/// A command line as the table has it. In a long one paths lose their directories first: what tells
/// .NET processes apart is the name of an assembly, which stands at the end of a long path.
fn fitting(command: &str) -> String {
    let fits = |text: &str| text.chars().count() <= COMMAND_CHARACTERS;
    if fits(command) {
        return command.to_owned();
    }
    let short = |word: &str| match word.rsplit_once('/') {
        Some((_, name)) if !name.is_empty() => format!("…/{name}"),
        _ => word.to_owned(),
    };
    let text = command.split(' ').map(short).collect::<Vec<_>>().join(" ");
    if fits(&text) {
        return text;
    }
    text.chars().take(COMMAND_CHARACTERS - 1).chain(['…']).collect()
}

/// What it costs the daemon: its part of one CPU since the daemon has known it.
fn cost(standing: &ProcessStatus) -> String {
    match standing.known_for_ms {
        0 => "-".to_owned(),
        ms => format!("{:.3}%", standing.cpu_us as f64 / 10.0 / ms as f64),
    }
}

fn table(rows: &[ProcessRow], out: &mut dyn Write) -> io::Result<()> {
    // What a daemon knows has columns only where one has spoken.
    let told = rows.iter().any(|row| row.daemon.is_some());
    let service_of = |row: &ProcessRow| {
        let service = row.daemon.as_ref().and_then(|told| told.standing.service.as_deref());
        // Any program may publish any name.
        service.map_or_else(
            || "-".to_owned(),
            |service| clean(service).chars().take(NAME_CHARACTERS).collect(),
        )
    };
    let widest = rows
        .iter()
        .map(|row| service_of(row).chars().count())
        .max()
        .unwrap_or(0)
        .max("SERVICE".len());
    let columns = |service: &str, stacks: &str, lost: &str, cost: &str| match told {
        true => format!("{service:<widest$}  {stacks:>9}  {lost:>7}  {cost:>7}  "),
        false => String::new(),
    };
    let name_of =
        |row: &ProcessRow| clean(&row.name).chars().take(NAME_CHARACTERS).collect::<String>();
    let wide = rows.iter().map(|row| name_of(row).chars().count()).max().unwrap_or(0).max(15);
    writeln!(
        out,
        "{:>7}  {:<wide$}  {:<22}  {:<12}  {:<11}  {}{:<COMMAND_CHARACTERS$}  WHY NOT MORE",
        "PID",
        "NAME",
        "RUNTIME",
        "CONTAINER",
        "MODE",
        columns("SERVICE", "STACKS", "LOST", "COST"),
        "COMMAND"
    )?;
    for row in rows {
        let container = row.container.as_deref().and_then(|id| id.get(..12)).unwrap_or("-");
        let command = fitting(&row.command);
        let figures = row.daemon.as_ref().map_or_else(
            || columns("-", "-", "-", "-"),
            |DaemonProcess { standing, shim_dropped, .. }| {
                let lost = standing.stacks_broken.saturating_add(*shim_dropped);
                columns(
                    &service_of(row),
                    &standing.stacks.to_string(),
                    &lost.to_string(),
                    &cost(standing),
                )
            },
        );
        let line = format!(
            "{:>7}  {:<wide$}  {:<22}  {container:<12}  {:<11}  \
             {figures}{command:<COMMAND_CHARACTERS$}  {}",
            row.pid,
            name_of(row),
            row.runtime.to_string(),
            row.mode.text(),
            row.why_not.as_deref().unwrap_or_default()
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// `perfusion ps`.
///
/// # Errors
/// When `/proc` cannot be listed or the output not be written.
pub fn ps(options: &PsArgs) -> Result<u8, Error> {
    let sources = load::ValueSources { file: options.config.clone(), flags: Vec::new() };
    let limits = match sources.load() {
        Ok(loaded) => loaded.config.limits,
        // One that was named is meant.
        Err(error) if options.config.is_some() => return Err(error.into()),
        // One that cannot be used is the daemon's trouble: it lies where it usually does, then.
        Err(_) => LimitsConfig::default(),
    };
    let path = control::path(&limits.kill_switch);
    let daemon = match control::ask(&path) {
        Ok(Some(answer)) => DaemonAnswer::Told(answer),
        Ok(None) => DaemonAnswer::None,
        Err(error) => {
            say(&format!("the daemon at {}: {error}", path.display()));
            DaemonAnswer::Silent
        }
    };
    let printed = print(options.json, daemon, &mut io::stdout().lock(), &mut io::stderr().lock());
    unless_closed(printed)
        .map_err(|source| Error::Internal { what: "listing processes", source })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::{
        COMMAND_CHARACTERS, DaemonAnswer, ProcessRow, ProfilingMode, UNSELECTED, cost, fitting,
        join, list, print, table,
    };
    use crate::daemon::processes::ProcessesResponse;

    /// All processes there are, while no other test has a socket like a runtime's.
    fn all() -> std::io::Result<Vec<ProcessRow>> {
        list(&DaemonAnswer::None)
    }

    #[test]
    fn the_mount_of_proc_says_whether_it_hides_processes() {
        let of = |options: &str| {
            let line = format!("23 28 0:21 / /proc rw,nosuid shared:12 - proc proc {options}");
            let others = "24 28 0:22 / /sys rw - sysfs sysfs rw";
            super::hides_processes(&format!("{others}\n{line}\n{others}\n")).map(str::to_owned)
        };
        assert_eq!(of("rw"), None);
        assert_eq!(of("rw,hidepid=off"), None);
        assert_eq!(of("rw,gid=4,hidepid=invisible").as_deref(), Some("hidepid=invisible"));
        assert_eq!(of("rw,hidepid=1").as_deref(), Some("hidepid=1"));
    }

    #[test]
    fn this_process_is_listed_as_native() {
        let rows = all().unwrap();
        let me = rows.iter().find(|row| row.pid == std::process::id()).unwrap();
        assert_eq!((me.mode, me.why_not.as_deref()), (ProfilingMode::Native, None));
    }

    #[test]
    fn what_rules_leave_out_is_a_reason_beside_others_and_a_pid_used_again_has_none() {
        let me = std::process::id();
        let ticks = perfusion_host::process::start_ticks(me).unwrap();
        let why_not = |ticks: u64, more: &str, unselected: &str, before: Option<&str>| {
            // As a daemon of an earlier version says it, and one of this.
            let told = format!(
                r#"{{"remarks":[],"processes":[{{"pid":{me},"start_ticks":{ticks},
                "is_clr":true,"stacks":1,"stacks_broken":0,"lookup_ms":0,
                "shim":false,"shim_dropped":0,"why_not":"it opted out"{more}}}]{unselected}}}"#
            );
            let answer: ProcessesResponse = serde_json::from_str(&told).unwrap();
            let mut rows: Vec<_> = all().unwrap().into_iter().filter(|row| row.pid == me).collect();
            rows[0].why_not = before.map(str::to_owned);
            join(&mut rows, answer);
            rows.remove(0).why_not
        };
        let out = r#","left_out":["waits","names"],"one_sample_in":8"#;
        assert_eq!(why_not(ticks, "", "", None).unwrap(), "it opted out");
        let said = "left out by rules: waits, names, all but one in 8 CPU samples";
        assert_eq!(why_not(ticks, out, "", None).unwrap(), format!("it opted out; {said}"));
        assert_eq!(why_not(ticks, out, "", Some("32-bit")).unwrap(), format!("32-bit; {said}"));
        assert_eq!(why_not(ticks + 1, out, "", None), None, "another process");
        let unselected =
            |ticks: u64| format!(r#","unselected":[{{"pid":{me},"start_ticks":{ticks}}}]"#);
        assert_eq!(why_not(ticks, out, &unselected(ticks), None).unwrap(), UNSELECTED);
        assert_eq!(why_not(ticks, "", &unselected(ticks + 1), None).unwrap(), "it opted out");
    }

    #[test]
    fn where_a_daemon_runs_nobody_is_asked_but_those_it_is_in() {
        let told = |shim: bool| {
            let told = format!(
                r#"{{"remarks":[],"processes":[{{"pid":7,"start_ticks":1,
                "is_clr":true,"stacks":1,"stacks_broken":0,"lookup_ms":0,
                "shim":{shim},"shim_dropped":0,"why_not":null}}]}}"#
            );
            DaemonAnswer::Told(serde_json::from_str(&told).unwrap())
        };
        let lets_ask = |daemon: DaemonAnswer, pid| daemon.lets_ask()(pid);
        assert!(lets_ask(DaemonAnswer::None, 7) && lets_ask(told(true), 7));
        assert!(
            !lets_ask(told(false), 7)
                && !lets_ask(told(true), 8)
                && !lets_ask(DaemonAnswer::Silent, 7)
        );
    }

    /// Two thousandths of a CPU for a minute; and a daemon of an earlier version says nothing.
    #[test]
    fn the_cost_is_a_part_of_one_cpu() {
        let me = std::process::id();
        let ticks = perfusion_host::process::start_ticks(me).unwrap();
        let told = |more: &str| {
            let told = format!(
                r#"{{"remarks":[],"processes":[{{"pid":{me},"start_ticks":{ticks},
                "is_clr":false,"stacks":7,"stacks_broken":1,"lookup_ms":20,
                "shim":false,"shim_dropped":0,"why_not":null{more}}}]}}"#
            );
            let mut rows: Vec<_> = all().unwrap().into_iter().filter(|row| row.pid == me).collect();
            join(&mut rows, serde_json::from_str(&told).unwrap());
            let mut text = Vec::new();
            table(&rows, &mut text).unwrap();
            (cost(&rows[0].daemon.as_ref().unwrap().standing), String::from_utf8(text).unwrap())
        };
        let (cost, text) = told(r#","records":90,"cpu_us":120000,"known_for_ms":60000"#);
        assert_eq!(cost, "0.200%");
        assert!(text.contains("   COST  ") && text.contains("  0.200%  "), "{text}");
        assert_eq!(told("").0, "-");
    }

    #[test]
    fn a_long_command_line_keeps_the_names_of_its_files() {
        assert_eq!(fitting("/usr/bin/dotnet app.dll"), "/usr/bin/dotnet app.dll");
        let long = "/usr/share/dotnet/dotnet /srv/applications/shop/bin/Release/MyShop.dll --urls";
        assert_eq!(fitting(long), "…/dotnet …/MyShop.dll --urls");
        let longer = fitting(&format!("{long} {}", "x".repeat(100)));
        assert!(
            longer.starts_with("…/dotnet …/MyShop.dll --urls xxx") && longer.ends_with("x…"),
            "{longer}"
        );
        assert_eq!(longer.chars().count(), COMMAND_CHARACTERS);
    }

    #[test]
    fn the_json_form_is_json_and_the_table_has_a_line_each() {
        let (mut json, mut table, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        print(true, DaemonAnswer::None, &mut json, &mut notes).unwrap();
        let parsed: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert!(!parsed.as_array().unwrap().is_empty());
        print(false, DaemonAnswer::None, &mut table, &mut notes).unwrap();
        let table = String::from_utf8(table).unwrap();
        assert!(table.contains(&format!("{:>7}  ", std::process::id())), "{table}");
    }
}
