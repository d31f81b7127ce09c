//! Show 4: how much time each thread had, waited for a CPU and was blocked: exact, whatever the sampling rate.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use system_tests::environment::{RECORD_NET9, begin};
use system_tests::perfusion::record_pid;
use system_tests::wait::let_pass;
use system_tests::{Profile, Runtime, Workload};

/// Nanoseconds on a CPU of each thread, by /proc/PID/task/TID/schedstat.
fn schedstat(pid: u32) -> BTreeMap<u32, i64> {
    let mut times = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let path = entry.unwrap().path();
        let tid = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        let oncpu = fs::read_to_string(path.join("schedstat"))
            .ok()
            .and_then(|text| text.split(' ').next()?.parse().ok());
        if let (Some(tid), Some(oncpu)) = (tid, oncpu) {
            times.insert(tid, oncpu);
        }
    }
    times
}

/// One look at schedstat of every thread.
struct Look {
    /// Wall-clock time before it and after it; ns.
    taken: (i64, i64),
    oncpu: BTreeMap<u32, i64>,
}

/// What schedstat said of every thread from time to time. Kept in the background, so that any interval can be cut out later.
struct SchedstatLog {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Look>>,
}

impl SchedstatLog {
    fn start(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut log = Vec::new();
            loop {
                // Asked before the last look, so that one comes after everything the caller did.
                let last = stopping.load(Ordering::Relaxed);
                let begin = wall_clock_ns();
                let oncpu = schedstat(pid);
                log.push(Look { taken: (begin, wall_clock_ns()), oncpu });
                if last {
                    return log;
                }
                let_pass(Duration::from_millis(10));
            }
        });
        Self { stop, thread }
    }

    fn stop(self) -> Vec<Look> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn wall_clock_ns() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as i64
}

/// Least and most time a thread can have had on a CPU at a moment: what the last look before it and the first after it said.
fn oncpu_at(log: &[Look], tid: u32, moment: i64) -> (i64, i64) {
    let before = log.iter().rfind(|look| look.taken.1 <= moment).expect("no look before the recording");
    let after = log.iter().find(|look| look.taken.0 >= moment).expect("no look after the recording");
    (before.oncpu[&tid], after.oncpu[&tid])
}

struct Times {
    oncpu: i64,
    runnable: i64,
    blocked: i64,
    wall: i64,
}

fn times(profile: &Profile, tid: u32) -> Times {
    let tid = tid.to_string();
    let sum = |column| profile.sum(column, |sample| sample.label("thread_id") == tid);
    Times { oncpu: sum("cpu"), runnable: sum("runnable"), blocked: sum("blocked"), wall: sum("wall") }
}

#[test]
fn duty_cycles_and_the_sum_of_states_and_schedstat_agree() {
    let Some(_turn) = begin("threads::duty_cycles", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "dutycycle", &[]).unwrap().start().unwrap();
    // The promise is stated over 10 s.
    let length = Duration::from_secs(10);
    let log = SchedstatLog::start(app.pid());
    let (profile, outcome) = record_pid(app.pid(), length, &[]).unwrap();
    let log = log.stop();
    let threads: Vec<(i64, u32)> =
        [20, 50, 90].map(|percent| (percent, app.thread(&format!("duty-{percent}")))).to_vec();
    let truth = app.stop().unwrap();
    let duration = profile.duration_ns as f64;
    // Started and written around the recording; the profile says how long it was itself.
    assert!((duration / 1e9 - 10.0).abs() < 0.5, "{duration} ns:\n{}", outcome.stderr);

    for (percent, tid) in threads {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let share = oncpu as f64 / duration;
        let own = truth[format!("cpu_ns_{percent}")].as_f64().unwrap()
            / truth[format!("wall_ns_{percent}")].as_f64().unwrap();
        let picture = format!(
            "duty-{percent}: on-CPU {oncpu} + runnable {runnable} + blocked {blocked} ns, wall {wall}, recording {duration} ns; by its own clocks {own:.4}"
        );
        // 3 points, as promised. On a machine with too few CPUs a thread cannot have its duty, nor the same one in each second (its own
        // figure covers some seconds more than the recording): then schedstat below is the judge alone.
        if (own - percent as f64 / 100.0).abs() < 0.01 {
            assert!((share - own).abs() < 0.03, "{picture}");
            assert!((share - percent as f64 / 100.0).abs() < 0.03, "{picture}");
        } else {
            eprintln!("the machine is too busy for a duty of {percent} %: {picture}");
        }
        // The law of D2.
        let sum = (oncpu + runnable + blocked) as f64;
        assert!((sum - duration).abs() <= duration * 0.01, "{picture}");
        assert!(
            (wall as f64 - sum).abs() <= sum * 0.001,
            "the wall column is the sum of the three: {picture}"
        );
        // 1 % as promised, beyond what the looks around the two ends leave open; schedstat itself moves on only with the scheduler's tick,
        // of at most 10 ms.
        let begin = oncpu_at(&log, tid, profile.time_ns);
        let end = oncpu_at(&log, tid, profile.time_ns + profile.duration_ns);
        let (least, most) = ((end.0 - begin.1) as f64, (end.1 - begin.0) as f64);
        assert!(
            oncpu as f64 >= least * 0.99 - 10e6 && oncpu as f64 <= most * 1.01 + 10e6,
            "schedstat says {least} to {most}: {picture}"
        );
    }
}

#[test]
fn every_thread_of_the_process_adds_up_to_its_time() {
    let Some(_turn) = begin("threads::every_thread_adds_up", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "waits", &[]).unwrap().start().unwrap();
    let before: Vec<u32> = schedstat(app.pid()).into_keys().collect();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let after = schedstat(app.pid());
    // Threads that were there all the time, asleep or not: a sleeper that never switched is found only by looking.
    let all: Vec<u32> = before.into_iter().filter(|tid| after.contains_key(tid)).collect();
    assert!(all.len() > 8, "{all:?}");
    for tid in all {
        let Times { oncpu, runnable, blocked, wall } = times(&profile, tid);
        let sum = oncpu + runnable + blocked;
        let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", app.pid())).unwrap_or_default();
        assert!(
            (sum - profile.duration_ns).abs() * 100 <= profile.duration_ns,
            "{} {tid}: {oncpu} + {runnable} + {blocked} = {sum} (wall {wall}), recording {} ns",
            name.trim(),
            profile.duration_ns
        );
    }
    app.stop().unwrap();
}
