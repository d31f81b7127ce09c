//! Exact times and waits: against schedstat, against each other, and through what moves a thread.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use perfusion_model::event::{Event, EventKind, ThreadProgress, ThreadTimes, WaitStart};
use perfusion_sources::kernel::{KernelOptions, KernelSource};
use system_tests::environment::Need;
use system_tests::wait_until;

use super::{
    DEADLINE, Look, NEEDS, Worker, assert_laws, begin, collect, counters, duty, older_options,
    own_options, records_stored, settled, times, yielding,
};

#[test]
fn thread_times_agree_with_the_kernels_own_and_add_up() {
    let Some(_turn) = begin("capture: thread times", NEEDS) else { return };
    thread_times_agree(&own_options());
}

#[test]
fn thread_times_of_the_probes_for_older_kernels_do_too() {
    let Some(_turn) = begin("capture: thread times, older probes", NEEDS) else { return };
    let Some(options) = older_options() else { return };
    thread_times_agree(&options);
}

fn thread_times_agree(options: &KernelOptions) {
    let workers: Vec<_> = [20, 50, 90]
        .into_iter()
        .map(|percent| (percent, Worker::start(&format!("duty{percent}"), duty(percent))))
        .collect();
    let mut source = KernelSource::start(options).unwrap();
    let mut events = Vec::new();
    // Long enough for the 1 %: an error of a tick at each end is far below it.
    let length = Duration::from_secs(3);
    let tids: Vec<u32> = workers.iter().map(|(_, worker)| worker.tid).collect();
    let first_look = Look::take(&mut source, &tids);
    let start = Instant::now();
    wait_until("the length of the recording", DEADLINE, || {
        collect(&mut source, &mut events);
        (start.elapsed() >= length).then_some(())
    })
    .unwrap();
    let last_look = Look::take(&mut source, &tids);
    for (percent, worker) in &workers {
        let (first, last) = (first_look.ours[&worker.tid], last_look.ours[&worker.tid]);
        let wall = (last.at.0 - first.at.0) as f64;
        let oncpu = (last.times.oncpu_ns - first.times.oncpu_ns) as f64;
        let runnable = (last.times.runnable_ns - first.times.runnable_ns) as f64;
        let blocked = (last.times.blocked_ns - first.times.blocked_ns) as f64;
        let total = last.times.oncpu_ns + last.times.runnable_ns + last.times.blocked_ns;
        assert_eq!(total, last.at.0 - last.times.since.0, "the law is exact");
        let percent_of_wall = |ns: f64| 100.0 * ns / wall;
        let stolen = (last.times.stolen_ns - first.times.stolen_ns) as f64;
        // Schedstat's other column, run_delay, is no measure for ours: the kernel adds a wait when
        // it is over, also what was before the recording, and knows neither of stolen time nor of
        // the time a wake-up takes to reach a CPU the hypervisor has put to sleep.
        let (least, most) = Look::bounds(&first_look, &last_look, worker.tid);
        let figures = format!(
            "duty {percent} %: on CPU {:.2} %, schedstat {:.2} to {:.2} %; runnable {:.2} % \
             (stolen {:.2} %), blocked {:.2} %",
            percent_of_wall(oncpu),
            percent_of_wall(least),
            percent_of_wall(most),
            percent_of_wall(runnable),
            percent_of_wall(stolen),
            percent_of_wall(blocked),
        );
        eprintln!("{figures}");
        assert!(oncpu >= least - 0.01 * wall && oncpu <= most + 0.01 * wall, "{figures}");
        assert!(stolen <= runnable, "{stolen} of {runnable}");
        // What the thread meant to burn it burnt, or waited for a CPU to do so.
        assert!(
            (100.0 * oncpu / wall - *percent as f64).abs() <= 3.0 || runnable > 0.03 * wall,
            "{oncpu} of {wall}"
        );
    }
    // The workers go on while the probes are detached, which takes as long as it takes: nothing of
    // that may be counted.
    let ended = source.freeze();
    for thread in source.thread_times() {
        // A hook that was already past the question whether the recording is over may still finish;
        // a slow machine can hold it up.
        let late = thread.at.0 - ended.0;
        assert!(late < 50_000_000, "{:?} went on for {late} ns after the end", thread.times.thread);
    }
    for (_, worker) in workers {
        worker.stop();
    }
    assert_laws(&settled(&source));
}

#[test]
fn waits_tile_the_time_between_runs() {
    let Some(_turn) = begin("capture: waits", NEEDS) else { return };
    waits_tile_the_time(&own_options());
}

#[test]
fn waits_of_the_probes_for_older_kernels_do_too() {
    let Some(_turn) = begin("capture: waits, older probes", NEEDS) else { return };
    // The program with the wakers' stacks is another one.
    let Some(options) = older_options() else { return };
    waits_tile_the_time(&KernelOptions { waker_stacks: true, ..options });
}

fn waits_tile_the_time(options: &KernelOptions) {
    let worker = Worker::start("sleeper", || thread::sleep(Duration::from_millis(3)));
    let tid = worker.tid;
    let mut source = KernelSource::start(options).unwrap();
    let mut events = Vec::new();
    // clock_nanosleep is call 230 on x86-64. On a busy machine there are waits for a CPU, too.
    let sleeps = |event: &&Event| {
        let of = |wait: &WaitStart| wait.thread.tid == tid && wait.syscall == Some(230);
        matches!(&event.kind, EventKind::WaitStart(wait) if of(wait))
    };
    wait_until("200 sleeps", DEADLINE, || {
        collect(&mut source, &mut events);
        (events.iter().filter(sleeps).count() > 200).then_some(())
    })
    .unwrap();
    let snapshot = times(&mut source)[&tid];
    assert!(matches!(
        snapshot.progress,
        ThreadProgress::Waiting { .. } | ThreadProgress::OnCpu { .. }
    ));
    worker.stop();
    wait_until("the thread's end", DEADLINE, || {
        collect(&mut source, &mut events);
        events
            .iter()
            .any(|event| matches!(&event.kind, EventKind::ThreadEnd(end) if end.thread.tid == tid))
            .then_some(())
    })
    .unwrap();
    events.sort_by_key(|event| event.time);
    let (mut open, mut pairs, mut ran, mut waited) = (None::<(u64, WaitStart)>, 0, 0u64, 0u64);
    let mut slept = Vec::new();
    for event in &events {
        match &event.kind {
            EventKind::WaitStart(wait) if wait.thread.tid == tid => {
                assert!((wait.weight - 1.0).abs() < f64::EPSILON, "no downsampling at this rate");
                ran += wait.ran_ns;
                open = Some((event.time.0, wait.clone()));
            }
            EventKind::WaitEnd(end) if end.thread.tid == tid => {
                let Some((start, wait)) = open.take() else { continue };
                assert_eq!(end.start.0, start);
                assert_eq!(
                    end.blocked_ns + end.runnable_ns,
                    event.time.0 - start,
                    "a wait is blocked or runnable"
                );
                waited += end.blocked_ns + end.runnable_ns;
                pairs += 1;
                if wait.syscall == Some(230) && end.waker.is_some() {
                    slept.push(end.blocked_ns);
                    assert!(!wait.kernel.is_empty());
                }
            }
            EventKind::ThreadEnd(end) if end.thread.tid == tid => {
                // All waits and runs but the one cut by the start are in the totals.
                let total = end.oncpu_ns + end.runnable_ns + end.blocked_ns;
                assert_eq!(total, event.time.0 - end.since.0);
                assert!(end.oncpu_ns >= ran, "{} of {ran}", end.oncpu_ns);
                // The kernel charges a thread from its waking on, so that some us of each wait are
                // in both.
                let both = ran;
                assert!(
                    end.runnable_ns + end.blocked_ns + both >= waited,
                    "{end:?}: {waited}, {ran}"
                );
            }
            _ => {}
        }
    }
    assert!(pairs >= 200 && slept.len() >= 190, "{pairs} pairs, {} sleeps", slept.len());
    // The timer is set before the switch-out: on a slow machine a good part of the 3 ms is over by
    // then, and all of them where something else takes the CPU just there.
    let short = slept.iter().filter(|blocked_ns| **blocked_ns < 1_000_000).count();
    assert!(short * 20 <= slept.len(), "{slept:?}");
    assert_laws(&settled(&source));
}

#[test]
fn downsampled_waits_weigh_what_they_stand_for() {
    let Some(_turn) = begin("capture: downsampling", NEEDS) else { return };
    let workers: Vec<_> = (0..4).map(|_| yielding()).collect();
    let budget = 2 << 20;
    let options = KernelOptions { wait_stack_budget_bytes_per_s: budget, ..own_options() };
    let mut source = KernelSource::start(&options).unwrap();
    let mut events = Vec::new();
    let start = Instant::now();
    let length = Duration::from_secs(3);
    wait_until("the length of the recording", DEADLINE, || {
        collect(&mut source, &mut events);
        (start.elapsed() >= length).then_some(())
    })
    .unwrap();
    for worker in workers {
        worker.stop();
    }
    let counters = wait_until("an empty ring", DEADLINE, || {
        collect(&mut source, &mut events);
        let counters = counters(&source);
        (counters["records_read"] == records_stored(&counters)).then_some(counters)
    })
    .unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let (mut weight, mut variance, mut bytes) = (0.0, 0.0, 0);
    for event in &events {
        if let EventKind::WaitStart(wait) = &event.kind {
            weight += wait.weight;
            variance += wait.weight * (wait.weight - 1.0);
            bytes += wait.user.as_ref().map_or(0, |user| user.stack.len()) + wait.kernel.len() * 8;
        }
    }
    let waits = counters["waits"] as f64;
    eprintln!(
        "{waits} waits, {} kept, weights sum to {weight:.0} (σ {:.0}); {:.2} MiB/s of stacks, \
         budget {:.2}",
        counters["waits_stored"],
        variance.sqrt(),
        bytes as f64 / seconds / 1048576.0,
        budget as f64 / 1048576.0
    );
    assert!(counters["waits_downsampled"] > counters["waits_stored"], "{counters:?}");
    // Unbiased: within five standard deviations (a chance of 1 in 1.7 million to fail).
    assert!((weight - waits).abs() <= 5.0 * variance.sqrt() + 1.0, "{weight} for {waits} waits");
    assert!((bytes as f64) < 2.0 * budget as f64 * seconds, "{bytes} bytes in {seconds} s");
    assert_laws(&counters);
}

#[test]
fn a_thread_that_calls_execve_ends_with_its_program_and_goes_on_under_the_processs_id() {
    const PROGRAM: &str = "import os, threading, time\n\
        threading.Thread(target=lambda: (time.sleep(0.2), os.execv('/bin/sleep', ['sleep', \
         '0.2']))).start()\n\
        time.sleep(9)";
    let Some(_turn) =
        begin("capture: exec by a thread", &[Need::Root, Need::Btf, Need::Program("python3")])
    else {
        return;
    };
    let mut source = KernelSource::start(&own_options()).unwrap();
    let mut child = Command::new("python3").args(["-c", PROGRAM]).spawn().unwrap();
    let pid = child.id();
    assert!(child.wait().unwrap().success());
    let mut events = Vec::new();
    // 200 ms, but for what passes between the look at the clock and the sleep.
    let slept = |end: &ThreadTimes| end.blocked_ns >= 150_000_000;
    let (ends, left) =
        wait_until("the ends of the caller and of the new program", DEADLINE, || {
            collect(&mut source, &mut events);
            let ends = events.iter().filter_map(|event| match &event.kind {
                EventKind::ThreadEnd(end) if end.thread.pid == pid => Some((event.time, *end)),
                _ => None,
            });
            let ends: Vec<_> = ends.collect();
            let (left, _) = *ends.iter().find(|(_, end)| end.thread.tid != pid && slept(end))?;
            let last = ends
                .iter()
                .any(|(_, end)| end.thread.tid == pid && end.since >= left && slept(end));
            last.then_some((ends, left))
        })
        .unwrap();
    for (at, end) in &ends {
        assert_eq!(end.oncpu_ns + end.runnable_ns + end.blocked_ns, at.0 - end.since.0);
    }
    // The first thread slept until it had to go. (`python3` may be a script that becomes other
    // programs first.)
    let first =
        ends.iter().rfind(|(at, end)| end.thread.tid == pid && end.since < left && *at <= left);
    assert!(first.is_some_and(|(_, end)| end.blocked_ns >= 100_000_000), "{ends:?}");
    // Whatever time the caller has under its new id begins where that under its old one ends.
    let goes_on = ends.iter().filter(|(_, end)| end.thread.tid == pid && end.since >= left);
    assert_eq!(goes_on.map(|(_, end)| end.since).min(), Some(left), "{ends:?}");
    assert!(
        times(&mut source).values().all(|thread| thread.times.thread.pid != pid),
        "an entry is left"
    );
    assert_laws(&settled(&source));
}
