//! `perfusion inspect`: what the profiler knows, for a person who doubts a stack.

use crate::cli::InspectUnwindArgs;
use crate::error::Error;
use perfusion_host::process::ProcessTable;
use perfusion_host::process::explain::{AddressExplanation, ExplainError, RuleOrigin};
use perfusion_model::text::clean;
use perfusion_report::ReportError;
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::{Cfa, FrameKind, Register, Rule, Saved};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

/// `perfusion inspect unwind`.
///
/// # Errors
/// When the process or file cannot be read, no code is at the address, or the output cannot be
/// written.
pub fn unwind(options: &InspectUnwindArgs) -> Result<u8, Error> {
    let mut table = ProcessTable::new();
    let pid = options.target.parse::<u32>().ok();
    let mut look = |exact| match pid {
        Some(pid) => table.explain_process(pid, options.address, exact),
        None => table.explain_file(Path::new(&options.target), options.address, exact),
    };
    let (next, call) = match (look(true), look(false)) {
        // The first byte of code, or the byte behind its last: only one of the two can be.
        (Err(ExplainError::NoCode { .. }), Ok(call)) => (None, Some(call)),
        (Ok(next), Err(ExplainError::NoCode { .. })) => (Some(next), None),
        (next, call) => (Some(next?), Some(call?)),
    };
    let text = if options.json {
        json_of(next.as_ref(), call.as_ref())
    } else {
        text_of(next.as_ref(), call.as_ref())
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(ReportError::Write(error).into())
        }
        _ => Ok(0),
    }
}

/// Whether it matters which of the two an address is.
fn differs(next: Option<&AddressExplanation>, call: Option<&AddressExplanation>) -> bool {
    next.map(|e| &e.rule) != call.map(|e| &e.rule)
}

fn text_of(next: Option<&AddressExplanation>, call: Option<&AddressExplanation>) -> String {
    let mut text = String::new();
    for (what, explained) in [("next instruction", next), ("return address", call)] {
        let Some(explained) = explained else { continue };
        if what == "return address" && next.is_some() && !differs(next, call) {
            text.push_str("as a return address: the same\n");
            continue;
        }
        writeln!(text, "as the {what}: {}", place(explained)).ok();
        match &explained.rule {
            Ok(rule) => rule_text(rule, &mut text),
            Err(refusal) => {
                let by = NATIVE.registers.name(NATIVE.frame_pointer);
                writeln!(
                    text,
                    "  no rule         {refusal}; the caller would be guessed by {by} or a search \
                     of the stack, and marked"
                )
                .ok();
            }
        }
        writeln!(text, "  from            {}", origin(explained.origin)).ok();
        if let Some(function) = &explained.function {
            writeln!(text, "  entry covers    {:#x}..{:#x}", function.start, function.end).ok();
        }
        if let Some(method) = explained.method {
            writeln!(text, "  method begins   {method:#x}").ok();
        }
    }
    text
}

fn place(explained: &AddressExplanation) -> String {
    format!("{} at {:#x}", clean(&explained.path), explained.in_file.unwrap_or(explained.looked_up))
}

fn rule_text(rule: &Rule, text: &mut String) {
    if rule.is_thread_start() {
        text.push_str("  no caller       the thread starts here\n");
        return;
    }
    match rule.kind {
        FrameKind::Call => {}
        FrameKind::NewThread => text.push_str(
            "  kind            makes a thread: the new one has no caller, as what is in the return \
             address's place shows\n",
        ),
        FrameKind::Signal => text.push_str(
            "  kind            signal frame: the caller was \
             interrupted\n",
        ),
        FrameKind::Stub { words } => {
            writeln!(
                text,
                "  kind            stub: the first of {words} words that follows a call is the \
                 return address"
            )
            .ok();
        }
    }
    writeln!(text, "  CFA             {}", cfa(rule.cfa)).ok();
    writeln!(text, "  return address  {}", saved(rule.return_address)).ok();
    for (name, how) in NATIVE.registers.names.iter().zip(rule.registers) {
        // What every frame does.
        if how != Saved::Lost && how != Saved::CfaPlus(0) {
            writeln!(text, "  {name:<14}  {}", saved(how)).ok();
        }
    }
}

fn origin(origin: RuleOrigin) -> &'static str {
    match origin {
        RuleOrigin::EhFrame => ".eh_frame",
        RuleOrigin::DebugFrame => ".debug_frame",
        RuleOrigin::SignalReturn => {
            "the signal-return stub's entry in .eh_frame, which ends one instruction before"
        }
        RuleOrigin::Plt => "decoding a procedure linkage table without an entry",
        RuleOrigin::EntryPoint => "the entry point of a program loader, which nothing calls",
        RuleOrigin::Code => "decoding the instructions: no unwind data says it",
        RuleOrigin::Epilogue => "decoding an epilogue",
        RuleOrigin::Hijack => {
            ".eh_frame, corrected: the runtime puts this function in place of a return address"
        }
        RuleOrigin::JitUnwindInfo => "unwind information of JIT-compiled code",
        RuleOrigin::ReadyToRun => "unwind information by the ReadyToRun exception directory",
        RuleOrigin::Stub => "decoding a stub",
        RuleOrigin::None => "nowhere",
    }
}

fn name(register: Register) -> &'static str {
    NATIVE.registers.name(register)
}

/// `rsp + 16`.
fn sum(base: &str, offset: i32) -> String {
    match offset {
        0 => base.to_owned(),
        below if below < 0 => format!("{base} - {}", below.unsigned_abs()),
        above => format!("{base} + {above}"),
    }
}

fn cfa(cfa: Cfa) -> String {
    match cfa {
        Cfa::Register { base, offset } => sum(name(base), offset),
        Cfa::Deref { base, offset, add } => sum(&format!("[{}]", sum(name(base), offset)), add),
    }
}

fn saved(saved: Saved) -> String {
    match saved {
        Saved::Same => "unchanged".to_owned(),
        Saved::Lost => "lost".to_owned(),
        Saved::AtCfa(offset) => format!("[{}]", sum("CFA", offset)),
        Saved::AtRegister { base, offset } => format!("[{}]", sum(name(base), offset)),
        Saved::CfaPlus(offset) => sum("CFA", offset),
        Saved::InRegister(register) => name(register).to_owned(),
    }
}

fn json_of(next: Option<&AddressExplanation>, call: Option<&AddressExplanation>) -> String {
    let one = |explained: Option<&AddressExplanation>| {
        explained.map(|explained| {
            json!({
                "path": clean(&explained.path),
                "looked_up": explained.looked_up,
                "address_in_file": explained.in_file,
                "method_start": explained.method,
                "entry_covers": explained.function.as_ref().map(|range| [range.start, range.end]),
                "origin": explained.origin,
                "refusal": explained.rule.as_ref().err().map(ToString::to_string),
                "rule": explained.rule.as_ref().ok().map(rule_json),
            })
        })
    };
    let all = json!({
        "next_instruction": one(next),
        "return_address": one(call),
        "exact_matters": differs(next, call),
    });
    format!("{all:#}\n")
}

fn rule_json(rule: &Rule) -> Value {
    let registers: serde_json::Map<String, Value> = NATIVE
        .registers
        .names
        .iter()
        .zip(rule.registers)
        .filter(|(_, how)| *how != Saved::Lost)
        .map(|(name, how)| ((*name).to_owned(), saved(how).into()))
        .collect();
    json!({
        "kind": match rule.kind {
            _ if rule.is_thread_start() => "thread_start",
            FrameKind::Call => "call",
            FrameKind::Signal => "signal",
            FrameKind::NewThread => "makes_thread",
            FrameKind::Stub { .. } => "stub",
        },
        "cfa": cfa(rule.cfa),
        "return_address": saved(rule.return_address),
        "registers": registers,
    })
}
