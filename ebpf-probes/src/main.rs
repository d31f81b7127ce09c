//! Entry points of the probes, and nothing else. Built only for the bpf target by
//! `cargo xtask build`.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod config;
mod emit;
mod iter;
mod log;
mod machine;
mod maps;
mod process;
mod rename;
mod sample;
mod sampler;
mod sched;
mod span;
mod unwind;

use aya_ebpf::macros::{btf_tracepoint, perf_event};
use aya_ebpf::programs::{BtfTracePointContext, PerfEventContext};
use core::ffi::c_void;

#[perf_event]
fn cpu_sample(ctx: PerfEventContext) -> u32 {
    sample::cpu_sample::<true>(&ctx);
    0
}

#[btf_tracepoint(function = "sched_switch")]
fn sched_switch(ctx: BtfTracePointContext) -> i32 {
    sched::switch::<true>(&ctx);
    0
}

#[btf_tracepoint(function = "sched_waking")]
fn sched_waking(ctx: BtfTracePointContext) -> i32 {
    sched::waking::<true>(&ctx);
    0
}

#[btf_tracepoint(function = "sched_wakeup_new")]
fn sched_wakeup_new(ctx: BtfTracePointContext) -> i32 {
    sched::wakeup_new(&ctx);
    0
}

#[btf_tracepoint(function = "sched_process_fork")]
fn sched_process_fork(ctx: BtfTracePointContext) -> i32 {
    process::fork(&ctx);
    0
}

#[btf_tracepoint(function = "sched_process_exec")]
fn sched_process_exec(ctx: BtfTracePointContext) -> i32 {
    process::exec(&ctx);
    0
}

#[btf_tracepoint(function = "sched_process_free")]
fn sched_process_free(ctx: BtfTracePointContext) -> i32 {
    process::free(&ctx);
    0
}

#[btf_tracepoint(function = "task_rename")]
fn task_rename(ctx: BtfTracePointContext) -> i32 {
    rename::renamed(&ctx);
    0
}

/// Shows what the kernel's measuring adds to a run (`kernel.bpf_stats_enabled`): loaded for
/// `cargo xtask bench` alone.
#[btf_tracepoint(function = "sched_switch")]
fn nothing(_ctx: BtfTracePointContext) -> i32 {
    0
}

// The hooks that take stacks, for kernels before 5.17: without `bpf_loop`, a callback for which
// they refuse a program even where it is never reached (before 5.13), so that no setting can rule
// it out; and without what came between 5.10 and then. All stacks are copied.

#[perf_event]
fn copying_sample(ctx: PerfEventContext) -> u32 {
    sample::cpu_sample::<false>(&ctx);
    0
}

#[btf_tracepoint(function = "sched_switch")]
fn copying_switch(ctx: BtfTracePointContext) -> i32 {
    sched::switch::<false>(&ctx);
    0
}

#[btf_tracepoint(function = "sched_waking")]
fn copying_waking(ctx: BtfTracePointContext) -> i32 {
    sched::waking::<false>(&ctx);
    0
}

/// Called by the kernel for each thread while the daemon reads the iterator; sleepable (aya has no
/// macro for that).
#[unsafe(link_section = "iter.s/task")]
#[unsafe(no_mangle)]
extern "C" fn off_cpu_threads(ctx: *mut c_void) -> i32 {
    iter::scan(ctx);
    0
}

/// Helpers such as `bpf_ringbuf_output` are for programs with a GPL-compatible licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
