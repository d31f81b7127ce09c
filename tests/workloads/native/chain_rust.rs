//! Two threads in known call chains: one calls all the time, the other sleeps. Built by `rustc -O`,
//! which keeps no frame pointers.

use std::fs;
use std::hint::black_box;
use std::io::{BufRead as _, stdin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

static STOPPING: AtomicBool = AtomicBool::new(false);

#[inline(never)]
fn tiny(x: u32) -> u32 {
    black_box(x).wrapping_mul(3)
}

// Each uses its callee's result after the call, so that none is a tail call.
#[inline(never)]
fn third(x: u32) -> u32 {
    black_box(tiny(x ^ 3)).wrapping_add(x)
}

#[inline(never)]
fn second(items: &mut Vec<u32>, x: u32) -> u32 {
    items[(x % 8) as usize] = x;
    black_box(third(items[3])) + 2
}

#[inline(never)]
fn first(x: u32) -> u32 {
    let mut items = [x; 8].to_vec();
    let mut sum = 0u32;
    for i in 0..1000 {
        sum = sum.wrapping_add(black_box(second(&mut items, i)));
    }
    sum
}

#[inline(never)]
fn work() {
    let mut sum = 0u32;
    while !STOPPING.load(Ordering::Relaxed) {
        sum = sum.wrapping_add(black_box(first(sum)));
    }
    black_box(sum);
}

#[inline(never)]
fn nap_inner() {
    thread::sleep(Duration::from_millis(5));
    black_box(());
}

#[inline(never)]
fn nap() {
    while !STOPPING.load(Ordering::Relaxed) {
        nap_inner();
        black_box(());
    }
}

fn thread_id() -> u32 {
    let link = fs::read_link("/proc/thread-self").expect("no /proc");
    link.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("no thread id")
}

fn main() {
    let (sender, ids) = channel();
    let other = sender.clone();
    let worker = thread::spawn(move || {
        sender.send(("worker", thread_id())).unwrap();
        work();
    });
    let sleeper = thread::spawn(move || {
        other.send(("sleeper", thread_id())).unwrap();
        nap();
    });
    let ids = ids.iter().take(2).map(|(name, id)| format!("\"{name}\":{id}"));
    let ids: Vec<String> = ids.collect();
    let chain = |names: &[&str]| {
        let quoted = names.iter().map(|name| format!("\"chain_rust::{name}\""));
        let quoted: Vec<String> = quoted.collect();
        format!("[[{}]]", quoted.join(","))
    };
    println!(
        "ready {{{},\"chains\":{{\"worker\":{},\"sleeper\":{}}}}}",
        ids.join(","),
        chain(&["work", "first", "second", "third", "tiny"]),
        chain(&["nap", "nap_inner"])
    );
    for line in stdin().lock().lines() {
        if line.is_err() || line.is_ok_and(|line| line == "stop") {
            break;
        }
    }
    STOPPING.store(true, Ordering::Relaxed);
    worker.join().unwrap();
    sleeper.join().unwrap();
    println!("truth {{}}");
}
