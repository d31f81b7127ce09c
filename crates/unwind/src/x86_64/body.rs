//! (machine code around an address) → rule, for code that has no unwind data at all: musl, and
//! whatever else was built without. Follows the instructions with symbolic values of the registers,
//! both ways:
//!
//! - *onward*, to the function's returns: what the stack pointer and the callee-saved registers
//!   hold at a `ret` is the caller's, by the calling convention (System V ABI x86-64, 3.2.1), so
//!   their values there, in terms of those here, are the rule;
//! - *from the function's start* to here: what it pushed since is the frame. Where that start is
//!   nobody says. It is aligned to 16 and behind padding or the end of another function; and code
//!   that reads a callee-saved register it has not written is in the middle of one.
//!
//! When both say the same it is so. When only one says anything (a function that never returns, or
//! one whose start is not found), the walker must see a call before the return address. When they
//! contradict each other there is no rule.

mod path;
mod text;

use self::path::{CodePath, TrackedValue};
use self::text::{Arrival, CodeBlocks};
use super::X86_64;
use crate::machine::ReadCode;
use crate::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use iced_x86::{FlowControl, Mnemonic, Register as Machine};

/// Most instructions followed onward, and from one start.
const MAX_ONWARD: usize = 2_000;
const MAX_FROM_START: usize = 1_000;
/// Most starts tried, and how far back they are looked for, bytes.
const MAX_STARTS: usize = 24;
const MAX_BACK: u64 = 8 << 10;

/// What the paths onward say.
#[derive(Debug, Default)]
struct Onward {
    /// The rules of the returns that were reached.
    rules: Vec<Rule>,
    /// The code runs straight through a system call into a trap, as that by which a thread ends
    /// itself.
    ends_thread: bool,
    /// A path sets the frame pointer to zero before it calls anything, as a thread's first code
    /// does (ABI 3.4.1).
    begins_thread: bool,
}

fn onward(text: &mut CodeBlocks<'_, '_>, from: u64) -> Onward {
    let mut found = Onward::default();
    text.follow(CodePath::begin(from), MAX_ONWARD, &mut |path, instruction| {
        if instruction.mnemonic() == Mnemonic::Hlt
            && path.system_call
            && !path.branched
            && !path.called
        {
            found.ends_thread = true;
            return Arrival::Enough;
        }
        let zeroes = instruction.mnemonic() == Mnemonic::Xor
            && instruction.op0_register() == instruction.op1_register()
            && instruction.op0_register().full_register() == Machine::RBP;
        found.begins_thread |= zeroes && path.branched && !path.called;
        if instruction.flow_control() != FlowControl::Return || instruction.is_invalid() {
            return Arrival::NotYet;
        }
        if let Some(rule) = returned(path)
            && !found.rules.iter().any(|other| other.cfa == rule.cfa)
        {
            found.rules.push(rule);
        }
        Arrival::Here
    });
    found
}

/// The rule at the beginning of a path that stands at a return.
fn returned(path: &CodePath) -> Option<Rule> {
    let TrackedValue::Register(base, offset) = path.stack_pointer() else { return None };
    let mut rule = X86_64.call(Cfa::Register { base, offset: offset.checked_add(8)? });
    for_callee_saved(&mut rule, |register| match path.registers[register.index()] {
        TrackedValue::Register(same, 0) if same == register => Saved::Same,
        TrackedValue::Word(base, offset) => Saved::AtRegister { base, offset },
        _ => Saved::Lost,
    });
    Some(rule)
}

/// The rule at the end of a path that began with a function's first instruction.
fn entered(path: &CodePath) -> Option<Rule> {
    let below = |base: Register| match path.registers[base.index()] {
        TrackedValue::Register(Register::RSP, moved) => {
            8i32.checked_sub(moved).map(|offset| Cfa::Register { base, offset })
        }
        _ => None,
    };
    let mut rule = X86_64.call(below(Register::RSP).or_else(|| below(Register::RBP))?);
    for_callee_saved(&mut rule, |register| {
        let own = TrackedValue::Register(register, 0);
        if path.registers[register.index()] == own {
            return Saved::Same;
        }
        let kept = path.words.iter().find(|(_, value)| **value == own);
        kept.and_then(|(at, _)| at.checked_sub(8)).map_or(Saved::Lost, Saved::AtCfa)
    });
    Some(rule)
}

fn for_callee_saved(rule: &mut Rule, saved: impl Fn(Register) -> Saved) {
    for place in 0..16 {
        if let Some(register) = Register::at(place).filter(|r| X86_64.registers.is_callee_saved(*r))
        {
            rule.registers[register.index()] = saved(register);
        }
    }
}

/// Places where a function that holds `address` may begin, the nearest first.
fn starts(text: &mut CodeBlocks<'_, '_>, address: u64, exact: bool) -> Vec<u64> {
    // A return address can be the next function's start, where the call was the last thing its own
    // did.
    let aligned = address.saturating_sub(u64::from(!exact)) & !15;
    let nearest = (0..MAX_BACK / 16).filter_map(|back| aligned.checked_sub(back * 16));
    nearest.filter(|start| follows_an_end(text, *start)).take(MAX_STARTS).collect()
}

/// True when the bytes before `start` can be padding, or the end of a function: `ret`, `hlt`, a
/// jump or a call.
fn follows_an_end(text: &mut CodeBlocks<'_, '_>, start: u64) -> bool {
    /// First bytes of those instructions, at their distance from `start`; `nop` has seven lengths
    /// (Intel SDM, volume 2B).
    const ENDS: [(usize, &[u8]); 15] = [
        (1, &[0x90]),
        (1, &[0xcc]),
        (1, &[0xc3]),
        (1, &[0xf4]),
        (2, &[0xeb]),
        (2, &[0xff]),
        (3, &[0x0f, 0x1f, 0x00]),
        (4, &[0x0f, 0x1f, 0x40]),
        (5, &[0x0f, 0x1f, 0x44]),
        (7, &[0x0f, 0x1f, 0x80]),
        (8, &[0x0f, 0x1f, 0x84]),
        (5, &[0xe8]),
        (5, &[0xe9]),
        (6, &[0xff, 0x15]),
        (6, &[0xff, 0x25]),
    ];
    let Some(from) = start.checked_sub(8) else { return false };
    let before = text.bytes(from);
    let Some(before) = before.get(..8) else { return false };
    ENDS.iter().any(|(distance, first)| {
        before.get(before.len() - distance..).is_some_and(|last| last.starts_with(first))
    })
}

/// The rule of the function that begins at `start`, at `address` in it.
fn from_start(text: &mut CodeBlocks<'_, '_>, start: u64, address: u64) -> Option<Rule> {
    let mut rule = None;
    text.follow(CodePath::begin(start), MAX_FROM_START, &mut |path, _| {
        if path.at != address {
            return Arrival::NotYet;
        }
        rule = if path.reads_callers { None } else { entered(path) };
        Arrival::Enough
    });
    rule
}

/// `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov rax, 15` (`__NR_rt_sigreturn`); `syscall`: where a signal handler returns to.
const SIGNAL_RETURN: [u8; 9] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];

/// The rule there: the kernel's `struct rt_sigframe` (arch/x86/include/asm/sigframe.h) without the
/// return address, which was taken off, is on the stack: a `struct ucontext`, whose registers
/// (`struct sigcontext_64`) begin at byte 40.
fn signal_return() -> Rule {
    /// Their order there, by DWARF number: r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp; then
    /// rip.
    const ORDER: [u16; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7];
    let at = |place: i32| Saved::AtRegister { base: Register::RSP, offset: 40 + 8 * place };
    let mut rule = X86_64.frameless();
    rule.kind = FrameKind::Signal;
    for (place, number) in (0..).zip(ORDER) {
        if let Some(register) = Register::at(number) {
            rule.registers[register.index()] = at(place);
        }
    }
    rule.return_address = at(16);
    rule
}

/// The rule of the frame whose next instruction is at `address`. `exact`: it is the next to run;
/// else a call is before it, and there may be nothing of its function behind that.
///
/// # Errors
/// [`RuleRefusal`] when the code does not say, or says it in two ways.
pub fn rule(read: &mut ReadCode<'_>, address: u64, exact: bool) -> Result<Rule, RuleRefusal> {
    let mut text = CodeBlocks::new(read);
    let returns = exact || !text.is_filled(address);
    let onward = if returns { onward(&mut text, address) } else { Onward::default() };
    if onward.ends_thread {
        return Ok(X86_64.thread_start());
    }
    if onward.begins_thread
        && let [rule] = onward.rules.as_slice()
        && address
            .checked_sub(SYSCALL.len() as u64)
            .is_some_and(|before| text.bytes(before).starts_with(&SYSCALL))
    {
        return Ok(Rule { kind: FrameKind::NewThread, ..*rule });
    }
    if text.bytes(address).starts_with(&SIGNAL_RETURN) {
        return Ok(signal_return());
    }
    // A call is made with the stack aligned to 16 (3.2.2), so the frame of a caller is a multiple
    // of that.
    let fits = |rule: &Rule| match rule.cfa {
        Cfa::Register { base: Register::RSP, offset } => offset > 0 && (exact || offset % 16 == 0),
        _ => true,
    };
    let mut entered: Vec<Rule> = Vec::new();
    for start in starts(&mut text, address, exact) {
        if let Some(rule) = from_start(&mut text, start, address).filter(fits)
            && !entered.iter().any(|other| other.cfa == rule.cfa)
        {
            entered.push(rule);
        }
    }
    if text.is_used_up() {
        return Err(RuleRefusal::NoEntry);
    }
    let returned: Vec<Rule> = onward.rules.into_iter().filter(fits).collect();
    let agreed = returned.iter().filter(|onward| entered.iter().any(|rule| rule.cfa == onward.cfa));
    // A start that is none has missed some of the frame.
    let largest =
        |rules: &mut dyn Iterator<Item = &Rule>| rules.max_by_key(|rule| size(rule)).copied();
    let checked = |rule: Rule| Rule { kind: FrameKind::Stub { words: 1 }, ..rule };
    match (agreed.clone().count(), returned.as_slice(), entered.as_slice()) {
        (1, ..) => largest(&mut agreed.clone()),
        (0, [], [nearest, ..]) => Some(checked(*nearest)),
        (0, [only], []) => Some(checked(*only)),
        (0, ..) => None,
        _ => largest(&mut agreed.clone()).map(checked),
    }
    .ok_or(RuleRefusal::NoEntry)
}

/// Bytes from the register a frame is told by to its end.
fn size(rule: &Rule) -> i32 {
    match rule.cfa {
        Cfa::Register { offset, .. } => offset,
        Cfa::Deref { .. } => 0,
    }
}

/// True when `address` is behind the call by which a program's entry point, at `entry`, leaves for
/// good: there is no caller. The ABI (3.4.1) leaves no return address there, and whoever enters
/// aligns the stack first.
pub fn is_behind_entry(read: &mut ReadCode<'_>, entry: u64, address: u64) -> bool {
    /// Instructions of an entry point up to its call.
    const MOST: usize = 24;
    let mut text = CodeBlocks::new(read);
    let (mut at, mut aligned) = (entry, false);
    for _ in 0..MOST {
        let Some(instruction) = text.decode(at) else { return false };
        at = instruction.next_ip();
        match instruction.flow_control() {
            FlowControl::Call | FlowControl::IndirectCall => return aligned && at == address,
            FlowControl::Next => {}
            _ => return false,
        }
        aligned |=
            instruction.mnemonic() == Mnemonic::And && instruction.op0_register() == Machine::RSP;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions};

    const AT: u64 = 0x4000;

    /// The rule at `offset` of code at [`AT`].
    fn at(code: &[u8], offset: u64) -> Result<Rule, RuleRefusal> {
        rule(&mut reader(code), AT + offset, !matches!(offset, 0x34 | 0x6e | 0x2f))
    }

    fn reader(code: &[u8]) -> impl FnMut(u64, &mut [u8]) -> usize {
        move |address, into| {
            // Blocks begin before the code: the test's code stands alone.
            let mut read = 0;
            for (place, byte) in (address..).zip(into) {
                let offset = place.checked_sub(AT).and_then(|o| usize::try_from(o).ok());
                *byte = match offset.map(|offset| code.get(offset)) {
                    Some(Some(byte)) => *byte,
                    Some(None) => break,
                    None => 0xcc,
                };
                read += 1;
            }
            read
        }
    }

    /// musl 1.2.5, `clock_nanosleep`: two ways to a call of a system call, each with words pushed
    /// for it.
    const NANOSLEEP: [u8; 118] = [
        0x83, 0xff, 0x03, 0x74, 0x6b, 0x89, 0xf8, 0x48, 0x83, 0xec, 0x08, 0x49, 0x89, 0xd2, 0x49,
        0x89, 0xcb, 0x09, 0xf0, 0x74, 0x2b, 0x48, 0x83, 0xec, 0x08, 0x48, 0x63, 0xd6, 0x49, 0x89,
        0xc8, 0x48, 0x63, 0xf7, 0x6a, 0x00, 0x4c, 0x89, 0xd1, 0x45, 0x31, 0xc9, 0xbf, 0xe6, 0x00,
        0x00, 0x00, 0xe8, 0xec, 0x97, 0xff, 0xff, 0x5a, 0x59, 0xf7, 0xd8, 0x48, 0x83, 0xc4, 0x08,
        0xc3, 0x0f, 0x1f, 0x00, 0x48, 0x83, 0xec, 0x08, 0x4c, 0x89, 0xd6, 0xbf, 0x23, 0x00, 0x00,
        0x00, 0x45, 0x31, 0xc9, 0x6a, 0x00, 0x45, 0x31, 0xc0, 0x31, 0xc9, 0x4c, 0x89, 0xda, 0xe8,
        0xc2, 0x97, 0xff, 0xff, 0x5e, 0x5f, 0xf7, 0xd8, 0x48, 0x83, 0xc4, 0x08, 0xc3, 0x66, 0x0f,
        0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00, 0xb8, 0x16, 0x00, 0x00, 0x00, 0xc3,
    ];
    /// musl 1.2.5, src/thread/pthread_create.c, `start`: calls the thread's function, then
    /// `pthread_exit`, and never returns.
    const START: [u8; 151] = [
        0x55, 0x53, 0x48, 0x89, 0xfb, 0x48, 0x83, 0xec, 0x08, 0x8b, 0x47, 0x10, 0x85, 0xc0, 0x74,
        0x40, 0x48, 0x8d, 0x6f, 0x10, 0xb8, 0x01, 0x00, 0x00, 0x00, 0xba, 0x02, 0x00, 0x00, 0x00,
        0xf0, 0x0f, 0xb1, 0x57, 0x10, 0x83, 0xe8, 0x01, 0x74, 0x4e, 0x8b, 0x43, 0x10, 0x85, 0xc0,
        0x74, 0x21, 0xb8, 0xda, 0x00, 0x00, 0x00, 0x48, 0x89, 0xef, 0x0f, 0x05, 0xba, 0x3c, 0x00,
        0x00, 0x00, 0x31, 0xff, 0x48, 0x89, 0xd0, 0x0f, 0x05, 0xeb, 0xf9, 0x66, 0x0f, 0x1f, 0x84,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x48, 0x8d, 0x73, 0x18, 0xb8, 0x0e, 0x00, 0x00, 0x00, 0xbf,
        0x02, 0x00, 0x00, 0x00, 0x31, 0xd2, 0x41, 0xba, 0x08, 0x00, 0x00, 0x00, 0x0f, 0x05, 0x48,
        0x8b, 0x7b, 0x08, 0xff, 0x13, 0x48, 0x89, 0xc7, 0xe8, 0x3a, 0xfd, 0xff, 0xff, 0xb9, 0x01,
        0x00, 0x00, 0x00, 0x31, 0xf6, 0x48, 0x89, 0xef, 0xe8, 0xbb, 0xe3, 0xff, 0xff, 0xeb, 0xa1,
        0x66, 0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00, 0x48, 0x89, 0xf8, 0x48, 0x83, 0xec,
        0x08,
    ];
    /// musl 1.2.5, src/thread/x86_64/clone.s.
    const CLONE: [u8; 57] = [
        0x31, 0xc0, 0xb0, 0x38, 0x49, 0x89, 0xfb, 0x48, 0x89, 0xd7, 0x4c, 0x89, 0xc2, 0x4d, 0x89,
        0xc8, 0x4c, 0x8b, 0x54, 0x24, 0x08, 0x4d, 0x89, 0xd9, 0x48, 0x83, 0xe6, 0xf0, 0x48, 0x83,
        0xee, 0x08, 0x48, 0x89, 0x0e, 0x0f, 0x05, 0x85, 0xc0, 0x75, 0x0f, 0x31, 0xed, 0x5f, 0x41,
        0xff, 0xd1, 0x89, 0xc7, 0x31, 0xc0, 0xb0, 0x3c, 0x0f, 0x05, 0xf4, 0xc3,
    ];
    /// glibc 2.36, sysdeps/unix/sysv/linux/x86_64/clone3.S, from the system call on.
    const CLONE3: [u8; 29] = [
        0x0f, 0x05, 0x48, 0x85, 0xc0, 0x7c, 0x18, 0x74, 0x01, 0xc3, 0x31, 0xed, 0x48, 0x83, 0xe4,
        0xf0, 0x4c, 0x89, 0xc7, 0xff, 0xd2, 0x48, 0x89, 0xc7, 0xb8, 0x3c, 0x00, 0x00, 0x00,
    ];

    #[test]
    fn a_frame_is_what_was_pushed_since_the_start() {
        // Behind the call at 0x2f: 8 for itself, 8 for alignment, two words of arguments.
        let rule = at(&NANOSLEEP, 0x34).unwrap();
        assert_eq!(
            (rule.cfa, rule.kind),
            (Cfa::Register { base: Register::RSP, offset: 32 }, FrameKind::Call)
        );
        // At its first instruction, and at its last.
        for (place, offset) in [(0, 8), (0x3c, 8), (0x38, 16)] {
            assert_eq!(
                at(&NANOSLEEP, place).unwrap().cfa,
                Cfa::Register { base: Register::RSP, offset },
                "{place:#x}"
            );
        }
    }

    #[test]
    fn a_function_that_never_returns_is_left_by_what_it_pushed_and_its_caller_is_looked_at() {
        let rule = at(&START, 0x6e).unwrap();
        assert_eq!(rule.cfa, Cfa::Register { base: Register::RSP, offset: 32 });
        assert_eq!(rule.kind, FrameKind::Stub { words: 1 });
        assert_eq!(rule.registers[Register::RBX.index()], Saved::AtCfa(-24));
        assert_eq!(rule.registers[Register::RBP.index()], Saved::AtCfa(-16));
    }

    #[test]
    fn a_thread_starts_where_it_ends_and_has_no_caller_before() {
        let after_syscall = at(&CLONE, 0x25).unwrap();
        assert_eq!(after_syscall.kind, FrameKind::NewThread);
        assert_eq!(after_syscall.cfa, Cfa::Register { base: Register::RSP, offset: 8 });
        assert!(
            at(&CLONE, 0x2f).unwrap().is_thread_start(),
            "behind the call of the thread's function"
        );
        assert_eq!(at(&CLONE3, 2).unwrap().kind, FrameKind::NewThread);
    }

    #[test]
    fn very_much_padding_is_walked_no_further_than_other_code() {
        const CALLS: usize = 60;
        const FIRST: usize = 0x1000;
        const EACH: usize = 8 << 10;
        // push rbp; `jne` to each of the calls; pop rbp; ret.
        let mut code = vec![0x55];
        for call in 0..CALLS {
            code.extend([0x0f, 0x85]);
            code.extend(((FIRST + call * EACH - code.len() - 4) as i32).to_le_bytes());
        }
        code.extend([0x5d, 0xc3]);
        let returns = at(&code, 1).unwrap();
        assert_eq!(returns.cfa, Cfa::Register { base: Register::RSP, offset: 16 });
        code.resize(FIRST, 0xcc);
        for call in 0..CALLS {
            // A call that no code is behind: padding of single bytes up to where a function may
            // begin.
            code.resize(FIRST + call * EACH, 0xc3);
            code.extend([0xe8, 0, 0, 0, 0]);
            code.resize(FIRST + (call + 1) * EACH - 16, 0x90);
        }
        assert_eq!(at(&code, 1), Err(RuleRefusal::NoEntry));
    }

    /// Where there is call frame information, the code must say the same.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn code_says_what_call_frame_information_says() {
        use crate::eh_frame::{CfiSection, UnwindSections};
        use object::{Object as _, ObjectSection as _};

        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .split_whitespace()
            .find(|word| word.contains("/libc.so") || word.contains("/libc-2"))
            .unwrap();
        let data = std::fs::read(libc).unwrap();
        let file = object::File::parse(data.as_slice()).unwrap();
        let section = |name: &str| {
            let section = file.section_by_name(name)?;
            Some(CfiSection { address: section.address(), bytes: section.data().ok()?.into() })
        };
        let unwind = UnwindSections::new(section(".eh_frame_hdr"), section(".eh_frame"), None);
        let text = file.section_by_name(".text").unwrap();
        let (base, code) = (text.address(), text.data().unwrap());
        let mut read = |address: u64, into: &mut [u8]| {
            let from = address
                .checked_sub(base)
                .and_then(|o| code.get(usize::try_from(o).ok()?..))
                .unwrap_or_default();
            let length = from.len().min(into.len());
            into[..length].copy_from_slice(&from[..length]);
            length
        };
        // Where the caller's registers are, from the CFA.
        let places = |rule: &Rule| {
            let Cfa::Register { base, offset } = rule.cfa else { return [None; 16] };
            rule.registers.map(|saved| match saved {
                // Taken off the stack again already, which gcc's tables do not say.
                Saved::AtCfa(at) if base == Register::RSP && at + offset < 0 => Some(0),
                Saved::AtCfa(at) => Some(at),
                Saved::AtRegister { base: by, offset: at } if by == base => at.checked_sub(offset),
                Saved::Same => Some(0),
                _ => None,
            })
        };
        let (mut same, mut right, mut wrong, mut silent) = (0, 0, Vec::new(), 0);
        let mut decoder = Decoder::with_ip(64, code, base, DecoderOptions::NONE);
        for (count, instruction) in decoder.iter().enumerate() {
            // Behind calls, where callers stand, and now and then elsewhere.
            let call = instruction.mnemonic() == Mnemonic::Call;
            if !(call && count % 97 == 0 || count % 1597 == 0) {
                continue;
            }
            let at = instruction.next_ip();
            let Ok(truth) = unwind.rule(at - u64::from(call)) else { continue };
            if truth.rule.kind != FrameKind::Call || truth.rule.is_thread_start() {
                continue;
            }
            let Cfa::Register { base: by, offset } = truth.rule.cfa else { continue };
            let Ok(found) = rule(&mut read, at, !call) else {
                silent += 1;
                continue;
            };
            // What the walker checks before it believes it.
            let checked = matches!(found.kind, FrameKind::Stub { .. });
            match found.cfa {
                // The same place may be told by rsp and by rbp; then they cannot be compared.
                Cfa::Register { base, .. } if base != by => {}
                Cfa::Register { offset: own, .. } if own == offset && !found.is_thread_start() => {
                    let (own, stated) = (places(&found), places(&truth.rule));
                    let kept = |place: usize| own[place].is_none() || own[place] == stated[place];
                    if !checked && !(0..16).all(kept) {
                        wrong.push((at, found, truth.rule));
                    }
                    if checked { right += 1 } else { same += 1 }
                }
                _ if checked => {}
                _ => wrong.push((at, found, truth.rule)),
            }
        }
        // Some of glibc's assembly (`__mpn_mul_1`) pushes registers and does not state it.
        assert!(wrong.len() * 100 <= same, "{same} the same; not the same: {wrong:x?}");
        assert!(
            (same + right) * 100 >= 80 * (same + right + silent),
            "{same} + {right} answers, {silent} times none"
        );
    }
}
