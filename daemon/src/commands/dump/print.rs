//! A dump as text.

use super::{CodeAddress, DumpedState, DumpedThread, NoStack, Suspension, ThreadDump, WokenFrom};
use std::io::{self, Write};

/// Prints `dump`, a paragraph a thread; with `addresses` each frame has what `inspect unwind`
/// takes.
pub(super) fn text(dump: &ThreadDump, addresses: bool, out: &mut dyn Write) -> io::Result<()> {
    let count = dump.threads.len();
    writeln!(
        out,
        "{} (pid {}), {count} thread{}",
        dump.process,
        dump.pid,
        if count == 1 { "" } else { "s" }
    )?;
    if let Some(suspension) = &dump.suspension {
        writeln!(out, "{}", waits_for(suspension, &dump.threads))?;
    }
    for thread in &dump.threads {
        writeln!(out)?;
        writeln!(out, "{} \"{}\" ({}): {}", thread.tid, thread.name, thread.role, doing(thread))?;
        match thread.no_stack {
            None => {}
            Some(NoStack::NotMet) => {
                writeln!(out, "    [no stack: the thread was not sampled while it ran]")?
            }
            Some(NoStack::NotReached) => {
                writeln!(
                    out,
                    "    [no stack: the scan of waiting threads did not reach the thread]"
                )?;
            }
        }
        for frame in &thread.stack {
            write!(out, "    {}", frame.function)?;
            if let Some(module) = &frame.module {
                write!(out, "  [{module}]")?;
            }
            if let Some(CodeAddress { target, address }) = frame.code.as_ref().filter(|_| addresses)
            {
                write!(out, "  {target} {address}")?;
            }
            writeln!(out)?;
        }
    }
    Ok(())
}

/// Whom the runtime waits for.
fn waits_for(suspension: &Suspension, threads: &[DumpedThread]) -> String {
    let named: Vec<String> = threads
        .iter()
        .filter(|thread| suspension.held_up_by.contains(&thread.tid))
        .map(|thread| format!("{} \"{}\"", thread.tid, thread.name))
        .collect();
    match (suspension.pending, named.is_empty()) {
        (true, true) => "suspension: the runtime has not answered. It may wait for a thread that \
             cannot be stopped; this .NET version does not show \
                         which one"
            .to_owned(),
        (true, false) => format!(
            "suspension: pending. The runtime has not answered. It waits for threads in \
             cooperative mode: thread {}",
            named.join(", thread ")
        ),
        (false, _) => format!(
            "suspension: a collection, now or later, waits for threads that are blocked in \
             cooperative mode: thread {}",
            named.join(", thread ")
        ),
    }
}

/// `blocked for 12.3 s, futex (interruptible)`.
fn doing(thread: &DumpedThread) -> String {
    let mut text = match thread.state {
        DumpedState::Running => "running".to_owned(),
        DumpedState::Runnable => "waiting for a CPU".to_owned(),
        _ => "blocked".to_owned(),
    };
    if let Some(seconds) = thread.waiting_seconds {
        text += if thread.at_least { " for more than " } else { " for " };
        text += &duration(seconds);
    }
    if let Some(reason) = thread.wait_reason {
        text += &format!(", {reason}");
    }
    if let Some(WokenFrom { wait_reason, seconds, at_least }) = thread.woken_from {
        let from = wait_reason.map_or(String::new(), |reason| format!(" from {reason}"));
        let more = if at_least { " more than" } else { "" };
        text += &format!(", woken{from} after{more} {}", duration(seconds));
    }
    match thread.state {
        DumpedState::Interruptible => text += " (interruptible)",
        DumpedState::Uninterruptible => text += " (uninterruptible)",
        DumpedState::Stopped => text += " (stopped)",
        DumpedState::Running | DumpedState::Runnable | DumpedState::Blocked => {}
    }
    match thread.stack_age_seconds {
        Some(age) if age > 0.0 => text += &format!("; seen here {} ago", duration(age)),
        _ => {}
    }
    text
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.2} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        CodeAddress, DumpedFrame, DumpedState, DumpedThread, Suspension, ThreadDump, WokenFrom,
    };
    use super::text;

    fn thread(state: DumpedState, seconds: Option<f64>) -> DumpedThread {
        DumpedThread {
            tid: 8,
            name: "worker".to_owned(),
            role: "app",
            state,
            wait_reason: seconds.map(|_| "futex"),
            waiting_seconds: seconds,
            at_least: false,
            woken_from: None,
            stack_age_seconds: Some(if seconds.is_some() { 0.0 } else { 0.002 }),
            stack: vec![DumpedFrame {
                function: "A.B()".to_owned(),
                module: Some("A".to_owned()),
                code: Some(CodeAddress { target: "7".to_owned(), address: "0x10".to_owned() }),
            }],
            no_stack: None,
        }
    }

    #[test]
    fn each_thread_says_what_it_does_for_how_long_and_where() {
        let woken = WokenFrom { wait_reason: Some("futex"), seconds: 10.0, at_least: true };
        let runnable = thread(DumpedState::Runnable, Some(0.001));
        let threads = vec![
            thread(DumpedState::Interruptible, Some(12.345)),
            thread(DumpedState::Running, None),
            DumpedThread { wait_reason: None, woken_from: Some(woken), ..runnable },
        ];
        let mut out = Vec::new();
        let mut dump = ThreadDump {
            pid: 7,
            process: "shop".to_owned(),
            suspension: None,
            threads_not_reached: 0,
            threads,
        };
        text(&dump, false, &mut out).unwrap();
        let expected = "shop (pid 7), 3 threads\n\
            \n8 \"worker\" (app): blocked for 12.35 s, futex (interruptible)\n    A.B()  [A]\n\
            \n8 \"worker\" (app): running; seen here 2.0 ms ago\n    A.B()  [A]\n\
            \n8 \"worker\" (app): waiting for a CPU for 1.0 ms, woken from futex after more than \
             10.00 s\n    A.B()  [A]\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        text(&dump, true, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), expected.replace("[A]", "[A]  7 0x10"));
        dump.suspension = Some(Suspension { pending: true, held_up_by: vec![8] });
        let mut out = Vec::new();
        text(&dump, false, &mut out).unwrap();
        let said = String::from_utf8(out).unwrap();
        assert!(
            said.contains("suspension: pending.") && said.contains("thread 8 \"worker\""),
            "{said}"
        );
    }
}
