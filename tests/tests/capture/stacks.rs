//! Registers, copies of the stack and kernel stacks: against what was put there.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::thread::JoinHandleExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use perfusion_model::event::{CpuSample, Event, EventKind, UserContext};
use perfusion_sources::kernel::{KernelOptions, KernelSource};
use system_tests::wait_until;

use super::{
    DEADLINE, NEEDS, Worker, assert_laws, begin, collect, counters, older_options, own_options,
    settled, spin,
};

/// Words that no code puts on a stack by chance.
fn marked_stack(marker: u64, seed: &AtomicU32) -> u64 {
    let words = [marker; 64];
    std::hint::black_box(&words);
    let mut sum = 0u64;
    for _ in 0..200_000 {
        sum = sum.wrapping_add(u64::from(seed.load(Ordering::Relaxed)));
    }
    std::hint::black_box(&words);
    sum
}

fn marker_words(user: &UserContext, marker: u64) -> usize {
    user.stack.as_chunks::<8>().0.iter().filter(|word| u64::from_ne_bytes(**word) == marker).count()
}

#[test]
fn samples_carry_the_registers_and_the_stack_of_that_moment() {
    let Some(_turn) = begin("capture: samples", NEEDS) else { return };
    samples_of_that_moment(own_options());
}

#[test]
fn samples_of_the_probes_for_older_kernels_do_too() {
    let Some(_turn) = begin("capture: samples, older probes", NEEDS) else { return };
    let Some(options) = older_options() else { return };
    samples_of_that_moment(options);
}

fn samples_of_that_moment(options: KernelOptions) {
    const MARKER: u64 = 0x1e55_0ff5_7ac4_c0de;
    /// As much as there may be.
    const LIMIT: u32 = 64 << 10;
    let worker = Worker::start("marked", || {
        std::hint::black_box(marked_stack(MARKER, &AtomicU32::new(1)));
    });
    let tid = worker.tid;
    let stack = mapping(worker.stack);
    // The C library's own data of the thread, to which the thread pointer leads, end the stack.
    let stack_end = worker.handle.as_pthread_t();
    assert!(stack.contains(&stack_end));
    let options = KernelOptions { stack_copy_bytes: LIMIT, ..options };
    let mut source = KernelSource::start(&options).unwrap();
    let begun = Instant::now();
    let (mut events, mut first) = (Vec::new(), None);
    let of_thread = |event: &Event| match &event.kind {
        EventKind::CpuSample(sample) if sample.thread.tid == tid => Some(sample.clone()),
        _ => None,
    };
    let samples: Vec<CpuSample> = wait_until("100 samples of a busy thread", DEADLINE, || {
        collect(&mut source, &mut events);
        let samples: Vec<_> = events.iter().filter_map(of_thread).collect();
        first = first.or_else(|| (!samples.is_empty()).then(|| begun.elapsed()));
        (samples.len() >= 100).then_some(samples)
    })
    .unwrap();
    eprintln!("first sample of a busy thread {first:?} after the start");
    let code = executable_ranges();
    let mut marked = 0;
    for sample in &samples {
        assert_eq!(sample.thread.pid, std::process::id());
        assert!(sample.comm.starts_with(b"marked\0"), "{:?}", sample.comm);
        let user = sample.user.as_ref().expect("a user thread has user registers");
        let rsp = user.regs.gpr[7];
        assert!(stack.contains(&rsp), "rsp {rsp:#x} outside {stack:x?}");
        assert!(
            code.iter().any(|range| range.contains(&user.regs.ip)),
            "ip {:#x} is no code",
            user.regs.ip
        );
        let copied = user.stack.len() as u64;
        assert!(
            copied == (stack_end - rsp).min(LIMIT.into()),
            "{copied} of {rsp:#x}..{stack_end:#x}"
        );
        assert_eq!(user.limited, copied == u64::from(LIMIT));
        marked += usize::from(marker_words(user, MARKER) >= 64);
    }
    worker.stop();
    assert!(
        marked >= samples.len() * 9 / 10,
        "{marked} of {} samples show the marked words",
        samples.len()
    );
    assert_laws(&settled(&source));
}

/// The mapping of this process that holds an address.
fn mapping(address: u64) -> std::ops::Range<u64> {
    ranges(|_| true).into_iter().find(|range| range.contains(&address)).unwrap()
}

fn executable_ranges() -> Vec<std::ops::Range<u64>> {
    ranges(|rights| rights.contains('x'))
}

fn ranges(wanted: impl Fn(&str) -> bool) -> Vec<std::ops::Range<u64>> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let hex = |text| u64::from_str_radix(text, 16).ok();
            wanted(words.next()?).then_some(hex(start)?..hex(end)?)
        })
        .collect()
}

#[test]
fn the_copy_ends_at_the_limit_and_says_so() {
    let Some(_turn) = begin("capture: limit of the copy", NEEDS) else { return };
    let worker = Worker::start("shallow", || spin(Duration::from_millis(1)));
    let options = KernelOptions { stack_copy_bytes: 200, ..own_options() };
    let mut source = KernelSource::start(&options).unwrap();
    let mut events = Vec::new();
    let tid = worker.tid;
    wait_until("a sample", DEADLINE, || {
        collect(&mut source, &mut events);
        events.iter().find_map(|event| match &event.kind {
            EventKind::CpuSample(CpuSample { thread, user: Some(user), .. })
                if thread.tid == tid =>
            {
                assert_eq!((user.stack.len(), user.limited), (200, true));
                Some(())
            }
            _ => None,
        })
    })
    .unwrap();
    worker.stop();
    assert!(counters(&source)["stack_limited"] > 0);
}

#[test]
fn kernel_stacks_lead_from_the_scheduler_to_the_system_call() {
    let Some(_turn) = begin("capture: kernel stacks", NEEDS) else { return };
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    let worker = Worker::start("reader", move || {
        reader.read_exact(&mut [0]).unwrap();
    });
    let tid = worker.tid;
    let mut source = KernelSource::start(&own_options()).unwrap();
    let mut events = Vec::new();
    let wait = wait_until("a wait in read", DEADLINE, || {
        writer.write_all(b".").unwrap();
        collect(&mut source, &mut events);
        events.iter().find_map(|event| match &event.kind {
            EventKind::WaitStart(wait) if wait.thread.tid == tid && wait.syscall == Some(0) => {
                Some(wait.clone())
            }
            _ => None,
        })
    })
    .unwrap();
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap();
    let mut symbols: Vec<(u64, &str)> = symbols
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some((u64::from_str_radix(words.next()?, 16).ok()?, words.nth(1)?))
        })
        .collect();
    symbols.sort_unstable();
    let name = |address: u64| {
        symbols[symbols.partition_point(|&(start, _)| start <= address).max(1) - 1].1
    };
    let names: Vec<&str> = wait.kernel.iter().map(|&address| name(address)).collect();
    eprintln!("{names:?}");
    for part in ["schedule", "anon_pipe_read", "vfs_read", "do_syscall_64"] {
        assert!(
            names.iter().any(|name| name.contains(part)
                || (part == "anon_pipe_read" && name.contains("pipe_read"))),
            "no {part} in {names:?}"
        );
    }
    worker.stop.store(true, Ordering::Relaxed);
    writer.write_all(b"..").unwrap();
    worker.stop();
}
