//! Kernel symbols from `/proc/kallsyms`, by blazesym. The table is parsed per batch and dropped
//! again: it costs some 20 MB, and after the first window new kernel addresses are rare. A
//! recording of one window parses it while it records ([`ReadAhead`]).

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};
use perfusion_model::event::Wake;
use perfusion_model::event::WakeOrigin;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, Sender};

/// The name of each address, `None` where there is none (or where the kernel hides its addresses).
#[must_use]
pub fn names(addresses: &[u64]) -> Vec<Option<String>> {
    if addresses.is_empty() { Vec::new() } else { look_up(&symbolizer(), addresses) }
}

fn symbolizer() -> Symbolizer {
    Symbolizer::builder().enable_code_info(false).enable_inlined_fns(false).build()
}

fn look_up(symbolizer: &Symbolizer, addresses: &[u64]) -> Vec<Option<String>> {
    // kallsyms has modules and BPF programs too, and is already relocated; a vmlinux would only add
    // lines.
    let source = Source::Kernel(Kernel {
        vmlinux: MaybeDefault::None,
        debug_syms: false,
        ..Kernel::default()
    });
    let found = match symbolizer.symbolize(&source, Input::AbsAddr(addresses)) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "kernel symbols not read: /proc/kallsyms");
            return vec![None; addresses.len()];
        }
    };
    let name = |symbol: Symbolized<'_>| symbol.into_sym().map(|symbol| symbol.name.into_owned());
    found.into_iter().map(name).collect()
}

/// The table of a batch that is still to come: who waits for the end of a short program does not
/// wait for 60 ms of parsing too.
#[derive(Debug)]
pub struct ReadAhead {
    ask: Sender<Vec<u64>>,
    answer: Receiver<Vec<Option<String>>>,
}

impl ReadAhead {
    /// A batch to come, and what answers it: to be run by a thread of its own, which keeps the
    /// table until the batch is answered or given up.
    pub fn new() -> (Self, impl FnOnce() + Send) {
        let (ask, asked) = mpsc::channel::<Vec<u64>>();
        let (say, answer) = mpsc::channel();
        let read = move || {
            let symbolizer = symbolizer();
            // Any address has the table read.
            look_up(&symbolizer, &[u64::MAX]);
            if let Ok(addresses) = asked.recv() {
                // Whoever asked may be gone.
                say.send(look_up(&symbolizer, &addresses)).ok();
            }
        };
        (Self { ask, answer }, read)
    }

    /// Names of the batch, as [`names`] has them.
    #[must_use]
    pub fn names(self, addresses: &[u64]) -> Vec<Option<String>> {
        let asked = self.ask.send(addresses.to_vec());
        // Its thread has panicked, or could not be made.
        asked.ok().and_then(|()| self.answer.recv().ok()).unwrap_or_else(|| names(addresses))
    }
}

/// What a function on a waker's kernel stack says about the wake-up.
const SITES: [(&str, WakeOrigin); 17] = [
    // Timers (kernel/time/): what runs when one expires, and what wakes sleepers then.
    ("__hrtimer_run_queues", WakeOrigin::Timer),
    ("call_timer_fn", WakeOrigin::Timer),
    ("__run_timers", WakeOrigin::Timer),
    ("hrtimer_interrupt", WakeOrigin::Timer),
    ("hrtimer_wakeup", WakeOrigin::Timer),
    ("process_timeout", WakeOrigin::Timer),
    ("run_posix_cpu_timers", WakeOrigin::Timer),
    // The thread's own doing: a system call, a fault, or the softirqs that a thread runs itself
    // when it enables them again, which is how the sender of a packet to this same host wakes its
    // receiver (kernel/softirq.c).
    ("__local_bh_enable_ip", WakeOrigin::Thread),
    ("entry_SYSCALL_64_after_hwframe", WakeOrigin::Thread),
    ("asm_exc_page_fault", WakeOrigin::Thread),
    ("kthread", WakeOrigin::Thread),
    // Interrupts (arch/x86/kernel/irq.c; also all `sysvec_…`) and the softirqs after them.
    ("common_interrupt", WakeOrigin::Interrupt),
    ("asm_common_interrupt", WakeOrigin::Interrupt),
    ("__irq_exit_rcu", WakeOrigin::Interrupt),
    ("irq_exit_rcu", WakeOrigin::Interrupt),
    ("run_ksoftirqd", WakeOrigin::Interrupt),
    ("handle_irq_event", WakeOrigin::Interrupt),
];

/// Where in the kernel's text wake-ups come from.
#[derive(Debug, Default)]
pub struct WakeSites {
    /// First and end address of a function of [`SITES`], in order.
    sites: Vec<(u64, u64, WakeOrigin)>,
}

impl WakeSites {
    /// Reads the kernel's symbols.
    #[must_use]
    pub fn read() -> Self {
        std::fs::read("/proc/kallsyms").map(|text| Self::parse(&text)).unwrap_or_default()
    }

    fn parse(text: &[u8]) -> Self {
        let mut sites = Vec::new();
        let mut open: Option<(u64, WakeOrigin)> = None;
        // Sorted by address, as far as the kernel's own text goes; modules follow and have nothing
        // of ours.
        for line in text.split(|&byte| byte == b'\n') {
            let Some((address, kind, name)) = symbol_line(line) else { continue };
            if let Some((start, origin)) = open
                && address > start
            {
                sites.push((start, address, origin));
                open = None;
            }
            if open.is_none() && address != 0 && matches!(kind, b't' | b'T') {
                // A function can be split and cloned by the compiler: `name.part.0`, `name.isra.0`.
                let name = name.split('.').next().unwrap_or(name);
                let site = SITES.iter().find(|(site, _)| *site == name).map(|&(_, origin)| origin);
                let vector = name.strip_prefix("asm_").unwrap_or(name).starts_with("sysvec_");
                open = site
                    .or(vector.then_some(WakeOrigin::Interrupt))
                    .map(|origin| (address, origin));
            }
        }
        sites.sort_unstable_by_key(|site| site.0);
        Self { sites }
    }

    /// Where a wake-up came from: the innermost frame of its kernel stack that says it, and where
    /// all of it is there and none does, the thread that ran. `None` when that is not known.
    #[must_use]
    pub fn origin(&self, wake: &Wake) -> Option<WakeOrigin> {
        let of = |&address: &u64| {
            // A return address can be the first one behind the function.
            let address = address.saturating_sub(1);
            let next = self.sites.partition_point(|site| site.0 <= address);
            let &(_, end, origin) = self.sites.get(next.checked_sub(1)?)?;
            (address < end).then_some(origin)
        };
        let found = wake.kernel.iter().find_map(of);
        // The kernel hides its symbols, or gave no stack. Without the thread's own stack a wake-up
        // is told of only where it is not plain that the thread did it.
        let hidden = (self.sites.is_empty() || wake.kernel.is_empty()) && wake.by.is_none();
        found.or((!wake.cut && !hidden).then_some(WakeOrigin::Thread))
    }
}

/// `ffffffff81000000 T name`, and ` [module]` behind for a module's.
fn symbol_line(line: &[u8]) -> Option<(u64, u8, &str)> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    let address = u64::from_str_radix(words.next()?, 16).ok()?;
    let kind = *words.next()?.as_bytes().first()?;
    Some((address, kind, words.next()?))
}

/// The running kernel's build id, from `/sys/kernel/notes` (the same note an ELF file has).
#[must_use]
pub fn build_id() -> Option<&'static [u8]> {
    // It stays the same, and each profile of each window asks.
    static BUILD_ID: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    BUILD_ID.get_or_init(|| build_id_in_notes(&std::fs::read("/sys/kernel/notes").ok()?)).as_deref()
}

/// Finds `NT_GNU_BUILD_ID` (3) of owner `GNU` in ELF notes.
fn build_id_in_notes(mut notes: &[u8]) -> Option<Vec<u8>> {
    let word = |bytes: &[u8], at: usize| -> Option<usize> {
        let word: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_ne_bytes(word)).ok()
    };
    loop {
        let (owner_len, len, kind) = (word(notes, 0)?, word(notes, 4)?, word(notes, 8)?);
        let owner = notes.get(12..12usize.checked_add(owner_len)?)?;
        let start = 12usize.checked_add(owner_len.checked_next_multiple_of(4)?)?;
        let description = notes.get(start..start.checked_add(len)?)?;
        if kind == 3 && owner == b"GNU\0" {
            return Some(description.to_vec());
        }
        notes = notes.get(start.checked_add(len.checked_next_multiple_of(4)?)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfusion_model::event::MonotonicNs;

    #[test]
    fn finds_the_build_id_among_notes_and_survives_any_cut() {
        let mut notes = Vec::new();
        for (kind, owner, description) in
            [(1u32, &b"Linux\0"[..], &[9u8][..]), (3, b"GNU\0", &[1, 2, 3, 4, 5])]
        {
            notes.extend(u32::try_from(owner.len()).unwrap().to_ne_bytes());
            notes.extend(u32::try_from(description.len()).unwrap().to_ne_bytes());
            notes.extend(kind.to_ne_bytes());
            for part in [owner, description] {
                notes.extend(part);
                notes.resize(notes.len().next_multiple_of(4), 0);
            }
        }
        assert_eq!(build_id_in_notes(&notes), Some(vec![1, 2, 3, 4, 5]));
        for cut in 0..notes.len() - 3 {
            assert_eq!(build_id_in_notes(&notes[..cut]), None);
        }
    }

    #[test]
    fn the_innermost_known_function_says_where_a_wake_up_came_from() {
        let text =
            b"1000 T try_to_wake_up\n1100 t hrtimer_wakeup\n1100 T alias\n1200 T futex_wake\n\
            1300 T common_interrupt.cold\n1400 T entry_SYSCALL_64_after_hwframe\n1500 T next\n";
        let sites = WakeSites::parse(text);
        let origin = |kernel: &[u64]| sites.origin(&wake(kernel)).unwrap();
        assert_eq!(origin(&[0x1010, 0x1110, 0x1310, 0x1410]), WakeOrigin::Timer);
        assert_eq!(origin(&[0x1010, 0x1310]), WakeOrigin::Interrupt);
        assert_eq!(origin(&[0x1010, 0x1210, 0x1410, 0x1310]), WakeOrigin::Thread);
        assert_eq!(origin(&[0x1200]), WakeOrigin::Timer, "a return address behind the last call");
        assert_eq!(sites.origin(&wake(&[])), None);
        assert_eq!(WakeSites::parse(b"0000000000000000 T hrtimer_wakeup\nx y\n\xff\n").sites, []);
    }

    fn wake(kernel: &[u64]) -> Wake {
        Wake { tid: 1, start: MonotonicNs(0), kernel: kernel.to_vec(), cut: false, by: None }
    }

    #[test]
    fn a_stack_that_is_cut_before_anything_says_where_a_wake_up_came_from_is_nobodys() {
        let sites =
            WakeSites::parse(b"1000 T try_to_wake_up\n1100 t hrtimer_wakeup\n1200 T tcp_v4_rcv\n");
        let cut = |kernel: &[u64]| Wake { cut: true, ..wake(kernel) };
        assert_eq!(sites.origin(&cut(&[0x1010, 0x1210])), None);
        assert_eq!(sites.origin(&wake(&[0x1010, 0x1210])), Some(WakeOrigin::Thread));
        assert_eq!(sites.origin(&cut(&[0x1010, 0x1110])), Some(WakeOrigin::Timer));
        // A kernel that hides its symbols: it was not plainly the thread that ran, or its stack
        // would say the same.
        assert_eq!(WakeSites::default().origin(&wake(&[0x1010])), None);
    }

    #[test]
    fn an_address_outside_the_kernel_has_no_name() {
        assert_eq!(names(&[]), Vec::<Option<String>>::new());
        assert_eq!(names(&[0x1000]), [None]);
    }
}
